"""Verifies outputs: comparison with a reference, and the probes in a `.honed` file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.errors import InvalidArgument
from honed.runtime.compiled.model import Probe, Selection

from .executor import Executor

Array = NDArray[Any]
# Tolerance of the tail: the same library computes it from the reference's own values, in another order.
BEHIND_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference of an output from its reference.

    `error` is the largest |difference| over the largest finite |reference value| (over 1 if that is 0);
    infinite if NaN or an infinity is on one side only. `index` is the worst element, `expected` and `found`
    its values; they are (), 0 and 0 if the output has no elements.
    """

    output: str
    error: float
    tolerance: float
    index: tuple[int, ...]
    expected: float
    found: float

    @property
    def right(self) -> bool:
        """Return whether the error is within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return (
            f"output {self.output!r} differs by {self.error:.3g} of its range where {self.tolerance:.3g} is "
            f"allowed, most at {list(self.index)}: {self.found:.9g} instead of {self.expected:.9g}"
        )


def compare(reference: Array, actual: Array, tolerance: float, output: str = "") -> Difference:
    """Return the difference between two arrays of one dtype and shape; raise InvalidArgument for others.

    NaN and each infinity must be where the reference has them. A `tolerance` of 0 requires equality. `output`
    is the name in messages.
    """
    if reference.dtype != actual.dtype or reference.shape != actual.shape:
        raise InvalidArgument(
            f"{actual.dtype}{list(actual.shape)} cannot be compared with a reference of "
            f"{reference.dtype}{list(reference.shape)}"
        )
    if reference.size == 0:
        return Difference(output=output, error=0.0, tolerance=tolerance, index=(), expected=0.0, found=0.0)
    errors = _errors(reference, actual)
    worst = np.unravel_index(int(np.argmax(errors)), errors.shape)
    return Difference(
        output=output,
        error=float(errors[worst]),
        tolerance=tolerance,
        index=tuple(int(i) for i in worst),
        expected=float(reference[worst]),
        found=float(actual[worst]),
    )


def differences(
    reference: Mapping[str, Array],
    actual: Mapping[str, Array],
    tolerance: Sequence[float],
    selections: Sequence[Selection] = (),
) -> tuple[Difference, ...]:
    """Return the difference of each output of a model from its reference, both in the model's order.

    Rows in an order that a selection determines are compared as a set: `selections` are as in `Proof`. Raises
    InvalidArgument if types or shapes differ.
    """
    names = list(reference)
    outputs = align_rows(selections, names, reference, actual, tolerance)
    return tuple(
        compare(reference[name], outputs[name], most, name)
        for name, most in zip(names, tolerance, strict=True)
    )


def check_probes(executor: Executor) -> tuple[Difference, ...]:
    """Run every probe of the executor's file; return a Difference for each probe and output, in that order.

    Raises as `Executor.run` does. Returns () for a file without probes.
    """
    return tuple(found for probe in executor.model.probes for found in check_probe(executor, probe))


def check_probe(executor: Executor, probe: Probe) -> tuple[Difference, ...]:
    """Run one probe of the executor's file; return a Difference for each output of its steps.

    Elements that no kernel writes count as wrong, whatever the memory held. Raises as `Executor.run` does.
    """
    known, proof = _reference_values(executor, probe), executor.model.proof
    made = executor.run_compiled(executor.file.inputs(probe), known)
    return differences(known, made, probe.tolerance, proof.selections if proof is not None else ())


def check_behind(executor: Executor, probe: Probe) -> tuple[Difference, ...]:
    """Run the tail on the reference's outputs of the steps; return the Differences of its outputs.

    A rounding may change which rows the tail selects, so the CPU engine, which rounds as the reference does,
    runs all of it; size specialisations have probes of their own. The tail also runs once on the device's
    outputs, without comparison. Raises as `Executor.run` does.
    """
    behind = executor.model.tail_outputs
    if not behind:
        return ()
    inputs = executor.file.inputs(probe)
    executor.run(inputs)
    if not probe.behind:
        return ()
    made = executor.run_behind(_reference_values(executor, probe), inputs, forms=False)
    return tuple(
        _like(executor.file.constant(index), made[tensor.name], tensor.name)
        for tensor, index in zip(behind, probe.behind, strict=True)
    )


def probe_count(executor: Executor) -> int:
    """Return the number of probes in the executor's file, including those of its size specialisations."""
    return len(_probes(executor))


