"""A configuration dataclass as a flat list of keys: path, type, default, accepted range and meaning of each.

The meaning of a key is the comment at its field, behind it or in the lines above it; a comment may open with the range
that the dataclass checks (``0..600: seconds to ...``, ``1..: rows ...``). Reads source files: for documentation, and
for the tests that compare what is written there with what the parser does.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

REQUIRED = "required"
_RANGE = re.compile(r"(-?[\d_.]*\d)\.\.(-?[\d_.]*\d)?: ")
_WORDS = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a TOML file. `table` is the path of its table: "" at the top, ``models[]`` in an array of tables,
    ``synthetic.NAME`` where each table has a name of the user's own."""

    table: str
    name: str
    type: str
    default: str  # as TOML writes it, or REQUIRED, or "none" where the key may be left out and then nothing is set
    limits: tuple[float, float | None] | None  # lowest and highest value; None for the highest: any
    meaning: str

    @property
    def path(self) -> str:
        return f"{self.table}.{self.name}" if self.table else self.name


def keys(kind: type, table: str = "", defaults: object = None) -> Iterator[Key]:
    """The keys of the dataclass `kind` in their order, its tables' keys after its own.

    `defaults` is an instance whose values are the defaults here, where the table around it sets its own.
    """
    comments, hints = field_comments(kind), typing.get_type_hints(kind)
    inner: list[Iterator[Key]] = []
    for field in dataclasses.fields(kind):
        hint, is_optional = _without_none(hints[field.name])
        default = _default(field) if defaults is None else getattr(defaults, field.name)
        path = f"{table}.{field.name}" if table else field.name
        below, given = _table(hint), default
        if below is not None and typing.get_origin(hint) is tuple:
            inner.append(keys(below, f"{path}[]"))
        elif below is not None and _is_mapping(typing.get_origin(hint)):
            inner.append(keys(below, f"{path}.NAME"))
        elif below is not None:
            inner.append(keys(below, path, given if dataclasses.is_dataclass(given) else None))
        said = comments.get(field.name, "")
        limits = _RANGE.match(said)
        yield Key(
            table=table,
            name=field.name,
            type=_type(hint),
            default=_text(default, is_table=below is not None, is_optional=is_optional),
            limits=None if limits is None else (float(limits[1]), None if limits[2] is None else float(limits[2])),
            meaning=said if limits is None else said[limits.end() :],
        )
    for one in inner:
        yield from one


@functools.cache
def field_comments(kind: type) -> dict[str, str]:
    """The comment of each field of a class: the lines right above it, then the one behind it."""
    source = textwrap.dedent(inspect.getsource(kind))
    comments, lines = _comments(source), source.splitlines()
    [body] = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        first = node.lineno
        while first - 1 in comments and lines[first - 2].lstrip().startswith("#"):
            first -= 1
        said = [comments[line] for line in range(first, (node.end_lineno or node.lineno) + 1) if line in comments]
        found[node.target.id] = " ".join(said)
    return found


def _comments(source: str) -> dict[int, str]:
    """By line number, without the mark; what only speaks to a linter is left out."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = {token.start[0]: token.string.lstrip("#").strip() for token in tokens if token.type == tokenize.COMMENT}
    return {line: text for line, text in texts.items() if not text.startswith(("noqa", "type:"))}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED


def _text(default: Any, *, is_table: bool, is_optional: bool) -> str:
    if default is None or default == REQUIRED:
        return "none" if default is None else REQUIRED
    if is_table and not is_optional and dataclasses.is_dataclass(default):
        return "see its table"
    if isinstance(default, Mapping):
        return (
            "{ " + ", ".join(f"{name} = {_toml(value)}" for name, value in default.items()) + " }" if default else "{}"
        )
    return _toml(default)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return str(value)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        options = [one for one in typing.get_args(hint) if one is not type(None)]
        if len(options) < len(typing.get_args(hint)):
            return options[0] if len(options) == 1 else typing.Union[tuple(options)], True  # noqa: UP007
    return hint, False


def _table(hint: Any) -> type | None:
    """The dataclass whose keys stand in a table (or in each table of an array) of this type."""
    origin = typing.get_origin(hint)
    if origin is tuple or _is_mapping(origin):
        return _table(typing.get_args(hint)[-1 if _is_mapping(origin) else 0])
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(_toml(one) for one in arguments)
    if origin is typing.Union or origin is types.UnionType:
        return " or ".join(_type(one) for one in arguments)
    if origin in (tuple, list):
        of = _type(arguments[0])
        return "array of tables" if _table(arguments[0]) else f"array of {of}s"
    if _is_mapping(origin):
        return "tables by name" if _table(arguments[1]) else f"table of {_type(arguments[1])}s by name"
    if _table(hint):
        return "table"
    return _WORDS.get(hint, str(getattr(hint, "__name__", hint)))
