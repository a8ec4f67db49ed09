"""Which values an input may take, read off the nodes that consume it, and fresh inputs among them.

Inputs are seeded, and of several distributions.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from honed.protocol.errors import ModelRefused
from honed.runtime.compiled.model import Precondition

from . import graphs

# Indices must lie inside what they index, integer divisors must not be zero, logarithms want positive
# arguments, and what is multiplied by a number as large as -1e9 is a mask. The rules follow the ONNX operator
# specifications; an input is followed through nodes that move, cut or convert it, and through arithmetic with
# constants. The names of inputs, and what the file says about pixels, count as well.


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values allowed; both ends are included.

    `mark`: only 0 and 1 (a mask). `leading`: at least so many ones, and no zero before them, in each row of a
    mask (the filled places of a cache). `compared`: whole numbers that the values are compared with, which
    some should equal. `ends`: lengths, of which some should be the least, the next and the most. `hides`: a
    mask of attention along the last axis, of which some rows should hide everything. `distinct_axis`: along
    this axis no value may come twice, counted modulo `high` + 1 (indices of a scatter). `rows`: the last axis
    holds index tuples into an array of this shape, no tuple twice.
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
        """Whether the range is about single values, so that moving them about does not matter."""
        return self.distinct_axis is None and self.rows is None

    def meet(self, other: Range) -> Range:
        """Return the range that both allow; where the two have nothing in common, the first's."""
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
class _Use:
    """One place where a value is consumed."""

    node: onnx.NodeProto
    position: int
    known: Mapping[str, graphs.TypedValue]
    constants: Mapping[str, np.ndarray]
    ends: Mapping[str, tuple[float, float]]  # the least and the greatest element of what no input decides
    shares: set[str]  # the values that lie in 0..1
    whole: bool  # whether the input holds integers

    def shape(self, position: int) -> tuple[int, ...]:
        """Return the static shape of an input of the node; raises _UnknownShape where it is unknown."""
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


@dataclass(frozen=True, slots=True)
class _Path:
    """How a value comes of an input: as `scale` * input + `offset`, and whether each stays in its place."""

    scale: float = 1.0
    offset: float = 0.0
    kept: bool = True

    @property
    def unchanged(self) -> bool:
        """Whether the value holds the input's own numbers."""
        return (self.scale, self.offset) == (1.0, 0.0)

    def then(self, scale: float, offset: float) -> _Path:
        """Follow the value through `scale` * value + `offset`."""
        return _Path(scale * self.scale, scale * self.offset + offset, self.kept)

    def back(self, allowed: Range) -> Range:
        """Return what the input may hold where the value may hold what is `allowed`."""
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


_MOST_PATHS = 4  # on which one input comes to one value; more are not followed
_UNBOUNDED = Range()


def of_inputs(model: onnx.ModelProto, *, shaping: bool = False) -> dict[str, Range]:
    """Return the range of every input of a model with static shapes, by name.

    With `shaping` inputs may decide shapes and axes. Otherwise raises ModelRefused for them, because a
    compiled model cannot follow.
    """
    model = graphs.inlined(model)
    known, constants = graphs.infer(model), graphs.constants(model)
    consumers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    for node in graphs.nodes(model.graph):
        for position, name in enumerate(node.input):
            consumers.setdefault(name, []).append((node, position))
    ends = _ends_of_constants(model, known, constants)
    shares, counted = _shares(model), _counted(model, known)
    pixels = _pixels(model)
    given = graphs.inputs(model)
    found = {}
    for value in given:
        whole = value.dtype.startswith(("int", "uint"))
        allowed = _named(value.name.lower(), given, whole=whole)
        if pixels is not None and len(value.shape) == 4 and not whole:
            allowed = allowed.meet(pixels)
        for name, paths in _reached(value.name, consumers, ends).items():
            if name in counted:
                allowed = allowed.meet(Range(low=0, high=1, mark=True, leading=counted[name]))
            for node, position in consumers.get(name, ()):
                use = _Use(node, position, known, constants, ends, shares, whole)
                for path in paths:
                    allowed = allowed.meet(_of_use(value.name, use, path, shaping=shaping))
        found[value.name] = allowed
    return found


