"""What a torch checkpoint's pickle says about its tensors, without unpickling: nothing named in it is imported or run.

The opcodes are decoded by `pickletools`, which executes none, and moved on a stack of inert records. The few calls
that rebuild a tensor from a storage become a `View`; any other class or function is an `Opened` record of what it was
given, so tensors inside foreign objects are found too. Source: torch/serialization.py, torch/_utils.py, pickletools.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

MAX_PICKLE_BYTES: Final = 16 << 20
MAX_STEPS: Final = 1 << 19  # about 32 for each tensor of a state dict; seconds at most
_MAX_PATH: Final = 600

_REBUILDS: Final = {f"torch._utils._rebuild_{name}" for name in ("tensor", "tensor_v2", "tensor_v3", "qtensor")}
_WRAPPERS: Final = {f"torch._utils._rebuild_{name}" for name in ("parameter", "parameter_with_state")}
_BY_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_V3_DTYPE: Final = 6  # the argument of _rebuild_tensor_v3 that names the dtype


class Unreadable(Exception):
    """Not a pickle that this reader follows to its end."""


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function, by its full name only."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    key: str
    kind: str  # torch.FloatStorage, ...


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A tensor: elements of a storage, from `offset` on, by `stride`."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str | None  # torch.float8_e4m3fn, ...; None: what the storage's kind says


@dataclass(slots=True)
class Opened:
    """A list, a dict or any object, as (key, value): None as key where the value has no name."""

    items: list[tuple[Any, Any]] = field(default_factory=list)


def read_views(data: bytes) -> tuple[dict[str, Storage], list[tuple[str, View]]]:
    """The storages by key, and the tensors with their paths ("model.layer.weight"). Raises `Unreadable`."""
    machine = _Machine()
    try:
        root = machine.run(data)
        return machine.storages, list(_walk(root))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as exc:
        raise Unreadable from exc


class _Machine:
    """The pickle machine's stack, with records where it would have objects."""

    def __init__(self) -> None:
        self.storages: dict[str, Storage] = {}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for step, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if step > MAX_STEPS or opcode.name not in _STEPS:
                raise Unreadable
            if opcode.name == "STOP":
                return self._stack.pop()
            _STEPS[opcode.name](self, argument)
        raise Unreadable

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def opened(self, _: object) -> None:
        self.push(Opened())

    def mark(self, _: object) -> None:
        self._marks.append(len(self._stack))

    def discard(self, _: object) -> None:
        self._stack.pop()

    def marked(self) -> list[Any]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def tuple_of_marked(self, _: object) -> None:
        self.push(tuple(self.marked()))

    def tuple_of(self, count: int) -> None:
        items = tuple(self._stack[-count:])
        del self._stack[-count:]
        self.push(items)

    def append(self, items: list[Any]) -> None:
        """To the list, or the object that takes items, on top."""
        known = self._top().items
        known += enumerate(items, len(known))

    def set_items(self, items: list[Any]) -> None:
        self._top().items += zip(items[::2], items[1::2], strict=True)

    def named(self, argument: str) -> None:
        self.push(Named(argument.replace(" ", ".", 1)))

    def named_on_stack(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.push(Named(f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""))

    def call(self, _: object) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self.push(_rebuilt(function, arguments))

    def call_with_keywords(self, _: object) -> None:
        keywords, arguments, _cls = self._stack.pop(), self._stack.pop(), self._stack.pop()
        self.push(Opened([(None, arguments), (None, keywords)]))

    def build(self, _: object) -> None:
        """The state of the object on top; a tensor has none that matters."""
        state = self._stack.pop()
        if isinstance(self._stack[-1], Opened):
            self._stack[-1].items.append((None, state))

    def load_storage(self, _: object) -> None:
        """A persistent id: ("storage", kind, key, location, elements)."""
        tag, kind, key, *_rest = self._stack.pop()
        if tag != "storage" or not isinstance(key, str) or not isinstance(kind, Named):
            raise Unreadable
        self.push(self.storages.setdefault(key, Storage(key=key, kind=kind.name)))

    def put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def get(self, index: int) -> None:
        self.push(self._memo[index])

    def _top(self) -> Opened:
        if not isinstance(self._stack[-1], Opened):
            raise Unreadable
        return self._stack[-1]


_VALUES: Final = (
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip
_Step = Callable[[_Machine, Any], None]
_STEPS: Final[dict[str, _Step]] = {
    **dict.fromkeys(_VALUES, _Machine.push),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), _Machine.opened),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "MEMOIZE"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda machine, argument: None),
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "TUPLE": _Machine.tuple_of_marked,
    "MARK": _Machine.mark,
    "POP": _Machine.discard,
    "POP_MARK": lambda machine, _: machine.marked().clear(),
    "APPEND": lambda machine, _: machine.append([machine._stack.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.marked()),
    "ADDITEMS": lambda machine, _: machine.append(machine.marked()),
    "SETITEM": lambda machine, _: machine.set_items([machine._stack.pop(), machine._stack.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.marked()),
    "GLOBAL": _Machine.named,
    "STACK_GLOBAL": _Machine.named_on_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.call_with_keywords,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.load_storage,
}


def _rebuilt(function: object, arguments: object) -> object:
    """A `View` where the call rebuilds a tensor; what a parameter wraps; otherwise what the call was given."""
    while isinstance(function, Named) and function.name == _BY_TYPE and isinstance(arguments, tuple):
        function, arguments = arguments[0], arguments[2]
    if isinstance(function, Named) and isinstance(arguments, tuple):
        if function.name in _WRAPPERS:
            return arguments[0]
        if function.name in _REBUILDS and (view := _view(function.name, arguments)) is not None:
            return view
    return Opened([(None, arguments)])


def _view(function: str, arguments: tuple[Any, ...]) -> View | None:
    storage, offset, size, stride = arguments[:4]
    numbers = (offset, *size, *stride)
    if not isinstance(storage, Storage) or len(size) != len(stride) or not all(type(n) is int for n in numbers):
        return None
    dtype = arguments[_V3_DTYPE].name if function.endswith("_v3") else None
    return View(storage=storage, offset=offset, size=size, stride=stride, dtype=dtype)


def _walk(root: object) -> Iterator[tuple[str, View]]:
    """Every tensor with its path, in the order of the pickle; each object once, so shared and circular ones end."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        path, value = todo.pop()
        if isinstance(value, View):
            yield path, value
        elif isinstance(value, (tuple, Opened)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items if isinstance(value, Opened) else list(enumerate(value))
            todo += [(_join(path, key), child) for key, child in reversed(items)]


def _join(path: str, key: object) -> str:
    if not isinstance(key, (str, int)):
        return path
    return (f"{path}.{key}" if path else str(key))[:_MAX_PATH]
