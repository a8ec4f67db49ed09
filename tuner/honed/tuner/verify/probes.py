"""Chooses probes, and measures how much of each output a comparison verifies.

An element is uninformative where the reference has NaN or an infinity. So are elements that all have one
value, or lie at the ends of their range, in nearly all of an output: a saturating function hides the errors
of earlier kernels. Such outputs can still be verified by the values before the choosing or saturating
operators, where the model is opened (`open_at_steps`). Elements that even inputs chosen to change them
(`contrasting`) do not change are constant by nature: equality verifies them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from honed.protocol.errors import HonedError
from honed.runtime.compiled.model import Precondition, Selection
from honed.runtime.execution import verification
from honed.runtime.execution.executor import Executor

from . import graphs
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .discontinuities import HIDING, Opened, PiecewiseModel, exposing, open_with_reference
from .evaluator import EVALUATORS, Reference, ReferenceFailure, evaluate
from .graphs import MOVING
from .inputs import Inputs, contrasting
from .tolerance import HALF_MOST, compare_value, for_model

Arrays = Mapping[str, np.ndarray]

# Allowed difference of outputs that no input changes, by precision: the last rounding of two right
# computations.
_ROUNDING = {"fp16": 2.0**-9, "mixed": 2.0**-9, "fp32": 2.0**-20, "fp64": 2.0**-40}
_CONSTANT = "has one value whatever the inputs are, and is compared for equality"
ENOUGH = 0.5  # The share of an output that a verification has to cover
# Share of an output's elements at one value, or one of two at the ends, from which on it is saturated
_MOST = 0.9
# Operators whose results depend on shapes alone.
_OF_SHAPES = {"ConstantOfShape", "EyeLike", "Shape", "Size"}


@dataclass(frozen=True, slots=True)
class Coverage:
    """Shares of an output over all probes: elements that are finite, and that are informative."""

    finite: float
    varied: float

    def why_not(self, name: str) -> str:
        """Say why output `name` is not covered, as part of a sentence."""
        if self.finite < ENOUGH:
            return f"the reference gives NaN or infinity for {1 - self.finite:.0%} of output {name!r}"
        return (
            f"{1 - self.varied:.0%} of output {name!r} has one value whatever the inputs are, or is saturated"
        )


def of_values(values: Sequence[np.ndarray]) -> Coverage:
    """Return how informative one value is, by the reference's values for several probes."""
    flat = np.concatenate([np.asarray(each).reshape(-1) for each in values])
    if not flat.size:
        return Coverage(1.0, 1.0)
    known = flat[np.isfinite(flat)] if flat.dtype.kind == "f" else flat
    finite = known.size / flat.size
    if not known.size:
        return Coverage(0.0, 0.0)
    if known.size == 1:
        return Coverage(finite, finite)
    # The value of most elements, where most are equal
    usual = np.partition(known, known.size // 2)[known.size // 2]
    alike = np.count_nonzero(known == usual) / known.size
    if known.dtype.kind == "f" and alike < 1:
        ends = [np.count_nonzero(known == end) for end in (known.min(), known.max())]
        if min(ends) > 1:
            alike = max(alike, sum(ends) / known.size)
    return Coverage(finite, finite * (1 - alike) if alike > _MOST else finite)


def of_outputs(model: onnx.ModelProto, outputs: Sequence[Arrays]) -> dict[str, Coverage]:
    """Return by output how much the reference's values say.

    Outputs that depend on no input are fully covered.
    """
    decided = graphs.varying(model, _OF_SHAPES)
    return {
        name: of_values([each[name] for each in outputs]) if name in decided else Coverage(1.0, 1.0)
        for name in graphs.outputs(model)
    }


def coverage_at_steps(
    piecewise: PiecewiseModel, model: onnx.ModelProto, reference: Sequence[Arrays], name: str
) -> Coverage:
    """Return how much a verification at the steps of `piecewise` says about output `name`.

    `reference` has the values at the steps for each probe. Traces back through operators that choose,
    saturate or only move, to values that are informative or that the inputs hold; the least of them counts.
    """
    maker = {output: node for node in model.graph.node for output in node.output}
    decided, at_steps = graphs.varying(model, _OF_SHAPES), {*piecewise.before, *piecewise.after}
    found, seen, waiting = [], {name}, [name]
    while waiting:
        node = maker.get(waiting.pop())
        if node is None:
            continue  # The value is an input's
        if node.op_type not in HIDING | MOVING.keys():
            return Coverage(1.0, 0.0)
        for each in {name for name in node.input if name in decided} - seen:
            seen.add(each)
            share = of_values([values[each] for values in reference]) if each in at_steps else None
            if share is None or (share.finite >= ENOUGH and share.varied < ENOUGH):
                waiting.append(each)
            else:
                found.append(share)
    return min(found, key=lambda each: each.varied, default=Coverage(1.0, 1.0))


# A probe holds a few NaN and infinities. Its findings are stored with the compiled form and refuse none: ONNX
# Runtime itself gives one answer for some shapes and another for others (OPERATORS), and compilers of devices
# may assume that NaN is impossible.

_LEFT_OUT = "NaN is ignored; -inf stays -inf"
_PLACE = "NaN is ignored; if all elements are NaN, the index is 0"
_INTEGERS = "NaN and infinities become an arbitrary integer, which depends on the device"
_TILES = "on Mali GPUs, from 256 channels on, NaN and infinities may spread within tiles of 2 x 2"
_ROW = "the results of steps after NaN or infinities may differ"
# Results for NaN or infinities by operator, where they differ from ONNX Runtime's.
OPERATORS: Mapping[str, str] = {
    **dict.fromkeys(("ReduceMax", "ReduceMin", "MaxPool", "NhwcMaxPool", "GlobalMaxPool"), _LEFT_OUT),
    **dict.fromkeys(("MaxRoiPool", "RoiAlign"), _LEFT_OUT),
    **dict.fromkeys(("ArgMax", "ArgMin", "Hardmax"), _PLACE),
    "TopK": "NaN is larger than all numbers; ONNX Runtime may place it anywhere",
    **dict.fromkeys(("Cast", "CastLike", "QuantizeLinear", "DynamicQuantizeLinear"), _INTEGERS),
    "Conv": _TILES,
    "LRN": "NaN and infinities stay in their windows; ONNX Runtime spreads them to later channels",
    **dict.fromkeys(("RNN", "LSTM", "GRU"), _ROW),
    **dict.fromkeys(("ScatterElements", "ScatterND"), "with max or min, NaN in data or updates gives NaN"),
}  # fmt: skip
# Elements of an input: among fewer, three special ones say more about the probe than about the model
_LEAST = 16
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SpecialProbe:
    """Inputs with NaN and infinities among them, and the reference's outputs for them."""

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]


