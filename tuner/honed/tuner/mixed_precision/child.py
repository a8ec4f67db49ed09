"""The child process that decides: `python -m honed.tuner.mixed_precision.child FOLDER --sets N ...`.

It reads `model.onnx`, normalised and in float32, and `input.SET.NUMBER.npy` from FOLDER, and answers
with a `PrecisionAnswer`, or with a failure as `honed.tuner.verify.evaluator` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

from honed.runtime.engines import HIGHEST, session_options
from honed.runtime.execution.verification import compare
from honed.tuner.graph.fp16_casts import (
    PRODUCTS,
    Array,
    Exemptions,
    assign_types,
    operators,
    saturate,
    usually,
)
from honed.tuner.graph.graph import Graph
from honed.tuner.verify import confined

# A float32 graph is computed on the processor as a device would in fp16, to see how far off its outputs are.
# Every operator is computed in float32 from operands that were rounded as they are in fp16, and its result
# is rounded: what one operation in fp16 gives. Nodes are evaluated with ONNX Runtime where it can, else
# with ONNX's reference evaluator. Products whose terms are added up in fp16 err besides; errors are twice
# those of a sample of their elements.

# Elements sampled of one product; a prime, so that cycling through the errors aligns with no row
SAMPLE = 251


def product_errors(node: NodeProto, operands: tuple[Array, Array], rng: np.random.Generator) -> Array:
    """Return SAMPLE errors of elements of a MatMul or Conv whose terms are added up in fp16, as float32.

    The terms are added one by one, each sum rounded to fp16, as a work-item does with one accumulator. A
    schedule that adds up in several partial sums errs less.
    """
    left, right = (_conv if node.op_type == "Conv" else _matmul)(node, operands, rng)
    with np.errstate(over="ignore", invalid="ignore"):
        # The product of two halves is exact in float32.
        terms = np.ascontiguousarray((_halve(left) * _halve(right)).T)
        total = np.zeros(SAMPLE, np.float16)
        for term in terms:
            total = (total + term).astype(np.float16)
        return np.asarray(total - terms.sum(axis=0, dtype=np.float64), np.float32)


def _halve(array: Array) -> Array:
    return array.astype(np.float16).astype(np.float32)


def multiply_adds(node: NodeProto, shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the multiply-adds of a MatMul or a Conv."""
    given = shapes[node.input[1 if node.op_type == "Conv" else 0]]
    terms = math.prod(given[1:]) if node.op_type == "Conv" else given[-1]
    return terms * math.prod(shapes[node.output[0]])


def _matmul(_: NodeProto, operands: tuple[Array, Array], rng: np.random.Generator) -> tuple[Array, Array]:
    """Return rows and columns whose products are elements of the result, both of shape (SAMPLE, terms)."""
    left = np.atleast_2d(operands[0])
    right = operands[1] if operands[1].ndim > 1 else operands[1][:, None]
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    at = tuple(rng.integers(0, size, SAMPLE) for size in batch)
    rows = np.broadcast_to(left, (*batch, *left.shape[-2:]))
    columns = np.broadcast_to(right, (*batch, *right.shape[-2:])).swapaxes(-1, -2)
    return (
        rows[(*at, rng.integers(0, rows.shape[-2], SAMPLE))],
        columns[(*at, rng.integers(0, columns.shape[-2], SAMPLE))],
    )


