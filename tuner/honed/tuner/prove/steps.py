"""Proof part by part, for models with steps in them.

A value next to a rounding boundary falls to either side by the last bit of a sum, and what it then takes is a
whole quantum, or another branch: two right computations of a quantised network differ by tenths of its range.
So the model is opened at its steps. Each step is given the reference's own values, and so is what reads its
results; everything between the steps must agree as in any model, or to a hundredth of the quantum that it is
rounded to, and steps give the same, but that a quantising one may be off by one quantum for one element in a
hundred. How far the whole may then be off is
read off the reference: its values before the steps are moved by as much as the parts were found to differ,
and it is run with its own optimisations, which round elsewhere. Twice the largest change is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, inliner

from honed.protocol.errors import HonedError
from honed.runtime.proof import Difference, compare

from . import graphs, shapes
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .evaluator import EVALUATORS, OPTIMISED
from .locate import first_difference
from .reference import Reference, ReferenceFailure, evaluate
from .tolerance import for_output, work

Arrays = Mapping[str, np.ndarray]
Run = Callable[[onnx.ModelProto, Sequence[Arrays]], Sequence[Arrays]]

# Operators whose result jumps where what they are given moves a little.
_QUANTISING = {
    "DynamicQuantizeLinear", "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv",
    "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMatMul", "QLinearMul", "QLinearSigmoid",
    "QLinearSoftmax", "QuantizeLinear",
}  # fmt: skip
_CHOOSING = {
    "ArgMax", "ArgMin", "Ceil", "Equal", "Floor", "Greater", "GreaterOrEqual", "Hardmax", "Less",
    "LessOrEqual", "Mod", "Round", "Sign", "TopK",
}  # fmt: skip
_OFF_BY_ONE = 0.01  # of a quantising step's elements, or one of them
_OF_A_QUANTUM = 0.01  # that what is rounded may be off: a sigmoid of -12 errs by more of its range
# Functions into [-1, 1], which evaluators compute to so much of 1, not of a small result.
_BOUNDED = {"Erf", "Sigmoid", "Softmax", "Tanh"}
_OF_ONE = 2.0**-22
_MOST = 0.25  # of an output's range; whose reference moves by more is not determined by its inputs
_MOVES = 4  # times that the reference's values are moved, for each probe
_LEAST = 2.0**-22  # that they are moved by, as a share of the largest: a few roundings of float32
_MOST_BYTES = 1 << 30  # of values at the steps, for one probe


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose steps stand apart: `model` reads what `feeds` gives, besides its own inputs.

    `before` are the values that steps read and other nodes make, `after` those that steps make; both as the
    original names them. In `model` a step reads `given[x]` in place of x and makes `made[q]` in place of q.
    """

    model: onnx.ModelProto
    before: tuple[str, ...]
    after: tuple[str, ...]
    given: Mapping[str, str]
    made: Mapping[str, str]
    quantising: frozenset[str]  # those of `after` that may be off by one
    quanta: Mapping[str, float]  # of those of `before` that constant scales round
    steps: int

    def feeds(self, inputs: Arrays, reference: Arrays) -> dict[str, np.ndarray]:
        """The inputs of `model`, where `reference` has the values of `before` and `after`."""
        return {
            **inputs,
            **{self.given[name]: reference[name] for name in self.before},
            **{name: reference[name] for name in self.after},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofByParts:
    """What the proof part by part found.

    `wrong` is a sentence that says which part is wrong, None where all are right; `tolerance` is then how far
    each output of the whole may be off, and `note` tells the user so.
    """

    wrong: str | None
    tolerance: tuple[float, ...] = ()
    note: str = ""


def opened(model: onnx.ModelProto) -> OpenedModel | None:
    """A model with static shapes, opened at its steps; None where it has none that can be opened."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    known = shapes.infer(model)
    varying = _varying(model)
    steps = {
        i
        for i, node in enumerate(model.graph.node)
        if _is_step(node, known, varying) and all(name in known for name in node.output if name)
    }
    if not steps:
        return None
    nodes = model.graph.node
    after = tuple(name for i in sorted(steps) for name in nodes[i].output if name)
    own = {value.name for value in model.graph.input}
    read = dict.fromkeys(name for i in sorted(steps) for name in nodes[i].input)
    before = tuple(name for name in read if name in varying and name not in own and name not in after)
    taken = own | {name for node in nodes for name in (*node.input, *node.output)}
    given = {name: _unused(f"{name}, given", taken) for name in before}
    made = {name: _unused(f"{name}, made", taken) for name in after}
    kept = [_renamed(node, given, made) if i in steps else node for i, node in enumerate(nodes)]
    outputs = [value for value in model.graph.output if value.name not in after]
    there = {value.name for value in outputs}
    graph = helper.make_graph(
        kept,
        model.graph.name,
        [
            *model.graph.input,
            *(_info(known[name], given[name]) for name in before),
            *(_info(known[name], name) for name in after),
        ],
        [
            *outputs,
            *(_info(known[name], name) for name in before if name not in there),
            *(_info(known[name], made[name]) for name in after),
        ],
        list(model.graph.initializer),
    )
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    return OpenedModel(
        model=helper.make_model(graph, ir_version=model.ir_version, opset_imports=list(model.opset_import)),
        before=before,
        after=after,
        given=given,
        made=made,
        quantising=frozenset(
            name for i in steps if nodes[i].op_type in _QUANTISING for name in nodes[i].output if name
        ),
        quanta=_quanta([nodes[i] for i in sorted(steps)], graphs.constants(model)),
        steps=len(steps),
    )


def judge(
    model: onnx.ModelProto,
    inputs: Sequence[Arrays],
    run: Run,
    *,
    precision: str,
    tolerance: Sequence[float],
    limits: EvaluationLimits = DEFAULT_LIMITS,
) -> ProofByParts | None:
    """Prove a model with static shapes part by part; None where it has no steps, or they cannot be looked at.

    `inputs` are its probes'. `run(variant, sets of inputs)` compiles a model and gives its outputs for each,
    by name. `precision` is that of the arithmetic, `tolerance` what the whole may be off by where it has no
    steps, both as in the module `tolerance`.
    """
    apart = opened(model)
    if apart is None or _bytes(apart) > _MOST_BYTES:
        return None
    exposed = _exposing(model, apart)
    reference = evaluate(exposed, list(inputs), limits)
    if isinstance(reference, ReferenceFailure):
        return None
    feeds = [apart.feeds(i, values) for i, values in zip(inputs, reference.outputs, strict=True)]
    try:
        found = run(apart.model, feeds)
    except HonedError:
        return None
    part = _Parts(apart, precision)
    differences = [
        part.compared(name, values, own)
        for values, own in zip(reference.outputs, found, strict=True)
        for name in own
    ]
    wrong = [(n, difference) for n, difference in enumerate(differences) if not difference.right]
    if wrong:
        probe = wrong[0][0] // len(found[0])
        where = first_difference(
            apart.model, feeds[probe], lambda m, i: run(m, [i])[0], precision=precision, limits=limits
        )
        return ProofByParts(wrong=f"{wrong[0][1]}, given the reference's own values at each step; {where}")
    errors = {d.output: d.error for d in sorted(differences, key=lambda d: d.error)}
    moved = _spread(model, apart, inputs, reference, errors, limits)
    names = graphs.outputs(model)
    allowed = tuple(
        max(usual, min(2 * moved[name], _MOST)) for usual, name in zip(tolerance, names, strict=True)
    )
    widest = max(allowed)
    note = (
        f"proven part by part between its {apart.steps} steps (rounding and choosing); as a whole it may be "
        f"off by {widest:.2g} of its range, as the reference changes by up to {max(moved.values()):.2g} when "
        "it rounds otherwise"
    )
    return ProofByParts(wrong=None, tolerance=allowed, note=note)


class _Parts:
    """Compares what an opened model gave with the reference's values."""

    def __init__(self, apart: OpenedModel, precision: str) -> None:
        self._original = {made: name for name, made in apart.made.items()}
        self._apart = apart
        self._bounded = {n.output[0] for n in apart.model.graph.node if n.op_type in _BOUNDED}
        self._precision = precision
        self._work = work(apart.model, shapes.infer(apart.model))

    def compared(self, name: str, reference: Arrays, found: Arrays) -> Difference:
        """How far output `name` of the opened model is off; one quantum where that may be is not."""
        original = self._original.get(name, name)
        expected, got = reference[original], found[name]
        allowed = for_output(
            expected.dtype.name, self._precision, depth=self._work.depth, reduction=self._work.reduction
        )
        if expected.dtype != got.dtype or expected.shape != got.shape:
            return Difference(
                output=original, error=np.inf, tolerance=allowed, index=(), expected=0.0, found=0.0
            )
        if name != original and original in self._apart.quantising and expected.dtype.kind in "iu":
            off = np.abs(expected.astype(np.int64) - got.astype(np.int64))
            if off.max(initial=0) <= 1 and np.count_nonzero(off) <= max(1, _OFF_BY_ONE * off.size):
                got = expected
        return compare(expected, got, max(allowed, self._least(name, expected)), original)

    def _least(self, name: str, expected: np.ndarray) -> float:
        """What a value between steps may be off by, however small its range is; as a share of that."""
        absolute = _OF_A_QUANTUM * self._apart.quanta.get(name, 0.0)
        if name in self._bounded:
            absolute = max(absolute, _OF_ONE)
        largest = float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected)))
        return absolute / (largest or 1.0)


