from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.numpy import save_file

from common.cli import main
from common.errors import BadRelease, CorruptPack, CorruptSlab, FileChanged
from sync.codec import kernels
from sync.diff.diff import Report, diff, manifest_name
from sync.diff.file_release import opened
from sync.diff.limit import limit_of_new, limit_of_step
from sync.diff.rebuild import rebuild
from sync.diff.whole_zstd import compressed_bytes, patch_bytes
from sync.manifests import pack, unpack
from sync.packs import parse_index
from sync.release import parse_manifest, to_bytes
from sync.store import Store
from tests.sync.test_containers import model_of
from tests.sync.test_containers_gguf import BF16, F32, I8, gguf

Arrays = dict[str, np.ndarray]
FORMS = {"full", "same", "sparse", "planes", "ctx"}
needs_kernels = pytest.mark.skipif(not kernels.HAVE_KERNELS, reason="the form ctx is encoded by the compiled kernels")


def weights() -> Arrays:
    rng = np.random.default_rng(1)
    return {
        "bf16": rng.normal(size=(64, 512)).astype(ml_dtypes.bfloat16),
        "int8": rng.integers(-90, 90, size=(64, 512), dtype=np.int8),
        "scale": rng.normal(size=(64,)).astype(np.float32),
        "bias": rng.normal(size=(32,)).astype(np.float32),
    }


def trained(old: Arrays) -> Arrays:
    """Small steps in a tenth of each tensor's words."""
    rng = np.random.default_rng(2)
    new = {}
    for name, array in old.items():
        words = array.view(f"<i{array.itemsize}").copy()
        chosen = rng.random(words.shape) < 0.1
        words[chosen] += rng.integers(1, 4, size=int(chosen.sum()), dtype=words.dtype)
        new[name] = words.view(array.dtype)
    return new


def save_onnx(path: Path, arrays: Arrays, **options: Any) -> None:
    onnx.save(model_of([numpy_helper.from_array(array, name) for name, array in arrays.items()]), path, **options)


def save_external(path: Path, arrays: Arrays) -> None:
    model = path.with_name("m.onnx")
    save_onnx(model, arrays, save_as_external_data=True, location=path.name, size_threshold=0)


def save_gguf(path: Path, arrays: Arrays) -> None:
    kinds = {"bf16": BF16, "int8": I8, "scale": F32, "bias": F32}
    path.write_bytes(gguf([(name, kinds[name], one.shape, one.tobytes()) for name, one in arrays.items()]))


def save_torch(path: Path, arrays: Arrays) -> None:
    state = {name: torch.from_numpy(one) for name, one in arrays.items() if name != "bf16"}
    torch.save(state | {"bf16": torch.from_numpy(arrays["bf16"].view(np.int16)).view(torch.bfloat16)}, path)


def save_plain(path: Path, arrays: Arrays) -> None:
    path.write_bytes(b"".join(one.tobytes() for one in arrays.values()))


CONTAINERS: dict[str, tuple[str, Callable[[Path, Arrays], None]]] = {
    "safetensors": ("m.safetensors", lambda path, arrays: save_file(arrays, path)),
    "onnx": ("m.onnx", save_onnx),
    "onnx-data": ("m.onnx.data", save_external),
    "gguf": ("m.gguf", save_gguf),
    "torch": ("m.pt", save_torch),
    "plain": ("m.bin", save_plain),
}


def two_files(folder: Path, container: str = "safetensors", new: Arrays | None = None) -> tuple[Path, Path]:
    name, save = CONTAINERS[container]
    old = weights()
    for version, arrays in (("a", old), ("b", trained(old) if new is None else new)):
        (folder / version).mkdir()
        save(folder / version / name, arrays)
    return folder / "a" / name, folder / "b" / name


def compared(base: Path, new: Path, store: Store | None = None) -> Report:
    with opened(base, version=1) as old, opened(new, version=2) as target:
        return diff(old, target, store=store)


def fetched(base: Path, new: Path, folder: Path) -> tuple[Report, Path]:
    """What a node with `base` has then, and where its manifest is."""
    with opened(base, version=1) as old, opened(new, version=2) as target:
        report = diff(old, target, store=Store(folder))
        return report, folder / manifest_name(old, target)


def applied(base: Path, manifest: Path, store: Store, out: Path) -> None:
    with opened(base, version=1) as old:
        rebuild(old, manifest.read_bytes(), store, out)


