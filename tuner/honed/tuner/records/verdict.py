"""The vocabulary of verdicts: how far a candidate came, in what time, and what is never run again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StoredOutcome(StrEnum):
    """The step of the verdict at which a candidate ended, as records have it."""

    NOT_BUILT = "not-built"
    NOT_RUN = "not-run"
    IMPOSSIBLE = "impossible"
    FAULTED = "faulted"
    WRONG = "wrong"
    RIGHT = "right"
    ABANDONED = "abandoned"  # It was running when the tuner or the machine stopped


class Outcome(StrEnum):
    """How far a candidate came; each but the last is a refusal.

    `stored_as` is what records keep of it. One that `quarantines` may have harmed the device, and is not
    tried again.
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
    DEADLINE = "deadline", StoredOutcome.NOT_RUN, True  # It did not end in time
    IMPOSSIBLE = "impossible", StoredOutcome.IMPOSSIBLE  # Faster than the device's measured peaks
    FAULT = "fault", StoredOutcome.FAULTED, True  # The kernel log holds a fault of its process
    UNWRITTEN = "unwritten", StoredOutcome.WRONG  # Poisoned output was left as it was
    OUT_OF_BOUNDS = "out-of-bounds", StoredOutcome.WRONG, True  # A guard band was written
    WRONG = "wrong", StoredOutcome.WRONG  # Differs from the reference
    BARRIER = "barrier", StoredOutcome.NOT_BUILT  # A barrier in divergent control flow
    MEMORY = "memory"  # The device ran out of memory
    CRASH = "crash", StoredOutcome.NOT_RUN, True  # Its process died
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
        """The median as it would be at the device's reference speed; what candidates are ranked by."""
        return self.median_s / (self.yardstick_ratio or 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is known of a candidate; one that is RIGHT has a timing."""

    outcome: Outcome
    reason: str = ""  # One sentence; empty for RIGHT
    timing: Timing | None = None
    yardstick_s: float | None = None  # Median of the yardstick kernel, measured in turns with it
    clock_hz: int | None = None  # Of the device while it was timed; None where that cannot be read
    story: str | None = None  # The kernel log's records of its fault
    seconds: float = 0.0  # The measurement took, wall time
    host: str | None = None  # The board of a farm that judged it; None: this machine did
