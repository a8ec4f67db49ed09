"""A session's bookkeeping, with real records and a real measuring child; only what is proposed is planted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from honed.machine import peaks
from honed.machine.devices import Device
from honed.machine.kernellog.reader import Reader
from honed.machine.peaks import survey
from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource, SearchStrategy
from honed.tuner.compiler.fusion import FusionAlternatives
from honed.tuner.compiler.schedules import read_records
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.records.rows import (
    DefaultScheduleTime,
    MeasurementSetup,
    NewCandidate,
    Outcome,
    StoredOutcome,
    Timing,
    Verdict,
)
from honed.tuner.records.store import Records
from honed.tuner.setup import PREDICTED, for_defaults, setup_for
from honed.tuner.tune.children import (
    DefaultSchedule,
    LoadedTask,
    Proposed,
    ProposedCandidate,
    SearchChild,
    SearchFailed,
)
from honed.tuner.tune.session import SearchBudget, TuningSession
from honed.tuner.tune.task import ModelTasks, TaskState, TuningTask
from honed.tuner.tune.trials import Speed
from tests.tuner import running
from tests.tuner.liars import honest
from tests.tuner.measure.test_liars import InjectedLog, cs_fatal
from tests.tuner.records.test_records import weights

N = honest.N
SLOW = honest.SCALE.replace("{\n", "{\n  for (volatile int n = 0; n < 400; ++n) {}\n", 1)


class Planted:
    """Proposes batches of sources, each once; an exception among them is raised in its turn."""

    def __init__(self, workload: Workload, batches: Sequence[Sequence[str] | SearchFailed]) -> None:
        self.workload = workload
        self.batches = list(batches)
        self.known: list[tuple[str, float | None]] = []
        self.results: dict[str, float | None] = {}
        self.kin: list[str] = []
        self.defaults: list[str] = []  # tasks whose default schedule was asked for
        self.following: list[list[str]] = []  # tasks named behind each
        self.settled: list[bool] = []
        self.begun: list[str] = []  # tasks that a batch was asked for
        self.replayed: list[str] = []

    def extract(self) -> ModelTasks:
        task = TuningTask(
            key="scale",
            name="scale",
            weight=1,
            flops=self.workload.flops,
            bytes=self.workload.bytes,
            dtype="float32",
            opaque="",
        )
        return ModelTasks(tasks=(task,))

    def load(self, _task: TuningTask) -> LoadedTask:
        return LoadedTask(workload=replace(self.workload, task="scale"), fresh=True)

    def default(self, task: TuningTask, following: Sequence[TuningTask], *, settle: bool) -> DefaultSchedule:
        self.defaults.append(task.key)
        self.following.append([one.key for one in following])
        self.settled.append(settle)
        return DefaultSchedule(loaded=self.load(task), candidate=self._made(SLOW))

    def begin(
        self, task: TuningTask, known: Sequence[tuple[str, float | None]], kin: Sequence[str], _round: int
    ) -> None:
        self.begun.append(task.key)
        self.known += known
        self.kin += kin
        self.asked = task

    def collect(self) -> Proposed:
        batch = self.batches.pop(0) if self.batches else ()
        if isinstance(batch, SearchFailed):
            raise batch
        entries = [self._entry(source) for source in batch]
        return Proposed(
            loaded=self.load(self.asked), entries=tuple(entries), way=SearchStrategy.EVOLUTION, last=False
        )

    def replay(self, _task: str, traces: Sequence[str]) -> list[ProposedCandidate]:
        self.replayed += traces
        return [self._entry(json.loads(trace)[0]) for trace in traces]

    def learn(self, _task: str, results: Mapping[str, float | None]) -> None:
        self.results.update(results)

    def _made(self, source: str) -> Candidate:
        return honest.candidate(self.workload, source, groups=N // 64)

    def _entry(self, source: str) -> ProposedCandidate:
        """What has the form `! REASON` was refused by lowering."""
        key = hashlib.sha256(source.encode()).hexdigest()
        if source.startswith("! "):
            return ProposedCandidate(key, trace(source), None, None, source[2:])
        return ProposedCandidate(key, trace(source), None, replace(self._made(source), id=key), "")


def trace(source: str) -> str:
    return json.dumps([source])


def marked(number: int) -> str:
    """A right kernel, another one for each number."""
    return f"{honest.SCALE}// {number}\n"


def slow(number: int) -> str:
    """A right kernel that wins nothing, another one for each number."""
    return f"{SLOW}// {number}\n"


@pytest.fixture
def tuned(
    device: Device, profile: DeviceProfile, workload: Workload, tmp_path: Path
) -> Callable[..., tuple[TuningSession, Planted, list[dict[str, Any]]]]:
    """Runs a session over planted batches."""

    def run(
        batches: Sequence[Sequence[str] | SearchFailed],
        *,
        believed: DeviceProfile = profile,
        on_event: Callable[[TuningSession, dict[str, Any]], None] = lambda _session, _event: None,
        kernel_log: InjectedLog | None = None,
        ahead: bool = False,
    ) -> tuple[TuningSession, Planted, list[dict[str, Any]]]:
        planted, events = Planted(workload, batches), list[dict[str, Any]]()

        def emit(event: dict[str, Any]) -> None:
            events.append(event)
            on_event(session, event)

        with running.session(
            device.spec,
            believed,
            tmp_path / "records.sqlite",
            cast("SearchChild", planted),
            emit,
            kernel_log=cast("Reader | None", kernel_log),
            peaks_again=lambda: profile,
            ahead=ahead,
        ) as session:
            session.run(planted.extract, SearchBudget(seconds=60))
        return session, planted, events

    return run


@pytest.fixture
def kept(tmp_path: Path) -> Callable[..., Records]:
    return lambda host=None: Records.open(tmp_path / "records.sqlite", measured_by=host)


def test_what_was_refused_before_it_ran_is_no_trial(tuned: Any, profile: DeviceProfile, kept: Any) -> None:
    long = honest.SCALE + "//" + "x" * profile.rules.max_source_bytes
    session, planted, events = tuned([["! it cannot be lowered", long, marked(1)], []])
    (progress,) = session.tasks
    assert (session.trials, progress.trials, progress.filtered.total()) == (1, 1, 2)
    assert not progress.failures
    assert [e["event"] for e in events if e["event"] in ("trial", "filtered")] == [
        "filtered",
        "filtered",
        "trial",
    ]
    assert sorted(s is None for s in planted.results.values()) == [False, True, True]
    assert progress.stage is TaskState.TUNED
    with kept() as records:
        assert len(records.history("scale", session.setup)) == 1


def test_a_run_in_which_nothing_can_be_tried_ends_early_and_says_so(tuned: Any) -> None:
    session, planted, _ = tuned([[f"! its schedule {n} asks for too much"] for n in range(50)])
    (progress,) = session.tasks
    assert session.trials == 0
    assert len(planted.batches) > 40
    assert progress.stage is TaskState.SKIPPED
    assert "could be tried: its schedule" in progress.reason


def test_a_history_begins_with_the_default_schedules(tuned: Any, kept: Any) -> None:
    tuned([[marked(1)]])
    tuned([[marked(2)]])
    with kept() as records:
        assert [v.why for v in records.versions("m")] == ["default schedules"]


@pytest.mark.slow
def test_a_broken_search_is_taken_up_again_once(tuned: Any) -> None:
    broke = SearchFailed("a step cannot be replayed")
    session, _, events = tuned([broke, [marked(1)], []])
    (progress,) = session.tasks
    assert progress.stage is TaskState.TUNED
    assert progress.best_trace == trace(marked(1))
    assert [e["reason"] for e in events if e["event"] == "broke"] == [f"its search ended: {broke}"]


def test_a_search_that_broke_twice_is_lost(tuned: Any) -> None:
    broke = SearchFailed("a step cannot be replayed")
    session, planted, _ = tuned([broke, broke, [marked(1)]])
    (progress,) = session.tasks
    assert progress.stage is TaskState.FAILED
    assert progress.reason == f"its search ended: {broke}"
    assert len(planted.batches) == 1


@pytest.mark.slow
def test_peaks_that_are_met_are_measured_again(tuned: Any, profile: DeviceProfile) -> None:
    """Kept from a busy moment, a peak makes every schedule look as fast as can be."""
    assert profile.peaks is not None
    busy = replace(profile.peaks, bandwidth_gbs=1e-3, fp32_gflops=1e-3, caches_gbs=((1 << 16, 1e-3),))
    session, planted, _ = tuned([[marked(1)], []], believed=replace(profile, peaks=busy))
    (progress,) = session.tasks
    assert planted.results
    assert progress.stage is TaskState.TUNED
    rate = session._rooflines.rates["scale"]
    assert session.profile.peaks is not None
    assert progress.roofline == pytest.approx(progress.task.roofline(session.profile.peaks, rate))
    assert progress.roofline < progress.task.roofline(busy, rate)
    assert session.profile.peaks.fp32_gflops > 1e3 * busy.fp32_gflops, "however busy the machine is now"


@pytest.mark.slow
def test_low_peaks_do_not_stay(device: Device, profile: DeviceProfile, tmp_path: Path) -> None:
    assert profile.peaks is not None
    low = replace(profile.peaks, fp32_gflops=profile.peaks.fp32_gflops / 100)
    peaks.keep(replace(profile, peaks=low), tmp_path)
    assert survey(device.spec, tmp_path).profile.peaks == low
    again = survey(device.spec, tmp_path, again=True).require_peaks()
    assert again.peaks is not None
    assert again.peaks.fp32_gflops > 5 * low.fp32_gflops
    assert again.peaks.bandwidth_gbs >= low.bandwidth_gbs
    assert survey(device.spec, tmp_path).profile == again


@pytest.mark.slow
def test_throttling_shows_in_the_records(tuned: Any, kept: Any) -> None:
    session, _, _ = tuned([[marked(1)]])
    with kept() as records:
        reference = records.yardstick(session.setup)
        (candidate,) = records.history("scale", session.setup)
        assert reference is not None
        assert candidate.timing.yardstick_ratio > 0
        assert records.keep_yardstick(session.setup, 2 * reference) == reference


def test_speed_follows_what_lasts_and_not_what_passes() -> None:
    speed = Speed(1e-3)
    assert speed.ratio == 1.0
    for yardstick in (1e-3, 1e-3, 1e-3, 3e-3, 1e-3):
        speed.note(yardstick)
    assert speed.ratio == pytest.approx(1.0)
    for _ in range(3):
        speed.note(2e-3)
    assert speed.ratio == pytest.approx(2.0)
    assert Speed(None).ratio == 1.0


def test_speed_rests_on_yardsticks_of_one_clock() -> None:
    speed = Speed(1e-3)
    for _ in range(5):
        speed.note(1e-3, 1_000_000_000)
    speed.note(2e-3, 500_000_000)
    assert (speed.ratio, speed.known) == (pytest.approx(2.0), 1)
    speed.note(1e-3, 1_000_000_000)
    assert (speed.ratio, speed.known) == (pytest.approx(1.0), 5)


def test_a_fault_that_comes_to_light_later_condemns_the_candidate(tuned: Any, kept: Any) -> None:
    """The last candidate of all was found right; its fault is logged only then."""
    log = InjectedLog()

    def on_event(session: TuningSession, event: dict[str, Any]) -> None:
        if event["event"] == "trial" and event["us"] is not None and session.trials == 2:
            log.arm(cs_fatal(session._trying.measurer.pid))

    session, _, events = tuned([[SLOW + "// 1", marked(2)], []], on_event=on_event, kernel_log=log)
    log.close()
    (progress,) = session.tasks
    assert [e["outcome"] for e in events if e["event"] == "trial"] == ["right", "right"]
    assert "CS_CONFIG_FAULT" in next(e["reason"] for e in events if e["event"] == "condemned")
    assert progress.failures == {"fault": 1}
    assert progress.best_trace != trace(marked(2))
    with kept() as records:
        (condemned,) = records.list_quarantined(session.setup)
        assert condemned.trace == trace(marked(2))
        assert condemned.outcome is StoredOutcome.FAULTED
        assert "CS_FATAL.EXCEPTION_TYPE: 0x40" in condemned.story


@pytest.mark.slow
def test_a_fault_has_its_whole_story_recorded(tuned: Any, kept: Any) -> None:
    log = InjectedLog()

    def on_event(session: TuningSession, event: dict[str, Any]) -> None:
        if event["event"] == "tasks":
            log.arm(cs_fatal(session._trying.measurer.pid))

    session, _, _ = tuned([[marked(1)], []], on_event=on_event, kernel_log=log)
    log.close()
    with kept() as records:
        (faulted,) = records.list_quarantined(session.setup)
    assert "CS_FATAL_INFO.EXCEPTION_DATA: 0x0" in faulted.story


@pytest.mark.slow
def test_what_is_in_quarantine_is_not_tried(tuned: Any, kept: Any, profile: DeviceProfile) -> None:
    """By its trace, and by its kernels' source, of whichever task."""
    setup = setup_for(profile.identity)
    with kept() as records:
        for number, task in ((1, "scale"), (2, "another")):
            source = marked(number)
            digest = hashlib.sha256(source.encode()).hexdigest()
            new = NewCandidate(workload=task, setup=setup, trace=trace(source), source_sha256=digest)
            verdict = Verdict(outcome=Outcome.FAULT, reason="it faulted")
            records.finish(records.begin(new), verdict)
    session, planted, _ = tuned([[marked(1), marked(2), marked(3)], []])
    assert session.trials == 1
    assert len(planted.results) == 1


