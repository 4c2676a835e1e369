"""What an error is on the wire: one table to HTTP and gRPC, and the way back for our own client.

Owns codes, texts and the retry hint. The errors themselves know nothing of transports. What is not an error of ours is
answered with a general text: its traceback belongs in the log, not on the wire.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import grpc

from common.errors import (
    DeadlineExceeded,
    EngineError,
    Forbidden,
    InvalidRequest,
    NotFound,
    OutriderError,
    TargetUnreachable,
    Unauthenticated,
    Unavailable,
)

RETRY_AFTER = "retry-after"
CHALLENGE = {"www-authenticate": 'Bearer realm="outrider"'}  # RFC 6750, 3
RETRY_AFTER_MS = "x-outrider-retry-after-ms"  # between our own processes: a second is long where a queue is short
_MAX_TEXT = 3072  # as gRPC percent-encodes it into a header block, of which clients take 8 KiB

# The first row that fits counts. Rows are (error, HTTP status, gRPC code).
_TABLE: tuple[tuple[type[OutriderError], int, grpc.StatusCode], ...] = (
    (InvalidRequest, 400, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, 401, grpc.StatusCode.UNAUTHENTICATED),
    (Forbidden, 403, grpc.StatusCode.PERMISSION_DENIED),
    (NotFound, 404, grpc.StatusCode.NOT_FOUND),
    (Unavailable, 503, grpc.StatusCode.UNAVAILABLE),
    (DeadlineExceeded, 503, grpc.StatusCode.DEADLINE_EXCEEDED),  # as Triton: the time is over, another call is welcome
    (EngineError, 500, grpc.StatusCode.INTERNAL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """An error as a transport says it. `retry_after_s` is in whole seconds; 0: no hint. `is_ours` is false for a fault
    that nobody foresaw: the transport logs it."""

    http: int
    grpc: grpc.StatusCode
    text: str
    retry_after_s: int = 0
    retry_after_ms: int = 0  # the same, as exact as it is known
    is_ours: bool = True

    @property
    def headers(self) -> dict[str, str]:
        if self.http == 401:
            return CHALLENGE
        return {RETRY_AFTER: str(self.retry_after_s)} if self.retry_after_s else {}

    @property
    def trailers(self) -> dict[str, str]:
        if self.grpc is not grpc.StatusCode.UNAVAILABLE:
            return {}
        return self.headers | {RETRY_AFTER_MS: str(self.retry_after_ms)}


def status_of(exc: BaseException) -> Status:
    for kind, http, code in _TABLE:
        if isinstance(exc, kind):
            wait_s, wait_ms = _wait(exc) if isinstance(exc, Unavailable) else (int(http == 503), 0)
            return Status(http=http, grpc=code, text=_short(str(exc)), retry_after_s=wait_s, retry_after_ms=wait_ms)
    return Status(
        http=500, grpc=grpc.StatusCode.INTERNAL, text="internal error; the server's log has it", is_ours=False
    )


def error_from_grpc(
    code: grpc.StatusCode, text: str, trailing: Mapping[str, str], *, target: str, model: str
) -> OutriderError:
    """The error that a peer (or the connection to it) reported for a call about `model`.

    UNAVAILABLE with a retry hint was said by the peer; without one it is the connection that broke.
    """
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.UNIMPLEMENTED | grpc.StatusCode.OUT_OF_RANGE:
            return InvalidRequest(text)
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(text)
        case grpc.StatusCode.UNAUTHENTICATED:
            return Unauthenticated(text)
        case grpc.StatusCode.PERMISSION_DENIED:
            return Forbidden(text)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(model, f"waiting for {target}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in text:
            return InvalidRequest(f"{target}: {text}")
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.RESOURCE_EXHAUSTED if RETRY_AFTER in trailing:
            return Unavailable(text, retry_after_s=_retry_after_s(trailing))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Unavailable(text)
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return TargetUnreachable(target, text)
        case grpc.StatusCode.INTERNAL if "RST_STREAM" in text:
            return TargetUnreachable(target, text)
        case _:
            return EngineError(model, f"{target}: {text}")


def _short(text: str) -> str:
    """Cut to what a header block holds; every byte outside printable ASCII takes three. What is no Unicode (a quote of
    what a caller sent) is escaped."""
    text = text[: _MAX_TEXT + 1].encode("utf-8", "backslashreplace").decode()
    size = 0
    for at, character in enumerate(text):
        size += 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode())
        if size > _MAX_TEXT:
            return text[:at] + "..."
    return text


def _wait(exc: Unavailable) -> tuple[int, int]:
    """The hint in whole seconds, one at least, and in milliseconds."""
    seconds = exc.retry_after_s if math.isfinite(exc.retry_after_s) else 60.0
    return max(1, math.ceil(seconds)), max(0, math.ceil(seconds * 1000))


def _retry_after_s(trailing: Mapping[str, str]) -> float:
    """Seconds, or (from proxies) an HTTP date; one second for what is neither."""
    if (exact := trailing.get(RETRY_AFTER_MS, "")).isascii() and exact.isdigit():
        return float(exact) / 1000
    text = trailing[RETRY_AFTER]
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return 1.0
