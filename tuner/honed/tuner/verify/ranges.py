"""Determines which values an input may take, from its consumers, its name, and the file's metadata.

Indices must lie inside what they index, integer divisors must not be zero, logarithms want positive
arguments, and what is multiplied by a number as large as -1e9 is a mask. The rules follow the ONNX operator
specifications; an input is followed through nodes that move, cut or convert it, and through arithmetic with
constants.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnx

from honed.protocol.errors import ModelRefused

from . import graphs
from .graphs import MOVING, SourceGraph, TypedValue


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A range of allowed values; both ends are included.

    `mark`: only 0 and 1 (a mask). `leading`: at least this many ones, and no zero before them, in each row of
    a mask (the filled places of a cache). `compared`: whole numbers that the values are compared with, which
    some should equal. `ends`: lengths, of which some should be the least, the next and the greatest. `hides`:
    a mask of attention along the last axis, of which some rows should hide everything. `distinct_axis`: no
    value may occur twice along this axis, counted modulo `high` + 1 (indices of a scatter). `rows`: the last
    axis holds index tuples into an array of this shape, no tuple twice.
    """

    low: float = -math.inf
    high: float = math.inf
    nonzero: bool = False
    mark: bool = False
    leading: int = 0
    compared: tuple[float, ...] = ()
    ends: bool = False
    hides: bool = False
    distinct_axis: int | None = None
    rows: tuple[int, ...] | None = None

    @property
    def plain(self) -> bool:
        """Return whether the range concerns single values, so that their order does not matter."""
        return self.distinct_axis is None and self.rows is None

    def meet(self, other: Range) -> Range:
        """Return the range that both allow; where the two do not overlap, the first's."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        if low > high and self.low <= self.high and other.low <= other.high:
            low, high = self.low, self.high
        return Range(
            low=low,
            high=high,
            nonzero=self.nonzero or other.nonzero,
            mark=self.mark or other.mark,
            leading=max(self.leading, other.leading),
            compared=(*self.compared, *other.compared),
            ends=self.ends or other.ends,
            hides=self.hides or other.hides,
            distinct_axis=self.distinct_axis if self.distinct_axis is not None else other.distinct_axis,
            rows=self.rows or other.rows,
        )


@dataclass(frozen=True, slots=True)
class InputUse:
    """A place where a value is consumed, and its derivation from an input."""

    graph: SourceGraph
    node: onnx.NodeProto
    position: int
    path: _Path
    whole: bool  # The input holds integers

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the static shape of an input of the node; raises _UnknownShape where it is unknown."""
        value = self.graph.known.get(self.node.input[position])
        if value is None:
            raise _UnknownShape(
                f"node {graphs.label(self.node)!r} ({self.node.op_type}) writes to a value of unknown "
                "shape, so no indices for it can be made; give the value a static shape"
            )
        return value.shape

    def constant(self, position: int) -> np.ndarray | None:
        """Return an input of the node where it is a small constant."""
        return self.graph.constants.get(self.node.input[position])


class _UnknownShape(ModelRefused):
    """Raised when the shape of an indexed value cannot be inferred."""


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

_KEEPING = {"Cast", "CastLike", "Dropout", "Identity"}  # Operators that leave every value at its position


@dataclass(frozen=True, slots=True)
class _Path:
    """The derivation of a value from an input: `scale` * input + `offset`, and whether positions are kept."""

    scale: float = 1.0
    offset: float = 0.0
    kept: bool = True

    @property
    def unchanged(self) -> bool:
        """Return whether the value holds the input's own numbers."""
        return (self.scale, self.offset) == (1.0, 0.0)

    def then(self, scale: float, offset: float) -> _Path:
        """Follow the value through `scale` * value + `offset`."""
        return _Path(scale * self.scale, scale * self.offset + offset, self.kept)

    def back(self, allowed: Range) -> Range:
        """Return the allowed range of the input where the value may hold `allowed`."""
        if self.unchanged:
            return allowed
        low, high = sorted((end - self.offset) / self.scale for end in (allowed.low, allowed.high))
        compared = tuple((each - self.offset) / self.scale for each in allowed.compared)
        if allowed.mark:
            low, high = 0.0, 1.0
        nonzero = allowed.nonzero and not self.offset
        return Range(
            low=low, high=high, nonzero=nonzero, mark=allowed.mark, compared=compared, ends=allowed.ends
        )


