"""The configuration reference, made from the code: ``python -m common.reference examples > docs/config.md``.

Walks the commands that are installed. A command that reads a TOML file names the dataclass of that file (`reads`, a
default of its parser, as ``module:Class``), so nothing here imports the packages above. Raises `Undescribed` for
a key or a flag that says nothing of itself.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import cli
from common.config_keys import Key, keys
from common.up.status import default_state

ENVIRONMENT = {
    "GRPC_VERBOSITY": "What gRPC's own C library writes to stderr; `NONE` unless it is set to something else.",
    "XDG_STATE_HOME": "`outrider up` and `outrider status` keep their state in `$XDG_STATE_HOME/outrider` "
    "(default: `~/.local/state/outrider`) unless `--state` names another folder.",
    "AWS_ENDPOINT_URL": "Where the S3 of `s3://bucket/prefix` is, if it is not Amazon's (`AWS_ENDPOINT` does as "
    "well); the other `AWS_` variables (keys, region) are read as by any S3 client. Credentials come from there alone.",
    "AWS_ENDPOINT": "As `AWS_ENDPOINT_URL`, where that is not set.",
    "OUTRIDER_API_KEY": "The key that `edge.client` shows with its calls where its `api_key` argument is not given.",
}
_UNITS = {
    "_s": "seconds",
    "_ms": "milliseconds",
    "_us": "microseconds",
    "_bytes": "bytes",
    "_rows": "rows",
    "_port": "port",
    "_share": "share",
}
ORDER = ("node", "gateway", "worker", "service", "model")
_INTRO = """# Configuration reference

Made from the code by `make docs`; a test fails while this file says something else. Do not edit it by hand.

One TOML file per process. Every key is checked before anything starts: an unknown key, a wrong type or a value out of
range is an error that gives the full path of the key and what is accepted, and the process ends with exit code 2.
`--check` reads the file, says what it thinks of it and ends.

Times, sizes and counts carry their unit in the key's name: `_s` seconds, `_ms` milliseconds, `_us` microseconds,
`_bytes` bytes, `_rows` rows. Relative paths are relative to the working folder of the process; in `model.toml` to the
file itself.
"""


_EXIT_CODES = """## Commands

Exit codes: 0 done, 1 an error that is explained on stderr, 2 wrong usage: flags, configuration files.
"""


class Undescribed(Exception):
    """A key or a flag without a description, or without a range where it checks one."""


def files() -> dict[str, tuple[str, type]]:
    """The dataclass of each TOML file by the file's short name, with the first command that reads it."""
    found: dict[str, tuple[str, type]] = {}
    for command, parser in commands(cli.parser()):
        reads = parser.get_default("reads")
        if reads is not None:
            module, _, name = reads.partition(":")
            kind = getattr(importlib.import_module(module), name)
            short = name.removesuffix("Config").removesuffix("Spec").lower()
            found.setdefault(short, (command, kind))
    return dict(sorted(found.items(), key=lambda item: ORDER.index(item[0]) if item[0] in ORDER else len(ORDER)))


def commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that can be run, with its full name and its parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from commands(one)
            return
    yield parser.prog, parser


def reference(examples: Path) -> str:
    parts = [_INTRO]
    parts += [_file(short, command, kind, examples) for short, (command, kind) in files().items()]
    parts.append(_EXIT_CODES)
    parts += [_command(name, parser) for name, parser in commands(cli.parser())]
    rows = [(f"`{name}`", meaning) for name, meaning in ENVIRONMENT.items()]
    parts.append("## Environment variables\n\n" + _table(("variable", "meaning"), rows))
    return "\n".join(parts)


def _file(short: str, command: str, kind: type, examples: Path) -> str:
    said = inspect.cleandoc(kind.__doc__ or "")
    parts = [f"## `{short}.toml`: `{command}`\n"]
    if said and not said.startswith(f"{kind.__name__}("):  # dataclasses write their signature where nothing is said
        parts.append(f"{said}\n")
    parts.append(f"The least that it needs:\n\n{_toml(examples / 'minimal' / f'{short}.toml')}")
    for table, group in itertools.groupby(_by_table(keys(kind)), key=lambda key: key.table):
        title = f"### `[[{table.removesuffix('[]')}]]`\n\n" if table.endswith("[]") else f"### `[{table}]`\n\n"
        rows = [_row(short, key) for key in group]
        parts.append((title if table else "") + _table(("key", "type", "default", "unit, range", "meaning"), rows))
    parts.append(f"### Every key of `{short}.toml`\n\n{_toml(examples / f'{short}.toml')}")
    return "\n".join(parts)


def _by_table(found: Iterator[Key]) -> list[Key]:
    """Tables in the order in which they are first named, the keys of each together."""
    tables: dict[str, list[Key]] = {}
    for key in found:
        tables.setdefault(key.table, []).append(key)
    return [key for group in tables.values() for key in group]


def _row(short: str, key: Key) -> tuple[str, ...]:
    if not key.meaning:
        raise Undescribed(f"{short}.toml: {key.path} has no comment that says what it means")
    unit = next((unit for ending, unit in _UNITS.items() if key.name.endswith(ending)), "")
    between = "" if key.limits is None else f"{_number(key.limits[0])}..{_number(key.limits[1])}"
    default = key.default if key.default in ("required", "none", "see its table") else f"`{key.default}`"
    return (f"`{key.name}`", key.type, default, ", ".join(filter(None, (unit, between))), key.meaning)


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if not (meaning := _help(action)):
            raise Undescribed(f"{name}: {_flag(action)} has no help text that says more than its default")
        rows.append((f"`{_flag(action)}`", _default(action), meaning))
    return f"### `{name}`\n\n" + (_table(("flag", "default", "meaning"), rows) if rows else "No flags.\n")


def _flag(action: argparse.Action) -> str:
    takes = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    if not action.option_strings:
        return str(takes)
    return action.option_strings[0] + ("" if action.nargs == 0 else f" {takes}")


def _default(action: argparse.Action) -> str:
    if action.required or (not action.option_strings and action.nargs is None):
        return "required"
    if action.default is None or action.default is False or action.default == [] or action.nargs == 0:
        return ""
    if action.default == default_state():
        return "`~/.local/state/outrider`"
    default = action.default
    return f"`{','.join(map(str, default)) if isinstance(default, tuple) else default}`"


def _help(action: argparse.Action) -> str:
    """The help text without its default, which has a column of its own."""
    text = action.help or ""
    for said in (" (default: %(default)s)", "(default: %(default)s)", "(default %(default)s)", " (%(default)s)"):
        text = text.replace(said, "")
    return text.strip()


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.15g}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _toml(path: Path) -> str:
    return f"```toml\n{path.read_text(encoding='utf-8')}```\n"


def main(argv: list[str] | None = None) -> int:
    parser: Any = argparse.ArgumentParser(prog="python -m common.reference", description=__doc__)
    parser.add_argument("examples", type=Path, help="the folder with the example files that the reference shows")
    sys.stdout.write(reference(parser.parse_args(argv).examples))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
