"""The gRPC transport against the stock client, and against a raw channel."""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as public
from tritonclient.utils import InferenceServerException

from common.errors import ConfigError
from common.request import Priority, Reason
from common.telemetry.events import BatchDone
from common.transport.grpc_server import serve_grpc
from tests.common.transport.conftest import Served
from tests.common.transport.fakes import FakeTarget, plane

X = np.arange(6, dtype=np.float32).reshape(3, 2)


async def stock(served: Served, call: Any, address: str = "") -> Any:
    def run() -> Any:
        with triton.InferenceServerClient(address or served.grpc) as client:
            return call(client)

    return await asyncio.to_thread(run)


def tensor(name: str, array: np.ndarray, datatype: str = "FP32") -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def typed(model: str, datatype: str, shape: list[int], **contents: Any) -> public.ModelInferRequest:
    request = public.ModelInferRequest(model_name=model)
    request.inputs.add(name="t", datatype=datatype, shape=shape, contents=public.InferTensorContents(**contents))
    return request


async def raw_infer(served: Served, request: public.ModelInferRequest, **call: Any) -> Any:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=public.ModelInferRequest.SerializeToString,
            response_deserializer=public.ModelInferResponse.FromString,
        )
        return await method(request, **call)


async def test_stock_client_gets_right_values(served: Served) -> None:
    answer = await stock(
        served,
        lambda client: client.infer(
            "double", [tensor("x", X)], request_id="call-7", priority=1, timeout=5_000_000, parameters={"note": "hi"}
        ),
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), X * 2)
    said = answer.get_response()
    assert (said.id, said.model_name, said.model_version) == ("call-7", "double", "3")
    assert said.parameters["x-outrider-by"].string_param == "node-a"
    request = served.target.requests[0]
    assert request.context.priority is Priority.REALTIME
    assert dict(request.parameters) == {"note": "hi"}


async def test_stock_client_works_over_a_unix_socket(served: Served) -> None:
    answer = await stock(served, lambda client: client.infer("double", [tensor("x", X)]), served.grpc_uds)
    np.testing.assert_array_equal(answer.as_numpy("y"), X * 2)


async def test_stock_client_moves_bytes_both_ways(served: Served) -> None:
    texts = np.array([[b"\xff\x00", b""], [b"plain", b"e\xcc\x81"]], dtype=object)
    answer = await stock(served, lambda client: client.infer("echo", [tensor("t", texts, "BYTES")]))
    assert answer.as_numpy("t").tolist() == texts.tolist()


async def test_stock_client_sees_server_and_models(served: Served) -> None:
    def look(client: Any) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata().name == "node-a"
        assert client.is_model_ready("double", "3")
        assert not client.is_model_ready("asleep")
        metadata = client.get_model_metadata("double")
        assert (metadata.versions, metadata.inputs[0].shape) == (["3"], [-1, 2])
        client.unload_model("double")
        assert not client.is_model_ready("double")
        client.load_model("double")
        index = client.get_model_repository_index().models
        assert {m.name: m.state for m in index} == {"double": "READY", "echo": "READY", "asleep": "UNAVAILABLE"}
        with pytest.raises(InferenceServerException, match="is not known here"):
            client.is_model_ready("nothing")
        with pytest.raises(InferenceServerException, match="takes no parameters"):
            client.load_model("double", config="{}")

    await stock(served, look)


async def test_stock_client_gets_classes(served: Served) -> None:
    outputs = [triton.InferRequestedOutput("probabilities", class_count=2)]
    answer = await stock(served, lambda client: client.infer("photos", [tensor("x", X)], outputs=outputs))
    assert answer.as_numpy("probabilities").tolist() == [[b"0.500000:0:label 0", b"0.250000:1:label 1"]] * 3


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_stock_client_sends_compressed_messages(served: Served, coding: str) -> None:
    answer = await stock(served, lambda client: client.infer("double", [tensor("x", X)], compression_algorithm=coding))
    np.testing.assert_array_equal(answer.as_numpy("y"), X * 2)


