"""A board beside a real service: it measures under the service's lease, and leaves it to requests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from honed.farm import rows
from honed.farm.board import BenchBoard, BoardPlace, LeasedGate, MeasuringBoard
from honed.machine.devices import Device
from honed.tuner.measure.candidate import Workload
from honed.tuner.records.rows import Outcome
from honed.valhall.compiler import Dump
from tests.daemon.conftest import small_model
from tests.daemon.running import IDLE, Made, Service, serving, state_with, wait_for
from tests.extensions.valhall.conftest import dump, source
from tests.extensions.valhall.test_bench import OneProgram
from tests.extensions.valhall.test_bench import candidate as known
from tests.extensions.valhall.test_bench import workload as sums
from tests.tuner.liars import honest
from tests.tuner.running import LIMITS

__all__ = ["dump", "small_model", "source", "sums"]  # fixtures
pytestmark = [pytest.mark.service, pytest.mark.opencl]
N = 4096


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, made_once: Made, small_model: Path
) -> Iterator[Service]:
    stored = state_with(made_once, small_model, cache_dir)
    with serving(tmp_path_factory, cache_dir, config=IDLE, stored=stored) as running:
        yield running


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return honest.scale(tmp_path / "scale", N)


@pytest.fixture(scope="module")
def board(service: Service, device: Device, cache_dir: Path) -> Iterator[MeasuringBoard]:
    with pytest.MonkeyPatch.context() as patch:
        # A busy machine may take longer than a request may wait.
        patch.setattr("honed.farm.board.LEASED", LIMITS)
        made = MeasuringBoard(device.spec, cache_dir, LeasedGate(str(service.socket)), lambda: None)
        yield made
        made.close()


def trial(workload: Workload) -> rows.FarmTrial:
    candidate = honest.candidate(workload, honest.SCALE, groups=N // 64)
    return rows.FarmTrial(search="s", task=workload.task, candidate=rows.candidate_map(candidate), best=None)


def ready(board: MeasuringBoard, workload: Workload) -> None:
    answer: rows.Answer = rows.BoardBusy(why="", seconds=0.0)
    while isinstance(answer, rows.BoardBusy):  # a service that was just started is not idle yet
        answer = board.load(rows.memory_of(workload, "s"))


def test_it_measures_under_the_lease_and_rests_without(
    service: Service, board: MeasuringBoard, workload: Workload
) -> None:
    ready(board, workload)
    with service.client() as client:
        assert client.status()["lease"]["state"] == "granted"
        answer = board.judge(trial(workload))
        assert isinstance(answer, rows.BoardVerdict)
        assert rows.verdict_of(answer).outcome is Outcome.RIGHT
        board.rest()
        wait_for(lambda: client.status()["lease"]["state"] == "free", "the lease to be given up")
        ready(board, workload)
        assert client.status()["lease"]["state"] == "granted"


def test_a_request_takes_the_lease_between_two_candidates(
    service: Service, board: MeasuringBoard, workload: Workload
) -> None:
    ready(board, workload)
    with service.client() as client:
        revoked = client.status()["lease"]["revoked"]
        overdue = client.status()["lease"]["overdue"]
        # By an app: what the process asks that has the lease is its own doing.
        app = [sys.executable, "-m", "honed.tool.main", "bench", "small", "-n", "1"]
        subprocess.run([*app, "--random", "--socket", str(service.socket)], check=True, capture_output=True)
        # Once more where the machine is so busy that it is idle between two of the app's requests.
        assert client.status()["lease"]["revoked"] > revoked
        wait_for(lambda: client.status()["lease"]["state"] != "revoking", "the board to leave the device")
        assert client.status()["lease"]["overdue"] == overdue


def test_without_its_service_a_board_gives_candidates_back(
    device: Device, cache_dir: Path, workload: Workload, tmp_path: Path
) -> None:
    board = MeasuringBoard(device.spec, cache_dir, LeasedGate(str(tmp_path / "none")), lambda: None)
    answer = board.load(rows.memory_of(workload, "s"))
    board.close()
    assert isinstance(answer, rows.BoardBusy)
    assert answer.why.startswith("it is in use: ")
    assert answer.seconds > 0


def test_a_task_that_is_not_loaded_is_asked_for(device: Device, cache_dir: Path, workload: Workload) -> None:
    board = MeasuringBoard(device.spec, cache_dir, None, lambda: None)
    board.load(rows.memory_of(workload, "s"))
    answer = board.judge(replace(trial(workload), task="another"))
    board.close()
    assert isinstance(answer, rows.BoardBusy)
    assert answer.reload


def test_a_bench_judges_several_at_a_time_without_a_device(sums: Workload, source: str, dump: Dump) -> None:
    compiler = OneProgram({source: dump})
    board = BenchBoard("mali-g610", compiler, 2)
    greeting = board.greet()
    assert (greeting.bench, greeting.depth) == ("mali-g610", 4)
    asked = rows.FarmTrial(search="s", task="sums", candidate=rows.candidate_map(known(source)), best=None)
    early = board.judge(asked)
    assert isinstance(early, rows.BoardBusy)
    assert early.reload
    assert board.load(rows.memory_of(sums, "s")) == rows.BoardReady(rate=0.0)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(board.judge, [asked] * 4))
    verdicts = [rows.verdict_of(answer) for answer in answers if isinstance(answer, rows.BoardVerdict)]
    assert [verdict.outcome for verdict in verdicts] == [Outcome.RIGHT] * 4
    assert len({verdict.timing for verdict in verdicts}) == 1
    board.close()
    assert compiler.closed


def test_searches_take_turns() -> None:
    now = 100.0
    place, done = BoardPlace(lambda: now), rows.BoardReady(rate=1.0)
    assert isinstance(rows.answer(place.answer("one", lambda _: done)), rows.BoardBusy), "there is no board"
    place.board = BenchBoard("mali-g610", OneProgram({}), 1)
    assert rows.answer(place.answer("one", lambda _: done)) == done
    now = 110.0
    other = rows.answer(place.answer("two", lambda _: done))
    assert isinstance(other, rows.BoardBusy)
    assert (other.why, other.reload) == ("another search has it", True)
    assert rows.answer(place.answer("one", lambda _: done)) == done
    now = 126.0
    assert rows.answer(place.answer("two", lambda _: done)) == done
    assert isinstance(rows.answer(place.answer("one", lambda _: done)), rows.BoardBusy)
    place.leaving = True
    left = rows.answer(place.answer("two", lambda _: done))
    assert isinstance(left, rows.BoardBusy)
    assert left.why == "it is leaving the farm"