def _named(name: str, given: Sequence[graphs.TypedValue], *, whole: bool) -> Range:
    """Return the range that the name of an input suggests, among all inputs that are given."""
    if whole and "mask" in name:
        return Range(low=0, high=1, mark=True)
    if whole and ("length" in name or re.search("lens?$", name)):
        # "x_lens" counts places along an axis of "x"; along which is not known, so the least bounds all.
        of = re.sub(r"_?len(s|gths?)?$", "", name)
        axes = [min(one.shape[1:], default=math.inf) for one in given if one.name.lower() == of]
        return Range(low=1, high=max(1, min(axes, default=math.inf)))
    if not whole and any(word in name for word in ("thresh", "iou", "probability")):
        return Range(low=0, high=1)
    return _UNBOUNDED


def _pixels(model: onnx.ModelProto) -> Range | None:
    """Return the range of pixels that the file declares, in the words that ONNX standardises."""
    said = {each.key: each.value for each in model.metadata_props}.get("Image.NominalPixelRange", "")
    ends = {"NominalRange_0_255": (0, 255), "NominalRange_16_235": (16, 235)}
    ends |= {"Normalized_0_1": (0, 1), "Normalized_1_1": (-1, 1)}
    return Range(low=ends[said][0], high=ends[said][1]) if said in ends else None


# Operators whose result has the least and the greatest element of their first input, where that is constant.
_SPREADING = {"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"}


def _ends_of_constants(
    model: onnx.ModelProto, known: Mapping[str, graphs.TypedValue], constants: Mapping[str, np.ndarray]
) -> dict[str, tuple[float, float]]:
    """Return the least and the greatest element of each value that depends on no input, by name."""
    ends = {
        name: (float(value.min()), float(value.max()))
        for name, value in constants.items()
        if value.size and value.dtype.kind in "iufb"
    }
    for node in graphs.nodes(model.graph):
        if node.op_type in _SPREADING and node.input[0] in ends:
            ends[node.output[0]] = ends[node.input[0]]
        elif node.op_type == "Range" and node.output[0] in known and math.prod(known[node.output[0]].shape):
            first = ends.get(node.input[0], (0.0, 0.0))[0]
            ends[node.output[0]] = (first, first + known[node.output[0]].shape[0] - 1)
    return ends


def _shares(model: onnx.ModelProto) -> set[str]:
    """Return the values that a function into 0..1 made, moved or not."""
    found: set[str] = set()
    for node in graphs.nodes(model.graph):
        moved = node.op_type in MOVING and node.input[0] in found
        if moved or node.op_type in ("Sigmoid", "Softmax", "HardSigmoid"):
            found.update(node.output)
    return found


def _counted(model: onnx.ModelProto, known: Mapping[str, graphs.TypedValue]) -> dict[str, int]:
    """Return the new rows of a cache by each mask whose ones are counted for the cache's length."""
    makers = {name: node for node in graphs.nodes(model.graph) for name in node.output}
    found: dict[str, int] = {}
    for node in graphs.nodes(model.graph):
        if node.op_type != "GroupQueryAttention" or node.input[0] not in known:
            continue
        name, new = node.input[5], known[node.input[0]].shape[1]
        while (made := makers.get(name)) is not None and made.op_type in (*_KEEPING, "Sub", "ReduceSum"):
            name = made.input[0]
            if made.op_type == "ReduceSum":
                found[name] = max(new, found.get(name, 0))
    return found


def _reached(
    name: str,
    consumers: Mapping[str, list[tuple[onnx.NodeProto, int]]],
    ends: Mapping[str, tuple[float, float]],
) -> dict[str, set[_Path]]:
    """Return the values that depend on `name` by moving or by arithmetic with one constant, and how."""
    reached: dict[str, set[_Path]] = {name: {_Path()}}
    waiting = [name]
    while waiting:
        current = waiting.pop()
        for node, position in consumers.get(current, ()):
            after = {found for path in reached[current] if (found := _followed(node, position, path, ends))}
            for output in filter(None, node.output):
                before = reached.setdefault(output, set())
                if not after <= before and len(before) < _MOST_PATHS:
                    before |= after
                    waiting.append(output)
    return {value: paths for value, paths in reached.items() if paths}


