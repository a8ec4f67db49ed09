"""The measuring child: `python -m honed.tuner.measure.child FD`, started by `measurer`.

It owns an OpenCL context and nothing else of value, and may be killed at any moment. It answers the calls of
`candidate` on the socket FD; what the driver prints goes to standard error. It takes a candidate through the
checks that need the device, in the order of docs/dev/verdicts.md.
"""

from __future__ import annotations

import math
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from honed.machine import devices, peaks
from honed.machine.opencl import cl, failure
from honed.process.limits import data_bytes, limit_data
from honed.process.rpc import RpcServer, by_name, connect
from honed.protocol.errors import DeviceError, HonedError
from honed.runtime.execution import programs
from honed.tuner.records.rows import Outcome, Verdict

from . import checks
from .candidate import (
    Candidate,
    LoadWorkload,
    MeasureCandidate,
    Measured,
    OpenSession,
    PrepareCandidate,
    prepared_launches,
)
from .checks import (
    Array,
    Claimed,
    Finished,
    MemoryAfterRun,
    Refusal,
    RunOutput,
    TimedRuns,
    VerdictCheck,
    Waited,
    beyond,
    evident,
    possible,
)
from .process import FENCE
from .session import DeviceSession, FencedBuffer, GuardedBuffer, LoadedWorkload
from .timing import BoundCandidate, InterleavedTiming, Reader, SamplingPlan, reading, time_candidate, warm_up

# Drivers leak a little with every program. A child whose memory has grown by this share of its allowance
# since it loaded its workload is replaced, before a candidate is refused for memory that others took.
_WORN = 0.25
# Bytes that fill memory before a run, alternating: as floats of every width all ones are NaN.
_POISONS = (0xFF, 0xA5)
_SERIES_SECONDS = 0.02  # Seconds of one series of runs, long beside what a wait costs the host
_SERIES = 5  # Number of series
_NOTHING: Final[Mapping[int, Array]] = {}
_SLACK = 1.0  # Seconds by which a phase may exceed its limit, for a busy machine

_MEMORY_CODES = {
    cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
    cl.status_code.OUT_OF_HOST_MEMORY,
    cl.status_code.INVALID_BUFFER_SIZE,
}

S = TypeVar("S")


