"""Decides which functions become one kernel: where that was measured, or is expected, to be faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from tvm import tirx
from tvm.s_tir import Schedule

from honed.jobs.events import FusionChoice
from honed.machine.families import UnitFigures
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.functions.fusing import FusionCandidate, NamedFunction
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.workload import function_bytes, function_flops, mark_constants, task_key
from honed.tuner.search import rules, traces
from honed.tuner.search.budget import launches_of
from honed.tuner.search.sketches import starts
from honed.tuner.search.sketches.attention import attention_of
from honed.tuner.search.sketches.one_row import one_row_of
from honed.tuner.search.traces import read

# Share of an alternative's time below which the other replaces it: neither rooflines nor measured times are
# more exact, and a model's kernels should not change back and forth.
LESS = 0.95
_NAME = 40  # Characters of a function's name in a note
_TAKEN: tuple[tuple[FusionChoice, str], ...] = (
    ("joined", "one kernel is taken in the place of several"),
    ("apart", "several kernels are taken in the place of one"),
)


def other(form: FusionChoice) -> FusionChoice:
    """Return the other of the two alternatives."""
    return "apart" if form == "joined" else "joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionAlternatives:
    """A fused function, and the chain of functions that it could replace, each read by the next alone.

    Functions are named by the keys of their tasks.
    """

    name: str  # Name of the fused function
    fused: str
    unfused: tuple[str, ...]
    calls: int  # Runs of either alternative in one inference
    launch: float  # Seconds of a launch that are in no recorded time
    expected: FusionChoice  # The choice by the roofline, used where times are unknown

    def keys(self, form: FusionChoice) -> tuple[str, ...]:
        """Return the keys of the tasks that an alternative runs, one for each of its functions."""
        return (self.fused,) if form == "joined" else self.unfused

    def time(self, form: FusionChoice, seconds: Mapping[str, float]) -> float | None:
        """Return the seconds that the best schedules of an alternative take, by the times of its tasks.

        None where a function was not timed.
        """
        keys = self.keys(form)
        if any(key not in seconds for key in keys):
            return None
        return sum(seconds[key] + self.launch for key in keys)

    def choose(self, seconds: Mapping[str, float]) -> FusionChoice:
        """Return the alternative to compile: the expected one, unless the other was measured to be faster."""
        mine, theirs = self.time(self.expected, seconds), self.time(other(self.expected), seconds)
        if mine is None or theirs is None or theirs >= LESS * mine:
            return self.expected
        return other(self.expected)


def describe(contests: Sequence[FusionAlternatives], seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Return one sentence for each direction in which measurements contradicted the expectation.

    One lists the functions that are one kernel although several were expected, the other the opposite.
    """
    sentences = []
    for form, text in _TAKEN:
        found = [one for one in contests if one.choose(seconds) == form != one.expected]
        if found:
            sentences.append(f"as measured, {text}: {', '.join(_describe(one, seconds) for one in found)}")
    return tuple(sentences)


def _describe(contest: FusionAlternatives, seconds: Mapping[str, float]) -> str:
    times = contest.time("joined", seconds), contest.time("apart", seconds)
    one, several = ("-" if t is None else f"{1e6 * t:.0f} us" for t in times)
    return f"{contest.name[:_NAME]} ({one} in one, {several} in {len(contest.unfused)})"


# The roofline of the family gives the expectation. An attention's kernel that keeps the scores of its rows
# saves two launches, and scores that are written and read twice. It costs operands that are read again for
# each tile of rows, and, where there are few tiles, idle compute units. Fusing a convolution of each channel
# by itself with the pointwise one that reads it saves a launch and the value in between, and costs weights
# that are read again for each tile. Fusing a norm with the products of its row saves their launches, and
# costs a row that each group computes again. The figures are the family's and not those measured of a device,
# which rise as kernels are measured: the expectation, and so what is tuned first, would change with them.

# Share of the local memory for scores, or a row: the rest holds results of whole rows, or of sums
_LOCAL = 0.75
_WEIGHTS, _BYTES = 6, 4  # Axes of blocked weights of all channels with all, bytes of an element
MOST = 2.0  # Ratio of the rooflines beyond which the slower alternative need not be measured
_NO_TIMES: Mapping[str, float] = MappingProxyType({})
# Seconds of a function of one kind, None for functions of another kind.
_Sort = Callable[[tirx.PrimFunc, DeviceProfile, UnitFigures], float | None]