def _followed(
    node: onnx.NodeProto, position: int, path: _Path, ends: Mapping[str, tuple[float, float]]
) -> _Path | None:
    """Return the path to what a node makes of a value; None where it makes something else."""
    moved = MOVING.get(node.op_type, ())
    if moved is None or position in moved:
        return replace(path, kept=path.kept and node.op_type in _KEEPING)
    match node.op_type:
        case "Floor" | "Ceil" | "Round":
            return path
        case "Neg":
            return path.then(-1, 0)
        case "Add" | "Sub" | "Mul" | "Div" if len(node.input) == 2:
            least, greatest = ends.get(node.input[1 - position], (math.nan, math.nan))
            if least != greatest or not math.isfinite(least):
                return None
            return _computed(node.op_type, position, path, least)
    return None


def _computed(op: str, position: int, path: _Path, constant: float) -> _Path | None:
    if op in ("Add", "Sub"):
        minus = op == "Sub"
        scale = -1 if minus and position else 1
        return path.then(scale, -constant if minus and not position else constant)
    if op == "Div" and position == 1:
        return None
    factor = 1 / constant if op == "Div" and constant else constant
    return path.then(factor, 0) if factor else None


def _of_use(name: str, use: _Use, path: _Path, *, shaping: bool) -> Range:
    node = use.node
    rules = {"": _RULES, "ai.onnx": _RULES, "com.microsoft": _RUNTIMES_RULES}.get(node.domain)
    if rules is None:
        return _UNBOUNDED
    decides = _SHAPING.get(node.op_type)
    if decides and decides[0] <= use.position <= decides[1] and not shaping:
        raise ModelRefused(
            f"input {name!r} decides a shape or an axis of node {graphs.label(node)!r} ({node.op_type}); "
            "make it a constant of the model"
        )
    otherwise: Rule | Range = _compared if node.op_type in _COMPARING else _UNBOUNDED
    rule = rules.get((node.op_type, use.position), otherwise)
    try:
        allowed = rule if isinstance(rule, Range) else rule(use)
    except _UnknownShape:
        if "Scatter" in node.op_type:
            raise
        allowed = Range(low=0, high=0)  # the one index that every axis has
    if node.op_type in ("Mul", "Div"):
        allowed = allowed.meet(_hidden(use, path))
    if allowed.plain:
        return path.back(allowed)
    if path.kept and path.unchanged:
        return allowed
    how, give = ("by arithmetic", "themselves") if path.kept else ("rearranged", "unchanged")
    raise ModelRefused(
        f"input {name!r} reaches the indices of node {graphs.label(node)!r} ({node.op_type}) {how}, "
        f"so no inputs without repeated indices can be made; pass the indices {give}"
    )


_COMPARING = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}
_HIDING = 1e4  # what is multiplied by a constant as large, and added to scores, hides them


def _compared(use: _Use) -> Range:
    """Return the range of values compared with constants: some on either side, some equal."""
    other = use.node.input[1 - use.position]
    if not use.whole:
        return Range(low=0, high=1) if other in use.shares else _UNBOUNDED
    if other not in use.ends:
        return _UNBOUNDED
    least, greatest = use.ends[other]
    if least == greatest:
        return Range(compared=(least,))
    return Range(low=least + 1, high=greatest + 1)  # how many places of a row count


def _hidden(use: _Use, path: _Path) -> Range:
    """Return the range of a mask.

    A mask is 0 or 1, or 1 - mask, and is multiplied by a number of a magnitude that no score comes near.
    """
    least, greatest = use.ends.get(use.node.input[1 - use.position], (0.0, 0.0))
    factor = least if use.node.op_type == "Mul" else 1 / least if least and not use.position else 0.0
    if least != greatest or abs(factor) < _HIDING:
        return _UNBOUNDED
    of_one_less = path.offset == -path.scale
    negative = factor * path.scale < 0 and not path.offset
    return Range(mark=True) if of_one_less or negative or (use.whole and not path.offset) else _UNBOUNDED


def _to_bool(use: _Use) -> Range:
    """Return the range of a value that is cast to bool: both true and false should occur."""
    to = graphs.attribute(use.node, "to", 0)
    return Range(low=0, high=1, mark=True) if to == onnx.TensorProto.BOOL else _UNBOUNDED


