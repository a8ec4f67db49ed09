"""What a session sees of a farm's boards, which are planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from honed.farm import rows
from honed.farm.boards import FarmChoice, choose_device
from honed.farm.measurer import FarmMeasurer
from honed.machine.kernellog.story import FaultIncident
from honed.protocol.errors import DeviceError, Unavailable
from honed.runtime.compiled.model import SearchStrategy
from honed.tuner.measure.candidate import Begin, Candidate, Workload
from honed.tuner.records.rows import Outcome, StoredOutcome
from honed.tuner.records.store import InQuarantine, Records
from honed.tuner.setup import setup_for
from honed.tuner.tune.trials import Trials
from honed.valhall.bench import bench_profile
from tests.tuner.liars import honest

from .planted import PlantedBoard, PlantedBoards, right

PROFILE = bench_profile("mali-g610")


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return honest.scale(tmp_path_factory.mktemp("tasks") / "scale", 64)


def candidates(workload: Workload, count: int) -> list[Candidate]:
    return [replace(honest.candidate(workload, honest.SCALE, groups=1), id=f"c{n}") for n in range(count)]


class Told:
    """What was noted before it ran, and what was said."""

    def __init__(self, *banned: str) -> None:
        self.noted: list[str] = []
        self.said: list[str] = []
        self.banned = banned

    def begin(self, candidate: Candidate) -> None:
        if candidate.id in self.banned:
            raise InQuarantine(f"{candidate.id} is in quarantine")
        self.noted.append(candidate.id)


def measuring(boards: PlantedBoards, told: Told, workload: Workload) -> FarmMeasurer:
    made = FarmMeasurer(boards, PROFILE, "", told.begin, told.said.append, ahead=64, clock=boards.clock)
    made.load(workload)
    return made


def test_peaks_are_the_best_of_all_who_joined(workload: Workload) -> None:
    assert PROFILE.peaks is not None
    seen = replace(PROFILE.peaks, fp32_gflops=2 * PROFILE.peaks.fp32_gflops)
    boards = PlantedBoards(replace(PROFILE, peaks=seen), a=PlantedBoard())
    measurer = measuring(boards, Told(), workload)
    assert measurer.peaks.fp32_gflops == seen.fp32_gflops


def test_a_batch_is_measured_by_all(workload: Workload) -> None:
    boards = PlantedBoards(PROFILE, a=PlantedBoard(), b=PlantedBoard())
    told, all_ = Told(), candidates(workload, 8)
    measurer = measuring(boards, told, workload)
    while measurer.board_count < 2:
        measurer.measure(replace(all_[0], id=f"first {len(told.noted)}"))
    for candidate in all_:
        measurer.prepare(candidate)
    verdicts = [measurer.measure(candidate, best=2e-3) for candidate in all_]
    assert {v.outcome for v in verdicts} == {Outcome.RIGHT}
    assert {v.host for v in verdicts} == {"a", "b"}
    assert measurer.rate == 1e9
    assert all(len(board.judged) >= 3 for board in boards.boards.values())


def test_a_candidate_is_noted_when_a_board_gets_it_and_not_before(workload: Workload) -> None:
    """What no board has had is not taken for harmful where the searching machine dies."""
    told, all_ = Told(), candidates(workload, 8)
    measurer = measuring(PlantedBoards(PROFILE, a=PlantedBoard()), told, workload)
    for candidate in all_:
        measurer.prepare(candidate)
    assert told.noted == ["c0", "c1"]


def test_the_same_candidate_may_be_measured_again(workload: Workload) -> None:
    """As default schedules are, until the speed is known."""
    measurer = measuring(PlantedBoards(PROFILE, a=PlantedBoard()), Told(), workload)
    (one,) = candidates(workload, 1)
    assert [measurer.measure(one).outcome for _ in range(3)] == [Outcome.RIGHT] * 3


def test_one_that_kills_boards_is_refused(workload: Workload) -> None:
    def judges(candidate: str) -> rows.Answer | None:
        return None if candidate == "c1" else right()

    boards = PlantedBoards(PROFILE, **{name: PlantedBoard(judges, depth=1) for name in "abc"})
    told, all_ = Told(), candidates(workload, 6)
    measurer = measuring(boards, told, workload)
    for candidate in all_:
        measurer.prepare(candidate)
    outcomes = [measurer.measure(candidate).outcome for candidate in all_]
    assert [o for n, o in enumerate(outcomes) if n != 1] == [Outcome.RIGHT] * 5
    assert outcomes[1] is Outcome.CRASH
    assert len(boards.boards) == 1
    assert sorted(told.noted) == [f"c{n}" for n in range(6)]


def test_what_is_in_quarantine_reaches_no_board(workload: Workload) -> None:
    board, all_ = PlantedBoard(), candidates(workload, 3)
    measurer = measuring(PlantedBoards(PROFILE, a=board), Told("c1"), workload)
    for candidate in all_:
        measurer.prepare(candidate)
    assert measurer.measure(all_[0]).outcome is Outcome.RIGHT
    with pytest.raises(InQuarantine):
        measurer.measure(all_[1])
    assert measurer.measure(all_[2]).outcome is Outcome.RIGHT
    assert board.judged == ["c0", "c2"]


def test_times_of_a_slower_clock_are_scaled_and_the_record_says_by_what(workload: Workload) -> None:
    fast, slow = PlantedBoard(), PlantedBoard(lambda _: right(1.3e-3, 1.3e-4))
    told, all_ = Told(), candidates(workload, 40)
    measurer = measuring(PlantedBoards(PROFILE, a=fast, b=slow), told, workload)
    for candidate in all_:
        measurer.prepare(candidate)
    last = [measurer.measure(candidate) for candidate in all_][-10:]
    assert {v.host for v in last} == {"a", "b"}
    assert [v.timing.fair_s for v in last if v.timing] == pytest.approx([1e-3] * 10)
    assert [v.yardstick_s for v in last] == pytest.approx([1e-4] * 10)
    assert ["b takes 1.30" in text for text in told.said] == [True]


def test_a_throttled_board_is_set_aside_and_its_times_are_not_used(workload: Workload) -> None:
    fine, other = PlantedBoard(), PlantedBoard()
    hot = PlantedBoard()
    hot.judges = lambda _: right() if len(hot.judged) < 6 else right(4e-3, 3e-4)
    told, all_ = Told(), candidates(workload, 60)
    measurer = measuring(PlantedBoards(PROFILE, a=fine, b=other, c=hot), told, workload)
    for candidate in all_:
        measurer.prepare(candidate)
    verdicts = [measurer.measure(candidate) for candidate in all_]
    late = [v.timing.fair_s for v in verdicts[-20:] if v.timing]
    assert late == pytest.approx([1e-3] * 20)
    assert sum("c takes 3.00 times as long as its peers" in text for text in told.said) == 1
    assert len(told.noted) == 60  # each once, though some were measured twice


def test_a_busy_board_leaves_its_candidates_to_others(workload: Workload) -> None:
    busy = PlantedBoard(lambda _: rows.BoardBusy(why="it is in use: the model m is served", seconds=10.0))
    told, all_ = Told(), candidates(workload, 10)
    measurer = measuring(PlantedBoards(PROFILE, a=busy, b=PlantedBoard()), told, workload)
    for candidate in all_:
        measurer.prepare(candidate)
    assert {measurer.measure(candidate).host for candidate in all_} == {"b"}
    assert told.said == ["a gave a candidate back: it is in use: the model m is served"]


def test_what_makes_no_sense_is_measured_by_others(workload: Workload) -> None:
    odd = replace(right(), verdict={"outcome": "splendid"})
    broken, told = PlantedBoard(lambda _: odd), Told()
    measurer = measuring(PlantedBoards(PROFILE, a=broken, b=PlantedBoard()), told, workload)
    for candidate in (all_ := candidates(workload, 6)):
        measurer.prepare(candidate)
    assert {measurer.measure(candidate).host for candidate in all_} == {"b"}
    assert any("a verdict cannot be read" in text for text in told.said)


def test_a_board_of_another_version_gets_nothing(workload: Workload) -> None:
    old, told = PlantedBoard(version=rows.VERSION + 1), Told()
    measurer = measuring(PlantedBoards(PROFILE, a=old, b=PlantedBoard()), told, workload)
    for candidate in (all_ := candidates(workload, 6)):
        measurer.prepare(candidate)
    assert {measurer.measure(candidate).host for candidate in all_} == {"b"}
    assert not old.judged
    assert told.said == ["a has another honed (1); install the same"]


def test_a_farm_in_which_nothing_is_idle_ends_the_search_at_last(workload: Workload) -> None:
    boards = PlantedBoards(PROFILE, a=PlantedBoard())
    measurer = measuring(boards, Told(), workload)
    boards.boards.clear()
    with pytest.raises(Unavailable, match="no board of the farm has answered for 30 min"):
        measurer.measure(candidates(workload, 1)[0])


def test_faults_of_boards_are_told_with_their_candidates(workload: Workload) -> None:
    text = (
        "mali fb000000.gpu: Unhandled Page fault in AS0 at VA 0x0000007F00001000\n"
        "Reason: Memory is not mapped\nraw fault status: 0xC1\nexception type 0xC1: TRANSLATION_FAULT_1\n"
        "access type 0x2: READ\nsource id 0x400\npid: 77"
    )
    line = rows.LogLine(candidate="c0", device="fb000000.gpu", monotonic_s=5.0, text=text)
    told = PlantedBoard(lambda _: replace(right(), faults=(line,)))
    measurer = measuring(PlantedBoards(PROFILE, a=told), Told(), workload)
    measurer.measure(candidates(workload, 1)[0])
    ((name, story),) = measurer.take_faults()
    assert name == "c0"
    assert isinstance(story, FaultIncident)
    assert rows.log_lines([(name, story)]) == (line,)


def test_records_have_the_board_and_what_was_judged_unasked(workload: Workload, tmp_path: Path) -> None:
    """A batch that ends early: what boards measured is kept, what they did not is taken back."""
    boards = PlantedBoards(PROFILE, a=PlantedBoard())
    setup, all_ = setup_for(PROFILE.identity), candidates(workload, 6)
    with Records.open(tmp_path / "r.sqlite", measured_by="pc") as records:

        def made(begin: Begin) -> FarmMeasurer:
            return FarmMeasurer(boards, PROFILE, "", begin, print, ahead=64, clock=boards.clock)

        with Trials(made, records, setup) as trials:
            trials.load(workload)
            for n, candidate in enumerate(all_):
                own = replace(candidate, source=f"{candidate.source}// {n}")
                all_[n] = own
                trials.prepare(own, f"[{n}]", SearchStrategy.EVOLUTION)
            trial = trials.measure(all_[0], "[0]", SearchStrategy.EVOLUTION, None)
            assert trial is not None
            assert trial.ran
            trials.withdraw()
        kept = records.history(workload.task, setup)
    assert [r.trace for r in kept] == ["[0]", "[1]", "[2]"]
    assert {(r.outcome, r.measured_by) for r in kept} == {(StoredOutcome.RIGHT, "a")}
    assert boards.closed


def test_a_farm_of_several_devices_asks_which() -> None:
    greetings = []
    for name in ("Mali-G610", "Mali-G52"):
        profile = replace(PROFILE, identity=replace(PROFILE.identity, name=name))
        greetings.append(
            rows.Greeting(
                version=rows.VERSION,
                honed="1",
                host=name,
                bench="",
                depth=2,
                profile=profile.to_dict(),
            )
        )
    with pytest.raises(DeviceError, match=r"boards of several devices \(Mali-G52.*, Mali-G610.*--device"):
        choose_device(greetings, FarmChoice(url=""))
    assert PROFILE.peaks is not None
    faster = replace(
        PROFILE,
        identity=replace(PROFILE.identity, name="Mali-G610"),
        peaks=replace(PROFILE.peaks, launch_us=1.0),
    )
    another = replace(greetings[0], profile=faster.to_dict())
    profile, depth = choose_device([*greetings, another], FarmChoice(url="", device="g610"))
    assert (profile.identity.name, depth) == ("Mali-G610", 4)
    assert profile.peaks is not None
    assert profile.peaks.launch_us == 1.0, "the best of all"
    assert profile.peaks.fp32_gflops == PROFILE.peaks.fp32_gflops