async def test_stock_client_reads_the_configuration(served: Served) -> None:
    tensors = [{"name": "x", "data_type": "TYPE_FP32", "dims": ["2"]}]
    expected = {
        "name": "double",
        "platform": "onnxruntime_cpu-int8",
        "backend": "onnxruntime",
        "max_batch_size": 8,
        "input": tensors,
        "output": tensors,
    }
    config = await stock(served, lambda client: client.get_model_config("double", "3", as_json=True))
    assert config == {"config": expected}
    with pytest.raises(InferenceServerException, match="is not known here"):
        await stock(served, lambda client: client.get_model_config("nothing"))


async def test_stock_client_reads_the_statistics(served: Served) -> None:
    await stock(served, lambda client: client.infer("double", [tensor("x", X)]))
    served.statistics(BatchDone(model="double", rows=3, items=2, seconds=0.25))
    [entry] = (await stock(served, lambda client: client.get_inference_statistics("double"))).model_stats
    assert (entry.name, entry.version, entry.inference_count, entry.execution_count) == ("double", "3", 3, 1)
    assert (entry.inference_stats.success.count, entry.inference_stats.fail.count) == (1, 0)
    assert (entry.inference_stats.compute_infer.count, entry.inference_stats.compute_infer.ns) == (2, 500_000_000)
    assert (entry.batch_stats[0].batch_size, entry.batch_stats[0].compute_infer.count) == (3, 1)
    everything = (await stock(served, lambda client: client.get_inference_statistics())).model_stats
    assert [one.name for one in everything] == ["double", "echo"]
    with pytest.raises(InferenceServerException, match="is not known here"):
        await stock(served, lambda client: client.get_inference_statistics("nothing"))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.get_system_shared_memory_status(), "shared memory is not served"),
        (lambda c: c.register_system_shared_memory("r", "/r", 64), "shared memory is not served"),
        (lambda c: c.unregister_system_shared_memory(), "shared memory is not served"),
        (lambda c: c.get_cuda_shared_memory_status(), "shared memory is not served"),
        (lambda c: c.register_cuda_shared_memory("r", "aGFuZGxl", 0, 64), "shared memory is not served"),
        (lambda c: c.unregister_cuda_shared_memory("r"), "shared memory is not served"),
        (lambda c: c.get_trace_settings("double"), "trace settings are not served"),
        (lambda c: c.update_trace_settings(settings={"trace_rate": "1"}), "trace settings are not served"),
        (lambda c: c.get_log_settings(), "log settings are not served"),
        (lambda c: c.update_log_settings({"log_info": True}), "log settings are not served"),
    ],
)
async def test_stock_client_is_told_what_is_not_served(served: Served, call: Any, says: str) -> None:
    with pytest.raises(InferenceServerException, match=says) as caught:
        await stock(served, call)
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


async def test_shared_memory_tensors_are_refused(served: Served) -> None:
    there = triton.InferInput("x", [3, 2], "FP32")
    there.set_shared_memory("r", 24)
    out = triton.InferRequestedOutput("y")
    out.set_shared_memory("r", 24)
    with pytest.raises(InferenceServerException, match=r"inputs\[0\].*shared memory is not served"):
        await stock(served, lambda client: client.infer("double", [there]))
    with pytest.raises(InferenceServerException, match=r"outputs\[0\].*shared memory is not served"):
        await stock(served, lambda client: client.infer("double", [tensor("x", X)], outputs=[out]))