def _along(use: _Use, default: int = 0, axis: str = "axis") -> int:
    return graphs.attribute(use.node, axis, default) % max(len(use.shape(0)), 1)


def _gather(use: _Use) -> Range:
    size = use.shape(0)[_along(use)]
    return Range(low=-size, high=size - 1)


def _tuples(use: _Use) -> Range:
    """Return the range of index tuples.

    Every component must fit its own axis, so the smallest indexed axis bounds all.
    """
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
    """Return the range of the base of a power: a negative base has powers for whole exponents only."""
    exponent = use.constants.get(use.node.input[1])
    whole = exponent is not None and bool(np.all(exponent == np.round(exponent)))
    negative = exponent is not None and bool(np.any(exponent < 0))
    allowed = Range(low=-4, high=4) if whole else Range(low=0.125, high=4)
    return replace(allowed, nonzero=negative)


def _exponent(use: _Use) -> Range:
    """Return the range of an exponent: an integer has no negative powers that are integers."""
    base = use.known.get(use.node.input[0])
    return Range(low=-3 if base is None or base.dtype.startswith("float") else 0, high=3)


def _slots(use: _Use) -> Range:
    """Return the range of positions at which TensorScatter starts to write: the whole update must fit."""
    axis = graphs.attribute(use.node, "axis", -2)
    return Range(low=0, high=use.shape(0)[axis] - use.shape(1)[axis], ends=True)


def _places(use: _Use) -> Range:
    """Return the range of positions in the planes that MaxUnpool fills.

    The flattened planes have at least as many positions as the operator is given.
    """
    return Range(low=0, high=math.prod(use.shape(0)) - 1)


def _below(position: int, axis: int) -> Rule:
    """Return a rule for numbers of the rows of another input along an axis."""
    return lambda use: Range(low=0, high=use.shape(position)[axis] - 1)


def _turns(use: _Use) -> Range:
    """Return the range of places to turn by: one for each, or the first of as many as the input is long."""
    rows = use.shape(2)[0]
    first = math.prod(use.shape(1)) == 1
    return Range(low=0, high=rows - use.shape(0)[-2] if first else rows - 1)


def _mask(use: _Use) -> Range:
    """Return the range of a mask of 0 and 1 for places, or of how many places there are to see."""
    shape = use.shape(use.position)
    return Range(low=0, high=1) if len(shape) > 1 else Range(low=1)


def _cache(use: _Use) -> tuple[int, int, int | None, bool]:
    """Return what GroupQueryAttention's lengths are about: new rows, those of its cache, all where known.

    The last is whether several rows of several sequences are new, which then are prompts.
    """
    batch, new = use.shape(0)[:2]
    before = use.shape(3)[2] if use.node.input[3] else 0
    constant = use.constants.get(use.node.input[6])
    whole = None if constant is None else int(constant.reshape(-1)[0])
    rows = max(before, before + new if before < new else 0) if whole is None else max(before, whole)
    return new, rows, whole, batch > 1 and new > 1 and before >= new


def _cache_end(use: _Use) -> Range:
    """Return the range of the last row that GroupQueryAttention writes; a prompt may be padded behind it."""
    new, rows, whole, prompts = _cache(use)
    prompt = rows == new or (prompts if whole is None else whole == new)
    return Range(low=0 if prompt else new - 1, high=rows - 1, ends=True)


def _cache_whole(use: _Use) -> Range:
    """Return the range of the rows in all of GroupQueryAttention: those of its cache, or of a prompt."""
    new, rows, _, prompts = _cache(use)
    before = use.shape(3)[2] if use.node.input[3] else 0
    if before < new:
        return Range(low=rows, high=rows)
    return Range(low=new, high=new if prompts else rows, ends=True)


def _filled(use: _Use) -> Range:
    """Return the range of how many keys are there for Attention."""
    return Range(low=0, high=use.shape(1)[-2], ends=True)


def _room_left(use: _Use) -> Range:
    """Return the range of the rows that are there already where a past of fixed length takes new ones."""
    return Range(low=0, high=use.shape(6)[2] - use.shape(0)[1], ends=True)


