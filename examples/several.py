"""Sends several requests at once over one connection: `python3 several.py MODEL COUNT`."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

from honed.runtime import AsyncClient


async def main(model: str, count: int) -> None:
    """Run the model on `count` inputs and show the outputs in their order."""
    async with AsyncClient() as client:
        tensors = (await client.metadata(model))["inputs"]
        batches = [
            {tensor["name"]: np.full(tensor["shape"], number, np.float32) for tensor in tensors}
            for number in range(count)
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.infer(model, inputs)) for inputs in batches]
        for number, task in enumerate(tasks):
            for name, array in task.result().items():
                print(number, name, array.ravel()[:4])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