_MOST_PATHS = 4  # Paths from one input to one value; more are not followed
_UNBOUNDED = Range()


def of_inputs(graph: SourceGraph, *, shaping: bool = False) -> dict[str, Range]:
    """Return the range of every input of a model with static shapes, by name.

    With `shaping` inputs may decide shapes and axes. Otherwise raises ModelRefused for them, because a
    compiled model cannot follow.
    """
    pixels, given, found = _pixels(graph.model), graphs.inputs(graph.model), {}
    for value in given:
        whole = value.dtype.startswith(("int", "uint"))
        named = next((row for row in NAMES if row.whole == whole and row.matches(value.name)), None)
        allowed = named.draws(value, given) if named is not None else _UNBOUNDED
        if pixels is not None and len(value.shape) == 4 and not whole:
            allowed = allowed.meet(pixels)
        for name, paths in _trace_paths(value.name, graph).items():
            for node, position in graph.consumers.get(name, ()):
                for path in paths:
                    use = InputUse(graph, node, position, path, whole)
                    allowed = allowed.meet(_of_use(value.name, use, shaping=shaping))
        found[value.name] = allowed
    return found


def _pixels(model: onnx.ModelProto) -> Range | None:
    """Return the range of pixels that the file declares, in ONNX's standard metadata."""
    said = {each.key: each.value for each in model.metadata_props}.get("Image.NominalPixelRange", "")
    ends = {"NominalRange_0_255": (0, 255), "NominalRange_16_235": (16, 235)}
    ends |= {"Normalized_0_1": (0, 1), "Normalized_1_1": (-1, 1)}
    return Range(low=ends[said][0], high=ends[said][1]) if said in ends else None


def _trace_paths(name: str, graph: SourceGraph) -> dict[str, set[_Path]]:
    """Return the values derived from `name` by moves or by arithmetic with one constant, and their paths."""
    reached: dict[str, set[_Path]] = {name: {_Path()}}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        for node, position in graph.consumers.get(current, ()):
            after = {
                found for path in reached[current] if (found := _follow(node, position, path, graph.ends))
            }
            for output in filter(None, node.output):
                before = reached.setdefault(output, set())
                if not after <= before and len(before) < _MOST_PATHS:
                    before |= after
                    waiting.append(output)
    return {value: paths for value, paths in reached.items() if paths}


def _follow(
    node: onnx.NodeProto, position: int, path: _Path, ends: Mapping[str, tuple[float, float]]
) -> _Path | None:
    """Return the path to a node's result from a value; None where the node computes something else."""
    moved = MOVING.get(node.op_type, ())
    if moved is None or position in moved:
        return replace(path, kept=path.kept and node.op_type in _KEEPING)
    match node.op_type:
        case "Floor" | "Ceil" | "Round":
            return path
        case "Neg":
            return path.then(-1, 0)
    other = node.input[1 - position] if len(node.input) == 2 else ""
    constant, greatest = ends.get(other, (math.nan, math.nan))
    if constant != greatest or not math.isfinite(constant):
        return None
    match node.op_type:
        case "Add":
            return path.then(1, constant)
        case "Sub":
            return path.then(-1, constant) if position else path.then(1, -constant)
        case "Mul" if constant:
            return path.then(constant, 0)
        case "Div" if constant and not position:
            return path.then(1 / constant, 0)
    return None


def _of_use(name: str, use: InputUse, *, shaping: bool) -> Range:
    node, path = use.node, use.path
    domain = "" if node.domain == "ai.onnx" else node.domain
    decides = _SHAPING.get(node.op_type) if domain in ("", "com.microsoft") else None
    if decides and decides[0] <= use.position <= decides[1] and not shaping:
        raise ModelRefused(
            f"input {name!r} decides a shape or an axis of node {graphs.label(node)!r} ({node.op_type}); "
            "make it a constant of the model"
        )
    row = _BY_PLACE.get((domain, node.op_type, use.position))
    if row is None:
        return _UNBOUNDED
    try:
        allowed = row.draws if isinstance(row.draws, Range) else row.draws(use)
    except _UnknownShape:
        if "Scatter" in node.op_type:
            raise
        allowed = Range(low=0, high=0)  # Index 0 exists on every axis
    if allowed.plain:
        return path.back(allowed)
    if path.kept and path.unchanged:
        return allowed
    how, give = ("by arithmetic", "themselves") if path.kept else ("rearranged", "unchanged")
    raise ModelRefused(
        f"input {name!r} reaches the indices of node {graphs.label(node)!r} ({node.op_type}) {how}, "
        f"so no inputs without repeated indices can be made; pass the indices {give}"
    )


