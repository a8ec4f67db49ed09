"""Which values an input may take, read off the nodes that consume it.

Indices must lie inside what they index, integer divisors must not be zero, logarithms want positive
arguments. The rules follow the ONNX operator specifications; an input is followed through nodes that only
move, cut or convert it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import inliner

from honed.protocol.errors import ModelRefused

from . import graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values allowed; both ends are included.

    `distinct_axis`: along this axis no value may come twice, counted modulo `high` + 1 (indices of
    a scatter). `rows`: the last axis holds index tuples into an array of this shape, no tuple twice.
    """

    low: float = -math.inf
    high: float = math.inf
    nonzero: bool = False
    distinct_axis: int | None = None
    rows: tuple[int, ...] | None = None

    @property
    def plain(self) -> bool:
        """Whether the range is about single values, so that moving them about does not matter."""
        return self.distinct_axis is None and self.rows is None

    def meet(self, other: Range) -> Range:
        """What both allow; where both allow something but nothing in common, what the first allows."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        if low > high and self.low <= self.high and other.low <= other.high:
            low, high = self.low, self.high
        return Range(
            low=low,
            high=high,
            nonzero=self.nonzero or other.nonzero,
            distinct_axis=self.distinct_axis if self.distinct_axis is not None else other.distinct_axis,
            rows=self.rows or other.rows,
        )


@dataclass(frozen=True, slots=True)
class _Use:
    """One place where a value is consumed."""

    node: onnx.NodeProto
    position: int
    known: Mapping[str, graphs.TypedValue]
    constants: Mapping[str, np.ndarray]

    def shape(self, position: int) -> tuple[int, ...]:
        """The static shape of an input of the node; raises _UnknownShape."""
        value = self.known.get(self.node.input[position])
        if value is None:
            raise _UnknownShape(
                f"node {graphs.label(self.node)!r} ({self.node.op_type}) writes to a value of unknown "
                "shape, so no indices for it can be made; give the value a static shape"
            )
        return value.shape


class _UnknownShape(ModelRefused):
    """What a node indexes has a shape that cannot be inferred."""


Rule = Callable[[_Use], Range]

# Inputs that decide shapes or axes: (operator, first position, last position).
_SHAPING: dict[str, tuple[int, int]] = {
    "AffineGrid": (1, 1), "CenterCropPad": (1, 1), "Col2Im": (1, 2), "Compress": (1, 1),
    "ConstantOfShape": (0, 0), "CumSum": (1, 1), "DFT": (1, 2), "Expand": (1, 1), "OneHot": (1, 1),
    "Pad": (1, 1), "Range": (0, 2), "ReduceL1": (1, 1), "ReduceL2": (1, 1), "ReduceLogSum": (1, 1),
    "ReduceLogSumExp": (1, 1), "ReduceMax": (1, 1), "ReduceMean": (1, 1), "ReduceMin": (1, 1),
    "ReduceProd": (1, 1), "ReduceSum": (1, 1), "ReduceSumSquare": (1, 1), "Reshape": (1, 1),
    "Resize": (1, 3), "Slice": (1, 4), "Split": (1, 1), "Squeeze": (1, 1), "Tile": (1, 1), "TopK": (1, 1),
    "Trilu": (1, 1), "Unsqueeze": (1, 1), "Upsample": (1, 1),
}  # fmt: skip

# Operators whose outputs hold values of these inputs, moved, cut or converted (None: of all inputs).
MOVING: dict[str, tuple[int, ...] | None] = {
    "Cast": (0,), "CastLike": (0,), "Concat": None, "DepthToSpace": (0,), "Dropout": (0,), "Expand": (0,),
    "Flatten": (0,), "Gather": (0,), "Identity": (0,), "Pad": (0,), "Reshape": (0,), "Slice": (0,),
    "SpaceToDepth": (0,), "Split": (0,), "Squeeze": (0,), "Tile": (0,), "Transpose": (0,), "Unsqueeze": (0,),
    "Where": (1, 2),
}  # fmt: skip
_KEEPING = {"Cast", "CastLike", "Dropout", "Identity"}  # those that leave every value where it was


def of_inputs(model: onnx.ModelProto) -> dict[str, Range]:
    """The range of every input of a model with static shapes, by name.

    Raises ModelRefused where an input decides a shape or an axis, which a compiled model cannot follow.
    """
    if model.functions:
        model = inliner.inline_local_functions(model)
    known, constants = graphs.infer(model), graphs.constants(model)
    consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in graphs.nodes(model.graph):
        for position, name in enumerate(node.input):
            consumers.setdefault(name, []).append((node, position))
    found = {}
    for value in graphs.inputs(model):
        reached = _reached(value.name, consumers)
        uses = [
            (_Use(node, position, known, constants), kept)
            for name, kept in reached.items()
            for node, position in consumers.get(name, ())
        ]
        allowed = Range()
        if value.dtype.startswith(("int", "uint")) and "mask" in value.name.lower():
            allowed = Range(low=0, high=1)
        for use, kept in uses:
            allowed = allowed.meet(_of_use(value.name, use, kept))
        found[value.name] = allowed
    return found


def _reached(name: str, consumers: Mapping[str, list[tuple[onnx.NodeProto, int]]]) -> dict[str, bool]:
    """The values that hold the values of `name`, and whether each keeps all of them in place."""
    reached = {name: True}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        for node, position in consumers.get(current, ()):
            moved = MOVING.get(node.op_type, ())
            if moved is not None and position not in moved:
                continue
            kept = reached[current] and node.op_type in _KEEPING
            for output in node.output:
                before = reached.get(output)
                after = kept and before is not False
                if output and after != before:
                    reached[output] = after
                    waiting.append(output)
    return reached


def _of_use(name: str, use: _Use, kept: bool) -> Range:
    node = use.node
    rules = {"": _RULES, "ai.onnx": _RULES, "com.microsoft": _RUNTIMES_RULES}.get(node.domain)
    if rules is None:
        return Range()
    shaping = _SHAPING.get(node.op_type)
    if shaping and shaping[0] <= use.position <= shaping[1]:
        raise ModelRefused(
            f"input {name!r} decides a shape or an axis of node {graphs.label(node)!r} ({node.op_type}); "
            "make it a constant of the model"
        )
    rule = rules.get((node.op_type, use.position))
    try:
        allowed = rule(use) if rule else Range()
    except _UnknownShape:
        if "Scatter" in node.op_type:
            raise
        allowed = Range(low=0, high=0)  # the one index that every axis has
    if not allowed.plain and not kept:
        raise ModelRefused(
            f"input {name!r} reaches the indices of node {graphs.label(node)!r} ({node.op_type}) rearranged, "
            "so no inputs without repeated indices can be made; pass the indices unchanged"
        )
    return allowed


def _along(use: _Use, default: int = 0) -> int:
    rank = len(use.shape(0))
    return graphs.attribute(use.node, "axis", default) % max(rank, 1)


def _gather(use: _Use) -> Range:
    size = use.shape(0)[_along(use)]
    return Range(low=-size, high=size - 1)


def _tuples(use: _Use) -> Range:
    """Index tuples: every component must fit its own axis, so the smallest indexed axis bounds all."""
    batch = graphs.attribute(use.node, "batch_dims", 0)
    sizes = use.shape(0)[batch:][: use.shape(1)[-1]]
    size = min(sizes, default=1)
    return Range(low=-size, high=size - 1)


def _reduces(use: _Use) -> bool:
    return any(a.name == "reduction" and a.s not in (b"", b"none") for a in use.node.attribute)


def _scatter(use: _Use) -> Range:
    axis = _along(use)
    size = use.shape(0)[axis]
    if _reduces(use):
        return Range(low=-size, high=size - 1)
    return Range(low=-size, high=size - 1, distinct_axis=axis)


def _scatter_nd(use: _Use) -> Range:
    if _reduces(use):
        return _tuples(use)
    return Range(rows=use.shape(0)[: use.shape(1)[-1]])


def _one_hot(use: _Use) -> Range:
    depth = use.constants.get(use.node.input[1])
    size = int(depth.reshape(-1)[0]) if depth is not None and depth.size == 1 else 1
    return Range(low=-size, high=size - 1)


def _shift(use: _Use) -> Range:
    value = use.known.get(use.node.input[1])
    bits = np.dtype(value.dtype).itemsize * 8 if value else 8
    return Range(low=0, high=bits - 1)


def _base(use: _Use) -> Range:
    """A negative base has a power for whole exponents only."""
    exponent = use.constants.get(use.node.input[1])
    whole = exponent is not None and bool(np.all(exponent == np.round(exponent)))
    negative = exponent is not None and bool(np.any(exponent < 0))
    allowed = Range(low=-4, high=4) if whole else Range(low=0.125, high=4)
    return replace(allowed, nonzero=negative)


def _exponent(use: _Use) -> Range:
    """A whole number has no negative powers among the whole numbers."""
    base = use.known.get(use.node.input[0])
    return Range(low=-3 if base is None or base.dtype.startswith("float") else 0, high=3)


def _slots(use: _Use) -> Range:
    """Where TensorScatter starts to write: the whole update must fit."""
    axis = graphs.attribute(use.node, "axis", -2)
    return Range(low=0, high=use.shape(0)[axis] - use.shape(1)[axis])


def _places(use: _Use) -> Range:
    """Positions in the flattened planes that MaxUnpool fills: at least as many as it is given."""
    return Range(low=0, high=math.prod(use.shape(0)) - 1)


def _below(position: int, axis: int) -> Rule:
    """Numbers of the rows of another input along an axis."""
    return lambda use: Range(low=0, high=use.shape(position)[axis] - 1)


def _turns(use: _Use) -> Range:
    """Places to turn by: one for each, or the first of as many as the input is long."""
    rows = use.shape(2)[0]
    first = math.prod(use.shape(1)) == 1
    return Range(low=0, high=rows - use.shape(0)[-2] if first else rows - 1)


def _mask(use: _Use) -> Range:
    """0 and 1 for places, or how many places there are to see."""
    shape = use.shape(use.position)
    return Range(low=0, high=1) if len(shape) > 1 else Range(low=1)


def _always(allowed: Range) -> Rule:
    return lambda _use: allowed


_RULES: dict[tuple[str, int], Rule] = {
    ("Gather", 1): _gather,
    ("GatherElements", 1): _gather,
    ("GatherND", 1): _tuples,
    ("Scatter", 1): _scatter,
    ("ScatterElements", 1): _scatter,
    ("ScatterND", 1): _scatter_nd,
    ("OneHot", 0): _one_hot,
    ("TensorScatter", 2): _slots,
    ("MaxUnpool", 1): _places,
    ("NegativeLogLikelihoodLoss", 1): _below(0, 1),
    ("SoftmaxCrossEntropyLoss", 1): _below(0, 1),
    ("RoiAlign", 2): _below(0, 0),
    ("RotaryEmbedding", 3): _below(1, 0),
    ("BitShift", 1): _shift,
    ("Pow", 0): _base,
    ("Pow", 1): _exponent,
    ("Div", 1): _always(Range(nonzero=True)),
    ("Mod", 1): _always(Range(nonzero=True)),
    ("Reciprocal", 0): _always(Range(nonzero=True)),
    ("Log", 0): _always(Range(low=0.01)),
    ("Sqrt", 0): _always(Range(low=0)),
    ("Acos", 0): _always(Range(low=-1, high=1)),
    ("Asin", 0): _always(Range(low=-1, high=1)),
    ("Atanh", 0): _always(Range(low=-0.99, high=0.99)),
    ("Acosh", 0): _always(Range(low=1)),
}

# Those of ONNX Runtime's own operators.
_RUNTIMES_RULES: dict[tuple[str, int], Rule] = {
    ("Attention", 3): _mask,
    ("QAttention", 5): _mask,
    ("MultiHeadAttention", 4): _mask,
    **{(op, 0): _below(2, 0) for op in ("EmbedLayerNormalization", "QEmbedLayerNormalization")},
    **{(op, 1): _below(4, 0) for op in ("EmbedLayerNormalization", "QEmbedLayerNormalization")},
    ("EmbedLayerNormalization", 7): _mask,
    ("QEmbedLayerNormalization", 7): _mask,
    ("EmbedLayerNormalization", 8): _below(3, 0),
    ("RotaryEmbedding", 1): _turns,
    ("GatherND", 1): _tuples,
}
