"""Cases of requests that users of other serving systems reported: batches of one, fallback, what is no request."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest

from common.errors import EngineError, InvalidRequest, OutriderError
from common.request import Request
from common.serving.engine import Batch
from common.telemetry.events import RequestDone
from common.transport import oip_grpc
from common.transport.grpc_client import OipClient
from common.transport.proto import oip_pb2 as pb
from edge import Node
from tests.cases.live import INFER, MODEL, HeldEngine, body, held_cloud, held_node, node_config, queued, until
from tests.proxy import proxy

X = np.array([[1.0, 2.0]], np.float32)
LENGTH = "Inference-Header-Content-Length"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[tuple[Node, HeldEngine]]:
    async with held_node(tmp_path) as one:
        yield one


@pytest.fixture
async def http(node: tuple[Node, HeldEngine]) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(node[0].endpoint()["http"]) as session:
        yield session


# --- 9: a batch of one ---

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"outputs": [{"name": "half"}]},
    {"outputs": [{"name": "half"}, {"name": "logits"}]},
    {"outputs": [{"name": "logits", "parameters": {"classification": 1}}]},
    {"parameters": {"classification": 2, "note": "kept apart"}},
    {"id": "my-own", "parameters": {"priority": 2}},
)


async def test_case_9_a_request_alone_and_among_others_is_answered_alike(
    node: tuple[Node, HeldEngine], http: aiohttp.ClientSession
) -> None:
    """Serving 9: a batch of one loses its parameters, or ignores the outputs that were asked for."""

    async def ask(number: int) -> dict[str, Any]:
        async with http.post(INFER, json=body((number, 0.25), **ASKED[number])) as reply:
            assert reply.status == 200
            return dict(await reply.json())

    alone = [await ask(number) for number in range(len(ASKED))]
    _, engine = node
    assert engine.batches == [1] * len(ASKED)
    assert [output["name"] for output in alone[2]["outputs"]] == ["half", "logits"]  # in the order asked
    assert alone[1]["outputs"][0]["data"] == [0.5, 0.125]
    assert alone[3]["outputs"][0]["shape"] == [1, 1]
    assert alone[5]["id"] == "my-own"
    engine.hold()
    first = asyncio.create_task(ask(0))
    await until(lambda: len(engine.batches) == len(ASKED) + 1)
    together = [asyncio.create_task(ask(number)) for number in range(len(ASKED))]
    await until(lambda: queued(node[0]) == len(ASKED))
    engine.let_go()
    assert [await call for call in together] == alone
    assert engine.batches[-1] == len(ASKED)  # they did share one
    await first


async def test_case_9_what_is_wrong_with_one_request_is_not_its_neighbours(
    node: tuple[Node, HeldEngine], http: aiohttp.ClientSession
) -> None:
    """Serving 9: the same, for a request that is refused: it is refused alone and among others, and costs nobody."""
    wrong: tuple[dict[str, Any], ...] = (
        {"outputs": [{"name": "nope"}]},
        {"outputs": [{"name": "half"}, {"name": "half"}]},
        {"parameters": {"priority": 5}},
        {"parameters": {"timeout": "1"}},
        {"inputs": [*body()["inputs"], {"name": "z", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}]},
    )
    _, engine = node
    engine.hold()
    good = [asyncio.create_task(http.post(INFER, json=body())) for _ in range(3)]
    await until(lambda: queued(node[0]) == 2)
    for more in wrong:
        async with http.post(INFER, json=body() | more) as reply:
            assert reply.status == 400
    engine.let_go()
    assert [(await call).status for call in good] == [200] * 3


# --- 11: fallback ---


async def test_case_11_one_failure_is_tried_once_at_each_place_and_a_callers_fault_nowhere_else(
    tmp_path: Path,
) -> None:
    """Serving 11: one malformed argument is tried everywhere, a failure goes round and round."""
    at_worker: list[RequestDone] = []

    def hear(event: object) -> None:
        if isinstance(event, RequestDone):
            at_worker.append(event)

    def broken(_batch: Batch) -> Exception:
        return EngineError(MODEL, "no memory")

    async with held_cloud(on_event=hear) as cloud, held_node(tmp_path, gateway=cloud.address) as at:
        node, engine = at
        engine.fail = cloud.engine.fail = broken
        with pytest.raises(EngineError):
            await node.infer(MODEL, {"x": X})
        assert (len(engine.batches), len(at_worker)) == (1, 1)
        for inputs in ({"y": X}, {"x": X.astype(np.int64)}, {"x": X, "z": X}, {}):
            with pytest.raises(InvalidRequest):
                await node.infer(MODEL, inputs)
        with pytest.raises(InvalidRequest):
            await node.infer(MODEL, {"x": X}, outputs=("nope",))
        assert (len(engine.batches), len(at_worker)) == (1, 1)
        await node.dataplane.catalog.unload(MODEL)
        with pytest.raises(InvalidRequest):  # the cloud is asked, since only it has the model: once
            await node.infer(MODEL, {"x": X.astype(np.int64)})
        assert len(at_worker) == 2


async def test_case_11_a_storm_of_failures_stays_within_the_retry_budget(tmp_path: Path) -> None:
    """Serving 11: without a cap each failure on the edge doubles the load on the cloud."""
    at_worker: list[object] = []
    async with held_cloud(on_event=at_worker.append) as cloud, held_node(tmp_path, gateway=cloud.address) as at:
        node, engine = at
        engine.fail = cloud.engine.fail = lambda _batch: EngineError(MODEL, "no memory")

        async def fails(times: int) -> int:
            """How many calls have reached the worker, after so many more have failed."""
            for _ in range(times):
                with pytest.raises(OutriderError):
                    await node.infer(MODEL, {"x": X})
            return sum(isinstance(event, RequestDone) for event in at_worker)

        # ten tokens, one less for each failure anywhere, no retry at five: two calls, then the edge's third failure
        assert await fails(4) == 2
        assert await fails(96) <= 10  # what the breakers of both let through, a probe each half second among it
        assert len(engine.batches) <= 10


async def test_case_11_processes_that_pass_a_call_round_stop_soon(tmp_path: Path) -> None:
    """Serving 11: fallback cycles loop. Two nodes, each the other's cloud, and neither has the model."""
    passed: list[RequestDone] = []

    def hear(event: object) -> None:
        if isinstance(event, RequestDone):
            passed.append(event)

    async with proxy("127.0.0.1:1") as link:
        second_config = node_config(tmp_path / "b", gateway=link.address)
        async with Node(second_config, on_event=hear) as second:
            address = second.endpoint()["grpc"]
            async with Node(node_config(tmp_path / "a", gateway=address), on_event=hear) as first:
                link.lead_to(first.endpoint()["grpc"])
                with pytest.raises(InvalidRequest, match="passed on 9 times"):
                    await first.infer("nobodys", {"x": X}, timeout_s=20.0)
    assert len(passed) == 8