@pytest.mark.slow
def test_what_the_driver_does_not_build_is_not_tried_again_until_it_changes(
    tuned: Any, kept: Any, profile: DeviceProfile
) -> None:
    """By a later run, nor where another schedule, or another compiler, makes the kernel."""
    refused = f"{honest.SCALE}#error not by this driver\n"
    session, _, events = tuned([[refused], []])
    assert [e["outcome"] for e in events if e["event"] == "trial"] == ["build"]
    again, planted, events = tuned([[refused], []])
    assert again.trials == 0
    assert set(planted.known) == {(trace(refused), None)}
    assert not any(event["event"] == "trial" for event in events)
    source = hashlib.sha256(refused.encode()).hexdigest()
    with kept() as records:
        (one,) = records.history("scale", session.setup)
        assert "not by this driver" in one.reason
        other = replace(session.setup, compiler="another")
        assert not records.may_run(other, "scale", "another schedule", source)
        newer = replace(profile.identity, driver_version="a newer one")
        assert records.may_run(setup_for(newer), "scale", one.trace_sha256, source)


@pytest.mark.slow
def test_how_a_candidate_was_found_is_recorded(tuned: Any, kept: Any) -> None:
    session, _, _ = tuned([[marked(1)], []])
    with kept() as records:
        assert [c.way for c in records.history("scale", session.setup)] == [SearchStrategy.EVOLUTION]


