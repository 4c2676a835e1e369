"""Keys and tenants: who is let in over HTTP, gRPC and Unix sockets, whose call it is, and what nobody gets to see."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from cloud.config import GatewayConfig, WorkerConfig
from common.cli import main
from common.config import load_toml, parse
from common.errors import ConfigError, Forbidden, InvalidRequest, TargetUnreachable, Unauthenticated
from common.request import Context, Reason, Request
from common.tensors import as_tensor
from common.transport import oip_grpc
from common.transport.grpc_client import OipClient
from common.transport.grpc_server import serve_grpc
from common.transport.http_server import serve_http
from common.transport.proto import oip_pb2 as pb
from common.transport.tenants import TenantOptions, read_key_file
from edge import NodeConfig
from tests.common.transport.fakes import FakeTarget, plane

ACME, ACME_NEXT, GLOBEX, NODE = "key-of-acme", "next-key-of-acme", "key-of-globex", "key-of-the-node"
WRONG = "a-wrong-key-that-nobody-may-see"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
REQUEST = Request(model="echo", inputs={"x": as_tensor([[1.0, 2.0]], "x")})


def sha256(*keys: str) -> tuple[str, ...]:
    return tuple(hashlib.sha256(key.encode()).hexdigest() for key in keys)


TENANTS = (
    TenantOptions(name="acme", key_sha256=sha256(ACME, ACME_NEXT)),
    TenantOptions(name="globex", key_sha256=sha256(GLOBEX)),
    TenantOptions(name="kitchen", key_sha256=sha256(NODE), may_act_for=("acme",)),
)


@dataclass
class Guarded:
    target: FakeTarget
    http: str
    http_uds: Path
    grpc: str
    grpc_uds: str

    async def post(self, path: str = "/v2/models/echo/infer", **headers: str) -> tuple[int, str, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.http}{path}", json=BODY, headers=headers) as reply,
        ):
            return reply.status, await reply.text(), reply.headers

    def tenants(self) -> list[str]:
        return [request.context.tenant for request in self.target.requests]


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    target, uds = FakeTarget(), tmp_path / "http.sock"
    served = plane(target)
    async with (
        serve_http(served, uds=uds, metrics=lambda: b"up 1\n", tenants=TENANTS) as http,
        serve_grpc(served, uds=tmp_path / "grpc.sock", tenants=TENANTS) as grpc,
    ):
        yield Guarded(target, http.addresses[0], uds, grpc.addresses[0], grpc.addresses[1])


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"Authorization": f"Bearer {ACME}"}, "acme"),
        ({"authorization": f"bearer  {ACME_NEXT} "}, "acme"),  # while one key takes the place of the other
        ({"X-API-Key": GLOBEX}, "globex"),
        ({"Authorization": f"Bearer {NODE}"}, "kitchen"),
        ({"Authorization": f"Bearer {ACME}", "x-outrider-tenant": "globex"}, "acme"),  # a stranger's word
        ({"Authorization": f"Bearer {NODE}", "x-outrider-tenant": "acme"}, "acme"),
    ],
)
async def test_the_key_names_the_tenant(guarded: Guarded, headers: dict[str, str], tenant: str) -> None:
    status, text, _ = await guarded.post(**headers)
    assert (status, guarded.tenants()) == (200, [tenant]), text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {WRONG}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {ACME}"},
        {"Authorization": ACME},
        {"X-API-Key": WRONG},
        {"X-API-Key": ""},
        {"X-API-Key": ACME[:-1]},
        {"X-API-Key": sha256(ACME)[0]},  # what the configuration holds opens nothing
        {"Authorization": f"Bearer {WRONG}", "X-API-Key": ACME},
        {"x-outrider-tenant": "acme"},
    ],
)
async def test_without_a_key_that_is_known_there_is_no_answer(
    guarded: Guarded, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    status, text, answered = await guarded.post(**headers)
    assert (status, answered["WWW-Authenticate"]) == (401, 'Bearer realm="outrider"')
    assert "Authorization: Bearer" in text
    for secret in (WRONG, ACME, *sha256(ACME)):
        assert secret not in text + caplog.text
    assert guarded.target.requests == []


async def test_a_node_may_not_act_for_a_tenant_that_is_not_in_its_list(guarded: Guarded) -> None:
    status, text, _ = await guarded.post(**{"X-API-Key": NODE, "x-outrider-tenant": "globex"})
    assert status == 403
    assert "'kitchen' may not act for tenant 'globex'; accepted: acme" in text
    assert guarded.target.requests == []


async def test_only_what_probes_and_scrapers_ask_for_is_open(guarded: Guarded) -> None:
    opened = {"/v2/health/live", "/v2/health/ready", "/metrics", "/openapi.json"}
    async with aiohttp.ClientSession(guarded.http) as session:
        for path in (
            *opened,
            "/v2",
            "/v2/models/echo",
            "/v2/models/echo/ready",
            "/v2/models/stats",
            "/nothing",
            "/v2/repository/index",
            "/v2/logging",
            "/v2//health/live",
        ):
            async with session.get(path) as reply:
                assert (reply.status != 401) == (path in opened), path
        for path in ("/v2/repository/models/echo/unload", "/v2/repository/index", "/v2/models/photos/classify"):
            async with session.post(path, json={}) as reply:
                assert reply.status == 401, path


async def test_over_grpc_the_same_keys_open_the_same_doors(guarded: Guarded) -> None:
    async with OipClient(guarded.grpc) as nobody, OipClient(guarded.grpc, api_key=ACME) as acme:
        assert await nobody.server_ready()
        for call in (nobody.infer(REQUEST), nobody.index(), nobody.unload("echo"), nobody.model_metadata("echo")):
            with pytest.raises(Unauthenticated, match="no API key"):
                await call
        await acme.infer(REQUEST)
        assert [model.name for model in await acme.index()] == ["double", "echo", "asleep"]
    assert guarded.tenants() == ["acme"]


@pytest.mark.parametrize(("key", "code"), [(None, "UNAUTHENTICATED"), (WRONG, "UNAUTHENTICATED"), (GLOBEX, "OK")])
async def test_a_stream_needs_a_key_as_well(guarded: Guarded, key: str | None, code: str) -> None:
    metadata = (("x-api-key", key),) if key else ()
    message = pb.ModelInferRequest(model_name="echo")
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    tensor.contents.fp32_contents.extend([1, 2])
    async with grpc.aio.insecure_channel(guarded.grpc) as channel:
        call = channel.stream_stream(f"/{oip_grpc.SERVICE}/ModelStreamInfer")(metadata=metadata)
        if code == "OK":
            await call.write(message.SerializeToString())
            await call.read()
            await call.done_writing()
        assert (await call.code()).name == code
        assert WRONG not in (await call.details() or "")
    assert guarded.tenants() == (["globex"] if code == "OK" else [])


async def test_a_unix_socket_needs_no_key_and_takes_no_wrong_one(guarded: Guarded) -> None:
    connector = aiohttp.UnixConnector(str(guarded.http_uds))
    async with aiohttp.ClientSession("http://node", connector=connector) as session:
        for headers, status in (({}, 200), ({"X-API-Key": ACME}, 200), ({"X-API-Key": WRONG}, 401)):
            async with session.post("/v2/models/echo/infer", json=BODY, headers=headers) as reply:
                assert reply.status == status
    async with OipClient(guarded.grpc_uds) as nobody, OipClient(guarded.grpc_uds, api_key=GLOBEX) as globex:
        await nobody.infer(REQUEST)
        await globex.infer(REQUEST)
    async with OipClient(guarded.grpc_uds, api_key=WRONG) as wrong:
        with pytest.raises(Unauthenticated):
            await wrong.infer(REQUEST)
    assert guarded.tenants() == ["default", "acme", "default", "globex"]


async def test_from_hop_to_hop_the_tenant_travels_in_a_trusted_processs_word(guarded: Guarded) -> None:
    """A node without keys of its own has one tenant, which at the gateway is the node's own name."""
    own, acme, globex = Context(), Context(tenant="acme", reason=Reason.OVERLOAD), Context(tenant="globex")
    async with OipClient(guarded.grpc, api_key=NODE, is_hop=True) as node:
        for context in (own, acme):
            await node.infer(Request(context=context, model="echo", inputs=REQUEST.inputs))
        with pytest.raises(Forbidden, match="may not act for"):
            await node.infer(Request(context=globex, model="echo", inputs=REQUEST.inputs))
    assert guarded.tenants() == ["kitchen", "acme"]
    assert guarded.target.requests[1].context.reason is Reason.OVERLOAD
    async with OipClient(guarded.grpc, api_key=ACME) as stranger:
        await stranger.infer(Request(context=globex, model="echo", inputs=REQUEST.inputs))
    assert guarded.tenants()[-1] == "acme"


