"""Checks of what a run left in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from honed.runtime.execution import proof
from honed.tuner.verdict import Outcome

from .row import Refusal, VerdictCheck, first_of

Array = NDArray[np.generic]


def guard_intact(before: Array, after: Array, poison: int, which: str) -> Refusal | None:
    """Refuse where a byte next to a buffer is no longer `poison`; the bands are uint8."""
    damaged_before, damaged_after = np.flatnonzero(before != poison), np.flatnonzero(after != poison)
    if damaged_after.size:
        nearest = f"{int(damaged_after[0])} bytes beyond its end"
    elif damaged_before.size:
        nearest = f"{before.size - int(damaged_before[-1])} bytes before its start"
    else:
        return None
    count = damaged_before.size + damaged_after.size
    return Refusal(
        Outcome.OUT_OF_BOUNDS,
        f"it writes outside {which}: {count} bytes, the nearest of them {nearest}",
        tainted=True,
    )


def unchanged(given: Array, found: Array, which: str) -> Refusal | None:
    """Refuse where an input is not what it was, bit for bit."""
    if _bits(given).shape == _bits(found).shape and bool((_bits(given) == _bits(found)).all()):
        return None
    return Refusal(Outcome.OUT_OF_BOUNDS, f"it writes into {which}")


def written(first: Array, poison: int, second: Array, other: int, which: str) -> Refusal | None:
    """Refuse elements left as they were in two runs on the same inputs.

    The output was all bytes `poison` before the first and all bytes `other` before the second, so a
    written value can look like one of them, not like both.
    """
    size = first.dtype.itemsize
    left = (_bits(first) == _repeated(poison, size)) & (_bits(second) == _repeated(other, size))
    count = int(np.count_nonzero(left))
    if not count:
        return None
    return Refusal(Outcome.UNWRITTEN, f"it leaves {count} of {left.size} elements of {which} unwritten")


def repeated(first: Array, second: Array, which: str) -> Refusal | None:
    """Refuse where two runs on the same inputs did not give the same bits.

    Nothing that the tuner generates uses atomics, so work-items that do not wait for each other, or read
    what nobody wrote, are all that can make them differ.
    """
    count = int(np.count_nonzero(_bits(first) != _bits(second)))
    if not count:
        return None
    return Refusal(
        Outcome.WRONG,
        f"it gives other answers to the same inputs: {count} of {first.size} elements of {which}",
    )


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """A reference with what is needed of it for every comparison, found once."""

    array: Array
    tolerance: float
    scale: float  # its largest |value|, 0 where some value is not finite or the dtype is exact

    @classmethod
    def of(cls, array: Array, tolerance: float) -> ExpectedOutput:
        """Prepare a reference array."""
        scale = 0.0
        if array.dtype.kind == "f" and array.size and tolerance:
            largest = float(np.max(np.abs(array)))
            scale = largest if np.isfinite(largest) else 0.0
        return cls(array, tolerance, scale)


def right(expected: ExpectedOutput, found: Array, which: str) -> Refusal | None:
    """Refuse what differs from the reference by more than the tolerance, as `proof.compare` has it."""
    if expected.scale and _surely_right(expected, found):
        return None
    difference = proof.compare(expected.array, found, expected.tolerance, which)
    return None if difference.right else Refusal(Outcome.WRONG, str(difference))


def _surely_right(expected: ExpectedOutput, found: Array) -> bool:
    """One pass in single precision; what it accepts, the exact comparison accepts too (NaN never)."""
    kind = np.promote_types(expected.array.dtype, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(np.subtract(found, expected.array, dtype=kind))
    return bool(np.max(error) <= 0.999 * expected.tolerance * expected.scale)


def _bits(array: Array) -> NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")


def _repeated(byte: int, size: int) -> int:
    return int.from_bytes(bytes([byte]) * size, "little")


@dataclass(frozen=True, slots=True)
class RunOutput:
    """An output as a run left it; `earlier` is what another run on the same inputs left, None without one."""

    name: str
    expected: ExpectedOutput
    found: Array
    earlier: Array | None = None


@dataclass(frozen=True, slots=True)
class MemoryLeft:
    """What a run left in memory that was filled with bytes `poison` before.

    `bands` are the guard bands before and after each buffer, `inputs` what was given and what is there now.
    `unjudged` is the poison of the earlier run where nobody has looked at its outputs yet.
    """

    poison: int
    bands: Sequence[tuple[str, Array, Array]]
    inputs: Sequence[tuple[str, Array, Array]] = ()
    outputs: Sequence[RunOutput] = ()
    unjudged: int | None = None


def _all_intact(left: MemoryLeft) -> Refusal | None:
    return first_of(guard_intact(before, after, left.poison, name) for name, before, after in left.bands)


def _all_written(left: MemoryLeft) -> Refusal | None:
    if left.unjudged is None:
        return None
    return first_of(
        written(output.earlier, left.unjudged, output.found, left.poison, output.name)
        for output in left.outputs
        if output.earlier is not None
    )


def _all_right(left: MemoryLeft) -> Refusal | None:
    earlier = [] if left.unjudged is None else [(o, o.earlier) for o in left.outputs if o.earlier is not None]
    answers = [*earlier, *((output, output.found) for output in left.outputs)]
    return first_of(right(output.expected, found, output.name) for output, found in answers)


def _all_repeated(left: MemoryLeft) -> Refusal | None:
    return first_of(
        repeated(output.earlier, output.found, output.name)
        for output in left.outputs
        if output.earlier is not None
    )


# After each run that is looked at.
LEFT: tuple[VerdictCheck[MemoryLeft], ...] = (
    VerdictCheck("guards", _all_intact),
    VerdictCheck(
        "inputs", lambda left: first_of(unchanged(given, now, name) for name, given, now in left.inputs)
    ),
    VerdictCheck("written", _all_written),
    VerdictCheck("right", _all_right),
    VerdictCheck("repeated", _all_repeated),
)
