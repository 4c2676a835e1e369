"""Models for the tests of bad input: one that takes pictures, one that gives back what it is given in every datatype.

And checkpoints and graphs that somebody made to do harm. All small, all opened by the real engine.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from common.bundle import BundleSpec, GoldenSpec, ModelConfig, Variant, write_spec
from common.images import ImagePipeline, normalize
from common.tensorfile import write_tensors
from common.tensors import TensorSpec

KINDS = {
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "FP16": TensorProto.FLOAT16,
    "BOOL": TensorProto.BOOL,
    "INT8": TensorProto.INT8,
    "INT64": TensorProto.INT64,
    "UINT8": TensorProto.UINT8,
    "UINT64": TensorProto.UINT64,
    "BYTES": TensorProto.STRING,
}
PIPELINE = ImagePipeline(resize=8, crop=8, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def write_same_bundle(folder: Path, datatype: str) -> Path:
    """`same-<datatype>`: y = x, [n, 2]. Serve it with the golden gate off: safetensors hold no strings."""
    name = f"same-{datatype.lower()}"
    kind = KINDS[datatype]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        name,
        [helper.make_tensor_value_info("x", kind, ["n", 2])],
        [helper.make_tensor_value_info("y", kind, ["n", 2])],
    )
    tensors = [TensorSpec(name=one, datatype=datatype, shape=(-1, 2)) for one in ("x", "y")]
    write_tensors(_folder(folder) / "golden.safetensors", {"input.x": np.zeros((1, 2), np.float32)})
    return _write(folder, graph, ModelConfig(name=name, task="tensor", inputs=(tensors[0],), outputs=(tensors[1],)))


def write_picture_bundle(folder: Path) -> Path:
    """`pictures`: the mean of each colour, of pictures of 8 x 8 after preparation: three classes."""
    graph = helper.make_graph(
        [
            helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
            helper.make_node("Flatten", ["pooled"], ["colours"]),
        ],
        "pictures",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("colours", TensorProto.FLOAT, ["n", 3])],
    )
    pixels = np.random.default_rng(3).integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    means = normalize(pixels, PIPELINE).mean(axis=(2, 3))
    write_tensors(_folder(folder) / "golden.safetensors", {"input.x": pixels, "output.colours": means})
    config = ModelConfig(
        name="pictures",
        task="classification",
        inputs=(TensorSpec(name="x", datatype="FP32", shape=(-1, 3, 8, 8)),),
        outputs=(TensorSpec(name="colours", datatype="FP32", shape=(-1, 3)),),
        image=PIPELINE,
    )
    return _write(folder, graph, config)


def picture(form: str, colour: tuple[int, int, int] = (200, 40, 90), size: tuple[int, int] = (24, 16)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, form)
    return buffer.getvalue()


def png_bomb(width: int, height: int) -> bytes:
    """A PNG of one colour that says it is large: hardly any bytes, width x height pixels."""
    rows = zlib.compressobj(9)
    row = bytes(1 + width)
    data = b"".join(rows.compress(row) for _ in range(height)) + rows.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


class _Trap:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.marker,)


def pickled(marker: Path) -> bytes:
    return pickle.dumps(_Trap(marker))


def zipped_pickle(marker: Path) -> bytes:
    """As torch.save writes a checkpoint: a zip whose data.pkl is unpickled."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(marker))
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file that says what it is told to say."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def external_onnx(location: str) -> bytes:
    """The linear model with its weight in another file, named by `location`."""
    weight = numpy_helper.from_array(np.zeros((2, 3), np.float32), "w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "24")):
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["logits"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def _write(folder: Path, graph: onnx.GraphProto, config: ModelConfig) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, _folder(folder) / "model.onnx")
    spec = BundleSpec(
        model=config,
        variants=(Variant(name="cpu-int8", files={"onnxruntime": ("model.onnx",)}),),
        golden=GoldenSpec(file="golden.safetensors", metric="cosine", max_loss={"cpu-int8": 0.05}),
    )
    write_spec(spec, folder)
    return folder


def _folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