async def test_a_key_that_the_next_hop_does_not_know_is_not_the_callers_fault(guarded: Guarded) -> None:
    async with OipClient(guarded.grpc, api_key=WRONG, is_hop=True) as node:
        with pytest.raises(TargetUnreachable, match="api_key_file") as caught:
            await node.infer(REQUEST)
    assert WRONG not in str(caught.value)


async def test_without_keys_there_is_one_tenant_whatever_is_said(tmp_path: Path) -> None:
    target = FakeTarget()
    async with serve_http(plane(target)) as http, aiohttp.ClientSession(http.addresses[0]) as session:
        for headers in ({}, {"Authorization": "Basic x"}, {"X-API-Key": WRONG, "x-outrider-tenant": "acme"}):
            async with session.post("/v2/models/echo/infer", json=BODY, headers=headers) as reply:
                assert reply.status == 200
    assert [request.context.tenant for request in target.requests] == ["default"] * 3


async def test_between_keyless_processes_of_ours_tenants_stay_apart() -> None:
    target = FakeTarget(name="cloud")
    async with serve_grpc(plane(target), trusts_reason=True) as server, OipClient(server.addresses[0]) as gateway:
        await gateway.infer(Request(context=Context(tenant="acme"), model="echo", inputs=REQUEST.inputs))
        with pytest.raises((Forbidden, InvalidRequest)):
            await gateway.infer(Request(context=Context(tenant="a b"), model="echo", inputs=REQUEST.inputs))
    assert [request.context.tenant for request in target.requests] == ["acme"]


