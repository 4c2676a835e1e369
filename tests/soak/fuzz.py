"""Bad input in bulk against a live node: `python -m tests.soak.fuzz --inputs 100000 --seed 1`.

A node in a process of its own takes mutated calls over HTTP and gRPC, TCP and Unix sockets. After each batch it must be
the same process, no larger, and answer good calls exactly. One line at the end says what came back how often; faults
come before it, each with the number under which `--first N --inputs 1` makes it again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from common.transport.oip_grpc import SERVICE
from common.transport.proto import oip_pb2 as pb
from tests.bundles import forward, write_bundle
from tests.hostile import KINDS, write_picture_bundle, write_same_bundle
from tests.soak.hostile_bytes import MODELS
from tests.soak.mutate import Input, make
from tests.soak.mutate_grpc import GrpcInput
from tests.soak.mutate_http import HttpInput
from tests.soak.wire import DEADLINE_S, HttpSocket, NoAnswer, checked, throw_raw

BATCH = 500
LANES = 24  # inputs under way at a time
X = np.array([[1.0, 2.0], [-3.0, 0.5]], np.float32)
GROWTH = 1.2  # of the memory after the first batches
SLACK_BYTES = 32 << 20  # of short runs, whose first batches are most of it
FINE = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A running node's process and addresses."""

    pid: int
    http: tuple[str, ...]
    grpc: tuple[str, ...]
    process: subprocess.Popen[bytes]
    log: Path

    def memory_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096


@dataclass(slots=True)
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        self.faults.append(text)


@contextlib.contextmanager
def live_node(folder: Path) -> Iterator[Live]:
    """`outrider edge run` with the models that the mutations speak of, on free ports and two Unix sockets."""
    bundles = [write_bundle(folder / "linear"), write_picture_bundle(folder / "pictures")]
    bundles += [write_same_bundle(folder / kind, kind) for kind in KINDS]
    models = "\n".join(f'[[models]]\nbundle = "{bundle}"' for bundle in bundles)
    sockets = (folder / "http.sock", folder / "grpc.sock")
    config = folder / "node.toml"
    config.write_text(
        f'state_dir = "{folder / "state"}"\n[server]\nhttp_port = 0\ngrpc_port = 0\n'
        f'http_uds = "{sockets[0]}"\ngrpc_uds = "{sockets[1]}"\n[engine]\ngolden_gate = false\nthreads = 1\n{models}\n'
    )
    endpoint, log = folder / "endpoint.json", folder / "node.log"
    command = [
        sys.executable,
        "-m",
        "common.cli",
        "edge",
        "run",
        "--config",
        str(config),
        "--endpoint-file",
        str(endpoint),
    ]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            end = time.monotonic() + 60
            while not endpoint.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the node does not start:\n{log.read_text()}")
                time.sleep(0.02)
            said = json.loads(endpoint.read_text())
            http = (said["http"].removeprefix("http://"), str(sockets[0]))
            yield Live(pid=said["pid"], http=http, grpc=(said["grpc"], f"unix:{sockets[1]}"), process=process, log=log)
        finally:
            process.kill()


async def fuzz(node: Live, *, inputs: int, seed: int, first: int = 0) -> Tally:
    tally = Tally()
    grown_from = 0
    async with _channels(node) as channels:
        await _good_calls(node, channels, tally, "the first batch")
        for start in range(first, first + inputs, BATCH):
            numbers = iter(range(start, min(start + BATCH, first + inputs)))
            lanes = [_Lane(node, channels, tally, seed, number % 2) for number in range(LANES)]
            await asyncio.gather(*(lane.run(numbers) for lane in lanes))
            if node.process.poll() is not None:
                tally.fault(f"the node ended with {node.process.returncode}:\n{node.log.read_text()[-2000:]}")
                return tally
            await _good_calls(node, channels, tally, f"input {start + BATCH - 1}")
            if start - first >= inputs // 10 and not grown_from:
                grown_from = node.memory_bytes()
    now = node.memory_bytes()
    if grown_from and now > max(GROWTH * grown_from, grown_from + SLACK_BYTES):
        tally.fault(f"resident memory grew from {grown_from >> 20} to {now >> 20} MiB")
    tally.counts["MiB after the first tenth"] = grown_from >> 20
    tally.counts["MiB at the end"] = now >> 20
    return tally


