"""A model's tuning tasks and the results of each. No I/O, no clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from honed.jobs.events import Estimate, FusionChoice, FusionRow, TaskRow
from honed.machine.profile import DevicePeaks, Figure, is_lower_bound, launch_seconds, peak_gbs, peak_gflops
from honed.protocol.strict import copy_fields
from honed.tuner.compiler.fusion import LESS, FusionAlternatives, other

# A task below this share of the model's time could be free without a noticeable gain.
SMALL = 0.002
# Within this factor of what the device's peaks allow, a better schedule has nothing left to win.
AT_ROOFLINE = 1.15
# The share of the expected gain that remains after a round that won nothing and in which only the best
# schedule was left to try: as after two other rounds without gain.
_EXHAUSTED = 0.25
# The gain that kernels may still have over a peak that one of them has raised, or that was measured on a busy
# machine; more than AT_ROOFLINE, so that the task of that very kernel is not ended by its own record.
UNKNOWN_ABOVE = 1.25
# Weight of a run in the alternative not compiled: the chance that it becomes the faster one.
_CHANCE = 0.1


class TaskState(StrEnum):
    """The state of a task."""

    TUNING = "tuning"
    TUNED = "tuned"  # The search ended: no further gain is expected
    SKIPPED = "skipped"  # Excluded from tuning for a stated reason
    FAILED = "lost"  # The search broke for a stated reason; earlier results count


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """A workload of a model. `weight` is how often one inference runs it as the model is first served."""

    key: str
    name: str
    weight: int
    flops: int
    bytes: int
    dtype: str  # The type of its arithmetic
    opaque: str  # Reason why it cannot be tuned; empty where it can
    outputs: int = 1  # Number of its function's last parameters that are outputs
    constants: tuple[int, ...] = ()  # Parameters that may be packed before an inference

    def roofline(self, peaks: DevicePeaks, rate: float = 0.0) -> float:
        """Return the least seconds that the device's peaks and an empty kernel's time allow.

        `rate` is the observed rate at the task's size, in bytes per second. A peak of which only a lower
        bound is known may be UNKNOWN_ABOVE times as high.
        """
        half = self.dtype == "float16"
        figure: Figure = "fp16_gflops" if half and peaks.fp16_gflops else "fp32_gflops"
        arithmetic = peak_gflops(peaks, half=half) * _headroom(peaks, figure) * 1e9
        memory = peak_gbs(peaks, self.bytes) * _headroom(peaks, "bandwidth_gbs") * 1e9
        work = max(self.flops / arithmetic, self.bytes / max(rate, memory))
        return work + launch_seconds(peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTasks:
    """A model's tasks, those that cannot be tuned (`opaque`), and the alternatives between tasks."""

    tasks: tuple[TuningTask, ...]
    opaque: tuple[TuningTask, ...] = ()
    contests: tuple[FusionAlternatives, ...] = ()


def _headroom(peaks: DevicePeaks, figure: Figure) -> float:
    return UNKNOWN_ABOVE if is_lower_bound(peaks, figure) else 1.0