# --- configuration ---

KINDS = {
    "node": (NodeConfig, "state_dir = '/s'\n"),
    "gateway": (GatewayConfig, "workers = ['w:1']\n"),
    "worker": (WorkerConfig, ""),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "", "edge.example"])
def test_without_keys_nothing_but_loopback_is_listened_on(kind: str, host: str, tmp_path: Path) -> None:
    config, needed = KINDS[kind]
    file = tmp_path / "process.toml"
    server = f"[server]\nhost = '{host}'\nhttp_port = 0\n"
    file.write_text(needed + server)
    with pytest.raises(ConfigError, match=r"server\.host.*no API keys.*accepted: a loopback") as caught:
        load_toml(file, config)
    assert str(file) in str(caught.value)
    file.write_text(f"{needed}{server}[[tenants]]\nname = 'acme'\nkey_sha256 = ['{sha256(ACME)[0]}']\n")
    load_toml(file, config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_keys(kind: str, host: str, tmp_path: Path) -> None:
    config, needed = KINDS[kind]
    file = tmp_path / "process.toml"
    file.write_text(f"{needed}[server]\nhost = '{host}'\ngrpc_port = 0\n")
    load_toml(file, config)


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ([{"name": "a b", "key_sha256": sha256("k")}], "is no tenant's"),
        ([{"name": "default", "key_sha256": sha256("k")}], "calls without a key"),
        ([{"name": "a", "key_sha256": ()}], "outrider keys new"),
        ([{"name": "a", "key_sha256": [ACME]}], "64 lower-case hexadecimal"),
        ([{"name": "a", "key_sha256": sha256("k"), "may_act_for": ["b c"]}], "may_act_for"),
        ([{"name": "a", "key_sha256": sha256("k")}, {"name": "a", "key_sha256": sha256("l")}], "different names"),
        ([{"name": "a", "key_sha256": sha256("k")}, {"name": "b", "key_sha256": sha256("k")}], "stands twice"),
        ([{"name": "a", "key": "k"}], r"tenants\[0\].key"),
    ],
)
def test_a_wrong_tenant_is_refused_and_no_key_is_repeated(tenants: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse({"tenants": tenants}, WorkerConfig, "worker.toml")
    assert ACME not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (ACME, 0o644, "mode 0644.*others"),
        (ACME, 0o640, "others"),
        ("two words", 0o600, "no API key"),
        ("", 0o600, "key"),
    ],
)
def test_a_key_file_that_others_can_read_or_that_holds_no_key_is_refused(
    tmp_path: Path, text: str, mode: int, said: str
) -> None:
    file = tmp_path / "key"
    file.write_text(f"{text}\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=said) as caught:
        read_key_file(str(file), "node")
    assert ACME not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(str(tmp_path / "none"), "node")


def test_a_new_key_is_shown_once_and_its_table_lets_it_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--tenant", "acme"]) == 0
    shown = capsys.readouterr().out
    [key] = [line for line in shown.splitlines() if line.startswith("outrider-")]
    assert len(key) >= 43  # 256 bits in base64
    assert shown.count(key) == 1
    (tmp_path / "worker.toml").write_text(shown[shown.index("[[tenants]]") :])
    assert load_toml(tmp_path / "worker.toml", WorkerConfig).tenants[0].key_sha256 == sha256(key)
    file = tmp_path / "key"
    assert main(["keys", "new", "--tenant", "acme", "--out", str(file)]) == 0
    assert read_key_file(str(file), "node") not in capsys.readouterr().out
    assert main(["keys", "new", "--tenant", "acme", "--out", str(file)]) != 0  # never written over
