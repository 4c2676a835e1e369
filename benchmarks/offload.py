"""A photo on the device against a photo in a cloud 120 ms away: `python -m benchmarks offload`.

EfficientNet-Lite0 and a real JPEG, one caller. The device runs INT8, the cloud (gateway and worker) full precision; all
of them live in this process and talk over sockets, the way to the cloud goes through a link with the round trip.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial

import uvloop

from benchmarks import models, wire
from benchmarks.far import far
from benchmarks.report import Scale, Table, main
from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.bundle import Bundle
from common.images import ImagePipeline, prepare
from common.telemetry.events import BatchDone
from edge import CacheOptions, Node, NodeConfig, ServerOptions, StaticModel
from hardware.install import EngineOptions

ROUND_TRIP_S = 0.120
STORY_CLOUD_MS, STORY_DEVICE_MS = 280, 35
PHOTO = "rocket.jpg"

Call = Callable[[], Awaitable[object]]


class Batches:
    """The engine's own seconds: a hook on the events of a process that serves."""

    def __init__(self) -> None:
        self.last = 0.0

    def __call__(self, event: object) -> None:
        if isinstance(event, BatchDone):
            self.last = event.seconds


@dataclass(frozen=True, slots=True)
class Timed:
    """One call: all of it, and its batch on the engine, in seconds."""

    total: float
    infer: float


Times = dict[str, list[Timed]]  # by way, one per round


def run(scale: Scale) -> list[Table]:
    return uvloop.run(_measure(scale, models.photos(scale.bundles)))


async def _measure(scale: Scale, model: models.Model) -> list[Table]:
    photo = (model.source / "photos" / PHOTO).read_bytes()
    request = _http_request(model.name, photo)
    pipeline = Bundle.open(model.bundle).spec.model.image
    assert pipeline is not None
    batches = Batches()
    async with contextlib.AsyncExitStack() as stack:
        ways = await _ways(stack, model, request, batches)
        for call in ways.values():
            await call()
        times: Times = {name: [] for name in ways}
        decode: list[float] = []
        for _ in range(scale.pick(40, 1)):
            for name, call in ways.items():
                start = time.perf_counter()
                await call()
                times[name].append(Timed(time.perf_counter() - start, batches.last))
            decode.append(await asyncio.to_thread(_decode_s, pipeline, photo))
    return [_totals(times), _stages(times, _median_ms(decode), len(photo))]


DEVICE = "device, over HTTP"
VIA_NODE = "cloud, through a node without the model"
KEPT = "cloud, HTTP, connection kept"
FRESH = "cloud, HTTP, a connection for each call"
NEAR = "the same cloud without the round trip"


async def _ways(
    stack: contextlib.AsyncExitStack, model: models.Model, request: bytes, batches: Batches
) -> dict[str, Call]:
    """One call by each way that a photo can take."""
    enter = stack.enter_async_context
    static = (StaticModel(bundle=str(model.bundle)),)
    full = EngineOptions(variants=("full",), engines=("onnxruntime",), threads=1)
    server = ServerOptions(http_port=0, grpc_port=0)
    worker = await enter(Worker(WorkerConfig(models=static, engine=full, server=server), on_event=batches))
    assert worker.servers.grpc is not None
    gateway = await enter(Gateway(GatewayConfig(workers=(worker.servers.grpc.addresses[0],), server=server)))
    while not gateway.dataplane.is_ready():  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    assert gateway.servers.grpc is not None
    assert gateway.servers.http is not None
    far_grpc = await enter(far(gateway.servers.grpc.addresses[0], ROUND_TRIP_S))
    far_http = await enter(far(f"127.0.0.1:{gateway.servers.http.port}", ROUND_TRIP_S))
    alone = CacheOptions(enabled=False)
    int8 = EngineOptions(threads=1)
    http = ServerOptions(http_port=0)
    device = await enter(Node(NodeConfig(models=static, engine=int8, cache=alone, server=http), on_event=batches))
    without = await enter(Node(NodeConfig(gateway=far_grpc, cache=alone, server=http)))
    ways = {
        DEVICE: _address(device),
        VIA_NODE: _address(without),
        KEPT: f"http://{far_http}",
        NEAR: gateway.servers.http.addresses[0],
    }
    calls: dict[str, Call] = {}
    for name, address in ways.items():
        connection = await wire.http_connection(address)
        stack.callback(connection.close)
        calls[name] = partial(connection.call, request)
    return calls | {FRESH: partial(_fresh, f"http://{far_http}", request)}


async def _fresh(address: str, request: bytes) -> None:
    connection = await wire.http_connection(address)
    try:
        await connection.call(request)
    finally:
        connection.close()


def _totals(times: Times) -> Table:
    table = Table(
        title=f"A photo, with {ROUND_TRIP_S * 1000:.0f} ms to the cloud and back",
        how="One caller, the ways in turn; from the JPEG's bytes to five labels.",
        columns=("way", "p50 ms", "p99 ms", "calls"),
    )
    for name, calls in times.items():
        table.add(name, *(wire.percentile([call.total for call in calls], p) * 1000 for p in (50, 99)), len(calls))
    device, fresh, kept = (_median_ms(call.total for call in times[name]) for name in (DEVICE, FRESH, KEPT))
    story = f"{STORY_CLOUD_MS} ms through the cloud and {STORY_DEVICE_MS} ms on the device"
    table.notes += [
        f"The story says {story}, {STORY_CLOUD_MS / STORY_DEVICE_MS:.0f} x. Here: {fresh:.0f} ms with a connection for "
        f"each call ({fresh / device:.1f} x), {kept:.0f} ms with one that is kept ({kept / device:.1f} x), "
        f"{device:.0f} ms on the device.",
        "The link has no limit of bandwidth, no TLS (one or two round trips more on a new connection) and no loss.",
    ]
    return table


def _stages(times: Times, decode_ms: float, photo_bytes: int) -> Table:
    """Where the time goes: the hop is what a way takes over the same cloud without the link, less the engine's part."""
    table = Table(
        title="Its stages",
        how="Medians in ms. Decode is measured alone; infer is the engine's batch; hop is over the same cloud nearby, "
        "round by round; the rest (queue, hand-overs, gateway, HTTP) is what is left.",
        columns=("way", "decode", "infer", "hop", "queue and the rest", "total"),
    )
    for name, calls in times.items():
        total, infer = _median_ms(call.total for call in calls), _median_ms(call.infer for call in calls)
        extra = (
            call.total - call.infer - near.total + near.infer for call, near in zip(calls, times[NEAR], strict=True)
        )
        hop = 0.0 if name in (DEVICE, NEAR) else _median_ms(extra)
        table.add(name, decode_ms, infer, hop, total - decode_ms - infer - hop, total)
    table.notes.append(f"The photo has {photo_bytes} bytes.")
    return table


def _median_ms(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1000


def _decode_s(pipeline: ImagePipeline, photo: bytes) -> float:
    start = time.perf_counter()
    prepare(photo, pipeline, PHOTO)
    return time.perf_counter() - start


def _http_request(model: str, photo: bytes) -> bytes:
    head = f"POST /v2/models/{model}/classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/jpeg\r\n"
    return f"{head}Content-Length: {len(photo)}\r\n\r\n".encode() + photo


def _address(node: Node) -> str:
    assert node.servers.http is not None
    return node.servers.http.addresses[0]


if __name__ == "__main__":
    main(run, __doc__)
