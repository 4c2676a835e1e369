"""What travels beside a call: the caller's context going in, the stamp coming out.

One set of names for HTTP headers, gRPC metadata and (the stamp) the protocol's response parameters. Deadlines are
remaining milliseconds on the wire and monotonic inside. Leaves the body to `oip_json` and `oip_grpc`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote, unquote

import msgspec

from common.errors import InvalidInput
from common.request import DEFAULT_TENANT, Context, Parameter, Priority, Privacy, Reason, Stamp, new_id
from common.transport.tenants import ANY_CALLER, Caller

REQUEST_ID = "x-outrider-request-id"
DEADLINE_MS = "x-outrider-deadline-ms"
PRIORITY = "x-outrider-priority"
PRIVACY = "x-outrider-privacy"
PIN = "x-outrider-pin"
TENANT = "x-outrider-tenant"  # from one process of ours to the next: others show a key
TRACEPARENT = "traceparent"
ATTEMPT = "x-outrider-attempt"

TARGET = "x-outrider-target"
REASON = "x-outrider-reason"
MODEL = "x-outrider-model"
VERSION = "x-outrider-version"
BY = "x-outrider-by"

_REASONS = {r.value: r for r in Reason}
_PRIVACIES = {p.value: p for p in Privacy}
_LOWEST = max(Priority)
_PRIORITIES = {p.name.lower(): p for p in Priority} | {str(p.value): p for p in Priority}
_MAX_ATTEMPTS = 8  # a node, a gateway and one more try make 3
_NO_DEADLINE_S = 1e9  # 30 years and more are as good as none, and are nothing to hand to timers and to other libraries
_PRINTABLE = "".join(chr(c) for c in range(0x20, 0x7F) if c != ord("%"))
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a call says about itself outside of the headers: in its URL or message, and by its transport."""

    id: str = ""
    version: str = ""
    parameters: Mapping[str, Parameter] | None = None
    remaining_s: float = math.inf  # the transport's own deadline


def read_context(headers: Mapping[str, str], said: Said, now: float, *, caller: Caller = ANY_CALLER) -> Context:
    """The caller's context at monotonic time `now`. Raises `InvalidInput` that names the header or the parameter.

    The smaller of the deadlines that are set counts. A priority in the headers goes before the protocol's parameter.
    The tenant is the caller's. Another tenant's name and the hop's reason are believed from our own processes only.
    """
    parameters = said.parameters or {}
    remaining_s = min(_deadline_s(headers), _timeout_s(parameters), said.remaining_s)
    return Context(
        id=_request_id(headers, said) or new_id(),
        tenant=caller.tenant_of(headers.get(TENANT, "")),
        priority=_priority(headers, parameters),
        deadline=now + remaining_s if remaining_s < _NO_DEADLINE_S else math.inf,
        privacy=_privacy(headers),
        pin=_pin(headers, said.version),
        traceparent=_traceparent(headers),
        reason=_reason(headers) if caller.is_hop else None,
        attempt=_attempt(headers),
    )