@pytest.mark.parametrize("container", list(CONTAINERS))
def test_every_container_is_rebuilt_from_its_predecessor_and_the_fetched_bytes(
    tmp_path: Path, container: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base, new = two_files(tmp_path, container)
    out = tmp_path / "out"
    assert main(["sync", "diff", str(base), str(new), "--json", "--apply", str(out)]) == 0
    assert out.read_bytes() == new.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "out"}
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(said) == ["raw_bytes", "wire_bytes", "bound_bytes", "forms"]
    assert (said["raw_bytes"], set(said["forms"])) == (new.stat().st_size, FORMS)
    assert sum(said["forms"].values()) < said["wire_bytes"] < 0.4 * said["raw_bytes"]


class CountingStore(Store):
    """Counts what is read, as a node would fetch it."""

    count = 0

    def full(self, slab: str) -> bytes | None:
        return self._counted(super().full(slab))

    def index(self, target: str, base: str) -> bytes | None:
        return self._counted(super().index(target, base))

    def part(self, name: str, offset: int, length: int) -> tuple[int, bytes] | None:
        found = super().part(name, offset, length)
        self._counted(None if found is None else found[1])
        return found

    def _counted(self, data: bytes | None) -> bytes | None:
        self.count += len(data or b"")
        return data


@needs_kernels
def test_wire_bytes_are_those_that_the_new_file_is_made_of(tmp_path: Path) -> None:
    new = trained(weights()) | {"added": np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)}
    base, target = two_files(tmp_path, new=new)
    report, manifest = fetched(base, target, tmp_path / "fetched")
    store = CountingStore(tmp_path / "fetched")
    applied(base, manifest, store, tmp_path / "out")
    assert store.count + manifest.stat().st_size == report.wire_bytes
    assert min(report.forms["full"], report.forms["ctx"], report.table_bytes) > 0


def test_identical_files_cost_a_manifest(tmp_path: Path) -> None:
    base, new = two_files(tmp_path, new=weights())
    report = compared(base, new)
    assert (report.payload_bytes, report.table_bytes, report.bound_bytes) == (0, 0, 0)
    assert report.wire_bytes == report.index_bytes + report.manifest_bytes < 1500


@needs_kernels
def test_only_what_changed_is_paid_for(tmp_path: Path) -> None:
    new = {"bf16": trained(weights())["bf16"], "new": np.frombuffer(np.random.default_rng(5).bytes(40_000), np.uint8)}
    report = compared(*two_files(tmp_path, new=weights() | new))
    costs = {one.name: one for one in report.tensors}
    assert {name for name, one in costs.items() if one.payload_bytes} == {"bf16", "new", "(skeleton)"}
    assert (costs["new"].changed, costs["new"].forms) == (None, ("full",))
    assert (costs["int8"].changed, costs["int8"].forms) == (0.0, ())
    assert costs["bf16"].forms == ("ctx",)
    assert costs["bf16"].changed == pytest.approx(0.1, abs=0.01)
    assert 0.5 < costs["bf16"].payload_bytes / costs["bf16"].bound_bytes < 1.1
    assert sum(one.payload_bytes for one in report.tensors) == pytest.approx(report.payload_bytes)


def test_unrelated_files_cost_what_they_are(tmp_path: Path) -> None:
    for name, seed in (("a.bin", 1), ("b.bin", 2)):
        (tmp_path / name).write_bytes(np.random.default_rng(seed).bytes(100_000))
    report = compared(tmp_path / "a.bin", tmp_path / "b.bin")
    assert report.forms["ctx"] == report.forms["sparse"] == 0
    assert 100_000 < report.payload_bytes < 100_400


REFUSED = (BadRelease, CorruptPack, CorruptSlab)


