"""Has the service serve a file of the app's own, and runs it: `python3 bring.py FILE.onnx`."""

from __future__ import annotations

import sys

import numpy as np

from honed.runtime import Client


def main(path: str) -> None:
    """Run the model on zeros, and tell the shapes of what comes back."""
    with Client() as client:
        model = client.upload(path).model_name  # at once where it was brought before
        inputs = {t["name"]: np.zeros(t["shape"], np.float32) for t in client.metadata(model)["inputs"]}
        for name, value in client.infer(model, inputs).items():
            print(name, value.shape)


if __name__ == "__main__":
    main(sys.argv[1])