def choose_special(model: onnx.ModelProto, ordinary: Mapping[str, np.ndarray]) -> SpecialProbe | None:
    """Return a probe made from an ordinary one; None where it would say nothing.

    It says nothing where the model has a subgraph or an operator of OPERATORS other than Conv, where no
    float input is unbounded, or where the reference cannot be evaluated.
    """
    nested = any(a.HasField("g") for node in model.graph.node for a in node.attribute)
    others = OPERATORS.keys() - {"Conv"}
    if nested or model.functions or not others.isdisjoint(node.op_type for node in model.graph.node):
        return None
    given = _with_special_values(model, ordinary)
    if given is None or sum(value.nbytes for value in given.values()) > _MOST_BYTES:
        return None
    found = evaluate(model, [given])
    if isinstance(found, ReferenceFailure):
        return None
    return SpecialProbe(given, found.outputs[0])


def _with_special_values(
    model: onnx.ModelProto, ordinary: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray] | None:
    """Return the inputs with NaN and both infinities in each that may hold them; None where none may."""
    rng, given, holds = np.random.default_rng(0), dict(ordinary), False
    for name, bounds in Inputs(model).own.items():
        array = given[name]
        unbounded = bounds.plain and math.isinf(bounds.low) and math.isinf(bounds.high)
        if array.dtype.kind != "f" or array.size < _LEAST or not unbounded:
            continue
        mixed = array.copy()
        mixed.reshape(-1)[rng.choice(array.size, 3, replace=False)] = [np.nan, np.inf, -np.inf]
        given[name], holds = mixed, True
    return given if holds else None


