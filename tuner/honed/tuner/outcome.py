"""The vocabulary of verdicts: how far a candidate came, how that is recorded, and what is never run again."""

from __future__ import annotations

from enum import StrEnum


class Stored(StrEnum):
    """The step of the verdict at which a candidate ended, as records have it."""

    NOT_BUILT = "not-built"
    NOT_RUN = "not-run"
    IMPOSSIBLE = "impossible"
    FAULTED = "faulted"
    WRONG = "wrong"
    RIGHT = "right"
    ABANDONED = "abandoned"  # it was running when the tuner or the machine stopped


class Outcome(StrEnum):
    """How far a candidate came; each but the last is a refusal.

    `stored_as` is what records keep of it. One that `quarantines` may have harmed the device, and is not
    tried again.
    """

    stored_as: Stored
    quarantines: bool

    def __new__(cls, text: str, stored_as: Stored = Stored.NOT_RUN, quarantines: bool = False) -> Outcome:
        """A member."""
        one = str.__new__(cls, text)
        one._value_, one.stored_as, one.quarantines = text, stored_as, quarantines
        return one

    BUILD = "build", Stored.NOT_BUILT  # the driver's compiler refused it, crashed or took too long
    RUN = "run"  # an event failed, or START was not before END
    DEADLINE = "deadline", Stored.NOT_RUN, True  # it did not end in time
    IMPOSSIBLE = "impossible", Stored.IMPOSSIBLE  # faster than the device's measured peaks
    FAULT = "fault", Stored.FAULTED, True  # the kernel log holds a fault of its process
    UNWRITTEN = "unwritten", Stored.WRONG  # poisoned output was left as it was
    OUT_OF_BOUNDS = "out-of-bounds", Stored.WRONG, True  # a guard band was written
    WRONG = "wrong", Stored.WRONG  # differs from the reference
    BARRIER = "barrier", Stored.NOT_BUILT  # a barrier in divergent control flow
    MEMORY = "memory"  # the device ran out of memory
    CRASH = "crash", Stored.NOT_RUN, True  # its process died
    RIGHT = "right", Stored.RIGHT
