"""Which of a model's tasks run where its work has two forms, by the times known now. No I/O, no clocks.

What a session estimates and tunes is thus of the forms that compiling with its records takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from honed.jobs.events import Form, TwoFormsRow
from honed.tuner.contest import LESS, Contest, other

from .task import TaskProgress


def settle(tasks: Sequence[TaskProgress], contests: Sequence[Contest]) -> None:
    """Give each task the runs it has in the forms taken, and those it would have in the others.

    A form that would be no faster at its rooflines is no rival.
    """
    seconds = _seconds(tasks)
    least = {p.task.key: p.roofline for p in tasks}
    moved, rival = Counter[str](), Counter[str]()
    for one in contests:
        taken = one.taken(seconds)
        if taken != one.expected:
            moved.update(_runs(one, taken))
            moved.subtract(_runs(one, one.expected))
        now, reachable = one.times(seconds).of(taken), one.times(least).of(other(taken))
        if now is not None and reachable is not None and reachable < LESS * now:
            rival.update(_runs(one, other(taken)))
    for p in tasks:
        p.moved, p.rival = moved[p.task.key], rival[p.task.key]


def lost_by_forms(forms: Iterable[TwoFormsRow], served: Collection[str]) -> float:
    """Microseconds that an inference takes more as tasks are `served` than in the forms taken now."""
    whole = 0.0
    for one in forms:
        taken, left = one.joined_us, one.apart_us
        keys: tuple[str, ...] = one.apart
        if one.taken == "apart":
            taken, left, keys = left, taken, (one.joined,)
        if taken is not None and left is not None and all(key in served for key in keys):
            whole += one.calls * max(0.0, left - taken)
    return whole


def _runs(contest: Contest, form: Form) -> dict[str, int]:
    """Of each task of a form in one inference."""
    return {key: contest.calls * n for key, n in Counter(contest.keys(form)).items()}


def rows(tasks: Sequence[TaskProgress], contests: Sequence[Contest]) -> tuple[TwoFormsRow, ...]:
    """What a table shows of both forms."""
    seconds = _seconds(tasks)
    return tuple(
        TwoFormsRow(
            name=one.name,
            joined=one.joined,
            apart=one.apart,
            calls=one.calls,
            taken=one.taken(seconds),
            joined_us=_microseconds(one.times(seconds).joined),
            apart_us=_microseconds(one.times(seconds).apart),
        )
        for one in contests
    )


def _seconds(tasks: Sequence[TaskProgress]) -> dict[str, float]:
    """Of the tasks that were timed."""
    return {p.task.key: p.best for p in tasks if p.best is not None}


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds
