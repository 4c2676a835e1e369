"""The tour: one walk through the whole system, each claim read from the system itself.

`outrider up --once`. A step prints one line with what it saw; the first claim that does not hold ends its
step and, unless it is to keep going, the tour.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, OutriderError
from common.tensorfile import read_tensors
from common.tensors import Array
from common.up.client import Answer, Client
from common.up.commands import CommandFailed
from common.up.demo import DIGITS, PHOTOS, digits
from common.up.layout import Layout
from common.up.load import Load
from common.up.system import Say, System

INTERVAL_S = 1.0
RATE = 50.0  # calls per second while a version is released
PATIENCE_S = 20.0  # for a version to be served, refused or polled for
LOOK_S = 0.05
EDGES, WORKERS = ("edge-a", "edge-b"), ("worker-1", "worker-2")


class ClaimFailed(OutriderError):
    """Something that the tour says of the system is not so."""


@dataclass(slots=True)
class Tour:
    """What the steps share: the running system, its client, pictures and digits."""

    system: System
    client: Client
    without: frozenset[str]
    patience_s: float

    def http(self, name: str) -> str:
        return self.system.http(name)

    async def classify(self, node: str, picture: str) -> tuple[Answer, str]:
        """The answer of a node to one of the photos, and its best label."""
        [path] = (self.system.work / "sources" / PHOTOS.source / "photos").glob(f"{picture}.*")
        answer = await self.client.classify(self.http(node), PHOTOS.name, path.read_bytes())
        return answer, str(answer.body["classes"][0][0]["label"])

    def digits(self) -> Array:
        """Held-out digits, float32 [n, 1, 8, 8]."""
        return read_tensors(self.system.work / "sources" / DIGITS.source / "heldout.safetensors")["pixels"]

    async def served(self, version: str, names: tuple[str, ...]) -> float:
        """Seconds until every process in `names` serves this version of `digits`."""
        started = time.monotonic()
        late = list(names)
        while late:
            late = [name for name in late if await self._version(name) != version]
            if time.monotonic() - started > self.patience_s:
                raise ClaimFailed(f"{', '.join(late)} do not serve {DIGITS.name} {version} in {self.patience_s:g} s")
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - started

    async def count(self, name: str, metric: str, **labels: str) -> float:
        return (await self.client.metrics(self.http(name))).total(f"outrider_{metric}_total", **labels)

    async def fetched(self, name: str) -> Fetched:
        metrics = await self.client.metrics(self.http(name))

        def total(what: str, **labels: str) -> int:
            return int(metrics.total(f"outrider_sync_{what}_total", model=DIGITS.name, **labels))

        return Fetched(
            bytes=total("fetched_bytes"),
            slabs=total("slabs_fetched"),
            fallbacks=total("full_fallbacks"),
            refused=total("quarantined"),
        )

    async def _version(self, name: str) -> str:
        entry = (await self.client.index(self.http(name))).get(DIGITS.name, {})
        return entry["version"] if entry.get("state") == "READY" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A process's own counters of `digits`, since it started."""

    bytes: int = 0
    slabs: int = 0
    fallbacks: int = 0
    refused: int = 0

    def since(self, before: Fetched) -> Fetched:
        return Fetched(
            bytes=self.bytes - before.bytes,
            slabs=self.slabs - before.slabs,
            fallbacks=self.fallbacks - before.fallbacks,
            refused=self.refused - before.refused,
        )


async def take(
    state: Path,
    *,
    ports: Mapping[str, int],
    bundles: Path | None,
    only: str | None,
    without: frozenset[str],
    patience_s: float,
    keeps_going: bool,
    say: Say,
) -> bool:
    """Starts the system in `state` and walks through it. True when every claim held."""
    chosen = STEPS if only is None else {name: STEPS[name] for name in STEPS if name in only}
    if only is not None and (not chosen or set(only) - set(STEPS)):
        raise ConfigError("up", "--only", f"got {only!r}", f"some of {''.join(STEPS)}")
    models = (PHOTOS, DIGITS) if set(chosen) & set("abc") else (DIGITS,)
    layout = Layout(state=state, ports=ports, models=models, interval_s=INTERVAL_S, without=without)
    system = System(layout, bundles=bundles, say=say)
    started = time.monotonic()
    await system.prepare()
    await system.sources(*(digits(stage) for name in chosen for stage in STAGES.get(name, ())))
    prepared = time.monotonic()
    async with system, Client() as client:
        up = time.monotonic()
        print(
            f"ok    start: built in {prepared - started:.1f} s, every process serves {up - prepared:.1f} s later",
            flush=True,
        )
        tour = Tour(system, client, without, patience_s)
        failed = 0
        for name, step in chosen.items():
            began = time.monotonic()
            try:
                line = await step(tour)
                print(f"ok    ({name}) {line}; {time.monotonic() - began:.1f} s", flush=True)
            except OutriderError as exc:
                failed += 1
                print(f"FAIL  ({name}) {exc}", flush=True)
                if not keeps_going:
                    break
    return failed == 0


