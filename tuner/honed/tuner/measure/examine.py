"""One candidate's way through the checks that need the device, in the order of docs/verdicts.md."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any

from honed.protocol.errors import DeviceError
from honed.runtime import surveying
from honed.runtime.opencl import cl
from honed.tuner.verdict import Outcome, Verdict

from . import bound, checks
from .bound import Bound
from .candidate import Candidate
from .checks import Array, Finished, Refusal
from .guarded import Guarded
from .prepared import prepared_launches
from .session import Loaded, Session
from .timed import Schedule, Turns, time_candidate, warm_up

# What memory is filled with before a run, by turns: as floats of every width all ones are NaN.
POISONS = (0xFF, 0xA5)
_WALL_RETRIES = 8  # runs
_SERIES_SECONDS = 0.02  # of one series of runs, long beside what a wait costs the host
_SERIES = 5  # of them
_ANEW_RETRIES = 4  # runs
_SLACK = 1.0  # seconds a phase may exceed what it is allowed, for a busy machine

_MEMORY_CODES = {
    cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE,
    cl.status_code.OUT_OF_HOST_MEMORY,
    cl.status_code.INVALID_BUFFER_SIZE,
}


class Dropped(Exception):
    """The candidate failed a check."""

    def __init__(self, refusal: Refusal, *, tainted: bool = False) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal
        self.tainted = tainted


@dataclass(slots=True)
class Examined:
    """What came of it.

    `tainted`: the device's state cannot be relied on any more. `ran_at`: when its first run ended, by
    time.monotonic; None where there was none. `spent`: wall seconds by phase.
    """

    verdict: Verdict
    tainted: bool
    ran_at: float | None
    spent: dict[str, float] = field(default_factory=dict)


class Examination:
    """One candidate on a session with a loaded workload."""

    def __init__(self, session: Session, loaded: Loaded, candidate: Candidate, give_up: float | None) -> None:
        self._session = session
        self._loaded = loaded
        self._candidate = candidate
        self._give_up = give_up
        self._phase, self._since = "start", time.perf_counter()
        self._spent: dict[str, float] = {}
        self._ran_at: float | None = None
        self._inner: list[Guarded] = []
        self._runs: list[Finished] = []
        self._poison = POISONS[0]
        self._alone = True  # nothing was built beside it, so the host's clock says something

    def verdict(self) -> Examined:
        """Go all the way, or to the first check that fails."""
        began = time.perf_counter()
        tainted, refusal = False, None
        try:
            found = self._examine()
        except Dropped as dropped:
            refusal, tainted = dropped.refusal, dropped.tainted
        except cl.Error as error:
            refusal, tainted = self._failed(error), True
        except DeviceError as error:
            refusal, tainted = Refusal(Outcome.RUN, str(error)), True
        except MemoryError:
            refusal = Refusal(Outcome.MEMORY, "its tensors do not fit the memory that is allowed")
        if not tainted:
            for memory in self._inner:
                memory.release()
        self._enter("end")
        seconds = time.perf_counter() - began
        if refusal is not None:
            found = Verdict(outcome=refusal.outcome, reason=refusal.reason)
        return Examined(replace(found, seconds=seconds), tainted, self._ran_at, self._spent)

    def _examine(self) -> Verdict:
        program = self._built()
        self._announce("host", self._session.limits.host_seconds)
        self._inner = [Guarded(self._session.context, value) for value in self._candidate.inner]
        buffers = [memory.buffer for memory in (*self._loaded.memory, *self._inner)]
        prepared = prepared_launches(self._loaded.workload, self._candidate)
        runnable = Bound(self._session.queue, self._candidate, program, buffers, prepared)
        session = self._session
        _demand(runnable.fits(session.device.cl, session.profile.limits, session.limits.memory_bytes))
        order = random.sample(range(self._loaded.workload.sets), self._loaded.workload.sets)
        self._examine_twice(runnable, order[0])
        for number in order[1:]:
            # The last set meets what the one before left, as in an app: not poison, and not its answers.
            stale = session.checks.stale and number == order[-1]
            self._run(runnable, number, None if stale else POISONS[0])
            self._check_bands()
            self._check_right(number)
        return self._timed(runnable, order[-1])

    def _built(self) -> Any:
        self._announce("build", self._session.limits.build_seconds)
        try:
            return self._session.program(self._candidate)
        except cl.Error as error:
            code = getattr(error, "code", None)
            outcome = Outcome.MEMORY if code in _MEMORY_CODES else Outcome.BUILD
            why = f"the driver cannot compile it ({bound.complaint(error)})"
            raise Dropped(Refusal(outcome, why)) from error

    def _examine_twice(self, runnable: Bound, number: int) -> None:
        """Run on the same inputs with both poisons, then look at all there is to see."""
        on = self._session.checks
        self._run(runnable, number, POISONS[0])
        first = self._answers()
        self._check_bands()
        self._run(runnable, number, POISONS[1])
        if on.wall:
            self._check_wall(runnable, number)
        # One run alone may be timed wrongly; what no evidence can make believable is refused here already.
        self._check_possible(max(run.seconds for run in self._runs) + self._session.resolution)
        self._check_bands()
        self._check_inputs(number)
        for i, before in first.items():
            after = self._loaded.memory[i].array
            if on.written:
                _demand(checks.written(before, POISONS[0], after, POISONS[1], self._name(i)))
            if on.right:
                _demand(checks.right(self._loaded.expected[number][i], before, self._name(i)))
        self._check_right(number)
        self._check_repeated(first)

    def _check_wall(self, runnable: Bound, number: int) -> None:
        """Refuse a contradiction between the clocks that does not go away; the host may just be busy."""
        more = _WALL_RETRIES
        while self._alone and checks.wall_below(self._runs) and more:
            self._run(runnable, number, POISONS[1])
            more -= 1
        if self._alone:
            _demand(checks.wall_below(self._runs), tainted=True)

    def _run(self, runnable: Bound, number: int, poison: int | None) -> Finished:
        """Prepare and run once on a set of inputs with everything else poisoned, and fetch what came of it.

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
        if self._ran_at is None:
            # Some drivers compile when a kernel is first launched.
            self._announce("first", limits.build_seconds + allowed)
        else:
            self._announce("run", allowed)
        self._alone = self._alone and not session.building
        try:
            prepared = [runnable.prepare(session.read)] if runnable.prepares else []
            run = runnable.run(session.read)
        finally:  # also where the driver reports an error: the kernel log is looked at then, too
            if self._ran_at is None:
                self._ran_at = time.monotonic()
        self._runs.append(run)
        for finished in (*prepared, run):
            self._check_finished(finished)
        self._announce("host", limits.host_seconds)
        self._fetch()
        return run

    def _check_finished(self, run: Finished) -> None:
        on = self._session.checks
        if on.completed:
            _demand(checks.completed(run), tainted=True)
        if on.deadline:
            _demand(checks.in_time(run, 1, self._session.limits.run_seconds))
        if on.wall:
            _demand(checks.wall_above(run), tainted=True)

    def _fetch(self) -> None:
        """Bring outputs and all guard bands to the host."""
        for i, memory in enumerate((*self._loaded.memory, *self._inner)):
            memory.fetch(self._session.queue, inside=i in self._loaded.workload.outputs)

    def _timed(self, runnable: Bound, number: int) -> Verdict:
        """Time it, then check that what it left when timed is right, too."""
        session, limits = self._session, self._session.limits
        fastest = min(run.seconds for run in self._runs)
        slow = self._give_up is not None and fastest > self._give_up
        allowed = limits.warm_seconds + limits.timing_seconds + 2 * limits.run_seconds + 2 * _SLACK
        self._announce("time", allowed)
        answers = self._answers()
        for i in self._loaded.workload.outputs:
            self._loaded.memory[i].poison_inside(session.queue, self._poison)
        # A CPU has just compiled the candidate, its clock is up.
        if not slow and session.profile.rules.family != "cpu":
            warm_up(runnable, session.yardstick, session.warmth, limits, session.read)
        schedule = Schedule.of(fastest, len(runnable), session.resolution, session.cap, limits)
        turns = Turns(runnable, session.yardstick, session.queue, session.read)
        timing = time_candidate(turns, schedule, limits, session.checks, slow=slow)
        if isinstance(timing, Refusal):
            raise Dropped(timing, tainted=True)
        session.warmth.note(turns.yardstick)
        self._check_possible(timing.median_s)
        self._announce("host", limits.host_seconds)
        self._fetch()
        self._check_bands()
        self._check_inputs(number)
        self._check_right(number)
        self._check_repeated(answers)
        if session.checks.anew:
            self._check_anew(runnable, number, timing.median_s)
        self._check_evidence(runnable, number, timing.median_s)
        return Verdict(outcome=Outcome.RIGHT, timing=timing, yardstick_s=turns.yardstick)

    def _check_anew(self, runnable: Bound, number: int, seconds: float) -> None:
        """Refuse a time that no run on new inputs comes near; the clock may just not have been up."""
        more = _ANEW_RETRIES
        while checks.computed_anew(self._runs, seconds) and more:
            self._run(runnable, number, POISONS[0])
            more -= 1
        _demand(checks.computed_anew(self._runs, seconds))

    def _answers(self) -> dict[int, Array]:
        """A copy of the outputs as last fetched, by parameter."""
        return {i: self._loaded.memory[i].array.copy() for i in self._loaded.workload.outputs}

    def _check_repeated(self, before: dict[int, Array]) -> None:
        if not self._session.checks.repeated:
            return
        for i, array in before.items():
            _demand(checks.repeated(array, self._loaded.memory[i].array, self._name(i)))

    def _check_possible(self, seconds: float) -> None:
        """Refuse what is far beyond peaks that were measured again now, too."""
        session, loaded = self._session, self._loaded
        if not session.checks.possible:
            return
        if checks.possible(loaded.workload, session.limit(loaded), seconds):
            self._measure_peaks_again()
            _demand(checks.possible(loaded.workload, session.limit(loaded), seconds))

    def _check_evidence(self, runnable: Bound, number: int, seconds: float) -> None:
        """Believe a right candidate beyond the measured peaks on evidence only, and raise them to it then."""
        session, loaded = self._session, self._loaded
        if not session.checks.possible or not checks.beyond(loaded.workload, session.most(loaded), seconds):
            return
        self._measure_peaks_again()
        claim = checks.beyond(loaded.workload, session.most(loaded), seconds)
        if not claim:
            return
        _demand(checks.possible(loaded.workload, session.limit(loaded), seconds))
        self._announce("build", session.limits.build_seconds)
        session.finish_building()
        times = max(1, min(math.ceil(_SERIES_SECONDS / seconds), (session.cap - 1) // len(runnable)))
        self._announce("time", _SERIES * session.limits.run_seconds + _SLACK)
        series = [runnable.run(session.read, times) for _ in range(_SERIES)]
        for run in series:
            _demand(checks.completed(run), tainted=True)
            _demand(checks.wall_above(run), tainted=True)
        proven = [self._run_warm(runnable, number) for _ in range(_SERIES)]
        launch = session.peaks.launch_us * 1e-6
        _demand(checks.evident(claim, seconds, [*self._runs, *proven], series, times, launch), tainted=True)
        self._check_inputs(number)
        session.believe(loaded.workload, seconds)

    def _measure_peaks_again(self) -> None:
        self._announce("host", surveying.SECONDS)
        self._session.measure_peaks_again(self._loaded)

    def _run_warm(self, runnable: Bound, number: int) -> Finished:
        """Run once more on the inputs that are there, with caches as warm as when timed, and look at it."""
        session = self._session
        for i in self._loaded.workload.outputs:
            self._loaded.memory[i].poison_inside(session.queue, self._poison)
        session.queue.finish()
        self._announce("run", session.limits.run_seconds + _SLACK)
        run = runnable.run(session.read)
        _demand(checks.completed(run), tainted=True)
        self._announce("host", session.limits.host_seconds)
        self._fetch()
        self._check_bands()
        self._check_right(number)
        return run

    def _check_bands(self) -> None:
        if not self._session.checks.guards:
            return
        for i, memory in enumerate((*self._loaded.memory, *self._inner)):
            _demand(checks.guard_intact(*memory.bands, self._poison, self._name(i)), tainted=True)

    def _check_inputs(self, number: int) -> None:
        if not self._session.checks.inputs:
            return
        for i, given in self._loaded.given[number].items():
            memory = self._loaded.memory[i]
            memory.fetch(self._session.queue, inside=True)
            _demand(checks.unchanged(given, memory.array, self._name(i)))

    def _check_right(self, number: int) -> None:
        if not self._session.checks.right:
            return
        for i, expected in self._loaded.expected[number].items():
            _demand(checks.right(expected, self._loaded.memory[i].array, self._name(i)))

    def _failed(self, error: Any) -> Refusal:
        code = getattr(error, "code", None)
        name = cl.status_code.to_string(code, "unknown error {0}") if code is not None else str(error)
        routine = getattr(error, "routine", None) or "a driver call"
        if code in _MEMORY_CODES:
            return Refusal(Outcome.MEMORY, f"the device ran out of memory ({routine}: {name})")
        return Refusal(Outcome.RUN, f"the driver reports {name} ({routine}, {code})")

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
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now


def _demand(refusal: Refusal | None, *, tainted: bool = False) -> None:
    if refusal is not None:
        raise Dropped(refusal, tainted=tainted)
