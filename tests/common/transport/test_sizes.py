"""Large messages: what is refused before it is parsed, and what the event loop does while one is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import struct
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as public

from common.errors import InvalidInput
from common.request import Response, Stamp
from common.tensors import MAX_BYTES_ELEMENTS, unpack
from common.transport import oip, oip_grpc, oip_json
from common.transport.off_loop import _threads
from common.transport.proto import oip_pb2 as pb
from common.transport.sizes import is_long_answer, is_long_body, is_long_message
from tests.common.transport.conftest import Served

COUNT = 70_000  # BYTES elements whose length prefixes alone make a body long
EMPTY = bytes(4 * COUNT)
_16_MIB, _256_KIB = 16 << 20, 256 << 10


def http_bytes(count: int, data: bytes, name: str = "t") -> tuple[bytes, dict[str, str]]:
    parameters = {"binary_data_size": len(data)}
    one = {"name": name, "datatype": "BYTES", "shape": [count], "parameters": parameters}
    head = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    return head + data, {oip_json.HEADER_LENGTH: str(len(head))}


def grpc_bytes(count: int, data: bytes, **message: Any) -> public.ModelInferRequest:
    request = public.ModelInferRequest(**message, raw_input_contents=[data])
    request.inputs.add(name="t", datatype="BYTES", shape=[count])
    return request


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidInput) as refused:
        call()
    return str(refused.value)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0.005)


@pytest.fixture
async def busy() -> AsyncIterator[threading.Event]:
    """Both threads for long messages wait for this event: a call that needs one has not been parsed yet."""
    free = threading.Event()
    waiting = [_threads.submit(free.wait) for _ in range(_threads._max_workers)]
    try:
        await until(lambda: all(one.running() for one in waiting))
        yield free
    finally:
        free.set()


def is_queued() -> bool:
    return _threads._work_queue.qsize() == 1


@contextlib.asynccontextmanager
async def asking(served: Served, transport: str) -> AsyncIterator[tuple[asyncio.Task[int], Callable[[], Any]]]:
    """A long call in progress, which ends with the number of its answer's elements, and a way to make a small one."""
    if transport == "http":
        async with aiohttp.ClientSession(f"http://{served.http}") as session:
            body, headers = http_bytes(COUNT, EMPTY)

            async def ask(body: bytes, headers: dict[str, str]) -> int:
                async with session.post("/v2/models/echo/infer", data=body, headers=headers) as answer:
                    data, size = await answer.read(), int(answer.headers[oip_json.HEADER_LENGTH])
                    return unpack(data[size:], "BYTES", (-(len(data) - size) // -4,), "t").size

            long = asyncio.create_task(ask(body, headers))
            yield long, lambda: ask(*http_bytes(1, bytes(4)))
    else:
        async with grpc.aio.insecure_channel(served.grpc) as channel:
            method = channel.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=public.ModelInferRequest.SerializeToString,
                response_deserializer=public.ModelInferResponse.FromString,
            )

            async def call(count: int) -> int:
                answer = await method(grpc_bytes(count, bytes(4 * count), model_name="echo"))
                return len(answer.raw_output_contents[0]) // 4

            long = asyncio.create_task(call(COUNT))
            yield long, lambda: call(1)


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_calls_are_answered_while_a_long_one_is_parsed(
    served: Served, busy: threading.Event, transport: str
) -> None:
    async with asking(served, transport) as (long, small):
        await until(is_queued)
        assert await asyncio.wait_for(small(), 5) == 1
        assert not long.done()
        assert len(served.target.requests) == 1
        busy.set()
        assert await asyncio.wait_for(long, 5) == COUNT


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_a_long_call_whose_caller_left_never_starts(
    served: Served, busy: threading.Event, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Future[Any]] = []
    submit = _threads.submit

    def recorded(*call: Any) -> Future[Any]:
        submitted.append(submit(*call))
        return submitted[-1]

    monkeypatch.setattr(_threads, "submit", recorded)
    async with asking(served, transport) as (long, small):
        await until(is_queued)
        long.cancel()
        await until(submitted[-1].cancelled)
        busy.set()
        assert await asyncio.wait_for(small(), 5) == 1
    assert len(served.target.requests) == 1


def test_one_bytes_tensor_has_at_most_a_million_elements() -> None:
    over = MAX_BYTES_ELEMENTS + 1
    says = f"{over} BYTES elements; accepted: at most 1048576 in one tensor"
    body, headers = http_bytes(over, bytes(4 * over))
    assert refusal(lambda: oip_json.parse_infer(body, headers[oip_json.HEADER_LENGTH])) == f"inputs[0].data: {says}"
    texts = b'{"inputs": [{"name": "t", "datatype": "BYTES", "shape": [%d], "data": [%s""]}]}' % (
        over,
        b'"",' * (over - 1),
    )
    assert refusal(lambda: oip_json.parse_infer(texts)) == f"inputs[0].data: {says}"
    message = pb.ModelInferRequest(raw_input_contents=[bytes(4 * over)])
    message.inputs.add(name="t", datatype="BYTES", shape=[over])
    assert refusal(lambda: oip_grpc.parse_infer(message)) == f"raw_input_contents[0]: {says}"
    message.ClearField("raw_input_contents")
    message.inputs[0].contents.bytes_contents.extend([b""] * over)
    assert refusal(lambda: oip_grpc.parse_infer(message)) == f"inputs[0].contents.bytes_contents: {says}"


async def test_json_over_16_mib_is_refused_before_it_is_parsed(served: Served) -> None:
    broken = b"{" * (_16_MIB + 1)  # no JSON: whoever parsed it would say so
    async with aiohttp.ClientSession(f"http://{served.http}") as session:
        for body, headers in ((broken, {}), (broken + bytes(8), {oip_json.HEADER_LENGTH: str(len(broken))})):
            async with session.post("/v2/models/echo/infer", data=io.BytesIO(body), headers=headers) as answer:
                assert (answer.status, (await answer.json())["error"]) == (
                    400,
                    "body: 16777217 bytes of JSON; accepted: at most 16777216; large tensors are binary data, not JSON",
                )
        data = b"[" * (_256_KIB + 1)
        async with session.post("/v2/repository/models/echo/load", data=data) as answer:
            assert (answer.status, "262145 bytes of JSON" in (await answer.json())["error"]) == (400, True)


def test_a_grpc_message_is_refused_before_it_is_parsed() -> None:
    """Each is broken behind what counts: whoever parsed it would say so."""
    broken = b"\xff"
    many = b"\x2a\x00" * 200_000 + bytes([0x3A, 0])  # inputs without anything in them
    assert refusal(lambda: oip_grpc.parse_message(pb.ModelInferRequest, many + broken)) == (
        "message: more than 4096 fields; accepted: 1024 inputs and outputs"
    )
    long = b"\x0a\x81\x80\x80\x08" + b"m" * (_16_MIB + 1)  # a model's name
    assert refusal(lambda: oip_grpc.parse_message(pb.ModelInferRequest, long + broken)) == (
        "message: more than 16777216 bytes beside raw_input_contents; accepted: large tensors as raw_input_contents"
    )
    assert "at most 262144 of a ModelReadyRequest" in refusal(
        lambda: oip_grpc.parse_message(pb.ModelReadyRequest, b"\xff" * (_256_KIB + 1))
    )
    group = b"\x2b" + bytes(_256_KIB)
    assert "not a ModelInferRequest" in refusal(lambda: oip_grpc.parse_message(pb.ModelInferRequest, group))


def test_raw_contents_of_any_length_are_parsed() -> None:
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(_16_MIB + 4)])
    message.inputs.add(name="x", datatype="FP32", shape=[(_16_MIB + 4) // 4])
    message.parameters["timeout"].int64_param = -1  # ten bytes long
    message.parameters["scale"].double_param = 0.5
    read = oip_grpc.parse_message(pb.ModelInferRequest, message.SerializeToString())
    assert read == message
    assert not is_long_message(read)


@pytest.mark.parametrize("field", ["inputs", "outputs", "parameters"])
def test_a_request_has_at_most_1024_of_a_kind(field: str) -> None:
    says = f"{field}: 1025 of them; accepted: at most 1024"
    tensors = [{"name": f"t{i}", "datatype": "FP32", "shape": [0], "data": []} for i in range(1025)]
    told: dict[str, Any] = {"inputs": tensors[:1], field: tensors}
    if field == "parameters":
        told[field] = {f"t{i}": 1 for i in range(1025)}
    assert refusal(lambda: oip_json.parse_infer(json.dumps(told).encode())) == says
    message = pb.ModelInferRequest()
    for i in range(1025):
        if field == "parameters":
            message.parameters[f"t{i}"].int64_param = 1
        else:
            getattr(message, field).add(name=f"t{i}")
    assert refusal(lambda: oip_grpc.parse_infer(message)) == says


def test_only_what_takes_long_leaves_the_loop() -> None:
    image = json.dumps({"inputs": [{"name": "x", "datatype": "UINT8", "shape": [_256_KIB], "parameters": {}}]}).encode()
    size = str(len(image))
    assert not is_long_body(image + bytes(_16_MIB), size)  # numbers in binary are not even copied
    assert is_long_body(image + bytes(_16_MIB), None)
    assert is_long_body(image.replace(b"UINT8", b"BYTES") + bytes(_256_KIB), size)
    hidden = image.replace(b"UINT8", rb"\u0042YTES")
    assert is_long_body(hidden + bytes(_256_KIB), str(len(hidden)))
    typed = pb.ModelInferRequest()
    typed.inputs.add(name="x", datatype="FP32", shape=[70_000]).contents.fp32_contents.extend([1.0] * 70_000)
    assert is_long_message(typed)


def test_many_bytes_of_an_answer_leave_the_loop_and_numbers_do_not() -> None:
    stamp = Stamp(target="edge", model="m", version="1")
    texts = np.full(20_000, b"x", dtype=object)
    assert is_long_answer(Response(outputs={"y": texts}, stamp=stamp))
    assert not is_long_answer(Response(outputs={"y": np.zeros(1 << 20, np.float32)}, stamp=stamp))
    text, _ = oip_json.render_infer(Response(outputs={"y": texts}, stamp=stamp), oip.Body(inputs={}))
    assert json.loads(text)["outputs"][0]["data"] == ["x"] * 20_000
    assert struct.unpack_from(
        "<I", oip_grpc.render_infer(Response(outputs={"y": texts}, stamp=stamp), "").raw_output_contents[0]
    ) == (1,)