def _reversed(use: _Use) -> Range:
    """Return the range of the steps that ReverseSequence reverses."""
    return Range(low=0, high=use.shape(0)[_along(use, 0, "time_axis")], ends=True)


def _up_to(axis: str, default: int = 0) -> Rule:
    """Return a rule for a count, at most the extent of the first input's axis that an attribute names."""
    return lambda use: Range(low=1, high=use.shape(0)[_along(use, default, axis)])


_RULES: dict[tuple[str, int], Rule | Range] = {
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
    ("ReverseSequence", 1): _reversed,
    ("Attention", 3): Range(hides=True),
    ("Attention", 6): _filled,
    **{(op, 4): _up_to("layout") for op in ("GRU", "LSTM", "RNN")},
    ("TopK", 1): _up_to("axis", -1),
    ("NonMaxSuppression", 2): Range(low=1, high=16),
    ("NonMaxSuppression", 3): Range(low=0, high=1),
    ("NonMaxSuppression", 4): Range(low=0, high=0.5),
    ("Cast", 0): _to_bool,
    ("Clip", 1): Range(high=-0.125),
    ("Clip", 2): Range(low=0.125),
    ("Dropout", 1): Range(low=0, high=0.9),
    ("BatchNormalization", 4): Range(low=0),
    ("QuantizeLinear", 1): Range(low=0.01, high=1),
    ("DequantizeLinear", 1): Range(low=0.01, high=1),
    ("BitShift", 1): _shift,
    ("Pow", 0): _base,
    ("Pow", 1): _exponent,
    ("Div", 1): Range(nonzero=True),
    ("Mod", 1): Range(nonzero=True),
    ("Reciprocal", 0): Range(nonzero=True),
    ("Log", 0): Range(low=0.01),
    ("Sqrt", 0): Range(low=0),
    ("Acos", 0): Range(low=-1, high=1),
    ("Asin", 0): Range(low=-1, high=1),
    ("Atanh", 0): Range(low=-0.99, high=0.99),
    ("Acosh", 0): Range(low=1),
}

# Those of ONNX Runtime's own operators.
_RUNTIMES_RULES: dict[tuple[str, int], Rule | Range] = {
    ("Attention", 3): _mask,
    ("QAttention", 5): _mask,
    ("MultiHeadAttention", 4): _mask,
    ("MultiHeadAttention", 8): _room_left,
    ("GroupQueryAttention", 5): _cache_end,
    ("GroupQueryAttention", 6): _cache_whole,
    ("GroupQueryAttention", 9): _below(7, 0),
    ("GatherBlockQuantized", 1): _below(0, 0),
    **{(op, 0): _below(2, 0) for op in ("EmbedLayerNormalization", "QEmbedLayerNormalization")},
    **{(op, 1): _below(4, 0) for op in ("EmbedLayerNormalization", "QEmbedLayerNormalization")},
    ("EmbedLayerNormalization", 7): _mask,
    ("QEmbedLayerNormalization", 7): _mask,
    ("EmbedLayerNormalization", 8): _below(3, 0),
    ("RotaryEmbedding", 1): _turns,
    ("GatherND", 1): _tuples,
}


_WHOLE = 8  # bound of integers that nothing else bounds, so that sums and products do not overflow
_AWAY = 0.125  # least distance from zero where zero is not allowed
_MET = 0.25  # the share of integers that equal what they are compared with
_AT_ENDS = 0.75  # the share of lengths that are the least or the next, in sets that have these
_LEAST = 2  # `shrink` of the smallest ranges


