"""Chooses the inputs a compiled model is proven on: those on which the reference itself is well determined.

Some models amplify rounding: a division by a small difference, an ArgMax between equals. There even two right
computations differ. So the reference is also evaluated on inputs moved by one unit in the last place, and
inputs whose answers change by more than a part of the tolerance are passed over for others. So are inputs
that ONNX Runtime refuses, and those whose answers say nothing (`coverage`): others are drawn, in smaller
ranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import inliner

from honed.protocol.errors import InvalidArgument
from honed.runtime.compiled.model import Selection
from honed.runtime.execution.proof import compare

from . import coverage, graphs
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .coverage import ENOUGH, Covered
from .evaluator import EVALUATORS
from .inputs import generate
from .opened import MOST_BYTES, exposing, nbytes, opened
from .reference import Reference, ReferenceFailure, evaluate
from .specials import SpecialProbe
from .tolerance import HALF_MOST, for_model

_ROUNDS = 3  # times that other inputs are drawn
# The share of the tolerance that one rounding of the inputs may use up; the rounding inside a model is about
# as large again at each of its steps, and the reference and the compiled form both have it.
_CALM = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Probes: inputs, what the reference gave for them, and how far off the compiled form may be.

    `tolerance` is per output, as in `honed.runtime.compiled.model.Probe`. `behind` is what the last part,
    where there is one, is to give, in its order; the others are of what is compiled.
    """

    evaluator: str
    inputs: tuple[Mapping[str, np.ndarray], ...]
    outputs: tuple[Mapping[str, np.ndarray], ...]
    tolerance: tuple[float, ...]
    behind: tuple[tuple[np.ndarray, ...], ...] = ()
    notes: tuple[str, ...] = ()  # what the user should know, one sentence each
    special: SpecialProbe | None = None
    selections: tuple[Selection, ...] = ()  # outputs that are compared as sets of rows
    covered: tuple[float, ...] = ()  # per output, the share of it that a comparison says something about
    unproven: str = ""  # why no comparison with these probes is a proof: part of a sentence
    hidden: str = ""  # why one is only at the model's steps: part of a sentence


@dataclass(frozen=True, slots=True)
class _Trial:
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    noise: tuple[float, ...]  # per output, how far one rounding of the inputs moves it, as `compare` says
    told: float  # the least share of an output that says something


def choose(
    model: onnx.ModelProto,
    count: int,
    precision: str,
    *,
    seed: int = 0,
    limits: EvaluationLimits = DEFAULT_LIMITS,
    given: Sequence[Mapping[str, np.ndarray]] = (),
    whole: onnx.ModelProto | None = None,
) -> Expected | ReferenceFailure:
    """Choose `count` sets of inputs for the original model with static shapes, and evaluate them.

    `given` are inputs of the user's, which come before generated ones. `precision` is that of the compiled
    form's arithmetic, as in `tolerance`; `whole` is the model that `model` is a part of. Where too few inputs
    are well determined the best of the others are taken, and the tolerance of float outputs is widened to
    eight times their noise, up to 5 %, which a note says. Raises as `inputs.generate` does.
    """
    allowed = for_model(model, precision)
    trials: list[_Trial] = []
    evaluator, note, shrink, rounds = "", None, 0, 0
    while rounds < _ROUNDS:
        rounds += 1
        drawn = [dict(each) for each in given[:count]] if rounds == 1 else []
        if len(drawn) < count:
            drawn += generate(model, rounds * count, seed, shrink=shrink, whole=whole)[len(drawn) - count :]
        last = rounds == _ROUNDS or bool(trials)
        found = _evaluated(model, drawn, seed, limits, EVALUATORS if last else EVALUATORS[:1])
        if isinstance(found, ReferenceFailure):
            if trials:
                break
            if found.inputs and shrink < _SMALLEST:
                shrink += 1
                continue
            found = _evaluated(model, drawn, seed, limits, EVALUATORS)
            if isinstance(found, ReferenceFailure):
                return found
        evaluator, note = found.evaluator, found.note
        trials += _trials(model, drawn, found)
        told = [trial for trial in trials if trial.told >= ENOUGH]
        if sum(_share(trial.noise, allowed) <= _CALM for trial in told) >= count:
            break
        if len(told) < count:
            shrink = min(shrink + 1, _SMALLEST)
    counting = [trial for trial in trials if trial.told >= ENOUGH] or trials
    best = sorted(counting, key=lambda trial: max(_share(trial.noise, allowed), _CALM))[:count]
    tolerance, widened = _widened(allowed, best, graphs.outputs(model))
    made = Expected(
        evaluator=evaluator,
        inputs=tuple(trial.inputs for trial in best),
        outputs=tuple(trial.outputs for trial in best),
        tolerance=tolerance,
        notes=(*([note] if note else ()), *widened),
    )
    return _covered(model, made, limits)


