"""Keeps asking while the service is restarted: `python3 patient.py MODEL COUNT`."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from honed.runtime import Client
from honed.runtime.errors import ResourceExhausted, Unavailable


def infer_patiently(client: Client, model: str, inputs: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the outputs; try again for so long while the service is away or its queue is full."""
    end = time.monotonic() + seconds
    pause = 0.1
    while True:
        try:
            return client.infer(model, inputs)
        except (Unavailable, ResourceExhausted):
            if time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 2.0)


def main(model: str, count: int) -> None:
    """Run the model `count` times, whatever happens to the service meanwhile."""
    with Client() as client:
        tensors = client.metadata(model)["inputs"]
        for number in range(count):
            inputs = {tensor["name"]: np.full(tensor["shape"], number, np.float32) for tensor in tensors}
            for name, array in infer_patiently(client, model, inputs, seconds=60).items():
                print(number, name, array.ravel()[:4], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