@pytest.mark.slow
def test_the_best_of_another_driver_is_measured_again_first(
    tuned: Any, kept: Any, profile: DeviceProfile
) -> None:
    identity = replace(profile.identity, driver_version="an older one")
    timing = Timing(median_s=1e-9, low_s=1e-9, high_s=1e-9, repeats=3)
    with kept() as records:
        new = NewCandidate(workload="scale", setup=setup_for(identity), trace=trace(marked(1)))
        records.finish(records.begin(new), Verdict(outcome=Outcome.RIGHT, timing=timing))
    session, planted, _ = tuned([[marked(2)], []])
    assert planted.replayed == [trace(marked(1))]
    (progress,) = session.tasks
    assert progress.trials >= 1
    assert progress.best > 1e-9
    with kept() as records:
        ways = {c.trace: c.way for c in records.history("scale", session.setup)}
    assert ways[trace(marked(1))] is SearchStrategy.REVALIDATED


def test_the_next_batch_is_asked_for_before_this_one_is_measured(tuned: Any) -> None:
    order: list[str] = []

    def note(session: TuningSession, event: dict[str, Any]) -> None:
        if event["event"] in ("trial", "round"):
            order.append(f"{event['event']} {len(session._proposals.search.begun)}")

    batches = [[slow(1)], [slow(2)], []]
    session, planted, events = tuned(batches, on_event=note, ahead=True)
    assert order[:4] == ["trial 2", "round 2", "trial 3", "round 3"]
    assert session.trials == 2
    assert len(planted.results) == 2
    rounds = [event for event in events if event["event"] == "round"]
    assert rounds[0]["way"] == "evolution"
    spent = asdict(session.spent)
    assert spent == pytest.approx(
        {name: sum(event["spent"][name] for event in rounds) for name in rounds[0]["spent"]}, abs=1e-2
    )
    assert all(spent[name] > 0 for name in ("build", "check", "measure"))