def _conv(node: NodeProto, operands: tuple[Array, Array], rng: np.random.Generator) -> tuple[Array, Array]:
    """Return windows of the input and their filters, both of shape (SAMPLE, terms)."""
    attrs: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    data, weights = operands
    rank = data.ndim - 2
    pads = [(attrs["pads"][i], attrs["pads"][i + rank]) for i in range(rank)]
    padded = np.pad(data, [(0, 0), (0, 0), *pads])
    filters, channels = weights.shape[:2]
    reach = [d * (k - 1) + 1 for d, k in zip(attrs["dilations"], weights.shape[2:], strict=True)]
    windows = []
    chosen = rng.integers(0, filters, SAMPLE)
    for chosen_filter in chosen:
        first = int(chosen_filter) // (filters // attrs["group"]) * channels
        corner = [
            int(rng.integers(0, (size - long) // stride + 1)) * stride
            for size, long, stride in zip(padded.shape[2:], reach, attrs["strides"], strict=True)
        ]
        spans = [
            slice(start, start + long, step)
            for start, long, step in zip(corner, reach, attrs["dilations"], strict=True)
        ]
        of_one = padded[int(rng.integers(0, data.shape[0])), first : first + channels]
        windows.append(of_one[(slice(None), *spans)].reshape(-1))
    return np.stack(windows), weights.reshape(filters, -1)[chosen]


Run = Callable[[Sequence[Array]], Array]  # Takes the inputs that are present, in order
_HALF, _SINGLE = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT


class Operators:
    """A factory of evaluators of nodes; equal nodes share one."""

    def __init__(self, model: onnx.ModelProto, types: Mapping[str, int], threads: int) -> None:
        """Set up the factory; `types` are the element types of all values by name."""
        self._model = model
        self._types = types
        self._threads = threads
        self._made: dict[bytes, Run] = {}

    def of(self, node: onnx.NodeProto) -> Run:
        """Return a function that evaluates a node; operands' types do not change the type of its result."""
        return self._evaluator(_alone(node, self._types))

    def halve(self) -> Callable[[Array], Array]:
        """Return a function that rounds float32 to fp16 and returns float32; overflow becomes infinite.

        ONNX Runtime does so several times as fast as NumPy.
        """
        nodes = [
            helper.make_node("Cast", ["input"], ["half"], to=_HALF),
            helper.make_node("Cast", ["half"], ["output"], to=_SINGLE),
        ]
        ends = [[helper.make_tensor_value_info(name, _SINGLE, None)] for name in ("input", "output")]
        run = self._evaluator(helper.make_graph(nodes, "graph", *ends))
        return lambda array: run([array])

    def _evaluator(self, graph: onnx.GraphProto) -> Run:
        model = helper.make_model(
            graph, ir_version=self._model.ir_version, opset_imports=list(self._model.opset_import)
        )
        key = model.SerializeToString(deterministic=True)
        if key not in self._made:
            self._made[key] = _onnxruntime(key, self._threads) or _reference(model)
        return self._made[key]


def _alone(node: onnx.NodeProto, types: Mapping[str, int]) -> onnx.GraphProto:
    """Return a graph of one node, whose values have generic names and no shapes."""
    copy = deepcopy(node)
    copy.name = "node"
    given = []
    for index, name in enumerate(node.input):
        if name:
            copy.input[index] = f"input_{index}"
            given.append(helper.make_tensor_value_info(f"input_{index}", types[name], None))
    copy.output[0] = "output"
    return helper.make_graph(
        [copy], "graph", given, [helper.make_tensor_value_info("output", types[node.output[0]], None)]
    )


def _onnxruntime(model: bytes, threads: int) -> Run | None:
    """Return ONNX Runtime as evaluator; None where it is missing or lacks the operator for these types."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    options = session_options(onnxruntime, threads, HIGHEST, spinning=False)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  its errors for missing operators have no common class
        return None
    names = [i.name for i in session.get_inputs()]
    return lambda given: np.asarray(session.run(None, dict(zip(names, given, strict=True)))[0])


def _reference(model: onnx.ModelProto) -> Run:
    evaluator = ReferenceEvaluator(model)
    names = [i.name for i in model.graph.input]

    def run(inputs: Sequence[Array]) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(evaluator.run(None, dict(zip(names, inputs, strict=True)))[0])

    return run


# Work of an evaluation, in operations: a node, an element that a node makes, and a multiply-add. The first
# two correspond to about 20 us and 1 ns at 30 GFLOP/s.
_NODE, _ELEMENT, _MULTIPLY_ADD = 600_000, 30, 2

# Neighbours have similar errors, unlike those of a cycled sample: where three models ran in fp16 (rusticl on
# llvmpipe) outputs were up to 1.8 times as far off as without this factor.
_MARGIN = np.float32(2.0)
_TURN = 89  # Elements that errors are moved by when a set is repeated


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The output that is furthest off, and its error relative to its range (see `verification.compare`)."""

    output: str
    error: float  # Infinite where it overflows, or is not equal though no float


@dataclass(frozen=True, slots=True)
class _SimulatedStep:
    at: int  # Index among the nodes
    node: onnx.NodeProto
    run: Run
    inputs: tuple[str, ...]
    last: tuple[str, ...]  # Values that nothing reads afterwards


class Simulation:
    """A graph whose floats are all float32, with sets of inputs. Results are deterministic."""

    def __init__(self, model: onnx.ModelProto, sets: Sequence[Mapping[str, Array]], threads: int = 1) -> None:
        self._graph = model.graph
        self._sets = sets
        known = Graph.read(model.graph)
        types = {name: kind.elem for name, kind in known.types.items()}
        self._shapes = {name: kind.shape for name, kind in known.types.items()}
        self._constants = known.constants
        self._halved = {
            name: saturate(value, np.float16).astype(np.float32)
            for name, value in self._constants.items()
            if types[name] == TensorProto.FLOAT
        }
        self._floats = frozenset(name for name, kind in types.items() if kind == TensorProto.FLOAT)
        self._rounding = frozenset(n.output[0] for n in operators(self._graph))
        made = Operators(model, types, threads)
        self._halve = made.halve()
        self._steps = self._plan(made)
        self._errors: dict[tuple[int, str], Array] = {}  # Errors of products added up in fp16, by set
        self._expected: dict[int, dict[str, Array]] = {}

    @property
    def operators(self) -> list[str]:
        """The operators that fp16 is possible for, in order."""
        return [n.output[0] for n in operators(self._graph)]

    @property
    def multiply_adds(self) -> dict[str, int]:
        """Multiply-adds of every product, by output."""
        nodes = [n for n in operators(self._graph) if n.op_type in PRODUCTS]
        return {n.output[0]: multiply_adds(n, self._shapes) for n in nodes}

    @property
    def cost(self) -> int:
        """The work of one run, in operations."""
        made = sum(math.prod(self._shapes[n.output[0]]) for n in self._graph.node)
        work = _NODE * len(self._graph.node) + _ELEMENT * made
        return work + _MULTIPLY_ADD * sum(self.multiply_adds.values())

    def deviation(self, keep: Exemptions, runs: int) -> Deviation:
        """Return how far off the outputs are at most, over `runs` runs, which use the sets in turn.

        A repeated set has the errors of its products in another order.
        """
        worst = Deviation(output="", error=0.0)
        for run in range(runs):
            again, number = divmod(run, len(self._sets))
            for name, value in self.outputs(number, keep, again).items():
                error = _error(self._expected[number][name], value)
                if error > worst.error:
                    worst = Deviation(output=name, error=error)
        return worst

    def outputs(self, number: int, keep: Exemptions, again: int = 0) -> dict[str, Array]:
        """Return the outputs of one set, in fp16 except for `keep`; `again` counts earlier runs."""
        if number not in self._expected:
            self._expected[number] = self._in_single(number)
        single = assign_types(self._graph, keep)
        values = {
            name: self._halve(value) if name in self._floats - single.values else value
            for name, value in self._sets[number].items()
        }

        def compute(step: _SimulatedStep) -> Array:
            result = step.node.output[0]
            in_half = result not in single.nodes
            found = step.run([self._operand(n, values, in_half, single.values) for n in step.inputs])
            if not in_half or result not in self._rounding:
                return found
            if step.node.op_type in PRODUCTS and result not in keep.wide:
                found = _with_errors(found, np.roll(self._errors[number, result], again * _TURN))
            return self._halve(found)

        return self._walk(values, compute)

    def _in_single(self, number: int) -> dict[str, Array]:
        """Return the outputs in float32, and measure the errors of adding up products in fp16."""
        values = dict(self._sets[number])

        def compute(step: _SimulatedStep) -> Array:
            given = [values[n] if n in values else self._constants[n] for n in step.inputs]
            result = step.node.output[0]
            if step.node.op_type in PRODUCTS and result in self._rounding:
                rng = np.random.default_rng([number, step.at])
                measured = product_errors(step.node, (given[0], given[1]), rng)
                self._errors[number, result] = _MARGIN * measured
            return step.run(given)

        return self._walk(values, compute)

    def _walk(
        self, values: dict[str, Array], computed: Callable[[_SimulatedStep], Array]
    ) -> dict[str, Array]:
        """Compute every node, put its result into `values`, and return the outputs."""
        for step in self._steps:
            values[step.node.output[0]] = computed(step)
            for name in step.last:
                values.pop(name, None)
        return {o.name: values[o.name] for o in self._graph.output}

    def _plan(self, operators: Operators) -> list[_SimulatedStep]:
        needed = {o.name for o in self._graph.output} | set(self._constants)
        steps = []
        for at, node in reversed(list(enumerate(self._graph.node))):
            given = tuple(name for name in node.input if name)
            last = tuple(name for name in dict.fromkeys(given) if name not in needed)
            needed.update(given)
            steps.append(_SimulatedStep(at, node, operators.of(node), given, last))
        return steps[::-1]

    def _operand(
        self, name: str, values: Mapping[str, Array], in_half: bool, single: frozenset[str]
    ) -> Array:
        """Return an operand as an operator in fp16, or in float32, reads it."""
        if name in self._constants:
            return self._halved[name] if in_half and name in self._halved else self._constants[name]
        return self._halve(values[name]) if in_half and name in single else values[name]


def _with_errors(array: Array, errors: Array) -> Array:
    """Return the array with the errors added to its elements, cycling through the errors."""
    found = np.array(array).reshape(-1)
    whole = found.size - found.size % errors.size
    rows = found[:whole].reshape(-1, errors.size)
    rows += errors
    found[whole:] += errors[: found.size - whole]
    return found.reshape(array.shape)


def _error(expected: Array, actual: Array) -> float:
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, actual) else math.inf
    return compare(expected, actual, 0.0).error


# Share of the bound below which the error of a group of operators alone is not examined further.
_NEGLIGIBLE = 1 / 16


class PrecisionTrials:
    """The deviations that trials found, each made once, up to a maximum number."""

    def __init__(self, deviation: Callable[[Exemptions], Deviation], most: int) -> None:
        self._deviation = deviation
        self.left = most
        self.known: dict[Exemptions, Deviation] = {}

    def __call__(self, keep: Exemptions) -> float:
        """Return the error; an unknown one costs a trial."""
        if keep not in self.known:
            self.left -= 1
            self.known[keep] = self._deviation(keep)
        return self.known[keep].error


def search(
    operators: Sequence[str],
    products: Sequence[str],
    usual: frozenset[str],
    trials: PrecisionTrials,
    bound: float,
) -> Exemptions | None:
    """Return the least that must stay in float32 for an error within the bound; None: everything.

    `usual` is kept in any case. First operators are kept, with all products added up in float32; then
    products are added up in fp16 where the error allows.
    """
    plain = Exemptions(single=usual)
    if trials(plain) <= bound:
        return plain
    single = usual
    most = Exemptions(single=usual, wide=frozenset(products) - usual)
    if trials(most) > bound:
        others = [name for name in operators if name not in usual]
        single = usual | _least(
            others,
            lambda kept: trials(Exemptions(single=usual | kept, wide=frozenset(products) - usual - kept)),
            bound,
            lambda: trials.left // 2,
        )
        if single.issuperset(operators):
            return None
    wide = _least(
        [name for name in products if name not in single],
        lambda kept: trials(Exemptions(single=single, wide=kept)),
        bound,
        lambda: trials.left,
    )
    return Exemptions(single=single, wide=wide)


@dataclass(frozen=True, slots=True)
class _NodeGroup:
    """Neighbouring operators, and the error where they alone are not kept."""

    units: tuple[str, ...]
    alone: float


def _least(
    units: Sequence[str],
    error: Callable[[frozenset[str]], float],
    bound: float,
    left: Callable[[], int],
) -> frozenset[str]:
    """Return units to keep for an error within the bound, the most sensitive first; keeping all must suffice.

    Groups of units are halved, the one that errs most first, as long as there are trials left; then as few
    groups as suffice are kept.
    """
    if not units:
        return frozenset()
    whole = frozenset(units)
    groups = [_NodeGroup(tuple(units), float("inf"))]
    while left() >= 2 + (len(groups) + 1).bit_length():
        coarse = max((g for g in groups if len(g.units) > 1), key=lambda g: g.alone, default=None)
        if coarse is None or coarse.alone <= bound * _NEGLIGIBLE:
            break
        at, middle = groups.index(coarse), len(coarse.units) // 2
        parts = (coarse.units[:middle], coarse.units[middle:])
        groups[at : at + 1] = [_NodeGroup(part, error(whole - frozenset(part))) for part in parts]
    ranked = [frozenset(group.units) for group in sorted(groups, key=lambda g: -g.alone)]
    fewest, enough = 0, len(ranked)  # Bounds of the number of leading groups that suffices
    while fewest < enough and left() > 0:
        middle = (fewest + enough) // 2
        if error(frozenset().union(*ranked[:middle])) <= bound:
            enough = middle
        else:
            fewest = middle + 1
    return frozenset().union(*ranked[:enough])


# Error allowed relative to an output's largest |reference value|: four roundings to fp16 of a value that
# large.
BOUND = 2.0**-9
# Cost limit of a decision, counted and not timed: the same model and inputs give the same decision anywhere.
_OPERATIONS = 200_000_000_000
_MOST_TRIALS = 48
_LEAST_TRIALS = 14  # Trials that the number of runs of each must leave room for
_MOST_RUNS = 3  # Runs of each set


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionAnswer:
    """The operators kept in float32, None where all would be, and the results of the trials.

    `plain` is the largest error with only the usual operators kept, of output `output`; `error` that with
    `single` and `wide`; both are None where no trial was made. `halves` is the share of the multiply-adds
    whose operands are of fp16.
    """

    single: tuple[str, ...] | None
    wide: tuple[str, ...]
    operators: int
    products: int
    trials: int
    sets: int  # Sets of inputs used, the first of those given
    plain: float | None
    output: str
    error: float | None
    halves: float


def main(argv: list[str] | None = None) -> int:
    """Decide; the exit status is 0 wherever it answered."""
    arguments = confined.parser("honed.tuner.mixed_precision.child").parse_args(argv)

    def work() -> Mapping[str, object]:
        model = onnx.load(arguments.folder / confined.MODEL)
        names = [info.name for info in model.graph.input]
        sets = list(confined.sets_in(arguments.folder, names, arguments.sets))
        return asdict(decide(model, sets, arguments.threads))

    return confined.answer(work)


def decide(
    model: onnx.ModelProto,
    sets: list[dict[str, np.ndarray]],
    threads: int = 1,
    operations: int = _OPERATIONS,
) -> PrecisionAnswer:
    """Decide on a normalised model whose floats are all float32, within the given number of operations."""
    simulation = Simulation(model, sets, threads)
    names, work = simulation.operators, simulation.multiply_adds
    usual = usually(model.graph).single
    affordable = operations // simulation.cost  # Runs, with those in float32
    runs = min(_MOST_RUNS * len(sets), max(1, affordable // _LEAST_TRIALS))
    most = min(_MOST_TRIALS, affordable // runs - 1)
    trials = PrecisionTrials(lambda keep: simulation.deviation(keep, runs), most)
    found = search(names, list(work), usual, trials, BOUND) if most > 0 else None
    least = trials(found) if found else None
    plain = trials.known.get(Exemptions(single=usual))
    single = found.single if found else frozenset(names)
    halves = sum(n for name, n in work.items() if name not in single)
    return PrecisionAnswer(
        single=tuple(sorted(single)) if found else None,
        wide=tuple(sorted(found.wide)) if found else (),
        operators=len(names),
        products=len(work),
        trials=len(trials.known),
        sets=min(runs, len(sets)),
        plain=plain.error if plain else None,
        output=plain.output if plain else "",
        error=least,
        halves=halves / sum(work.values()) if work else float(len(single) < len(names)),
    )


if __name__ == "__main__":
    raise SystemExit(main())
