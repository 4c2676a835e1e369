"""gRPC channels of a node to the sync service: plain, or mutual TLS with an identity that changes under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from common.errors import ConfigError, EavesdropRefused, FetchError, IdentityRefused
from sync.proto import sync_pb2, sync_pb2_grpc

if TYPE_CHECKING:
    from pathlib import Path

    from sync.pki.certificates import Facts
    from sync.pki.identity import Credentials, Identity

_TIMEOUT_S: Final = 30.0
_OPTIONS: Final = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
_NOT_OURS: Final = ("CERTIFICATE_VERIFY_FAILED", "is not in peer certificate", "Hostname Verification Check failed")
_IN_TIME: Final = ("has expired", "not yet valid")


class Dialer(Protocol):
    def connect(self, address: str, options: Sequence[tuple[str, Any]]) -> Any:
        """A gRPC channel."""
        ...

    def is_stale(self) -> bool:
        """Whether a channel that is made now would be another one than the last."""
        ...


class PlainDialer:
    def connect(self, address: str, options: Sequence[tuple[str, Any]]) -> Any:
        return grpc.insecure_channel(address, options=options)

    def is_stale(self) -> bool:
        return False


class CertifiedDialer:
    """Mutual TLS with what the identity is at that moment."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._shown: Credentials | None = None

    def connect(self, address: str, options: Sequence[tuple[str, Any]]) -> Any:
        """Raises `FetchError` where there is no identity (yet)."""
        try:
            shown = self._shown = self._identity.current()
        except (ConfigError, IdentityRefused, OSError) as exc:
            raise FetchError("certificate", str(exc)) from exc
        credentials = grpc.ssl_channel_credentials(shown.roots, shown.pem, shown.pem)
        return grpc.secure_channel(address, credentials, options=options)

    def is_stale(self) -> bool:
        try:
            return self._identity.current() is not self._shown
        except (ConfigError, IdentityRefused, OSError):
            return False


def enrol(address: str, node: str, token: str, folder: Path, roots: bytes, *, timeout_s: float = _TIMEOUT_S) -> Facts:
    """Makes a key in `folder` and trades the token for a certificate. Repeatable until it has succeeded.

    Raises `IdentityRefused` where the service refuses, `FetchError` where it cannot be reached (or is another one).
    """
    from sync.pki.identity import Pending

    pending = Pending(folder, node, roots)
    request = sync_pb2.EnrolRequest(request=pending.request(), token=token)
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(roots), options=_OPTIONS) as channel:
        try:
            answer = sync_pb2_grpc.EnrolmentStub(channel).Enrol(request, timeout=timeout_s)
        except grpc.RpcError as exc:
            raise _refused(node, address, exc) from exc
    return pending.finish(answer.certificate)


def renew(identity: Identity, address: str, *, timeout_s: float = _TIMEOUT_S) -> Facts:
    """A new key and its certificate in the place of the old ones. Raises as `enrol`; then the old ones stay."""
    from sync.pki.certificates import new_key, new_request

    key = new_key()
    name = identity.current().facts.name
    with CertifiedDialer(identity).connect(address, _OPTIONS) as channel:
        request = sync_pb2.RenewRequest(request=new_request(key, name))
        try:
            answer = sync_pb2_grpc.SyncStub(channel).Renew(request, timeout=timeout_s)
        except grpc.RpcError as exc:
            raise _refused(name, address, exc) from exc
    return identity.store(key, answer.certificate)


def eavesdropper(what: str, address: str, details: str | None) -> EavesdropRefused | None:
    """The refusal, where gRPC's words say that the other end is not ours."""
    text = details or ""
    return EavesdropRefused(what, address, text.rpartition("OPENSSL_internal:")[2][:200]) if is_stranger(text) else None


def is_stranger(problem: str) -> bool:
    """Whether TLS gave up because the other end is not ours. A wrong clock is another matter."""
    return any(sign in problem for sign in _NOT_OURS) and not any(sign in problem for sign in _IN_TIME)


def _refused(name: str, address: str, exc: Any) -> IdentityRefused | FetchError:
    if exc.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return IdentityRefused(name, f"{address} says: {exc.details()}")
    found = eavesdropper("certificate", address, exc.details())
    return found or FetchError("certificate", f"{exc.code().name} from {address}: {exc.details()}")