@pytest.mark.slow
def test_a_batch_that_breaks_beside_another_breaks_in_its_turn(tuned: Any) -> None:
    broke = SearchFailed("the compiler ended")
    session, planted, events = tuned([[slow(1)], broke, [slow(2)], []], ahead=True)
    assert session.trials == 2
    assert len(planted.results) == 2
    assert "broke" not in {event["event"] for event in events}, "it was asked again, and went well"


@pytest.mark.slow
def test_the_best_of_other_tasks_is_offered_as_kin_once(
    tuned: Any, kept: Any, profile: DeviceProfile
) -> None:
    setup = setup_for(profile.identity)
    with kept() as records:
        for task, seconds in (("another", 2e-3), ("another", 1e-3), ("a third", 1e-3), ("scale", 1e-3)):
            name = trace(f"{task} {seconds}")
            timing = Timing(median_s=seconds, low_s=seconds, high_s=seconds, repeats=3)
            new = NewCandidate(workload=task, setup=setup, trace=name)
            records.finish(records.begin(new), Verdict(outcome=Outcome.RIGHT, timing=timing))
    _, planted, _ = tuned([[marked(1)], [marked(2)], []])
    assert sorted(planted.kin) == sorted([trace("another 0.001"), trace("a third 0.001")])


def test_a_recorded_schedule_slower_than_the_default_is_not_compiled(
    kept: Any, profile: DeviceProfile, tmp_path: Path
) -> None:
    tvm = pytest.importorskip("tvm")
    setup: MeasurementSetup = setup_for(profile.identity)
    with kept() as records:
        timing = Timing(median_s=2e-3, low_s=2e-3, high_s=2e-3, repeats=3)
        new = NewCandidate(workload="scale", setup=setup, trace="[]")
        records.finish(records.begin(new), Verdict(outcome=Outcome.RIGHT, timing=timing))
        kept_under = for_defaults(setup, profile.rules.family)
        records.put_default("scale", kept_under, DefaultScheduleTime(seconds=1e-3, rate=None))
    choose = read_records(tmp_path / "records.sqlite", profile).schedules
    func = tvm.te.create_prim_func([tvm.te.placeholder((4,), name="x")])
    assert choose("scale", func) is None