def generate(
    model: onnx.ModelProto,
    count: int = 3,
    seed: int = 0,
    *,
    shrink: int = 0,
    whole: onnx.ModelProto | None = None,
    preconditions: Sequence[Precondition] = (),
    first: int = 0,
) -> list[dict[str, np.ndarray]]:
    """Generate `count` sets of inputs for a model with static shapes, each a dict of arrays by input name.

    Set 0 is normally distributed, set 1 uniform and not negative, set 2 normal with half the elements
    zero, and so on in turn. Integers are drawn within the range their consumers allow, with negative
    indices in every third set only; booleans and masks are mixed. Equal models, counts and seeds give equal
    arrays. With `shrink` 1 what no node bounds is a quarter as large, with 2 it lies in 0..1, for models
    that refuse or saturate at more, and a single integer that nodes compare is what they compare it with: a
    setting, of which a model may know no other value. `whole` is the model that `model` is a part of; its
    nodes count as well, and the `preconditions` of a compiled form. Set `first` comes first. Raises
    InvalidArgument where a shape is not static and ModelRefused where no input can be made.
    """
    allowed, wanted = ranges(model, whole, preconditions), graphs.inputs(model)
    sets = range(first, first + count)
    return [{v.name: _draw(v, allowed[v.name], i, seed, shrink) for v in wanted} for i in sets]


def ranges(
    model: onnx.ModelProto,
    whole: onnx.ModelProto | None = None,
    preconditions: Sequence[Precondition] = (),
) -> dict[str, Range]:
    """Return the range of every input, as `generate` draws it; raise as `of_inputs`."""
    allowed = of_inputs(model)
    if whole is not None:
        more = of_inputs(whole, shaping=True)
        allowed = {name: more.get(name, each).meet(each) for name, each in allowed.items()}
    for each in preconditions:
        one = allowed[each.input]
        allowed[each.input] = Range(low=each.low, high=each.high).meet(one) if one.plain else one
    return allowed


def _draw(value: graphs.TypedValue, allowed: Range, index: int, seed: int, shrink: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, index, zlib.crc32(value.name.encode())])
    kind = np.dtype(value.dtype).kind
    if kind == "b":
        drawn = _booleans(rng, value.shape)
        return _with_hidden(rng, drawn, False, index % 3) if allowed.hides else drawn
    if not allowed.plain:
        return _indices(rng, value, allowed).astype(value.dtype)
    if allowed.mark:
        drawn = _marks(rng, value.shape, index % 3, allowed.leading)
    elif kind == "f":
        drawn = _floats(rng, value.shape, allowed, index % 3, shrink)
    else:
        drawn = _integers(rng, value, allowed, index % 3, shrink)
    if allowed.hides and kind == "f":
        drawn = _with_hidden(rng, drawn, -math.inf, index % 3)
    return np.asarray(drawn).astype(value.dtype).reshape(value.shape)


def _with_hidden(rng: np.random.Generator, mask: np.ndarray, hidden: float, style: int) -> np.ndarray:
    """Return a mask of attention that hides a quarter of the keys, and all of them in one row.

    It is as it was in every third set (`style` 1), and where it has one row in another (0).
    """
    rows = math.prod(mask.shape[:-1])
    if style == 1 or not mask.size or not mask.ndim or (rows == 1 and style == 0):
        return mask
    made = np.where(rng.random(mask.shape) < _MET, hidden, mask).reshape(rows, -1)
    made[rng.integers(rows)] = hidden
    return made.reshape(mask.shape).astype(mask.dtype)


