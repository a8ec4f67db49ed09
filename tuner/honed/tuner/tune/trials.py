"""Trials: candidates measured one by one, each recorded before it runs and judged after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from honed.jobs.events import Spent
from honed.machine.kernellog.story import FaultIncident
from honed.protocol.errors import AlreadyExists, DeviceError, HonedError
from honed.runtime.compiled.model import SearchStrategy
from honed.tuner.measure.candidate import Begin, Candidate, CandidateRunner, Workload
from honed.tuner.records.rows import MeasurementSetup, NewCandidate, Outcome, Verdict, sha256
from honed.tuner.records.store import InQuarantine, Records

T = TypeVar("T")
_STARTS = 3  # Times a measuring child is started for one candidate before the device is given up
_REMEMBERED = 256  # Candidates; faults come to light within seconds
_LEAST_YARDSTICKS = 5  # Yardsticks needed for a reference speed
# Yardsticks that determine the present speed. Throttling lasts far longer than a candidate; one yardstick
# alone is off by up to a factor of two now and then, when something else ran beside it.
_WINDOW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The result of a candidate; times are at the device's reference speed."""

    verdict: Verdict
    ran: bool  # False: it was refused before anything reached the device

    @property
    def seconds(self) -> float | None:
        """Seconds of one run at reference speed; None unless the candidate is right."""
        return self.verdict.timing.fair_s if self.verdict.timing else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A candidate of this run.

    `record` is 0 and `trace` None for a default schedule, which is not recorded.
    """

    record: int
    task: str
    trace: str | None


class Speed:
    """The device's present speed, by the yardsticks measured beside candidates; seconds.

    Yardsticks at another clock than the latest's are ignored.
    """

    def __init__(self, reference: float | None) -> None:
        """Begin with the yardstick's seconds at the device's reference speed; None if unknown."""
        self.reference = reference
        self._at: dict[int | None, deque[float]] = {}  # The latest, by clock in Hz; None: unknown clock
        self._latest: deque[float] = deque()  # Yardsticks at the latest clock

    @property
    def known(self) -> int:
        """Number of yardsticks that determine `now`."""
        return len(self._latest)

    @property
    def now(self) -> float | None:
        """Seconds of the yardstick at present, a median; None before the first."""
        return median(self._latest) if self._latest else None

    @property
    def ratio(self) -> float:
        """The divisor that converts times to reference speed; above 1 the device is slowed."""
        now = self.now
        return 1.0 if now is None or self.reference is None else now / self.reference

    def note(self, yardstick: float, clock_hz: int | None = None) -> None:
        """Add a yardstick's seconds, measured at `clock_hz`."""
        self._latest = self._at.setdefault(clock_hz, deque(maxlen=_WINDOW))
        self._latest.append(yardstick)


class Trials:
    """The measurer and the records, kept in step. A context manager, as the measurer is."""

    def __init__(
        self,
        measurer: Callable[[Begin], CandidateRunner],
        records: Records,
        setup: MeasurementSetup,
    ) -> None:
        """Open the measurer: `measurer` builds one that calls its argument before a candidate is judged."""
        self.measurer = measurer(self._begin)
        self.records = records
        self.setup = setup
        self.speed = Speed(records.yardstick(setup))
        self.workload: Workload | None = None
        self._tried: dict[
            str, tuple[str, SearchStrategy]
        ] = {}  # Traces and how they were found, by candidate id
        self._flight: dict[str, int] = {}  # Record ids by candidate id
        self._known: dict[str, Tried] = {}  # Latest candidates by id
        self._late: list[tuple[str, FaultIncident]] = []
        self._banned: set[str] = set()  # Candidate ids

    def __enter__(self) -> Trials:
        return self

    def __exit__(self, *_: object) -> None:
        self.measurer.close()

    def load(self, workload: Workload) -> None:
        """Measure candidates of `workload` from now on."""
        self.workload = workload
        self._again(lambda: self.measurer.load(workload))

    def unload(self) -> None:
        """Forget the workload, so that it is loaded again before the next trial."""
        self.workload = None

    def default(self, candidate: Candidate) -> TrialResult:
        """Measure the loaded workload's default schedule, which is not recorded."""
        assert self.workload is not None
        named = replace(candidate, id=f"default {self.workload.task}")
        verdict = self._again(lambda: self.measurer.measure(named))
        self._know(named.id, Tried(record=0, task=self.workload.task, trace=None))
        return TrialResult(verdict=self._fair(verdict), ran=True)

    @property
    def wants_yardsticks(self) -> bool:
        """Return whether more default schedules must be measured before the reference speed is known."""
        return self.speed.reference is None and 0 < self.speed.known < _LEAST_YARDSTICKS

    @property
    def knows_speed(self) -> bool:
        """Return whether enough was measured to compare the present speed with the reference speed."""
        return self.speed.reference is not None and self.speed.known >= _LEAST_YARDSTICKS

    def settle_speed(self) -> None:
        """Make the speed at which default schedules were measured the reference, where there is none."""
        if self.speed.reference is None and self.speed.now is not None:
            self.speed.reference = self.records.keep_yardstick(self.setup, self.speed.now)

    def build(self, candidates: Sequence[tuple[Candidate, str]]) -> None:
        """Have candidates, given with their traces, built ahead, the next to be tried first.

        They are not noted: the driver's compiler alone cannot harm the device.
        """
        self.measurer.build([candidate for candidate, trace in candidates if self._may_run(candidate, trace)])

    def prepare(self, candidate: Candidate, trace: str, way: SearchStrategy) -> None:
        """Have a candidate built beside the next one to be tried, where the device allows that."""
        if not self.measurer.ahead or not self._may_run(candidate, trace):
            return
        self._tried[candidate.id] = trace, way
        try:
            self.measurer.prepare(candidate)
        except (InQuarantine, AlreadyExists):  # Another tuner was faster
            self._banned.add(candidate.id)

    def _may_run(self, candidate: Candidate, trace: str) -> bool:
        assert self.workload is not None
        if candidate.id in self._flight:  # Recorded when it was built beside the one before
            return True
        return candidate.id not in self._banned and self.records.may_run(
            self.setup, self.workload.task, sha256(trace), sha256(candidate.source)
        )

    def measure(
        self, candidate: Candidate, trace: str, way: SearchStrategy, best: float | None
    ) -> TrialResult | None:
        """Try a candidate; `way` is how it was found, `best` its workload's best time at reference speed.

        None where its kernels are in quarantine or another tuner has them in flight. Raises DeviceError
        where the device cannot be used any more.
        """
        if not self._may_run(candidate, trace):
            return None
        self._tried[candidate.id] = trace, way
        known = None if best is None else best * self.speed.ratio
        try:
            verdict = self._again(lambda: self.measurer.measure(candidate, known))
        except (InQuarantine, AlreadyExists):
            return None
        number = self._flight.pop(candidate.id, None)
        if number is None:
            return TrialResult(verdict=verdict, ran=False)
        return TrialResult(verdict=self._record(candidate.id, number, trace, verdict), ran=True)

    def withdraw(self) -> None:
        """End a batch: withdraw prepared candidates that never ran, and forget builds.

        Unrequested runs are recorded but are no trials.
        """
        for name, verdict in self.measurer.forget().items():
            if name in self._flight:
                self._record(name, self._flight.pop(name), self._tried[name][0], verdict)
        for number in self._flight.values():
            with suppress(HonedError):
                self.records.withdraw(number)
        self._flight.clear()

    def _record(self, candidate_id: str, number: int, trace: str, verdict: Verdict) -> Verdict:
        """Complete the verdict, record it, and return it as recorded."""
        story = self._story(candidate_id, number, trace)
        if story is not None and verdict.outcome is Outcome.RIGHT:
            verdict = Verdict(outcome=Outcome.FAULT, reason=_reason(story), host=verdict.host)
        verdict = replace(self._fair(verdict), story=story)
        self.records.finish(number, verdict)
        return verdict

    def take_condemned(self, *, settle: bool) -> list[tuple[Tried, str]]:
        """Return candidates, now in quarantine, whose faults were logged after their verdicts, with reasons.

        With `settle`, wait until a fault of the last candidate must be in the kernel log.
        """
        if settle:
            self.measurer.settle()
        self._late += self.measurer.take_faults()
        late, self._late = self._late, []
        found = []
        for name, story in late:
            known = self._known.pop(name, None)
            if known is None:
                continue
            text = _text(story)
            if known.record:
                self.records.condemn(known.record, _reason(text), text)
            found.append((known, _reason(text)))
        return found

    def _again(self, do: Callable[[], T]) -> T:
        """Call `do`, again if a measuring child that it starts dies at its start."""
        for _ in range(_STARTS - 1):
            with suppress(DeviceError):
                return do()
        return do()

    def _begin(self, candidate: Candidate) -> None:
        """Record a candidate before it may touch the device."""
        tried = self._tried.get(candidate.id)
        if tried is None or self.workload is None:
            return
        trace, way = tried
        new = NewCandidate(
            workload=self.workload.task,
            setup=self.setup,
            trace=trace,
            source_sha256=sha256(candidate.source),
            way=way,
        )
        self._flight[candidate.id] = self.records.begin(new)

    def _story(self, candidate_id: str, number: int, trace: str) -> str | None:
        """Return the kernel log's text on a fault of the candidate just measured; keep others for later."""
        assert self.workload is not None
        faults = self.measurer.take_faults()
        own = [_text(story) for name, story in faults if name == candidate_id]
        self._late += [(name, story) for name, story in faults if name != candidate_id]
        if own:
            return "\n".join(own)
        self._know(candidate_id, Tried(record=number, task=self.workload.task, trace=trace))
        return None

    def _know(self, candidate_id: str, tried: Tried) -> None:
        self._known.pop(candidate_id, None)
        self._known[candidate_id] = tried
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _fair(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the ratio of the device's present to its reference speed, where known.

        The verdict of a farm's board already has the ratio of that board to the farm. Here it is multiplied
        by the farm's own ratio, because the farm is the device.
        """
        if verdict.yardstick_s is not None:
            # A farm's boards have clocks that are not comparable with the farm's.
            self.speed.note(verdict.yardstick_s, verdict.clock_hz if verdict.host is None else None)
        if verdict.timing is None or self.speed.reference is None:
            return verdict
        ratio = (verdict.timing.yardstick_ratio or 1.0) * self.speed.ratio
        return replace(verdict, timing=replace(verdict.timing, yardstick_ratio=ratio))


def _text(story: FaultIncident) -> str:
    return "\n".join(fault.text.strip() for fault in story.faults)


def _reason(story: str) -> str:
    return f"the kernel log has a fault of it: {' / '.join(story.splitlines())[:300]}"


def on_candidate(phases: Mapping[str, float], seconds: float) -> Spent:
    """Return how the `seconds` of a candidate were spent; `phases` is `CandidateRunner.spent` of it."""
    build = phases.get("build", 0.0) + phases.get("first", 0.0)  # Some drivers compile at the first launch
    timing = phases.get("time", 0.0)
    return Spent(build=build, check=max(0.0, seconds - build - timing), measure=timing)