# --- 19, 20: what is no request ---

JSON = json.dumps(body()).encode()
BINARY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}]}
).encode()
RAW = X.tobytes()


def shaped(shape: Any, data: Any = (1, 2)) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": shape, "data": data}]}).encode()


def b64(data: bytes) -> Any:
    return {"b64": base64.b64encode(data).decode()}


HOSTILE: tuple[tuple[str, bytes, list[str]], ...] = (
    ("header length beyond the body", BINARY + RAW, [str(len(BINARY) + 9)]),
    ("header length far beyond", BINARY + RAW, ["9" * 30]),
    ("negative header length", BINARY + RAW, ["-1"]),
    ("header length zero", BINARY + RAW, ["0"]),
    ("header length that is no number", BINARY + RAW, ["0x10"]),
    ("empty header length", BINARY + RAW, [""]),
    ("header length twice", BINARY + RAW, [str(len(BINARY)), str(len(BINARY))]),
    ("header lengths that disagree", BINARY + RAW, [str(len(BINARY)), "1"]),
    ("header length inside the JSON", BINARY + RAW, [str(len(BINARY) - 3)]),
    ("binary data, no header length", BINARY + RAW, []),
    ("binary size, no header length", BINARY, []),
    ("less binary data than said", BINARY + RAW[:4], [str(len(BINARY))]),
    ("more binary data than said", BINARY + RAW + b"!", [str(len(BINARY))]),
    ("a b64 object for the data", shaped([1, 2], b64(RAW)), []),
    ("b64 objects in the data", shaped([1, 2], [b64(RAW[:4]), b64(RAW[4:])]), []),
    ("a dimension of -1", shaped([-1, 2]), []),
    ("negative dimensions whose product is right", shaped([-1, -2]), []),
    ("a dimension of 0", shaped([0, 2], []), []),
    ("a fraction of a dimension", shaped([1.0, 2]), []),
    ("a dimension that is true", shaped([True, 2]), []),
    ("a shape that is no list", shaped("12"), []),
    ("no shape", json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "data": [1, 2]}]}).encode(), []),
    ("a product of 2**64", shaped([2**32, 2**32], []), []),
    ("a product of 2**64 + 2", shaped([6148914691236517206, 3]), []),
    ("a product of 2**64 with binary data", BINARY.replace(b"[1, 2]", b"[4294967296, 4294967296]") + RAW, ["length"]),
    ("a product that wraps to the bytes", BINARY.replace(b"[1, 2]", b"[4611686018427387905, 8]") + RAW, ["length"]),
    ("a dimension of 2**63", shaped([2**63, 2]), []),
    ("a dimension of 10**30", JSON.replace(b"[1, 2]", b"[" + b"1" + b"0" * 30 + b", 2]", 1), []),
    ("forty dimensions", shaped([1] * 39 + [2]), []),
)


