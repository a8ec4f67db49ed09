"""Inputs and outputs in shared memory, which nobody copies: `python3 region.py MODEL`."""

from __future__ import annotations

import sys

import numpy as np

from honed.runtime import Client

ALIGN = 64  # bytes; where arrays placed one after the other start


def main(model: str) -> None:
    """Run the model on three frames that stay where they are."""
    with Client() as client:
        metadata = client.metadata(model)
        tensors = metadata["inputs"] + metadata["outputs"]
        room = sum(4 * int(np.prod(tensor["shape"])) + ALIGN for tensor in tensors)
        with client.region(room) as memory:
            inputs = {t["name"]: memory.array("float32", t["shape"]) for t in metadata["inputs"]}
            outputs = {t["name"]: memory.array("float32", t["shape"]) for t in metadata["outputs"]}
            for frame in range(3):
                for array in inputs.values():
                    array[...] = frame  # a camera or decoder writes here
                client.infer(model, inputs, outputs=outputs)
                for name, array in outputs.items():
                    print(frame, name, array.ravel()[:4])


if __name__ == "__main__":
    main(sys.argv[1])