def differences(executor: Executor, probe: SpecialProbe, tolerance: Mapping[str, float]) -> list[str]:
    """Return one sentence for each output in which the compiled model differs."""
    try:
        found = executor.run_compiled(dict(probe.inputs))
    except HonedError as error:
        return [f"NaN and infinities among inputs fail: {error}"]
    compared = [
        verification.compare(probe.outputs[name], found[name], allowed, name)
        for name, allowed in tolerance.items()
        if name in probe.outputs and name in found and probe.outputs[name].shape == found[name].shape
    ]
    return [
        f"with NaN and infinities among inputs {one}; requests with `finite` refuse such inputs"
        for one in compared
        if not one.right
    ]


# Inputs are chosen on which the reference itself is well determined. Some models amplify rounding: a division
# by a small difference, an ArgMax between equals. There even two right computations differ. So the reference
# is also evaluated on inputs moved by one unit in the last place, and inputs whose answers change by more
# than a share of the tolerance are replaced. So are inputs that ONNX Runtime refuses, and those whose answers
# are uninformative (`Coverage`): others are drawn, in smaller ranges.

_ROUNDS = 3  # Times that other inputs are drawn
# The share of the tolerance that one rounding of the inputs may use up; each step of a model adds about as
# much by its own rounding, in the reference and in the compiled form.
_CALM = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceProbes:
    """Probes: inputs, the reference's outputs for them, and the allowed errors of the compiled form.

    `tolerance` is per output, as in `honed.runtime.compiled.model.Probe`. `behind` are the expected outputs
    of the tail partition, if there is one, in its order; the others are of the compiled program.
    """

    evaluator: str
    inputs: tuple[Mapping[str, np.ndarray], ...]
    outputs: tuple[Mapping[str, np.ndarray], ...]
    tolerance: tuple[float, ...]
    behind: tuple[tuple[np.ndarray, ...], ...] = ()
    notes: tuple[str, ...] = ()  # Notes for the user, one sentence each
    special: SpecialProbe | None = None
    selections: tuple[Selection, ...] = ()  # Outputs that are compared as sets of rows
    covered: tuple[float, ...] = ()  # Per output, the share of it that a comparison verifies
    unproven: str = ""  # Reason why no comparison with these probes is a proof: part of a sentence
    # Reason why a comparison proves the output only at the model's steps: part of a sentence
    hidden: str = ""
    needs_steps: bool = False  # Hidden outputs can only be verified at the steps
    opened: Opened | None = None  # The original model opened, with the reference's values at its steps


@dataclass(frozen=True, slots=True)
class _Trial:
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]  # Includes the values at the steps of an opened model
    # Per output, how far one rounding of the inputs moves it, as `compare` measures it
    noise: tuple[float, ...]
    covered: Mapping[str, Coverage]  # Coverage by output

    @property
    def varied(self) -> float:
        """The least informative share of any output."""
        return min((share.varied for share in self.covered.values()), default=1.0)


