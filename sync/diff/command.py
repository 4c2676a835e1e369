"""`outrider sync diff` and `outrider sync inspect`: the command lines, and how their answers look. Cheap to import."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from sync.diff.diff import Report
    from sync.diff.file_release import FileRelease
    from sync.diff.inspect_file import Inspected

_MAX_NAME = 64  # a digest is as long
_MAX_FILES = 8  # named in a line


def add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = commands.add_parser("diff", help="what a node that has file A must fetch to have file B")
    diff.add_argument(
        "base", type=Path, metavar="A", help="the file that is there: ONNX, safetensors, GGUF, torch, any"
    )
    diff.add_argument("new", type=Path, metavar="B", help="the file that is wanted")
    diff.add_argument(
        "--json",
        action="store_true",
        help="one line on stdout: raw_bytes, wire_bytes, bound_bytes, forms; the tables go to stderr",
    )
    diff.add_argument(
        "--apply", type=Path, metavar="OUT", help="rebuild B from A and the fetched bytes alone; OUT is replaced"
    )
    diff.set_defaults(run=_diff)


def add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser("inspect", help="what is in a container, an index, a slab object or a manifest")
    inspect.add_argument("file", type=Path, metavar="FILE", help="any of these")
    inspect.add_argument("--json", action="store_true", help="print it as JSON")
    inspect.set_defaults(run=_inspect)


def _diff(args: argparse.Namespace) -> int:
    from sync.diff.diff import diff, manifest_name
    from sync.diff.rebuild import rebuild
    from sync.diff.whole_zstd import compressed_bytes, patch_bytes
    from sync.store import Store

    _check_out(args.apply, args.base, args.new)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cleaning_up_when_terminated())
        base = stack.enter_context(_opened(args.base, "A", 1))
        new = stack.enter_context(_opened(args.new, "B", 2))
        store = None
        if args.apply is not None:
            folder = tempfile.TemporaryDirectory(prefix=".outrider-diff-", dir=args.apply.parent)
            store = Store(Path(stack.enter_context(folder)))
        report = diff(base, new, store=store)
        others = {"zstd -3": compressed_bytes(new.fd), "zstd -3 --patch-from": patch_bytes(new.fd, base.fd)}
        out = sys.stderr if args.json else sys.stdout
        _print_report(out, base, new, report, others)
        if store is not None:
            manifest = store.read(manifest_name(base, new)) or b""
            rebuild(base, manifest, store, args.apply)
            print(f"\n{_printable(str(args.apply))}: rebuilt from A and the fetched bytes, the same as B", file=out)
    if args.json:
        print(
            json.dumps(
                {
                    "raw_bytes": report.raw_bytes,
                    "wire_bytes": report.wire_bytes,
                    "bound_bytes": report.bound_bytes,
                    "forms": dict(report.forms),
                }
            )
        )
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from sync.diff.inspect_file import inspect_file

    with _readable("sync inspect", "FILE", args.file):
        found = inspect_file(args.file)
    if args.json:
        print(json.dumps(found.to_dict()))
    else:
        _print_inspected(args.file, found)
    return 0


@contextlib.contextmanager
def _cleaning_up_when_terminated() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does: nothing is left beside OUT."""

    def end(_number: int, _frame: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _opened(path: Path, name: str, version: int) -> Iterator[FileRelease]:
    from sync.diff.file_release import opened

    with contextlib.ExitStack() as stack:
        with _readable("sync diff", name, path):
            found = stack.enter_context(opened(path, version=version))
        yield found


@contextlib.contextmanager
def _readable(command: str, name: str, path: Path) -> Iterator[None]:
    from common.errors import ConfigError

    if path.exists() and not path.is_file():
        raise ConfigError(command, name, f"{path} is not a regular file", "a file")
    try:
        yield
    except OSError as exc:
        raise ConfigError(command, name, f"{path} cannot be read: {exc.strerror}", "a readable file") from exc


def _check_out(out: Path | None, base: Path, new: Path) -> None:
    """Before minutes of work."""
    from common.errors import ConfigError

    if out is None:
        return
    problem = None
    if not out.parent.is_dir():
        problem = f"{out.parent} is not a folder"
    elif out.exists() and not out.is_file():
        problem = f"{out} is not a regular file"
    elif out.exists() and any(path.exists() and out.samefile(path) for path in (base, new)):
        problem = f"{out} is one of the two files that are compared"
    if problem is not None:
        raise ConfigError("sync diff", "--apply", problem, "the name of a new file in an existing folder")


def _print_report(
    out: TextIO, base: FileRelease, new: FileRelease, report: Report, others: dict[str, int | None]
) -> None:
    from sync.containers import external_files

    for name, one in (("A", base), ("B", new)):
        facts = f"{one.layout.container}, {one.layout.size:,} bytes, {len(one.slabs)} slabs"
        print(f"{name}  {_printable(str(one.path))}  {facts}", file=out)
    if beside := external_files(new.path):
        names = _printable(", ".join(beside[:_MAX_FILES]))
        print(f"B keeps tensors in {names} beside it: not counted here, compare that as well", file=out)
    rows = [
        (
            one.name[:_MAX_NAME],
            one.dtype,
            "x".join(map(str, one.shape)),
            "new" if one.changed is None else f"{100 * one.changed:.2f} %",
            "+".join(one.forms) or "-",
            f"{one.payload_bytes:,.0f}",
            f"{one.bound_bytes:,.0f}",
        )
        for one in report.tensors
    ]
    print(file=out)
    _print_table(out, ("tensor", "dtype", "shape", "changed", "form", "bytes", "limit"), rows, left=(0, 1, 2, 4))
    sizes: list[tuple[str, int | None]] = [("B", report.raw_bytes)]
    sizes += [(f"  {form}", size) for form, size in report.forms.items() if size]
    sizes += [
        ("  table sets", report.table_bytes),
        ("  index", report.index_bytes),
        ("  manifest", report.manifest_bytes),
    ]
    sizes += [("wire", report.wire_bytes), ("limit", report.bound_bytes), *others.items()]
    print(file=out)
    _print_table(out, ("", "bytes", "% of B"), [_size(name, size, report.raw_bytes) for name, size in sizes], left=(0,))


def _size(name: str, size: int | None, raw: int) -> tuple[str, str, str]:
    if size is None:
        return name, "-", "too large"
    return name, f"{size:,}", f"{100 * size / raw:.3f}" if raw else "-"


def _print_inspected(path: Path, found: Inspected) -> None:
    print(f"{_printable(str(path))}  {found.kind}")
    for name, value in found.facts.items():
        print(f"  {name.replace('_', ' ')}: {_printable(_text(value))}")
    if found.rows:
        header = tuple(name.replace("_", " ") for name in found.rows[0])
        rows = [tuple(_text(value)[:_MAX_NAME] for value in row.values()) for row in found.rows]
        left = [number for number, value in enumerate(found.rows[0].values()) if not isinstance(value, int)]
        print()
        _print_table(sys.stdout, header, rows, left=left)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{name} {count:,}" for name, count in value.items()) or "-"
    if isinstance(value, list):
        return ("x" if all(isinstance(one, int) for one in value) else ", ").join(map(str, value)) or "-"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _printable(text: str) -> str:
    """Names come from files: none of them speaks to the terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _print_table(out: TextIO, header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> None:
    lines = [[_printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for row in lines:
        cells = (
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip(), file=out)
