"""Stores every candidate ever tried, its outcome, and what was learned from it.

Hints are records of other boards, from a hub; they are tried here before they count (docs/hub.md). A hint is
a record whose `measured_by` names the key that signed it (honed.protocol.params). No board has its compiler,
so its time is never mixed with ours. Trying it adds a record of our own, and the worth of each source's hints
follows from these: nothing else is stored.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from honed.machine.profile import DeviceIdentity
from honed.protocol.errors import AlreadyExists, InvalidArgument, NotFound
from honed.protocol.params import Gain, HintFigures, TuningFigures, source_of

from . import sql
from .database import Opened, explain_errors, open_database, transaction
from .rows import (
    ABANDONED_REASON,
    DefaultScheduleTime,
    MeasurementSetup,
    NewCandidate,
    Outcome,
    ProgressRecord,
    RecordState,
    TaskRecord,
    TuningRecord,
    Verdict,
    VersionRecord,
    candidate,
    check_figures,
    check_trace,
    check_verdict,
    sha256,
    timing_values,
)

HINTS_PER_TASK: Final = 4  # Trials that the hints of one task may cost in a day, by default
DAY: Final = 86400.0
FAILURES_COUNT: Final = 30 * DAY  # Seconds for which a failed hint counts against its source
MOST_HINTS: Final = 50_000  # Hints of one source; older ones are deleted
MOST_HINTS_IN_ALL: Final = 500_000
MOST_TOLD: Final = 100  # Sources with figures in a message, because messages have limits
# A hint that takes this many times as long as on the board that measured it, with the same driver, has
# failed.
_SLOWER: Final = 3.0
# A source with at least this many failures, and more than this share of those tried, is set aside
_FAILED, _SHARE = 3, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, distinct from later ones with the same number and from those of other boots or containers.

    As text it can be checked after any crash.
    """

    boot_id: str
    pid_namespace: int  # Inode
    pid: int
    started: int  # Clock ticks after boot

    @classmethod
    def this_process(cls) -> Self:
        """Return the identity of the calling process."""
        started = _start_time(os.getpid())
        assert started is not None  # The calling process is running
        return cls(boot_id=_boot_id(), pid_namespace=_pid_namespace(), pid=os.getpid(), started=started)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text that `str()` makes of an owner."""
        boot_id, pid_namespace, pid, started = text.split()
        return cls(boot_id=boot_id, pid_namespace=int(pid_namespace), pid=int(pid), started=int(started))

    def __str__(self) -> str:
        return f"{self.boot_id} {self.pid_namespace} {self.pid} {self.started}"

    def has_ended(self) -> bool:
        """Return whether the process has certainly ended.

        Return False for a process of another container of this boot, whose end cannot be known.
        """
        if self.boot_id != _boot_id():
            return True
        return self.pid_namespace == _pid_namespace() and _start_time(self.pid) != self.started


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """Return when process `pid` started (proc(5), stat, field 22); None if it does not run or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # The name before it may contain any character
    return None if state in "ZX" else int(fields[18])


class InQuarantine(InvalidArgument):
    """Raised when the candidate must not run on this device again."""


