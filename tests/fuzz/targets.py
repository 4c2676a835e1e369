"""What is fuzzed in Python, and what must hold of it: a target takes any bytes and returns, or raises what is wrong.

Hashes that stand before a parser are put right first, so that the fuzzer gets behind them. Documented errors are
swallowed here; whatever else comes out is a finding.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.errors import BadRelease, CorruptPack, CorruptSlab, IncompatibleRelease
from sync import codec
from sync.codec import HEADER_BYTES, TableSet, parse_header, parse_object, parse_tables, payload_hash
from sync.codec.forms import compress
from sync.containers import read_layout
from sync.manifests import pack, unpack
from sync.packs import Index, parse_index
from sync.release import Manifest, parse_manifest, read_desired, to_bytes
from sync.slabs import cut
from tests.sync.indexes import manifest_of

MODEL, VERSION = "m", "7"
BASE, TARGET = "11" * 32, "22" * 32
OLD, NEW = (manifest_of([(f"{at}{n}" * 32, 64 << n) for n in range(4)]) for at in (1, 2))
MAX_RAW = 1 << 16  # of a slab that is decoded: larger ones only cost time
TABLES = bytes.fromhex("01 01 00 01 01 02 0100 00ff 922a0a")


def slab(data: bytes) -> None:
    """A header, and `payload | base` behind it: the base is as long as the header says."""
    with contextlib.suppress(CorruptSlab):
        parse_object(data)
    with contextlib.suppress(CorruptSlab):
        first = parse_header(data)
        if first.raw_length > MAX_RAW:
            return
        room = len(data) - HEADER_BYTES
        based = 0 if first.base is None else min(first.raw_length, room)
        payload = data[HEADER_BYTES : len(data) - based]
        base = data[len(data) - based :].ljust(first.raw_length, b"\0")
        repaired = bytearray(data[:HEADER_BYTES])
        repaired[12:16] = len(payload).to_bytes(4, "little")
        repaired[80:88] = payload_hash(payload)
        header = parse_header(bytes(repaired))
        with contextlib.suppress(ValueError):  # before the id is asked, which no fuzzer guesses
            raw = codec._raw(header, memoryview(payload), base, _tables())
            assert len(raw) == header.raw_length, f"{len(raw)} bytes, declared are {header.raw_length}"
        raw = codec.decode(header, payload, base=base, tables=_tables())
        assert len(raw) == header.raw_length


@functools.cache
def _tables() -> TableSet:
    return parse_tables(TABLES)


def tables(data: bytes) -> None:
    with contextlib.suppress(CorruptSlab):
        found = parse_tables(data)
        assert (found.width, found.mantissa) in codec.CTX_KINDS
        assert found.tokens <= {1: 33, 2: 49, 4: 81}[found.width]
        assert max(found.classes, found.bins) <= 64
        assert found.classes * found.bins <= 512
        assert parse_tables(found.to_bytes()).to_bytes() == found.to_bytes(), "a set that is read can be written"


def index(data: bytes) -> None:
    """As it is, and with what is behind the table sets as the entries that are compressed."""
    body = 92 + 12 * int.from_bytes(data[6:8], "little")
    for text in (data, data[:body] + compress(data[body:], 1)):
        with contextlib.suppress(CorruptPack):
            found = parse_index(text + payload_hash(text), base=OLD, target=NEW)
            if found is not None:
                _one_after_the_other(found, int.from_bytes(data[12:20], "little"))


def _one_after_the_other(found: Index, pack_bytes: int) -> None:
    at, slabs, bases = sum(one.length for one in found.tables), NEW.slabs(), OLD.slabs()
    for entry in found.entries:
        assert entry.offset == at, "payloads lie one after the other"
        at += entry.header.payload_length
        slab, base = slabs[entry.header.slab], bases[entry.header.base or ""]
        assert slab.length == base.length == entry.header.raw_length
    assert at == pack_bytes, "the parts are the pack"


def manifest(data: bytes) -> None:
    """JSON, and the same bytes as it would travel."""
    for frame in (data, pack(data), pack(data, TABLES)):
        with contextlib.suppress(ValueError):
            assert len(unpack(frame, most=MAX_RAW)) <= MAX_RAW
        with contextlib.suppress(ValueError):
            assert len(unpack(frame, TABLES, most=MAX_RAW)) <= MAX_RAW
    assert unpack(pack(data, TABLES), TABLES) == data
    with contextlib.suppress(BadRelease, IncompatibleRelease):
        _whole(parse_manifest(data, f"{MODEL}/{VERSION}"))


def _whole(found: Manifest) -> None:
    for file in found.files:
        _each_byte_once(file.size, [piece for one in file.slabs for piece in one.pieces])
        assert not file.path.startswith("/")
        assert ".." not in file.path.split("/")
    assert to_bytes(found)


def desired(data: bytes) -> None:
    """As it is, and with the manifest's path that goes with its version."""
    for text in (data, _with_path(data)):
        with contextlib.suppress(BadRelease, IncompatibleRelease):
            found = read_desired(text, MODEL)
            assert found.model == MODEL
            assert found.epoch >= 1
            assert re.fullmatch("[1-9][0-9]*", found.version)


def _with_path(data: bytes) -> bytes:
    return re.sub(rb'"version":"([^"]*)"(.*)releases/m/[^"]*"', rb'"version":"\1"\2releases/m/\1.json"', data)


def _container(name: str, data: bytes) -> None:
    path = _folder() / name
    path.write_bytes(data)
    layout = read_layout(path)
    spans = [(one.offset, one.length) for one in layout.tensors]
    _each_byte_once(len(data), [*spans, *layout.skeleton()])
    _each_byte_once(len(data), [piece for one in cut(layout) for piece in one.pieces])


def _each_byte_once(size: int, pieces: list[tuple[int, int]]) -> None:
    at = 0
    for offset, length in sorted(pieces):
        assert offset == at, f"piece at {offset} of {length} bytes, expected at {at}"
        assert length > 0
        at += length
    assert at == size, f"{at} bytes of {size}"


@functools.cache
def _folder() -> Path:
    made = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    _KEPT.append(made)
    return Path(made.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []

TARGETS: dict[str, Callable[[bytes], None]] = {
    "slab": slab,
    "tables": tables,
    "index": index,
    "manifest": manifest,
    "desired": desired,
    "safetensors": functools.partial(_container, "f.safetensors"),
    "onnx": functools.partial(_container, "f.onnx"),
    "gguf": functools.partial(_container, "f.gguf"),
    "torch": functools.partial(_container, "f.pt"),
}
CORPUS = Path(__file__).parent / "corpus"
