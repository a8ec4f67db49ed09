"""Two forms of the same work, one kernel or several, and which of them is taken.

No I/O, no clocks; the same for the same times, whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from honed.jobs.events import Form

# Share of a form's time below which the other takes its place: neither rooflines nor measured times are
# more exact, and a model's form should not change back and forth.
LESS = 0.95
_NAME = 40  # characters of a function's name that are told
_TAKEN: tuple[tuple[Form, str], ...] = (
    ("joined", "one kernel is taken in the place of several"),
    ("apart", "several kernels are taken in the place of one"),
)


def other(form: Form) -> Form:
    """The one that is not this."""
    return "apart" if form == "joined" else "joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestTimes:
    """Seconds that the best known schedules of each form take in all; None where a part's is not known."""

    joined: float | None
    apart: float | None

    def of(self, form: Form) -> float | None:
        """Of one form."""
        return self.joined if form == "joined" else self.apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A function, and those of which each is read by the next alone that it would take the place of.

    Functions are named by the keys of their tasks.
    """

    name: str  # of the one function
    joined: str
    apart: tuple[str, ...]
    calls: int  # of either form in one inference
    launch: float  # seconds of a launch that are in no recorded time
    expected: Form  # by the roofline; taken where times are not known

    def keys(self, form: Form) -> tuple[str, ...]:
        """The tasks that a form runs, one for each of its functions."""
        return (self.joined,) if form == "joined" else self.apart

    def times(self, seconds: Mapping[str, float]) -> ContestTimes:
        """What both forms take, by what their tasks do (`seconds`, by key)."""
        return ContestTimes(joined=self._sum("joined", seconds), apart=self._sum("apart", seconds))

    def taken(self, seconds: Mapping[str, float]) -> Form:
        """The form that is compiled: the one expected, unless the other was measured to be faster."""
        times = self.times(seconds)
        mine, theirs = times.of(self.expected), times.of(other(self.expected))
        if mine is None or theirs is None or theirs >= LESS * mine:
            return self.expected
        return other(self.expected)

    def _sum(self, form: Form, seconds: Mapping[str, float]) -> float | None:
        keys = self.keys(form)
        if any(key not in seconds for key in keys):
            return None
        return sum(seconds[key] + self.launch for key in keys)


def told(contests: Sequence[Contest], seconds: Mapping[str, float]) -> tuple[str, ...]:
    """A sentence on those that are one kernel, as measured and not as expected, another on the opposite."""
    sentences = []
    for form, text in _TAKEN:
        found = [one for one in contests if one.taken(seconds) == form != one.expected]
        if found:
            sentences.append(f"as measured, {text}: {', '.join(_told(one, seconds) for one in found)}")
    return tuple(sentences)


def _told(contest: Contest, seconds: Mapping[str, float]) -> str:
    times = contest.times(seconds)
    one, several = ("-" if t is None else f"{1e6 * t:.0f} us" for t in (times.joined, times.apart))
    return f"{contest.name[:_NAME]} ({one} in one, {several} in {len(contest.apart)})"