class Records:
    """An open database of records. Not for several threads; several processes may have the same file open.

    When a method has returned, its change is on disk: it survives a crash of process or machine. Every method
    raises Unavailable where another process kept the database busy too long or it is damaged, and
    ResourceExhausted where the disk is full; nothing is changed then, and the call may be repeated. `notes`
    are sentences the user should see, such as where a damaged database was set aside.
    """

    def __init__(self, path: Path, opened: Opened, measured_by: str) -> None:
        """Private; call `open` instead."""
        self.path = path
        self.notes = opened.notes
        self.measured_by = measured_by
        self._connection = opened.connection
        self._lock = opened.lock
        self._owner = str(ProcessIdentity.this_process())
        self._clock: Callable[[], float] = time.time

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, measured_by: str | None = None, busy_s: float = 10.0
    ) -> Self:
        """Open or create the database at `path`; `measured_by` (this host's name) is stored in new records.

        A damaged file is set aside, which `notes` report, and a new one begun. Raises InvalidArgument for a
        file of a newer honed or of another program, PermissionDenied where it cannot be opened.
        """
        path = Path(path).absolute()
        opened = open_database(path, busy_s=busy_s)
        return cls(path, opened, measured_by or socket.gethostname())

    def close(self) -> None:
        """Close the database; may be called again."""
        self._connection.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def may_run(
        self, setup: MeasurementSetup, workload: str, trace_sha256: str, source_sha256: str | None = None
    ) -> bool:
        """Return False for a candidate that is in quarantine on this device, or already in flight.

        The quarantine holds for every driver and compiler version, and for all candidates whose kernels have
        equal source. Also return False for one that was not built, until driver, or compiler and source,
        change.
        """
        hashes = {"trace_sha256": trace_sha256, "source_sha256": source_sha256}
        key = self._here(setup, workload=workload, owner=self._owner, **hashes)
        return not (self._rows(sql.BANNED, key) or self._rows(sql.RUNNING, key))

    def begin(self, new: NewCandidate) -> int:
        """Record durably that a candidate is about to run; return its id.

        Must have returned before the candidate reaches the device. A candidate with a verdict may be measured
        again and keeps its figures meanwhile. Raises InQuarantine, AlreadyExists where it is in flight,
        InvalidArgument where the trace is not JSON.
        """
        check_trace(new.trace)
        hashes = {"trace_sha256": sha256(new.trace), "source_sha256": new.source_sha256}
        key = self._here(new.setup, workload=new.workload, owner=self._owner, **hashes)
        with self._writing():
            banned = self._rows(sql.BANNED, key)
            if banned:
                state, reason = banned[0]
                is_ = "is in quarantine" if state == RecordState.QUARANTINED else "was not built"
                raise InQuarantine(f"this candidate {is_} ({reason}); try another")
            if self._rows(sql.RUNNING, key):
                raise AlreadyExists("this candidate is being measured already; try another")
            self._add_device(new.setup)
            more = {"trace": new.trace, "now": self._clock(), "measured_by": self.measured_by, "way": new.way}
            return int(self._rows(sql.BEGIN, {**key, **more})[0][0])

    def finish(self, candidate_id: int, verdict: Verdict) -> TuningRecord:
        """Record the verdict on a candidate that this process has begun; return it as recorded.

        It counts as measured by the verdict's host, or this one where the verdict names none. Raises
        InvalidArgument for impossible figures, NotFound where this process has no such candidate in flight.
        """
        check_verdict(verdict)
        state = RecordState.QUARANTINED if verdict.outcome.quarantines else RecordState.DONE
        values = {
            "id": candidate_id,
            "owner": self._owner,
            "state": state,
            "outcome": verdict.outcome.stored_as,
            "reason": verdict.reason,
            "story": verdict.story,
            "now": self._clock(),
            "measured_by": verdict.host or self.measured_by,
            "clock_hz": verdict.clock_hz,
            **timing_values(verdict.timing),
        }
        with self._writing():
            self._change_one(sql.FINISH, values)
            return self._candidates(sql.BY_ID, {"id": candidate_id})[0]

    def condemn(self, candidate_id: int, reason: str, story: str) -> None:
        """Quarantine a candidate whose fault was found after its verdict; raises NotFound without one."""
        values = {"id": candidate_id, "reason": reason, "story": story}
        with self._writing():
            if self._connection.execute(sql.CONDEMN, values).rowcount != 1:
                raise NotFound(f"candidate {candidate_id} has no verdict; finish it before it is condemned")

    def withdraw(self, candidate_id: int) -> None:
        """Remove a candidate that was begun but never reached the device.

        Raises NotFound where this process has no such candidate in flight.
        """
        values = {"id": candidate_id, "owner": self._owner}
        with self._writing():
            if self._connection.execute(sql.FORGET_FIRST, values).rowcount == 0:
                self._change_one(sql.RETURN_TO_DONE, values)

    def quarantine_abandoned(self) -> list[TuningRecord]:
        """Quarantine the candidates whose process has ended without a verdict, and return them.

        Call it first after a start. Candidates of running processes are left alone.
        """
        with self._writing():
            owners = [row[0] for row in self._rows(sql.OWNERS, {})]
            values = {"reason": ABANDONED_REASON, "now": self._clock()}
            ids = [
                row[0]
                for owner in owners
                if ProcessIdentity.parse(owner).has_ended()
                for row in self._rows(sql.ABANDON, {**values, "owner": owner})
            ]
            return [found for number in ids for found in self._candidates(sql.BY_ID, {"id": number})]

    def best(self, workload: str, setup: MeasurementSetup) -> TuningRecord | None:
        """Return the fastest right candidate, ranked by Timing.fair_s; None where there is none."""
        return next(iter(self._candidates(sql.BEST, self._here(setup, workload=workload))), None)

    def distil(self, setup: MeasurementSetup) -> list[TuningRecord]:
        """Return the fastest right candidate of every workload, ordered by workload."""
        return self._candidates(sql.DISTIL, self._here(setup))

    def history(self, workload: str, setup: MeasurementSetup) -> list[TuningRecord]:
        """Return all candidates of a workload, oldest first, including those in flight and in quarantine."""
        return self._candidates(sql.OF_WORKLOAD, self._here(setup, workload=workload))

    def stale(self, workload: str, setup: MeasurementSetup, limit: int = 16) -> list[TuningRecord]:
        """Return right candidates of this device with another driver or compiler, not yet measured with this.

        The fastest is first, and should be measured first. Their figures say nothing about this setup.
        Candidates from a hub are not included.
        """
        return self._candidates(sql.STALE, self._here(setup, workload=workload, limit=limit))

    def hints(
        self, workload: str, setup: MeasurementSetup, per_task: int = HINTS_PER_TASK
    ) -> list[TuningRecord]:
        """Return a hub's records for a workload that were not tried here yet, in the order to try them.

        Sources take turns with their best records, those of this driver before others; sources that are set
        aside give none. At most `per_task` hints of one workload are tried in a day.
        """
        found = self._candidates(sql.HINTS, self._here(setup, workload=workload, limit=per_task))
        if not found:
            return []
        since = self._clock() - DAY
        tried: int = self._rows(sql.HINTS_TRIED, self._here(setup, workload=workload, since=since))[0][0]
        sources = self.hint_sources()
        chosen: dict[str, TuningRecord] = {}  # The first record of each schedule
        for one in found:
            if len(chosen) >= per_task - tried:
                break
            if not sources[source_of(one.measured_by)].aside:
                chosen.setdefault(one.trace_sha256, one)
        return list(chosen.values())

    def hint_sources(self) -> dict[str, HintFigures]:
        """Return figures on the worth of each source's hints, by the name of its key."""
        values = {"since": self._clock() - FAILURES_COUNT, "slower": _SLOWER}
        worth = {name: (tried, failed) for name, tried, failed in self._rows(sql.HINTS_WORTH, values)}
        taken = dict(self._rows(sql.HINTS_TAKEN, {}))
        return {
            source_of(name): hint_figures(taken.get(name, 0), *worth.get(name, (0, 0)))
            for name in sorted(taken | worth)
        }

    def latest_hint(self, model: str) -> int:
        """Return a number that grows when a hub adds hints for a model's tasks; 0 before that."""
        return int(self._rows(sql.HINTS_LATEST, {"model": model})[0][0])

    def refuse(self, new: NewCandidate, reason: str) -> None:
        """Record that a candidate was refused before anything reached the device.

        Raises as `begin` does.
        """
        self.finish(self.begin(new), Verdict(outcome=Outcome.BUILD, reason=reason))

    def list_quarantined(self, setup: MeasurementSetup) -> list[TuningRecord]:
        """Return all candidates banned on this device with any driver or compiler, oldest first."""
        return self._candidates(sql.QUARANTINED, self._here(setup))

    def iterate_finished(self, setup: MeasurementSetup) -> Iterator[TuningRecord]:
        """Yield every candidate with a verdict, oldest first, one by one: for learning and export."""
        with explain_errors(self.path):
            for row in self._connection.execute(sql.FINISHED, self._here(setup)):
                yield candidate(row)

    def put_model(
        self, model: str, tasks: Mapping[TaskRecord, int], rivals: Collection[TaskRecord] = ()
    ) -> None:
        """Set the tasks of a model, with their runs per inference, in place of earlier ones.

        `rivals` are tasks that it does not run, but whose candidates are recorded.
        """
        for task in (*tasks, *rivals):
            check_figures(flops=task.flops, bytes=task.bytes)
        with self._writing():
            self._connection.execute(sql.CLEAR_WEIGHTS, {"model": model})
            for task in (*tasks, *rivals):
                self._connection.execute(sql.PUT_TASK, asdict(task))
            for task, weight in tasks.items():
                values = {"model": model, "workload": task.workload, "weight": weight}
                self._connection.execute(sql.ADD_WEIGHT, values)

    def task(self, workload: str) -> TaskRecord | None:
        """Return the task of a workload; None where no model has it."""
        rows = self._rows(sql.TASK, {"workload": workload})
        return TaskRecord(*rows[0]) if rows else None

    def add_version(self, model: str, why: str, latency_s: float | None) -> VersionRecord:
        """Record a new version of a model, its reason, and the measured seconds of one inference."""
        check_figures(latency_s=latency_s)
        now = self._clock()
        values = {"model": model, "why": why, "latency_s": latency_s, "now": now}
        with self._writing():
            version: int = self._rows(sql.ADD_VERSION, values)[0][0]
        return VersionRecord(model=model, version=version, why=why, latency_s=latency_s, created_s=now)

    def versions(self, model: str) -> list[VersionRecord]:
        """Return a model's versions, oldest first."""
        return [VersionRecord(*row) for row in self._rows(sql.VERSIONS, {"model": model})]

    def add_progress(self, model: str, trials: int, latency_s: float) -> None:
        """Record a model's estimated seconds per inference after `trials` more candidates."""
        check_figures(latency_s=latency_s)
        values = {"model": model, "trials": trials, "latency_s": latency_s, "now": self._clock()}
        with self._writing():
            self._connection.execute(sql.ADD_PROGRESS, values)

    def progress(self, model: str) -> list[ProgressRecord]:
        """Return the progress that tuning made with a model, over all its runs, oldest first."""
        return [ProgressRecord(*row) for row in self._rows(sql.PROGRESS, {"model": model})]

    def figures(self) -> TuningFigures:
        """Return counts of all trials and faults, gains by model, and figures on hints."""
        gains = self._rows(sql.GAINS, {})
        return TuningFigures(
            trials=dict(self._rows(sql.TRIALS, {})),
            faults=self._rows(sql.FAULTS, {})[0][0],
            gains={model: Gain(before_seconds=before, now_seconds=now) for model, before, now in gains},
            hints=foremost(self.hint_sources()),
        )

    def models(self) -> list[str]:
        """Return the names of the models that were tuned."""
        return [row[0] for row in self._rows(sql.MODELS, {})]

    def setups(self) -> list[MeasurementSetup]:
        """Return every setup that candidates were measured with, the latest used last."""
        return [
            MeasurementSetup(
                device=DeviceIdentity(**{**json.loads(row[0]), "driver_version": row[1]}), compiler=row[2]
            )
            for row in self._rows(sql.SETUPS, {})
        ]

    def put_default(self, workload: str, setup: MeasurementSetup, default: DefaultScheduleTime) -> None:
        """Record the time of a workload's default schedule, in place of an earlier one."""
        values = self._here(setup, workload=workload, seconds=default.seconds, rate=default.rate)
        with self._writing():
            self._add_device(setup)
            self._connection.execute(sql.PUT_DEFAULT, values)

    def defaults(self, setup: MeasurementSetup) -> dict[str, DefaultScheduleTime]:
        """Return the times of default schedules, by workload."""
        rows = self._rows(sql.DEFAULTS, self._here(setup))
        return {workload: DefaultScheduleTime(seconds=seconds, rate=rate) for workload, seconds, rate in rows}

    def yardstick(self, setup: MeasurementSetup) -> float | None:
        """Return the yardstick kernel's seconds at the device's reference speed; None if never recorded."""
        rows = self._rows(sql.YARDSTICK, self._here(setup))
        return rows[0][0] if rows else None

    def keep_yardstick(self, setup: MeasurementSetup, seconds: float) -> float:
        """Keep `seconds` as the yardstick of the device's reference speed; return the first one kept.

        It never changes, so that yardstick ratios of all times compare.
        """
        with self._writing():
            self._add_device(setup)
            self._connection.execute(sql.PUT_YARDSTICK, self._here(setup, seconds=seconds))
            kept: float = self._rows(sql.YARDSTICK, self._here(setup))[0][0]
        return kept

    @contextmanager
    def importing(self) -> Iterator[Callable[[MeasurementSetup, TaskRecord | None, Mapping[str, Any]], bool]]:
        """Yield a function that imports one candidate, given its values by column, and others.

        All imports succeed or none does. The function returns False where the candidate was here already (see
        exchange.import_jsonl).
        """
        sources = set[str]()  # Hubs that the records come from

        def put(setup: MeasurementSetup, task: TaskRecord | None, values: Mapping[str, Any]) -> bool:
            here = {**values, **self._here(setup)}
            self._add_device(setup)
            if source_of(values["measured_by"]):
                sources.add(values["measured_by"])
            if task is not None:
                self._connection.execute(sql.ADD_TASK, asdict(task))
            if self._connection.execute(sql.IMPORT, here).rowcount == 1:
                return True
            if values["state"] == RecordState.QUARANTINED:
                self._connection.execute(sql.IMPORT_BAN, here)
            return False

        with self._writing():
            yield put
            for source in sources:
                self._connection.execute(sql.HINTS_PRUNE, {"source": source, "most": MOST_HINTS})
            if sources:
                self._connection.execute(sql.HINTS_PRUNE_ALL, {"most": MOST_HINTS_IN_ALL})

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with explain_errors(self.path), transaction(self._connection):
            yield

    def _rows(self, query: str, values: Mapping[str, Any]) -> list[Any]:
        with explain_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def _candidates(self, query: str, values: Mapping[str, Any]) -> list[TuningRecord]:
        return [candidate(row) for row in self._rows(query, values)]

    def _change_one(self, query: str, values: Mapping[str, Any]) -> None:
        if self._connection.execute(query, values).rowcount != 1:
            raise NotFound(f"candidate {values['id']} is not in flight here; begin it before it is finished")

    def _add_device(self, setup: MeasurementSetup) -> None:
        identity = json.dumps(asdict(setup.device), sort_keys=True)
        self._connection.execute(sql.ADD_DEVICE, {"key": setup.device_key, "identity": identity})

    def _here(self, setup: MeasurementSetup, **more: Any) -> dict[str, Any]:
        return {"device": setup.device_key, "driver": setup.driver, "compiler": setup.compiler, **more}


def hint_figures(taken: int, tried: int, failed: int) -> HintFigures:
    """Return figures on the worth of a source's hints."""
    aside = failed >= _FAILED and failed > _SHARE * tried
    return HintFigures(taken=taken, tried=tried, failed=failed, aside=aside)


def foremost(worth: Mapping[str, HintFigures]) -> dict[str, HintFigures]:
    """Return the figures of the sources that matter most, in unchanged order.

    Sources set aside matter most, then those tried, then those taken most often.
    """
    first = sorted(worth, key=lambda name: (worth[name].aside, worth[name].tried, worth[name].taken))
    kept = frozenset(first[-MOST_TOLD:])
    return {name: each for name, each in worth.items() if name in kept}
