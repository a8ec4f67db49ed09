"""Infers with the demo model through `hone infer` and checks the answer against ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from honed.tuner.demo.lightglue import example_inputs

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
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
