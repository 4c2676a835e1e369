"""A name that no model can have is not found at any border, and goes no further than that."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import aiohttp
import grpc
import pytest
from tritonclient.grpc import service_pb2 as public

from common.errors import NotFound
from common.transport import oip
from tests.common.transport.conftest import Served

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}).encode()
CONTROL = "m\x1b[2J"
REFUSED = {"long": "m" * 256, "control": CONTROL, "line": "m\nlevel=error"}


def infer(**named: str) -> public.ModelInferRequest:
    request = public.ModelInferRequest(**named)
    request.inputs.add(name="x", datatype="FP32", shape=[1], contents=public.InferTensorContents(fp32_contents=[1.0]))
    return request


@pytest.mark.parametrize("name", REFUSED.values(), ids=REFUSED)
async def test_http_knows_no_such_model(served: Served, name: str) -> None:
    model = quote(name)
    async with aiohttp.ClientSession(f"http://{served.http}") as session:
        for method, path in (
            ("POST", f"models/{model}/infer"),
            ("POST", f"models/echo/versions/{model}/infer"),
            ("POST", f"models/{model}/classify"),
            ("GET", f"models/{model}"),
            ("GET", f"models/{model}/ready"),
            ("GET", f"models/echo/versions/{model}/ready"),
            ("GET", f"models/{model}/config"),
            ("GET", f"models/{model}/stats"),
            ("POST", f"repository/models/{model}/load"),
            ("POST", f"repository/models/{model}/unload"),
        ):
            data, kind = (BODY, {"Content-Type": "image/png"}) if method == "POST" and "repo" not in path else (b"", {})
            async with session.request(method, f"/v2/{path}", data=data, headers=kind) as answer:
                assert answer.status == 404, path
                said = (await answer.json())["error"]
                assert f"{name[:80]!r}" in said, path
                assert len(said) < 250, path
        pin = {"x-outrider-pin": "7" * 256}
        async with session.post("/v2/models/echo/infer", data=BODY, headers=pin) as answer:
            assert answer.status == 404
    assert not served.target.requests


@pytest.mark.parametrize("name", REFUSED.values(), ids=REFUSED)
async def test_grpc_knows_no_such_model(served: Served, name: str) -> None:
    async with grpc.aio.insecure_channel(served.grpc) as channel:
        for method, request in (
            ("ModelInfer", infer(model_name=name)),
            ("ModelInfer", infer(model_name="echo", model_version=name)),
            ("ModelReady", public.ModelReadyRequest(name=name)),
            ("ModelReady", public.ModelReadyRequest(name="echo", version=name)),
            ("ModelMetadata", public.ModelMetadataRequest(name=name)),
            ("ModelConfig", public.ModelConfigRequest(name=name)),
            ("ModelStatistics", public.ModelStatisticsRequest(name=name)),
            ("RepositoryModelLoad", public.RepositoryModelLoadRequest(model_name=name)),
            ("RepositoryModelUnload", public.RepositoryModelUnloadRequest(model_name=name)),
        ):
            call: Any = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request.SerializeToString())
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND, method
            assert f"{name[:80]!r}" in (refused.value.details() or ""), method
            assert len(refused.value.details() or "") < 250, method
    assert not served.target.requests


def test_a_name_of_255_characters_in_any_language_is_one() -> None:
    oip.check_model("é" * 255, "模型 1.0-β")
    with pytest.raises(NotFound, match=r"^version '7{80}'\.\.\. is not known here; accepted: at most 255 characters"):
        oip.check_model("m", "7" * 256)
