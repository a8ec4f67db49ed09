"""Runs a model of honed once: `python3 infer.py MODEL [INPUT=FILE.npy ...]`. Inputs not given are zeros."""

from __future__ import annotations

import sys

import numpy as np

from honed.runtime import Client
from honed.runtime.errors import HonedError, Unavailable

TYPES = {"FP32": np.float32, "FP16": np.float16, "INT64": np.int64, "INT32": np.int32, "UINT8": np.uint8}


def main() -> int:
    """Ask what the model takes, run it, and show the outputs."""
    model, given = sys.argv[1], dict(argument.split("=", 1) for argument in sys.argv[2:])
    try:
        with Client() as client:
            inputs = {}
            for tensor in client.metadata(model)["inputs"]:
                name, shape, kind = tensor["name"], tensor["shape"], TYPES[tensor["datatype"]]
                inputs[name] = np.load(given[name]) if name in given else np.zeros(shape, kind)
            outputs = client.infer(model, inputs, timeout=30)
    except Unavailable as error:
        print(f"try again later: {error}", file=sys.stderr)
        return 1
    except HonedError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 1
    for name, array in outputs.items():
        print(name, array.dtype, array.shape, array.ravel()[:4])
    return 0


if __name__ == "__main__":
    sys.exit(main())
