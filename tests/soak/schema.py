"""schemathesis against a live node and a live gateway: `python -m tests.soak.schema --examples N`.

Each server is asked twice: as its own description says, which mostly tries names that nobody has, and with the
description narrowed to the models that are there, so that calls get through. No answer may be a 5xx other than a 503
with Retry-After, and each must be what the description says.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import requests
import schemathesis
from hypothesis import strategies
from schemathesis.engine import events, from_schema

from cloud.config import GatewayConfig, WorkerConfig
from cloud.gateway import Gateway
from cloud.worker import Worker
from common.transport.headers import DEADLINE_MS, PIN, PRIVACY
from common.transport.oip_json import HEADER_LENGTH
from common.transport.openapi import PATH
from common.transport.servers import ServerOptions
from edge import CacheOptions, Node, NodeConfig, StaticModel
from hardware.install import EngineOptions
from tests.bundles import write_bundle
from tests.hostile import picture, write_picture_bundle
from tests.soak.result import Result

CHECKS = (
    "only_503_with_retry_after",
    "unload_is_undone",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "positive_data_acceptance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
MODELS = ("linear", "pictures")
_ACCEPTANCE = "positive_data_acceptance"
_BINARY = "application/octet-stream"
_LEFT_OUT = {PIN, DEADLINE_MS, HEADER_LENGTH, PRIVACY}  # right or wrong by what else is said, and to whom
_LARGEST = float(np.nextafter(2.0**128 - 2.0**103, 0))  # of what rounds to a finite FP32
_TENSOR = {
    "name": {"const": "x"},
    "datatype": {"const": "FP32"},
    "shape": {"const": [2, 2]},
    "data": {
        "type": "array",
        "items": {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST},
        "minItems": 4,
        "maxItems": 4,
    },
}
_HEAD = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": 16}}],
    "parameters": {"binary_data_output": True},
}
BINARY_LENGTH = len(json.dumps(_HEAD))
BINARY_CALL = json.dumps(_HEAD).encode() + np.arange(4, dtype="<f4").tobytes()

schemathesis.openapi.media_type(_BINARY, strategies.just(BINARY_CALL))
for form in ("jpeg", "jpg", "png"):
    schemathesis.openapi.media_type(f"image/{form}", strategies.just(picture("PNG" if form == "png" else "JPEG")))


@dataclass
class Found:
    """Of one server: how often each operation answered with each status, and what was wrong, each kind once."""

    calls: Counter[tuple[str, int]] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)


@schemathesis.check
def only_503_with_retry_after(_ctx: Any, response: Any, case: Any) -> None:
    status = response.status_code
    if status == 503:
        assert response.headers.get("retry-after"), "503 without Retry-After"
    else:
        assert status < 500, f"answered {status}"


@schemathesis.check
def unload_is_undone(_ctx: Any, response: Any, case: Any) -> None:
    """After an unload somebody else answers the model's calls, or they are refused with a hint; a load undoes it."""
    if not case.operation.path.endswith("/unload") or case.method != "POST" or response.status_code != 200:
        return
    base = case.operation.base_url
    model = quote(case.path_parameters["model"], safe="")
    call = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    between = requests.post(f"{base}/v2/models/{model}/infer", json=call, timeout=10)
    assert between.status_code in {200, 400, 404, 503}, f"between: {between.status_code} {between.text}"
    assert between.status_code != 503 or between.headers.get("retry-after"), "503 without Retry-After"
    assert requests.post(f"{base}/v2/repository/models/{model}/load", timeout=10).status_code == 200
    assert requests.get(f"{base}/v2/models/{model}/ready", timeout=10).status_code == 200


@schemathesis.hook
def map_body(_ctx: Any, body: Any) -> Any:
    return _written_plainly(body)


@schemathesis.hook
def map_query(_ctx: Any, query: Any) -> Any:
    return _written_plainly(query)


