"""Infers with the demo model through `hone infer`, checks the answer against ONNX Runtime, and times both."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from honed.cpu.session import Session
from honed.runtime import Client
from honed.tuner.lightglue import example_inputs

ROUNDS = 7  # after the first inference, which was checked
ALLOWED = 1e-3  # of the output's range


def main(run: Path) -> int:
    """Returns 0 where every output agrees."""
    inputs = example_inputs()
    options = []
    for name, array in inputs.items():
        file = run / "inputs" / f"{name}.npy"
        file.parent.mkdir(exist_ok=True)
        np.save(file, array)
        options += ["--input", f"{name}={file.relative_to(Path.cwd())}"]
    command = ["hone", "infer", "lightglue", *options, "--output-dir", str(run / "outputs")]
    print("$", " ".join(command))
    subprocess.run(command, check=True)
    session = onnxruntime.InferenceSession(run / "lightglue.onnx", providers=["CPUExecutionProvider"])
    agree = True
    for output, want in zip(session.get_outputs(), session.run(None, inputs), strict=True):
        got = np.load(run / "outputs" / f"{output.name}.npy")
        worst = float(np.abs(got - want).max()) if got.shape == want.shape else float("inf")
        reach = float(np.ptp(want)) or 1.0
        right = worst <= ALLOWED * reach
        agree = agree and right
        print(
            f"{output.name}: largest difference to ONNX Runtime {worst:.2e} in a range of {reach:.3g} "
            f"({'right' if right else 'WRONG'}: at most {ALLOWED:g} of the range is allowed)"
        )
    _both_engines(run / "lightglue.onnx", inputs)
    return 0 if agree else 1


def _both_engines(model: Path, inputs: dict[str, NDArray[Any]]) -> None:
    """The compiled form, asked for over the socket, and what the CPU engine would do, in turns."""
    cpu = Session(model, 0)
    compiled, given = [], []
    with Client() as client:
        for _ in range(ROUNDS):
            compiled.append(client.answer("lightglue", inputs).compute_us / 1e3)
            begun = time.perf_counter()
            cpu.run(inputs)
            given.append((time.perf_counter() - begun) * 1e3)
    print(
        f"in turns, medians of {ROUNDS}: compiled {statistics.median(compiled):.1f} ms (engine opencl), "
        f"ONNX Runtime {statistics.median(given):.1f} ms (engine onnxruntime)"
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