def check_numbered(executor: Executor, number: int) -> tuple[Difference, ...]:
    """Run one of `probe_count` probes; return the Differences of the outputs of steps and tail."""
    of, probe = _probes(executor)[number]
    return *check_probe(of, probe), *check_behind(of, probe)


def _probes(executor: Executor) -> list[tuple[Executor, Probe]]:
    """Return all probes, each with the executor that it is for."""
    own = [(executor, probe) for probe in executor.model.probes]
    return [*own, *(found for form in executor.forms for found in _probes(form))]


def _reference_values(executor: Executor, probe: Probe) -> dict[str, Array]:
    """Return the reference's values for the outputs of the steps, by name."""
    tensors = zip(executor.model.outputs, probe.outputs, strict=True)
    return {tensor.name: executor.file.constant(index) for tensor, index in tensors}


def _like(reference: Array, actual: Array, output: str) -> Difference:
    """Return the difference of an output from its reference; another shape counts as an infinite error."""
    tolerance = BEHIND_TOLERANCE if reference.dtype.kind == "f" else 0.0
    if reference.shape == actual.shape:
        return compare(reference, actual, tolerance, output)
    return Difference(
        output=output,
        error=float("inf"),
        tolerance=tolerance,
        index=(),
        expected=reference.size,
        found=actual.size,
    )


def _errors(reference: Array, actual: Array) -> Array:
    """Return for each element its |difference| over the reference's scale, as float64."""
    same = np.asarray(reference == actual)
    if same.all():
        return np.zeros(same.shape)
    expected, found = reference.astype(np.float64), actual.astype(np.float64)
    scale = float(np.max(np.abs(expected), initial=0.0, where=np.isfinite(expected))) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.asarray(np.abs(found - expected))
        errors /= scale
    errors[~(np.isfinite(expected) & np.isfinite(found))] = np.inf
    # Different 64-bit integers can convert to one float64, but must not count as equal.
    np.maximum(errors, np.nextafter(0.0, 1.0), out=errors)
    errors[same | (np.isnan(expected) & np.isnan(found))] = 0.0
    return errors


# Two right computations of nearly equal scores order their rows differently. So such outputs are compared as
# sets of rows: rows of all outputs from one selection move together, and each must agree with the reference's
# row whose place it takes, including its score.
_MOST = 1 << 24  # Largest number of elements in rows that are compared with each other at once


def align_rows(
    selections: Sequence[Selection],
    names: Sequence[str],
    reference: Mapping[str, Array],
    actual: Mapping[str, Array],
    tolerance: Sequence[float],
) -> dict[str, Array]:
    """Return `actual` with the rows of selections in the reference's order; other outputs are unchanged.

    `names` are the outputs in order, `tolerance` as in `Probe`. A row that the reference lacks may take the
    place of one whose score ties with the last that was selected.
    """
    made = dict(actual)
    for selection in selections:
        own = [names[n] for n in selection.outputs]
        if any(made[name].shape != reference[name].shape for name in own):
            continue
        known = [_rows(reference[name], axis) for name, axis in zip(own, selection.axes, strict=True)]
        given = [_rows(made[name], axis) for name, axis in zip(own, selection.axes, strict=True)]
        allowed = [
            tolerance[n] * _scale(reference[name]) for n, name in zip(selection.outputs, own, strict=True)
        ]
        score = None if selection.score is None else selection.outputs.index(selection.score)
        moved = _reorder_rows(known, given, allowed, score)
        for name, axis, value in zip(own, selection.axes, moved, strict=True):
            shape = np.moveaxis(made[name], axis, 0).shape
            made[name] = np.ascontiguousarray(np.moveaxis(value.reshape(shape), 0, axis))
    return made


