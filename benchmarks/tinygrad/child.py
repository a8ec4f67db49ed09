"""tinygrad's side of the benchmark, for an interpreter that has tinygrad and nothing of honed's.

`child.py MODEL.onnx INPUTS.npz OUTPUTS.npz`: writes the outputs and a line with the device's name, then runs
once for each line that comes, and writes the seconds that it took from arrays of the host to such arrays.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from tinygrad import Device, Tensor, TinyJit
from tinygrad.nn.onnx import OnnxRunner


def main() -> None:
    """Run the command line."""
    model, inputs, outputs = sys.argv[1:]
    given = dict(np.load(inputs))
    runner = OnnxRunner(model)

    def planned(**tensors: Tensor) -> dict[str, Tensor]:
        return {name: made.contiguous().realize() for name, made in runner(tensors).items()}

    computed = TinyJit(planned)

    def run() -> dict[str, np.ndarray]:
        tensors = {name: Tensor(array).realize() for name, array in given.items()}
        return {name: made.numpy() for name, made in computed(**tensors).items()}

    for _ in range(3):  # the first plans, the second is captured, the third replayed
        found = run()
    np.savez(outputs, allow_pickle=False, **found)
    print(Device.DEFAULT, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        run()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