def _spread(
    model: onnx.ModelProto,
    apart: OpenedModel,
    inputs: Sequence[Arrays],
    reference: Reference,
    errors: Mapping[str, float],
    limits: EvaluationLimits,
) -> dict[str, float]:
    """By output: how far the reference moves when it rounds otherwise, as a share of its range."""
    names = graphs.outputs(model)
    moving = [n for n in apart.before if reference.outputs[0][n].dtype.kind == "f"]
    others: list[tuple[Arrays, Arrays]] = []
    optimised = evaluate(model, list(inputs), limits, (OPTIMISED,))
    if isinstance(optimised, Reference):
        others += zip(reference.outputs, optimised.outputs, strict=True)
    rng = np.random.default_rng(0)
    added = _adding(model, apart, moving)
    sets = [
        {**given, **{added.names[n]: _noise(values[n], errors.get(n, 0.0), rng) for n in moving}}
        for given, values in zip(inputs, reference.outputs, strict=True)
        for _ in range(_MOVES)
    ]
    shifted = evaluate(added.model, sets, limits, EVALUATORS) if moving else None
    if isinstance(shifted, Reference):
        again = [values for values in reference.outputs for _ in range(_MOVES)]
        others += zip(again, shifted.outputs, strict=True)
    return {
        name: max((_change(calm[name], other[name]) for calm, other in others), default=0.0) for name in names
    }