async def test_stock_client_streams_and_errors_leave_the_stream_open(served: Served) -> None:
    def run(client: Any) -> list[tuple[Any, Any]]:
        replies: queue.Queue[tuple[Any, Any]] = queue.Queue()
        client.start_stream(lambda result, error: replies.put((result, error)), compression_algorithm="gzip")
        for i, model in enumerate(("double", "nothing", "buggy", "double")):
            client.async_stream_infer(
                model, [tensor("x", X + i)], request_id=f"call-{i}", priority=1, enable_empty_final_response=True
            )
        got = [replies.get(timeout=10) for _ in range(4)]
        client.stop_stream()
        return got

    first, unknown, fault, last = await stock(served, run)
    for (result, error), i in ((first, 0), (last, 3)):
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), (X + i) * 2)
        said = result.get_response()
        assert (said.id, said.model_version, said.parameters["x-outrider-by"].string_param) == (
            f"call-{i}",
            "3",
            "node-a",
        )
        assert said.parameters["triton_final_response"].bool_param
    assert "is not known here" in unknown[1].message()
    assert "internal error" in fault[1].message()
    assert "secret" not in fault[1].message()
    request = served.target.requests[0]
    assert (request.context.id, request.context.priority) == ("call-0", Priority.REALTIME)
    assert not request.parameters


async def test_stream_goes_on_after_bytes_that_are_no_message(served: Served) -> None:
    good = typed("echo", "FP32", [1], fp32_contents=[1.0]).SerializeToString()
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        method = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=public.ModelStreamInferResponse.FromString,
        )
        call = method(iter([b"\xff\xff\xff", good]), metadata=(("x-outrider-request-id", "one"),))
        bad, answer = [reply async for reply in call]
    assert "not a ModelInferRequest" in bad.error_message
    assert answer.infer_response.outputs[0].name == "t"
    assert served.target.requests[0].context.id != "one"


async def test_a_stream_says_which_of_its_requests_failed(served: Served) -> None:
    """As Triton does: the error's message has the id, and says that nothing more comes for it."""
    failing = [typed(model, "FP32", [1], fp32_contents=[1.0]) for model in ("nothing", "buggy", "echo")]
    failing[2].inputs[0].name = ""
    for i, request in enumerate(failing):
        request.id = f"call {i}"
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        method = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=public.ModelStreamInferResponse.FromString,
        )
        sent = [b"\xff\xff\xff", *(request.SerializeToString() for request in failing)]
        replies = [reply async for reply in method(iter(sent))]
    assert all(reply.error_message for reply in replies)
    assert [reply.infer_response.id for reply in replies] == ["", "call 0", "call 1", "call 2"]
    assert all(reply.infer_response.parameters["triton_final_response"].bool_param for reply in replies)


