"""The statistics extension: what a process has counted for its models, in Triton's names.

Given is what is measured: the queue's and the conversions' shares are not. The figures are those of
`common.serving.statistics`; whether a model or a version is known says the catalog.
"""

from __future__ import annotations

from typing import Any

from common.errors import InvalidRequest
from common.serving.catalog import Catalog, ModelState
from common.serving.statistics import Durations, Statistics


async def read(
    catalog: Catalog, statistics: Statistics | None, model: str, version: str | None
) -> list[dict[str, Any]]:
    """One entry for `model`, or one for each ready model when it is empty. Raises what the catalog does."""
    if statistics is None:
        raise InvalidRequest("statistics are not counted by this process")
    if model:
        known = await catalog.metadata(model, version)
        versions = {model: version or next(reversed(known.versions), "")}
    else:
        versions = {m.name: m.version for m in await catalog.index() if m.state is ModelState.READY}
    return [_render(name, version, statistics) for name, version in versions.items()]


def _render(model: str, version: str, statistics: Statistics) -> dict[str, Any]:
    """An entry as JSON has it; the gRPC message is made from the same fields."""
    counted = statistics.of(model)
    return {
        "name": model,
        "version": version,
        "last_inference": statistics.last_inference_ms(model),
        "inference_count": counted.inference_count,
        "execution_count": counted.execution_count,
        "inference_stats": {
            "success": _durations(counted.success),
            "fail": _durations(counted.fail),
            "compute_infer": _durations(counted.compute),
        },
        "batch_stats": [
            {"batch_size": rows, "compute_infer": _durations(batches)}
            for rows, batches in sorted(counted.batches.items())
        ],
    }


def _durations(durations: Durations) -> dict[str, int]:
    return {"count": durations.count, "ns": durations.ns}
