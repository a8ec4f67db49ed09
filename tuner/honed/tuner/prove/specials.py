"""NaN and infinities: where compiled models and ONNX Runtime differ in them, and a probe that holds a few.

What the probe finds is told with the compiled form and refuses none: ONNX Runtime itself gives one answer for
some shapes and another for others (OPERATORS), and compilers of devices may take NaN for impossible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from honed.protocol.errors import HonedError
from honed.runtime.execution import proof
from honed.runtime.execution.executor import Executor

from . import graphs, ranges
from .reference import ReferenceFailure, evaluate

_LEFT_OUT = "NaN is left out, and -inf stays -inf"
_PLACE = "NaN is left out; where all are NaN the place is 0"
_INTEGERS = "NaN and infinities become any integer, as the device has it"
_TILES = "on Malis those of 256 channels or more may carry NaN and infinities on within tiles of 2 x 2"
_ROW = "steps behind NaN and infinities may be other numbers"
# By operator: what is made of NaN or infinities, where it is not what ONNX Runtime makes of them.
OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(("ReduceMax", "ReduceMin", "MaxPool", "NhwcMaxPool", "GlobalMaxPool"), _LEFT_OUT),
    **dict.fromkeys(("MaxRoiPool", "RoiAlign"), _LEFT_OUT),
    **dict.fromkeys(("ArgMax", "ArgMin", "Hardmax"), _PLACE),
    "TopK": "NaN is larger than all numbers; ONNX Runtime has it anywhere",
    **dict.fromkeys(("Cast", "CastLike", "QuantizeLinear", "DynamicQuantizeLinear"), _INTEGERS),
    "Conv": _TILES,
    "LRN": "NaN and infinities stay in their windows; ONNX Runtime carries them on to channels behind",
    **dict.fromkeys(("RNN", "LSTM", "GRU"), _ROW),
    **dict.fromkeys(("ScatterElements", "ScatterND"), "with max or min NaN comes through from both sides"),
}  # fmt: skip
_LEAST = 16  # elements of an input: among fewer, three say more of the probe than of the model
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SpecialProbe:
    """Inputs with NaN and infinities among them, and what the reference gives for them."""

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


def choose(model: onnx.ModelProto, ordinary: Mapping[str, np.ndarray]) -> SpecialProbe | None:
    """A probe made of an ordinary one; None where it would say nothing.

    That is: where an operator of OPERATORS but Conv, or a graph within the graph, has a part in it, no input
    of floats is unbounded, or the reference cannot be evaluated.
    """
    nested = any(a.HasField("g") for node in model.graph.node for a in node.attribute)
    others = OPERATORS.keys() - {"Conv"}
    if nested or model.functions or not others.isdisjoint(node.op_type for node in model.graph.node):
        return None
    given = _mixed(model, ordinary)
    if given is None or sum(value.nbytes for value in given.values()) > _MOST_BYTES:
        return None
    found = evaluate(model, [given])
    if isinstance(found, ReferenceFailure):
        return None
    return SpecialProbe(given, found.outputs[0])


def _mixed(model: onnx.ModelProto, ordinary: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """The inputs with NaN and both infinities in each that may hold them; None where none may."""
    allowed, rng = ranges.of_inputs(model), np.random.default_rng(0)
    given, holds = dict(ordinary), False
    for value in graphs.inputs(model):
        array, bounds = given[value.name], allowed[value.name]
        unbounded = bounds.plain and math.isinf(bounds.low) and math.isinf(bounds.high)
        if array.dtype.kind != "f" or array.size < _LEAST or not unbounded:
            continue
        mixed = array.copy()
        mixed.reshape(-1)[rng.choice(array.size, 3, replace=False)] = [np.nan, np.inf, -np.inf]
        given[value.name], holds = mixed, True
    return given if holds else None


def differences(executor: Executor, probe: SpecialProbe, tolerance: Mapping[str, float]) -> list[str]:
    """What the compiled form makes otherwise, one sentence for each output."""
    try:
        found = executor.run_compiled(dict(probe.inputs))
    except HonedError as error:
        return [f"NaN and infinities among inputs fail: {error}"]
    compared = [
        proof.compare(probe.outputs[name], found[name], allowed, name)
        for name, allowed in tolerance.items()
        if name in probe.outputs and name in found and probe.outputs[name].shape == found[name].shape
    ]
    return [
        f"with NaN and infinities among inputs {one}; requests with `finite` refuse such inputs"
        for one in compared
        if not one.right
    ]
