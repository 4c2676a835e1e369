"""The HTTP transport against the stock client, and against raw requests."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from common.errors import ConfigError
from common.telemetry.events import BatchDone
from common.transport import http_infer, http_server
from common.transport.http_server import serve_http
from tests.common.transport.conftest import Served
from tests.common.transport.fakes import FakeTarget, plane

X = np.arange(6, dtype=np.float32).reshape(3, 2)
JSON_X = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 2], "data": X.ravel().tolist()}]}


@pytest.fixture
async def http(served: Served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{served.http}") as session:
        yield session


async def stock(served: Served, call: Any) -> Any:
    def run() -> Any:
        client = triton.InferenceServerClient(served.http)
        try:
            return call(client)
        finally:
            client.close()

    return await asyncio.to_thread(run)


def tensor(name: str, array: np.ndarray, *, is_binary: bool = True) -> triton.InferInput:
    kinds = {"f": "FP32", "i": "INT64", "O": "BYTES", "b": "BOOL"}
    one = triton.InferInput(name, list(array.shape), kinds[array.dtype.kind])
    return one.set_data_from_numpy(array, binary_data=is_binary)


@pytest.mark.parametrize("is_binary_in", [True, False])
@pytest.mark.parametrize("is_binary_out", [True, False])
async def test_stock_client_gets_right_values(served: Served, is_binary_in: bool, is_binary_out: bool) -> None:
    answer = await stock(
        served,
        lambda client: client.infer(
            "double",
            [tensor("x", X, is_binary=is_binary_in)],
            outputs=[triton.InferRequestedOutput("y", binary_data=is_binary_out)],
            request_id="call-7",
        ),
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), X * 2)
    said = answer.get_response()
    assert (said["id"], said["model_name"], said["model_version"]) == ("call-7", "double", "3")
    assert said["parameters"]["x-outrider-target"] == "edge"


async def test_stock_client_without_named_outputs_gets_binary(served: Served) -> None:
    texts = np.array([[b"\xff\x00"], [b"plain"]], dtype=object)
    answer = await stock(served, lambda client: client.infer("echo", [tensor("t", texts)]))
    assert answer.as_numpy("t").tolist() == texts.tolist()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("rows", [3, 10_000])
@pytest.mark.parametrize("is_binary", [True, False])
async def test_stock_client_moves_compressed_bodies_both_ways(
    served: Served, coding: str, rows: int, is_binary: bool
) -> None:
    x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
    answer = await stock(
        served,
        lambda client: client.infer(
            "double",
            [tensor("x", x, is_binary=is_binary)],
            outputs=[triton.InferRequestedOutput("y", binary_data=is_binary)],
            request_compression_algorithm=coding,
            response_compression_algorithm=coding,
        ),
    )
    np.testing.assert_array_equal(answer.as_numpy("y"), x * 2)


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [("gzip", "gzip"), ("deflate", "deflate"), ("gzip, deflate", None), ("br", None), ("", None)],
)
async def test_answer_is_compressed_for_who_names_one_coding(
    http: aiohttp.ClientSession, accepted: str, coding: str | None
) -> None:
    async with http.post("/v2/models/double/infer", json=JSON_X, headers={"Accept-Encoding": accepted}) as reply:
        assert (reply.status, reply.headers.get("Content-Encoding")) == (200, coding)
        assert (await reply.json())["outputs"][0]["data"] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


async def test_large_tensors_pass(served: Served) -> None:
    big = np.zeros((1, 16 << 20), dtype=np.float32)  # 64 MiB
    answer = await stock(served, lambda client: client.infer("echo", [tensor("t", big)]))
    assert answer.as_numpy("t").nbytes == 64 << 20


async def test_stock_client_reads_the_configuration(served: Served) -> None:
    tensors = [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}]
    expected = {
        "name": "double",
        "platform": "onnxruntime_cpu-int8",
        "backend": "onnxruntime",
        "max_batch_size": 8,
        "input": tensors,
        "output": tensors,
    }
    assert await stock(served, lambda client: client.get_model_config("double")) == expected
    assert await stock(served, lambda client: client.get_model_config("double", "3")) == expected
    for unknown in (("nothing",), ("double", "9")):
        with pytest.raises(InferenceServerException, match=r"known|version"):
            await stock(served, lambda client, unknown=unknown: client.get_model_config(*unknown))


async def test_stock_client_reads_the_statistics(served: Served) -> None:
    await stock(served, lambda client: client.infer("double", [tensor("x", X)]))
    served.statistics(BatchDone(model="double", rows=3, items=2, seconds=0.25))
    [entry] = (await stock(served, lambda client: client.get_inference_statistics("double", "3")))["model_stats"]
    assert (entry["name"], entry["version"]) == ("double", "3")
    assert (entry["inference_count"], entry["execution_count"]) == (3, 1)
    assert entry["inference_stats"]["success"]["count"] == 1
    assert entry["inference_stats"]["success"]["ns"] > 0
    assert entry["inference_stats"]["fail"] == {"count": 0, "ns": 0}
    assert entry["inference_stats"]["compute_infer"] == {"count": 2, "ns": 500_000_000}
    assert entry["batch_stats"] == [{"batch_size": 3, "compute_infer": {"count": 1, "ns": 250_000_000}}]
    everything = (await stock(served, lambda client: client.get_inference_statistics()))["model_stats"]
    assert [one["name"] for one in everything] == ["double", "echo"]  # those that are ready
    with pytest.raises(InferenceServerException, match="is not known here"):
        await stock(served, lambda client: client.get_inference_statistics("nothing"))


async def test_server_that_counts_nothing_says_so() -> None:
    async with (
        serve_http(plane(FakeTarget()), drain_s=1.0) as server,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
        session.get("/v2/models/stats") as reply,
    ):
        assert reply.status == 400
        assert "not counted" in (await reply.json())["error"]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.get_system_shared_memory_status(), "shared memory is not served"),
        (lambda c: c.get_system_shared_memory_status("r"), "shared memory is not served"),
        (lambda c: c.register_system_shared_memory("r", "/r", 64), "shared memory is not served"),
        (lambda c: c.unregister_system_shared_memory(), "shared memory is not served"),
        (lambda c: c.unregister_system_shared_memory("r"), "shared memory is not served"),
        (lambda c: c.get_cuda_shared_memory_status(), "shared memory is not served"),
        (lambda c: c.register_cuda_shared_memory("r", "aGFuZGxl", 0, 64), "shared memory is not served"),
        (lambda c: c.unregister_cuda_shared_memory("r"), "shared memory is not served"),
        (lambda c: c.get_trace_settings(), "trace settings are not served"),
        (lambda c: c.get_trace_settings("double"), "trace settings are not served"),
        (lambda c: c.update_trace_settings(settings={}), "trace settings are not served"),
        (lambda c: c.update_trace_settings("double", {}), "trace settings are not served"),
        (lambda c: c.get_log_settings(), "log settings are not served"),
        (lambda c: c.update_log_settings({}), "log settings are not served"),
    ],
)
async def test_stock_client_is_told_what_is_not_served(served: Served, call: Any, says: str) -> None:
    with pytest.raises(InferenceServerException, match=says) as caught:
        await stock(served, call)
    assert caught.value.status() == "400"


async def test_shared_memory_tensors_are_refused(served: Served) -> None:
    there = triton.InferInput("x", [3, 2], "FP32")
    there.set_shared_memory("r", 24)
    out = triton.InferRequestedOutput("y")
    out.set_shared_memory("r", 24)
    with pytest.raises(InferenceServerException, match=r"inputs\[0\].*shared memory is not served"):
        await stock(served, lambda client: client.infer("double", [there]))
    with pytest.raises(InferenceServerException, match=r"outputs\[0\].*shared memory is not served"):
        await stock(served, lambda client: client.infer("double", [tensor("x", X)], outputs=[out]))


async def test_stock_client_sees_server_and_models(served: Served) -> None:
    def look(client: Any) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata()["name"] == "node-a"
        assert client.is_model_ready("double")
        assert client.is_model_ready("double", "3")
        assert not client.is_model_ready("asleep")
        assert not client.is_model_ready("nothing")
        assert client.get_model_metadata("double") == {
            "name": "double",
            "versions": ["3"],
            "platform": "onnxruntime_cpu-int8",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
            "outputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        }
        client.unload_model("double")
        assert not client.is_model_ready("double")
        client.load_model("double")
        index = {m["name"]: m["state"] for m in client.get_model_repository_index()}
        assert index == {"double": "READY", "echo": "READY", "asleep": "UNAVAILABLE"}
        with pytest.raises(InferenceServerException, match="takes no parameters"):
            client.load_model("double", config="{}")

    await stock(served, look)


async def test_stock_client_gets_classes(served: Served) -> None:
    outputs = [triton.InferRequestedOutput("probabilities", class_count=2)]
    answer = await stock(served, lambda client: client.infer("photos", [tensor("x", X)], outputs=outputs))
    assert answer.as_numpy("probabilities").tolist() == [[b"0.500000:0:label 0", b"0.250000:1:label 1"]] * 3
    assert served.target.requests[0].outputs == ("probabilities",)


async def test_json_call_is_stamped(served: Served, http: aiohttp.ClientSession) -> None:
    headers = {"x-outrider-request-id": "id-1", "x-outrider-priority": "realtime", "x-outrider-reason": "overload"}
    async with http.post("/v2/models/double/infer", json=JSON_X, headers=headers) as reply:
        assert reply.status == 200
        body = await reply.json()
    assert body["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [3, 2], "data": [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]}
    ]
    stamp = {k.lower(): v for k, v in reply.headers.items() if k.lower().startswith("x-outrider")}
    assert stamp == {
        "x-outrider-target": "edge",
        "x-outrider-model": "double",
        "x-outrider-version": "3",
        "x-outrider-by": "node-a",
        "x-outrider-request-id": "id-1",
    }
    context = served.target.requests[0].context
    assert (context.id, context.priority.name, context.reason) == ("id-1", "REALTIME", None)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/v2/models/nothing/infer", 404, "known models: double, echo"),
        ("/v2/models/double/versions/9/infer", 404, "versions served: 3"),
        ("/v2/models/narrow/infer", 400, "accepted: at most 8"),
        ("/v2/models/sick/infer", 500, "no memory"),
        ("/v2/nowhere", 404, "Not Found"),
        ("/v2/health/live", 405, "Method Not Allowed"),
    ],
)
async def test_errors_are_json_with_their_status(
    http: aiohttp.ClientSession, path: str, status: int, says: str
) -> None:
    async with http.post(path, json=JSON_X) as reply:
        assert reply.status == status
        assert says in (await reply.json())["error"]


async def test_full_queue_is_503_with_retry_after(http: aiohttp.ClientSession) -> None:
    async with http.post("/v2/models/full/infer", json=JSON_X) as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "2")


async def test_unforeseen_fault_keeps_its_details(
    http: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    async with http.post("/v2/models/buggy/infer", json=JSON_X) as reply:
        assert reply.status == 500
        assert "secret" not in await reply.text()
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("headers", [{"x-outrider-deadline-ms": "30"}, {"x-outrider-deadline-ms": "0"}])
async def test_deadline_is_503_with_retry_after(http: aiohttp.ClientSession, headers: dict[str, str]) -> None:
    async with http.post("/v2/models/slow/infer", json=JSON_X, headers=headers) as reply:
        assert reply.status == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert "deadline" in (await reply.json())["error"]


async def test_timeout_parameter_is_a_deadline(http: aiohttp.ClientSession) -> None:
    body = JSON_X | {"parameters": {"timeout": 30_000}}
    async with http.post("/v2/models/slow/infer", json=body) as reply:
        assert reply.status == 503


async def test_disconnect_cancels_the_call(served: Served, http: aiohttp.ClientSession) -> None:
    call = asyncio.create_task(http.post("/v2/models/slow/infer", json=JSON_X))
    async with asyncio.timeout(5):
        await served.target.started.wait()
        call.cancel()
        async with asyncio.timeout(0.1):
            await served.target.was_cancelled.wait()


async def test_pictures_become_classes(served: Served, http: aiohttp.ClientSession) -> None:
    form = aiohttp.FormData()
    for picture in (b"\xff\xd8one", b"\xff\xd8two"):
        form.add_field("image", picture, filename="cat.jpg", content_type="image/jpeg")
    async with http.post("/v2/models/photos/classify?top=2", data=form) as reply:
        assert reply.status == 200
        assert reply.headers["x-outrider-target"] == "edge"
        body = await reply.json()
    best = [
        {"label": "label 0", "index": 0, "probability": 0.5},
        {"label": "label 1", "index": 1, "probability": 0.25},
    ]
    assert body == {"model": "photos", "version": "3", "classes": [best, best]}
    assert served.target.requests[0].inputs["image"].tolist() == [b"\xff\xd8one", b"\xff\xd8two"]


async def test_raw_picture_becomes_five_classes(served: Served, http: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "image/png"}
    async with http.post("/v2/models/photos/versions/3/classify", data=b"png", headers=headers) as reply:
        body = await reply.json()
    assert [len(picture) for picture in body["classes"]] == [5]
    assert served.target.requests[0].context.pin == "3"


@pytest.mark.parametrize(
    ("query", "content_type", "body", "says"),
    [
        ("?top=0", "image/png", b"x", "top"),
        ("?top=x", "image/png", b"x", "top"),
        ("", "text/plain", b"x", "Content-Type"),
        ("", "multipart/form-data", b"x", "form"),
        ("", "multipart/form-data; boundary=b", b"", "form"),
        ("", "multipart/form-data; boundary=b", b"--b\r\n\r\nx", "form"),
        ("", "multipart/form-data; boundary=b", b"--b--\r\n", "no picture"),
        (
            "",
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="z"\r\n\r\nq\r\n--b--',
            "'z'",
        ),
        (
            "",
            "multipart/form-data; boundary=b",
            b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\nx\r\n--c--\r\n--b--",
            "nested",
        ),
    ],
)
async def test_bad_upload_is_400(
    http: aiohttp.ClientSession, query: str, content_type: str, body: bytes, says: str
) -> None:
    headers = {"Content-Type": content_type}
    async with http.post(f"/v2/models/photos/classify{query}", data=body, headers=headers) as reply:
        assert reply.status == 400
        assert says in (await reply.json())["error"]


async def test_classify_of_a_model_without_classes_is_500(http: aiohttp.ClientSession) -> None:
    async with http.post("/v2/models/echo/classify", data=b"x", headers={"Content-Type": "image/png"}) as reply:
        assert reply.status == 500


async def test_body_over_the_limit_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_BODY_BYTES", 1000)
    monkeypatch.setattr(http_infer, "_MAX_BODY", 1000)
    async with serve_http(plane(FakeTarget()), drain_s=1.0) as server, aiohttp.ClientSession() as session:
        url = f"{server.addresses[0]}/v2/models/echo/infer"
        for headers, data in (({}, b"x" * 2000), ({"Content-Encoding": "gzip"}, gzip.compress(bytes(100_000)))):
            async with session.post(url, data=data, headers=headers) as reply:
                assert reply.status == 413
                assert "larger than 1000 bytes" in (await reply.json())["error"]


async def test_body_that_is_not_what_its_encoding_says_is_400(http: aiohttp.ClientSession) -> None:
    headers = {"Content-Encoding": "gzip"}
    async with http.post("/v2/models/echo/infer", data=b"not gzip", headers=headers) as reply:
        assert reply.status == 400
        assert "gzip" in (await reply.json())["error"]


@pytest.mark.parametrize("path", ["infer", "classify"])
async def test_client_that_leaves_within_its_body_costs_nothing(
    served: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    host, port = served.http.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v2/models/echo/{path} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode()
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)
    assert served.target.requests == []
    assert "ERROR" not in caplog.text


async def test_unix_socket_serves_the_same(served: Served) -> None:
    connector = aiohttp.UnixConnector(str(served.uds))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post("http://node/v2/models/double/infer", json=JSON_X) as reply,
    ):
        assert (await reply.json())["outputs"][0]["data"] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


async def test_metrics_are_what_was_handed_in(http: aiohttp.ClientSession) -> None:
    async with http.get("/metrics") as reply:
        assert await reply.read() == b"outrider_up 1\n"
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_index_lists_only_ready_models_when_asked(http: aiohttp.ClientSession) -> None:
    async with http.post("/v2/repository/index", json={"ready": True}) as reply:
        assert {m["name"] for m in await reply.json()} == {"double", "echo"}
    async with http.get("/v2/repository/index") as reply:
        assert len(await reply.json()) == 3
    async with http.post("/v2/repository/index", json={"ready": "yes"}) as reply:
        assert reply.status == 400
        assert "ready" in (await reply.json())["error"]


async def test_draining_server_is_not_ready_but_answers(served: Served, http: aiohttp.ClientSession) -> None:
    served.dataplane.start_draining()
    async with http.get("/v2/health/ready") as reply:
        assert (reply.status, reply.headers["Retry-After"]) == (503, "1")
    async with http.post("/v2/models/double/infer", json=JSON_X) as reply:
        assert reply.status == 200
    async with http.post("/v2/repository/models/double/load") as reply:
        assert reply.status == 503


async def test_port_in_use_is_a_config_error(served: Served) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        async with serve_http(served.dataplane, port=int(served.http.split(":")[1])):
            pass