_HIDING = 1e4  # Magnitude of a constant that, multiplied by a mask and added to scores, hides them


def _comparison_range(use: InputUse) -> Range:
    """Return the range of values compared with constants: some on either side, some equal."""
    other = use.node.input[1 - use.position]
    if not use.whole:
        return Range(low=0, high=1) if other in use.graph.shares else _UNBOUNDED
    if other not in use.graph.ends:
        return _UNBOUNDED
    least, greatest = use.graph.ends[other]
    if least == greatest:
        return Range(compared=(least,))
    return Range(low=least + 1, high=greatest + 1)  # The number of leading places in a row


def _mask_range(use: InputUse) -> Range:
    """Return the range of a mask.

    A mask is 0 or 1, or 1 - mask, and is multiplied by a number of a magnitude that no score comes near.
    """
    least, greatest = use.graph.ends.get(use.node.input[1 - use.position], (0.0, 0.0))
    factor = least if use.node.op_type == "Mul" else 1 / least if least and not use.position else 0.0
    if least != greatest or abs(factor) < _HIDING:
        return _UNBOUNDED
    path, of_one_less = use.path, use.path.offset == -use.path.scale
    negative = factor * path.scale < 0 and not path.offset
    return Range(mark=True) if of_one_less or negative or (use.whole and not path.offset) else _UNBOUNDED


def _cache_mask_range(use: InputUse) -> Range:
    """Return the range of a mask whose ones are counted for a cache's length: the new rows have room."""
    after, reached = list(use.node.output), 0
    while after:
        for node, position in use.graph.consumers.get(after.pop(), ()):
            if node.op_type == "GroupQueryAttention" and position == 5 and node.input[0] in use.graph.known:
                reached = max(reached, use.graph.known[node.input[0]].shape[1])
            elif node.op_type in (*_KEEPING, "Sub", "ReduceSum") and position == 0:
                after += node.output
    return Range(low=0, high=1, mark=True, leading=reached) if reached else _UNBOUNDED


def _to_bool(use: InputUse) -> Range:
    """Return the range of a value that is cast to bool: both true and false should occur."""
    to = graphs.attribute(use.node, "to", 0)
    return Range(low=0, high=1, mark=True) if to == onnx.TensorProto.BOOL else _UNBOUNDED


def _along(use: InputUse, default: int = 0, axis: str = "axis") -> int:
    return graphs.attribute(use.node, axis, default) % max(len(use.shape(0)), 1)


def _gather(use: InputUse) -> Range:
    size = use.shape(0)[_along(use)]
    return Range(low=-size, high=size - 1)


def _tuples(use: InputUse) -> Range:
    """Return the range of index tuples.

    Every component must fit its own axis, so the smallest indexed axis bounds all.
    """
    batch = graphs.attribute(use.node, "batch_dims", 0)
    sizes = use.shape(0)[batch:][: use.shape(1)[-1]]
    size = min(sizes, default=1)
    return Range(low=-size, high=size - 1)


def _reduces(use: InputUse) -> bool:
    return any(a.name == "reduction" and a.s not in (b"", b"none") for a in use.node.attribute)


def _scatter(use: InputUse) -> Range:
    axis = _along(use)
    size = use.shape(0)[axis]
    if _reduces(use):
        return Range(low=-size, high=size - 1)
    return Range(low=-size, high=size - 1, distinct_axis=axis)


def _scatter_nd(use: InputUse) -> Range:
    if _reduces(use):
        return _tuples(use)
    return Range(rows=use.shape(0)[: use.shape(1)[-1]])


