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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from honed.protocol.errors import HonedError
from honed.runtime.engines import HIGHEST
from honed.runtime.execution.proof import Difference, compare

from . import graphs
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .evaluator import EVALUATORS, at_level
from .locate import first_difference
from .opened import BOUNDED, Arrays, OpenedModel, exposing, movable, nbytes, opened
from .reference import Reference, ReferenceFailure, evaluate
from .tolerance import for_output, work

Run = Callable[[onnx.ModelProto, Sequence[Arrays]], Sequence[Arrays]]

_OFF_BY_ONE = 0.01  # of a quantising step's elements, or one of them
_OF_A_QUANTUM = 0.01  # that what is rounded may be off: a sigmoid of -12 errs by more of its range
# Functions into [-1, 1] are computed to so much of 1, not of a small result. It is four steps of the least
# that fp16 can tell from 0.
_OF_ONE = 2.0**-22
_MOST = 0.25  # of an output's range; whose reference moves by more is not determined by its inputs
_MOVES = 4  # times that the reference's values are moved, for each probe
_LEAST = 2.0**-22  # that they are moved by, as a share of the largest: a few roundings of float32
_MOST_BYTES = 1 << 30  # of values at the steps, for one probe


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofByParts:
    """What the proof part by part found.

    `wrong` is a sentence that says which part is wrong, None where all are right; `tolerance` is then how far
    each output of the whole may be off, and `note` tells the user so.
    """

    wrong: str | None
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
) -> ProofByParts | None:
    """Prove a model with static shapes part by part; None where it has no steps, or they cannot be looked at.

    `inputs` are its probes'. `run(variant, sets of inputs)` compiles a model and gives its outputs for each,
    by name. `precision` is that of the arithmetic, `tolerance` what the whole may be off by where it has no
    steps, both as in the module `tolerance`.
    """
    apart = opened(model)
    if apart is None or nbytes(apart) > _MOST_BYTES:
        return None
    reference = evaluate(exposing(model, apart), list(inputs), limits)
    if isinstance(reference, ReferenceFailure):
        return None
    feeds = [apart.feeds(i, values) for i, values in zip(inputs, reference.outputs, strict=True)]
    try:
        found = run(apart.model, feeds)
    except HonedError:
        return None
    differences = _Parts(apart, precision).all_compared(reference.outputs, found)
    wrong = next((n for n, difference in enumerate(differences) if not difference.right), None)
    if wrong is not None:
        where = first_difference(
            apart.model,
            feeds[wrong // len(found[0])],
            lambda m, i: run(m, [i])[0],
            precision=precision,
            limits=limits,
        )
        why = f"{differences[wrong]}, given the reference's own values at each step; {where}"
        return ProofByParts(wrong=why)
    errors = {d.output: d.error for d in sorted(differences, key=lambda d: d.error)}
    least = {
        name: _OF_ONE / _largest([values[name] for values in reference.outputs]) for name in apart.bounded
    }
    optimised = evaluate(model, list(inputs), limits, (at_level(HIGHEST),))
    moved = _spread(model, apart, inputs, reference, errors, limits, optimised)
    return _as_whole(apart, tolerance, moved, least)


def allowance(
    model: onnx.ModelProto, inputs: Sequence[Arrays], tolerance: Sequence[float], limits: EvaluationLimits
) -> tuple[float, ...]:
    """How far each output of a model with static shapes may be off, told from the reference alone.

    That is its `tolerance`, or where the model has steps as much as the reference moves when it rounds
    otherwise before them.
    """
    apart = opened(model)
    if apart is None or nbytes(apart) > _MOST_BYTES:
        return tuple(tolerance)
    reference = evaluate(exposing(model, apart), list(inputs), limits)
    if isinstance(reference, ReferenceFailure):
        return tuple(tolerance)
    moved = _spread(model, apart, inputs, reference, {}, limits)
    return _allowed(tolerance, moved, {})


def _allowed(
    tolerance: Sequence[float], moved: Mapping[str, float], least: Mapping[str, float]
) -> tuple[float, ...]:
    return tuple(
        max(usual, least.get(name, 0.0), min(2 * far, _MOST))
        for usual, (name, far) in zip(tolerance, moved.items(), strict=True)
    )


def _as_whole(
    apart: OpenedModel, tolerance: Sequence[float], moved: Mapping[str, float], least: Mapping[str, float]
) -> ProofByParts:
    """What outputs may be off by: `least`, and where the reference moves them when it rounds otherwise."""
    allowed = _allowed(tolerance, moved, least)
    most = max(moved.values())
    note = (
        f"proven part by part between its {apart.steps} steps (rounding, choosing and saturating); as a "
        f"whole it may be off by {max(allowed):.2g} of its range, as the reference changes by up to "
        f"{most:.2g} when it rounds otherwise"
    )
    return ProofByParts(wrong=None, tolerance=allowed, note=note)


class _Parts:
    """Compares what an opened model gave with the reference's values."""

    def __init__(self, apart: OpenedModel, precision: str) -> None:
        self._original = {made: name for name, made in apart.made.items()}
        self._apart = apart
        self._bounded = {n.output[0] for n in apart.model.graph.node if n.op_type in BOUNDED}
        self._precision = precision
        self._work = work(apart.model, graphs.infer(apart.model))

    def all_compared(self, reference: Sequence[Arrays], found: Sequence[Arrays]) -> list[Difference]:
        """Each output of each run."""
        return [
            self.compared(name, values, own)
            for values, own in zip(reference, found, strict=True)
            for name in own
        ]

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
        return absolute / _largest([expected])


def _spread(
    model: onnx.ModelProto,
    apart: OpenedModel,
    inputs: Sequence[Arrays],
    reference: Reference,
    errors: Mapping[str, float],
    limits: EvaluationLimits,
    optimised: Reference | ReferenceFailure | None = None,
) -> dict[str, float]:
    """By output: how far the reference moves when it rounds otherwise, as a share of its range.

    It does so where it is `optimised`, and where its values before the steps are moved.
    """
    names = graphs.outputs(model)
    moving = [n for n in apart.before if reference.outputs[0][n].dtype.kind == "f"]
    others: list[tuple[Arrays, Arrays]] = []
    if isinstance(optimised, Reference):
        others += zip(reference.outputs, optimised.outputs, strict=True)
    rng = np.random.default_rng(0)
    added = movable(model, apart, moving)
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


def _largest(values: Sequence[np.ndarray]) -> float:
    """The largest magnitude of any; 1 where all are 0."""
    found = max(float(np.max(np.abs(v), initial=0.0, where=np.isfinite(v))) for v in values)
    return found or 1.0


def _noise(values: np.ndarray, error: float, rng: np.random.Generator) -> np.ndarray:
    """As much as a part was found to be off, up and down, for each element of its own."""
    size = max(error, _LEAST) * _largest([values])
    return rng.uniform(-size, size, values.shape).astype(values.dtype)


def _change(calm: np.ndarray, other: np.ndarray) -> float:
    """The largest difference as a share of the largest value; 1 where shapes or infinities differ."""
    if calm.shape != other.shape or calm.dtype != other.dtype:
        return 1.0
    return min(compare(calm, other, 0.0).error, 1.0)


def judged(results: Sequence[Difference], allowed: Sequence[float]) -> tuple[Difference, ...]:
    """The differences of probes, output by output, under other tolerances."""
    return tuple(replace(r, tolerance=allowed[n % len(allowed)]) for n, r in enumerate(results))
