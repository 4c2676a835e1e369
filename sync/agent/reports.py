"""Telling the service where this node stands, after each poll. Nothing depends on it: one that fails is forgotten."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from common.errors import OutriderError
from sync.proto import sync_pb2, sync_pb2_grpc

if TYPE_CHECKING:
    from sync.agent.agent import ModelStatus
    from sync.pki.channel import Dialer

logger = logging.getLogger(__name__)
_TIMEOUT_S: Final = 5.0
_OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class Reporter(Protocol):
    """Called from the agent's thread. Never raises."""

    def report(self, models: Sequence[ModelStatus], problem: str | None) -> None: ...
    def close(self) -> None: ...


class NoReports:
    """Nobody listens: the store is a web server, or the node does not want to."""

    def report(self, models: Sequence[ModelStatus], problem: str | None) -> None:
        pass

    def close(self) -> None:
        pass


class GrpcReports:
    """To the sync service at `address`, as the node that `name` says."""

    def __init__(self, address: str, name: Callable[[], str], dialer: Dialer) -> None:
        self._address, self._name, self._dialer = address, name, dialer
        self._channel: grpc.Channel | None = None

    def report(self, models: Sequence[ModelStatus], problem: str | None) -> None:
        try:
            request = sync_pb2.ReportRequest(node=self._name(), models=map(_message, models), problem=problem or "")
            sync_pb2_grpc.SyncStub(self._open()).Report(request, timeout=_TIMEOUT_S)
        except (grpc.RpcError, OutriderError, OSError, ValueError) as exc:
            logger.debug("where this node stands was not told: %s", exc)
            self.close()

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _open(self) -> grpc.Channel:
        if self._channel is not None and self._dialer.is_stale():
            self.close()
        if self._channel is None:
            self._channel = self._dialer.connect(self._address, _OPTIONS)
        return self._channel


def _message(one: ModelStatus) -> sync_pb2.ModelReport:
    return sync_pb2.ModelReport(
        model=one.model,
        state=one.state,
        code=one.code,
        reason=one.reason,
        version=one.version or "",
        active=one.active or "",
        epoch=one.epoch or 0,
    )