def _one_hot(use: InputUse) -> Range:
    depth = use.constant(1)
    size = int(depth.reshape(-1)[0]) if depth is not None and depth.size == 1 else 1
    return Range(low=-size, high=size - 1)


def _shift(use: InputUse) -> Range:
    value = use.graph.known.get(use.node.input[1])
    bits = np.dtype(value.dtype).itemsize * 8 if value else 8
    return Range(low=0, high=bits - 1)


def _base(use: InputUse) -> Range:
    """Return the range of the base of a power: a negative base has powers for whole exponents only."""
    exponent = use.constant(1)
    whole = exponent is not None and bool(np.all(exponent == np.round(exponent)))
    negative = exponent is not None and bool(np.any(exponent < 0))
    allowed = Range(low=-4, high=4) if whole else Range(low=0.125, high=4)
    return replace(allowed, nonzero=negative)


def _exponent(use: InputUse) -> Range:
    """Return the range of an exponent: an integer has no negative powers that are integers."""
    base = use.graph.known.get(use.node.input[0])
    return Range(low=-3 if base is None or base.dtype.startswith("float") else 0, high=3)


def _slots(use: InputUse) -> Range:
    """Return the range of positions at which TensorScatter starts to write: the whole update must fit."""
    axis = graphs.attribute(use.node, "axis", -2)
    return Range(low=0, high=use.shape(0)[axis] - use.shape(1)[axis], ends=True)


def _places(use: InputUse) -> Range:
    """Return the range of positions in the planes that MaxUnpool fills.

    The flattened planes have at least as many positions as the operator is given.
    """
    return Range(low=0, high=math.prod(use.shape(0)) - 1)


def _below(position: int, axis: int) -> Callable[[InputUse], Range]:
    """Return a rule for numbers of the rows of another input along an axis."""
    return lambda use: Range(low=0, high=use.shape(position)[axis] - 1)


def _turns(use: InputUse) -> Range:
    """Return the range of positions to rotate by: one for each, or the first if one covers all the input."""
    rows = use.shape(2)[0]
    first = math.prod(use.shape(1)) == 1
    return Range(low=0, high=rows - use.shape(0)[-2] if first else rows - 1)


def _mask(use: InputUse) -> Range:
    """Return the range of a mask of 0 and 1 for places, or of the number of visible places."""
    shape = use.shape(use.position)
    return Range(low=0, high=1) if len(shape) > 1 else Range(low=1)


def _cache(use: InputUse) -> tuple[int, int, int | None, bool]:
    """Return GroupQueryAttention's new rows, cache rows and total rows (None: unknown), and whether prompts.

    The last is true where several rows of several sequences are new, which then are prompts.
    """
    batch, new = use.shape(0)[:2]
    before = use.shape(3)[2] if use.node.input[3] else 0
    constant = use.constant(6)
    whole = None if constant is None else int(constant.reshape(-1)[0])
    rows = max(before, before + new if before < new else 0) if whole is None else max(before, whole)
    return new, rows, whole, batch > 1 and new > 1 and before >= new


def _cache_end(use: InputUse) -> Range:
    """Return the range of the last row that GroupQueryAttention writes; a prompt may be padded after it."""
    new, rows, whole, prompts = _cache(use)
    prompt = rows == new or (prompts if whole is None else whole == new)
    return Range(low=0 if prompt else new - 1, high=rows - 1, ends=True)


def _cache_whole(use: InputUse) -> Range:
    """Return the range of GroupQueryAttention's total rows: those of its cache, or of a prompt."""
    new, rows, _, prompts = _cache(use)
    before = use.shape(3)[2] if use.node.input[3] else 0
    if before < new:
        return Range(low=rows, high=rows)
    return Range(low=new, high=new if prompts else rows, ends=True)


def _key_count_range(use: InputUse) -> Range:
    """Return the range of Attention's number of valid keys."""
    return Range(low=0, high=use.shape(1)[-2], ends=True)


def _room_left(use: InputUse) -> Range:
    """Return the range of the existing rows where a past of fixed length receives new ones."""
    return Range(low=0, high=use.shape(6)[2] - use.shape(0)[1], ends=True)


def _reverse_range(use: InputUse) -> Range:
    """Return the range of the steps that ReverseSequence reverses."""
    return Range(low=0, high=use.shape(0)[_along(use, 0, "time_axis")], ends=True)