def claim(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ClaimFailed(otherwise)


async def on_the_edge(tour: Tour) -> str:
    answer, label = await tour.classify("edge-a", "chelsea")
    claim(answer.target == "edge" and answer.by == "edge-a", f"the photo was answered by {_where(answer)}")
    claim("cat" in label, f"the photo of a cat is called {label!r}")
    return f"a photo is classified on the edge: {label!r} by {_where(answer)} in {1000 * answer.seconds:.1f} ms"


async def from_the_cache(tour: Tour) -> str:
    first, label = await tour.classify("edge-a", "coffee")
    hits = await tour.count("edge-a", "cache_hits", model=PHOTOS.name)
    again, same = await tour.classify("edge-a", "coffee")
    claim(again.target == "cache", f"the same photo again was answered by {_where(again)}")
    claim(await tour.count("edge-a", "cache_hits", model=PHOTOS.name) == hits + 1, "the node counted no cache hit")
    claim(same == label and again.version == first.version, "the cached answer differs")
    return f"the same again from the disk cache: {1000 * first.seconds:.1f} ms, then {1000 * again.seconds:.1f} ms"


async def in_the_cloud(tour: Tour) -> str:
    node = tour.http("edge-a")
    await tour.client.unload(node, PHOTOS.name)
    away, label = await tour.classify("edge-a", "rocket")
    claim(away.target == "cloud", f"with the model unloaded the photo was answered by {_where(away)}")
    claim(away.reason == "no_engine", f"the reason is {away.reason!r}")
    await tour.client.load(node, PHOTOS.name)
    back, _ = await tour.classify("edge-a", "flower")
    claim(back.target == "edge" and back.by == "edge-a", f"loaded again, the photo was answered by {_where(back)}")
    return (
        f"unloaded on edge-a, {_where(away)} answers {label!r} ({away.reason}, {1000 * away.seconds:.1f} ms); "
        f"loaded again: {_where(back)}"
    )


async def push(tour: Tour) -> str:
    """Version 2 under load, then version 3, of which only the last layer is new."""
    everyone = (*EDGES, *WORKERS)
    async with Load(tour.client, [tour.http(name) for name in (*EDGES, "gateway")], tour.digits(), RATE) as load:
        second = await tour.system.publish(digits("v2"))
        seconds = await tour.served(second["version"], everyone)
        await load.settle()
    claim(not load.failures, f"{len(load.failures)} of {load.calls} calls failed: {load.failures[:1]}")
    claim(load.versions >= {second["version"]}, f"the load saw versions {sorted(load.versions)}")
    before = {name: await tour.fetched(name) for name in everyone}
    if "reuse" in tour.without:
        before["edge-a"] = await _lose_disk(tour, "edge-a")
    third = await tour.system.publish(digits("v3"))
    if "reuse" in tour.without:
        await tour.system.start("edge-a")
        await tour.system.until_ready()
    await tour.served(third["version"], everyone)
    shares = []
    for name in everyone:
        full = _variant(third, *(("full", "torch") if name in WORKERS else ("cpu-int8", "onnxruntime")))
        got = (await tour.fetched(name)).since(before[name])
        share = got.bytes / full["bytes_full"]
        claim(0 < got.slabs <= full["slabs_new"], f"{name} fetched {got.slabs} slabs, {full['slabs_new']} are new")
        claim(share < 0.5, f"{name} fetched {got.bytes} bytes, {share:.0%} of {full['bytes_full']} in full")
        shares.append(f"{name} {got.bytes} bytes in {got.slabs} of {full['slabs']} slabs, {share:.1%} of full")
    return (
        f"digits {second['version']} under {RATE:.0f} calls/s: served by all {seconds:.1f} s after its release, "
        f"{load.calls} calls, none failed; {third['version']}, only the last layer new: {', '.join(shares)}"
    )


async def gate(tour: Tour) -> str:
    """A version that is right in FP32 and collapses in INT8."""
    model = digits("collapsed")
    try:
        await tour.system.publish(model)
    except CommandFailed as exc:
        claim("loss" in str(exc), f"publish failed, but not at the gate: {exc}")
    else:
        raise ClaimFailed("publish released a version that collapses in INT8")
    before = {name: await tour.fetched(name) for name in EDGES}
    served = {name: (await tour.client.index(tour.http(name)))[DIGITS.name]["version"] for name in EDGES}
    forced = await tour.system.publish(model, "--skip-gate")
    for name in EDGES:
        await _until_refused(tour, name, before[name], forced["version"])
    after = {name: await tour.fetched(name) for name in EDGES}
    for name in EDGES:
        await _polls(tour, name, 2)
        again = await tour.fetched(name)
        claim(again.bytes == after[name].bytes, f"{name} fetched the refused version again")
    await tour.served(forced["version"], WORKERS)
    sample = {"pixels": tour.digits()[:1] * 0.5}
    stamps = []
    for name in (*EDGES, "gateway"):
        answer = await tour.client.infer(tour.http(name), DIGITS.name, sample)
        expected = served.get(name, forced["version"])
        claim(answer.version == expected, f"{name} answers with version {answer.version}, not {expected}")
        stamps.append(f"{name} answers with {answer.version} ({answer.target})")
    return f"the collapsed version is refused by publish; forced as {forced['version']}, " + ", ".join(stamps)


async def corruption(tour: Tour) -> str:
    """The differences of a release are damaged in the store before any node asks for them."""
    await tour.system.stop("sync")
    store = tour.system.layout.store
    known = set(store.glob("packs/*/*.pack"))
    fifth = await tour.system.publish(digits("v4"))
    packs = sorted(set(store.glob("packs/*/*.pack")) - known)
    claim(bool(packs), "the release has no pack that could be damaged")
    if "corruption" not in tour.without:
        for path in packs:
            path.write_bytes(bytes(byte ^ 0x01 for byte in path.read_bytes()))
    before = {name: await tour.fetched(name) for name in EDGES}
    await tour.system.start("sync")
    seconds = await tour.served(fifth["version"], EDGES)
    repaired = []
    for name in EDGES:
        got = (await tour.fetched(name)).since(before[name])
        claim(got.fallbacks > 0, f"{name} needed no `full` in place of a damaged difference")
        repaired.append(f"{name} {got.fallbacks} of {got.slabs} slabs")
    return (
        f"a bit of every byte of the release's {len(packs)} packs is flipped: digits {fifth['version']} is served "
        f"{seconds:.1f} s after the service is back, with the `full` of {', '.join(repaired)} ({got.bytes} bytes)"
    )


STAGES = {"d": ("v2", "v3"), "e": ("collapsed",), "f": ("v4",)}  # of digits, trained before the walk begins
STEPS: dict[str, Callable[[Tour], Awaitable[str]]] = {
    "a": on_the_edge,
    "b": from_the_cache,
    "c": in_the_cloud,
    "d": push,
    "e": gate,
    "f": corruption,
}


async def _until_refused(tour: Tour, name: str, before: Fetched, version: str) -> None:
    deadline = time.monotonic() + tour.patience_s
    while (await tour.fetched(name)).since(before).refused == 0:
        entry = (await tour.client.index(tour.http(name)))[DIGITS.name]
        claim(entry["version"] != version, f"{name} serves the version that collapses in INT8")
        claim(time.monotonic() < deadline, f"{name} has not refused version {version}")
        await asyncio.sleep(LOOK_S)


async def _polls(tour: Tour, name: str, count: int) -> None:
    """Waits until a process has asked the sync service this many times more."""
    target = await tour.count(name, "sync_polls", result="ok") + count
    deadline = time.monotonic() + tour.patience_s
    while await tour.count(name, "sync_polls", result="ok") < target:
        claim(time.monotonic() < deadline, f"{name} has not polled {count} times")
        await asyncio.sleep(LOOK_S)


async def _lose_disk(tour: Tour, name: str) -> Fetched:
    """Stops a process and empties its disk; a process that starts has fetched nothing."""
    await tour.system.stop(name)
    shutil.rmtree(tour.system.layout.state / name)
    return Fetched()


def _variant(published: Mapping[str, Any], variant: str, engine: str) -> Mapping[str, Any]:
    """The sizes of one variant for one engine as `publish` reports them."""
    return next(one for one in published["variants"] if (one["variant"], one["engine"]) == (variant, engine))


def _where(answer: Answer) -> str:
    return f"{answer.target} ({answer.by})" if answer.by else answer.target or "nobody"