class FusionPolicy:
    """The rule whether to fuse the functions of a chain: by recorded times of both, else by a roofline.

    See `join_functions`.
    """

    def __init__(
        self, profile: DeviceProfile, times: Mapping[str, float] = _NO_TIMES, sorts: Sequence[_Sort] = ()
    ) -> None:
        """Set up the rule.

        `times` are recorded, in seconds by task. With `sorts`, which estimate the fused function's time, only
        functions of these kinds are fused.
        """
        self._profile = profile
        self._sorts = sorts or (attention_seconds, separable_seconds, one_row_seconds)
        self._times = times
        self._seen: dict[tuple[str, ...], tuple[FusionAlternatives, FusionCandidate]] = {}

    @property
    def contests(self) -> list[tuple[FusionAlternatives, FusionCandidate]]:
        """The observed alternatives whose rooflines differ by at most MOST times, so that either may win."""
        return list(self._seen.values())

    def __call__(self, forms: FusionCandidate) -> bool:
        """Return whether to fuse these functions."""
        figures = self._profile.family.joined
        if figures is None:
            return False
        func = narrow_indices(forms.fused.func)
        found = (sort(func, self._profile, figures) for sort in self._sorts)
        together = min((seconds for seconds in found if seconds is not None), default=None)
        if together is None:
            return False
        apart = sum(_seconds(narrow_indices(one.func), self._profile, figures) for one in forms.unfused)
        pays = together < LESS * apart
        if max(together, apart) > MOST * min(together, apart):
            return pays
        contest = FusionAlternatives(
            name=forms.fused.name,
            fused=self._key(forms.fused),
            unfused=tuple(self._key(part) for part in forms.unfused),
            calls=forms.calls,
            launch=figures.launch_us * 1e-6,
            expected="joined" if pays else "apart",
        )
        key = (contest.fused, *contest.unfused)
        before = self._seen[key][0].calls if key in self._seen else 0
        self._seen[key] = replace(contest, calls=before + contest.calls), forms
        return contest.choose(self._times) == "joined"

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user on the choices that recorded times decided."""
        return describe([contest for contest, _ in self.contests], self._times)

    def _key(self, one: NamedFunction) -> str:
        return task_key(mark_constants(one.func, one.constants, self._profile))


def attention_seconds(func: tirx.PrimFunc, profile: DeviceProfile, figures: UnitFigures) -> float | None:
    """Return the expected seconds of an attention, of 32-bit indices, with its first schedule.

    Returns None where the function is no attention, or its rows do not fit.
    """
    one = attention_of(func)
    groups = _groups(func, profile, rules.attention_space) if one is not None else None
    if one is None or groups is None:
        return None
    scores = one.rows_in_all // groups * one.keys * one.element_bytes
    if scores > _LOCAL * profile.limits.local_mem_bytes:
        return None
    row_bytes = one.keys * (one.inner + one.columns) * one.element_bytes  # Keys and values of a tile of rows
    again = (groups - math.prod(one.scores.extents[: one.batches])) * row_bytes
    return _seconds(func, profile, figures, groups, again)


def separable_seconds(func: tirx.PrimFunc, profile: DeviceProfile, figures: UnitFigures) -> float | None:
    """Return the expected seconds of two convolutions as one function with its first schedule.

    The function has 32-bit indices. Returns None where it is no such pair.
    """
    groups = _groups(func, profile, rules.separable_space)
    if groups is None:
        return None
    weights = max(math.prod(map(int, one.shape)) for one in func.params if len(one.shape) == _WEIGHTS)
    return _seconds(func, profile, figures, groups, groups * weights * _BYTES)


def one_row_seconds(func: tirx.PrimFunc, profile: DeviceProfile, figures: UnitFigures) -> float | None:
    """Return the expected seconds of a norm and products of its row as one function, by its first schedule.

    Returns None where the function computes something else, or its row does not fit.
    """
    groups = _groups(func, profile, rules.one_row_space)
    one = one_row_of(func) if groups is not None else None
    if one is None or groups is None or one.terms * _BYTES > _LOCAL * profile.limits.local_mem_bytes:
        return None
    return _seconds(func, profile, figures, groups, groups * one.terms * _BYTES)


def _groups(
    func: tirx.PrimFunc,
    profile: DeviceProfile,
    space: Callable[[tirx.PrimFunc, DeviceProfile], Sequence[Schedule]],
) -> int | None:
    """Return the number of work-groups of the schedule that is first served; None where there is none."""
    budget = rules.budget(profile)
    for sketch in space(func, profile):
        for tile in starts([read(traces.to_text(sketch.trace))]):
            schedule = traces.apply(tile.text(), func)
            if budget.apply(schedule):
                return launches_of(schedule.mod["main"])[0][1]  # Blocks of a function share one launch
    return None


def _seconds(
    func: tirx.PrimFunc,
    profile: DeviceProfile,
    figures: UnitFigures,
    groups: int | None = None,
    again: int = 0,
) -> float:
    """Return the expected seconds of a function of `groups` work-groups that reads `again` bytes once more.

    None: of as many as keep all compute units busy.
    """
    units = profile.limits.compute_units
    busy = units if groups is None else groups / math.ceil(groups / units)  # Compute units, on average
    gbs = min(busy * figures.alone_gbs, units * figures.gbs)
    computing = function_flops(func) / (figures.gflops * 1e9 * busy)
    moving = (function_bytes(func) + again) / (gbs * 1e9)
    return max(computing, moving) + figures.launch_us * 1e-6
