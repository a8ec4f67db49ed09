"""One tuning run: tasks, rounds, verdicts and records, told as events while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime.errors import AlreadyExists, HonedError
from honed.runtime.kernellog import Reader
from honed.runtime.profile import DeviceProfile
from honed.tuner import records as kept
from honed.tuner.measure.candidate import Candidate, Outcome, Verdict, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records import Records
from honed.tuner.records.rows import sha256

from .search_child import Entry, SearchBroke, SearchChild
from .task import Progress, Stage, Task, finish, judge, latency, next_task

Emit = Callable[[dict[str, Any]], None]
_BREAKS = 2  # times a task's search may break before it is given up

_OUTCOMES = {
    Outcome.BUILD: kept.Outcome.NOT_BUILT,
    Outcome.BARRIER: kept.Outcome.NOT_BUILT,
    Outcome.MEMORY: kept.Outcome.NOT_RUN,
    Outcome.RUN: kept.Outcome.NOT_RUN,
    Outcome.DEADLINE: kept.Outcome.NOT_RUN,
    Outcome.CRASH: kept.Outcome.NOT_RUN,
    Outcome.IMPOSSIBLE: kept.Outcome.IMPOSSIBLE,
    Outcome.FAULT: kept.Outcome.FAULTED,
    Outcome.UNWRITTEN: kept.Outcome.WRONG,
    Outcome.OUT_OF_BOUNDS: kept.Outcome.WRONG,
    Outcome.WRONG: kept.Outcome.WRONG,
    Outcome.RIGHT: kept.Outcome.RIGHT,
}
# What may have harmed the device once is not tried again.
_QUARANTINED = {Outcome.DEADLINE, Outcome.FAULT, Outcome.OUT_OF_BOUNDS, Outcome.CRASH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When to stop, besides when nothing more is worth it; None: no limit."""

    trials: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is tuned."""

    path: Path
    name: str
    shapes: Mapping[str, tuple[int, ...]]
    precision: str


class Session:
    """Tunes one model. `stop` may be called from a signal handler; what was found until then is kept."""

    def __init__(
        self,
        model: Model,
        setup: kept.Setup,
        spec: str,
        profile: DeviceProfile,
        records: Records,
        search: SearchChild,
        emit: Emit,
        kernel_log: Reader | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`profile` must hold measured peaks."""
        self.model = model
        self.setup = setup
        self.records = records
        self.search = search
        self.emit = emit
        self.clock = clock
        self.profile = profile
        self.measurer = Measurer(spec, profile, kernel_log=kernel_log, begin=self._begin)
        self.tasks: list[Progress] = []
        self.trials = 0
        self._outputs: dict[str, int] = {}
        self._breaks: dict[str, int] = {}
        self._traces: dict[str, str] = {}  # by candidate id, of the loaded task
        self._flight: dict[str, int] = {}  # record ids by candidate id
        self._workload: Workload | None = None
        self._stopping = False
        self._started = clock()

    def stop(self) -> None:
        """End after the candidate being measured."""
        self._stopping = True

    @property
    def seconds(self) -> float:
        """Since the session began."""
        return self.clock() - self._started

    def run(self, budget: Budget) -> None:
        """Extract the tasks, time their default schedules, then search until the budget or the gain ends."""
        with self.measurer:
            self.records.abandoned()
            self._extract()
            self._time_defaults()
            judge(self.tasks)
            self.emit({"event": "tasks", **self.table()})
            if not self._spent(budget):
                self._note_progress(0)
            while not self._spent(budget):
                progress = next_task(self.tasks)
                if progress is None:
                    break
                self._round(progress, budget)
            finish(self.tasks)

    def _extract(self) -> None:
        self.emit({"event": "stage", "stage": "extract", "fraction": 0.0, "text": "extract the tasks"})
        found, opaque = self.search.extract(self.model.path, self.model.shapes, self.model.precision)
        assert self.profile.peaks is not None
        for task, outputs in found:
            self._outputs[task.key] = outputs
            self.tasks.append(Progress(task=task, roofline=task.roofline(self.profile.peaks)))
        for task in opaque:
            progress = Progress(task=task, roofline=0.0)
            progress.skip(task.opaque)
            self.tasks.append(progress)
        weighted = {_task_row(p.task): p.task.weight for p in self.tasks if not p.task.opaque}
        self.records.put_model(self.model.name, weighted)

    def _time_defaults(self) -> None:
        """Time every task's default schedule, and take up what the records know of it."""
        live = [p for p in self.tasks if p.stage is Stage.TUNING]
        for n, progress in enumerate(live):
            if self._stopping:
                break
            text = f"time default schedule {n + 1} of {len(live)}: {progress.task.name}"
            self.emit({"event": "stage", "stage": "baseline", "fraction": n / len(live), "text": text})
            try:
                self._take_up(progress)
                verdict = self.measurer.measure(self.search.default())
            except SearchBroke as broke:
                progress.lose(f"its default schedule cannot be made: {broke}")
                continue
            if verdict.timing is None:
                progress.lose(f"its default schedule is not right ({verdict.outcome}: {verdict.reason})")
                continue
            progress.default = verdict.timing.median
            progress.found(verdict.timing.median, None)
            best = self.records.best(progress.task.key, self.setup)
            if best is not None and best.timing is not None:
                progress.found(best.timing.median_s, best.trace)

    def _take_up(self, progress: Progress) -> None:
        self._workload = self.search.load(progress.task, self._outputs[progress.task.key])
        self._traces = {}
        self.measurer.load(self._workload)

    def _round(self, progress: Progress, budget: Budget) -> None:
        """Measure one batch of a task's candidates."""
        began, before, made = self.clock(), progress.best, self.trials
        ranking = None
        try:
            if self._workload is None or self._workload.task != progress.task.key or not self.search.pid:
                self._take_up(progress)
            entries = self.search.propose(self._known(progress), progress.rounds)
            results = self._measure(progress, entries, budget)
            if results:
                ranking = self.search.learn(results)
            if not entries:
                progress.stage = Stage.TUNED
        except SearchBroke as broke:
            self._workload = None
            self._broken(progress, str(broke))
        progress.end_round(before, self.clock() - began)
        self._note_progress(self.trials - made)
        self.emit(
            {
                "event": "round",
                "round": sum(p.rounds for p in self.tasks),
                "task": progress.task.key,
                "ranking": ranking,
                "trials": self.trials,
                "seconds": self.seconds,
                "seconds_left": None if budget.seconds is None else max(0.0, budget.seconds - self.seconds),
                **self.table(),
            }
        )

    def _note_progress(self, trials: int) -> None:
        """Keep what the model is estimated to take after so many more trials, for its history."""
        self.records.add_progress(self.model.name, trials, latency(self.tasks)["now_us"] * 1e-6)

    def _broken(self, progress: Progress, reason: str) -> None:
        key = progress.task.key
        self._breaks[key] = self._breaks.get(key, 0) + 1
        progress.failures["compiler"] += 1
        if self._breaks[key] >= _BREAKS or "no schedule rule" in reason:
            progress.lose(f"its search ended: {reason}")

    def _known(self, progress: Progress) -> list[tuple[str, float | None]]:
        """Traces measured before on this setup; those in quarantine come as refused."""
        if progress.rounds and self._traces:
            return []  # the child knows them already
        return [
            (c.trace, c.timing.median_s if c.outcome is kept.Outcome.RIGHT and c.timing else None)
            for c in self.records.history(progress.task.key, self.setup)
        ]

    def _measure(self, progress: Progress, entries: list[Entry], budget: Budget) -> dict[str, float | None]:
        results: dict[str, float | None] = {}
        self._traces.update({e.id: e.trace for e in entries})
        for n, entry in enumerate(entries):
            if self._spent(budget):
                break
            if entry.candidate is None:
                results[entry.id] = None
                self._tell(progress, Verdict(outcome=Outcome.BUILD, reason=entry.refused))
                continue
            prepared = entry.id in self._flight  # noted already, when it was built beside the one before
            if not prepared and not self.records.may_run(self.setup, progress.task.key, sha256(entry.trace)):
                continue
            following = next((e.candidate for e in entries[n + 1 :] if e.candidate), None)
            if following is not None and self.measurer.pipelines:
                self.measurer.prepare(following)
            try:
                verdict = self.measurer.measure(entry.candidate, progress.best)
            except (kept.Quarantined, AlreadyExists):
                continue
            results[entry.id] = verdict.timing.median if verdict.timing else None
            self._record(entry.id, verdict)
            if verdict.timing is not None:
                progress.found(verdict.timing.median, entry.trace)
            self._tell(progress, verdict)
        self._withdraw()
        return results

    def _begin(self, candidate: Candidate) -> None:
        """Note a candidate before it may touch the device. Default schedules are not recorded."""
        trace = self._traces.get(candidate.id)
        if trace is None or self._workload is None:
            return
        new = kept.NewCandidate(
            workload=self._workload.task,
            setup=self.setup,
            trace=trace,
            source_sha256=sha256(candidate.source),
        )
        self._flight[candidate.id] = self.records.begin(new)

    def _record(self, candidate_id: str, verdict: Verdict) -> None:
        number = self._flight.pop(candidate_id, None)
        if number is None:
            return  # refused before it was given to the device
        measured = verdict.timing
        timing = None
        if measured is not None:
            timing = kept.Timing(
                median_s=measured.median,
                low_s=measured.low,
                high_s=measured.high,
                repeats=measured.repeats,
            )
        self.records.finish(
            number,
            kept.Verdict(
                outcome=_OUTCOMES[verdict.outcome],
                reason=verdict.reason,
                timing=timing,
                quarantine=verdict.outcome in _QUARANTINED,
                story=verdict.reason if verdict.outcome is Outcome.FAULT else None,
            ),
        )

    def _withdraw(self) -> None:
        """Take back what was prepared and never run."""
        for number in self._flight.values():
            with suppress(HonedError):
                self.records.withdraw(number)
        self._flight.clear()

    def _tell(self, progress: Progress, verdict: Verdict) -> None:
        self.trials += 1
        progress.trials += 1
        if verdict.outcome is not Outcome.RIGHT:
            progress.failures[str(verdict.outcome)] += 1
        self.emit(
            {
                "event": "trial",
                "task": progress.task.key,
                "outcome": str(verdict.outcome),
                "reason": verdict.reason,
                "us": verdict.timing.median * 1e6 if verdict.timing else None,
                "best_us": None if progress.best is None else progress.best * 1e6,
            }
        )

    def _spent(self, budget: Budget) -> bool:
        out_of_time = budget.seconds is not None and self.seconds >= budget.seconds
        out_of_trials = budget.trials is not None and self.trials >= budget.trials
        return self._stopping or out_of_time or out_of_trials

    def table(self) -> dict[str, Any]:
        """Every task as a row, the costliest first, and the model's estimated latency."""
        rows = sorted(self.tasks, key=lambda p: -p.cost)
        return {"tasks": [p.row() for p in rows], "model": latency(self.tasks)}


def _task_row(task: Task) -> kept.Task:
    return kept.Task(workload=task.key, name=task.name, flops=float(task.flops), bytes=float(task.bytes))