async def test_cancelled_stream_cancels_its_call(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(typed("slow", "FP32", [1], fp32_contents=[1.0]).SerializeToString())
        await asyncio.wait_for(served.target.started.wait(), 5)
        call.cancel()
        await asyncio.wait_for(served.target.was_cancelled.wait(), 5)


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-5, 7]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [1, 65535]),
        ("UINT32", "uint_contents", [1, 2**32 - 1]),
        ("UINT64", "uint64_contents", [1, 2**64 - 1]),
        ("FP32", "fp32_contents", [0.5, float("inf")]),
        ("FP64", "fp64_contents", [0.1, -1e300]),
        ("BYTES", "bytes_contents", [b"\xff", b""]),
    ],
)
async def test_typed_contents_arrive_exactly(served: Served, datatype: str, field: str, values: list[Any]) -> None:
    await raw_infer(served, typed("echo", datatype, [2, 1], **{field: values}))
    got = served.target.requests[0].inputs["t"]
    assert got.shape == (2, 1)
    assert got.ravel().tolist() == values


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (typed("echo", "FP32", [2], fp32_contents=[1.0]), "1 values"),
        (typed("echo", "FP32", [1], fp64_contents=[1.0]), "given for FP32"),
        (typed("echo", "INT8", [1], int_contents=[200]), "INT8 cannot hold"),
        (typed("echo", "FP16", [1], fp32_contents=[1.0]), "raw contents"),
        (typed("echo", "FP99", [1], fp32_contents=[1.0]), "unknown datatype"),
        (typed("echo", "FP32", [-1], fp32_contents=[1.0]), "integers >= 0"),
        (typed("echo", "FP32", [2**40, 2**40], fp32_contents=[1.0]), "elements"),
        (typed("echo", "FP32", [0, 2**62, 2**62]), "elements"),
        (typed("echo", "FP32", [1] * 40, fp32_contents=[1.0]), "at most 32"),
        (public.ModelInferRequest(model_name="echo"), "at least one input"),
        (public.ModelInferRequest(model_name="echo", raw_input_contents=[b"x"]), "1 buffers for 0 inputs"),
    ],
)
async def test_bad_message_is_invalid_argument(served: Served, request_: public.ModelInferRequest, says: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw_infer(served, request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert says in caught.value.details()


async def test_bytes_that_are_no_message_are_invalid_argument(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="not a ModelInferRequest"):
            await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/inference.GRPCInferenceService/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_raw_and_typed_contents_do_not_mix(served: Served) -> None:
    request = typed("echo", "FP32", [1], fp32_contents=[1.0])
    request.raw_input_contents.append(b"\0\0\0\0")
    with pytest.raises(grpc.aio.AioRpcError, match="one of them"):
        await raw_infer(served, request)


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("nothing", grpc.StatusCode.NOT_FOUND),
        ("narrow", grpc.StatusCode.INVALID_ARGUMENT),
        ("full", grpc.StatusCode.UNAVAILABLE),
        ("sick", grpc.StatusCode.INTERNAL),
        ("buggy", grpc.StatusCode.INTERNAL),
    ],
)
async def test_errors_have_their_code(served: Served, model: str, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw_infer(served, typed(model, "FP32", [1], fp32_contents=[1.0]))
    assert caught.value.code() is code
    assert "secret" not in caught.value.details()
    hint = dict(caught.value.trailing_metadata()).get("retry-after")
    assert hint == ("2" if model == "full" else None)


async def test_answer_is_stamped_in_trailing_metadata(served: Served) -> None:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        call = method(
            typed("echo", "FP32", [1], fp32_contents=[1.0]).SerializeToString(),
            metadata=(("x-outrider-reason", "overload"), ("x-outrider-request-id", "id-1")),
        )
        await call
        trailing = {k: v for k, v in await call.trailing_metadata() if k.startswith("x-outrider")}
    assert trailing == {
        "x-outrider-target": "edge",
        "x-outrider-reason": "overload",
        "x-outrider-model": "echo",
        "x-outrider-version": "3",
        "x-outrider-by": "node-a",
        "x-outrider-request-id": "id-1",
    }
    assert served.target.requests[0].context.reason is Reason.OVERLOAD


async def test_cancelled_call_cancels_the_work(served: Served) -> None:
    call = asyncio.create_task(raw_infer(served, typed("slow", "FP32", [1], fp32_contents=[1.0])))
    async with asyncio.timeout(5):
        await served.target.started.wait()
        call.cancel()
        async with asyncio.timeout(0.1):
            await served.target.was_cancelled.wait()


async def test_transport_deadline_is_the_callers_deadline(served: Served) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await raw_infer(served, typed("slow", "FP32", [1], fp32_contents=[1.0]), timeout=0.05)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert served.target.requests[0].context.deadline < float("inf")


async def test_call_without_deadline_has_none(served: Served) -> None:
    await raw_infer(served, typed("echo", "FP32", [1], fp32_contents=[1.0]))
    assert served.target.requests[0].context.deadline == float("inf")


async def test_large_tensors_pass(served: Served) -> None:
    big = np.zeros((1, 16 << 20), dtype=np.float32)  # 64 MiB
    answer = await stock(served, lambda client: client.infer("echo", [tensor("t", big)]))
    assert answer.as_numpy("t").nbytes == 64 << 20


async def test_port_in_use_is_a_config_error(served: Served) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        async with serve_grpc(served.dataplane, port=int(served.grpc.split(":")[1])):
            pass


async def test_idle_stream_ends_with_its_server() -> None:
    async with serve_grpc(plane(FakeTarget()), drain_s=0.1) as server:
        channel = grpc.aio.insecure_channel(server.addresses[0])
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(typed("echo", "FP32", [1], fp32_contents=[1.0]).SerializeToString())
        assert await asyncio.wait_for(call.read(), 5)
    with pytest.raises(grpc.aio.AioRpcError):
        await asyncio.wait_for(call.read(), 5)
    await channel.close()
