"""Random valid ONNX models: many operators, odd shapes, channels that are no multiple of 16.

    python -m tests.tuner.graphs_random FOLDER [--first 0] [--count 10] [--nodes 12]

A seed names a model: the same seed gives the same model with the same ONNX Runtime. Every model has static
shapes, passes ONNX's checker, and runs in ONNX Runtime with `feeds`. Makers propose nodes over values that
there are; what ONNX's own shape inference refuses is dropped, so that a maker may propose rashly.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

OPSET = 18
IDS = 5  # integers that a model is given lie below
_MOST_ELEMENTS = 1 << 16  # of a value
_MOST_WEIGHTS = 1 << 26  # a file of 2 GiB cannot be written
_MOST_PRODUCTS = 1 << 24  # multiplications of a node
_ATTEMPTS = 20  # at a model that ONNX Runtime takes
_FLOAT, _INT64, _HALF = TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT16
_ODD = (1, 2, 3, 5, 7, 9, 13, 16, 17, 20, 23, 31, 33, 37, 52)  # of channels, features, steps
_SIDES = (1, 3, 4, 5, 7, 8, 9, 11, 14, 16, 19, 27)

_STATE = onnxruntime.capi.onnxruntime_pybind11_state
# ONNX Runtime has no kernel for a type, or wants a shape that ONNX does not ask for.
_NOT_TAKEN = (
    _STATE.Fail, _STATE.InvalidArgument, _STATE.InvalidGraph, _STATE.NotImplemented,
    _STATE.RuntimeException,
)  # fmt: skip

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the model; those of integers are indices below `below`, where that is not 0."""

    name: str
    type: int
    shape: Shape
    below: int = 0

    @property
    def rank(self) -> int:
        """How many axes."""
        return len(self.shape)


class Refused(Exception):
    """A maker has nothing to propose here, or what it proposed is not valid."""