class _Lane:
    """Sends one input after another, over TCP or Unix sockets."""

    def __init__(self, node: Live, channels: list[Any], tally: Tally, seed: int, way: int) -> None:
        self._tally, self._seed = tally, seed
        self._channel, self._raw = channels[way], node.grpc[way].removeprefix("unix:")
        self._http = HttpSocket(node.http[way])

    async def run(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            made = make(self._seed, number)
            try:
                await self._send(made)
            except NoAnswer as exc:
                self._tally.fault(f"input {number} ({type(made).__name__}): {exc}")
            except OSError as exc:
                self._tally.fault(f"input {number} ({type(made).__name__}): cannot be sent: {exc!r}")
        self._http.close()

    async def _send(self, made: Input) -> None:
        if isinstance(made, GrpcInput):
            self._tally.counts[f"grpc {await grpc_status(self._channel, made)}"] += 1
        elif not isinstance(made, HttpInput):
            await throw_raw(self._raw, made.data)
            self._tally.counts["grpc closed"] += 1
        else:
            replies = [await self._http.ask(made.data)] if made.is_framed else await self._http.throw(made.data)
            for reply in replies:
                checked(reply)
            self._tally.counts[f"http {replies[0].status}" if replies else "http closed"] += 1


async def grpc_status(channel: Any, made: GrpcInput) -> str:
    """The status of one call with a body of any bytes. Raises `NoAnswer` for one that no caller should get."""
    path = f"/{SERVICE}/{made.method}"
    try:
        if made.method == "ModelStreamInfer":
            call = channel.stream_stream(path)(iter((made.data,)), metadata=made.metadata, timeout=DEADLINE_S)
            async for data in call:
                said = pb.ModelStreamInferResponse.FromString(data)
                if "internal error" in said.error_message:
                    raise NoAnswer(f"stream: {said.error_message}")
        else:
            await channel.unary_unary(path)(made.data, metadata=made.metadata, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as exc:
        if exc.code() not in FINE or not exc.details():
            raise NoAnswer(f"{made.method}: {exc.code()}: {exc.details()}") from exc
        return str(exc.code().name)
    return "OK"


@contextlib.asynccontextmanager
async def _channels(node: Live) -> AsyncIterator[list[Any]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in node.grpc]


async def _good_calls(node: Live, channels: list[Any], tally: Tally, after: str) -> None:
    """Whatever was unloaded comes back; then an exact answer on each of the four ways."""
    try:
        for model in MODELS:
            load = pb.RepositoryModelLoadRequest(model_name=model).SerializeToString()
            await channels[0].unary_unary(f"/{SERVICE}/RepositoryModelLoad")(load, timeout=DEADLINE_S)
        for address in node.http:
            body = json.dumps(
                {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(X.shape), "data": X.ravel().tolist()}]}
            ).encode()
            head = f"POST /v2/models/linear/infer HTTP/1.1\r\nHost: node\r\nContent-Length: {len(body)}\r\n\r\n"
            socket = HttpSocket(address)
            reply = await socket.ask(head.encode() + body)
            socket.close()
            got = np.array(json.loads(reply.body)["outputs"][0]["data"], np.float32)
            _same(got, address)
        message = pb.ModelInferRequest(model_name="linear", raw_input_contents=[X.tobytes()])
        message.inputs.add(name="x", datatype="FP32", shape=X.shape)
        for channel, address in zip(channels, node.grpc, strict=True):
            data = await channel.unary_unary(f"/{SERVICE}/ModelInfer")(message.SerializeToString(), timeout=DEADLINE_S)
            _same(np.frombuffer(pb.ModelInferResponse.FromString(data).raw_output_contents[0], np.float32), address)
    except (NoAnswer, OSError, KeyError, grpc.aio.AioRpcError) as exc:
        tally.fault(f"after {after} a good call fails: {exc!r}")


def _same(got: np.ndarray, address: str) -> None:
    if not np.allclose(got, forward(X).ravel(), rtol=1e-6, atol=0):
        raise NoAnswer(f"{address} answers {got.tolist()}")


def summary(tally: Tally, inputs: int, seed: int, seconds: float) -> str:
    counts = ", ".join(f"{name} {count}" for name, count in sorted(tally.counts.items()))
    rate = f"{inputs / seconds:.0f}/s"
    return f"fuzz: {inputs} inputs, seed {seed}, {seconds:.1f} s, {rate}: {counts}; {len(tally.faults)} faults"


def main() -> int:
    import uvloop

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input (%(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, live_node(Path(folder)) as node:
        started = time.monotonic()
        tally = uvloop.run(fuzz(node, inputs=args.inputs, seed=args.seed, first=args.first))
        seconds = time.monotonic() - started
        said = node.log.read_text(errors="replace")
    if args.inputs == 1:
        print(make(args.seed, args.first))
    for fault in tally.faults[:20]:
        print(fault)
    if tally.faults:
        print(said[-4000:])
    print(summary(tally, args.inputs, args.seed, seconds))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