@dataclass(kw_only=True)
class TaskProgress:
    """The results of tuning one task so far; seconds throughout."""

    task: TuningTask
    roofline: float
    stage: TaskState = TaskState.TUNING
    reason: str = ""
    default: float | None = None
    best: float | None = None
    best_trace: str | None = None  # The best schedule; None for the default one
    trials: int = 0
    filtered: Counter[str] = field(default_factory=Counter)  # Refused before they ran, by reason
    rounds: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    small: bool = False  # Skipped as too small; it may matter once others get faster
    rate: float = 0.5  # Share of the time that a round is expected to take off
    round_seconds: float = 10.0
    extra_runs: int = 0  # Additional (or fewer) runs in the alternatives compiled now
    alternative_runs: int = 0  # Additional runs in the alternatives not compiled
    breaks: int = 0  # Times its search broke
    idle: int = 0  # Rounds in a row in which nothing could be tried
    hinted: bool = False  # Records of other boards exist, which the first round tries

    @property
    def weight(self) -> int:
        """Runs of the task in one inference now."""
        return self.task.weight + self.extra_runs

    @property
    def cost(self) -> float:
        """Seconds of one inference that the task takes."""
        return self.weight * (self.best or 0.0)

    @property
    def expected_gain(self) -> float:
        """Seconds of one inference that the next round is expected to win, per second spent on it."""
        if self.stage is not TaskState.TUNING or self.best is None:
            return 0.0
        reachable = max(self.roofline, self.best * (1 - self.rate))
        runs = self.weight + _CHANCE * self.alternative_runs
        return runs * max(self.best - reachable, 0.0) / self.round_cost

    @property
    def round_cost(self) -> float:
        """Seconds that its next round is expected to take."""
        return max(self.round_seconds, 0.1)

    def skip(self, reason: str) -> None:
        """Exclude the task from tuning."""
        self.stage, self.reason = TaskState.SKIPPED, reason

    def lose(self, reason: str) -> None:
        """Note that the task's search broke."""
        self.stage, self.reason = TaskState.FAILED, reason

    def exhaust(self) -> None:
        """Note that nothing more can be tried."""
        if self.trials or self.best_trace is not None:
            self.stage = TaskState.TUNED
        elif self.filtered:
            reason, _ = self.filtered.most_common(1)[0]
            self.skip(f"none of its {self.filtered.total()} candidates could be tried: {reason}")
        else:
            self.skip("no schedule but the default one was found")

    def record_time(self, seconds: float, trace: str | None) -> None:
        """Note that a right candidate took `seconds`."""
        if self.best is None or seconds < self.best:
            self.best, self.best_trace = seconds, trace

    def forget_best(self) -> None:
        """Return to the default schedule, because the best known one must not be used after all."""
        self.best, self.best_trace = self.default, None

    @property
    def beyond(self) -> bool:
        """Return whether the task is so near its roofline, or beyond, that the peaks are in doubt."""
        return self.best is not None and self.best <= AT_ROOFLINE * self.roofline

    def end_round(self, before: float | None, seconds: float, *, last: bool = False) -> None:
        """Update the expected gain after a round that began with the best time `before`.

        `last`: nothing beside the best was left to try.
        """
        self.rounds += 1
        self.round_seconds = seconds if self.rounds == 1 else 0.5 * (self.round_seconds + seconds)
        won = 0.0 if not before or self.best is None else max(0.0, 1 - self.best / before)
        self.rate = (_EXHAUSTED if last and not won else 0.5) * self.rate + 0.5 * won

    def row(self) -> TaskRow:
        """Return the task's row for a table."""
        best = self.best
        return copy_fields(
            TaskRow,
            self.task,
            task=self.task.key,
            weight=self.weight,
            roofline_us=self.roofline * 1e6,
            default_us=_microseconds(self.default),
            best_us=_microseconds(best),
            gflops=None if not best else self.task.flops / best / 1e9,
            roofline_share=None if not best else self.roofline / best,
            trials=self.trials,
            filtered=self.filtered.total(),
            failures=dict(self.failures),
            state=str(self.stage),
            reason=self.reason,
        )


def judge(tasks: list[TaskProgress]) -> None:
    """Skip tasks not worth tuning, once every default schedule was timed, and again as times change."""
    whole = sum(p.cost for p in tasks)
    for p in tasks:
        if p.best is None or not (p.small or (p.stage is TaskState.TUNING and not p.rounds)):
            continue
        cost = (p.weight + p.alternative_runs) * p.best
        p.small = cost < SMALL * whole
        if p.small and not p.weight + p.alternative_runs:
            p.skip("of a form that is not taken, and would be no faster at its roofline")
        elif p.small:
            p.skip(f"too small to matter: {100 * cost / whole:.2g} % of the model's time")
        elif p.beyond:
            p.skip("already at its roofline")
        else:
            p.stage, p.reason = TaskState.TUNING, ""


def latency(tasks: list[TaskProgress]) -> Estimate:
    """Return the model's estimated latency, before tuning and now (in µs)."""
    before = sum(p.task.weight * (p.default if p.default is not None else p.best or 0.0) for p in tasks)
    return Estimate(before_us=before * 1e6, now_us=sum(p.cost for p in tasks) * 1e6)


def headroom(tasks: list[TaskProgress]) -> float:
    """Share of the model's time above the rooflines of its tasks, 0 to 1."""
    whole = sum(p.cost for p in tasks)
    least = sum(p.weight * min(p.roofline, p.best) for p in tasks if p.best is not None)
    return max(0.0, 1.0 - least / whole) if whole else 0.0


