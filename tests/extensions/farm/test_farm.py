"""A farm of processes on loopback with TLS, whose boards measure on the devices of this machine."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.farm.boards import FarmChoice, join
from honed.farm.measurer import FarmMeasurer
from honed.machine.devices import Device
from honed.protocol.errors import DeviceError, Unavailable
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.records.rows import Outcome
from tests.daemon.running import start
from tests.tuner import running as tuning
from tests.tuner.liars import honest

from .running import ROOT, RunningFarm

pytestmark = pytest.mark.opencl
N = 4096


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return honest.scale(tmp_path_factory.mktemp("tasks") / "scale", N)


def candidates(workload: Workload, count: int) -> list[Candidate]:
    return [
        honest.candidate(workload, f"{honest.SCALE}// {number}\n", groups=N // 64) for number in range(count)
    ]


class Searching:
    """What a session does with a measurer, noted."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.said: list[str] = []

    def begin(self, candidate: Candidate) -> None:
        self.noted.append(candidate.id)


@contextmanager
def joined(farm: RunningFarm, device: Device, searching: Searching) -> Iterator[FarmMeasurer]:
    choice = FarmChoice(
        url=farm.url, certificates=farm.certificates / "pc", device=device.profile.identity.name
    )
    found = join(choice)
    measurer = FarmMeasurer(found.boards, found.profile, "", searching.begin, searching.said.append, ahead=64)
    try:
        yield measurer
    finally:
        measurer.close()


def test_boards_are_killed_and_added_and_no_candidate_is_lost_or_counts_twice(
    farm: RunningFarm, device: Device, workload: Workload
) -> None:
    """Both are killed with candidates out; a third, started then, ends the batch."""
    spec = f"--device={device.spec}"
    first, second = farm.worker("--alone", spec), farm.worker("--alone", spec)
    for board in (first, second):
        board.hear_until("in the farm at")
    searching, all_ = Searching(), candidates(workload, 24)
    with joined(farm, device, searching) as measurer:
        measurer.load(workload)
        first_ones = (candidates(workload, 1000)[number] for number in range(24, 1000))
        while measurer.board_count < 2:
            measurer.measure(next(first_ones))
        searching.noted.clear()
        measurer.counts.clear()
        for candidate in all_:
            measurer.prepare(candidate)
        verdicts = []
        for number, candidate in enumerate(all_):
            if number == 4:
                first.kill()
                second.kill()
                third = farm.worker("--alone", spec)
            verdicts.append(measurer.measure(candidate))
        third.hear_until("in the farm at")
        assert measurer.forget() == {}
    assert Counter(v.outcome for v in verdicts) == {Outcome.RIGHT: len(all_)}
    assert Counter(searching.noted) == {candidate.id: 1 for candidate in all_}
    assert sum(measurer.counts.values()) == len(all_)
    assert sum("has left" in text for text in searching.said) == 2, searching.said
    assert third.stop() == 0


@pytest.mark.slow
def test_a_stopped_board_finishes_what_it_measures_and_gives_back_the_rest(
    farm: RunningFarm, device: Device, workload: Workload
) -> None:
    leaving = farm.board("--alone", f"--device={device.spec}")
    searching, all_ = Searching(), candidates(workload, 6)
    with joined(farm, device, searching) as measurer:
        measurer.load(workload)
        for candidate in all_:
            measurer.prepare(candidate)
        farm.worker("--alone", f"--device={device.spec}")
        assert leaving.stop() == 0
        assert {measurer.measure(candidate).outcome for candidate in all_} == {Outcome.RIGHT}


@pytest.mark.slow
def test_what_is_judged_and_not_asked_for_is_handed_over(
    farm: RunningFarm, device: Device, workload: Workload
) -> None:
    farm.board("--alone", f"--device={device.spec}")
    searching, all_ = Searching(), candidates(workload, 12)
    with joined(farm, device, searching) as measurer:
        measurer.load(workload)
        for candidate in all_:
            measurer.prepare(candidate)
        measurer.measure(all_[0])
        left = measurer.forget()
    assert all_[0].id not in left
    assert {all_[0].id, *left} == set(searching.noted)
    assert len(searching.noted) < len(all_)


