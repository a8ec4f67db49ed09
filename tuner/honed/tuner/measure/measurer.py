"""Measures candidates in an expendable child process, and watches the kernel log for their faults."""

from __future__ import annotations

import logging
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.reader import SETTLE_S, Reader, find_fault, open_reader
from honed.machine.kernellog.story import DatedFault, FaultIncident, GpuRun, Process, attribute, group, ids_of
from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.process.rpc import Call, ChildCrashed, R, RpcChild
from honed.protocol.errors import DeviceError, HonedError, InvalidArgument
from honed.tuner.records.rows import Outcome, Verdict

from . import checks
from .candidate import (
    SPARE_CORES,
    Begin,
    Candidate,
    LoadWorkload,
    MeasureCandidate,
    MeasureLimits,
    OpenSession,
    PrepareCandidate,
    Workload,
)
from .checks import Submitted
from .process import COMMAND, FENCE, NO_CACHES, Builders, cache_environment

_TOUCHED = (signal.SIGSEGV, signal.SIGBUS)  # Signals that end a process on access to unmapped memory

DEFAULT_LIMITS = MeasureLimits()
_KEPT_RUNS = 16
_KEPT_S = 60.0  # Seconds that faults are kept, so that late records join their story
_log = logging.getLogger(__name__)


def kernel_log(tell: Callable[[str], None]) -> Reader | None:
    """Open the kernel log; where it cannot be read, pass a sentence about that to `tell` and return None."""
    try:
        return open_reader()
    except HonedError as error:
        tell(f"candidates are not watched for GPU faults: {error}")
        return None


@dataclass(slots=True)
class _Owner:
    """A child and its candidates; `ids` is None where the kernel's numbers for it cannot be known."""

    pid: int
    ids: frozenset[int] | None
    runs: list[GpuRun] = field(default_factory=list)

    def process(self) -> Process:
        return Process(ids=self.ids, runs=tuple(self.runs))


class FaultWatch:
    """A reader of the kernel log while children run candidates; without a log it watches nothing."""

    def __init__(self, reader: Reader | None) -> None:
        self._reader = reader
        self._owners: list[_Owner] = []
        self._seen: list[DatedFault] = []
        self._reported: set[tuple[float, str]] = set()
        self._found: list[tuple[str, FaultIncident]] = []

    @property
    def watching(self) -> bool:
        """Return whether faults are visible at all."""
        return self._reader is not None

    def adopt(self, pid: int) -> None:
        """Watch a new child that has opened the device."""
        self._owners = [*self._owners[-1:], _Owner(pid, ids_of(pid))]

    def record_start(self, name: str) -> None:
        """Note that the child begins to run candidate `name`."""
        owner, run = self._owners[-1], GpuRun(name=name, started_s=time.monotonic(), ended_s=None)
        owner.runs = [*owner.runs[1 - _KEPT_RUNS :], run]

    def record_end(self) -> None:
        """Note that the child has stopped running its candidate."""
        owner = self._owners[-1]
        if owner.runs and owner.runs[-1].ended_s is None:
            owner.runs[-1] = replace(owner.runs[-1], ended_s=time.monotonic())

    def settle(self, since: float) -> None:
        """Look for faults until SETTLE_S after `since` (time.monotonic), or one is found."""
        before = len(self._found)
        self.look()
        while self._reader is not None and len(self._found) == before:
            left = since + SETTLE_S - time.monotonic()
            if left <= 0:
                break
            select.select([self._reader.fileno()], [], [], left)
            self.look()

    def look(self) -> None:
        """Read the present log."""
        fresh = self._read()
        if not fresh:
            return
        for owner in self._owners:
            now = ids_of(owner.pid)
            owner.ids = None if owner.ids is None or now is None else owner.ids | now
        horizon = time.monotonic() - _KEPT_S
        self._seen = [one for one in self._seen if one.monotonic_s > horizon] + fresh
        for story in group(self._seen):
            key = (story.first_s, story.seen[0].fault.text)
            if key not in self._reported:
                self._reported.add(key)
                self._blame(story)

    def of(self, name: str) -> FaultIncident | None:
        """Return a fault found to be caused by candidate `name`; None where there is none."""
        return next((story for found, story in self._found if found == name), None)

    def take(self) -> list[tuple[str, FaultIncident]]:
        """Return all faults found since the last call, with the candidates they belong to."""
        found, self._found = self._found, []
        return found

    def _read(self) -> list[DatedFault]:
        fresh: list[DatedFault] = []
        while self._reader is not None:
            try:
                records = self._reader.read()
            except HonedError as error:
                _log.warning("faults are no longer looked for: %s", error)
                self._reader = None
                break
            if not records:
                break
            fresh += [one for one in map(find_fault, records) if one is not None]
        return fresh

    def _blame(self, story: FaultIncident) -> None:
        attribution = attribute(story, [owner.process() for owner in self._owners])
        if attribution.runs:
            # Records are late by about as long as a candidate takes to build, so the latest candidate is at
            # fault.
            self._found.append((attribution.runs[-1].name, story))
        elif attribution.named:
            _log.warning(
                "the kernel log has a fault of the measuring child while it ran nothing: %s", story.cause.text
            )


