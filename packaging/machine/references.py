"""Prepares ONNX models for a test elsewhere: inputs, and what ONNX Runtime answers for them.

python references.py MODELS FOLDER

Every MODELS/NAME.onnx becomes FOLDER/NAME with model.onnx, in-INPUT.npy, out-OUTPUT.npy and options, the ones
`hone add` needs. Sizes that a model leaves open are 1.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime

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


def main(models: str, folder: str) -> None:
    """As the module says."""
    for model in sorted(Path(models).glob("*.onnx")):
        prepare(model, Path(folder) / model.stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
