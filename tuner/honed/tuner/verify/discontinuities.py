"""Verifies models with steps part by part.

A step is an operator whose result jumps on tiny changes of input.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from honed.onnxfile.reading import nodes
from honed.protocol.errors import HonedError
from honed.runtime.compiled.model import Selection
from honed.runtime.engines import HIGHEST
from honed.runtime.execution.verification import Difference, align_rows, compare

from . import graphs
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .evaluator import Reference, ReferenceFailure, at_level, evaluate
from .graphs import MOVING, SourceGraph, info
from .tolerance import compare_value, work

# A function into [-1, 1] before an output counts as a step, too: it hides large inputs, so that 1e-7 in place
# of 2e-7 says nothing about the model, while its input does.

Arrays = Mapping[str, np.ndarray]

_QUANTISING = {
    "DynamicQuantizeLinear", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv",
    "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMatMul", "QLinearMul", "QLinearSigmoid",
    "QLinearSoftmax", "QuantizeLinear",
}  # fmt: skip
# Operators that round internally, step by step, and that cannot be opened.
_ROUNDING_INSIDE = {"DynamicQuantizeLSTM"}
_CHOOSING = {
    "ArgMax", "ArgMin", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "IsInf", "IsNaN",
    "Less", "LessOrEqual", "Mod", "Round", "Sign", "TopK",
}  # fmt: skip
BOUNDED = {"Erf", "Sigmoid", "Softmax", "Tanh"}  # Functions into [-1, 1]
# Operators that hide their inputs beyond a bound
_CLIPPING = {"Clip", "HardSigmoid", "Relu", "ThresholdedRelu"}
# Operators that may map many values to one, so that their results say little about their inputs.
HIDING = {
    *_QUANTISING, *_CHOOSING, *BOUNDED, *_CLIPPING, "And", "DequantizeLinear", "Not", "Or", "Where", "Xor",
}  # fmt: skip

MOST_BYTES = 1 << 29  # Largest total size of the values at the steps, for one probe


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseModel:
    """A model separated at its steps: `model` reads the values of `feeds` besides its own inputs.

    `before` are the values that steps read and other nodes make, `after` those that steps make; both as the
    original names them. In `model` a step reads `given[x]` in place of x and makes `made[q]` in place of q.
    `bounded` are the outputs that a function into [-1, 1] gives.
    """

    model: onnx.ModelProto
    before: tuple[str, ...]
    after: tuple[str, ...]
    given: Mapping[str, str]
    made: Mapping[str, str]
    quantising: frozenset[str]  # The values in `after` that may be off by one
    quanta: Mapping[str, float]  # Quanta of the values in `before` that constant scales round
    bounded: frozenset[str]
    inside: frozenset[str]  # The outputs of `model` that operators make which round inside
    steps: int

    @property
    def only_quantises(self) -> bool:
        """Return whether all steps quantise."""
        return self.quantising.issuperset(self.after)

    def feeds(self, inputs: Arrays, reference: Arrays) -> dict[str, np.ndarray]:
        """Return the inputs of `model`, where `reference` has the values of `before` and `after`."""
        return {
            **inputs,
            **{self.given[name]: reference[name] for name in self.before},
            **{name: reference[name] for name in self.after},
        }


Opened = tuple[
    PiecewiseModel, Sequence[Arrays]
]  # A model and the reference's values for sets of inputs, including those at the steps


def quantising(model: onnx.ModelProto) -> PiecewiseModel | None:
    """Open a model with static shapes whose steps all quantise.

    None where some do not, or values are large.
    """
    if not any(node.op_type in _QUANTISING for node in graphs.inline_functions(model).graph.node):
        return None  # Opening the model takes far longer than this test
    apart = open_at_steps(model)
    return apart if apart is not None and apart.only_quantises and _small(apart) else None


def open_at_steps(model: onnx.ModelProto) -> PiecewiseModel | None:
    """Open a model with static shapes at its steps; None where it has none that can be opened."""
    graph = SourceGraph(model)
    model, known, varying, nodes = graph.model, graph.known, graph.varying, graph.model.graph.node
    ends = _ends(model)
    numbered = {
        i: node
        for i, node in enumerate(nodes)
        if _is_step(node, known, varying, ends) and all(name in known for name in node.output if name)
    }
    steps = list(numbered.values())
    if not steps:
        return None
    after = tuple(name for step in steps for name in step.output if name)
    own = {value.name for value in model.graph.input}
    read = dict.fromkeys(name for step in steps for name in step.input)
    before = tuple(name for name in read if name in varying and name not in own and name not in after)
    taken = own | {name for node in nodes for name in (*node.input, *node.output)}
    given = {name: _unique_name(f"{name}, given", taken) for name in before}
    made = {name: _unique_name(f"{name}, made", taken) for name in after}
    return PiecewiseModel(
        model=_disconnect(model, numbered, known, given, made),
        before=before,
        after=after,
        given=given,
        made=made,
        quantising=frozenset(
            name for step in steps if step.op_type in _QUANTISING for name in step.output if name
        ),
        quanta=_quanta(steps, graph.constants),
        bounded=frozenset(end for step in steps if step.op_type in BOUNDED for end in ends[step.output[0]]),
        inside=frozenset(
            made[name] for step in steps if step.op_type in _ROUNDING_INSIDE for name in step.output if name
        ),
        steps=len(steps),
    )


def _disconnect(
    model: onnx.ModelProto,
    steps: Collection[int],
    types: Mapping[str, graphs.TypedValue],
    new_inputs: Mapping[str, str],
    new_outputs: Mapping[str, str],
) -> onnx.ModelProto:
    """Return the model with the given steps disconnected, by renaming their values.

    A step reads `new_inputs[x]` in place of x and makes `new_outputs[q]` in place of q.
    """
    outputs = [value for value in model.graph.output if value.name not in new_outputs]
    there = {value.name for value in outputs}
    return graphs.rebuild_model(
        model,
        [_rename(n, new_inputs, new_outputs) if i in steps else n for i, n in enumerate(model.graph.node)],
        [
            *model.graph.input,
            *(info(types[name], other) for name, other in new_inputs.items()),
            *(info(types[name], name) for name in new_outputs),
        ],
        [
            *outputs,
            *(info(types[name], name) for name in new_inputs if name not in there),
            *(info(types[name], other) for name, other in new_outputs.items()),
        ],
    )


def moving(model: onnx.ModelProto, piecewise: PiecewiseModel, sizes: Mapping[str, float]) -> onnx.ModelProto:
    """Return the model with noise added to the inputs of its steps.

    `sizes` gives the largest noise by value. Each run of the model adds other noise.
    """
    model = graphs.inline_functions(model)
    taken = set(piecewise.given.values()) | set(piecewise.made.values())
    taken |= {name for node in model.graph.node for name in (*node.input, *node.output)}
    moved = {name: _unique_name(f"{name}, moved", taken) for name in sizes}
    types = {value.name: value.type.tensor_type.elem_type for value in piecewise.model.graph.input}
    nodes: list[onnx.NodeProto] = []
    for node, other in zip(model.graph.node, piecewise.model.graph.node, strict=True):
        is_step = list(node.output) != list(other.output)
        nodes.append(_rename(node, moved, {}) if is_step else node)
        for name in node.output:
            if name in moved:
                typed = types[piecewise.given[name]]
                nodes += _noise(name, moved[name], _unique_name(f"{name}, added", taken), sizes[name], typed)
    return graphs.rebuild_model(model, nodes, list(model.graph.input), list(model.graph.output))


def _noise(name: str, moved: str, added: str, size: float, typed: int) -> list[onnx.NodeProto]:
    drawn, seed = f"{added}, drawn", float(zlib.crc32(name.encode()) % 10_000)
    ends = {"low": -size, "high": size, "seed": seed, "dtype": onnx.TensorProto.FLOAT}
    return [
        helper.make_node("RandomUniformLike", [name], [drawn], **ends),
        helper.make_node("Cast", [drawn], [added], to=typed),
        helper.make_node("Add", [name, added], [moved]),
    ]


def exposing(model: onnx.ModelProto, piecewise: PiecewiseModel) -> onnx.ModelProto:
    """Return the model with the values at its steps among its outputs."""
    exposed = graphs.copy_model(graphs.inline_functions(model))
    there = {value.name for value in exposed.graph.output}
    typed = {value.name: value for value in (*piecewise.model.graph.input, *piecewise.model.graph.output)}
    exposed.graph.output.extend(
        typed[name] for name in (*piecewise.before, *piecewise.after) if name not in there
    )
    return exposed


def open_with_reference(
    model: onnx.ModelProto, inputs: Sequence[Arrays], limits: EvaluationLimits
) -> Opened | None:
    """Return a model opened at its steps, and the reference's values, also at the steps.

    Returns None where the model has no steps, or their values cannot be computed.
    """
    apart = open_at_steps(model)
    if apart is None or not _small(apart):
        return None
    reference = evaluate(exposing(model, apart), list(inputs), limits)
    return None if isinstance(reference, ReferenceFailure) else (apart, reference.outputs)


def _small(piecewise: PiecewiseModel) -> bool:
    given = (graphs.of_info(value) for value in piecewise.model.graph.input)
    nbytes = sum(int(np.prod(v.shape, dtype=np.int64)) * np.dtype(v.dtype).itemsize for v in given if v)
    return nbytes <= MOST_BYTES


def _is_step(
    node: onnx.NodeProto,
    types: Mapping[str, graphs.TypedValue],
    varying: set[str],
    ends: Mapping[str, frozenset[str]],
) -> bool:
    if node.domain not in ("", "ai.onnx", "com.microsoft") or not any(n in varying for n in node.input):
        return False
    at_the_end = node.op_type in BOUNDED | _CLIPPING and node.output[0] in ends
    if at_the_end or node.op_type in _QUANTISING | _CHOOSING | _ROUNDING_INSIDE:
        return all(name in types for name in node.input if name in varying)
    if node.op_type != "Cast" or node.input[0] not in types or node.output[0] not in types:
        return False
    given, made = types[node.input[0]], types[node.output[0]]
    return given.dtype.startswith("float") and not made.dtype.startswith("float")


def _ends(model: onnx.ModelProto) -> dict[str, frozenset[str]]:
    """Return the values that only lead to outputs, moved or cast, each with the names of these outputs."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in {name for inner in nodes([node]) for name in inner.input if name}:
            readers.setdefault(name, []).append(node)
    found = {value.name: frozenset({value.name}) for value in model.graph.output if value.name not in readers}
    for node in reversed(model.graph.node):
        if node.op_type in MOVING and all(name in found for name in node.output if name):
            name = node.input[0]
            if len(readers[name]) == 1 and name not in graphs.outputs(model):
                found[name] = frozenset().union(*(found[each] for each in node.output if each))
    return found