class Graph:
    """A model while it is made."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.inputs: list[Value] = []
        self.values: list[Value] = []
        self._count = 0

    # Chance

    def some(self, options: Sequence[Any]) -> Any:
        """One of them."""
        return options[int(self.rng.integers(len(options)))]

    def chance(self, share: float) -> bool:
        """True so often."""
        return bool(self.rng.random() < share)

    def pick(self, fits: Callable[[Value], bool]) -> Value:
        """A value that fits, more often a late one."""
        found = [v for v in self.values if fits(v)]
        if not found:
            raise Refused
        return found[max(int(self.rng.integers(len(found))), int(self.rng.integers(len(found))))]

    def floats(self, *ranks: int) -> Value:
        """A float32 of one of these ranks, or of any but 0."""
        return self.pick(lambda v: v.type == _FLOAT and (v.rank in ranks if ranks else v.rank > 0))

    # Making

    def fresh(self, wanted: str = "v") -> str:
        """A name not yet used."""
        self._count += 1
        return f"{wanted}{self._count}"

    def constant(self, array: Any, dtype: Any = None) -> str:
        """An initialiser."""
        name = self.fresh("c")
        self.constants[name] = numpy_helper.from_array(np.asarray(array, dtype), name)
        return name

    def ints(self, *values: int) -> str:
        """An initialiser of int64."""
        return self.constant(list(values), np.int64)

    def weights(self, *shape: int, scale: float | None = None) -> str:
        """Weights that keep products with them of unit size. Raises Refused where they fill gigabytes."""
        if math.prod(shape) > _MOST_WEIGHTS:
            raise Refused
        by = scale if scale is not None else 1 / math.sqrt(max(1, math.prod(shape[1:])))
        return self.constant((self.rng.standard_normal(shape) * by).astype(np.float32))

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, below: int = 0, **attrs: Any) -> Value:
        """A node; its first output. Raises Refused where ONNX does not take it."""
        names = [self.fresh() for _ in range(outputs)]
        node = helper.make_node(op, list(inputs), names, name=f"n{self._count}", **attrs)
        found = [Value(n, t, s, below) for n, (t, s) in zip(names, self._inferred(node), strict=True)]
        if any(math.prod(v.shape) > _MOST_ELEMENTS or min(v.shape, default=1) < 1 for v in found):
            raise Refused
        self.nodes.append(node)
        self.values += found
        return found[0]

    def _inferred(self, node: onnx.NodeProto) -> Iterator[tuple[int, Shape]]:
        known = {v.name: v for v in (*self.inputs, *self.values)}
        given = [known[n] for n in dict.fromkeys(node.input) if n in known]
        constants = [self.constants[n] for n in dict.fromkeys(node.input) if n in self.constants]
        graph = helper.make_graph(
            [node],
            "g",
            [helper.make_tensor_value_info(v.name, v.type, v.shape) for v in given],
            [onnx.ValueInfoProto(name=n) for n in node.output],
            constants,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        try:
            inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        except onnx.shape_inference.InferenceError as error:
            raise Refused from error
        for output in inferred.graph.output:
            tensor = output.type.tensor_type
            if not tensor.elem_type or not tensor.HasField("shape"):
                raise Refused
            dims = tensor.shape.dim
            if not all(d.HasField("dim_value") for d in dims):
                raise Refused
            yield tensor.elem_type, tuple(d.dim_value for d in dims)


# Makers

Maker = Callable[[Graph], object]
_MAKERS: list[tuple[Maker, int]] = []


def _maker(weight: int = 1) -> Callable[[Maker], Maker]:
    def kept(make: Maker) -> Maker:
        _MAKERS.append((make, weight))
        return make

    return kept


def _pads(g: Graph, kernel: Sequence[int]) -> dict[str, Any]:
    if g.chance(0.25):
        return {"auto_pad": g.some(("SAME_UPPER", "SAME_LOWER", "VALID"))}
    if g.chance(0.5):
        half = [k // 2 for k in kernel]
        return {"pads": [*half, *half]}
    return {"pads": [int(g.rng.integers(0, k)) for k in (*kernel, *kernel)]}


@_maker(8)
def _conv(g: Graph) -> None:
    x = g.floats(4, 4, 3, 5)
    axes, channels = x.rank - 2, x.shape[1]
    kernel = [int(g.some((1, 1, 3, 3, 5, 7))) for _ in range(axes)]
    if g.chance(0.6):
        kernel = kernel[:1] * axes
    groups = g.some((1, 1, channels, *(n for n in range(2, channels) if channels % n == 0)))
    outputs = int(g.some(_ODD)) * groups if groups < channels else channels * g.some((1, 1, 2))
    attrs: dict[str, Any] = {"kernel_shape": kernel, "group": int(groups), **_pads(g, kernel)}
    if g.chance(0.3):
        attrs["strides"] = [int(g.some((1, 2, 3))) for _ in range(axes)]
    if g.chance(0.2) and "auto_pad" not in attrs:
        attrs["dilations"] = [int(g.some((1, 2, 3))) for _ in range(axes)]
    if math.prod((outputs, channels // groups, *kernel, *x.shape[2:])) > _MOST_PRODUCTS:
        raise Refused
    inputs = [x.name, g.weights(outputs, channels // groups, *kernel)]
    if g.chance(0.5):
        inputs.append(g.weights(outputs, scale=0.1))
    y = g.add("Conv", inputs, **attrs)
    if g.chance(0.5):
        g.add(g.some(("Relu", "Sigmoid", "HardSwish", "LeakyRelu", "Elu")), [y.name])


@_maker(2)
def _conv_transpose(g: Graph) -> None:
    x = g.floats(4, 4, 3)
    axes, channels = x.rank - 2, x.shape[1]
    kernel = [int(g.some((1, 2, 3, 4, 5)))] * axes
    groups = g.some((1, 1, channels))
    outputs = int(g.some((1, 2, 3, 5, 7, 17)))
    attrs: dict[str, Any] = {"kernel_shape": kernel, "group": int(groups)}
    attrs["strides"] = [int(g.some((1, 2, 2, 3)))] * axes
    attrs["pads"] = [int(g.rng.integers(0, (k + 1) // 2)) for k in (*kernel, *kernel)]
    if g.chance(0.3):
        attrs["output_padding"] = [max(0, attrs["strides"][0] - 1)] * axes
    if math.prod((outputs, channels, *kernel, *x.shape[2:])) > _MOST_PRODUCTS:
        raise Refused
    g.add("ConvTranspose", [x.name, g.weights(channels, outputs, *kernel)], **attrs)


@_maker(4)
def _pool(g: Graph) -> None:
    x = g.floats(4, 4, 3, 5)
    kernel = [int(g.some((1, 2, 3, 3, 5))) for _ in x.shape[2:]]
    kernel = [min(k, side) for k, side in zip(kernel, x.shape[2:], strict=True)]
    attrs: dict[str, Any] = {"kernel_shape": kernel, "strides": [int(g.some((1, 2, 3)))] * len(kernel)}
    if g.chance(0.6):
        attrs["pads"] = [int(g.rng.integers(0, k // 2 + 1)) for k in (*kernel, *kernel)]
    attrs["ceil_mode"] = int(g.chance(0.3))
    if g.chance(0.5):
        g.add("MaxPool", [x.name], **attrs)
    else:
        g.add("AveragePool", [x.name], count_include_pad=int(g.chance(0.5)), **attrs)


@_maker()
def _global(g: Graph) -> None:
    x = g.floats(4, 3)
    pooled = g.add(g.some(("GlobalAveragePool", "GlobalMaxPool")), [x.name])
    if g.chance(0.5):  # squeeze and excite
        narrow = max(1, x.shape[1] // 3)
        ones = [1] * (x.rank - 2)
        a = g.add("Conv", [pooled.name, g.weights(narrow, x.shape[1], *ones)])
        a = g.add("Relu", [a.name])
        a = g.add("Conv", [a.name, g.weights(x.shape[1], narrow, *ones)])
        a = g.add(g.some(("Sigmoid", "HardSigmoid")), [a.name])
        g.add("Mul", [x.name, a.name])


@_maker(3)
def _normalisation(g: Graph) -> None:
    x = g.floats(3, 4)
    c = x.shape[1]
    kind = g.some(("BatchNormalization", "InstanceNormalization", "LayerNormalization", "LRN", "Lp", "own"))
    positive = g.constant(g.rng.uniform(0.5, 1.5, c).astype(np.float32))
    if kind == "BatchNormalization":
        small = [g.weights(c, scale=0.1) for _ in range(2)]
        g.add(kind, [x.name, positive, small[0], small[1], positive])
    elif kind == "InstanceNormalization":
        g.add(kind, [x.name, positive, g.weights(c, scale=0.1)])
    elif kind == "LayerNormalization":
        axis = int(g.some((-1, -1, -2, 1)))
        shape = x.shape[axis:]
        g.add(kind, [x.name, g.weights(*shape, scale=1.0), g.weights(*shape, scale=0.1)], axis=axis)
    elif kind == "LRN":
        g.add(kind, [x.name], size=int(g.some((1, 3, 5))))
    elif kind == "Lp":
        g.add("LpNormalization", [x.name], axis=int(g.some((-1, 1))), p=int(g.some((1, 2))))
    else:  # as exporters write it
        axis = int(g.some((1, -1)))
        mean = g.add("ReduceMean", [x.name, g.ints(axis)])
        apart = g.add("Sub", [x.name, mean.name])
        square = g.add("Mul", [apart.name, apart.name])
        variance = g.add("ReduceMean", [square.name, g.ints(axis)])
        more = g.add("Add", [variance.name, g.constant(np.float32(1e-3))])
        g.add("Div", [apart.name, g.add("Sqrt", [more.name]).name])


@_maker(5)
def _product(g: Graph) -> None:
    x = g.floats(2, 3, 4)
    inner, outer = x.shape[-1], int(g.some(_ODD))
    if math.prod(x.shape) * outer > _MOST_PRODUCTS:
        raise Refused
    if x.rank == 2 and g.chance(0.5):
        over_first = g.chance(0.3)
        inner = x.shape[0] if over_first else inner
        turned = g.chance(0.5)
        w = g.weights(outer, inner) if turned else g.weights(inner, outer, scale=1 / math.sqrt(inner))
        bias = [g.weights(outer, scale=0.1)] if g.chance(0.6) else []
        attrs = {"alpha": float(g.some((1.0, 0.5))), "beta": float(g.some((1.0, 2.0)))}
        g.add("Gemm", [x.name, w, *bias], transA=int(over_first), transB=int(turned), **attrs)
        return
    stack = x.shape[:-2] if g.chance(0.2) else ()
    y = g.add("MatMul", [x.name, g.weights(*stack, inner, outer, scale=1 / math.sqrt(inner))])
    if g.chance(0.5):
        y = g.add("Add", [y.name, g.weights(outer, scale=0.1)])
    if g.chance(0.3):
        half = g.constant(np.float32(0.5))
        erf = g.add("Erf", [g.add("Mul", [y.name, g.constant(np.float32(0.70710677))]).name])
        more = g.add("Add", [erf.name, g.constant(np.float32(1.0))])
        g.add("Mul", [g.add("Mul", [y.name, more.name]).name, half])


@_maker(2)
def _attention(g: Graph) -> None:
    x = g.floats(3)
    n, steps, width = x.shape
    heads = int(g.some([h for h in (1, 2, 3, 4, 5) if width % h == 0]))
    if steps * steps * width > _MOST_PRODUCTS:
        raise Refused

    def head(last: Sequence[int]) -> Value:
        made = g.add("MatMul", [x.name, g.weights(width, width)])
        apart = g.add("Reshape", [made.name, g.ints(n, steps, heads, width // heads)])
        return g.add("Transpose", [apart.name], perm=list(last))

    q, k, v = head((0, 2, 1, 3)), head((0, 2, 3, 1)), head((0, 2, 1, 3))
    scores = g.add("MatMul", [q.name, k.name])
    scores = g.add("Mul", [scores.name, g.constant(np.float32(1 / math.sqrt(width // heads)))])
    if g.chance(0.4):
        mask = np.where(np.tri(steps, dtype=bool), 0.0, -1e4).astype(np.float32)
        scores = g.add("Add", [scores.name, g.constant(mask)])
    weights = g.add("Softmax", [scores.name], axis=-1)
    made = g.add("MatMul", [weights.name, v.name])
    made = g.add("Transpose", [made.name], perm=[0, 2, 1, 3])
    made = g.add("Reshape", [made.name, g.ints(0, 0, -1)])
    g.add("Add", [made.name, x.name])


@_maker()
def _product_of_two(g: Graph) -> None:
    x = g.floats(2, 3, 4)
    turned = g.add("Transpose", [x.name], perm=[*range(x.rank - 2), x.rank - 1, x.rank - 2])
    order = (x, turned) if g.chance(0.5) else (turned, x)
    if math.prod(x.shape) * max(x.shape[-2:]) > _MOST_PRODUCTS:
        raise Refused
    if x.rank == 3 and g.chance(0.3):
        g.add("Einsum", [one.name for one in order], equation="bij,bjk->bik")
    else:
        made = g.add("MatMul", [one.name for one in order])
        g.add("Mul", [made.name, g.constant(np.float32(1 / x.shape[-1]))])


@_maker(8)
def _unary(g: Graph) -> None:
    x = g.floats()
    op = g.some(
        ("Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Softplus", "Softsign", "Elu", "Selu", "Celu", "Erf",
         "HardSigmoid", "HardSwish", "Mish", "LeakyRelu", "ThresholdedRelu", "Floor", "Ceil", "Round", "Sign",
         "Sin", "Cos", "Atan", "Sqrt", "Log", "Reciprocal", "Clip", "Shrink")
    )  # fmt: skip
    if op in ("Sqrt", "Log", "Reciprocal"):
        x = g.add("Add", [g.add("Abs", [x.name]).name, g.constant(np.float32(0.5))])
    if op == "Exp":
        x = g.add("Clip", [x.name, g.constant(np.float32(-4)), g.constant(np.float32(2))])
    bounds = [g.constant(np.float32(b)) for b in (-1.0, 1.5)] if op == "Clip" else []
    g.add(op, [x.name, *bounds])


def _beside(g: Graph, x: Value) -> str:
    """What can be broadcast with `x`: itself, another value, or a constant with axes of 1."""
    if g.chance(0.4):
        other = [v for v in g.values if v.type == x.type and _broadcast(v.shape, x.shape)]
        if other:
            return str(g.some(other).name)
    shape = [1 if g.chance(0.4) else n for n in x.shape]
    return g.weights(*shape[int(g.rng.integers(0, len(shape) + 1)) :], scale=1.0)


def _broadcast(a: Shape, b: Shape) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


@_maker(8)
def _binary(g: Graph) -> None:
    x = g.floats()
    y = _beside(g, x)
    op = g.some(("Add", "Add", "Sub", "Mul", "Mul", "Max", "Min", "Div", "Pow", "PRelu", "Mean", "Mod"))
    if op in ("Div", "Pow", "Mod"):
        shape = [1 if g.chance(0.5) else n for n in x.shape]
        y = g.constant(g.rng.uniform(0.5, 2.0, shape).astype(np.float32))
    if op == "Pow":
        x = g.add("Abs", [x.name])
    if op == "PRelu":
        y = g.weights(*(1 if g.chance(0.5) else n for n in x.shape[1:]), scale=0.3)
    g.add(op, [x.name, y], **({"fmod": 1} if op == "Mod" else {}))


@_maker(2)
def _logic(g: Graph) -> None:
    x = g.floats()
    truth = g.add(g.some(("Greater", "Less", "GreaterOrEqual", "LessOrEqual")), [x.name, _beside(g, x)])
    if g.chance(0.3):
        truth = g.add("Not", [truth.name])
    if g.chance(0.3):
        other = g.add("Greater", [x.name, g.constant(np.float32(0.3))])
        truth = g.add(g.some(("And", "Or", "Xor")), [truth.name, other.name])
    if g.chance(0.6):
        g.add("Where", [truth.name, x.name, _beside(g, x)])
    else:
        g.add("Cast", [truth.name], to=_FLOAT)


@_maker(4)
def _transpose(g: Graph) -> None:
    x = g.floats(2, 3, 4, 5)
    g.add("Transpose", [x.name], perm=[int(n) for n in g.rng.permutation(x.rank)])


@_maker(4)
def _reshape(g: Graph) -> None:
    x = g.floats()
    left, shape = math.prod(x.shape), []
    for _ in range(int(g.rng.integers(1, 5))):
        shape.append(int(g.some([n for n in range(1, left + 1) if left % n == 0] if left < 5000 else [1])))
        left //= shape[-1]
    shape.append(left)
    shape = [int(n) for n in g.rng.permutation(shape)]
    if g.chance(0.4):
        shape[int(g.rng.integers(len(shape)))] = -1
    g.add("Reshape", [x.name, g.ints(*shape)])


@_maker(2)
def _axes(g: Graph) -> None:
    x = g.floats()
    kind = g.some(("Flatten", "Unsqueeze", "Squeeze"))
    if kind == "Flatten":
        g.add(kind, [x.name], axis=int(g.rng.integers(0, x.rank + 1)))
    elif kind == "Unsqueeze":
        if x.rank > 4:
            raise Refused
        g.add(kind, [x.name, g.ints(int(g.rng.integers(0, x.rank + 1)))])
    else:
        g.add(kind, [x.name, g.ints(*[n for n, extent in enumerate(x.shape) if extent == 1][:1])])


@_maker(4)
def _concat(g: Graph) -> None:
    x = g.floats()
    axis = int(g.rng.integers(0, x.rank))

    def fits(v: Value) -> bool:
        apart = (n for n in range(x.rank) if n != axis)
        return v.type == x.type and v.rank == x.rank and all(v.shape[n] == x.shape[n] for n in apart)

    parts = [x.name, *(g.pick(fits).name for _ in range(int(g.rng.integers(1, 3))))]
    if g.chance(0.4):
        own = list(x.shape)
        own[axis] = int(g.some((1, 3, 4)))
        parts.append(g.weights(*own, scale=1.0))
    g.add("Concat", [str(p) for p in g.rng.permutation(parts)], axis=axis)


@_maker(3)
def _split(g: Graph) -> None:
    x = g.floats()
    axis = int(g.rng.integers(0, x.rank))
    if x.shape[axis] < 2:
        raise Refused
    first = int(g.rng.integers(1, x.shape[axis]))
    g.add("Split", [x.name, g.ints(first, x.shape[axis] - first)], outputs=2, axis=axis)


@_maker(4)
def _slice(g: Graph) -> None:
    x = g.floats()
    axes = sorted({int(g.rng.integers(0, x.rank)) for _ in range(2)})
    starts, ends, steps = [], [], []
    for axis in axes:
        extent = x.shape[axis]
        start, end = sorted(int(n) for n in g.rng.integers(0, extent + 1, 2))
        step = int(g.some((1, 1, 1, 2, 3, -1, -2)))
        if step < 0:
            start, end = max(end - 1, 0), start - 1 if start > 0 else -extent - 5
        starts.append(start - extent if g.chance(0.3) else start)
        ends.append(end if step < 0 else g.some((end, end, 1 << 40)))
        steps.append(step)
    g.add("Slice", [x.name, g.ints(*starts), g.ints(*ends), g.ints(*axes), g.ints(*steps)])


@_maker(3)
def _pad(g: Graph) -> None:
    x = g.floats(2, 3, 4, 5)
    mode = g.some(("constant", "constant", "reflect", "edge"))
    most = [min(3, n - 1) if mode == "reflect" else 3 for n in x.shape]
    pads = [int(g.rng.integers(0, m + 1)) if g.chance(0.5) else 0 for m in (*most, *most)]
    value = [g.constant(np.float32(0.5))] if mode == "constant" and g.chance(0.5) else []
    g.add("Pad", [x.name, g.ints(*pads), *value], mode=mode)


@_maker(2)
def _repeat(g: Graph) -> None:
    x = g.floats()
    if g.chance(0.5):
        g.add("Tile", [x.name, g.ints(*(int(g.some((1, 1, 2, 3))) for _ in x.shape))])
    else:
        g.add("Expand", [x.name, g.ints(*(int(g.some((2, 3, 5))) if n == 1 else n for n in x.shape))])


@_maker(3)
def _resize(g: Graph) -> None:
    x = g.floats(4, 4, 3)
    scales = [1.0, 1.0, *(float(g.some((0.5, 1.0, 1.5, 2.0, 2.0, 3.0, 0.7))) for _ in x.shape[2:])]
    mode = g.some(("nearest", "nearest", "linear", "cubic"))
    if mode == "cubic" and x.rank != 4:
        mode = "linear"
    how = g.some(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
    attrs = {"mode": mode, "coordinate_transformation_mode": how}
    if mode == "nearest":
        attrs["nearest_mode"] = g.some(("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"))
    if g.chance(0.5):
        g.add("Resize", [x.name, "", g.constant(scales, np.float32)], **attrs)
    else:
        sizes = [max(1, int(n * s)) for n, s in zip(x.shape, scales, strict=True)]
        g.add("Resize", [x.name, "", "", g.ints(*sizes)], **attrs)


@_maker(2)
def _depth_and_space(g: Graph) -> None:
    x = g.floats(4)
    size = int(g.some((2, 3)))
    if g.chance(0.5):
        y = g.add("Conv", [x.name, g.weights(size * size * int(g.some((1, 2, 5))), x.shape[1], 1, 1)])
        g.add("DepthToSpace", [y.name], blocksize=size, mode=g.some(("DCR", "CRD")))
    else:
        rows, columns = (n // size * size for n in x.shape[2:])
        cut = g.add("Slice", [x.name, g.ints(0, 0), g.ints(rows, columns), g.ints(2, 3)])
        g.add("SpaceToDepth", [cut.name], blocksize=size)


@_maker(5)
def _reduce(g: Graph) -> None:
    x = g.floats()
    op = g.some(("Mean", "Mean", "Sum", "Max", "Min", "L1", "L2", "LogSumExp", "SumSquare"))
    axes = sorted({int(g.rng.integers(0, x.rank)) for _ in range(int(g.some((1, 1, 2))))})
    g.add(f"Reduce{op}", [x.name, g.ints(*axes)], keepdims=int(g.chance(0.6)))


@_maker(3)
def _softmax(g: Graph) -> None:
    x = g.floats()
    g.add(g.some(("Softmax", "Softmax", "LogSoftmax")), [x.name], axis=int(g.rng.integers(-x.rank, x.rank)))


def _indices(g: Graph, below: int, shape: Sequence[int]) -> str:
    """Constant indices, some of them from the end."""
    found = g.rng.integers(-below if g.chance(0.3) else 0, below, tuple(shape))
    return g.constant(found, np.int64)


@_maker(4)
def _gather(g: Graph) -> None:
    x = g.floats()
    axis = int(g.rng.integers(0, x.rank))
    extent = x.shape[axis]
    computed = [v for v in g.values if v.type == _INT64 and 0 < v.below <= extent and v.rank < 3]
    if computed and g.chance(0.7):
        g.add("Gather", [x.name, g.some(computed).name], axis=axis)
        return
    kind = g.some(("Gather", "Gather", "GatherElements", "GatherND"))
    if kind == "Gather":
        shape = [int(g.some((1, 2, 3, 5))) for _ in range(int(g.some((0, 1, 1, 2))))]
        g.add(kind, [x.name, _indices(g, extent, shape)], axis=axis)
    elif kind == "GatherElements":
        own = [n if n == axis else min(extent, 4) for n, extent in enumerate(x.shape)]
        own[axis] = int(g.some((1, 3, 6)))
        g.add(kind, [x.name, _indices(g, extent, own)], axis=axis)
    else:
        rows = g.rng.integers(0, x.shape[: axis + 1], (3, axis + 1))
        g.add(kind, [x.name, g.constant(rows, np.int64)])


@_maker(2)
def _gather_elements_computed(g: Graph) -> None:
    x = g.floats(2, 3)
    axis = int(g.rng.integers(0, x.rank))
    at = g.add("ArgMax", [x.name], axis=axis, keepdims=1, below=x.shape[axis])
    g.add("GatherElements", [x.name, at.name], axis=axis)


@_maker(2)
def _scatter(g: Graph) -> None:
    x = g.floats(2, 3, 4)
    if g.chance(0.5):
        rows = g.rng.permutation(x.shape[0])[: max(1, x.shape[0] // 2)].reshape(-1, 1)
        updates = g.weights(len(rows), *x.shape[1:], scale=1.0)
        g.add("ScatterND", [x.name, g.constant(rows, np.int64), updates])
    else:
        axis = int(g.rng.integers(0, x.rank))
        at = np.argsort(g.rng.random(x.shape), axis=axis).take(range(min(3, x.shape[axis])), axis=axis)
        updates = g.weights(*at.shape, scale=1.0)
        g.add("ScatterElements", [x.name, g.constant(at, np.int64), updates], axis=axis)


@_maker(2)
def _best(g: Graph) -> None:
    x = g.floats()
    axis = int(g.rng.integers(0, x.rank))
    if g.chance(0.5):
        keep = int(g.chance(0.5))
        g.add(g.some(("ArgMax", "ArgMin")), [x.name], axis=axis, keepdims=keep, below=x.shape[axis])
    else:
        most = int(g.rng.integers(1, x.shape[axis] + 1))
        y = g.add("TopK", [x.name, g.ints(most)], outputs=2, below=x.shape[axis], axis=axis)
        if g.chance(0.3):
            g.add("Neg", [y.name])


@_maker()
def _one_hot(g: Graph) -> None:
    x = g.pick(lambda v: v.type == _INT64 and v.below > 0 and v.rank < 4)
    given = [x.name, g.ints(x.below), g.constant([0.0, 1.0], np.float32)]
    g.add("OneHot", given, axis=int(g.some((-1, 0))))


@_maker()
def _clamped_indices(g: Graph) -> None:
    """Indices that are computed from floats, and clamped."""
    x = g.floats(1, 2)
    below = int(g.some((3, 7, 20)))
    clamped = g.add("Clip", [x.name, g.constant(np.float32(0)), g.constant(np.float32(below - 1))])
    at = g.add("Cast", [clamped.name], to=_INT64, below=below)
    g.add("Gather", [g.weights(below, int(g.some(_ODD)), scale=1.0), at.name], axis=0)


@_maker()
def _along(g: Graph) -> None:
    x = g.floats(2, 3)
    kind = g.some(("CumSum", "Trilu", "ReverseSequence"))
    if kind == "CumSum":
        axis = g.constant(int(g.rng.integers(0, x.rank)), np.int64)
        g.add(kind, [x.name, axis], exclusive=int(g.chance(0.3)), reverse=int(g.chance(0.3)))
    elif kind == "Trilu":
        g.add(kind, [x.name, g.constant(int(g.some((-1, 0, 1))), np.int64)], upper=int(g.chance(0.5)))
    else:
        lengths = g.rng.integers(1, x.shape[0] + 1, x.shape[1])
        g.add(kind, [x.name, g.constant(lengths, np.int64)], time_axis=0, batch_axis=1)


@_maker()
def _recurrent(g: Graph) -> None:
    x = g.floats(3)
    steps, _, width = x.shape
    hidden = int(g.some((1, 3, 5, 8)))
    if steps > 8:
        raise Refused
    op, gates = g.some((("LSTM", 4), ("GRU", 3), ("RNN", 1)))
    way = g.some(("forward", "reverse", "bidirectional"))
    ways = 2 if way == "bidirectional" else 1
    given = [
        x.name,
        g.weights(ways, gates * hidden, width, scale=1 / math.sqrt(width)),
        g.weights(ways, gates * hidden, hidden, scale=1 / math.sqrt(hidden)),
    ]
    if g.chance(0.5):
        given.append(g.weights(ways, 2 * gates * hidden, scale=0.1))
    attrs = {"linear_before_reset": 1} if op == "GRU" and g.chance(0.5) else {}
    g.add(op, given, outputs=2, hidden_size=hidden, direction=way, **attrs)


@_maker(2)
def _quantised(g: Graph) -> None:
    x = g.floats()
    scale = g.constant(np.float32(0.03))
    kind, zero = g.some(((np.uint8, 128), (np.int8, 0), (np.uint8, 120)))
    point = g.constant(zero, kind)
    q = g.add("QuantizeLinear", [x.name, scale, point])
    y = g.add("DequantizeLinear", [q.name, scale, point])
    if x.rank == 4 and g.chance(0.6):
        outputs = int(g.some(_ODD))
        side = int(g.some((1, 3)))
        by = g.constant(np.float32(0.02))
        whole = g.rng.integers(-50, 50, (outputs, x.shape[1], side, side)).astype(np.int8)
        w = g.add("DequantizeLinear", [g.constant(whole), by, g.constant(0, np.int8)])
        g.add("Conv", [y.name, w.name], pads=[side // 2] * 4)
    elif x.rank == 2 and g.chance(0.6):
        d = g.add("DynamicQuantizeLinear", [x.name], outputs=3)
        whole = g.rng.integers(-50, 50, (x.shape[1], int(g.some(_ODD)))).astype(np.int8)
        summed = g.add("MatMulInteger", [d.name, g.constant(whole)])
        made = g.add("Cast", [summed.name], to=_FLOAT)
        g.add("Mul", [made.name, g.constant(np.float32(0.001))])


@_maker()
def _halves(g: Graph) -> None:
    x = g.floats()
    half = g.add("Cast", [x.name], to=_HALF)
    half = g.add(g.some(("Relu", "Sigmoid", "Tanh", "Abs")), [half.name])
    g.add("Cast", [half.name], to=_FLOAT)


@_maker()
def _whole_numbers(g: Graph) -> None:
    x = g.floats()
    limits = [g.constant(np.float32(b)) for b in (-100, 100)]
    scaled = g.add("Mul", [x.name, g.constant(np.float32(10))])
    limited = g.add("Clip", [scaled.name, *limits])
    whole = g.add("Cast", [limited.name], to=g.some((TensorProto.INT32, _INT64)))
    kind = np.int32 if whole.type == TensorProto.INT32 else np.int64
    whole = g.add(
        g.some(("Add", "Mul", "Div", "Mod")), [whole.name, g.constant(int(g.some((2, 3, 7))), kind)]
    )
    g.add("Cast", [whole.name], to=_FLOAT)


@_maker()
def _shaped(g: Graph) -> None:
    """A reshape by a shape that is computed, as exporters write it."""
    x = g.floats(3, 4)
    shape = g.add("Shape", [x.name])
    first = g.add("Gather", [shape.name, g.constant(0, np.int64)])
    wide = g.add("Unsqueeze", [first.name, g.ints(0)])
    whole = g.add("Concat", [wide.name, g.ints(math.prod(x.shape[1:]))], axis=0)
    g.add("Reshape", [x.name, whole.name])


# Models


def _begin(g: Graph) -> None:
    """Inputs of the model."""
    for _ in range(int(g.some((1, 1, 2, 3)))):
        channels = int(g.some(_ODD))
        kind = g.some(("image", "image", "image", "series", "sequence", "matrix", "ids"))
        n = int(g.some((1, 1, 1, 2)))
        shape: Shape
        if kind == "image":
            shape = (n, channels, int(g.some(_SIDES)), int(g.some(_SIDES)))
        elif kind == "series":
            shape = (n, channels, int(g.some((8, 17, 50, 100))))
        elif kind == "sequence":
            shape = (n, int(g.some((1, 3, 7, 8, 20))), channels)
        elif kind == "matrix":
            shape = (int(g.some(_SIDES)), channels)
        else:
            shape = (n, int(g.some((3, 7, 20))))
        name = f"x{len(g.inputs)}"
        g.inputs.append(Value(name, _INT64 if kind == "ids" else _FLOAT, shape, IDS * (kind == "ids")))
        if kind == "ids":
            g.add("Gather", [g.weights(IDS, channels, scale=1.0), name], axis=0)
        else:
            g.values.append(g.inputs[-1])


def _attempt(rng: np.random.Generator, nodes: int) -> onnx.ModelProto:
    g = Graph(rng)
    _begin(g)
    weights = np.array([weight for _, weight in _MAKERS], float)
    weights /= weights.sum()
    while len(g.nodes) < nodes:
        make = _MAKERS[int(rng.choice(len(_MAKERS), p=weights))][0]
        before = len(g.nodes), len(g.values)
        try:
            make(g)
        except Refused:
            del g.nodes[before[0] :], g.values[before[1] :]
    return _model(g)


def _model(g: Graph) -> onnx.ModelProto:
    """The graph with what nothing reads as its outputs, without what that leaves unused."""
    read = {name for node in g.nodes for name in node.input}
    given = {v.name for v in g.inputs}
    ends = [v for v in g.values if v.name not in read and v.name not in given]
    ends = ends[-4:]
    needed = {v.name for v in ends}
    nodes: list[onnx.NodeProto] = []
    for node in reversed(g.nodes):
        if needed.intersection(node.output):
            nodes.insert(0, node)
            needed.update(node.input)
    inputs = [v for v in g.inputs if v.name in needed]
    graph = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info(v.name, v.type, v.shape) for v in inputs],
        [helper.make_tensor_value_info(v.name, v.type, v.shape) for v in ends],
        [tensor for name, tensor in g.constants.items() if name in needed],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def random_model(seed: int, nodes: int = 12) -> onnx.ModelProto:
    """The model of a seed, of about so many nodes; ONNX Runtime takes it and answers finite numbers."""
    for attempt in range(_ATTEMPTS):
        model = _attempt(np.random.default_rng((seed, attempt)), nodes)
        if not model.graph.input:
            continue
        try:
            found = answers(model, feeds(model, seed))
        except _NOT_TAKEN:
            continue
        if all(np.isfinite(one).all() for one in found):
            return model
    raise RuntimeError(f"seed {seed} gave no model that ONNX Runtime takes in {_ATTEMPTS} attempts")


def feeds(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    """Inputs for a random model."""
    rng = np.random.default_rng((seed, 1 << 20))
    found: dict[str, Array] = {}
    for given in model.graph.input:
        shape = [d.dim_value for d in given.type.tensor_type.shape.dim]
        if given.type.tensor_type.elem_type == _INT64:
            found[given.name] = rng.integers(0, IDS, shape)
        else:
            found[given.name] = rng.standard_normal(shape).astype(np.float32)
    return found


def answers(model: onnx.ModelProto, given: dict[str, Array]) -> list[Array]:
    """What ONNX Runtime answers, without optimising."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, given))


def main() -> None:
    """Write models into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=12)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for seed in range(options.first, options.first + options.count):
        onnx.save(random_model(seed, options.nodes), options.folder / f"random-{seed}.onnx")


if __name__ == "__main__":
    main()