def _written_plainly(value: Any) -> Any:
    """For JSON Schema 2.0 is an integer; the protocol wants 2."""
    if isinstance(value, dict):
        return {name: _written_plainly(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_written_plainly(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else value


def explore(base: str, *, examples: int, seed: int, is_narrowed: bool, is_thorough: bool = True) -> Found:
    """Blocks until all is tried: per operation up to `examples` random calls, and each boundary of its schema.

    `is_thorough` False leaves the boundaries out.
    """
    checks = CHECKS if is_narrowed else [check for check in CHECKS if check != _ACCEPTANCE]
    phases = {"examples": False, "coverage": is_thorough, "fuzzing": True, "stateful": False}
    config = schemathesis.Config.from_dict(
        {
            "seed": seed,
            "base-url": base,
            "checks": {"enabled": False} | {name: {"enabled": True} for name in checks},
            "phases": {name: {"enabled": is_enabled} for name, is_enabled in phases.items()},
            "generation": {"max-examples": examples, "deterministic": True, "database": "none", "no-shrink": True},
        }
    )
    document = requests.get(base + PATH, timeout=10).json()
    schema = schemathesis.openapi.from_dict(narrowed(document) if is_narrowed else document, config=config)
    found = Found()
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            _note(event.recorder, found)
        elif isinstance(event, events.NonFatalError):
            found.failures[f"{event.label}: error"] = str(event.value)
        elif isinstance(event, events.FatalError):
            raise event.exception
    return found


def narrowed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The description for right calls of the models that are here: less is asked, what is answered is the same.

    The infer route takes JSON, that of a version takes `BINARY_CALL`.
    """
    narrow = copy.deepcopy(dict(document))
    narrow["paths"] = {path: item for path, item in narrow["paths"].items() if not _is_refused(item)}
    for path, item in narrow["paths"].items():
        models = ["linear"] if path.endswith("/infer") else ["pictures"] if path.endswith("/classify") else MODELS
        enums = {"model": list(models), "version": ["1"]}
        for operation in item.values():
            parameters = [one for one in operation.get("parameters", []) if one["name"] not in _LEFT_OUT]
            for one in parameters:
                if one["in"] == "path":
                    one["schema"] = {"enum": enums[one["name"]]}
            operation["parameters"] = parameters
            if path.endswith("/infer"):
                is_binary = "version" in path
                del operation["requestBody"]["content"]["application/json" if is_binary else _BINARY]
                if is_binary:
                    length = {"name": HEADER_LENGTH, "in": "header", "required": True}
                    parameters.append(length | {"schema": {"enum": [str(BINARY_LENGTH)]}})
    schemas = narrow["components"]["schemas"]
    del schemas["Parameters"]["properties"]["timeout"]
    schemas["ClassifyRequest"]["properties"]["image"]["maxItems"] = 32  # the model's batch
    schemas["InferInput"]["properties"] = _TENSOR
    schemas["InferRequest"]["properties"]["inputs"]["maxItems"] = 1
    schemas["InferRequestedOutput"]["properties"]["name"] = {"const": "logits"}
    schemas["InferRequest"]["properties"]["outputs"]["maxItems"] = 1
    return narrow


def _is_refused(item: Mapping[str, Any]) -> bool:
    return all("200" not in operation["responses"] for operation in item.values())


@asynccontextmanager
async def live(folder: Path) -> AsyncIterator[dict[str, str]]:
    """A worker, a gateway in front of it and a node that falls back to both, in this process: HTTP addresses."""
    bundles = (write_bundle(folder / "linear"), write_picture_bundle(folder / "pictures"))
    models = tuple(StaticModel(bundle=str(bundle), version="1") for bundle in bundles)
    both = ServerOptions(http_port=0, grpc_port=0)
    engine = EngineOptions(variants=("cpu-int8", "full"), engines=("onnxruntime",))
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(Worker(WorkerConfig(server=both, models=models, engine=engine)))
        gateway = await stack.enter_async_context(
            Gateway(GatewayConfig(workers=(worker.endpoint()["grpc"],), server=both, probe_every_s=0.1))
        )
        cloud = gateway.endpoint()["grpc"]
        cache = CacheOptions(enabled=False)
        node = await stack.enter_async_context(
            Node(NodeConfig(server=both, models=models, gateway=cloud, engine=engine, cache=cache))
        )
        yield {process.kind: process.endpoint()["http"] for process in (node, gateway, worker)}


def _note(recorder: Any, found: Found) -> None:
    for case_id, interaction in recorder.interactions.items():
        status = interaction.response.status_code if interaction.response is not None else 0
        found.calls[recorder.label, status] += 1
        for check in recorder.checks.get(case_id, ()):
            if check.failure_info is not None:
                what = f"{recorder.label}: {check.name}"
                info = check.failure_info
                found.failures.setdefault(what, f"{info.failure.title}: {info.failure.message}\n{info.code_sample}")


def run(*, examples: int, seed: int) -> Result:
    return asyncio.run(_run(examples, seed))


async def _run(examples: int, seed: int) -> Result:
    problems: list[str] = []
    calls: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with live(Path(folder)) as addresses:
            for kind, base in addresses.items():
                by_status = Counter[str]()
                for is_narrowed in (False, True):
                    found = await asyncio.to_thread(
                        explore, base, examples=examples, seed=seed, is_narrowed=is_narrowed
                    )
                    problems += [f"{kind}: {what}: {text}" for what, text in found.failures.items()]
                    for (_, status), count in found.calls.items():
                        by_status[str(status)] += count
                calls[kind] = dict(sorted(by_status.items()))
    total = sum(sum(by_status.values()) for by_status in calls.values())
    kinds = ", ".join(calls)
    says = f"{total} calls of schemathesis at {kinds}, seed {seed}: {len(problems)} breaches of the description"
    return Result(part="schema", says=says, problems=problems, figures={"calls": calls})


def main() -> int:
    parser = argparse.ArgumentParser(description="schemathesis against a live node, gateway and worker")
    parser.add_argument("--examples", type=int, default=200, help="random calls per operation, twice (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    result = run(examples=args.examples, seed=args.seed)
    print(result.figures)
    print(result.line())
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