def test_a_recorded_schedule_says_where_it_comes_from(kept: Any, profile: DeviceProfile) -> None:
    tvm = pytest.importorskip("tvm")
    func = tvm.te.create_prim_func([tvm.te.placeholder((4,), name="x")])
    bench = replace(profile.identity, platform=PREDICTED)
    timing = Timing(median_s=1e-3, low_s=1e-3, high_s=1e-3, repeats=3)
    right = Verdict(outcome=Outcome.RIGHT, timing=timing)
    text = "[[],[]]"

    def said(
        identity: DeviceIdentity, way: SearchStrategy | None, host: str | None = None
    ) -> tuple[ScheduleSource, SearchStrategy | None]:
        new = NewCandidate(workload=f"{way} {host}", setup=setup_for(identity), trace=text, way=way)
        with kept(host) as records:
            records.finish(records.begin(new), right)
        chosen = read_records(records.path, replace(profile, identity=identity)).schedules(new.workload, func)
        assert chosen is not None
        origin = ScheduleProvenance.parse(chosen[0])
        return origin.source, origin.way

    assert said(profile.identity, SearchStrategy.RELATED) == (ScheduleSource.MEASURED, SearchStrategy.RELATED)
    assert said(profile.identity, None) == (ScheduleSource.MEASURED, None)
    assert said(profile.identity, SearchStrategy.RELATED, "another host") == (ScheduleSource.RECORD, None)
    assert said(bench, SearchStrategy.DESCENT) == (ScheduleSource.PREDICTED, SearchStrategy.DESCENT)


class Several(Planted):
    """Tasks of one workload and no candidates; which of them were loaded."""

    def __init__(self, workload: Workload, count: int) -> None:
        super().__init__(workload, [])
        self.count = count
        self.loaded: list[str] = []

    def extract(self) -> ModelTasks:
        (task,) = super().extract().tasks
        return ModelTasks(
            tasks=tuple(replace(task, key=f"scale{n}", weight=n + 1) for n in range(self.count))
        )

    def load(self, task: TuningTask) -> LoadedTask:
        self.loaded.append(task.key)
        return LoadedTask(workload=replace(self.workload, task=task.key), fresh=True)