def headrooms(tasks: list[TaskProgress]) -> dict[str, float]:
    """Return, by key, each timed task's share of its time above its roofline."""
    return {p.task.key: max(0.0, 1.0 - p.roofline / p.best) for p in tasks if p.best}


# A round that is expected to win less than this share of the model's time, per round, is not worth it.
WORTH = 0.002
CUT = "the time or trials allowed ended before its turn"
_NOT_WORTH = f"a round of it would win less than {100 * WORTH:g} % of the model's time"


def next_task(tasks: list[TaskProgress]) -> TaskProgress | None:
    """Return the task whose next round is expected to win most per second; None where none is worth it.

    Tasks that have hints come before any search.
    """
    hinted = [p for p in tasks if p.hinted and not p.rounds and p.stage is TaskState.TUNING and p.cost]
    if hinted:
        return max(hinted, key=lambda p: p.cost)
    least = WORTH * sum(p.cost for p in tasks)
    worthy = [p for p in tasks if p.expected_gain > 0 and p.expected_gain * p.round_cost >= least]
    return max(worthy, key=lambda p: p.expected_gain, default=None)


def likely_next(tasks: list[TaskProgress], present: TaskProgress) -> TaskProgress | None:
    """Return the task whose turn comes if the present round, of `present`, wins nothing."""
    after = replace(present, rate=0.5 * present.rate, rounds=present.rounds + 1)
    found = next_task([after if p is present else p for p in tasks])
    return present if found is after else found


def finish(tasks: list[TaskProgress], *, cut: bool) -> None:
    """Mark tried tasks as tuned; `cut`: limits of time or trials, or a user, ended the search."""
    for p in tasks:
        if p.stage is TaskState.TUNING:
            if p.trials:
                p.stage = TaskState.TUNED
            elif p.rounds:
                p.exhaust()
            else:
                p.skip(CUT if cut else _NOT_WORTH)


# A session estimates and tunes that of two alternatives which compiling with its records chooses.


def settle_forms(tasks: Sequence[TaskProgress], contests: Sequence[FusionAlternatives]) -> None:
    """Set each task's runs in the compiled alternatives, and in the others.

    An alternative that would be no faster at its rooflines is no rival.
    """
    seconds = _seconds(tasks)
    least = {p.task.key: p.roofline for p in tasks}
    moved, rival = Counter[str](), Counter[str]()
    for one in contests:
        taken = one.choose(seconds)
        if taken != one.expected:
            moved.update(_runs(one, taken))
            moved.subtract(_runs(one, one.expected))
        now, reachable = one.time(taken, seconds), one.time(other(taken), least)
        if now is not None and reachable is not None and reachable < LESS * now:
            rival.update(_runs(one, other(taken)))
    for p in tasks:
        p.extra_runs, p.alternative_runs = moved[p.task.key], rival[p.task.key]


def loss_by_choices(forms: Iterable[FusionRow], served: Collection[str]) -> float:
    """Return how many µs longer an inference takes as tasks are `served` than with the best alternatives."""
    whole = 0.0
    for one in forms:
        taken, left = one.joined_us, one.apart_us
        keys: tuple[str, ...] = one.apart
        if one.taken == "apart":
            taken, left, keys = left, taken, (one.joined,)
        if taken is not None and left is not None and all(key in served for key in keys):
            whole += one.calls * max(0.0, left - taken)
    return whole


def _runs(contest: FusionAlternatives, form: FusionChoice) -> dict[str, int]:
    """Return how often each task of a variant runs in one inference."""
    return {key: contest.calls * n for key, n in Counter(contest.keys(form)).items()}


def two_forms_rows(
    tasks: Sequence[TaskProgress], contests: Sequence[FusionAlternatives]
) -> tuple[FusionRow, ...]:
    """Return the rows of a table that compares both variants of each contest."""
    seconds = _seconds(tasks)
    return tuple(
        FusionRow(
            name=one.name,
            joined=one.fused,
            apart=one.unfused,
            calls=one.calls,
            taken=one.choose(seconds),
            joined_us=_microseconds(one.time("joined", seconds)),
            apart_us=_microseconds(one.time("apart", seconds)),
        )
        for one in contests
    )


def _seconds(tasks: Sequence[TaskProgress]) -> dict[str, float]:
    """Return the best seconds of the tasks that were timed."""
    return {p.task.key: p.best for p in tasks if p.best is not None}


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds
