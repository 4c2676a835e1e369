"""A model inside an application's own process: no server, the same path. `python examples/in_process.py BUNDLE`."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from edge import CacheOptions, Node, NodeConfig, StaticModel


async def main(bundle: str) -> None:
    config = NodeConfig(models=(StaticModel(bundle=bundle),), cache=CacheOptions(enabled=False))
    async with Node(config) as node:
        for status in await node.dataplane.catalog.index():
            model = await node.dataplane.catalog.metadata(status.name, None)
            shape = [1 if size == -1 else size for size in model.inputs[0].shape]
            inputs = {model.inputs[0].name: np.zeros(shape, np.float32)}
            answer = await node.infer(model.name, inputs, timeout_s=1.0)
            stamp = answer.stamp
            print(f"{model.name} {stamp.version} answered on the {stamp.target}: {dict(answer.outputs)}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