@pytest.mark.parametrize(
    ("content", "lengths"), [(content, lengths) for _, content, lengths in HOSTILE], ids=[one[0] for one in HOSTILE]
)
async def test_cases_19_and_20_what_is_no_request_is_400_and_the_server_lives(
    node: tuple[Node, HeldEngine], http: aiohttp.ClientSession, content: bytes, lengths: list[str]
) -> None:
    """Serving 19, 20: b64 objects, shape -1, header lengths, products that overflow take servers down."""
    size = len(content) - len(RAW)
    headers = [(LENGTH, str(size) if text == "length" else text) for text in lengths]
    async with http.post(INFER, data=content, headers=headers) as reply:
        assert reply.status == 400
        assert (await reply.json())["error"]
    _, engine = node
    assert engine.seen == []
    async with http.post(INFER, data=BINARY + RAW, headers={LENGTH: str(len(BINARY))}) as reply:
        assert reply.status == 200


async def test_case_20_over_grpc_too(node: tuple[Node, HeldEngine]) -> None:
    """Serving 20: the length check in the other transport, whose shapes are 64-bit integers."""
    one, engine = node
    shapes: tuple[list[int], ...] = (
        [2**32, 2**32],
        [2**62, 4],
        [-1, 2],
        [-1, -2],
        [0, 2],
        [2**63 - 1, 2],
        [4611686018427387905, 8],
        [],
    )
    async with OipClient(one.endpoint()["grpc"]) as client, grpc.aio.insecure_channel(client.address) as channel:
        method = channel.unary_unary(
            f"/{oip_grpc.SERVICE}/ModelInfer", request_serializer=pb.ModelInferRequest.SerializeToString
        )
        for shape in shapes:
            message = oip_grpc.write_request(Request(model=MODEL, inputs={"x": X}))
            message.inputs[0].ClearField("shape")
            message.inputs[0].shape.extend(shape)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, shape
        assert engine.seen == []
        await client.infer(Request(model=MODEL, inputs={"x": X}))
