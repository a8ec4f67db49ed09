"""The adversary itself: it can be repeated, its right inputs are right, and it notices what is planted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from honed.machine.kernellog.parse import parse
from honed.protocol.errors import ModelFileError
from honed.runtime.compiled import modelfile

from . import headers, texts
from .__main__ import ATTACKS, main
from .attack import HEADS, Findings, plain, seeded, table, verdict
from .bed import TOKEN, VICTIM, Bed
from .frames import CHANGING, HARMLESS, Frames
from .judge import Judge
from .material.models import Victim
from .material.mutate import Mutator
from .meter import Reading, Waits


def test_a_round_is_repeated_by_its_seed() -> None:
    def made(seed: int) -> list[object]:
        mutator = Mutator(seeded(seed, "frames", 3))
        trees = [repr(mutator.tree(HARMLESS, 3)) for _ in range(50)]
        return [*trees, *(mutator.data(bytes(range(200))) for _ in range(50))]

    assert made(7) == made(7)
    assert made(7) != made(8)
    assert seeded(7, "frames", 3).random() != seeded(7, "frames", 4).random()


def test_every_method_is_attacked() -> None:
    from honed.protocol.methods import METHODS

    assert {*HARMLESS, *CHANGING, "ModelInfer", "ConfigReload"} == METHODS.keys()


def test_headers_are_altered_under_right_checksums(tmp_path: Path) -> None:
    data = VICTIM.write(tmp_path / "right.honed").read_bytes()
    header, constants = headers.taken_apart(data)
    path = tmp_path / "made.honed"
    path.write_bytes(headers.assembled(headers.packed(header), constants))
    with modelfile.read(path) as file:
        assert file.model.inputs[0].shape == (VICTIM.n,)
    mutator, refused = Mutator(random.Random(1)), 0
    for _ in range(100):
        _, wrong, _ = headers.altered(header, constants, mutator)
        path.write_bytes(wrong)
        try:
            modelfile.read(path).close()
        except ModelFileError as error:
            assert "checksum" not in str(error)  # noqa: PT017 - the others are as good
            refused += 1
    assert 30 < refused < 100


def test_victims_know_their_answers(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 5, dtype=np.float32)
    np.testing.assert_array_equal(Victim(5, 2).answer(x), (x + np.arange(2, 7, dtype=np.float32)) + 1)
    modelfile.read(Victim(5, 2).write(tmp_path / "v.honed")).close()


def test_the_kernel_logs_lines_are_faults() -> None:
    assert sum(parse(line) is not None for line in texts.LINES) > len(texts.LINES) // 2


def test_waiting_for_a_processor_is_no_stall() -> None:
    before = Reading({-1: 1_000_000, 2: 5_000_000, 3: 0}, 0)
    after = Reading({-1: 4_000_000, 2: 6_000_000, 3: 2_000_000, 4: 9_000_000}, 500_000)
    assert after.since(before) == pytest.approx(3 + 2 + 0.5)  # a thread that is new counts for nothing


def test_what_was_being_sent() -> None:
    findings = Findings()
    findings.offered("first", b"1")
    moment = findings.inputs[-1][0]
    assert findings.at(moment - 1) == "nothing yet"
    assert findings.at(moment + 1) == "first"
    assert findings.tries == 1


def test_internal_is_a_problem_and_refusals_are_none() -> None:
    findings = Findings()
    assert findings.answered({"code": "INVALID_ARGUMENT", "message": ""}, "x") == "INVALID_ARGUMENT"
    assert findings.answered(None, "x") == "OK"
    assert not findings.problems
    findings.answered({"code": "INTERNAL", "message": "why"}, "x")
    assert findings.problems == ["INTERNAL for x: why"]
    for number in range(100):
        findings.problem(str(number))
    assert len(findings.problems) < 30


def test_the_table_and_the_verdict() -> None:
    failed = Findings(tries=5, wrong=1, beside_ms=4.0, quiet_ms=2.0, problems=["wrong"])
    rounds = {"frames": [Findings(tries=2, pings=9, stall_ms=12.4), Findings(tries=3)], "kills": [failed]}
    rounds["full-disk"] = [Findings(left_out="needs root")]
    lines = table(rounds).splitlines()
    assert lines[0].split() == " ".join(HEADS).split()
    assert lines[1].split() == ["frames", "5", "0", "0", "0", "12", "0", "0", "-", "held"]
    assert lines[2].split() == ["kills", "5", "1", "0", "0", "-", "0", "0", "2.0/4.0", "FAILED", "(1)"]
    assert lines[3].endswith("left out: needs root")
    assert verdict(rounds) == (1, 1)
    assert plain(rounds)["kills"][0]["problems"] == ["wrong"]


def test_the_list_and_wrong_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ATTACKS)
    assert main(["--only", "frames,nonsense"]) == 2


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    made = Bed()
    try:
        made.open()
        yield made
    finally:
        made.close()


def _judged(bed: Bed, plant: Callable[[], object], *, timed: bool = False) -> Findings:
    judge = Judge(bed, timed=timed)
    judge.quiet(0.3)
    judge.begin(Frames())
    bed.findings = Findings()
    plant()
    judge.end(Frames(), bed.findings)
    return bed.findings


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
def test_nothing_is_found_where_nothing_is_done(bed: Bed) -> None:
    findings = _judged(bed, lambda: None)
    assert findings.problems == []
    assert findings.wrong == findings.lost == 0


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
def test_what_is_planted_is_found(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.attack.judge.SETTLE_SECONDS", 0.3)
    held = contextlib.ExitStack()

    def plant() -> None:
        with bed.service.log_file.open("a") as log:
            log.write("Traceback (most recent call last):\n")
        (bed.state / "staging" / "left").mkdir()
        held.callback(os.rmdir, bed.state / "staging" / "left")
        bed.known["never-added"] = Victim(4, 4)
        held.callback(bed.known.pop, "never-added")
        with bed.client() as client:
            client.add(VICTIM.write(bed.scratch / "surplus.honed"), name="surplus")
        orphan = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(60)"], env={TOKEN: bed.token}
        )
        held.callback(orphan.wait)
        held.callback(orphan.kill)
        for _ in range(20):
            held.enter_context(bed.raw()).call("ServerLive", {})
        os.kill(bed.pid, signal.SIGSTOP)
        try:
            signal.sigtimedwait([], 0.3)
        finally:
            os.kill(bed.pid, signal.SIGCONT)

    monkeypatch.setattr(Waits, "_stolen", lambda _: 0)  # of all processors: it would hide what is planted
    with held:
        found = "\n".join(_judged(bed, plant, timed=True).problems)
    bed.remove("surplus")
    for expected in (
        "Traceback",
        "work in progress was left",
        "never-added was acknowledged and is lost",
        "['surplus']",
        "processes of an ended daemon live on",
        "descriptors that it had not",
        "the loop stood still for",
    ):
        assert expected in found


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
def test_a_wrong_answer_is_found(bed: Bed) -> None:
    """A model that is not the one it is held for."""
    right = bed.known["spare"]
    bed.known["spare"] = Victim(right.n, right.k + 1)
    try:
        findings = _judged(bed, lambda: None)
    finally:
        bed.known["spare"] = right
    assert findings.wrong == 1
    assert "spare answers wrong" in findings.problems[0]
