"""The description of the HTTP API: a valid document, of the routes that there are, whichever process serves them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openapi_spec_validator import OpenAPIV31SpecValidator

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.transport import http_server
from common.transport.http_server import http_app, serve_http
from common.transport.openapi import PATH, document
from common.transport.openapi_operations import OPERATIONS
from common.transport.process import ServingProcess
from common.transport.servers import ServerOptions
from common.transport.tenants import TenantOptions, key_sha256, new_key
from edge import CacheOptions, Node, NodeConfig
from tests.common.transport.conftest import Served
from tests.common.transport.fakes import FakeTarget, plane

LISTEN = ServerOptions(http_port=0)
METHODS = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}


def described(of: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method, path) for path, item in of["paths"].items() for method in item if method in METHODS}


def routed(app: web.Application) -> set[tuple[str, str]]:
    """HEAD comes with every GET, in aiohttp as in the description's text."""
    routes = {(route.method.lower(), route.resource.canonical) for route in app.router.routes() if route.resource}
    gets = {path for method, path in routes if method == "get"}
    assert {path for method, path in routes if method == "head"} == gets
    return {(method, path) for method, path in routes if method != "head"}


def test_description_is_valid() -> None:
    OpenAPIV31SpecValidator(json.loads(document())).validate()
    ids = [operation.id for operation in OPERATIONS]
    assert len(set(ids)) == len(ids)


@pytest.fixture(params=["node", "gateway", "worker"])
async def process(request: pytest.FixtureRequest) -> AsyncIterator[ServingProcess]:
    processes: dict[str, ServingProcess] = {
        "node": Node(NodeConfig(server=LISTEN, cache=CacheOptions(enabled=False))),
        "gateway": Gateway(GatewayConfig(workers=("127.0.0.1:9",), server=LISTEN)),
        "worker": Worker(WorkerConfig(server=LISTEN)),
    }
    async with processes[request.param] as process:
        yield process


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> list[web.Application]:
    """The applications that are served from here on, as they were built."""
    built: list[web.Application] = []

    def build(*args: Any, **kwargs: Any) -> web.Application:
        built.append(http_app(*args, **kwargs))
        return built[-1]

    monkeypatch.setattr(http_server, "http_app", build)
    return built


async def test_each_process_describes_exactly_the_routes_that_it_has(
    apps: list[web.Application], process: ServingProcess
) -> None:
    async with aiohttp.ClientSession(process.endpoint()["http"]) as session, session.get(PATH) as reply:
        assert (reply.status, reply.content_type) == (200, "application/json")
        served = json.loads(await reply.read())
    [app] = apps
    assert described(served) == routed(app)


async def test_head_is_what_get_would_be_without_the_body(served: Served) -> None:
    async with aiohttp.ClientSession(f"http://{served.http}") as session:
        for method, path in described(json.loads(document())):
            if method == "get":
                url = path.replace("{model}", "double").replace("{version}", "3").replace("{region}", "r")
                async with session.get(url) as get, session.head(url) as head:
                    assert (head.status, head.content_type) == (get.status, get.content_type), path
                    assert await head.read() == b""


async def test_keys_are_asked_for_where_the_description_says_so() -> None:
    key = new_key()
    tenants = [TenantOptions(name="a", key_sha256=(key_sha256(key),))]
    asked, open_ones = set(), set()
    async with (
        serve_http(plane(FakeTarget()), tenants=tenants, drain_s=1.0) as server,
        aiohttp.ClientSession(server.addresses[0]) as session,
    ):
        for method, path in described(json.loads(document())):
            url = path.replace("{model}", "double").replace("{version}", "3").replace("{region}", "r")
            async with session.request(method, url) as reply:
                if reply.status == 401:
                    assert reply.headers["WWW-Authenticate"]
                    asked.add((method, path))
                else:
                    open_ones.add((method, path))
            for headers in ({"Authorization": f"Bearer {key}"}, {"X-API-Key": key}):
                async with session.request(method, url, headers=headers) as reply:
                    assert reply.status != 401
    paths = json.loads(document())["paths"]
    assert open_ones == {(m, p) for m, p in asked | open_ones if paths[p][m].get("security") == []}
    assert asked == {(m, p) for m, p in asked | open_ones if "401" in paths[p][m]["responses"]}
    assert asked
