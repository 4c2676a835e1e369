"""The supervisor's view of running processes: health, models, metrics and calls, over their public HTTP API."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import aiohttp

from common.errors import OutriderError, TargetUnreachable

_TIMEOUT = aiohttp.ClientTimeout(total=30.0, connect=2.0)
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class CallFailed(OutriderError):
    """An answer that is not a success. `status` is HTTP's."""

    def __init__(self, url: str, status: int, text: str) -> None:
        self.url, self.status, self.text = url, status, text
        super().__init__(f"{url} answered {status}: {text[:300]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A call's answer: the stamp from its headers, the body, and how long it took in seconds."""

    target: str
    reason: str
    model: str
    version: str
    by: str
    body: Any
    seconds: float


class Client:
    """An async context. Every method raises `CallFailed` or `TargetUnreachable`."""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=_TIMEOUT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._session.close()

    async def is_ready(self, base: str) -> bool:
        try:
            await self._call("GET", f"{base}/v2/health/ready")
        except (CallFailed, TargetUnreachable):
            return False
        return True

    async def index(self, base: str) -> dict[str, dict[str, str]]:
        """The process's own models: name -> {version, state, reason}."""
        answer = await self._call("POST", f"{base}/v2/repository/index")
        return {entry["name"]: entry for entry in answer.body}

    async def load(self, base: str, model: str) -> None:
        await self._call("POST", f"{base}/v2/repository/models/{model}/load")

    async def unload(self, base: str, model: str) -> None:
        await self._call("POST", f"{base}/v2/repository/models/{model}/unload")

    async def classify(self, base: str, model: str, picture: bytes) -> Answer:
        """Sends a picture as `curl -F image=@file` does."""
        form = aiohttp.FormData()
        form.add_field("image", picture, filename="picture", content_type="application/octet-stream")
        return await self._call("POST", f"{base}/v2/models/{model}/classify", data=form)

    async def infer(self, base: str, model: str, inputs: Mapping[str, Any]) -> Answer:
        """JSON inference; `inputs` are float32 arrays by name."""
        tensors = [
            {"name": name, "datatype": "FP32", "shape": list(array.shape), "data": array.ravel().tolist()}
            for name, array in inputs.items()
        ]
        return await self._call("POST", f"{base}/v2/models/{model}/infer", data=json.dumps({"inputs": tensors}))

    async def metrics(self, base: str) -> Metrics:
        answer = await self._call("GET", f"{base}/metrics")
        return parse_metrics(answer.body)

    async def _call(self, method: str, url: str, data: Any = None) -> Answer:
        started = time.monotonic()
        try:
            async with self._session.request(method, url, data=data) as response:
                text = await response.text()
                if response.status != 200:
                    raise CallFailed(url, response.status, text)
                is_json = response.content_type == "application/json"
                headers = response.headers
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise TargetUnreachable(url, str(exc) or type(exc).__name__) from exc
        return Answer(
            target=headers.get("x-outrider-target", ""),
            reason=headers.get("x-outrider-reason", ""),
            model=headers.get("x-outrider-model", ""),
            version=headers.get("x-outrider-version", ""),
            by=headers.get("x-outrider-by", ""),
            body=json.loads(text) if is_json and text else text,
            seconds=time.monotonic() - started,
        )


@dataclass(frozen=True, slots=True)
class Metrics:
    """Samples of one scrape."""

    samples: tuple[tuple[str, Mapping[str, str], float], ...]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that have these labels; 0 where there is none."""
        return sum(
            value
            for sample, has, value in self.samples
            if sample == name and all(has.get(key) == want for key, want in labels.items())
        )


def parse_metrics(text: str) -> Metrics:
    """Prometheus' text format 0.0.4; lines that are not samples are passed over."""
    found = (_SAMPLE.match(line) for line in text.splitlines() if not line.startswith("#"))
    return Metrics(
        tuple((m["name"], dict(_LABEL.findall(m["labels"] or "")), float(m["value"])) for m in found if m is not None)
    )