def choose(
    model: onnx.ModelProto,
    count: int,
    precision: str,
    *,
    seed: int = 0,
    limits: EvaluationLimits = DEFAULT_LIMITS,
    examples: Sequence[Mapping[str, np.ndarray]] = (),
    whole: onnx.ModelProto | None = None,
    piecewise: PiecewiseModel | None = None,
    preconditions: Sequence[Precondition] = (),
) -> ReferenceProbes | ReferenceFailure:
    """Choose `count` sets of inputs for the original model with static shapes, and evaluate them.

    `examples` are the user's inputs, which precede generated ones. `precision` is that of the compiled form's
    arithmetic, as in `tolerance`; `whole` is the model that `model` is a part of. `piecewise` is the model
    opened at its steps, where the values there are needed; its evaluation alone may fail, as they may be too
    large. Generated inputs keep to the compiled form's `preconditions`. Where too few inputs are well
    determined the best of the others are used, and the tolerance of float outputs is widened to eight times
    their noise, up to 5 %, which a note says. Raises as `Inputs` does.
    """
    allowed, names = for_model(model, precision), graphs.outputs(model)
    fresh = Inputs(model, whole, preconditions)
    shows = exposing(model, piecewise) if piecewise is not None else model
    trials: list[_Trial] = []

    def run(
        drawn: Sequence[dict[str, np.ndarray]], evaluators: Sequence[str]
    ) -> Reference | ReferenceFailure:
        """Return the outputs for the inputs, then those of the model alone for the inputs moved."""
        moved = [_move_by_ulp(values, seed) for values in drawn]
        return evaluate(shows, drawn, limits, evaluators, more=moved, first=len(names))

    evaluator, note, shrink, rounds = "", None, 0, 0
    while rounds < _ROUNDS:
        rounds += 1
        drawn = [dict(each) for each in examples[:count]] if rounds == 1 else []
        begin = (rounds - 1) * count + len(drawn)
        drawn += fresh.draw(count - len(drawn), seed, shrink=shrink, first=begin)
        last = rounds == _ROUNDS or bool(trials)
        found = run(drawn, EVALUATORS if last else EVALUATORS[:1])
        if isinstance(found, ReferenceFailure):
            if piecewise is not None:
                return found
            if trials:
                break
            if found.inputs and shrink < _SMALLEST:
                shrink += 1
                continue
            found = run(drawn, EVALUATORS)
            if isinstance(found, ReferenceFailure):
                return found
        evaluator, note = found.evaluator, found.note
        trials += _trials(model, drawn, found)
        varied = [trial for trial in trials if trial.varied >= ENOUGH]
        if sum(_share(trial.noise, allowed) <= _CALM for trial in varied) >= count:
            break
        if len(varied) < count:
            shrink = min(shrink + 1, _SMALLEST)
    best = _best(model, trials, allowed, count)
    fixed: dict[str, np.ndarray] = {}
    if lacking := _lacking(model, best):
        used = [name for name in EVALUATORS if name in evaluator]
        trials += _contrasting_trials(model, contrasting(fresh, seed), lambda drawn: run(drawn, used))
        best = _best(model, trials, allowed, count)
        fixed = {name: _constant_elements(trials, name) for name in lacking}
    flat = [trial for trial in trials if trial.varied < ENOUGH and _share(trial.noise, allowed) <= _CALM]
    if flat and best[0].varied >= ENOUGH and any(each.ends or each.hides for each in fresh.own.values()):
        best.append(flat[0])  # Everything is masked: verifies equality, but is no proof alone
    tolerance, widened = _widen_tolerances(allowed, best, names)
    made = ReferenceProbes(
        evaluator=evaluator,
        inputs=tuple(trial.inputs for trial in best),
        outputs=tuple({name: trial.outputs[name] for name in names} for trial in best),
        tolerance=tolerance,
        notes=(*([note] if note else ()), *widened),
        opened=(piecewise, [trial.outputs for trial in best]) if piecewise is not None else None,
    )
    return _with_coverage(model, made, fixed, precision, limits)


_SMALLEST = 2  # The smallest of the ranges that `Inputs.draw` draws from


