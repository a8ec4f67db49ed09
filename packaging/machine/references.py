"""Prepares ONNX models for a test elsewhere: inputs, and what ONNX Runtime answers for them.

python references.py FOLDER [MODELS]

Every MODELS/NAME.onnx becomes FOLDER/NAME with model.onnx, in-INPUT.npy, out-OUTPUT.npy and options, the ones
`hone add` needs; and a small network FOLDER/dense. Sizes that a model leaves open are 1.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime

SMALL = Path(__file__).resolve().parents[2] / "debian/tests/make_model.py"
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


def prepare(model: Path, folder: Path) -> None:
    """One model."""
    folder.mkdir(parents=True)
    shutil.copy(model, folder / "model.onnx")
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    random = np.random.default_rng(7)
    values, options = {}, []
    for each in session.get_inputs():
        shape = [size if isinstance(size, int) else 1 for size in each.shape]
        values[each.name] = random.standard_normal(shape).astype(_DTYPES[each.type])
        if shape != each.shape:
            options.append(f"--shape={each.name}={','.join(map(str, shape))}")
        np.save(folder / f"in-{each.name}.npy", values[each.name])
    names = [output.name for output in session.get_outputs()]
    for name, output in zip(names, session.run(names, values), strict=True):
        np.save(folder / f"out-{name}.npy", output)
    (folder / "options").write_text("".join(f"{option}\n" for option in options))


def small(folder: Path) -> None:
    """The network of debian/tests, whose output NumPy computes."""
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, SMALL, "model.onnx"], cwd=folder, check=True)
    (folder / "x.npy").rename(folder / "in-x.npy")
    (folder / "y.npy").rename(folder / "out-y.npy")
    (folder / "options").touch()


def main(folder: str, models: str = "") -> None:
    """As the module says."""
    small(Path(folder) / "dense")
    for model in sorted(Path(models).glob("*.onnx")) if models else ():
        prepare(model, Path(folder) / model.stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