def _rows(value: Array, axis: int) -> Array:
    """Return the array as [selected rows, all elements of a row]."""
    moved = np.moveaxis(value, axis, 0)
    return moved.reshape(moved.shape[0], -1)


def _scale(value: Array) -> float:
    if value.dtype.kind != "f":
        return 1.0
    return float(np.max(np.abs(value), initial=0.0, where=np.isfinite(value))) or 1.0


def _reorder_rows(
    reference: Sequence[Array], actual: Sequence[Array], allowed: Sequence[float], score: int | None
) -> list[Array]:
    """Return the rows in the reference's order, as far as they agree with it."""
    everything = np.arange(reference[0].shape[0])
    differing = np.flatnonzero(~_alike(reference, actual, allowed, everything, everything))
    size = sum(each.shape[1] for each in reference)
    if not differing.size or differing.size**2 * size > _MOST:
        return list(actual)
    pairs = _alike(reference, actual, allowed, differing[:, None], differing[None, :])
    if score is not None:  # Rows may change places only if they tie
        scores = actual[score][differing, 0].astype(np.float64)
        pairs &= np.abs(scores[:, None] - scores[None, :]) <= 2 * allowed[score]
    taken = _match_rows(pairs)
    moved = [each.copy() for each in actual]
    for row, column in enumerate(taken):
        for whole, each in zip(moved, actual, strict=True):
            if column >= 0:
                whole[differing[row]] = each[differing[column]]
    alone = differing[[column < 0 for column in taken]]
    if alone.size and not _at_the_edge(reference, actual, allowed, score, alone):
        return list(actual)
    for whole, each in zip(moved, reference, strict=True):
        whole[alone] = each[alone]
    return moved


def _alike(
    reference: Sequence[Array], actual: Sequence[Array], allowed: Sequence[float], rows: Array, columns: Array
) -> Array:
    """Return whether rows of the reference and of the model agree in all outputs."""
    alike = np.ones(np.broadcast_shapes(rows.shape, columns.shape), bool)
    for one, other, most in zip(reference, actual, allowed, strict=True):
        left, right = one[rows], other[columns]
        same = left == right
        if one.dtype.kind == "f":
            with np.errstate(invalid="ignore", over="ignore"):
                same |= np.isnan(left) & np.isnan(right)
                same |= np.abs(left.astype(np.float64) - right) <= most
        alike &= same.all(-1)
    return alike


def _match_rows(pairs: Array) -> list[int]:
    """Return for each row a different column that agrees with it, or -1; as many rows as possible get one."""
    taken, holder = ([-1] * size for size in pairs.shape)  # Column of each row, row of each column
    for row in range(pairs.shape[0]):
        came: dict[int, int] = {}  # The row that each column was reached from, breadth first
        waiting, free = [row], -1
        while waiting and free < 0:
            current = waiting.pop(0)
            for column in map(int, np.flatnonzero(pairs[current])):
                if column not in came:
                    came[column] = current
                    if holder[column] < 0:
                        free = column
                        break
                    waiting.append(holder[column])
        while free >= 0:  # Each row on the way takes the column that it reached, and frees its own
            owner = holder[free] = came[free]
            taken[owner], free = free, taken[owner]
    return taken


def _at_the_edge(
    reference: Sequence[Array],
    actual: Sequence[Array],
    allowed: Sequence[float],
    score: int | None,
    rows: Array,
) -> bool:
    """Return whether scores of rows tie with the last selected score, in the reference and the output."""
    if score is None:
        return False
    last = reference[score][-1].astype(np.float64)
    return all(
        bool(np.all(np.abs(each[score][rows] - last) <= 2 * allowed[score])) for each in (reference, actual)
    )