def _trials(
    model: onnx.ModelProto, drawn: Sequence[dict[str, np.ndarray]], reference: Reference
) -> list[_Trial]:
    count = len(drawn)
    evaluated = zip(drawn, reference.outputs[:count], reference.outputs[count:], strict=True)
    return [
        _Trial(given, calm, _noise(calm, other), of_outputs(model, [calm]))
        for given, calm, other in evaluated
    ]


def _best(
    model: onnx.ModelProto, trials: Sequence[_Trial], allowed: Sequence[float], count: int
) -> list[_Trial]:
    """Return the `count` trials with the least noise, of those that vary every output that some trial varies.

    Where they leave an output unchanged that others change, one of the others replaces the last.
    """
    able = {
        name for name in trials[0].covered if any(trial.covered[name].varied >= ENOUGH for trial in trials)
    }
    counting = [t for t in trials if all(t.covered[name].varied >= ENOUGH for name in able)] or trials
    ordered = sorted(counting, key=lambda trial: max(_share(trial.noise, allowed), _CALM))
    best, others = ordered[:count], ordered[count:]
    for place, name in zip(range(len(best) - 1, 0, -1), _lacking(model, best), strict=False):
        first = best[0].outputs[name]
        best[place] = next(
            (t for t in others if not _nans(t.outputs[name]) and not np.array_equal(t.outputs[name], first)),
            best[place],
        )
    return best


def _lacking(model: onnx.ModelProto, trials: Sequence[_Trial]) -> list[str]:
    """Return the outputs about which these trials say too little, though they are numbers."""
    shares = of_outputs(model, [trial.outputs for trial in trials])
    return [
        name
        for name, share in shares.items()
        if share.varied < ENOUGH and not any(_nans(trial.outputs[name]) for trial in trials)
    ]


def _nans(value: np.ndarray) -> bool:
    return value.dtype.kind == "f" and bool(np.isnan(value).any())


def _contrasting_trials(
    model: onnx.ModelProto,
    drawn: Sequence[dict[str, np.ndarray]],
    run: Callable[[Sequence[dict[str, np.ndarray]]], Reference | ReferenceFailure],
) -> list[_Trial]:
    """Return trials on inputs chosen to change further outputs, of those that the reference accepts."""
    found = run(drawn)
    if isinstance(found, Reference):
        return _trials(model, drawn, found)
    if not found.inputs:
        return []
    each = ((one, run([one])) for one in drawn)
    return [t for one, got in each if isinstance(got, Reference) for t in _trials(model, [one], got)]


def _constant_elements(trials: Sequence[_Trial], name: str) -> np.ndarray:
    """Return which elements of an output are equal in all trials that give numbers for it.

    None is where shapes differ, where fewer than two trials give numbers, or where no input differs.
    """
    able = [trial for trial in trials if not _nans(trial.outputs[name])]
    values = [trial.outputs[name] for trial in able]
    pairs = zip(able[0].inputs.values(), able[-1].inputs.values(), strict=True) if able else ()
    same = all(np.array_equal(one, other) for one, other in pairs)
    if same or any(value.shape != values[0].shape for value in values):
        return np.zeros((), bool)
    return np.asarray(np.logical_and.reduce([value == values[0] for value in values]))


def _of_changing(values: Sequence[np.ndarray], fixed: np.ndarray) -> Coverage:
    """Return how much is covered where elements that are `fixed` are compared for equality."""
    if fixed.all():
        return Coverage(1.0, 1.0)
    share = of_values([value[~fixed] if fixed.shape == value.shape else value for value in values])
    still = float(fixed.mean())
    return Coverage(still + (1 - still) * share.finite, share.varied)


