"""Stock clients against node and gateway: tritonclient over HTTP and gRPC, and curl."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from cloud.publish import source_digest
from common.images import ImagePipeline, prepare
from common.tensorfile import read_tensors
from common.tensors import Array
from tests.system.conftest import Up

pytestmark = pytest.mark.system

PHOTOS = "efficientnet-lite0"
# The public preprocessing of the EfficientNet-Lite family: 224 pixels out of 256, (pixel - 127) / 128.
PIPELINE = ImagePipeline(resize=256, crop=224, mean=(127 / 255,) * 3, std=(128 / 255,) * 3)


@pytest.fixture(params=["http", "grpc"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    return {"http": triton_http, "grpc": triton_grpc}[request.param]


@pytest.fixture(params=["edge-a", "gateway"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(where: str, up: Up, module: ModuleType) -> Any:
    url = up.http(where).removeprefix("http://") if module is triton_http else up.grpc(where)
    with module.InferenceServerClient(url) as one:
        yield one


def tensor(module: ModuleType, name: str, array: Array) -> Any:
    one = module.InferInput(name, list(array.shape), "FP32")
    one.set_data_from_numpy(array)
    return one


@pytest.fixture(scope="module")
def images(up: Up, bundles: Path) -> Array:
    """Eight real photos as the model's input, float32 [8, 3, 224, 224]."""
    photos = sorted((bundles / "sources" / f"{PHOTOS}-v1" / "photos").iterdir())[:8]
    assert len(photos) == 8
    return np.concatenate([prepare(path.read_bytes(), PIPELINE) for path in photos])


def expected(bundles: Path, model: str, where: str, inputs: dict[str, Array]) -> Array:
    """The logits of the file that should be served there, straight from ONNX Runtime: INT8 on the edge, else FP32."""
    variant = "cpu-int8" if where.startswith("edge") else "full"
    spec = bundles / "sources" / f"{model}-v1" / "model.toml"
    path = bundles / "bundles" / model / source_digest(spec)[:32] / variant / "model.onnx"
    return np.asarray(ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, inputs)[0])


def test_server_and_models_are_live_and_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(PHOTOS)
    assert client.is_model_ready("digits")


