"""Seeds for the Python fuzz targets: `python -m tests.fuzz.python_corpus` (targets.py has the layouts)."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import torch
import zstandard
from onnx import numpy_helper
from safetensors.numpy import save

from sync.codec import PLANES, Encoded, ctx, encode_full, encode_planes, encode_sparse, parse_tables
from sync.manifests import pack
from sync.packs import PackWriter
from sync.release import Desired, FileEntry, Manifest, SlabEntry, manifest_path, to_bytes
from tests.fuzz.targets import BASE, CORPUS, MODEL, NEW, OLD, TABLES, TARGET, VERSION
from tests.sync.test_containers import model_of
from tests.sync.test_containers_gguf import BF16, F32, gguf


def main() -> None:
    for name, seeds in made().items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds):
            (folder / f"seed-{number}").write_bytes(data)


def made() -> dict[str, list[bytes]]:
    return {
        "slab": slabs(),
        "tables": [TABLES, bytes.fromhex("01 01 00 01 01 01 0100 00ff 0a000160")],
        "index": indexes(),
        "manifest": [to_bytes(manifest()), pack(to_bytes(manifest())), pack(to_bytes(manifest()), TABLES)],
        "desired": [to_bytes(desired())],
        "safetensors": [save({"a": np.ones((3, 5), np.float32), "b": np.arange(4, dtype=np.int8)})],
        "onnx": [model_of([numpy_helper.from_array(np.ones((2, 3), np.float32), "w")]).SerializeToString()],
        "gguf": [gguf([("a", F32, (2, 3), bytes(24)), ("b", BF16, (4,), bytes(8))])],
        "torch": [archive()],
    }


def slabs() -> list[bytes]:
    rng = np.random.default_rng(4)
    base = rng.integers(0, 256, 128, dtype=np.uint8).tobytes()
    raw = bytes(byte + 1 & 255 if at % 9 == 0 else byte for at, byte in enumerate(base))
    forms = [encode_planes(raw, base, 2, 7, base_id=BASE), encode_sparse(raw, base, 4, 0, base_id=BASE)]
    full = encode_full(raw, 2, 7)
    diffs = [one.header.to_bytes() + one.payload + base for one in forms if one is not None]
    return [*diffs, full.header.to_bytes() + full.payload, full.to_object(), contexts(base)]


def contexts(base: bytes) -> bytes:
    """A `ctx` slab that decodes: steps of 1 away from zero in every second row of 16, as the table set allows."""
    tables = parse_tables(TABLES)
    words = np.frombuffer(base, np.uint8)
    at = np.arange(len(words))
    changes = (at % 9 == 0) & (at // 16 % 2 == 0)
    steps = np.where(words < 128, 1, 255).astype(np.uint8)  # bytes from 128 on are negative
    raw = np.where(changes, words + steps, words).astype(np.uint8).tobytes()
    found = ctx.encode(raw, base, 1, 0, 16, tables, number=0, base_id=BASE)
    assert found is not None, "the table set has a code for these steps"
    return found.header.to_bytes() + found.payload + base


def indexes() -> list[bytes]:
    """An index without its hash, and with its entries as they are before they are compressed."""
    found = encode_full(bytes(64), 4, 23)
    file = io.BytesIO()
    with PackWriter(file, base=OLD, target=NEW, tables=[parse_tables(TABLES)]) as writer:
        for slab, base in zip(NEW.slabs().values(), OLD.slabs(), strict=True):
            header = replace(found.header, form=PLANES, slab=slab.id, base=base, raw_length=slab.length)
            writer.add([Encoded(header=header, payload=found.payload)])
        data = writer.finish() or b""
    return [data[:-8], data[:104] + zstandard.decompress(data[104:-8])]


def manifest() -> Manifest:
    slab = SlabEntry(id=BASE, key="t/w/0", width=2, mantissa=7, pieces=((0, 6), (8, 2)))
    rest = SlabEntry(id=TARGET, key="s/0", width=1, mantissa=0, pieces=((6, 2),))
    file = FileEntry(path="a/b.bin", size=10, digest=BASE, tensors=(), slabs=(slab, rest))
    return Manifest(model=MODEL, version=VERSION, parent=None, files=(file,), shared=("a/b.bin",), variants=())


def desired() -> Desired:
    path = manifest_path(MODEL, VERSION)
    return Desired(model=MODEL, epoch=3, version=VERSION, digest=BASE, manifest=path, manifest_hash=TARGET)


def archive() -> bytes:
    file = io.BytesIO()
    torch.save({"w": torch.ones(3, 4), "b": torch.arange(5)}, file)
    return file.getvalue()


if __name__ == "__main__":
    main()