def _booleans(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return half true, half false, so that both occur wherever there are two elements."""
    size = math.prod(shape)
    return rng.permutation(np.arange(size) % 2 == rng.integers(2)).reshape(shape)


def _marks(rng: np.random.Generator, shape: tuple[int, ...], style: int, leading: int) -> np.ndarray:
    """Return a mask: all ones in every third set (`style` 1), else zeros among ones, a one in each row.

    With `leading` ones at least the zeros are behind the ones.
    """
    if style == 1 or not shape:
        return np.ones(shape)
    if leading:
        ends = rng.integers(min(leading, shape[-1]), shape[-1], (*shape[:-1], 1), endpoint=True)
        return (np.arange(shape[-1]) < ends).astype(np.float64)
    drawn = (rng.random(shape) < 0.625).astype(np.float64)
    drawn[..., :1] = 1
    return drawn


def _floats(
    rng: np.random.Generator, shape: tuple[int, ...], allowed: Range, style: int, shrink: int
) -> np.ndarray:
    drawn = rng.uniform(0, 1, shape) if style == 1 or shrink == _LEAST else rng.standard_normal(shape)
    if shrink == 1:
        drawn = drawn / 4
    if style == 2:
        drawn = np.where(rng.random(shape) < 0.5, 0.0, drawn)
    if math.isfinite(allowed.low) and math.isfinite(allowed.high):
        drawn = np.clip(drawn / 3, -1, 1)  # three deviations fill the range
        middle, half = (allowed.low + allowed.high) / 2, (allowed.high - allowed.low) / 2
        drawn = middle + half * drawn
    elif math.isfinite(allowed.low):
        drawn = allowed.low + np.abs(drawn)
    elif math.isfinite(allowed.high):
        drawn = allowed.high - np.abs(drawn)
    if allowed.nonzero:
        drawn = np.where(np.abs(drawn) < _AWAY, np.where(drawn < 0, -_AWAY, _AWAY), drawn)
    return drawn


def _integers(
    rng: np.random.Generator, value: graphs.TypedValue, allowed: Range, style: int, shrink: int
) -> np.ndarray:
    info = np.iinfo(value.dtype)
    ends = max(info.min, allowed.low), min(info.max, allowed.high)
    compared = [each for each in allowed.compared if ends[0] <= each <= ends[1] and each == round(each)]
    if compared and shrink == _LEAST and math.prod(value.shape) == 1:
        return rng.choice(compared, value.shape)
    whole = 255 if info.bits == 8 else _WHOLE  # bytes are images and quantised values: all of them
    if shrink:
        whole = 1 if shrink == _LEAST else whole // 4
        allowed = allowed.meet(Range(low=0 if shrink == _LEAST else -whole, high=whole))
    low = math.ceil(max(info.min, -whole if math.isinf(allowed.low) else allowed.low))
    high = math.floor(min(info.max, whole if math.isinf(allowed.high) else allowed.high))
    if style != 2 and high >= 0:
        low = max(low, 0) if math.isfinite(allowed.low) or style == 1 else low  # indices from the front
    if high < low:
        if math.prod(value.shape) == 0:
            return np.zeros(value.shape, np.int64)
        raise ModelRefused(f"input {value.name!r} indexes an axis of size 0; no value of it is allowed")
    drawn = rng.integers(low, high, value.shape, endpoint=True)
    if allowed.ends:
        drawn = _lengths(rng, drawn, low, high, style)
    if compared and style != 1:
        drawn = np.where(rng.random(value.shape) < _MET, rng.choice(compared, value.shape), drawn)
    if allowed.nonzero:
        drawn = np.where(drawn == 0, 1 if high >= 1 else -1, drawn)
    return drawn


def _lengths(rng: np.random.Generator, drawn: np.ndarray, low: int, high: int, style: int) -> np.ndarray:
    """Return lengths: the most in every third set (`style` 1), the least and others in another (2)."""
    if style == 1:
        return np.full_like(drawn, high)
    few = rng.choice([low, min(low + 1, high)], drawn.shape)
    made = np.where(rng.random(drawn.shape) < _AT_ENDS, few, drawn) if style else drawn
    made.reshape(-1)[:1] = low if style else rng.choice([min(low + 1, high), int(drawn.reshape(-1)[0])])
    return made


def _indices(rng: np.random.Generator, value: graphs.TypedValue, allowed: Range) -> np.ndarray:
    """Return indices without duplicates, for scatters without a reduction."""
    if allowed.rows is not None:
        total, count = math.prod(allowed.rows), math.prod(value.shape[:-1])
        _room(value, count, total)
        picked = rng.permutation(total)[:count]
        columns = np.unravel_index(picked, allowed.rows) if allowed.rows else ()
        return np.stack(columns, -1).reshape(value.shape) if columns else np.zeros(value.shape, np.int64)
    axis = allowed.distinct_axis or 0
    size = int(allowed.high) + 1
    if not value.shape:
        return np.zeros((), np.int64)
    _room(value, value.shape[axis], size)
    keys = rng.random((*value.shape[:axis], size, *value.shape[axis + 1 :]))
    return np.take(np.argsort(keys, axis=axis), np.arange(value.shape[axis]), axis=axis)


def _room(value: graphs.TypedValue, count: int, total: int) -> None:
    if count > total:
        raise ModelRefused(
            f"input {value.name!r} holds {count} indices of {total} places, so some would be written twice; "
            "the result is not defined, give the scatter a reduction"
        )