def test_metadata_says_what_the_model_takes_and_gives(client: Any, module: ModuleType) -> None:
    metadata = client.get_model_metadata(PHOTOS)
    if module is triton_grpc:
        metadata = {
            "name": metadata.name,
            "versions": list(metadata.versions),
            "inputs": [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in metadata.inputs],
            "outputs": [{"name": t.name, "datatype": t.datatype, "shape": list(t.shape)} for t in metadata.outputs],
        }
    assert metadata["name"] == PHOTOS
    assert metadata["versions"] == ["1"]
    assert metadata["inputs"] == [{"name": "image", "datatype": "FP32", "shape": [-1, 3, 224, 224]}]
    assert metadata["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 1000]}]


@pytest.mark.parametrize("rows", [1, 8])
def test_images_get_the_answers_that_the_model_gives(
    client: Any, where: str, module: ModuleType, bundles: Path, images: Array, rows: int
) -> None:
    answer = client.infer(PHOTOS, [tensor(module, "image", images[:rows])]).as_numpy("logits")
    np.testing.assert_allclose(answer, expected(bundles, PHOTOS, where, {"image": images[:rows]}), atol=2e-3)


@pytest.mark.parametrize("rows", [1, 8])
def test_digits_get_their_true_labels(client: Any, where: str, module: ModuleType, bundles: Path, rows: int) -> None:
    heldout = read_tensors(bundles / "sources" / "digits-v1" / "heldout.safetensors")
    hits = 0
    for start in range(0, 64, rows):
        pixels, labels = (heldout[name][start : start + rows] for name in ("pixels", "labels"))
        logits = client.infer("digits", [tensor(module, "pixels", pixels)]).as_numpy("logits")
        np.testing.assert_allclose(logits, expected(bundles, "digits", where, {"pixels": pixels}), atol=1e-3)
        hits += int(np.sum(logits.argmax(axis=1) == labels))
    assert hits >= 60  # of 64


def test_an_unknown_model_is_not_found(client: Any, module: ModuleType) -> None:
    with pytest.raises(InferenceServerException, match="nope") as caught:
        client.infer("nope", [tensor(module, "x", np.zeros((1, 2), np.float32))])
    assert caught.value.status() in ("404", "StatusCode.NOT_FOUND")
    with pytest.raises(InferenceServerException, match="nope"):
        client.get_model_metadata("nope")


def test_labels_come_through_the_classification_extension(client: Any, module: ModuleType, photo: Path) -> None:
    cat = prepare(photo.read_bytes(), PIPELINE)
    wanted = module.InferRequestedOutput("logits", class_count=3)
    best = client.infer(PHOTOS, [tensor(module, "image", cat)], outputs=[wanted]).as_numpy("logits")
    assert best.shape == (1, 3)
    assert "cat" in best[0, 0].decode().split(":")[2]


def curl(*arguments: object) -> tuple[int, dict[str, str], Any]:
    done = subprocess.run(("curl", "-s", "-i", *map(str, arguments)), capture_output=True, text=True, check=True)
    head, _, body = done.stdout.replace("\r\n", "\n").rpartition("\n\n")
    status, *lines = head.split("\n\n")[-1].splitlines()
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(status.split()[1]), headers, json.loads(body) if body.startswith(("{", "[")) else body


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [("edge-a", "edge", None), ("edge-b", "cloud", "no_engine"), ("gateway", "cloud", None)],
)
def test_curl_classifies_a_photo(up: Up, photo: Path, name: str, target: str, reason: str | None) -> None:
    status, headers, body = curl("-F", f"image=@{photo}", f"{up.http(name)}/v2/models/{PHOTOS}/classify?top=2")
    assert status == 200
    assert headers["x-outrider-target"] in (target, "cache" if target == "edge" else target)
    assert headers.get("x-outrider-reason") == reason
    assert headers["x-outrider-version"] == "1"
    [classes] = body["classes"]
    assert len(classes) == 2
    assert "cat" in classes[0]["label"]
    assert 0 < classes[1]["probability"] <= classes[0]["probability"] <= 1


def test_curl_gets_a_clear_refusal_for_what_is_no_picture(up: Up, bundles: Path) -> None:
    labels = bundles / "sources" / f"{PHOTOS}-v1" / "labels.txt"
    status, _, body = curl("-F", f"image=@{labels}", f"{up.http('edge-a')}/v2/models/{PHOTOS}/classify")
    assert status == 400
    assert "JPEG or PNG" in body["error"]


def test_curl_reaches_the_node_over_its_unix_socket(up: Up) -> None:
    socket = up.state / "edge-a" / "http.sock"
    status, _, body = curl("--unix-socket", socket, "http://node/v2/models/digits")
    assert (status, body["name"]) == (200, "digits")


def test_grpc_reaches_the_node_over_its_unix_socket(up: Up) -> None:
    with triton_grpc.InferenceServerClient(f"unix:{up.state / 'edge-a' / 'grpc.sock'}") as client:
        assert client.is_model_ready("digits")


def test_batches_beyond_the_nodes_profile_are_answered_by_the_cloud(up: Up, bundles: Path) -> None:
    pixels = read_tensors(bundles / "sources" / "digits-v1" / "heldout.safetensors")["pixels"]
    for rows, target in ((4, "edge"), (8, "cloud")):
        inputs = {"inputs": [{"name": "pixels", "datatype": "FP32", "shape": [rows, 1, 8, 8]}]}
        inputs["inputs"][0]["data"] = pixels[50 : 50 + rows].ravel().tolist()
        status, headers, _ = curl("-d", json.dumps(inputs), f"{up.http('edge-b')}/v2/models/digits/infer")
        assert (status, headers["x-outrider-target"]) == (200, target)
        assert headers.get("x-outrider-reason") == ("outside_profile" if target == "cloud" else None)