@pytest.mark.slow
def test_default_schedules_are_timed_again_only_to_tell_the_devices_speed(
    device: Device, profile: DeviceProfile, workload: Workload, tmp_path: Path
) -> None:
    def run(count: int, *, trust: bool) -> tuple[list[str], dict[str, float | None], list[float]]:
        planted = Several(workload, count)
        with running.session(
            device.spec,
            profile,
            tmp_path / "records.sqlite",
            cast("SearchChild", planted),
            lambda _: None,
            trust_defaults=trust,
        ) as session:
            session.run(planted.extract, SearchBudget(trials=0))
            return (
                planted.loaded,
                {p.task.key: p.default for p in session.tasks},
                [p.roofline for p in session.tasks],
            )

    loaded, first, rooflines = run(7, trust=False)
    assert len(loaded) == 7
    assert len(run(7, trust=False)[0]) == 7
    loaded, again, known = run(8, trust=True)
    assert loaded[0] == "scale7", "the one that is new"
    assert len(loaded) == 5, "as many as tell the speed"
    assert set(again) == {*first, "scale7"}
    assert all(again.values())
    # The machine may have been busy in one of the runs.
    assert all(0.1 < now / then < 10 for now, then in zip(known, rooflines, strict=False))


@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_default_schedules_are_begun_with_each(
    device: Device, profile: DeviceProfile, workload: Workload, tmp_path: Path, ahead: bool
) -> None:
    """Where nothing may run beside what is timed, all that is begun must be done before."""
    planted = Several(workload, 3)
    with running.session(
        device.spec,
        profile,
        tmp_path / "records.sqlite",
        cast("SearchChild", planted),
        lambda _: None,
        ahead=ahead,
    ) as session:
        session.run(planted.extract, SearchBudget(trials=0))
    assert planted.defaults == planted.loaded == ["scale0", "scale1", "scale2"]
    assert planted.following == [["scale1", "scale2"], ["scale2"], []]
    assert planted.settled == [not ahead] * 3
    assert all(p.default for p in session.tasks)


@pytest.mark.slow
def test_what_another_tuner_has_in_flight_is_left_to_it(
    tuned: Any, kept: Any, profile: DeviceProfile
) -> None:
    setup = setup_for(profile.identity)
    with kept() as records:
        number = records.begin(NewCandidate(workload="scale", setup=setup, trace=trace(marked(1))))
        session, _, _ = tuned([[marked(1), marked(2)], []])
        assert session.trials == 1
        records.withdraw(number)


class Rivalling(Several):
    """A task, and another that is its rival: the same work, whose candidates are tried in its turn."""

    contest = FusionAlternatives(
        name="n", fused="scale0", unfused=("scale1",), calls=1, launch=0.0, expected="joined"
    )

    def __init__(self, workload: Workload, batches: Sequence[Sequence[str] | SearchFailed]) -> None:
        super().__init__(workload, 2)
        self.batches = list(batches)
        self.timed: list[str] = []  # and tried, in this order

    def extract(self) -> ModelTasks:
        one, rival = super().extract().tasks
        return ModelTasks(tasks=(one, replace(rival, weight=0)), contests=(self.contest,))

    def default(self, task: TuningTask, *given: Any, **more: Any) -> DefaultSchedule:
        self.timed.append(f"default of {task.key}")
        return super().default(task, *given, **more)

    def begin(self, task: TuningTask, *given: Any) -> None:
        self.timed.append(f"a batch of {task.key}")
        super().begin(task, *given)


def test_a_rival_is_timed_after_a_round_and_takes_the_place_of_what_it_beats(
    device: Device, profile: DeviceProfile, workload: Workload, tmp_path: Path
) -> None:
    def run(batches: Sequence[Sequence[str] | SearchFailed]) -> tuple[Rivalling, TuningSession]:
        planted = Rivalling(workload, batches)
        records = tmp_path / "records.sqlite"
        search = cast("SearchChild", planted)
        with running.session(device.spec, profile, records, search, lambda _event: None) as session:
            session.run(planted.extract, SearchBudget(seconds=60))
            assert weights(session.records, "m").keys() == {"scale0"}
        return planted, session

    planted, session = run([[slow(1)], [], [marked(2)], []])
    assert planted.timed[:3] == ["default of scale0", "a batch of scale0", "default of scale1"]
    assert "a batch of scale1" in planted.timed
    assert {p.task.key: p.weight for p in session.tasks} == {"scale0": 0, "scale1": 1}
    assert session.improved
    (form,) = session.table().forms
    assert form.taken == "apart"
    assert form.joined_us is not None
    assert form.apart_us is not None
    assert form.apart_us < form.joined_us

    again, _ = run([[], []])
    assert again.timed[0] == "default of scale0"
    assert "default of scale1" not in again.timed, "what the records know of a rival is believed"