def test_a_slab_that_comes_several_times_is_paid_for_once(tmp_path: Path) -> None:
    noise = np.frombuffer(np.random.default_rng(5).bytes(40_000), np.uint8)
    base, new = two_files(tmp_path, new=weights() | {"new": noise, "tied": noise})
    report, manifest = fetched(base, new, tmp_path / "fetched")
    assert 40_000 < report.forms["full"] < 41_000
    assert {one.name for one in report.tensors if one.payload_bytes} == {"new", "(skeleton)"}
    applied(base, manifest, Store(tmp_path / "fetched"), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == new.read_bytes()


def test_the_same_bytes_as_two_kinds_of_elements_are_encoded_as_the_first(tmp_path: Path) -> None:
    """A tensor and a view of it as integers: one slab, which an index can only say one kind of."""
    rng = np.random.default_rng(0)
    old = rng.normal(size=(100, 100)).astype(np.float32)
    step = rng.integers(-5, 6, size=old.shape, dtype=np.int32)
    new = (old.view(np.int32) + step).view(np.float32)
    for names in (("a", "b"), ("b", "a")):  # in both orders
        folder = tmp_path / names[0]
        paths = [folder / "old.safetensors", folder / "new.safetensors"]
        folder.mkdir()
        for path, array in zip(paths, (old, new), strict=True):
            save_file({names[0]: array, names[1]: array.view(np.int32)}, path)
        report, manifest = fetched(*paths, folder / "fetched")
        assert report.forms["full"] < 3000 < report.payload_bytes < 20_000  # the header alone travels whole
        applied(paths[0], manifest, Store(folder / "fetched"), folder / "out")
        assert (folder / "out").read_bytes() == paths[1].read_bytes()


@needs_kernels
def test_damaged_bytes_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    new = {"bf16": trained(weights())["bf16"], "added": np.frombuffer(np.random.default_rng(3).bytes(20_000), np.uint8)}
    base, target = two_files(tmp_path, new=weights() | new)
    folder = tmp_path / "fetched"
    _, manifest = fetched(base, target, folder)
    parts = [next(folder.rglob(f"*.{part}")) for part in ("index", "pack", "full")]
    with opened(base, version=1) as one, opened(target, version=2) as other:
        index = parse_index(parts[0].read_bytes(), base=one.manifest, target=other.manifest)
    assert index is not None
    read = [*range(0, index.tables[0].length, 40)]  # of the pack: the table set, and the form that is taken
    smallest = min(index.entries, key=lambda entry: entry.header.payload_length)
    read += range(smallest.offset, smallest.offset + smallest.header.payload_length, 500)
    for path in parts:
        sound = path.read_bytes()
        places = read if path.suffix == ".pack" else range(0, len(sound), len(sound) // 10)
        for at in places:
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
            with pytest.raises(REFUSED):
                applied(base, manifest, Store(folder), tmp_path / "out")
        path.write_bytes(sound[:50])
        with pytest.raises(REFUSED):
            applied(base, manifest, Store(folder), tmp_path / "out")
        path.write_bytes(sound)
    assert {one.name for one in tmp_path.iterdir()} == {"a", "b", "fetched"}
    applied(base, manifest, Store(folder), tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == target.read_bytes()


def test_sound_slabs_at_the_wrong_place_are_refused(tmp_path: Path) -> None:
    base, target = two_files(tmp_path)
    _, path = fetched(base, target, tmp_path / "fetched")
    with opened(base, version=1) as old:
        before = to_bytes(old.manifest)
    manifest = parse_manifest(unpack(path.read_bytes(), before), "file/2")
    (file,) = manifest.files
    (slab,) = [slab for slab in file.slabs if slab.key == "t/bf16/0"]
    ((offset, length),) = slab.pieces
    swapped = replace(slab, pieces=((offset + length // 2, length // 2), (offset, length // 2)))
    slabs = tuple(swapped if one is slab else one for one in file.slabs)
    path.write_bytes(pack(to_bytes(replace(manifest, files=(replace(file, slabs=slabs),))), before))
    with pytest.raises(BadRelease, match="do not give the hash"):
        applied(base, path, Store(tmp_path / "fetched"), tmp_path / "out")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(REFUSED):
        applied(base, path, Store(tmp_path / "fetched"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_base_does_not_do(tmp_path: Path) -> None:
    base, new = two_files(tmp_path)
    _, manifest = fetched(base, new, tmp_path / "fetched")
    other = tmp_path / "other.safetensors"
    save_file(weights() | {"int8": np.zeros((64, 512), np.int8)}, other)
    with pytest.raises(REFUSED):
        applied(other, manifest, Store(tmp_path / "fetched"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_written_to_meanwhile_is_an_error(tmp_path: Path) -> None:
    base, new = two_files(tmp_path)
    with opened(base, version=1) as old, opened(new, version=2) as target:
        new.write_bytes(new.read_bytes()[:-100] + bytes(100))
        with pytest.raises(FileChanged, match=r"m\.safetensors changed"):
            diff(old, target)


MEASURE = """
import re, sys
from pathlib import Path
from sync.diff.file_release import opened
from sync.manifests import pack, unpack
from sync.packs import parse_index
from sync.diff.rebuild import rebuild
from sync.release import parse_manifest, to_bytes
from sync.store import Store

def kib(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

base, manifest, folder, out = map(Path, sys.argv[1:])
before = kib("VmRSS")
with opened(base, version=1) as old:
    rebuild(old, manifest.read_bytes(), Store(folder), out)
print(kib("VmHWM") - before)
"""


@needs_kernels
def test_memory_of_a_rebuild_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """60 MB: every twentieth slab changed, one is unrelated, one is new."""
    rng = np.random.default_rng(7)
    old = rng.integers(0, 1 << 15, size=(58 << 10, 512), dtype=np.uint16)
    new = old.copy()
    for start in range(0, len(new) - 1024, 20 << 10):
        new[start : start + 1024] ^= rng.random((1024, 512)) < 0.2
    new[-1024:] = rng.integers(0, 1 << 16, size=(1024, 512), dtype=np.uint16)
    save_file({"w": old.view(ml_dtypes.bfloat16)}, tmp_path / "a.safetensors")
    save_file({"w": new.view(ml_dtypes.bfloat16), "x": new[-1024:] ^ 1}, tmp_path / "b.safetensors")
    report, manifest = fetched(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "fetched")
    assert min(report.forms["ctx"], report.forms["full"]) > 0
    arguments = [tmp_path / "a.safetensors", manifest, tmp_path / "fetched", tmp_path / "out"]
    told = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True, check=True
    ).stdout
    assert (tmp_path / "out").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert int(told) < 12 << 10


def entropy(*counts: int) -> float:
    return -sum(count * math.log2(count / sum(counts)) for count in counts if count)


def test_the_limit_of_integers_is_the_entropy_of_the_steps_by_row_class() -> None:
    old = np.zeros((4, 64), np.int8)
    new = old.copy()
    new[1, :8] = 1  # quiet: 8 of 64
    new[2, :16] = -1  # the median: quiet too
    new[3, :32] = 2  # busy
    pair = [(old.tobytes(), new.tobytes())]
    limit = limit_of_step(lambda: iter(pair), words=256, width=1, mantissa=0, row=64)
    assert limit.changed == 56 / 256
    assert limit.bits == pytest.approx(entropy(104, 8, 16) + entropy(32, 32))


def test_the_limit_of_floats_knows_the_exponent_of_the_base() -> None:
    old = np.repeat(np.array([1.0, 0.25], ml_dtypes.bfloat16), 64).reshape(2, 64).T.copy()  # [64, 2]: two exponents
    new = old.copy().view(np.uint16)
    new[:16, 1] += 1
    new[16:32, 1] -= 1
    pair = [(old.tobytes(), new.tobytes())]
    limit = limit_of_step(lambda: iter(pair), words=128, width=2, mantissa=7, row=128)
    assert limit.bits == pytest.approx(entropy(16, 16, 32))


def test_the_limit_of_something_new_is_that_of_its_byte_planes() -> None:
    chunk = np.array([0x0100, 0x0101, 0x0102, 0x0103], "<u2").tobytes()
    assert limit_of_new(iter([chunk]), 2).bits == pytest.approx(entropy(1, 1, 1, 1))


def test_zstd_is_measured_as_its_own_program_would(tmp_path: Path) -> None:
    for name, data in (("a", np.random.default_rng(1).bytes(300_000)), ("b", np.random.default_rng(2).bytes(10))):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "c").write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
    with (tmp_path / "a").open("rb") as base, (tmp_path / "c").open("rb") as new:
        assert compressed_bytes(new.fileno()) > 300_000
        assert (patch_bytes(new.fileno(), base.fileno()) or 0) < 200


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["diff", "gone", "a"], 2, "A: .*gone cannot be read: No such file"),
        (["diff", "a", "."], 2, "B: .* is not a regular file"),
        (["diff", "a", "a", "--apply", "a"], 2, "one of the two files"),
        (["diff", "a", "a", "--apply", "no/where"], 2, "no is not a folder"),
        (["inspect", "gone"], 2, "FILE: .*gone cannot be read"),
        (["inspect", "x.pack"], 2, r"its \.index says what is in it"),
        (["inspect", "x.zst"], 1, "compressed with zstd, and is damaged"),
        (["inspect", "x.index"], 1, "hash of the index does not match"),
    ],
)
def test_bad_arguments_are_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").write_bytes(b"some bytes")
    Path("x.pack").write_bytes(bytes(100))
    Path("x.zst").write_bytes(b"\x28\xb5\x2f\xfd and then something else")
    Path("x.index").write_bytes(b"OPIX\1\0" + bytes(200))
    assert main(["sync", *arguments]) == code
    text = capsys.readouterr()
    assert text.out == ""
    assert re.search(said, text.err)


def inspected(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["sync", "inspect", str(path), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["sync", "inspect", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{path}  {found['kind']}"
    return found


def test_inspect_says_what_a_container_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, _ = two_files(tmp_path)
    found = inspected(base, capsys)
    header = 8 + int.from_bytes(base.read_bytes()[:8], "little")
    assert (found["kind"], found["bytes"], found["skeleton_bytes"]) == ("safetensors", base.stat().st_size, header)
    data = base.read_bytes()
    for one in found["tensors"]:
        array = weights()[one["name"]]
        assert (tuple(one["shape"]), one["slabs"]) == (array.shape, 1)
        assert data[one["offset"] : one["offset"] + one["bytes"]] == array.tobytes()
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(data[:-1])
    assert inspected(broken, capsys)["note"] == "not a sound safetensors file: plain bytes"


def test_names_from_a_file_do_not_reach_the_terminal_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"evil\x1b[2Jname\n": np.zeros(4, np.float32)}, path)
    for arguments in (["inspect", str(path)], ["diff", str(path), str(path)]):
        assert main(["sync", *arguments]) == 0
        assert "evil?[2Jname?" in capsys.readouterr().out


def test_inspect_knows_what_a_node_fetches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = trained(weights()) | {"added": np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)}
    base, target = two_files(tmp_path, new=new)
    report, manifest = fetched(base, target, tmp_path / "fetched")
    index = inspected(next((tmp_path / "fetched").rglob("*.index")), capsys)
    payloads = next((tmp_path / "fetched").rglob("*.pack"))
    assert (index["kind"], index["pack_bytes"]) == ("index", payloads.stat().st_size)
    assert {one["form"] for one in index["entries"]} <= FORMS
    full = next((tmp_path / "fetched").rglob("*.full"))
    found = inspected(full, capsys)
    assert (found["kind"], found["slab"], found["form"]) == ("object", full.stem, "full")
    full.write_bytes(full.read_bytes()[:-1] + b"?")
    assert main(["sync", "inspect", str(full)]) == 1
    assert "payload hash does not match" in capsys.readouterr().err
    assert main(["sync", "inspect", str(manifest)]) == 1
    assert "packed against another manifest" in capsys.readouterr().err
    assert manifest.stat().st_size == report.manifest_bytes
    with opened(target, version=2) as one:
        signed = to_bytes(one.manifest)
    (tmp_path / "2.json").write_bytes(signed)
    (tmp_path / "2.json.zst").write_bytes(pack(signed))
    found = inspected(tmp_path / "2.json", capsys)
    assert inspected(tmp_path / "2.json.zst", capsys) == found
    assert (found["kind"], found["model"], found["version"], found["parent"]) == ("manifest", "file", "2", "1")
    assert (found["files"][0]["size"], found["bytes"]) == (target.stat().st_size, len(signed))


def test_the_tables_name_every_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = two_files(tmp_path)
    assert main(["sync", "diff", str(base), str(new)]) == 0
    lines = capsys.readouterr().out.splitlines()
    report = compared(base, new)
    costs = {one.name: one.payload_bytes for one in report.tensors}
    assert costs["scale"] == pytest.approx(2 * costs["bias"])  # they share a slab
    assert sum(costs.values()) == pytest.approx(report.payload_bytes)
    for one in report.tensors:
        (line,) = [line for line in lines if line.startswith(one.name + " ")]
        assert f"{100 * (one.changed or 0):.2f} %" in line
    (wire,) = [line for line in lines if line.startswith("wire ")]
    assert f"{report.wire_bytes:,}" in wire
    assert {line.split("  ")[0] for line in lines if line.startswith("zstd")} == {"zstd -3", "zstd -3 --patch-from"}


def test_a_model_that_keeps_its_tensors_elsewhere_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save_external(tmp_path / folder / "m.onnx.data", {"w": np.ones((4, 64), np.float32)})
    model = next((tmp_path / "b").glob("*.onnx"))
    assert main(["sync", "diff", str(tmp_path / "a" / model.name), str(model)]) == 0
    assert "B keeps tensors in m.onnx.data beside it" in capsys.readouterr().out


def test_a_diff_that_is_terminated_leaves_nothing_beside_its_file(tmp_path: Path) -> None:
    for name, seed in (("a.bin", 1), ("b.bin", 2)):
        (tmp_path / name).write_bytes(np.random.default_rng(seed).bytes(8 << 20))
    code = "import sys; from common.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "sync", "diff", "a.bin", "b.bin", "--apply", "out"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as child:
        while not list(tmp_path.glob(".outrider-diff-*")):
            assert child.poll() is None, "it ended before it was terminated"
        child.terminate()
        assert child.wait(30) == 143
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "b.bin"}
