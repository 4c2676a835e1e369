"""Checkpoints, graphs and bundles that somebody made to do harm: refused before they are opened, saying why."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from common.bundle import DESCRIPTION, Bundle
from common.errors import BundleError, EngineError, InvalidInput, OutriderError
from common.serving.engine import Batch
from common.serving.repository import Installed
from common.tensorfile import read_tensors
from hardware.install import EngineOptions, Opener
from hardware.serving import LocalServing
from tests import hostile
from tests.bundles import forward, write_bundle

X = np.array([[1.0, 2.0]], np.float32)
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def open_engine(folder: Path, variant: str = "cpu-int8") -> np.ndarray:
    installed = Installed(model="linear", version="1", folder=folder, variant=variant, engine="onnxruntime")
    [answer] = Opener(EngineOptions())(installed).engine.run(Batch(({"x": X},), 1))
    assert not isinstance(answer, Exception)
    return answer["logits"]


@pytest.mark.parametrize("make", [hostile.pickled, hostile.zipped_pickle])
def test_pickle_under_a_safe_name_is_refused_before_it_is_opened(tmp_path: Path, make: object) -> None:
    marker, path = tmp_path / "ran", tmp_path / "c.safetensors"
    path.write_bytes(make(marker))  # type: ignore[operator]
    with pytest.raises(InvalidInput, match=r"c\.safetensors: a pickled checkpoint.*accepted: a \.safetensors file"):
        read_tensors(path)
    assert not marker.exists()


@pytest.mark.parametrize("length", [0x80, 0x280, 0x380, 0x580])
def test_header_whose_length_reads_like_a_pickle_is_none(tmp_path: Path, length: int) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(hostile.safetensors(json.dumps({"a": F32}).encode().ljust(length), bytes(8)))
    assert path.read_bytes()[0] == 0x80
    assert read_tensors(path)["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "header too small"),
        (b"\0" * 4, "header too small"),
        (hostile.safetensors({}, length=1 << 60), "header too large"),
        (hostile.safetensors({}, length=101 << 20), "header too large"),
        (hostile.safetensors({}, length=2), ""),
        (hostile.safetensors(b"{nope"), "invalid JSON"),
        (hostile.safetensors([1]), "invalid JSON"),
        (hostile.safetensors(b"[" * 100_000), "header"),
        (hostile.safetensors({"a": F32}, bytes(4)), "not fully covered"),
        (hostile.safetensors({"a": F32}, bytes(12)), "not fully covered"),
        (hostile.safetensors({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12)), "offset"),
        (hostile.safetensors({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8)), "offset"),
        (hostile.safetensors({"a": F32 | {"shape": [3]}}, bytes(8)), "invalid shape"),
        (hostile.safetensors({"a": F32 | {"shape": [-2]}}, bytes(8)), "invalid value"),
        (hostile.safetensors({"a": F32 | {"shape": [1 << 62, 1 << 62]}}, bytes(8)), "overflow"),
        (hostile.safetensors({"a": F32 | {"dtype": "Q4", "shape": [8]}}, bytes(8)), "unknown variant"),
        (hostile.safetensors({"a": F32 | {"dtype": "F8_E4M3", "shape": [8]}}, bytes(8)), "float8"),
    ],
)
def test_safetensors_that_lie_are_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "c.safetensors"
    path.write_bytes(data)
    if not says:
        assert read_tensors(path) == {}
        return
    with pytest.raises(InvalidInput, match=f"cannot be read as safetensors.*{says}"):
        read_tensors(path)


@pytest.mark.parametrize("location", ["../../secret", "SECRET", "link", "nothing"])
def test_graph_with_parameters_outside_its_folder_is_refused(tmp_path: Path, location: str) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(np.full((2, 3), 7, np.float32).tobytes())
    folder = write_bundle(tmp_path / "bundle")
    (folder / "cpu-int8/link").symlink_to(secret)
    text = location.replace("SECRET", str(secret))
    (folder / "cpu-int8/model.onnx").write_bytes(hostile.external_onnx(text))
    with pytest.raises(EngineError, match=r"model\.onnx does not load: .*xternal data"):
        open_engine(folder)
    np.testing.assert_allclose(open_engine(folder, "full"), forward(X), rtol=1e-6)


@pytest.mark.parametrize("data", [b"", b"\x08", b"not a graph", b"\xff" * 200, b"PK\x03\x04" + bytes(64)])
def test_graph_that_is_none_is_refused(tmp_path: Path, data: bytes) -> None:
    folder = write_bundle(tmp_path / "bundle")
    (folder / "cpu-int8/model.onnx").write_bytes(data)
    with pytest.raises(EngineError, match=r"model\.onnx"):
        open_engine(folder)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/../../x", "..", "a\\..\\x", "x\u0000y", "", "cpu-int8/../../secret"]
)
@pytest.mark.parametrize("place", ["golden", "labels", "variant"])
def test_bundle_that_names_files_outside_is_refused(tmp_path: Path, name: str, place: str) -> None:
    folder = write_bundle(tmp_path / "bundle")
    spec = json.loads((folder / DESCRIPTION).read_bytes())
    if place == "golden":
        spec["golden"]["file"] = name
    elif place == "labels":
        spec["model"]["labels"] = name
    else:
        spec["variants"][0]["files"]["onnxruntime"] = [name]
    (folder / DESCRIPTION).write_text(json.dumps(spec))
    with pytest.raises(BundleError, match="not a plain path inside the bundle"):
        Bundle.open(folder)


@pytest.mark.parametrize("name", ["labels.txt", "golden.safetensors", "cpu-int8/model.onnx", "cpu-int8"])
def test_bundle_whose_links_lead_outside_is_refused(tmp_path: Path, name: str) -> None:
    folder, secret = write_bundle(tmp_path / "bundle"), tmp_path / "secret"
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    with pytest.raises(BundleError, match="a link that leads out of the bundle"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "required field"),
        (b'{"format": 2}', "required field"),
        (b"\xff\xfe", "bundle.json"),
        (b"[" * 100_000, "Expected `object`"),
        (b'{"model": {"name": "../x"}}', "bundle.json"),
    ],
)
def test_description_that_is_none_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / DESCRIPTION).write_bytes(data)
    with pytest.raises(BundleError, match=says):
        Bundle.open(tmp_path)


async def test_golden_set_that_cannot_be_read_refuses_the_bundle_and_the_rest_serves(tmp_path: Path) -> None:
    """What a node makes of a bundle with a pickle as its golden set; the model beside it is served."""
    marker = tmp_path / "ran"
    bad, good = write_bundle(tmp_path / "bad", name="bad"), write_bundle(tmp_path / "good")
    (bad / "golden.safetensors").write_bytes(hostile.pickled(marker))
    async with LocalServing("edge", EngineOptions(), by="node") as local:
        with pytest.raises(OutriderError, match="pickled checkpoint"):
            await local.serve_bundle(bad, "1")
        await local.serve_bundle(good, "1")
        assert local.repository.current("linear") is not None
    assert not marker.exists()