def joined(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Fields that come several times as one, comma-separated, in both transports (RFC 9110, 5.3)."""
    values: dict[str, str] = {}
    for name, value in fields:
        name = name.lower()
        values[name] = f"{values[name]}, {value}" if name in values else value
    return values


def write_context(context: Context, now: float) -> dict[str, str]:
    """The context as headers for the next process. The pinned version travels in the message itself."""
    headers = {
        REQUEST_ID: context.id,
        PRIORITY: context.priority.name.lower(),
        PRIVACY: context.privacy.value,
    }
    if context.tenant != DEFAULT_TENANT:
        headers[TENANT] = context.tenant
    if (remaining_s := context.deadline - now) < _NO_DEADLINE_S:
        headers[DEADLINE_MS] = f"{max(0.0, remaining_s) * 1000:.3f}"
    if context.attempt != 1:
        headers[ATTEMPT] = str(context.attempt)
    if context.reason is not None:
        headers[REASON] = context.reason.value
    if context.traceparent:
        headers[TRACEPARENT] = context.traceparent
    return headers


@functools.lru_cache(maxsize=1024)  # a process answers with a handful of stamps
def write_stamp(stamp: Stamp) -> dict[str, str]:
    """The stamp as headers: `x-outrider-reason` only when the answer left the edge; no header is empty.

    The same dictionary for the same stamp: to be read and copied, never changed.
    """
    values = {
        TARGET: stamp.target,
        REASON: stamp.reason.value if stamp.reason else "",
        MODEL: stamp.model,
        VERSION: stamp.version,
        BY: stamp.by,
    }
    return {name: quote(value, safe=_PRINTABLE) for name, value in values.items() if value}


def read_stamp(headers: Mapping[str, str], model: str, version: str) -> Stamp:
    """The stamp of a peer's answer; `model` and `version` as its message said them, for a peer that does not stamp."""
    return Stamp(
        target=unquote(headers.get(TARGET, "")),
        model=unquote(headers.get(MODEL, "")) or model,
        version=unquote(headers.get(VERSION, "")) or version,
        by=unquote(headers.get(BY, "")),
        reason=_REASONS.get(headers.get(REASON, "")),
    )


def _request_id(headers: Mapping[str, str], said: Said) -> str:
    if REQUEST_ID in headers:
        if not _ID.fullmatch(headers[REQUEST_ID]):
            raise InvalidInput(REQUEST_ID, "not an id", "1 to 128 printable ASCII characters without spaces")
        return headers[REQUEST_ID]
    return said.id if said.id and _ID.fullmatch(said.id) else ""


def _deadline_s(headers: Mapping[str, str]) -> float:
    if DEADLINE_MS not in headers:
        return math.inf
    text = headers[DEADLINE_MS]
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", text, re.ASCII):
        raise InvalidInput(
            DEADLINE_MS, f"{text[:40]!r} is no duration", "remaining milliseconds, a decimal number >= 0"
        )
    return float(text) / 1000


def _timeout_s(parameters: Mapping[str, Parameter]) -> float:
    timeout = parameters.get("timeout", 0)
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 0:
        raise InvalidInput(
            "parameters.timeout", f"{timeout!r} is no duration", "microseconds, an integer >= 0; 0: none"
        )
    return timeout / 1e6 if timeout else math.inf


def _priority(headers: Mapping[str, str], parameters: Mapping[str, Parameter]) -> Priority:
    level = parameters.get("priority", 0)
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level <= _LOWEST:
        raise InvalidInput("parameters.priority", f"{level!r} is no priority", f"0 (default) to {_LOWEST}")
    if PRIORITY in headers:
        text = headers[PRIORITY].lower()
        if text not in _PRIORITIES:
            raise InvalidInput(PRIORITY, f"{text[:40]!r} is no priority", ", ".join(_PRIORITIES))
        return _PRIORITIES[text]
    return Priority(level) if level else Priority.INTERACTIVE


def _privacy(headers: Mapping[str, str]) -> Privacy:
    """Fail closed: of several values, the strictest counts."""
    if PRIVACY not in headers:
        return Privacy.ANY
    said = []
    for text in headers[PRIVACY].lower().split(","):
        if text.strip() not in _PRIVACIES:
            raise InvalidInput(PRIVACY, f"{text[:40]!r} is no privacy", ", ".join(_PRIVACIES))
        said.append(_PRIVACIES[text.strip()])
    return Privacy.DEVICE_ONLY if Privacy.DEVICE_ONLY in said else Privacy.ANY


def _pin(headers: Mapping[str, str], version: str) -> str | None:
    if PIN not in headers:
        return version or None
    pin = unquote(headers[PIN])
    if not pin.isprintable():  # bytes that are no UTF-8 among them
        raise InvalidInput(PIN, f"{pin[:40]!r} is no version", "a version as answers are stamped with")
    if pin and version and pin != version:
        raise InvalidInput(PIN, f"asks for version {pin!r}, the call itself for {version!r}", "the same version")
    return pin or version or None


def _attempt(headers: Mapping[str, str]) -> int:
    """Counted on by every hop: gateways that name each other as workers would pass a call round for ever."""
    if ATTEMPT not in headers:
        return 1
    text = headers[ATTEMPT]
    if not (text.isascii() and text.isdigit() and len(text) <= 3 and int(text) >= 1):
        raise InvalidInput(ATTEMPT, f"{text[:40]!r} is no count", f"an integer, 1 to {_MAX_ATTEMPTS}")
    if int(text) > _MAX_ATTEMPTS:
        raise InvalidInput(
            ATTEMPT,
            f"the call was passed on {text} times: gateways that call each other, or a node that is its own gateway",
            f"at most {_MAX_ATTEMPTS}",
        )
    return int(text)


def _traceparent(headers: Mapping[str, str]) -> str:
    """Passed on when it is one; a broken one is dropped, as the W3C recommendation has it."""
    if TRACEPARENT not in headers:
        return ""
    text = headers[TRACEPARENT]
    return text if len(text) <= 256 and _TRACEPARENT.fullmatch(text) else ""


def _reason(headers: Mapping[str, str]) -> Reason | None:
    if REASON not in headers:
        return None
    text = headers[REASON]
    if text not in _REASONS:
        raise InvalidInput(REASON, f"{text[:40]!r} is no reason", ", ".join(_REASONS))
    return _REASONS[text]