@dataclass(frozen=True, slots=True)
class _Adding:
    """A model whose steps read a value and what an input of that name adds to it."""

    model: onnx.ModelProto
    names: Mapping[str, str]


def _adding(model: onnx.ModelProto, apart: OpenedModel, moving: Sequence[str]) -> _Adding:
    """The model with something added to what its steps read."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    taken = set(apart.given.values()) | set(apart.made.values())
    taken |= {name for node in model.graph.node for name in (*node.input, *node.output)}
    names = {name: _unused(f"{name}, added", taken) for name in moving}
    sums = {name: _unused(f"{name}, moved", taken) for name in moving}
    known = {value.name: value for value in apart.model.graph.input}
    nodes: list[onnx.NodeProto] = []
    for node, other in zip(model.graph.node, apart.model.graph.node, strict=True):
        is_step = list(node.output) != list(other.output)
        nodes.append(_renamed(node, sums, {}) if is_step else node)
        nodes += [helper.make_node("Add", [n, names[n]], [sums[n]]) for n in node.output if n in sums]
    graph = helper.make_graph(
        nodes,
        model.graph.name,
        [*model.graph.input, *(_as(known[apart.given[n]], names[n]) for n in moving)],
        list(model.graph.output),
        list(model.graph.initializer),
    )
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    made = helper.make_model(graph, ir_version=model.ir_version, opset_imports=list(model.opset_import))
    return _Adding(made, names)


def _noise(values: np.ndarray, error: float, rng: np.random.Generator) -> np.ndarray:
    """As much as a part was found to be off, up and down, for each element of its own."""
    largest = float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))
    size = max(error, _LEAST) * largest
    return rng.uniform(-size, size, values.shape).astype(values.dtype)


def _change(calm: np.ndarray, other: np.ndarray) -> float:
    """The largest difference as a share of the largest value; 1 where shapes or infinities differ."""
    if calm.shape != other.shape or calm.dtype != other.dtype:
        return 1.0
    return min(compare(calm, other, 0.0).error, 1.0)


def _is_step(node: onnx.NodeProto, known: Mapping[str, graphs.TypedValue], varying: set[str]) -> bool:
    if node.domain not in ("", "ai.onnx", "com.microsoft") or not any(n in varying for n in node.input):
        return False
    if node.op_type in _QUANTISING | _CHOOSING:
        return all(name in known for name in node.input if name in varying)
    if node.op_type != "Cast" or node.input[0] not in known or node.output[0] not in known:
        return False
    return _is_float(known[node.input[0]]) and not _is_float(known[node.output[0]])


def _is_float(value: graphs.TypedValue) -> bool:
    return value.dtype.startswith("float")


def _quanta(steps: Iterable[onnx.NodeProto], constants: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The least quantum that constant scales round a value to, by its name."""
    found: dict[str, float] = {}
    for node in steps:
        if node.op_type == "QuantizeLinear" and constants.get(node.input[1], np.zeros(0)).size:
            quantum = float(np.min(constants[node.input[1]]))
            found[node.input[0]] = min(quantum, found.get(node.input[0], quantum))
    return found


