"""ONNX's own node tests: models, inputs, expected outputs, and which inputs are frozen to constants.

ONNX writes many parameters that a model fixes (axes, shapes, pads, k, scales) as inputs of the test's graph.
honed compiles static shapes and takes such parameters as constants only, as exporters write them, so these
inputs (PARAMETERS below) are made constants before compiling. Inputs that are data stay inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test import loader

RELATIVE, ABSOLUTE = 1e-3, 1e-5
# fp16 keeps 11 bits: rounding is 4.9e-4 of a value, and a few operations follow each other.
HALF_RELATIVE, HALF_ABSOLUTE = 1e-2, 1e-3

PARAMETERS: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "DFT": (1, 2),
    "Dropout": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "GRU": (4,),
    "HannWindow": (0,),
    "LSTM": (4,),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4),
    "NonMaxSuppression": (2, 3, 4),
    "OneHot": (1,),
    "Pad": (1, 3),
    "RNN": (4,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "SequenceAt": (1,),
    "SequenceErase": (1,),
    "SequenceInsert": (2,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "SplitToSequence": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
    **{
        f"Reduce{kind}": (1,)
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One node test: the model and its data sets."""

    name: str
    folder: Path

    def model(self) -> onnx.ModelProto:
        """The model as ONNX ships it."""
        return onnx.load(self.folder / "model.onnx")

    def data(self, kind: str, set_folder: Path, infos: list[onnx.ValueInfoProto]) -> list[Any]:
        """The inputs or outputs of one data set; None for what is not a tensor."""
        found: list[Any] = []
        for index, info in enumerate(infos):
            file = set_folder / f"{kind}_{index}.pb"
            if info.type.WhichOneof("value") != "tensor_type" or not file.exists():
                found.append(None)
                continue
            tensor = onnx.TensorProto.FromString(file.read_bytes())
            found.append(numpy_helper.to_array(tensor))
        return found

    def sets(self) -> list[Path]:
        """Folders of data sets."""
        return sorted(self.folder.glob("test_data_set_*"))


@functools.cache
def all_cases() -> dict[str, Case]:
    """Every node test of the installed ONNX, by name."""
    return {t.name: Case(name=t.name, folder=Path(t.model_dir)) for t in loader.load_model_tests(kind="node")}


def operators(case: Case) -> tuple[str, ...]:
    """The operators a case's model uses, in order."""
    return tuple(dict.fromkeys(node.op_type for node in case.model().graph.node))


def freeze(
    model: onnx.ModelProto, inputs: dict[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """The model with its parameter inputs as initialisers, and the inputs that remain."""
    names = _parameters(model) & set(inputs)
    frozen = onnx.ModelProto()
    frozen.CopyFrom(model)
    kept = [i for i in frozen.graph.input if i.name not in names]
    del frozen.graph.input[:]
    frozen.graph.input.extend(kept)
    frozen.graph.initializer.extend(numpy_helper.from_array(inputs[n], n) for n in sorted(names))
    return frozen, {k: v for k, v in inputs.items() if k not in names}


def _parameters(model: onnx.ModelProto) -> set[str]:
    """Graph inputs whose values reach a parameter, directly or through other nodes (expanded functions)."""
    consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            consumers.setdefault(name, []).append((node, index))
    known: dict[str, bool] = {}

    def parameter(name: str) -> bool:
        if name not in known:
            known[name] = False  # until shown otherwise; graphs have no cycles
            known[name] = any(
                index in PARAMETERS.get(node.op_type, ())
                or (node.op_type not in ("Shape", "Size") and any(parameter(o) for o in node.output if o))
                for node, index in consumers.get(name, [])
            )
        return known[name]

    return {i.name for i in model.graph.input if parameter(i.name)}


def difference(expected: np.ndarray, found: np.ndarray) -> str | None:
    """How the answer is wrong, or None where it is right."""
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if expected.dtype.kind != "f":
        unequal = expected != found
        # ml_dtypes' floats are of no kind that NumPy knows.
        nan = (expected != expected) & (found != found)
        wrong = int((unequal & ~nan).sum())
        return f"{wrong} of {expected.size} elements differ" if wrong else None
    half = expected.dtype == np.float16
    relative, absolute = (HALF_RELATIVE, HALF_ABSOLUTE) if half else (RELATIVE, ABSOLUTE)
    close = np.isclose(
        found.astype(np.float64), expected.astype(np.float64), relative, absolute, equal_nan=True
    )
    if close.all():
        return None
    worst = np.argmax(~close.reshape(-1))
    return (
        f"{int((~close).sum())} of {close.size} elements differ, first {found.reshape(-1)[worst]!r} "
        f"instead of {expected.reshape(-1)[worst]!r}"
    )