def _up_to(axis: str, default: int = 0) -> Callable[[InputUse], Range]:
    """Return a rule for a count, at most the extent of the first input's axis that an attribute names."""
    return lambda use: Range(low=1, high=use.shape(0)[_along(use, default, axis)])


def _lengths(value: TypedValue, inputs: Sequence[TypedValue]) -> Range:
    """Return the range of "x_lens", which counts places along an axis of "x".

    The axis is unknown, so the smallest bounds all.
    """
    of = re.sub(r"_?len(s|gths?)?$", "", value.name.lower())
    axes = [min(one.shape[1:], default=math.inf) for one in inputs if one.name.lower() == of]
    return Range(low=1, high=max(1, min(axes, default=math.inf)))


# Examples of rules are inputs, constants and nodes ("ms." means the domain of ONNX Runtime's operators). The
# rule's input is called `i`, or is the first one for a name.
Draws = Range | Callable[[InputUse], Range]


class Rule(NamedTuple):
    """A range of the operators' inputs at a position, and an example that has it by this rule alone."""

    operators: str  # Names, with a space between
    position: int
    draws: Draws
    example: str
    domain: str = ""


class NameRule(NamedTuple):
    """A range of the inputs whose names match, integers or floats."""

    pattern: str
    whole: bool
    draws: Callable[[TypedValue, Sequence[TypedValue]], Range]
    example: str

    def matches(self, name: str) -> bool:
        """Return whether an input has a matching name."""
        return re.search(self.pattern, name.lower()) is not None