def test_a_liar_is_found_on_a_board_as_here(farm: RunningFarm, device: Device, workload: Workload) -> None:
    farm.board("--alone", f"--device={device.spec}")
    wrong = honest.candidate(workload, honest.SCALE.replace("2.0f", "2.1f"), groups=N // 64)
    with joined(farm, device, Searching()) as measurer:
        measurer.load(workload)
        verdict = measurer.measure(wrong)
        assert verdict.outcome is Outcome.WRONG
        right = measurer.measure(candidates(workload, 1)[0])
    assert right.outcome is Outcome.RIGHT
    assert right.host
    assert right.timing is not None
    assert right.timing.yardstick_ratio == 1.0


def test_without_a_certificate_of_the_authority_nobody_joins(
    farm: RunningFarm, device: Device, tmp_path: Path
) -> None:
    from honed.farm.certificates import issue

    issue(tmp_path / "others", ["pc", "board"])
    with pytest.raises(Unavailable, match="certificates are of the same authority"):
        join(FarmChoice(url=farm.url, certificates=tmp_path / "others" / "pc"))
    farm.certificates = tmp_path / "others"
    farm.worker("--alone", f"--device={device.spec}").hear_until("no farm answers")


def test_a_farm_without_boards_of_the_device_is_told(farm: RunningFarm, device: Device) -> None:
    farm.board("--alone", f"--device={device.spec}")
    with pytest.raises(DeviceError, match="no board of the farm fits; there is a board on "):
        join(FarmChoice(url=farm.url, certificates=farm.certificates / "pc", device="Mali-G610"))


@pytest.mark.tvm
@pytest.mark.slow
def test_a_model_is_tuned_by_a_farm(
    farm: RunningFarm, device: Device, cache_dir: Path, tmp_path: Path
) -> None:
    """As `hone tune FILE --farm URL` does; records say which board measured."""
    boards = [farm.worker("--alone", f"--device={device.spec}") for _ in range(2)]
    for board in boards:
        board.hear_until("in the farm at")
    model, records, output = tuning.write_model(tmp_path / "m.onnx"), tmp_path / "r.sqlite", tmp_path / "o"
    command = [sys.executable, "-m", "honed.tuner", "tune", str(model), f"--records={records}"]
    command += [f"--cache-dir={cache_dir}", "--trials=10", f"--output={output}"]
    command += ["--instrument=farm", f"--setting=url={farm.url}"]
    command += [f"--setting=certificates={farm.certificates / 'pc'}"]
    command += [f"--device={device.profile.identity.name}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    events: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["event"] == "done"
    assert events[-1]["trials"] == sum(event["event"] == "trial" for event in events) == 10
    assert events[-1]["output"] == str(output)
    assert output.exists()
    with closing(sqlite3.connect(records)) as database:
        rows = database.execute("SELECT state, measured_by, trace_sha256 FROM candidates").fetchall()
    assert {state for state, _, _ in rows} <= {"done", "quarantined"}
    assert len({trace for _, _, trace in rows}) == len(rows) >= 10
    assert all(host for _, host, _ in rows)


@pytest.mark.tvm
@pytest.mark.service
@pytest.mark.slow
def test_a_model_of_the_service_is_tuned_by_a_farm(
    farm: RunningFarm, device: Device, cache_dir: Path, tmp_path: Path
) -> None:
    """Its service takes what is found, if that is right and faster here, and has the answer to say."""
    farm.board("--alone", f"--device={device.spec}")
    model = tuning.write_model(tmp_path / "m.onnx")
    service = start(tmp_path / "state", cache_dir)
    try:
        with service.client() as client:
            client.add(model, name="m", engine="gpu")
            before = client.show("m")["sha256"]
        command = [sys.executable, "-m", "honed.tool.main", "--socket", str(service.socket), "tune", "m"]
        command += ["--farm", farm.url, "--certificates", str(farm.certificates / "pc"), "--trials", "10"]
        done = subprocess.run(
            [*command, "--device", device.profile.identity.name, "--json"],
            env=os.environ | {"STATE_DIRECTORY": str(tmp_path / "pc"), "CACHE_DIRECTORY": str(cache_dir)},
            stdout=subprocess.PIPE,
            check=True,
        )
        said = json.loads(done.stdout)
        with service.client() as client:
            served = client.show("m")["sha256"]
            answers = client.infer("m", {"x": tuning.given()})
    finally:
        service.stop()
    assert said["trials"] == 10
    assert said["records"] == str(tmp_path / "pc" / "farm" / "records.sqlite")
    assert Path(said["records"]).exists()
    assert said["sha256"] == served
    assert said["published"] == (served != before)
    assert said["sentence"]
    np.testing.assert_allclose(answers["y"], tuning.expected(), atol=1e-5)