class MeasuringChild(RpcServer):
    """Measures candidates on one device, which is opened first. `read` reads the driver's events."""

    def __init__(self, connected: socket.socket, read: Reader) -> None:
        super().__init__(connected)
        self._read = read
        self._session: DeviceSession | None = None
        self._loaded_at = 0

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return the error to answer with, also for errors of the OpenCL driver."""
        if isinstance(raised, cl.Error):
            return failure("measure", raised)
        return super().error_of(raised, method)

    @property
    def session(self) -> DeviceSession:
        """The session on the device opened first."""
        assert self._session is not None, "the first call must open a device"
        return self._session

    def _open(self, call: OpenSession) -> None:
        self._session = DeviceSession(
            devices.select(call.device),
            call.profile,
            call.limits,
            frozenset(call.without),
            lambda phase, seconds: self.progress(phase=phase, seconds=seconds),
            self._read,
        )
        limit_data(data_bytes() + call.limits.memory_bytes)

    def _load(self, call: LoadWorkload) -> float:
        traffic = self.session.load(call.workload, call.traffic)
        self._loaded_at = data_bytes()
        return traffic

    def _prepare(self, call: PrepareCandidate) -> None:
        self.session.prepare(call.candidate)

    def _measure(self, call: MeasureCandidate) -> Measured:
        session, loaded = self.session, self.session.loaded
        assert loaded is not None, "a workload must be loaded before a candidate is measured"
        examination = _Examination(session, loaded, call.candidate, call.give_up)
        verdict = examination.verdict()
        worn = data_bytes() - self._loaded_at > session.limits.memory_bytes * _WORN
        return Measured(
            verdict=verdict,
            ran_at=examination.ran_at,
            spent=examination.spent,
            peaks=session.peaks,
            must_end=worn or examination.tainted,
        )

    METHODS = by_name(
        {OpenSession: _open, LoadWorkload: _load, PrepareCandidate: _prepare, MeasureCandidate: _measure}
    )


def main(arguments: Sequence[str] | None = None, read: Reader = reading) -> int:
    """Serve until the parent hangs up; tests replace `read`."""
    MeasuringChild(connect(arguments), read).serve()
    # Exits without cleanup: threads of the driver may hang, and a faulted context must not be released.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class _Dropped(Exception):
    """The candidate failed a check."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class _Examination:
    """The examination of one candidate on a session with a loaded workload."""

    def __init__(
        self, session: DeviceSession, loaded: LoadedWorkload, candidate: Candidate, give_up: float | None
    ) -> None:
        self._session = session
        self._loaded = loaded
        self._candidate = candidate
        self._give_up = give_up
        self._phase, self._since = "start", time.perf_counter()
        self.tainted = False  # The device's state is no longer reliable
        self.ran_at: float | None = None  # End of its first run, by time.monotonic
        self.spent: dict[str, float] = {}  # Wall seconds by phase
        self._inner: list[GuardedBuffer] = []
        self._runs: list[Finished] = []
        self._poison = _POISONS[0]
        self._alone = True  # True: no build ran beside it, so the host's clock is meaningful

    def verdict(self) -> Verdict:
        """Make all checks, or stop at the first that fails; return the verdict."""
        began = time.perf_counter()
        refusal = None
        try:
            found = self._examine()
        except _Dropped as dropped:
            refusal = dropped.refusal
        except cl.Error as error:
            refusal = self._failure(error)
        except DeviceError as error:
            refusal = Refusal(Outcome.RUN, str(error), tainted=True)
        except MemoryError:
            refusal = Refusal(Outcome.MEMORY, "its tensors do not fit the memory that is allowed")
        if refusal is not None:
            found = Verdict(outcome=refusal.outcome, reason=refusal.reason)
            self.tainted = refusal.tainted
        if not self.tainted:
            for memory in self._inner:
                memory.release()
        self._enter("end")
        return replace(found, seconds=time.perf_counter() - began)

    def _examine(self) -> Verdict:
        program = self._build()
        self._announce("host", self._session.limits.host_seconds)
        self._inner = [GuardedBuffer(self._session.context, value) for value in self._candidate.inner]
        buffers = [memory.buffer for memory in (*self._loaded.memory, *self._inner)]
        prepared = prepared_launches(self._loaded.workload, self._candidate)
        runnable = BoundCandidate(self._session.queue, self._candidate, program, buffers, prepared)
        session = self._session
        _demand(runnable.fits(session.device.cl, session.profile.limits, session.limits.memory_bytes))
        order = random.sample(range(self._loaded.workload.sets), self._loaded.workload.sets)
        self._examine_twice(runnable, order[0])
        for number in order[1:]:
            # The last set runs on the memory that the set before left, as in an app: neither poison nor its
            # answers.
            stale = number == order[-1] and "stale" not in session.without
            self._run(runnable, number, None if stale else _POISONS[0])
            self._check(checks.AFTER_RUN, self._memory_after_run(self._outputs(number)))
        if session.shares_memory and "fence" not in session.without:
            self._run_fenced(program, prepared, order[0])
        return self._time(runnable, order[-1])

    def _run_fenced(self, program: Any, prepared: Container[int], number: int) -> None:
        """Run with each buffer against a page without access, after it and then before it.

        An access to the page ends this process; the parent knows the phase and reports it.
        """
        session, workload = self._session, self._loaded.workload
        for before in (False, True):
            self._announce("host", session.limits.host_seconds)
            values = (*workload.parameters, *self._candidate.inner)
            fenced = [FencedBuffer(session.context, value, before=before) for value in values]
            for i, array in self._loaded.given[number].items():
                fenced[i].host[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
            buffers = [one.buffer for one in fenced]
            runnable = BoundCandidate(session.queue, self._candidate, program, buffers, prepared)
            self._announce(FENCE, 2 * session.limits.run_seconds + _SLACK)
            if runnable.prepares:
                runnable.prepare(session.read)
            runnable.run(session.read)
            del runnable
            self._announce("host", session.limits.host_seconds)
            for one in fenced:
                one.release()

    def _build(self) -> Any:
        self._announce("build", self._session.limits.build_seconds)
        try:
            return self._session.program(self._candidate)
        except cl.Error as error:
            code = getattr(error, "code", None)
            outcome = Outcome.MEMORY if code in _MEMORY_CODES else Outcome.BUILD
            why = f"the driver cannot compile it ({programs.complaint(error)})"
            raise _Dropped(Refusal(outcome, why)) from error

    def _examine_twice(self, runnable: BoundCandidate, number: int) -> None:
        """Run on the same inputs with both poisons, then check everything observable."""
        self._run(runnable, number, _POISONS[0])
        first = self._answers()
        self._check(checks.AFTER_RUN, self._memory_after_run())
        self._run(runnable, number, _POISONS[1])
        # A single run may be timed wrongly; this refuses only times that no evidence can make believable.
        self._check_again(checks.TIME_CLAIMS, self._slowest, runnable, number)
        left = self._memory_after_run(self._outputs(number, first), self._inputs(number))
        self._check(checks.AFTER_RUN, replace(left, unjudged=_POISONS[0]))

    def _slowest(self) -> Claimed:
        """Return the slowest run so far as a claim.

        The claim includes the runs whose clocks must not contradict each other.
        """
        seconds = max(run.seconds for run in self._runs) + self._session.resolution
        return self._claim(seconds, self._runs if self._alone else ())

    def _claim(self, seconds: float, runs: Sequence[Finished] = ()) -> Claimed:
        return Claimed(self._loaded.workload, self._session.limit(self._loaded), seconds, runs)

    def _check(self, table: Sequence[VerdictCheck[S]], seen: S) -> None:
        """Drop the candidate at the first row of the table that refuses."""
        _demand(checks.first_refusal(table, seen, self._session.without))

    def _check_again(
        self, table: Sequence[VerdictCheck[S]], see: Callable[[], S], runnable: BoundCandidate, number: int
    ) -> None:
        """Drop the candidate at the first row of the table that refuses, as `_check` does.

        Before its refusal is final, a row may require more runs or newly measured peaks.
        """
        for row in table:
            if row.name in self._session.without:
                continue
            refusal, more = row.refuses(see()), row.more_runs
            while refusal is not None and more:
                self._run(runnable, number, self._poison)
                refusal, more = row.refuses(see()), more - 1
            if refusal is not None and row.fresh_peaks:
                self._measure_peaks_again()
                refusal = row.refuses(see())
            _demand(refusal)

    def _run(self, runnable: BoundCandidate, number: int, poison: int | None) -> Finished:
        """Prepare and run once on a set of inputs with everything else poisoned, and fetch its outputs.

        Without `poison` everything else is left as it is.
        """
        session, limits = self._session, self._session.limits
        self._announce("host", limits.host_seconds)
        if poison is not None:
            self._poison = poison
            for memory in (*self._loaded.memory, *self._inner):
                memory.poison(session.queue, poison)
        for i, array in self._loaded.given[number].items():
            self._loaded.memory[i].write(session.queue, array)
        session.queue.finish()
        allowed = limits.run_seconds * (2 if runnable.prepares else 1) + _SLACK
        if self.ran_at is None:
            # Some drivers compile when a kernel is first launched.
            self._announce("first", limits.build_seconds + allowed)
        else:
            self._announce("run", allowed)
        self._alone = self._alone and not session.building
        try:
            prepared = [runnable.prepare(session.read)] if runnable.prepares else []
            run = runnable.run(session.read)
        finally:  # A driver error must be noted, too, because the kernel log is read then
            if self.ran_at is None:
                self.ran_at = time.monotonic()
        self._runs.append(run)
        for finished in (*prepared, run):
            self._check(checks.AFTER_WAIT, Waited(finished, limits.run_seconds))
        self._announce("host", limits.host_seconds)
        self._fetch()
        return run

    def _fetch(self) -> None:
        """Copy outputs and all guard bands to the host."""
        for i, memory in enumerate((*self._loaded.memory, *self._inner)):
            memory.fetch(self._session.queue, inside=i in self._loaded.workload.outputs)

    def _time(self, runnable: BoundCandidate, number: int) -> Verdict:
        """Time the candidate, then check that its outputs in the timed runs are right, too."""
        session, limits = self._session, self._session.limits
        fastest = min(run.seconds for run in self._runs)
        slow = self._give_up is not None and fastest > self._give_up
        allowed = limits.warm_seconds + limits.timing_seconds + 2 * limits.run_seconds + 2 * _SLACK
        self._announce("time", allowed)
        answers = self._answers()
        for i in self._loaded.workload.outputs:
            self._loaded.memory[i].poison(session.queue, self._poison, bands=False)
        # A processor has just compiled the candidate, so its clock is up.
        if not slow and not session.profile.family.processor:
            warm_up(runnable, session.yardstick, session.warmth, limits, session.read)
        schedule = SamplingPlan.of(fastest, len(runnable), session.resolution, session.cap, limits)
        turns = InterleavedTiming(
            runnable, session.yardstick, session.queue, session.read, session.device.clock_hz
        )
        timing = time_candidate(
            turns, schedule, limits, without=session.without, slow=slow, clock=session.warmth.clock
        )
        if isinstance(timing, Refusal):
            raise _Dropped(timing)
        session.warmth.note(turns.yardstick, turns.clock)
        self._check_again(checks.TIME_CLAIMS, lambda: self._claim(timing.median_s), runnable, number)
        self._announce("host", limits.host_seconds)
        self._fetch()
        self._check(
            checks.AFTER_RUN, self._memory_after_run(self._outputs(number, answers), self._inputs(number))
        )
        self._check_again(checks.TIMED, lambda: TimedRuns(timing.median_s, self._runs), runnable, number)
        self._check_evidence(runnable, number, timing.median_s)
        return Verdict(
            outcome=Outcome.RIGHT,
            timing=timing,
            yardstick_s=turns.yardstick,
            clock_hz=turns.clock or None,
        )

    def _answers(self) -> dict[int, Array]:
        """Return a copy of the outputs as last fetched, by parameter."""
        return {i: self._loaded.memory[i].array.copy() for i in self._loaded.workload.outputs}

    def _outputs(self, number: int, earlier: Mapping[int, Array] = _NOTHING) -> list[RunOutput]:
        """Return the outputs as last fetched, with those of another run on equal inputs."""
        return [
            RunOutput(self._name(i), expected, self._loaded.memory[i].array, earlier.get(i))
            for i, expected in self._loaded.expected[number].items()
        ]

    def _inputs(self, number: int) -> list[tuple[str, Array, Array]]:
        """Return the inputs as given and as they are now, each with its name."""
        if "inputs" in self._session.without:
            return []
        found = []
        for i, given in self._loaded.given[number].items():
            self._loaded.memory[i].fetch(self._session.queue, inside=True)
            found.append((self._name(i), given, self._loaded.memory[i].array))
        return found

    def _memory_after_run(
        self, outputs: Sequence[RunOutput] = (), inputs: Sequence[tuple[str, Array, Array]] = ()
    ) -> MemoryAfterRun:
        """Return the contents of memory after the last run, with all guard bands."""
        memory = (*self._loaded.memory, *self._inner)
        bands = [(self._name(i), *one.bands) for i, one in enumerate(memory)]
        return MemoryAfterRun(self._poison, bands, inputs, outputs)

    def _check_evidence(self, runnable: BoundCandidate, number: int, seconds: float) -> None:
        """Accept a right candidate beyond the measured peaks on evidence only, and then raise them to it."""
        session, loaded = self._session, self._loaded
        if "possible" in session.without or not beyond(loaded.workload, session.most(loaded), seconds):
            return
        self._measure_peaks_again()
        claim = beyond(loaded.workload, session.most(loaded), seconds)
        if not claim:
            return
        _demand(possible(loaded.workload, session.limit(loaded), seconds))
        self._announce("build", session.limits.build_seconds)
        session.finish_building()
        times = max(1, min(math.ceil(_SERIES_SECONDS / seconds), (session.cap - 1) // len(runnable)))
        self._announce("time", _SERIES * session.limits.run_seconds + _SLACK)
        series = [runnable.run(session.read, times) for _ in range(_SERIES)]
        for run in series:
            self._check(checks.AFTER_WAIT, Waited(run))
        proven = [self._run_warm(runnable, number) for _ in range(_SERIES)]
        launch = session.peaks.launch_us * 1e-6
        _demand(evident(claim, seconds, [*self._runs, *proven], series, times, launch))
        self._check(checks.AFTER_RUN, self._memory_after_run(inputs=self._inputs(number)))
        session.believe(loaded.workload, seconds)

    def _measure_peaks_again(self) -> None:
        self._announce("host", peaks.SECONDS)
        self._session.measure_peaks_again(self._loaded)

    def _run_warm(self, runnable: BoundCandidate, number: int) -> Finished:
        """Run again on the present inputs, with caches as warm as when timed, and check the result."""
        session = self._session
        for i in self._loaded.workload.outputs:
            self._loaded.memory[i].poison(session.queue, self._poison, bands=False)
        session.queue.finish()
        self._announce("run", session.limits.run_seconds + _SLACK)
        run = runnable.run(session.read)
        self._check(checks.AFTER_WAIT, Waited(run))
        self._announce("host", session.limits.host_seconds)
        self._fetch()
        self._check(checks.AFTER_RUN, self._memory_after_run(self._outputs(number)))
        return run

    def _failure(self, error: Any) -> Refusal:
        code = getattr(error, "code", None)
        name = cl.status_code.to_string(code, "unknown error {0}") if code is not None else str(error)
        routine = getattr(error, "routine", None) or "a driver call"
        if code in _MEMORY_CODES:
            return Refusal(Outcome.MEMORY, f"the device ran out of memory ({routine}: {name})", tainted=True)
        return Refusal(Outcome.RUN, f"the driver reports {name} ({routine}, {code})", tainted=True)

    def _name(self, index: int) -> str:
        parameters = len(self._loaded.workload.parameters)
        if index >= parameters:
            return f"inner buffer {index - parameters}"
        kind = "output" if index in self._loaded.workload.outputs else "input"
        return f"{kind} {index}"

    def _announce(self, phase: str, seconds: float) -> None:
        self._enter(phase)
        self._session.announce(phase, seconds)

    def _enter(self, phase: str) -> None:
        now = time.perf_counter()
        self.spent[self._phase] = self.spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now


def _demand(refusal: Refusal | None) -> None:
    if refusal is not None:
        raise _Dropped(refusal)


if __name__ == "__main__":
    sys.exit(main())
