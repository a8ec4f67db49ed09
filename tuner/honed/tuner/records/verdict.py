"""The vocabulary of verdicts: how far a candidate progressed, in what time, and what never runs again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StoredOutcome(StrEnum):
    """The step of the verdict at which a candidate ended, as stored in records."""

    NOT_BUILT = "not-built"
    NOT_RUN = "not-run"
    IMPOSSIBLE = "impossible"
    FAULTED = "faulted"
    WRONG = "wrong"
    RIGHT = "right"
    ABANDONED = "abandoned"  # Running when the tuner or the machine stopped


class Outcome(StrEnum):
    """The outcome of a candidate; each but RIGHT is a refusal.

    Records store `stored_as`. A candidate with `quarantines` may have harmed the device, and is not tried
    again.
    """

    stored_as: StoredOutcome
    quarantines: bool

    def __new__(
        cls, text: str, stored_as: StoredOutcome = StoredOutcome.NOT_RUN, quarantines: bool = False
    ) -> Outcome:
        """Create a member whose value is its text."""
        one = str.__new__(cls, text)
        one._value_, one.stored_as, one.quarantines = text, stored_as, quarantines
        return one

    BUILD = "build", StoredOutcome.NOT_BUILT  # The driver's compiler refused it, crashed or took too long
    RUN = "run"  # An event failed, or START was not before END
    DEADLINE = "deadline", StoredOutcome.NOT_RUN, True  # The run exceeded its deadline
    IMPOSSIBLE = "impossible", StoredOutcome.IMPOSSIBLE  # Faster than the device's measured peaks
    FAULT = "fault", StoredOutcome.FAULTED, True  # The kernel log holds a fault of its process
    UNWRITTEN = "unwritten", StoredOutcome.WRONG  # Poisoned output was not overwritten
    OUT_OF_BOUNDS = "out-of-bounds", StoredOutcome.WRONG, True  # A guard band was written
    WRONG = "wrong", StoredOutcome.WRONG  # Differs from the reference
    BARRIER = "barrier", StoredOutcome.NOT_BUILT  # A barrier in divergent control flow
    MEMORY = "memory"  # The device ran out of memory
    CRASH = "crash", StoredOutcome.NOT_RUN, True  # The candidate's process died
    RIGHT = "right", StoredOutcome.RIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one run of all launches, by the device's clock: the median and its 95 % confidence interval.

    `yardstick_ratio` is the time of the yardstick kernel measured beside it over that kernel's reference
    time: above 1 the device was slowed, by heat or its clock. None where either is not known.
    """

    median_s: float
    low_s: float
    high_s: float
    repeats: int
    yardstick_ratio: float | None = None

    @property
    def fair_s(self) -> float:
        """The median converted to the device's reference speed; candidates are ranked by it."""
        return self.median_s / (self.yardstick_ratio or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of measuring a candidate; a RIGHT one has a timing."""

    outcome: Outcome
    reason: str = ""  # A sentence; empty for RIGHT
    timing: Timing | None = None
    yardstick_s: float | None = None  # Median of the yardstick kernel, measured in turns with it
    clock_hz: int | None = None  # Clock of the device while it was timed; None where that cannot be read
    story: str | None = None  # The kernel log's records of its fault
    seconds: float = 0.0  # Wall time of the measurement
    host: str | None = None  # The board of a farm that judged it; None: this machine did
