"""Chooses the inputs a compiled model is proven on: those on which the reference itself is well determined.

Some models amplify rounding: a division by a small difference, an ArgMax between equals. There even two right
computations differ. So the reference is also evaluated on inputs moved by one unit in the last place, and
inputs whose answers change by more than a part of the tolerance are passed over for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from honed.protocol.errors import InvalidArgument
from honed.runtime.execution.proof import compare

from . import graphs
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .inputs import generate
from .reference import ReferenceFailure, evaluate
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


@dataclass(frozen=True, slots=True)
class _Trial:
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    noise: tuple[float, ...]  # per output, how far one rounding of the inputs moves it, as `compare` says


def choose(
    model: onnx.ModelProto,
    count: int,
    precision: str,
    *,
    seed: int = 0,
    limits: EvaluationLimits = DEFAULT_LIMITS,
) -> Expected | ReferenceFailure:
    """`count` sets of generated inputs for the original model with static shapes, evaluated.

    `precision` is that of the compiled form's arithmetic, as in `tolerance`. Where too few inputs are well
    determined the best of the others are taken, and the tolerance of float outputs is widened to eight
    times their noise, up to 5 %, which a note says. Raises as `inputs.generate` does.
    """
    allowed = for_model(model, precision)
    trials: list[_Trial] = []
    evaluator, note = "", None
    for rounds in range(1, _ROUNDS + 1):
        drawn = generate(model, rounds * count, seed)[-count:]
        found = evaluate(model, [*drawn, *(_moved(values, seed) for values in drawn)], limits)
        if isinstance(found, ReferenceFailure):
            if trials:
                break
            return found
        evaluator, note = found.evaluator, found.note
        evaluated = zip(drawn, found.outputs[:count], found.outputs[count:], strict=True)
        trials += [_Trial(given, calm, _noise(calm, other)) for given, calm, other in evaluated]
        if sum(_share(trial.noise, allowed) <= _CALM for trial in trials) >= count:
            break
    best = sorted(trials, key=lambda trial: max(_share(trial.noise, allowed), _CALM))[:count]
    tolerance, widened = _widened(allowed, best, graphs.outputs(model))
    return Expected(
        evaluator=evaluator,
        inputs=tuple(trial.inputs for trial in best),
        outputs=tuple(trial.outputs for trial in best),
        tolerance=tolerance,
        notes=(*([note] if note else ()), *widened),
    )


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
