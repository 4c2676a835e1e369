"""Valid gRPC calls, and what becomes of them: messages changed field by field, bytes that are no message, no HTTP/2."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common.transport.proto import oip_pb2 as pb
from tests.soak.hostile_bytes import HEADERS, MODELS, SAME, TEXTS, broken, maybe_broken

METHODS: tuple[tuple[str, Any], ...] = (
    ("ModelInfer", pb.ModelInferRequest),
    ("ModelStreamInfer", pb.ModelInferRequest),
    ("ModelMetadata", pb.ModelMetadataRequest),
    ("ModelConfig", pb.ModelConfigRequest),
    ("ModelStatistics", pb.ModelStatisticsRequest),
    ("ModelReady", pb.ModelReadyRequest),
    ("RepositoryIndex", pb.RepositoryIndexRequest),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest),
    ("RepositoryModelUnload", pb.RepositoryModelUnloadRequest),
    ("SystemSharedMemoryRegister", pb.ModelReadyRequest),
)


@dataclass(frozen=True, slots=True)
class GrpcInput:
    method: str
    data: bytes
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RawGrpcInput:
    """Bytes for the gRPC server's socket that are no HTTP/2, or broken HTTP/2."""

    data: bytes


def grpc_input(rng: random.Random) -> GrpcInput:
    method, kind = rng.choice((METHODS[0], METHODS[0], METHODS[0], METHODS[1], rng.choice(METHODS)))
    message = _infer_message(rng) if kind is pb.ModelInferRequest else kind()
    if kind is not pb.ModelInferRequest:
        for field in ("name", "model_name"):
            if hasattr(message, field):
                setattr(message, field, rng.choice((*MODELS, "nothing", "", "é" * 50)))
        if hasattr(message, "version"):
            message.version = rng.choice(("", "1", "9"))
    data = maybe_broken(rng, message.SerializeToString(), 0.15)
    metadata: list[tuple[str, str]] = []
    if rng.random() < 0.2:
        text = rng.choice([t for t in TEXTS if t.isascii()])
        metadata.append((rng.choice([h.lower() for h in HEADERS if h.startswith("x-") or h == "traceparent"]), text))
    return GrpcInput(method, data, tuple(metadata))


def _infer_message(rng: random.Random) -> pb.ModelInferRequest:
    kind = rng.choice(SAME)
    message = pb.ModelInferRequest(model_name=rng.choice((f"same-{kind}", f"same-{kind}", _name(rng))))
    message.model_version = rng.choice(("", "", "", "1", "9"))
    one = message.inputs.add(name="x", datatype=kind.upper(), shape=[1, 2])
    is_raw = rng.random() < 0.6
    if is_raw:
        sizes = {"bool": 2, "int8": 2, "uint8": 2, "fp16": 4, "fp32": 8}
        raw = b"\x01\x00\x00\x00a" * 2 if kind == "bytes" else bytes(sizes.get(kind, 16))
        message.raw_input_contents.append(raw)
    elif kind == "bytes":
        one.contents.bytes_contents.extend((b"a", b"\xc3\xa9"))
    else:
        getattr(one.contents, _CONTENTS.get(kind, "fp32_contents")).extend((1, 0))
    for _ in range(rng.randint(0, 3)):
        rng.choice(_CHANGES)(rng, message)
    return message


_CONTENTS = {
    "bool": "bool_contents", "int8": "int_contents", "int64": "int64_contents", "uint8": "uint_contents",
    "uint64": "uint64_contents", "fp64": "fp64_contents",
}  # fmt: skip


def _name(rng: random.Random) -> str:
    return rng.choice((*MODELS, "", "nothing", "\x00", "é" * 400))


def _shape(rng: random.Random, message: pb.ModelInferRequest) -> None:
    for one in message.inputs:
        del one.shape[:]
        one.shape.extend(
            rng.choice(
                ([2], [], [0], [0, 2], [-1, 2], [2**62, 2**62], [2**33, 2**33], [2**63 - 1], [1] * 40, [2, 1], [9, 2])
            )
        )


def _datatype(rng: random.Random, message: pb.ModelInferRequest) -> None:
    for one in message.inputs:
        one.datatype = rng.choice(("FP32", "INT32", "BF16", "", "fp32", "BYTES", "BOOL", "FP16", "\x00"))


def _raw(rng: random.Random, message: pb.ModelInferRequest) -> None:
    del message.raw_input_contents[rng.randint(0, 1) :]
    for _ in range(rng.randint(0, 2)):
        message.raw_input_contents.append(rng.randbytes(rng.choice((0, 1, 2, 4, 8, 16, 64))))


def _contents(rng: random.Random, message: pb.ModelInferRequest) -> None:
    for one in message.inputs:
        field = rng.choice(one.contents.DESCRIPTOR.fields).name
        values = [b"\xff"] if field == "bytes_contents" else [True] if field == "bool_contents" else [1]
        getattr(one.contents, field).extend(values * rng.randint(1, 3))


def _parameter(rng: random.Random, message: pb.ModelInferRequest) -> None:
    target = rng.choice((message, *message.inputs, *message.outputs))
    value = target.parameters[rng.choice(("priority", "timeout", "classification", "shared_memory_region", "mine", ""))]
    match rng.randint(0, 5):
        case 0:
            value.int64_param = rng.choice((-1, 0, 1, 2, 5, 2**62))
        case 1:
            value.string_param = rng.choice(("", "x", "é"))
        case 2:
            value.double_param = rng.choice((float("nan"), float("inf"), 0.5))
        case 3:
            value.bool_param = True
        case 4:
            value.uint64_param = 2**64 - 1


def _output(rng: random.Random, message: pb.ModelInferRequest) -> None:
    message.outputs.add(name=rng.choice(("y", "y", "x", "", "logits")))


def _again(_rng: random.Random, message: pb.ModelInferRequest) -> None:
    if message.inputs:
        message.inputs.add().CopyFrom(message.inputs[0])


def _rename(rng: random.Random, message: pb.ModelInferRequest) -> None:
    for one in message.inputs:
        one.name = rng.choice(("", "y", "image", "x" * 5000, "é"))


_CHANGES: tuple[Callable[[random.Random, pb.ModelInferRequest], None], ...] = (
    _shape, _datatype, _raw, _contents, _parameter, _output, _again, _rename,
)  # fmt: skip


def raw_input(rng: random.Random) -> RawGrpcInput:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    frames = b"".join(
        rng.randint(0, 40).to_bytes(3, "big")
        + bytes((rng.randint(0, 12), rng.randint(0, 255)))
        + rng.randbytes(rng.randint(4, 40))
        for _ in range(rng.randint(1, 4))
    )
    data = rng.choice((preface + frames, frames, broken(rng, preface), b"GET / HTTP/1.1\r\n\r\n"))
    return RawGrpcInput(data)