_MASK, _SHARE = Range(low=0, high=1, mark=True), Range(low=0, high=1)
_MS = "com.microsoft"
_COMPARING = "Equal Greater GreaterOrEqual Less LessOrEqual"
_EMBEDDING = "EmbedLayerNormalization QEmbedLayerNormalization"
_EMBEDDED = "y, m = ms.EmbedLayerNormalization"
_TABLES = "float[7,4] w, float[3,4] p, float[4] g"
_CACHE = "float[1,2,16] q, float[1,2,8] k, float[1,2,8] v, float[1,1,6,8] c, float[1,1,6,8] d"
_CACHED = "y, a, b = ms.GroupQueryAttention<num_heads = 2, kv_num_heads = 1>(q, k, v, c, d"
_QKV = "float[1,1,3,8] q, float[1,1,4,8] k, float[1,1,4,8] v"
_TRIPLE = "float[2,3,8] q, float[2,3,8] k, float[2,3,8] v"

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("Gather", 1, _gather, "float[5,2] d, int64[3] i => y = Gather(d, i)"),
    Rule("GatherElements", 1, _gather, "float[5,2] d, int64[3,2] i => y = GatherElements(d, i)"),
    Rule("GatherND", 1, _tuples, "float[5,2] d, int64[3,1] i => y = GatherND(d, i)"),
    Rule("Scatter ScatterElements", 1, _scatter,
         "float[5,2] d, int64[3,2] i, float[3,2] u => y = ScatterElements(d, i, u)"),
    Rule("ScatterND", 1, _scatter_nd, "float[5,2] d, int64[3,1] i, float[3,2] u => y = ScatterND(d, i, u)"),
    Rule("OneHot", 0, _one_hot, "int64[3] i, float[2] v | int64 n = {5} => y = OneHot(i, n, v)"),
    Rule("TensorScatter", 2, _slots,
         "float[1,2,9,4] d, float[1,2,3,4] u, int64[1] i => y = TensorScatter(d, u, i)"),
    Rule("MaxUnpool", 1, _places,
         "float[1,1,2,2] x, int64[1,1,2,2] i => y = MaxUnpool<kernel_shape = [2,2], strides = [2,2]>(x, i)"),
    Rule("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", 1, _below(0, 1),
         "float[4,5] x, int64[4] i => y = SoftmaxCrossEntropyLoss(x, i)"),
    Rule("RoiAlign", 2, _below(0, 0), "float[3,1,8,8] x, float[5,4] r, int64[5] i => y = RoiAlign(x, r, i)"),
    Rule("RotaryEmbedding", 3, _below(1, 0),
         "float[1,2,3,4] x, float[6,2] c, float[6,2] s, int64[1,3] i => y = RotaryEmbedding(x, c, s, i)"),
    Rule("ReverseSequence", 1, _reverse_range, "float[4,3] x, int64[3] i => y = ReverseSequence(x, i)"),
    Rule("Attention", 3, Range(hides=True), f"{_QKV}, bool[3,4] i => y = Attention(q, k, v, i)"),
    Rule("Attention", 6, _key_count_range, f"{_QKV}, int64[1] i => y = Attention(q, k, v, , , , i)"),
    Rule("GRU LSTM RNN", 4, _up_to("layout"),
         "float[3,2,4] x, float[1,5,4] w, float[1,5,5] r, int32[2] i"
         " => y = RNN<hidden_size = 5>(x, w, r, , i)"),
    Rule("TopK", 1, _up_to("axis", -1), "float[9] x, int64[1] i => y, p = TopK(x, i)"),
    Rule("NonMaxSuppression", 2, Range(low=1, high=16),
         "float[1,4,4] x, float[1,1,4] s, int64[1] i => y = NonMaxSuppression(x, s, i)"),
    Rule("NonMaxSuppression", 3, _SHARE,
         "float[1,4,4] x, float[1,1,4] s, int64[1] n, float[1] i => y = NonMaxSuppression(x, s, n, i)"),
    Rule("NonMaxSuppression", 4, Range(low=0, high=0.5),
         "float[1,4,4] x, float[1,1,4] s, int64[1] n, float[1] i => y = NonMaxSuppression(x, s, n, , i)"),
    Rule("Cast", 0, _to_bool, "int64[9] i => y = Cast<to = 9>(i)"),
    Rule("Clip", 1, Range(high=-0.125), "float[3] x, float i => y = Clip(x, i)"),
    Rule("Clip", 2, Range(low=0.125), "float[3] x, float i => y = Clip(x, , i)"),
    Rule("Dropout", 1, Range(low=0, high=0.9), "float[3] x, float i => y = Dropout(x, i)"),
    Rule("BatchNormalization", 4, Range(low=0),
         "float[1,3,2] x, float[3] s, float[3] b, float[3] m, float[3] i"
         " => y = BatchNormalization(x, s, b, m, i)"),
    Rule("QuantizeLinear", 1, Range(low=0.01, high=1), "float[3] x, float i => y = QuantizeLinear(x, i)"),
    Rule("DequantizeLinear", 1, Range(low=0.01, high=1), "int8[3] x, float i => y = DequantizeLinear(x, i)"),
    Rule("BitShift", 1, _shift, 'uint8[3] x, uint8[3] i => y = BitShift<direction = "LEFT">(x, i)'),
    Rule("Pow", 0, _base, "float[3] i | float n = {0.5} => y = Pow(i, n)"),
    Rule("Pow", 1, _exponent, "float[3] i | float n = {2.0} => y = Pow(n, i)"),
    Rule("Div Mod", 1, Range(nonzero=True), "int64[9] x, int64[9] i => y = Mod(x, i)"),
    Rule("Reciprocal", 0, Range(nonzero=True), "float[9] i => y = Reciprocal(i)"),
    Rule("Log", 0, Range(low=0.01), "float[9] i => y = Log(i)"),
    Rule("Sqrt", 0, Range(low=0), "float[9] i => y = Sqrt(i)"),
    Rule("Acos Asin", 0, Range(low=-1, high=1), "float[9] i => y = Asin(i)"),
    Rule("Atanh", 0, Range(low=-0.99, high=0.99), "float[9] i => y = Atanh(i)"),
    Rule("Acosh", 0, Range(low=1), "float[9] i => y = Acosh(i)"),
    Rule(_COMPARING, 0, _comparison_range, "int64[9] i | int64 n = {3} => y = Equal(i, n)"),
    Rule(_COMPARING, 1, _comparison_range, "float[9] x, float i => s = Sigmoid(x) y = Greater(s, i)"),
    Rule("Mul", 0, _mask_range, "int64[9] i | float n = {-10000} => x = Cast<to = 1>(i) y = Mul(x, n)"),
    Rule("Mul", 1, _mask_range, "int64[9] i | float n = {-10000} => x = Cast<to = 1>(i) y = Mul(n, x)"),
    Rule("Div", 0, _mask_range, "int64[9] i | float n = {-0.00001} => x = Cast<to = 1>(i) y = Div(x, n)"),
    Rule("ReduceSum", 0, _cache_mask_range,
         f"int64[1,8] i, {_CACHE} | int64[1] a = {{1}}, int64 n = {{1}}, int32 w = {{8}}"
         f" => s = ReduceSum<keepdims = 0>(i, a) t = Sub(s, n) l = Cast<to = 6>(t) {_CACHED}, l, w)"),
    # ONNX Runtime's own operators.
    Rule("Attention", 3, _mask,
         "float[2,6,8] x, float[8,24] w, float[24] b, int32[2,6] i"
         " => y = ms.Attention<num_heads = 2>(x, w, b, i)", _MS),
    Rule("QAttention", 5, _mask,
         "uint8[2,6,8] x, uint8[8,24] w, float[24] b, float s, int32[2,6] i"
         " => y = ms.QAttention<num_heads = 2>(x, w, b, s, s, i)", _MS),
    Rule("MultiHeadAttention", 4, _mask,
         f"{_TRIPLE}, int32[2,3] i => y = ms.MultiHeadAttention<num_heads = 2>(q, k, v, , i)", _MS),
    Rule("MultiHeadAttention", 8, _room_left,
         f"{_TRIPLE}, float[2,2,6,4] p, int32[1] i"
         " => y, a, b = ms.MultiHeadAttention<num_heads = 2>(q, k, v, , , , p, p, i)", _MS),
    Rule("GroupQueryAttention", 5, _cache_end,
         f"int32[1] i, {_CACHE} | int32 w = {{8}} => {_CACHED}, i, w)", _MS),
    Rule("GroupQueryAttention", 6, _cache_whole, f"int32[1] e, int32 i, {_CACHE} => {_CACHED}, e, i)", _MS),
    Rule("GroupQueryAttention", 9, _below(7, 0),
         f"int64[1,2] i, int32[1] e, float[9,4] s, {_CACHE} | int32 w = {{8}}"
         f" => {_CACHED}, e, w, s, s, i)", _MS),
    Rule("GatherBlockQuantized", 1, _below(0, 0),
         "uint8[5,8] d, int64[3] i, float[5,1] s"
         " => y = ms.GatherBlockQuantized<block_size = 16, quantize_axis = 1, bits = 4>(d, i, s)",
         _MS),
    Rule(_EMBEDDING, 0, _below(2, 0), f"int32[2,3] i, {_TABLES} => {_EMBEDDED}(i, , w, p, , g, g)", _MS),
    Rule(_EMBEDDING, 1, _below(4, 0),
         f"int32[2,3] x, int32[2,3] i, {_TABLES} => {_EMBEDDED}(x, i, w, p, w, g, g)", _MS),
    Rule(_EMBEDDING, 7, _mask,
         f"int32[2,3] x, int32[2,3] i, {_TABLES} => {_EMBEDDED}(x, , w, p, , g, g, i)", _MS),
    Rule("EmbedLayerNormalization", 8, _below(3, 0),
         f"int32[2,3] x, int32[2,3] i, {_TABLES} => {_EMBEDDED}(x, , w, p, , g, g, , i)", _MS),
    Rule("RotaryEmbedding", 1, _turns,
         "int64[2,3] i, float[2,3,4] x, float[7,2] w => y = ms.RotaryEmbedding(x, i, w, w)", _MS),
    Rule("GatherND", 1, _tuples, "float[5,2] d, int32[3,1] i => y = ms.GatherND(d, i)", _MS),
)
NAMES: tuple[NameRule, ...] = (
    NameRule("mask", True, lambda _value, _given: _MASK, "int64[9] input_mask => y = Neg(input_mask)"),
    NameRule("length|lens?$", True, _lengths, "int64[2] x_lens, float[2,6] x => y = Neg(x_lens) z = Neg(x)"),
    NameRule("thresh|iou|probability", False, lambda _value, _given: _SHARE, "float[9] iou => y = Neg(iou)"),
)
# fmt: on
_BY_PLACE = {(row.domain, op, row.position): row for row in RULES for op in row.operators.split()}
