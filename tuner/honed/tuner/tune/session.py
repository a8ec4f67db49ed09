"""One tuning run: its device, records and children, its tasks and rounds, reported as events.

An OpenCL device judges candidates, or a substitute from an extension: a bench, the boards of a farm.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from honed.jobs import events
from honed.jobs.events import Spent
from honed.machine import peaks
from honed.machine.families import DeviceFamily
from honed.machine.profile import DevicePeaks, DeviceProfile, higher_peaks
from honed.protocol.strict import copy_fields
from honed.tuner.compiler.fusion import FusionAlternatives
from honed.tuner.measure.candidate import SPARE_CORES, Begin, CandidateRunner, MeasureLimits
from honed.tuner.measure.gate import Gate
from honed.tuner.measure.measurer import DEFAULT_LIMITS, Measurer, kernel_log
from honed.tuner.records.rows import DefaultScheduleTime, MeasurementSetup, Outcome, TaskRecord
from honed.tuner.records.store import HINTS_PER_TASK, Records
from honed.tuner.setup import for_defaults, setup_for

from .children import BATCH, LoadedTask, NoSchedule, Proposals, Proposed, SearchChild, SearchFailed
from .task import (
    ModelTasks,
    TaskProgress,
    TaskState,
    TuningTask,
    finish,
    judge,
    latency,
    likely_next,
    next_task,
    settle_forms,
    two_forms_rows,
)
from .trials import TrialResult, Trials, on_candidate

Emit = Callable[[events.News], None]
Tell = Callable[[str], None]
_MOST_THREADS = 8  # A batch is too small to gain from more
_MOST_BUILDERS = 6  # Limited because each builder holds a context of the device
_PEAKS_SECONDS = 60.0  # Seconds between two measurements of the device's peaks
_BREAKS = 2  # Times a task's search may break before it is given up
_IDLE = 3  # Rounds in a row in which nothing could be tried before a task is left
_WINDOW = 8  # Candidates that are built ahead; the device is left when these are built, at the latest


class Rooflines:
    """The rooflines of tasks by the device's peaks, which rise as higher ones are measured."""

    def __init__(self, profile: DeviceProfile, again: Callable[[], DeviceProfile]) -> None:
        """Begin with a `profile` that has measured peaks; `again` measures them again."""
        self.profile = profile
        self.rates: dict[str, float] = {}  # Bytes per second by task
        self._again = again
        self._measured_at = float("-inf")

    def of(self, task: TuningTask) -> float:
        """Return the least seconds that the task can take."""
        assert self.profile.peaks is not None
        return task.roofline(self.profile.peaks, self.rates.get(task.key, 0.0))

    def note(self, progress: TaskProgress, rate: float) -> None:
        """Note that the device moved `rate` bytes/s at a task's size, and update the task's roofline."""
        self.rates[progress.task.key] = rate
        progress.roofline = self.of(progress.task)

    def take(self, new_peaks: DevicePeaks, tasks: Iterable[TaskProgress]) -> None:
        """Raise the peaks to those found, and update the rooflines where a figure rose."""
        assert self.profile.peaks is not None
        higher = higher_peaks(self.profile.peaks, new_peaks)
        if higher == self.profile.peaks:
            return
        self.profile = replace(self.profile, peaks=higher)
        for p in tasks:
            if not p.task.opaque:
                p.roofline = self.of(p.task)

    def are_doubtful(self, tasks: Iterable[TaskProgress]) -> bool:
        """Return whether some task comes so near to the peaks that they are worth measuring again."""
        return any(p.beyond for p in tasks) and time.monotonic() - self._measured_at >= _PEAKS_SECONDS

    def measure_again(self, tasks: Iterable[TaskProgress]) -> None:
        """Measure the peaks again, and keep those that are higher."""
        self._measured_at = time.monotonic()
        measured = self._again().peaks
        assert measured is not None
        self.take(measured, tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """The limits of a search, which also ends when nothing more is worth it; None: no limit."""

    trials: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class _Batch:
    """The results of the candidates of a round."""

    ranking: events.Ranking | None = None
    broke: bool = False
    way: str = ""
    last: bool = False


class TuningSession:
    """A tuner of one model. `stop` may be called from a signal handler; what was found until then is kept.

    All times are seconds at the device's reference speed (`Trials`).
    """

    def __init__(
        self,
        name: str,
        rooflines: Rooflines,
        trials: Trials,
        proposals: Proposals,
        emit: Emit,
        *,
        gate: Gate | None = None,
        trust_defaults: bool = False,
    ) -> None:
        """Set up a session.

        `name` is the model's in the records. `gate` says when the session may go on; None: always. With
        `trust_defaults`, recorded default schedules of this setup are not timed again, except for as many as
        show the present speed.
        """
        self.name = name
        self.setup = trials.setup
        self._for_defaults = for_defaults(self.setup, rooflines.profile.rules.family)
        self.records: Records = trials.records
        self.emit = emit
        self.tasks: list[TaskProgress] = []
        self.contests: Sequence[FusionAlternatives] = ()  # Alternatives between these tasks
        self.trials = 0
        self.spent = Spent()  # Spent since the search began
        self._trying = trials
        self._proposals = proposals
        self._rooflines = rooflines
        self._spent_now = Spent()  # Spent in the present round
        self._budget = SearchBudget()
        self.stopped = False  # `stop` was called, or the gate stays closed
        self._gate = gate or Gate()
        self._trust_defaults = trust_defaults
        self._started = time.monotonic()

    def stop(self) -> None:
        """End after the candidate being measured."""
        self.stopped = True

    @property
    def profile(self) -> DeviceProfile:
        """The device's profile; its peaks rise as higher ones are measured."""
        return self._rooflines.profile

    @property
    def seconds(self) -> float:
        """Seconds since the session began."""
        return time.monotonic() - self._started

    @property
    def improved(self) -> bool:
        """Return whether the records give other kernels than the model is first served with."""
        return any(p.best_trace is not None or p.extra_runs for p in self.tasks)

    def run(self, find_tasks: Callable[[], ModelTasks], budget: SearchBudget) -> None:
        """Time the default schedules of the tasks found, then search until the budget or the gain ends."""
        self._budget = budget
        with self._trying:
            self.records.quarantine_abandoned()
            if self._may_go_on():
                self._extract(find_tasks)
                self._time_defaults()
                while budget.trials == 0 and self._time_rival():
                    pass
                self._doubt_peaks([p for p in self.tasks if p.stage is TaskState.TUNING])
                self._judge()
            self.emit(copy_fields(events.TasksFound, self.table()))
            if self.tasks and not self._is_spent():
                self._note_start()
            cut = self._search()
            self._condemn(settle=True)
            finish(self.tasks, cut=cut)

    def _search(self) -> bool:
        """Run rounds until none is worth it; return whether the budget or `stop` ended them before that."""
        while not self._is_spent():
            progress = next_task(self.tasks)
            if progress is not None:
                self._round(progress)
            if not self._is_spent() and not self._time_rival() and progress is None:
                return False
        return True

    def _extract(self, find_tasks: Callable[[], ModelTasks]) -> None:
        self.emit(events.Stage(stage="extract", fraction=0.0, text="extract the tasks"))
        self._gate.leave()
        all_ = find_tasks()
        self.contests = all_.contests
        self.tasks += [TaskProgress(task=task, roofline=self._rooflines.of(task)) for task in all_.tasks]
        for task in all_.opaque:
            progress = TaskProgress(task=task, roofline=0.0)
            progress.skip(task.opaque)
            self.tasks.append(progress)
        self.records.put_model(
            self.name,
            {_task_row(task): task.weight for task in all_.tasks if task.weight},
            [_task_row(task) for task in all_.tasks if not task.weight],
        )

    def _time_defaults(self) -> None:
        """Time the default schedules that the model is first served with, and take up recorded results.

        Rivals only get recorded times here: they are timed later, one at a time.
        """
        known = self.records.defaults(self._for_defaults)
        for rival in (p for p in self.tasks if not p.task.weight):
            self._trusts(rival, known.get(rival.task.key))
        live = [p for p in self.tasks if p.stage is TaskState.TUNING and p.task.weight]
        trusted = known if self._trust_defaults else {}
        # Unknown ones must be timed; of the others, those that matter most are timed again.
        live.sort(key=lambda p: -p.task.weight * _seconds(trusted.get(p.task.key)))
        for n, progress in enumerate(live):
            if not self._may_go_on():
                break
            if self._trying.knows_speed and self._trusts(progress, trusted.get(progress.task.key)):
                continue
            text = f"time default schedule {n + 1} of {len(live)}: {progress.task.name}"
            self.emit(events.Stage(stage="baseline", fraction=n / len(live), text=text))
            following = [p.task for p in live[n + 1 :] if p.task.key not in trusted]
            self._time_one(progress, following, last=n == len(live) - 1)
        self._trying.settle_speed()
        self._condemn()

    def _time_rival(self) -> bool:
        """Time the default schedule of a task that is not run as first served; False where none is left."""
        waiting = [
            p for p in self.tasks if not p.task.weight and p.default is None and p.stage is TaskState.TUNING
        ]
        if not waiting or not self._may_go_on():
            return False
        self._time_one(max(waiting, key=lambda p: p.roofline), [], last=False)
        self._judge()
        return True

    def _time_one(self, progress: TaskProgress, following: Sequence[TuningTask], *, last: bool) -> None:
        """Time a default schedule, or give the task up."""
        while progress.default is None and progress.stage is TaskState.TUNING:
            try:
                self._time_default(progress, following, last=last)
            except SearchFailed as broke:
                self._record_break(progress, f"its default schedule cannot be made: {broke}", broke)
        self._gate.leave()

    def _time_default(self, progress: TaskProgress, following: Sequence[TuningTask], *, last: bool) -> None:
        """Time a default schedule, while those of the `following` tasks are made."""
        self._trying.unload()
        made = self._proposals.default(progress.task, following)
        self._take_up(progress, made.loaded)
        trial = self._trying.default(made.candidate)
        while last and self._trying.wants_yardsticks and trial.seconds is not None:
            trial = self._trying.default(made.candidate)
        if trial.seconds is None:
            verdict = trial.verdict
            progress.lose(f"its default schedule is not right ({verdict.outcome}: {verdict.reason})")
            return
        key = progress.task.key
        default = DefaultScheduleTime(seconds=trial.seconds, rate=self._rooflines.rates[key])
        self.records.put_default(key, self._for_defaults, default)
        self._take_default(progress, trial.seconds)

    def _trusts(self, progress: TaskProgress, recorded: DefaultScheduleTime | None) -> bool:
        """Use a default schedule's time from the records, where they hold all that is needed."""
        if recorded is None or recorded.rate is None:
            return False
        self._rooflines.note(progress, recorded.rate)
        self._take_default(progress, recorded.seconds)
        return True

    def _take_default(self, progress: TaskProgress, seconds: float) -> None:
        progress.default = seconds
        progress.record_time(seconds, None)
        self._recall(progress)

    def _recall(self, progress: TaskProgress) -> None:
        """Use the best recorded schedule, where it is better."""
        best = self.records.best(progress.task.key, self.setup)
        if best is not None and best.timing is not None:
            progress.record_time(best.timing.fair_s, best.trace)
        progress.hinted = self._proposals.has_hints(progress.task)

    def _take_up(self, progress: TaskProgress, loaded: LoadedTask) -> None:
        """Have the measuring child load a task unless it has."""
        if self._trying.workload is None or self._trying.workload.task != progress.task.key:
            self._trying.load(loaded.workload)
            self._rooflines.note(progress, self._trying.measurer.rate)

    def _doubt_peaks(self, tasks: Sequence[TaskProgress]) -> None:
        """Measure the peaks again where a task comes so near to them, or beyond, that they may be too low."""
        self._rooflines.take(self._trying.measurer.peaks, self.tasks)
        if self._rooflines.are_doubtful(tasks) and self._may_go_on():
            self._rooflines.measure_again(self.tasks)

    def _note_start(self) -> None:
        """Record the first version of the model's history."""
        if not self.records.versions(self.name):
            known = any(p.best_trace is not None for p in self.tasks)
            why = "the best schedules recorded before" if known else "default schedules"
            self.records.add_version(self.name, why, None)
        self._note_progress(0)

    def _round(self, progress: TaskProgress) -> None:
        """Measure one batch of a task's candidates."""
        began, before, made = time.monotonic(), progress.best, self.trials
        searched, self._spent_now = self._proposals.seconds, Spent()
        batch = self._batch(progress)
        self._condemn()
        self._doubt_peaks([progress])
        if batch.broke:
            progress.rounds += 1  # A broken round says nothing about the gain of the next
        else:
            progress.end_round(before, time.monotonic() - began, last=batch.last)
        spent = self._spent_now + Spent(search=self._proposals.seconds - searched)
        self.spent += spent
        self._judge()
        self._note_progress(self.trials - made)
        allowed = self._budget.seconds
        self.emit(
            copy_fields(
                events.Round,
                self.table(),
                round=sum(p.rounds for p in self.tasks),
                task=progress.task.key,
                way=batch.way,
                spent=spent.round_times(),
                ranking=batch.ranking,
                trials=self.trials,
                seconds=self.seconds,
                seconds_left=None if allowed is None else max(0.0, allowed - self.seconds),
            )
        )

    def _batch(self, progress: TaskProgress) -> _Batch:
        """Have candidates proposed, try them, and have the search learn of it."""
        batch, made = _Batch(), self.trials
        try:
            self._gate.leave()
            proposed = self._proposals.next(progress)
            batch.way, batch.last = str(proposed.way), proposed.last
            self._take_up(progress, proposed.loaded)
            self._proposals.begin(likely_next(self.tasks, progress))
            results = self._measure(progress, proposed)
            self._proposals.settle()
            if results:
                batch.ranking = self._proposals.learn(progress.task, results)
            tried = self.trials > made or self._is_spent()
            progress.idle = 0 if tried else progress.idle + 1
            if not proposed.entries or progress.idle >= _IDLE:
                progress.exhaust()
        except SearchFailed as error:
            self._trying.unload()
            batch.broke = True
            self._record_break(progress, f"its search ended: {error}", error)
        return batch

    def _note_progress(self, trials: int) -> None:
        """Record the model's estimated latency after `trials` more trials, for its history."""
        self.records.add_progress(self.name, trials, latency(self.tasks).now_us * 1e-6)

    def _record_break(self, progress: TaskProgress, reason: str, broke: SearchFailed) -> None:
        progress.breaks += 1
        progress.failures["compiler"] += 1
        self.emit(events.SearchCrashed(task=progress.task.key, reason=reason))
        if progress.breaks >= _BREAKS or isinstance(broke, NoSchedule):
            progress.lose(reason)

    def _measure(self, progress: TaskProgress, proposed: Proposed) -> dict[str, float | None]:
        """Try the proposed candidates; return seconds by id, None for refused ones."""
        entries, way = proposed.entries, proposed.way
        results: dict[str, float | None] = {}
        for n, entry in enumerate(entries):
            if self._is_spent():
                break
            if entry.candidate is None:
                results[entry.id] = None
                self._count_filtered(progress, entry.refused)
                continue
            self._trying.build([(e.candidate, e.trace) for e in entries[n : n + _WINDOW] if e.candidate])
            following = ((e.candidate, e.trace) for e in entries[n + 1 :] if e.candidate)
            for candidate, trace in islice(following, self._ahead()):
                self._trying.prepare(candidate, trace, way)
            began = time.monotonic()
            trial = self._trying.measure(entry.candidate, entry.trace, way, progress.best)
            self._spent_now += on_candidate(self._trying.measurer.spent, time.monotonic() - began)
            self._gate.leave()
            if trial is None:
                continue
            results[entry.id] = trial.seconds
            if not trial.ran:
                self._count_filtered(progress, trial.verdict.reason)
                continue
            if trial.seconds is not None:
                progress.record_time(trial.seconds, entry.trace)
            self._tell(progress, trial)
        self._trying.withdraw()
        return results

    def _ahead(self) -> int:
        """Return how many candidates may be prepared beside the next; the budget of trials bounds them."""
        ahead, allowed = self._trying.measurer.ahead, self._budget.trials
        return ahead if allowed is None else max(0, min(ahead, allowed - self.trials - 1))

    def _count_filtered(self, progress: TaskProgress, reason: str) -> None:
        """Count a candidate that was refused before the device saw it; it is no trial."""
        progress.filtered[reason] += 1
        self.emit(events.Filtered(task=progress.task.key, reason=reason))

    def _condemn(self, *, settle: bool = False) -> None:
        """Drop schedules that were judged right but have since turned out to have faulted."""
        by_key = {p.task.key: p for p in self.tasks}
        for one, reason in self._trying.take_condemned(settle=settle):
            progress = by_key[one.task]
            self.emit(events.CandidateCondemned(task=one.task, reason=reason))
            if one.trace is None:
                progress.lose(f"its default schedule faulted: {reason}")
                continue
            progress.failures[str(Outcome.FAULT)] += 1
            if progress.best_trace == one.trace:
                progress.forget_best()
                self._recall(progress)

    def _tell(self, progress: TaskProgress, trial: TrialResult) -> None:
        verdict, seconds = trial.verdict, trial.seconds
        self.trials += 1
        progress.trials += 1
        if verdict.outcome is not Outcome.RIGHT:
            progress.failures[str(verdict.outcome)] += 1
        self.emit(
            events.Trial(
                task=progress.task.key,
                outcome=str(verdict.outcome),
                reason=verdict.reason,
                us=None if seconds is None else seconds * 1e6,
                best_us=None if progress.best is None else progress.best * 1e6,
            )
        )

    def _is_spent(self) -> bool:
        budget = self._budget
        out_of_time = budget.seconds is not None and self.seconds >= budget.seconds
        out_of_trials = budget.trials is not None and self.trials >= budget.trials
        return out_of_time or out_of_trials or not self._may_go_on()

    def _may_go_on(self) -> bool:
        if not self.stopped and not self._gate.enter():
            self.stopped = True
        return not self.stopped

    def table(self) -> events.TaskTable:
        """Return every task as a row, and the model's estimated latency."""
        rows = sorted(self.tasks, key=lambda p: -p.cost)
        return events.TaskTable(
            tasks=tuple(p.row() for p in rows),
            model=latency(self.tasks),
            forms=two_forms_rows(self.tasks, self.contests),
        )

    def _judge(self) -> None:
        """Decide by present times which variants are compiled and which tasks are worth tuning."""
        settle_forms(self.tasks, self.contests)
        judge(self.tasks)


def _seconds(default: DefaultScheduleTime | None) -> float:
    return math.inf if default is None or default.rate is None else default.seconds


def _task_row(task: TuningTask) -> TaskRecord:
    return TaskRecord(workload=task.key, name=task.name, flops=float(task.flops), bytes=float(task.bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The work that a search does beside timing, and its threads and processes."""

    ahead: bool  # The next batch is made, and the next candidates are built, while others are timed
    threads: int  # Threads of the search
    builders: int  # Children that build ahead


def sharing(family: DeviceFamily, cores: int) -> Sharing:
    """Return how a search shares the processor with a device of a family, on `cores` usable cores.

    Beside a GPU the processor is idle except for one core that feeds the GPU. Where the device is the
    processor, work that runs ahead takes one thread; with too few cores for that, it runs before and may use
    all of them. Whole batches are built there before they are timed, on all cores. Where a driver is not
    known to keep the builds of other processes, only the measuring child builds for it.
    """
    if family.processor:
        ahead = cores >= SPARE_CORES
        return Sharing(ahead=ahead, threads=1 if ahead else cores, builders=min(_MOST_BUILDERS, cores))
    threads = max(1, min(_MOST_THREADS, cores - 1))
    builders = max(1, min(_MOST_BUILDERS, cores - 2)) if family.keeps_builds else 0
    return Sharing(ahead=True, threads=threads, builders=builders)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementBackend:
    """A backend that judges candidates.

    `profile` has peaks; `peaks_again` measures them again, `keep_peaks` stores those that rose.

    `spec` is the device's, None where it is not on this machine. Without `answers` nothing runs, times are
    predicted, and answers are not looked at. `yardstick` is that of the reference speed in seconds; None: it
    is to be measured. `batch` is how many candidates are proposed at once.
    """

    spec: str | None
    answers: bool = True
    profile: DeviceProfile
    measurer: Callable[[Begin], CandidateRunner]
    peaks_again: Callable[[], DeviceProfile]
    keep_peaks: Callable[[DeviceProfile], None]
    sharing: Sharing
    yardstick: float | None = None
    batch: int = BATCH


OpenInstrument = Callable[[Tell], MeasurementBackend]


def on_device(
    device: str | None, cache_dir: Path, tell: Tell, limits: MeasureLimits = DEFAULT_LIMITS
) -> MeasurementBackend:
    """Return an instrument on the device of a spec, or on the best device there is if the spec is None.

    `limits` bound each measurement. Raises DeviceError where there is no device.
    """
    log = kernel_log(tell)
    found = peaks.survey(device, cache_dir)
    profile = found.require_peaks()
    beside = sharing(profile.family, len(os.sched_getaffinity(0)))
    return MeasurementBackend(
        spec=found.spec,
        profile=profile,
        measurer=lambda begin: Measurer(
            found.spec, profile, limits, kernel_log=log, begin=begin, builders=beside.builders
        ),
        peaks_again=lambda: peaks.survey(found.spec, cache_dir, again=True).require_peaks(),
        keep_peaks=lambda raised: peaks.keep_higher(raised, cache_dir),
        sharing=beside,
    )


class SessionResources:
    """The device or bench, records and children of a session: a context manager, which ends them all."""

    def __init__(
        self,
        name: str,
        open_instrument: OpenInstrument,
        *,
        records: Path,
        cache_dir: Path,
        seed: int,
        emit: Emit,
        gate: Gate | None = None,
        trust_defaults: bool = False,
        hints: int = HINTS_PER_TASK,
    ) -> None:
        """Open the instrument and the records, and set up the session.

        `name` is the model's in the records; `gate` and `trust_defaults` are the session's. At most `hints`
        of a hub are tried for a task in a day. Raises DeviceError where there is no device, bench or board,
        and the errors of `Records.open`.
        """
        emit(events.Stage(stage="extract", fraction=0.0, text="look at the device"))
        instrument = open_instrument(lambda text: emit(events.Note(text=text)))
        self.spec, self._keep_peaks, self.instrument = instrument.spec, instrument.keep_peaks, instrument
        self.profile = profile = instrument.profile
        setup = setup_for(profile.identity)
        self.records = _open_records(records, setup, instrument.yardstick, emit)
        self.search = SearchChild(
            profile,
            cache_dir / "cost-models" / f"{setup.device_key[:16]}.npz",
            seed,
            batch=instrument.batch,
            answers=instrument.answers,
            threads=instrument.sharing.threads,
        )
        trials = Trials(instrument.measurer, self.records, setup)
        self.session = TuningSession(
            name,
            Rooflines(profile, instrument.peaks_again),
            trials,
            Proposals(self.search, self.records, setup, ahead=instrument.sharing.ahead, hints=hints),
            emit,
            gate=gate,
            trust_defaults=trust_defaults,
        )

    def __enter__(self) -> SessionResources:
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_peaks(self.session.profile)
        self.search.close()
        self.records.close()


def _open_records(path: Path, setup: MeasurementSetup, yardstick: float | None, emit: Emit) -> Records:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = Records.open(path)
    if yardstick is not None:
        records.keep_yardstick(setup, yardstick)
    for note in records.notes:
        emit(events.Note(text=note))
    return records
