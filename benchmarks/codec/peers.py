"""Other ways from one file to another, on the same pairs: each as its makers mean it to be used, and undone to be sure.

What needs a package of `peers.txt` runs from a folder of its own: a child process has it on its path, this one does
not. A peer whose package is not there, or that fails, has no figure. The child is `python -m benchmarks.codec.peers OLD
NEW NAME ...` and prints a line of JSON per peer.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import zstandard

from benchmarks.codec.files import Tensors, read

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ROOT / "build/peers"
_LIST: Final = Path(__file__).with_name("peers.txt")
_CHUNK_BYTES: Final = 64 << 10
_HASH_BYTES: Final = 32

Peer = Callable[[Path, Path], int]  # bytes that a node with the old file needs to have the new one


def install(folder: Path = PACKAGES) -> None:
    """Each package for itself, without what it depends on: one that does not install is reported, and left out."""
    for line in _LIST.read_text().splitlines():
        name = line.partition("==")[0]
        if line.startswith("#") or any(folder.glob(f"{name}-*")):
            continue
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, line)
        if subprocess.run(pip, capture_output=True, check=False).returncode:
            print(f"{name} does not install here: no figure of it", file=sys.stderr)


def measured(old: Path, new: Path, names: tuple[str, ...], packages: Path | None) -> dict[str, int | None]:
    """Bytes of each peer; None where its package is missing."""
    path = [str(ROOT), *([str(packages)] if packages else []), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = (sys.executable, "-m", "benchmarks.codec.peers", str(old), str(new), *names)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return {line["peer"]: line["bytes"] for line in map(json.loads, done.stdout.splitlines())}


def _zstd(level: int) -> Peer:
    def size(old: Path, new: Path) -> int:
        return len(zstandard.ZstdCompressor(level=level).compress(new.read_bytes()))

    return size


def _patch_from(level: int) -> Peer:
    """What `zstd --patch-from` does: the old file as a prefix, a window over both, long matches on.

    The smaller of two ways: as a dictionary, of which zstd keeps no long-distance table, and in front of the new file
    in one stream, which is what the tool comes to with `--single-thread`.
    """

    def size(old: Path, new: Path) -> int:
        base, raw = old.read_bytes(), new.read_bytes()
        window = max(10, min(31, (len(base) + len(raw)).bit_length()))
        parameters = zstandard.ZstdCompressionParameters.from_level(
            level, window_log=window, enable_ldm=True, source_size=len(raw)
        )
        prefix = zstandard.ZstdCompressionDict(base, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
        packed = zstandard.ZstdCompressor(compression_params=parameters, dict_data=prefix).compress(raw)
        reader = zstandard.ZstdDecompressor(dict_data=prefix, max_window_size=1 << 31)
        _must_be(reader.decompress(packed), raw)
        parameters = zstandard.ZstdCompressionParameters.from_level(level, window_log=window, enable_ldm=True)
        stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        stream.compress(base)
        stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        behind = len(stream.compress(raw)) + len(stream.flush())
        return min(len(packed), behind)

    return size


def _bsdiff(old: Path, new: Path) -> int:
    bsdiff4 = _package("bsdiff4")
    base, raw = old.read_bytes(), new.read_bytes()
    patch = bsdiff4.diff(base, raw)
    _must_be(bsdiff4.patch(base, patch), raw)
    return len(patch)


def _hdiffpatch(old: Path, new: Path) -> int:
    hdiffpatch = _package("hdiffpatch")
    base, raw = old.read_bytes(), new.read_bytes()
    patch = hdiffpatch.diff(base, raw, hdiffpatch.COMPRESSION_LZMA2, validate=False)
    _must_be(hdiffpatch.apply(base, patch), raw)
    return len(patch)


def _xdelta(old: Path, new: Path) -> int:
    pyxdelta = _package("pyxdelta")
    with tempfile.TemporaryDirectory() as folder:
        patch, back = Path(folder) / "patch", Path(folder) / "back"
        pyxdelta.run(infile=str(old), outfile=str(new), patchfile=str(patch))
        pyxdelta.decode(infile=str(old), patchfile=str(patch), outfile=str(back))
        _must_be(back.read_bytes(), new.read_bytes())
        return patch.stat().st_size


def _chunks(old: Path, new: Path) -> int:
    """Content-defined chunks of 64 KB on average: a hash for all, and those that the old file lacks, compressed."""
    cutter = _package("pyfastcdc").FastCDC(avg_size=_CHUNK_BYTES)
    known = {bytes(chunk.data) for chunk in cutter.cut_buf(old.read_bytes())}
    compressor, total = zstandard.ZstdCompressor(level=3), 0
    for chunk in cutter.cut_buf(new.read_bytes()):
        total += _HASH_BYTES
        data = bytes(chunk.data)
        if data not in known:
            known.add(data)
            total += len(compressor.compress(data))
    return total


def _zipnn(old: Path, new: Path) -> int:
    """The exclusive or of both, by element type, each with its own setting (for integers: of single bytes)."""
    make = _package("zipnn").ZipNN
    names = {"uint16": "bfloat16", "float16": "float16", "float32": "float32"}
    total = 0
    for dtype, xored in _xor_by_type(read(old), read(new)).items():
        if xored:
            coder = make(bytearray_dtype=names.get(dtype, "float8_e4m3fn"), input_format="byte", threads=1)
            packed = bytes(coder.compress(bytearray(xored)))
            _must_be(bytes(coder.decompress(packed)), xored)
            total += len(packed)
    return total


def _z4ai(old: Path, new: Path) -> int:
    """Its delta of models: tensor by tensor a copy, an exclusive or, or the tensor itself."""
    delta = _package("z4ai.model_delta")
    base, raw = old.read_bytes(), new.read_bytes()
    packed = delta.compress(raw, base)
    _must_be(bytes(delta.decompress(packed, base)), raw)
    return len(packed)


def _pulse(old: Path, new: Path) -> int:
    """As PULSE (arXiv:2602.03839) does: per tensor the gaps between changed positions in the narrowest type that holds
    them, and the new values; all of it through zstd."""
    before, out = read(old), io.BytesIO()
    for name, values in read(new).items():
        bits = f"u{values.itemsize}"
        raw, base = values.ravel().view(bits), before[name].ravel().view(bits)
        changed = np.flatnonzero(raw != base)
        gaps = np.diff(changed, prepend=-1) - 1
        kind = np.min_scalar_type(int(gaps.max(initial=0)))
        out.write(len(changed).to_bytes(8, "little") + gaps.astype(kind).tobytes() + raw[changed].tobytes())
        back = base.copy()
        back[np.cumsum(gaps.astype(kind).astype(np.int64) + 1) - 1] = raw[changed]
        _must_be(back.tobytes(), raw.tobytes())
    return len(zstandard.ZstdCompressor(level=3).compress(out.getvalue()))


def _xor_by_type(before: Tensors, after: Tensors) -> dict[str, bytes]:
    parts: dict[str, list[bytes]] = {}
    for name, values in after.items():
        raw, base = (np.frombuffer(one.tobytes(), np.uint8) for one in (values, before[name]))
        parts.setdefault(str(values.dtype), []).append((raw ^ base).tobytes())
    return {dtype: b"".join(all_of) for dtype, all_of in parts.items()}


def _must_be(back: bytes, raw: bytes) -> None:
    if back != raw:
        raise ValueError("the peer does not give back what it was given")


def _package(name: str) -> Any:
    """Loaded only where it is used: it may not be installed."""
    return import_module(name)


PEERS: Final[dict[str, Peer]] = {
    "zstd -3": _zstd(3),
    "zstd -19": _zstd(19),
    "patch-from -3": _patch_from(3),
    "patch-from -19": _patch_from(19),
    "bsdiff4": _bsdiff,
    "HDiffPatch": _hdiffpatch,
    "xdelta3": _xdelta,
    "FastCDC 64K + zstd": _chunks,
    "xor + ZipNN": _zipnn,
    "z4ai": _z4ai,
    "PULSE-like": _pulse,
}
SLOW: Final = frozenset({"zstd -19", "patch-from -19", "bsdiff4", "HDiffPatch"})
BUILT_IN: Final = ("zstd -3", "patch-from -3", "PULSE-like")  # need no package


def _lines(old: Path, new: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        size, started = None, time.perf_counter()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                size = PEERS[name](old, new)
        except Exception as exc:  # whatever a peer does, the others have their figures
            print(f"{name} on {new.name}: {type(exc).__name__}: {exc}", file=sys.stderr)
        yield json.dumps({"peer": name, "bytes": size, "seconds": round(time.perf_counter() - started, 2)})


if __name__ == "__main__":
    for text in _lines(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]):
        print(text, flush=True)
