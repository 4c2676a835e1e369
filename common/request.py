"""What travels along the request path: the caller's context, the request, the answer and its stamp.

Owns the domain types only. The wire forms are in `common/transport`, the path itself is in `common/serving`.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping
from enum import IntEnum, StrEnum

import msgspec

from common.tensors import Tensors

IMAGE = "image"  # the name under which any image model takes encoded pictures, whatever its own input is called

Parameter = bool | int | float | str


class Priority(IntEnum):
    """Classes of service, most urgent first. `SLA_S` gives each class's latency target."""

    REALTIME = 1
    INTERACTIVE = 2
    BATCH = 3
    OFFLINE = 4


SLA_S: Mapping[Priority, float] = {
    Priority.REALTIME: 0.2,
    Priority.INTERACTIVE: 0.5,
    Priority.BATCH: 5.0,
    Priority.OFFLINE: math.inf,
}


class Privacy(StrEnum):
    ANY = "any"
    DEVICE_ONLY = "device_only"  # inputs and outputs never leave the device: no fallback, no shared cache


class Reason(StrEnum):
    """Why a request left the edge: the same words in answers, metrics and logs."""

    NO_ENGINE = "no_engine"
    BUILDING = "building"
    ENGINE_ERROR = "engine_error"
    OVERLOAD = "overload"
    DEADLINE = "deadline"
    THROTTLED = "throttled"
    LOW_BATTERY = "low_battery"
    LOW_CONFIDENCE = "low_confidence"
    OUTSIDE_PROFILE = "outside_profile"
    BREAKER_OPEN = "breaker_open"
    ASKED_FOR = "asked_for"


DEFAULT_TENANT = "default"


_PROCESS, _numbers = secrets.token_hex(6), itertools.count(1)


def new_id() -> str:
    """A request's id: random per process, counted within it."""
    return f"{_PROCESS}-{next(_numbers):x}"


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller fixed. Crosses every hop: `deadline` is monotonic here and remaining milliseconds on the wire."""

    id: str = msgspec.field(default_factory=new_id)
    tenant: str = DEFAULT_TENANT
    priority: Priority = Priority.INTERACTIVE
    deadline: float = math.inf  # monotonic seconds
    privacy: Privacy = Privacy.ANY
    pin: str | None = None  # only this version may answer
    traceparent: str = ""  # W3C trace context, passed on as it came
    reason: Reason | None = None  # why the hop before this one passed the request on
    attempt: int = 1  # which dispatch of the call this is, all processes on its way together


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One inference call. Every input's first dimension is the batch.

    `classes` above 0 asks for the best classes of the first output instead of its values (the protocol's
    classification extension). An image model also takes its first input as BYTES [n]: n encoded pictures.
    """

    context: Context = msgspec.field(default_factory=Context)
    model: str
    inputs: Tensors
    outputs: tuple[str, ...] = ()  # requested outputs; empty: all
    classes: int = 0
    parameters: Mapping[str, Parameter] = {}


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer came from: `target` is the kind of place (edge, cache, cloud), `by` the process there."""

    target: str
    model: str
    version: str
    by: str = ""
    reason: Reason | None = None  # set when the answer left the edge
    identity: str = ""  # of the engine in this process that answered (`LoadedEngine`); it does not travel


class Response(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    outputs: Tensors
    stamp: Stamp
