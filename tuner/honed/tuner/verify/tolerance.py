"""Defines allowed errors: the largest |difference| over the largest |reference value| of an output.

Integers and booleans must be equal. Floats computed in float32 may be off by 1e-3, which every wrong kernel
exceeds by far; in float64, by 1e-6. A sum keeps to a twentieth of that: its error is at most h u of the sum
of magnitudes, with u = 2^-24 and h the additions that a term passes through, 512 to 768 up to ten million
terms (`honed.tuner.lower.sums`). The rest is for what follows: a deviation from the mean errs by as much as
the mean does, which a normalisation divides by the deviation of nearly constant inputs. Products of k terms
that a schedule adds up one by one keep below k u, and so to 1e-3 up to 16,000 terms in the worst case. For
float16 the rounding itself is visible, and the bound follows from it: each of the `depth` roundings on the
longest way through the model and each of the `reduction` additions of the longest sum accumulated in float16
errs by up to u = 2^-11 of the value, and independent errors add up like a random walk, to about u sqrt(n)
(Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41, 2019).
Both the reference and the compiled form err, and deviations of twice the expected size do occur: four times u
(sqrt(depth) + sqrt(reduction)), never above 5 %, so that a wrong kernel still shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from honed.protocol.errors import InvalidArgument
from honed.runtime.dtypes import dtype as carried_dtype
from honed.runtime.execution.verification import Difference, compare

from . import graphs
from .graphs import MOVING

SINGLE = 1e-3
DOUBLE = 1e-6
HALF_ROUNDOFF = 2.0**-11
HALF_MOST = 0.05
_HALF_FACTOR = 4.0
_BYTES = {"fp16": 2, "mixed": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingProfile:
    """A model's sensitivity to rounding errors."""

    depth: int  # Nodes that round on the longest path from an input to an output
    reduction: int  # Terms of the longest sum

    def tolerance_of(self, dtype: str, precision: str) -> float:
        """Return the tolerance of a value of such a model, as `for_output` computes it."""
        return for_output(dtype, precision, depth=self.depth, reduction=self.reduction)


def for_output(dtype: str, precision: str, *, depth: int = 1, reduction: int = 1) -> float:
    """Return the tolerance of an output of NumPy type `dtype`, computed in `precision`.

    `precision` is "fp16", "fp32", "fp64" or "mixed" (some of it in fp16). 0 means equal. `depth` and
    `reduction` matter for float16 only, `reduction` only where sums may be accumulated in it. Raises
    InvalidArgument for types honed does not carry and for other precisions.
    """
    if precision not in _BYTES:
        raise InvalidArgument(f"precision {precision!r} does not exist; use one of {', '.join(_BYTES)}")
    if carried_dtype(dtype).numpy.kind != "f":
        return 0.0
    coarsest = min(carried_dtype(dtype).itemsize, _BYTES[precision])
    if coarsest == 2:
        terms = math.sqrt(depth) + (math.sqrt(reduction) if _BYTES[precision] == 2 else 0.0)
        return min(HALF_MOST, max(SINGLE, _HALF_FACTOR * HALF_ROUNDOFF * terms))
    return DOUBLE if coarsest == 8 else SINGLE


def compare_value(expected: np.ndarray, actual: np.ndarray, allowed: float, name: str) -> Difference:
    """Return how far off a value is: infinitely far where its type or shape differs."""
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return Difference(output=name, error=np.inf, tolerance=allowed, index=(), expected=0.0, found=0.0)
    return compare(expected, actual, allowed, name)


def for_model(model: onnx.ModelProto, precision: str) -> tuple[float, ...]:
    """Return the tolerance of every output of a model with static shapes, in order.

    Raises InvalidArgument where an output is of a type honed does not carry.
    """
    known = graphs.infer(model)
    effort = work(model, known)
    allowed = []
    for output in model.graph.output:
        dtype = known[output.name].dtype if output.name in known else _dtype_name(output)
        allowed.append(effort.tolerance_of(dtype, precision))
    return tuple(allowed)


def _dtype_name(output: onnx.ValueInfoProto) -> str:
    name = graphs.numpy_name(output.type.tensor_type.elem_type)
    if name is None:
        raise InvalidArgument(
            f"output {output.name!r} is not a tensor of a type honed carries; export it anew"
        )
    return name


def work(model: onnx.ModelProto, types: Mapping[str, graphs.TypedValue]) -> RoundingProfile:
    """Return depth and longest sum of a model's main graph, where `types` holds the shapes of its values."""
    depth: dict[str, int] = {}
    longest = 1
    for node in model.graph.node:
        rounds = 0 if node.op_type in MOVING or node.op_type in ("Constant", "Shape") else 1
        reached = rounds + max((depth.get(name, 0) for name in node.input), default=0)
        depth.update({name: reached for name in node.output if name})
        longest = max(longest, _terms(node, types))
    return RoundingProfile(depth=max(depth.values(), default=1) or 1, reduction=longest)


def _terms(node: onnx.NodeProto, types: Mapping[str, graphs.TypedValue]) -> int:
    """Return the largest number of terms in a node's sums; 1 where it has none or its shapes are unknown."""
    shapes = [types[n].shape for n in node.input if n in types]
    if not shapes or not shapes[0]:
        return 1
    first, second = shapes[0], shapes[1] if len(shapes) > 1 else ()
    match node.op_type:
        case "MatMul" | "Attention" | "QAttention" | "MatMulNBits":
            return first[-1]
        case "DynamicQuantizeMatMul" | "MatMulIntegerToFloat":
            return first[-1]
        case "Gemm" | "FusedGemm":
            return first[0 if graphs.attribute(node, "transA", 0) else -1]
        case "FusedMatMul" | "TransposeMatMul":
            return first[-2 if graphs.attribute(node, "transA", 0) and len(first) > 1 else -1]
        case "Conv" | "FusedConv":
            return math.prod(second[1:])
        case "ConvTranspose":
            return math.prod(second) // max(second[1], 1) if len(second) > 1 else 1
        case "LayerNormalization" | "InstanceNormalization" | "GroupNormalization" | "Einsum":
            return math.prod(first)
        case "Softmax" | "LogSoftmax":
            return first[graphs.attribute(node, "axis", -1) % len(first)]
        case _ if node.op_type in MOVING:
            return 1
        case _:
            made = next((types[n].shape for n in node.output if n in types), None)
            return 1 if made is None else max(1, math.prod(first) // max(math.prod(made), 1))