def _varying(model: onnx.ModelProto) -> set[str]:
    """The values that depend on inputs."""
    fixed = {tensor.name for tensor in model.graph.initializer}
    found = {value.name for value in model.graph.input} - fixed
    for node in model.graph.node:
        reads = {name for inner in _inner(node) for name in inner.input}
        if reads & found:
            found |= {name for name in node.output if name}
    return found


def _inner(node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
    yield node
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from graphs.nodes(graph)


def _exposing(model: onnx.ModelProto, apart: OpenedModel) -> onnx.ModelProto:
    """The model with the values at its steps among its outputs."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(inliner.inline_local_functions(model) if model.functions else model)
    there = {value.name for value in exposed.graph.output}
    typed = {value.name: value for value in (*apart.model.graph.input, *apart.model.graph.output)}
    exposed.graph.output.extend(typed[name] for name in (*apart.before, *apart.after) if name not in there)
    return exposed


def _bytes(apart: OpenedModel) -> int:
    sizes = (graphs.of_info(value) for value in apart.model.graph.input)
    return sum(int(np.prod(s.shape, dtype=np.int64)) * np.dtype(s.dtype).itemsize for s in sizes if s)


def _renamed(node: onnx.NodeProto, given: Mapping[str, str], made: Mapping[str, str]) -> onnx.NodeProto:
    other = onnx.NodeProto()
    other.CopyFrom(node)
    other.input[:] = [given.get(name, name) for name in node.input]
    other.output[:] = [made.get(name, name) for name in node.output]
    return other


def _info(value: graphs.TypedValue, name: str) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    return helper.make_tensor_value_info(name, element, value.shape)


def _as(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    other = onnx.ValueInfoProto()
    other.CopyFrom(value)
    other.name = name
    return other


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "'"
    taken.add(name)
    return name


def judged(results: Sequence[Difference], allowed: Sequence[float]) -> tuple[Difference, ...]:
    """The differences of probes, output by output, under other tolerances."""
    return tuple(replace(r, tolerance=allowed[n % len(allowed)]) for n, r in enumerate(results))
