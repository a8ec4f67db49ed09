"""A row of a table of checks, and the refusal it may give."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from honed.tuner.verdict import Outcome


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a candidate is dropped; `tainted`: the device's state cannot be relied on any more."""

    outcome: Outcome
    reason: str
    tainted: bool = False


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class VerdictCheck(Generic[S]):
    """A row: what the check is called, and what refuses by what was seen.

    Before a refusal is believed, so many `more_runs` are made, as the machine may have been busy, and with
    `fresh_peaks` the device's peaks are measured again.
    """

    name: str
    refuses: Callable[[S], Refusal | None]
    more_runs: int = 0
    fresh_peaks: bool = False


def first_of(refusals: Iterable[Refusal | None]) -> Refusal | None:
    """The first refusal among them; None where there is none."""
    return next((refusal for refusal in refusals if refusal is not None), None)


def first_refusal(table: Sequence[VerdictCheck[S]], seen: S, without: Container[str] = ()) -> Refusal | None:
    """The refusal of the first row that has one; `without` are names of checks that are left out."""
    return first_of(check.refuses(seen) for check in table if check.name not in without)
