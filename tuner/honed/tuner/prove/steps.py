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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from honed.protocol.errors import HonedError
from honed.runtime.compiled.model import Selection
from honed.runtime.engines import HIGHEST
from honed.runtime.execution.proof import Difference, aligned, compare

from . import graphs
from .confined import DEFAULT_LIMITS, EvaluationLimits
from .evaluator import at_level
from .opened import BOUNDED, MOST_BYTES, Arrays, OpenedModel, exposing, moving, nbytes, only, opened
from .reference import Reference, ReferenceFailure, evaluate
from .selected import selections
from .tolerance import for_output, work

Run = Callable[[onnx.ModelProto, Iterable[Arrays]], Iterable[Arrays]]

_OFF_BY_ONE = 0.01  # of a quantising step's elements, or one of them
_OF_A_QUANTUM = 0.01  # that what is rounded may be off: a sigmoid of -12 errs by more of its range
# Functions into [-1, 1] are computed to so much of 1, not of a small result. It is four steps of the least
# that fp16 can tell from 0.
_OF_ONE = 2.0**-22
_INSIDE = 0.05  # of its range, that an operator that rounds inside may be off
_QUANTA = 255  # of the range of what such an operator rounds
_MOST = 0.25  # of an output's range; whose reference moves by more is not determined by its inputs
_MOVES = 4  # times that the reference's values are moved, for each probe
_LEAST = 2.0**-22  # that they are moved by, as a share of the largest: a few roundings of float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofByParts:
    """What the proof part by part found.

    `wrong` is a sentence that says which part is wrong, None where all are right; `tolerance` is then how far
    each output of the whole may be off, and `note` tells the user so. `blamed` are a model and inputs on
    which the node to blame can be looked for. `selections` are the outputs to compare as sets of rows.
    """

    wrong: str | None
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
) -> ProofByParts | None:
    """Prove a model with static shapes part by part; None where it has no steps, or they cannot be looked at.

    `inputs` are its probes'. `run(variant, sets of inputs)` compiles a model and gives its outputs for each,
    by name, one set after the other: the first that is wrong ends it. `precision` is that of the arithmetic,
    `tolerance` what the whole may be off by where it has no steps, both as in the module `tolerance`.
    """
    apart = opened(model)
    if apart is None or nbytes(apart) > MOST_BYTES:
        return None
    reference = evaluate(exposing(model, apart), list(inputs), limits)
    if isinstance(reference, ReferenceFailure):
        return None
    feeds = [apart.feeds(i, values) for i, values in zip(inputs, reference.outputs, strict=True)]
    parts = _Parts(apart, precision, limits)
    errors: dict[str, float] = {}
    try:
        for values, given, found in zip(reference.outputs, feeds, run(apart.model, feeds), strict=True):
            for difference in parts.compared_all(given, values, found):
                if not difference.right:
                    why = f"{difference}, given the reference's own values at each step"
                    return ProofByParts(wrong=why, blamed=(apart.model, given))
                errors[difference.output] = max(difference.error, errors.get(difference.output, 0.0))
    except HonedError:
        return None
    least = {
        name: _OF_ONE / _largest([values[name] for values in reference.outputs]) for name in apart.bounded
    }
    optimised = evaluate(model, list(inputs), limits, (at_level(HIGHEST),))
    chosen = selections(model, inputs, reference.outputs, tolerance, limits)
    moved = _spread(model, apart, inputs, reference, errors, limits, optimised, chosen, tolerance)
    return replace(_as_whole(apart, tolerance, moved, least), selections=chosen)


def allowance(
    model: onnx.ModelProto, inputs: Sequence[Arrays], tolerance: Sequence[float], limits: EvaluationLimits
) -> tuple[float, ...]:
    """How far each output of a model with static shapes may be off, told from the reference alone.

    That is its `tolerance`, or where the model has steps as much as the reference moves when it rounds
    otherwise before them.
    """
    apart = opened(model)
    if apart is None or nbytes(apart) > MOST_BYTES:
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

    def __init__(self, apart: OpenedModel, precision: str, limits: EvaluationLimits) -> None:
        self._original = {made: name for name, made in apart.made.items()}
        self._apart = apart
        self._bounded = {n.output[0] for n in apart.model.graph.node if n.op_type in BOUNDED}
        self._precision = precision
        self._limits = limits
        self._work = work(apart.model, graphs.infer(apart.model))

    def compared_all(self, given: Arrays, reference: Arrays, found: Arrays) -> Iterator[Difference]:
        """Each output of one run on what it was given."""
        for name in found:
            difference = self.compared(name, reference, found)
            if not difference.right and name in self._apart.inside:
                most = max(difference.tolerance, self._moved(name, given, reference))
                difference = replace(difference, tolerance=most)
            yield difference

    def _moved(self, name: str, given: Arrays, reference: Arrays) -> float:
        """What an operator that rounds inside may be off by: twice what the reference is, when moved.

        It is moved by a hundredth of a quantum, for its rounding is nowhere to be seen.
        """
        rng = np.random.default_rng(0)
        own = {v.name: v for v in self._apart.model.graph.input}
        sets = [
            {
                n: v + _OF_A_QUANTUM / _QUANTA * _largest([v]) * rng.uniform(-1, 1, v.shape).astype(v.dtype)
                if n in own and v.dtype.kind == "f" else v
                for n, v in given.items()
            }
            for _ in range(_MOVES)
        ]  # fmt: skip
        moved = evaluate(only(self._apart.model, name), sets, self._limits)
        original = self._original.get(name, name)
        if isinstance(moved, ReferenceFailure):
            return 0.0
        return min(2 * max(_change(reference[original], each[name]) for each in moved.outputs), _INSIDE)

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
    chosen: Sequence[Selection] = (),
    tolerance: Sequence[float] = (),
) -> dict[str, float]:
    """By output: how far the reference moves when it rounds otherwise, as a share of its range.

    It does so where it is `optimised`, and where its values before the steps are moved.
    """
    names = graphs.outputs(model)
    others: list[tuple[Arrays, Arrays]] = []
    if isinstance(optimised, Reference):
        others += zip(reference.outputs, optimised.outputs, strict=True)
    sizes = {
        name: max(errors.get(name, 0.0), _LEAST) * _largest([values[name] for values in reference.outputs])
        for name in apart.before
        if reference.outputs[0][name].dtype.kind == "f"
    }
    again = [(given, values) for given, values in zip(inputs, reference.outputs, strict=True)] * _MOVES
    shifted = evaluate(moving(model, apart, sizes), [i for i, _ in again], limits) if sizes else None
    if isinstance(shifted, Reference):
        others += zip((values for _, values in again), shifted.outputs, strict=True)
    if chosen:
        others = [(calm, aligned(chosen, names, calm, other, tolerance)) for calm, other in others]
    return {
        name: max((_change(calm[name], other[name]) for calm, other in others), default=0.0) for name in names
    }


def _largest(values: Sequence[np.ndarray]) -> float:
    """The largest magnitude of any; 1 where all are 0."""
    found = max(float(np.max(np.abs(v), initial=0.0, where=np.isfinite(v))) for v in values)
    return found or 1.0


def _change(calm: np.ndarray, other: np.ndarray) -> float:
    """The largest difference as a share of the largest value; 1 where shapes or infinities differ."""
    if calm.shape != other.shape or calm.dtype != other.dtype:
        return 1.0
    return min(compare(calm, other, 0.0).error, 1.0)