def _quanta(steps: Iterable[onnx.NodeProto], constants: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the least constant quantum that QuantizeLinear rounds a value to, by the value's name."""
    found: dict[str, float] = {}
    for node in steps:
        if node.op_type == "QuantizeLinear" and constants.get(node.input[1], np.zeros(0)).size:
            quantum = float(np.min(constants[node.input[1]]))
            found[node.input[0]] = min(quantum, found.get(node.input[0], quantum))
    return found


def _rename(
    node: onnx.NodeProto, new_inputs: Mapping[str, str], new_outputs: Mapping[str, str]
) -> onnx.NodeProto:
    other = onnx.NodeProto()
    other.CopyFrom(node)
    other.input[:] = [new_inputs.get(name, name) for name in node.input]
    other.output[:] = [new_outputs.get(name, name) for name in node.output]
    return other


def _unique_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    taken.add(name)
    return name


# Outputs whose rows a TopK orders are found by having it order them otherwise. Where scores nearly tie, two
# right computations order rows differently. The model is evaluated once more with the rows that a TopK
# selects in another order: an output that comes out in that order along one axis, however it was computed
# from the selection, is compared as a set of rows (`honed.runtime.execution.verification`).

_MOST_SELECTIONS = 8  # Selections examined


def selections(
    model: onnx.ModelProto,
    inputs: Sequence[Arrays],
    reference: Sequence[Arrays],
    tolerance: Sequence[float],
    limits: EvaluationLimits,
) -> tuple[Selection, ...]:
    """Return which outputs of a model with static shapes follow the order of a selection.

    `reference` has its outputs for `inputs`, `tolerance` how far each may be off. No output is in two.
    """
    model = graphs.inline_functions(model)
    found: list[Selection] = []
    known, names = graphs.infer(model), graphs.outputs(model)
    for node in [n for n in model.graph.node if n.op_type == "TopK"][:_MOST_SELECTIONS]:
        made = next((known[name] for name in node.output if name in known), None)
        if made is None or not made.shape:
            continue
        axis = graphs.attribute(node, "axis", -1) % len(made.shape)
        order = np.random.default_rng(0).permutation(made.shape[axis])
        moved = evaluate(_reorder(model, node, axis, order), list(inputs[:1]), limits)
        if isinstance(moved, ReferenceFailure) or order.size < 2:
            continue
        taken = {n for each in found for n in each.outputs}
        follow = [
            (n, along)
            for n, name in enumerate(names)
            if n not in taken
            and (along := _along(reference[0][name], moved.outputs[0][name], order, tolerance[n])) is not None
        ]
        if follow:
            outputs, axes = zip(*follow, strict=True)
            score = next(_scores(follow, names, reference), None)
            found.append(Selection(outputs=outputs, axes=axes, score=score))
    return tuple(found)


def _along(calm: np.ndarray, moved: np.ndarray, order: np.ndarray, tolerance: float) -> int | None:
    """Return the axis along which an output came out in the other order, or None."""
    if calm.shape != moved.shape or np.array_equal(calm, moved, equal_nan=calm.dtype.kind == "f"):
        return None
    for axis, extent in enumerate(calm.shape):
        if extent == order.size and compare(np.take(calm, order, axis), moved, tolerance).right:
            return axis
    return None


def _scores(
    follow: Sequence[tuple[int, int]], names: Sequence[str], reference: Sequence[Arrays]
) -> Iterator[int]:
    """Yield the outputs that order the rows: one float for each row, which never rises."""
    for number, axis in follow:
        values = [np.moveaxis(each[names[number]], axis, 0) for each in reference]
        single = all(value.size == value.shape[0] and value.dtype.kind == "f" for value in values)
        if single and all(np.all(np.diff(value.reshape(-1)) <= 0) for value in values):
            yield number


def _reorder(
    model: onnx.ModelProto, selection: onnx.NodeProto, axis: int, order: np.ndarray
) -> onnx.ModelProto:
    """Return the model with the result of a selecting node in another order."""
    made = graphs.copy_model(model)
    del made.graph.node[:]
    indices = f"{selection.output[0] or selection.output[1]}, order"
    made.graph.initializer.append(numpy_helper.from_array(order.astype(np.int64), indices))
    for node in model.graph.node:
        made.graph.node.append(node)
        if node.output == selection.output:
            plain = [f"{name}, in order" if name else "" for name in node.output]
            made.graph.node[-1].output[:] = plain
            made.graph.node.extend(
                helper.make_node("Gather", [before, indices], [name], axis=axis)
                for before, name in zip(plain, node.output, strict=True)
                if name
            )
    return made


# A value next to a rounding boundary falls to either side by the last bit of a sum, which changes the result
# by a whole quantum, or selects another branch: two right computations of a quantised network differ by
# tenths of its range. So the model is opened at its steps. Each step reads the reference's own values, and so
# do the readers of its results; everything between the steps must agree as in any model, or to a hundredth of
# the quantum that it is rounded to. Steps must give equal results, except that a quantising one may be off by
# one quantum for one element in a hundred. The reference gives the tolerance of the whole: its values before
# the steps are moved by the measured differences of the parts, and it is run with its own optimisations,
# which round differently. Twice the largest change is allowed.

Run = Callable[[onnx.ModelProto, Iterable[Arrays]], Iterable[Arrays]]

# Share of a quantising step's elements that may be off by one quantum; one element always may
_OFF_BY_ONE = 0.01
# Allowed error of a value to be rounded, in quanta: a sigmoid of -12 errs by more of its range
OF_A_QUANTUM = 0.01
# Functions into [-1, 1] are computed to this share of 1, not of a small result: four steps of the least
# number that fp16 can tell from 0.
_OF_ONE = 2.0**-22
_INSIDE = 0.05  # Allowed error of an operator that rounds inside, as a share of its range
_QUANTA = 255  # Quanta in the range that such an operator rounds
_MOST = 0.25  # Share of an output's range; inputs do not determine an output whose reference moves by more
_MOVES = 3  # Times that the reference's values are moved, for each probe
_LEAST = 2.0**-22  # Least move as a share of the largest value: a few roundings of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseVerification:
    """The result of a verification part by part.

    `wrong` is a sentence that says which part is wrong, None where all are right; `tolerance` is then the
    allowed error of each output of the whole, and `note` says so to the user. `blamed` are a model and inputs
    on which the faulty node can be searched for. `selections` are the outputs to compare as sets of rows.
    `undetermined` is part of a sentence: which output moves by rounding alone, each time, by more than may be
    allowed; "" where there is none.
    """

    wrong: str | None
    undetermined: str = ""
    selections: tuple[Selection, ...] = ()
    blamed: tuple[onnx.ModelProto, Arrays] | None = None
    tolerance: tuple[float, ...] = ()
    note: str = ""


def judge(
    model: onnx.ModelProto,
    inputs: Sequence[Arrays],
    run: Run,
    *,
    precision: str,
    tolerance: Sequence[float],
    limits: EvaluationLimits = DEFAULT_LIMITS,
    opened_model: Opened | None = None,
) -> PiecewiseVerification | None:
    """Verify a model with static shapes part by part; None where it has no steps, or they cannot be opened.

    `inputs` are its probes'. `run(variant, sets of inputs)` compiles a model and returns its outputs for
    each, by name, one set after the other, and stops at the first that is wrong. `precision` is that of the
    arithmetic, `tolerance` the allowed error of the whole if it had no steps, both as in the module
    `tolerance`. `opened_model` is the result of `open_with_reference` for the model and inputs, if available.
    """
    found = opened_model or open_with_reference(model, inputs, limits)
    if found is None:
        return None
    apart, reference = found
    feeds = [apart.feeds(i, values) for i, values in zip(inputs, reference, strict=True)]
    parts = _Parts(apart, precision, limits)
    errors: dict[str, float] = {}
    try:
        for values, given, made in zip(reference, feeds, run(apart.model, feeds), strict=True):
            for difference in parts.compare_all(given, values, made):
                if not difference.right:
                    why = f"{difference}, given the reference's own values at each step"
                    return PiecewiseVerification(wrong=why, blamed=(apart.model, given))
                errors[difference.output] = max(difference.error, errors.get(difference.output, 0.0))
    except HonedError:
        return None
    least = {name: _OF_ONE / _largest([values[name] for values in reference]) for name in apart.bounded}
    optimised = evaluate(model, list(inputs), limits, (at_level(HIGHEST),))
    chosen = selections(model, inputs, reference, tolerance, limits)
    by_noise = _changes(_shift_steps(model, apart, inputs, reference, errors, limits), chosen, tolerance)
    by_both = dict(by_noise)
    if isinstance(optimised, Reference):
        others = list(zip(reference, optimised.outputs, strict=True))
        by_both = {n: by_noise.get(n, []) + far for n, far in _changes(others, chosen, tolerance).items()}
    moved = {name: max(by_both.get(name, []), default=0.0) for name in graphs.outputs(model)}
    allowed = _tolerances(tolerance, moved, least)
    never_less = ((name, min(far)) for name, far in by_noise.items())
    undetermined = next(
        (
            f"output {name!r} of the reference itself changes by {far:.2g} of its range, or more, when it "
            "rounds otherwise"
            for name, far in never_less
            if far > _MOST
        ),
        "",
    )
    note = (
        f"proven part by part between its {apart.steps} steps (rounding, choosing and saturating); as a "
        f"whole it may be off by {max(allowed):.2g} of its range, as the reference changes by up to "
        f"{max(moved.values()):.2g} when it rounds otherwise"
    )
    return PiecewiseVerification(
        wrong=None, undetermined=undetermined, selections=chosen, tolerance=allowed, note=note
    )


def allowance(
    model: onnx.ModelProto, inputs: Sequence[Arrays], tolerance: Sequence[float], limits: EvaluationLimits
) -> tuple[float, ...]:
    """Return the allowed error of each output of a model with static shapes, from the reference alone.

    That is its `tolerance`, or where the model has steps, as much as the reference moves when it rounds
    differently before them.
    """
    found = open_with_reference(model, inputs, limits)
    if found is None:
        return tuple(tolerance)
    apart, reference = found
    by_noise = _changes(_shift_steps(model, apart, inputs, reference, {}, limits), (), ())
    moved = {name: max(by_noise.get(name, []), default=0.0) for name in graphs.outputs(model)}
    return _tolerances(tolerance, moved, {})


def _tolerances(
    tolerance: Sequence[float], moved: Mapping[str, float], least: Mapping[str, float]
) -> tuple[float, ...]:
    """Return how far outputs may be off: `least`, or more where rounding differently moves the reference."""
    return tuple(
        max(usual, least.get(name, 0.0), min(2 * far, _MOST))
        for usual, (name, far) in zip(tolerance, moved.items(), strict=True)
    )


class _Parts:
    """A comparison of an opened model's outputs with the reference's values."""

    def __init__(self, piecewise: PiecewiseModel, precision: str, limits: EvaluationLimits) -> None:
        self._original = {made: name for name, made in piecewise.made.items()}
        self._apart = piecewise
        self._bounded = {n.output[0] for n in piecewise.model.graph.node if n.op_type in BOUNDED}
        self._precision = precision
        self._limits = limits
        self._work = work(piecewise.model, graphs.infer(piecewise.model))

    def compare_all(self, inputs: Arrays, reference: Arrays, actual: Arrays) -> Iterator[Difference]:
        """Yield the difference of each output of one run from the reference on the same inputs."""
        for name in actual:
            difference = self.compare(name, reference, actual)
            if not difference.right and name in self._apart.inside:
                most = max(difference.tolerance, self._inner_tolerance(name, inputs, reference))
                difference = replace(difference, tolerance=most)
            yield difference

    def _inner_tolerance(self, name: str, inputs: Arrays, reference: Arrays) -> float:
        """Return how far an operator that rounds inside may be off: twice what moving its inputs changes.

        The inputs move by a hundredth of a quantum, because the rounding inside cannot be observed.
        """
        rng = np.random.default_rng(0)
        own = {v.name: v for v in self._apart.model.graph.input}
        sets = [
            {
                n: v + OF_A_QUANTUM / _QUANTA * _largest([v]) * rng.uniform(-1, 1, v.shape).astype(v.dtype)
                if n in own and v.dtype.kind == "f" else v
                for n, v in inputs.items()
            }
            for _ in range(_MOVES)
        ]  # fmt: skip
        model = self._apart.model
        outputs = [value for value in model.graph.output if value.name == name]
        alone = graphs.rebuild_model(model, model.graph.node, model.graph.input, outputs)
        moved = evaluate(alone, sets, self._limits)
        original = self._original.get(name, name)
        if isinstance(moved, ReferenceFailure):
            return 0.0
        return min(2 * max(_change(reference[original], each[name]) for each in moved.outputs), _INSIDE)

    def compare(self, name: str, reference: Arrays, actual: Arrays) -> Difference:
        """Return how far output `name` of the opened model is off.

        An error of one quantum does not count where it is permitted.
        """
        original = self._original.get(name, name)
        expected, got = reference[original], actual[name]
        allowed = self._work.tolerance_of(expected.dtype.name, self._precision)
        alike = (expected.dtype, expected.shape) == (got.dtype, got.shape) and expected.dtype.kind in "iu"
        if alike and name != original and original in self._apart.quantising:
            differs = expected != got
            off = np.abs(expected[differs].astype(np.int64) - got[differs].astype(np.int64))
            if off.max(initial=0) <= 1 and off.size <= max(1, _OFF_BY_ONE * expected.size):
                got = expected
        return compare_value(expected, got, max(allowed, self._least(name, expected)), original)

    def _least(self, name: str, expected: np.ndarray) -> float:
        """Return the least tolerance of a value between steps, as a share of its range.

        It applies however small the range is.
        """
        absolute = OF_A_QUANTUM * self._apart.quanta.get(name, 0.0)
        if name in self._bounded:
            absolute = max(absolute, _OF_ONE)
        return absolute / _largest([expected]) if absolute else 0.0


_Pairs = Sequence[tuple[Arrays, Arrays]]  # Outputs of the reference, and those when it rounds differently


def _shift_steps(
    model: onnx.ModelProto,
    piecewise: PiecewiseModel,
    inputs: Sequence[Arrays],
    reference: Sequence[Arrays],
    errors: Mapping[str, float],
    limits: EvaluationLimits,
) -> _Pairs:
    """Return the reference's outputs with its values before the steps moved, beside the original ones."""
    sizes = {
        name: max(errors.get(name, 0.0), _LEAST) * _largest([values[name] for values in reference])
        for name in piecewise.before
        if reference[0][name].dtype.kind == "f"
    }
    again = [(given, values) for given, values in zip(inputs, reference, strict=True)] * _MOVES
    found = evaluate(moving(model, piecewise, sizes), [i for i, _ in again], limits) if sizes else None
    if not isinstance(found, Reference):
        return []
    return list(zip((values for _, values in again), found.outputs, strict=True))


def _changes(
    pairs: _Pairs, chosen: Sequence[Selection], tolerance: Sequence[float]
) -> dict[str, list[float]]:
    """Return the distance of each pair by output, as shares of its range."""
    found: dict[str, list[float]] = {}
    for calm, other in pairs:
        names = list(other)
        ordered = align_rows(chosen, names, calm, other, tolerance) if chosen else other
        for name in names:
            found.setdefault(name, []).append(_change(calm[name], ordered[name]))
    return found


def _largest(values: Sequence[np.ndarray]) -> float:
    """Return the largest magnitude of any element; 1 where all are 0."""
    found = max(float(np.max(np.abs(v), initial=0.0, where=np.isfinite(v))) for v in values)
    return found or 1.0


def _change(calm: np.ndarray, other: np.ndarray) -> float:
    """Return the largest difference as a share of the largest value; 1 where shapes or infinities differ."""
    return min(compare_value(calm, other, 0.0, "").error, 1.0)