class Measurer:
    """A device and the child that measures on it; a context manager, not for several threads.

    A crash, a hang or a fault ends the child, never the caller; the next candidate gets a new one.
    """

    def __init__(
        self,
        device_spec: str,
        profile: DeviceProfile,
        limits: MeasureLimits = DEFAULT_LIMITS,
        *,
        kernel_log: Reader | None = None,
        without: frozenset[str] = frozenset(),
        begin: Begin | None = None,
        command: Sequence[str] = COMMAND,
        builders: int = 0,
    ) -> None:
        """Set up a measurer; no child is started yet.

        `profile` must hold measured peaks; raises InvalidArgument otherwise. `begin` is called before a
        candidate first reaches the child, so that it can be recorded durably. `command` starts another child
        in tests. `builders` is the number of children that build the candidates passed to `build`. `without`
        names checks to skip; tests use it to show that each check works by itself.
        """
        if profile.peaks is None:
            raise InvalidArgument("the device's peaks are not known; measure them before tuning")
        self._device = device_spec
        self._profile = profile
        self._limits = limits
        self._without = without
        self._begin = begin
        self._command = tuple(command)
        self._watch = FaultWatch(None if "clean" in without else kernel_log)
        self._folder = tempfile.TemporaryDirectory(prefix="honed-measure-")
        self._builders: Builders | None = None
        if builders:
            self._builders = Builders(
                device_spec,
                builders,
                launch=self._on_processor,
                folder=Path(self._folder.name),
                seconds=limits.build_seconds,
                memory_bytes=limits.builder_bytes,
            )
        self._child: RpcChild | None = None
        self._workload: Workload | None = None
        self._traffic: dict[int, float] = {}
        self._begun: set[str] = set()
        self._preparing: set[str] = set()
        self.spent: dict[str, float] = {}  # Wall seconds by phase of the last candidate
        self.children = 0  # Started so far

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all child processes and remove their files."""
        self._stop()
        if self._builders is not None:
            self._builders.close()
        self._folder.cleanup()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return self._child.pid if self._child else None

    @property
    def ahead(self) -> int:
        """Candidates built beside the one measured: one, and only where that does not disturb the timing."""
        return int(not self._on_processor or len(os.sched_getaffinity(0)) >= SPARE_CORES)

    @property
    def rate(self) -> float:
        """Bytes per second that the device moved at the loaded workload's size; 0 if unknown."""
        return self._traffic.get(self._workload.bytes, 0.0) if self._workload else 0.0

    @property
    def peaks(self) -> DevicePeaks:
        """The device's peaks, with later measurements and the peaks of proven candidates."""
        assert self._profile.peaks is not None
        return self._profile.peaks

    def load(self, workload: Workload) -> None:
        """Have the following candidates measured on `workload`.

        Raises InvalidArgument for tensors that do not fit it, DeviceError where the device cannot be used.
        """
        self._workload = workload
        self.forget()
        if self._child is None:
            self._start()
        else:
            self._load(self._child)

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Have candidates built by the pool, the next to be measured first.

        Beside a GPU, building continues while others are timed. Where the device is the processor, all of
        them are built before the first is measured, and nothing more until all were measured.
        """
        if self._builders is None or self._workload is None or not candidates:
            return
        if self._on_processor and self._builders.was_submitted(candidates[0]):
            return
        allowed = [c for c in candidates if self._without_device(self._workload, c) is None]
        self._builders.submit(allowed, self._workload)

    def forget(self) -> dict[str, Verdict]:
        """Cancel the builds that `build` requested.

        The result is empty, because nothing is measured before `measure` is called.
        """
        if self._builders is not None:
            self._builders.forget()
        return {}

    def prepare(self, candidate: Candidate) -> None:
        """Have the child build the next candidate beside the one that `measure` is called with after this."""
        if not self.ahead or self._child is None or self._workload is None:
            return
        if self._without_device(self._workload, candidate) is None:
            self._note(candidate)
            self._preparing.add(candidate.id)
            self._child.tell(PrepareCandidate(candidate=candidate))

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """Return the verdict on a candidate of the loaded workload, whatever the candidate does.

        `best` is the best known time of the workload (seconds); a candidate far slower is timed few times
        only. Raises InvalidArgument before `load`, DeviceError where no child can be started any more.
        """
        began, self.spent = time.monotonic(), {}
        if self._workload is None:
            raise InvalidArgument("no workload is loaded; load one before measuring candidates")
        refusal = self._without_device(self._workload, candidate)
        if refusal is not None:
            return Verdict(outcome=refusal.outcome, reason=refusal.reason, seconds=time.monotonic() - began)
        if self._builders is not None:
            self._builders.wait(None if self._on_processor else candidate)
        waited = time.monotonic() - began
        self._note(candidate)
        verdict, suspect = self._attempt(candidate, best)
        if suspect:
            # The child died while it was building another candidate, too: repeat without that one.
            verdict, _ = self._attempt(candidate, best)
        self.spent["build"] = self.spent.get("build", 0.0) + waited
        return replace(verdict, seconds=time.monotonic() - began)

    def settle(self) -> None:
        """Wait until faults of the last candidate must be in the kernel log.

        `take_faults` then returns them.
        """
        self._watch.settle(time.monotonic())

    def take_faults(self) -> list[tuple[str, FaultIncident]]:
        """Return faults found since the last call, with the ids of the candidates they belong to.

        Usually this is the fault of a candidate whose verdict was FAULT. A late record may belong to an
        earlier candidate that was judged right, which must be set aside then.
        """
        self._watch.look()
        return self._watch.take()

    @property
    def _on_processor(self) -> bool:
        return self._profile.family.processor

    def _without_device(self, workload: Workload, candidate: Candidate) -> checks.Refusal | None:
        submitted = Submitted(workload, candidate, self._profile, self._limits)
        return checks.first_refusal(checks.SUBMITTED, submitted, self._without)

    def _note(self, candidate: Candidate) -> None:
        if candidate.id not in self._begun:
            self._begun.add(candidate.id)
            if self._begin:
                self._begin(candidate)

    def _attempt(self, candidate: Candidate, best: float | None) -> tuple[Verdict, bool]:
        """Return the verdict, and whether another candidate may be the cause."""
        if self._child is None:
            self._start()
        child = self._child
        assert child is not None
        self._preparing.discard(candidate.id)
        beside = bool(self._preparing)
        give_up = None if best is None else best * self._limits.give_up_beyond
        call = MeasureCandidate(candidate=candidate, give_up=give_up)
        try:
            on_phase = partial(self._on_phase, candidate)
            answer = child.call(call, seconds=self._limits.start_seconds, on_phase=on_phase)
        except ChildCrashed as ended:
            self._watch.record_end()
            self._watch.settle(time.monotonic())
            self._stop()
            return self._fault(candidate, _of_ended(ended)), beside
        except HonedError as failed:
            self._watch.record_end()
            self._stop()
            return Verdict(outcome=Outcome.RUN, reason=str(failed)), False
        self._watch.record_end()
        self.spent = answer.spent
        self._profile = replace(self._profile, peaks=answer.peaks)
        verdict = self._check_log(candidate, answer.verdict, answer.ran_at)
        if answer.must_end or verdict.outcome is Outcome.FAULT:
            self._stop()
        return verdict, False

    def _check_log(self, candidate: Candidate, verdict: Verdict, ran_at: float | None) -> Verdict:
        """Return the verdict after reading the kernel log for as long as it takes to be sure."""
        if not self._watch.watching or ran_at is None:
            return verdict
        began = time.monotonic()
        if verdict.outcome is Outcome.RIGHT:
            self._watch.settle(ran_at)
        elif verdict.outcome is Outcome.RUN:
            self._watch.settle(began)
        else:
            self._watch.look()
        self.spent["kernel log"] = time.monotonic() - began
        return self._fault(candidate, verdict)

    def _fault(self, candidate: Candidate, verdict: Verdict) -> Verdict:
        story = self._watch.of(candidate.id)
        if story is None:
            return verdict
        text = " / ".join(line.strip() for line in story.cause.text.splitlines() if line.strip())
        killed = story.severity is Severity.PROCESS_KILLED
        outcome = Outcome.MEMORY if killed else Outcome.FAULT
        return Verdict(outcome=outcome, reason=f"the kernel log has a fault of it: {text[:300]}")

    def _on_phase(self, candidate: Candidate, phase: str) -> None:
        if phase == "first":
            self._watch.look()
            self._watch.record_start(candidate.id)

    def _start(self) -> None:
        self.children += 1
        caches = NO_CACHES if self._builders is None else cache_environment(self._builders.cache)
        log = Path(self._folder.name) / "child.log"
        child = RpcChild(self._command, log=log, environment=caches)
        self._preparing.clear()
        call = OpenSession(
            device=self._device,
            profile=self._profile,
            limits=self._limits,
            without=tuple(sorted(self._without)),
        )
        self._ask(child, call)
        self._child = child
        self._watch.adopt(child.pid)
        if self._workload is not None:
            self._load(child)

    def _load(self, child: RpcChild) -> None:
        assert self._workload is not None
        known = self._traffic.get(self._workload.bytes)
        call = LoadWorkload(workload=self._workload, traffic=known)
        self._traffic[self._workload.bytes] = self._ask(child, call)

    def _ask(self, child: RpcChild, call: Call[R]) -> R:
        try:
            return child.call(call, seconds=self._limits.start_seconds)
        except ChildCrashed as ended:
            self._child = None
            raise DeviceError(
                f"the measuring child cannot use {self._device} ({ended}); see `hone doctor`"
            ) from ended
        except HonedError as failed:
            child.kill()
            self._child = None
            kind = InvalidArgument if isinstance(failed, InvalidArgument) else DeviceError
            raise kind(str(failed)) from failed

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _of_ended(ended: ChildCrashed) -> Verdict:
    """Return the verdict on the candidate that a child was measuring when it ended."""
    phase, death = ended.phase, ended.death
    where = {
        "build": "in the driver's compiler",
        "first": "at its first launch, in which drivers may compile",
    }.get(phase, "running")
    if death.out_of_memory:
        outcome, reason = Outcome.MEMORY, f"its process ran out of memory or was killed ({ended})"
    elif phase == FENCE and death.signal in _TOUCHED:
        outcome = Outcome.OUT_OF_BOUNDS
        reason = (
            "it reads or writes outside of its buffers: with a page that may not be touched beside each of "
            f"them its process died ({ended})"
        )
    elif death.late:
        outcome, reason = Outcome.DEADLINE, f"it was killed {where}: {ended}"
    else:
        outcome, reason = Outcome.CRASH, f"its process died {where} ({ended})"
    if phase == "build" and outcome in (Outcome.DEADLINE, Outcome.CRASH):
        outcome = Outcome.BUILD
    return Verdict(outcome=outcome, reason=reason)
