"""A call's arguments, checked as the transports check one from outside: the border of `Node.infer` and of the client.

What is wrong is an `InvalidInput` that names the argument. Above all nothing may pass for less than it says: a privacy
that is not understood is refused, never taken for none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

from common.errors import InvalidInput
from common.request import Context, Parameter, Priority, Privacy, Request
from common.tensors import as_tensor, is_plain, is_text
from common.transport import oip

_PRIORITIES = frozenset(Priority)


def checked_request(
    model: object,
    inputs: object,
    *,
    outputs: object,
    classes: object,
    timeout_s: object,
    priority: object,
    privacy: object,
    pin: object,
    parameters: object,
) -> Request:
    """The request that the arguments of `Node.infer` mean, `timeout_s` from now. Raises `InvalidInput`.

    This is in every call's way: what has plainly the right type is not looked at further.
    """
    name, version = checked_model(model, pin, "pin")
    return Request(
        context=Context(
            priority=priority if type(priority) is Priority else _priority(priority),
            privacy=privacy if type(privacy) is Privacy else _privacy(privacy),
            pin=version,
            deadline=time.monotonic() + checked_seconds(timeout_s),
        ),
        model=name,
        inputs={
            _text(name, "inputs"): value if is_plain(value) else as_tensor(value, f"inputs[{name!r}]")
            for name, value in _mapping(inputs, "inputs", "arrays by input name").items()
        },
        outputs=() if type(outputs) is tuple and not outputs else _names(outputs),
        classes=oip.checked_classes(classes, "classes"),
        parameters={} if parameters is None else _parameters(parameters),
    )


def checked_model(model: object, version: object, where: str) -> tuple[str, str | None]:
    """A model and perhaps a version (the argument `where`). Raises `InvalidInput`, `NotFound` for what can be none."""
    name, pin = _text(model, "model"), "" if version is None else _text(version, where)
    oip.check_model(name, pin)
    return name, pin or None


def checked_seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InvalidInput("timeout_s", f"{value!r:.80} is no duration", "seconds; math.inf: no deadline")
    try:
        return float(value)
    except OverflowError:  # an integer that is no float: as good as none, or long past
        return math.copysign(math.inf, value > 0 or -1)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(where, f"{value!r:.80} of type {type(value).__name__}", "a string")
    if not is_text(value):
        raise InvalidInput(where, f"{value[:40]!r} is not Unicode", "text that UTF-8 can write")
    return value


def _mapping(value: object, where: str, accepted: str) -> Mapping[object, object]:
    if type(value) is not dict and not isinstance(value, Mapping):
        raise InvalidInput(where, f"of type {type(value).__name__}", f"a mapping: {accepted}")
    return value


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise InvalidInput("outputs", f"of type {type(value).__name__}", "a tuple of output names")
    names: list[str] = []
    for name in value:
        names.append(oip.checked_name(_text(name, "outputs"), "outputs", names))
    return tuple(names)


def _priority(value: object) -> Priority:
    if isinstance(value, int) and not isinstance(value, bool) and value in _PRIORITIES:
        return Priority(value)
    raise InvalidInput("priority", f"{value!r:.80} is no priority", ", ".join(f"Priority.{p.name}" for p in Priority))


def _privacy(value: object) -> Privacy:
    try:
        return Privacy(value)  # type: ignore[arg-type]  # what is no string is no privacy
    except ValueError:
        accepted = ", ".join(f"Privacy.{privacy.name}" for privacy in Privacy)
        raise InvalidInput("privacy", f"{value!r:.80} is no privacy", accepted) from None


def _parameters(value: object) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for name, item in _mapping(value, "parameters", "values by name").items():
        where = f"parameters[{name!r:.80}]"
        if isinstance(item, str):
            item = _text(item, where)
        elif not isinstance(item, bool | int | float) or (isinstance(item, int) and not -(1 << 63) <= item < 1 << 64):
            raise InvalidInput(where, f"{item!r:.80}", "a boolean, a string, or a number of 64 bits")
        parameters[_text(name, "parameters")] = item
    return parameters