_SMALLEST = 2  # of the ranges that inputs are drawn in, as `inputs.generate` has them


def _evaluated(
    model: onnx.ModelProto,
    drawn: Sequence[dict[str, np.ndarray]],
    seed: int,
    limits: EvaluationLimits,
    evaluators: Sequence[str],
) -> Reference | ReferenceFailure:
    return evaluate(model, [*drawn, *(_moved(values, seed) for values in drawn)], limits, evaluators)


def _trials(model: onnx.ModelProto, drawn: Sequence[dict[str, np.ndarray]], found: Reference) -> list[_Trial]:
    count = len(drawn)
    evaluated = zip(drawn, found.outputs[:count], found.outputs[count:], strict=True)
    return [
        _Trial(given, calm, _noise(calm, other), _told(coverage.of_outputs(model, [calm])))
        for given, calm, other in evaluated
    ]


def _told(shares: Mapping[str, Covered]) -> float:
    return min((share.told for share in shares.values()), default=1.0)


def _covered(model: onnx.ModelProto, made: Expected, limits: EvaluationLimits) -> Expected:
    """Say how much of each output the probes cover, by themselves or with the values at the model's steps."""
    plain = coverage.of_outputs(model, made.outputs)
    hidden = [name for name, share in plain.items() if share.told < ENOUGH <= share.finite]
    deeper = _behind(model, made, hidden, limits) if hidden else {}
    shares = {name: deeper.get(name, share) for name, share in plain.items()}
    poor = next((name for name, share in shares.items() if share.told < ENOUGH), None)
    why = shares[poor].why_not(poor) if poor is not None else ""
    told = tuple(share.told for share in shares.values())
    own = next((plain[name].why_not(name) for name in hidden if name in deeper), "")
    return replace(made, covered=told, unproven=why, hidden=own)


def _behind(
    model: onnx.ModelProto, made: Expected, names: Sequence[str], limits: EvaluationLimits
) -> dict[str, Covered]:
    """How much of these outputs a verification at the model's steps covers, where it can be made."""
    inlined = inliner.inline_local_functions(model) if model.functions else model
    apart = opened(inlined)
    if apart is None or nbytes(apart) > MOST_BYTES:
        return {}
    reference = evaluate(exposing(inlined, apart), list(made.inputs), limits)
    if isinstance(reference, ReferenceFailure):
        return {}
    found = {name: coverage.behind(apart, inlined, reference.outputs, name) for name in names}
    return {name: share for name, share in found.items() if share.told >= ENOUGH}


def _moved(values: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Every float32 and float64 element one unit in the last place up or down; zeros and others stay.

    The unit of float16 is no small change, and what it does is in the tolerance already.
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
    noise = []
    for name, value in calm.items():
        try:
            noise.append(compare(value, moved[name], 0.0).error)
        except InvalidArgument:  # the shape of the output depends on the values
            noise.append(float("inf"))
    return tuple(noise)


def _share(noise: Sequence[float], allowed: Sequence[float]) -> float:
    """The largest share of its tolerance that the noise of an output uses up."""
    return max(
        (n / a if a else (np.inf if n else 0.0) for n, a in zip(noise, allowed, strict=True)), default=0.0
    )


def _widened(
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