def _with_coverage(
    model: onnx.ModelProto,
    probes: ReferenceProbes,
    fixed: Mapping[str, np.ndarray],
    precision: str,
    limits: EvaluationLimits,
) -> ReferenceProbes:
    """Return the probes, with how much of each output they cover.

    They cover it by themselves, with the values at the model's steps, or as elements that are `fixed`.
    """
    plain = of_outputs(model, probes.outputs)
    poor = {name for name, share in plain.items() if share.varied < ENOUGH}
    hidden = [name for name in plain if name in poor and plain[name].finite >= ENOUGH]
    deeper = _coverage_at_steps(model, probes, hidden, limits) if hidden else {}
    equal = {
        name: _of_changing([each[name] for each in probes.outputs], fixed[name])
        for name in plain
        if name in poor & fixed.keys()
    }
    equal = {name: share for name, share in equal.items() if share.varied >= ENOUGH <= share.finite}
    shares = {name: deeper.get(name, equal.get(name, share)) for name, share in plain.items()}
    constant = [name for name in equal if name not in deeper and fixed[name].all()]
    return replace(
        probes,
        covered=tuple(share.varied for share in shares.values()),
        unproven=next((share.why_not(name) for name, share in shares.items() if share.varied < ENOUGH), ""),
        hidden=next((plain[name].why_not(name) for name in hidden if name in deeper), ""),
        needs_steps=any(name not in equal for name in deeper),
        tolerance=tuple(
            min(most, _ROUNDING[precision]) if name in constant else most
            for name, most in zip(plain, probes.tolerance, strict=True)
        ),
        notes=(*probes.notes, *(f"output {name!r} {_CONSTANT}" for name in constant)),
    )


def _coverage_at_steps(
    model: onnx.ModelProto, probes: ReferenceProbes, names: Sequence[str], limits: EvaluationLimits
) -> dict[str, Coverage]:
    """Return how much of these outputs a verification at the model's steps covers, where it can be made."""
    model = graphs.inline_functions(model)
    known = probes.opened or open_with_reference(model, probes.inputs, limits)
    if known is None:
        return {}
    apart, reference = known
    found = {name: coverage_at_steps(apart, model, reference, name) for name in names}
    return {name: share for name, share in found.items() if share.varied >= ENOUGH}


def _move_by_ulp(values: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return every float32 and float64 element moved by one unit in the last place; zeros and others stay.

    A unit of float16 is not small, and its effect is part of the tolerance already.
    """
    rng = np.random.default_rng([seed, 2])
    moved = {}
    for name, value in values.items():
        moved[name] = value
        if value.dtype.kind == "f" and value.dtype.itemsize > 2:
            target = np.where(rng.random(value.shape) < 0.5, -np.inf, np.inf).astype(value.dtype)
            moved[name] = np.where(value == 0, value, np.nextafter(value, target))
    return moved


def _noise(calm: Mapping[str, np.ndarray], moved: Mapping[str, np.ndarray]) -> tuple[float, ...]:
    # The shape of an output may depend on the values.
    return tuple(compare_value(calm[name], value, 0.0, name).error for name, value in moved.items())


def _share(noise: Sequence[float], allowed: Sequence[float]) -> float:
    """Return the largest share of its tolerance that the noise of an output uses up."""
    return max(
        (n / a if a else (np.inf if n else 0.0) for n, a in zip(noise, allowed, strict=True)), default=0.0
    )


def _widen_tolerances(
    allowed: Sequence[float], best: Sequence[_Trial], names: Sequence[str]
) -> tuple[tuple[float, ...], list[str]]:
    tolerance, notes = [], []
    for i, (name, usual) in enumerate(zip(names, allowed, strict=True)):
        noise = max((trial.noise[i] for trial in best), default=0.0)
        needed = min(noise / _CALM, HALF_MOST)
        tolerance.append(max(usual, needed) if usual else usual)
        if usual < needed:
            proven = f"it is proven to {needed:.2g} of its range only" if usual else "it may be refused"
            notes.append(f"output {name!r} changes by {noise:.2g} when the inputs are rounded, so {proven}")
    return tuple(tolerance), notes
