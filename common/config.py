"""Configuration files to frozen dataclasses: parsed once at the border, trusted inside.

Unknown keys, wrong types and values out of range are a `ConfigError` that gives the full path of the key and what is
accepted. Also the one place where dataclasses become JSON and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.errors import ConfigError

T = TypeVar("T")


def load_toml(path: Path, kind: type[T]) -> T:
    """Reads a TOML file into the dataclass `kind`."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(str(path), "", f"cannot be read: {exc.strerror}", "a readable TOML file") from exc
    except (ValueError, RecursionError) as exc:  # the parser's own errors, and what it does not foresee
        raise ConfigError(str(path), "", f"is not TOML: {exc}") from exc
    return parse(data, kind, str(path))


def parse(data: Any, kind: type[T], source: str) -> T:
    """Converts plain data to the dataclass `kind`; `source` names the origin in errors."""
    _refuse_unknown_keys(data, kind, source, "")
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as exc:
        raise _config_error(exc, source) from exc


def from_json(data: bytes, kind: type[T], source: str) -> T:
    """Like `parse`, from JSON bytes. Unknown keys are ignored: a newer writer may say more."""
    try:
        return msgspec.json.decode(data, type=kind, strict=True)
    except msgspec.ValidationError as exc:
        raise _config_error(exc, source) from exc
    except msgspec.DecodeError as exc:
        raise ConfigError(source, "", f"is not JSON: {exc}") from exc


def to_json(value: Any, *, indent: int = 0) -> bytes:
    """Deterministic JSON of a dataclass: fields in their order, mappings sorted."""
    data = msgspec.json.encode(value, order="deterministic")
    return msgspec.json.format(data, indent=indent) if indent else data


def _config_error(exc: msgspec.ValidationError, source: str) -> ConfigError:
    text = str(exc)
    found = re.search(r"^(.*) - at `\$?\.?(.*)`$", text, re.DOTALL)
    problem, path = found.groups() if found else (text, "")
    return ConfigError(source, path, problem)


def _refuse_unknown_keys(data: Any, kind: Any, source: str, path: str) -> None:
    """Walks `data` beside the dataclass's fields: the decoder itself ignores keys that it does not know."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(kind):
            if dataclasses.is_dataclass(option) and isinstance(data, dict):
                _refuse_unknown_keys(data, option, source, path)
        return
    if origin in (list, tuple) and isinstance(data, list):
        for i, item in enumerate(data):
            _refuse_unknown_keys(item, typing.get_args(kind)[0], source, f"{path}[{i}]")
        return
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if isinstance(data, dict):
            for key, item in data.items():
                _refuse_unknown_keys(item, typing.get_args(kind)[1], source, f"{path}.{key}" if path else str(key))
        return
    if not dataclasses.is_dataclass(kind) or not isinstance(data, dict):
        return
    hints = typing.get_type_hints(kind)
    known = [field.name for field in dataclasses.fields(kind)]
    for key, item in data.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}? known keys: {', '.join(known)}" if near else ", ".join(known)
            raise ConfigError(source, here, "unknown key", hint)
        _refuse_unknown_keys(item, hints[key], source, here)
