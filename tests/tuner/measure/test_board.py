"""The report of a board: kernels that can be run, children that may be lost, names that are not told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from benchmarks import supervising
from benchmarks.board import __main__ as board
from benchmarks.board import anchors, kernels, machine, measuring, models, report
from benchmarks.board.anonymous import anonymous, secrets
from benchmarks.board.hone import Failed, Service, hone
from benchmarks.board.kernels import FAMILIES, Program
from benchmarks.board.machine import Timed
from benchmarks.board.measuring import Measured
from benchmarks.board.models import Served
from benchmarks.supervising import work_off

from honed.machine import microbench
from honed.machine.devices import Device
from honed.machine.opencl import cl, context
from honed.runtime.errors import DeviceError
from honed.valhall.bench import bench_profile


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return kernels.load()


def test_each_family_has_tasks_with_several_schedules(programs: list[Program]) -> None:
    assert [program.family for program in programs] == sorted(
        (program.family for program in programs), key=FAMILIES.index
    )
    for family in FAMILIES:
        mine = [program for program in programs if program.family == family]
        assert 18 <= len(mine) <= 20
        assert len({program.task for program in mine}) == 5
        assert {program.half for program in mine} == {True, False}
        assert sum(program.schedule == "default" for program in mine) >= 4


def test_every_kernel_fits_a_mali(programs: list[Program]) -> None:
    limits = bench_profile("mali-g610").limits
    for program in programs:
        assert program.plain_us >= program.packed_us > 0
        written = {n for n, buffer in enumerate(program.buffers) if buffer.role == "out"}
        assert written
        assert written <= {n for launch in program.launches for n in launch.args}
        for launch in program.launches:
            assert f"{launch.entry}(" in program.source
            assert max(launch.args) < len(program.buffers)
            x, y, z = launch.block
            assert x * y * z <= limits.max_work_group_size


def test_what_is_kept_is_what_was_drawn(programs: list[Program], tmp_path: Path) -> None:
    kernels.save(programs, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == kernels.FILE.read_bytes()


def test_each_family_has_its_turn_before_one_has_a_second(programs: list[Program]) -> None:
    """So that a device that is too slow for all of them says something of each family."""
    ordered = kernels.in_turns(programs)
    assert sorted(map(id, ordered)) == sorted(map(id, programs))
    tasks = list(dict.fromkeys((program.family, program.task) for program in ordered))
    assert [family for family, _ in tasks] == [*FAMILIES] * 5
    assert [program.task for program in ordered if program.family == "rows"] == [
        program.task for program in programs if program.family == "rows"
    ]


@pytest.mark.opencl
def test_schedules_are_measured_and_their_answers_compared(device: Device, programs: list[Program]) -> None:
    first, second, *_ = (p for p in programs if p.family == "products" and not p.half)
    assert first.task == second.task
    queue = cl.CommandQueue(context(device.cl), properties=cl.command_queue_properties.PROFILING_ENABLE)
    answers: dict[str, list[np.ndarray]] = {}
    found = [measuring._measured(device, queue, each, answers) for each in (first, second)]
    assert all(one.us and one.least_us and one.us >= one.least_us for one in found)
    assert found[0].differs is None
    assert found[1].differs is not None
    assert found[1].differs <= second.tolerance
    idle = replace(second, launches=())
    assert measuring._measured(device, queue, idle, answers).differs == float("inf"), "nothing is written"


@pytest.mark.opencl
@pytest.mark.parametrize("name", machine.KERNELS)
def test_what_settles_the_machine_runs(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(microbench, "PATIENCE", 1)
    found = machine._timed(microbench.Bench(device), name, machine.KERNELS[name])
    if "half" in name and not device.profile.limits.fp16:
        assert found == Timed(failed="the device computes no halves (cl_khr_fp16)")
    else:
        assert found.us is not None, found.failed
        assert found.us > 0


def settled(monkeypatch: pytest.MonkeyPatch, device: str, **us: float) -> machine.Settled:
    """What a device says whose kernels take 16 us, but for those given."""
    times = [Timed(us=us.get(name, 16.0)) for name in machine.KERNELS]
    monkeypatch.setattr(supervising, "work_off", lambda *_, each_seconds: times)
    return machine.settle(replace(bench_profile("mali-g610").identity, name=device), "0:0", 60.0)


def test_each_question_has_one_answer_that_honed_assumes() -> None:
    for question in machine.QUESTIONS:
        assert {question.of, question.per} <= {*machine.KERNELS, ""}
        bounds = [bound for answer in question.answers for bound in (answer.least, answer.most)]
        assert bounds == sorted(bounds)
        assert sum(not answer.flips for answer in question.answers) == 1


def test_the_machine_that_is_assumed_flips_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are what the judges' counts give, and half64 what it spills on Mesa 25.0."""
    assumed = {"half32": 8.0, "half64": 50.0, "row": 11.5, "four_rows": 32.0, "column": 128.0, "wide": 32.0}
    assumed |= {"texels": 32.0, "texels_pairs": 32.0}
    found = settled(monkeypatch, "Mali-G610 r0p0", **assumed, queued=4.0, waited=14.0)
    assert found.applies
    assert [one.answer for one in found.said] == [
        *("no, the busiest pipe bounds", "no", "yes", "no, they spill", "yes", "yes", "yes", "yes", "yes"),
        *("at most about", "at most about"),
    ]
    assert not any(one.flips for one in found.said)
    assert "as this device is" in machine.table(found)


def test_another_machine_flips_what_hangs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settled(monkeypatch, "Mali-LODX r0p0", fma_add=24.0, fma_mul=20.0, waited=85.0, texels_pairs=32.0)
    assert all(one.flips for one in found.said)
    assert "yes, `alu` bounds" in machine.table(found)


def test_what_is_not_clear_and_what_another_device_says_flips_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = settled(monkeypatch, "pthread-x", fma_add=20.5, half32=0.0)
    assert found.said[0].answer == "not clear"
    assert found.said[2].figure is None
    assert not found.said[0].flips
    assert "This is pthread-x, whose answers say nothing about a Mali-G610" in machine.table(found)


CHILD = """
import os, signal, sys, time
for n in range(int(sys.argv[1]), 6):
    print(n, flush=True)
    if n == 1: os.kill(os.getpid(), signal.SIGSEGV)
    if n == 3: time.sleep(3600)
    if n == 4: raise SystemExit("no more")
    print('{"us": 2.0, "least_us": 1.0, "runs": 7, "differs": null, "failed": ""}', flush=True)
"""


def test_a_kernel_that_takes_its_process_along_is_one_line_of_the_report() -> None:
    command = [sys.executable, "-c", CHILD]
    found = work_off(Measured, command, 6, 240.0, each_seconds=20.0)
    assert [one.us for one in found] == [2.0, None, 2.0, None, None, 2.0]
    assert found[1].failed == "its process was ended by SIGSEGV"
    assert found[3].failed == "it took more than 20 s"
    assert found[4].failed == "its process ended with status 1: no more"


def test_a_device_that_loses_every_process_is_given_up() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no device')"]
    found = work_off(Measured, command, 9, 240.0, each_seconds=60.0)
    assert {one.failed for one in found} == {"left out: its process ended with status 1: no device"}
    assert len(found) == 9


def test_a_child_that_begins_too_late_is_not_taken_at_its_next_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says after its time is the number that it begins with, and no answer."""

    class Late:
        said = iter(["", "0\n"])

        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Late:
            return self

        def __exit__(self, *_: object) -> None: ...
        def line(self) -> str:
            return next(self.said, "")

        def end(self) -> str:
            Late.said = iter([""])
            return "it took more than 30 s"

    monkeypatch.setattr(supervising, "_Child", Late)
    (found,) = work_off(Measured, ["python"], 1, 60.0, each_seconds=30.0)
    assert found.failed == "left out: it took more than 30 s"


def test_without_time_nothing_is_begun() -> None:
    (found,) = work_off(Measured, ["/nonexistent"], 1, 0.0, each_seconds=30.0)
    assert found.failed == "no time was left for it"


def test_names_of_user_host_and_folders_are_not_told() -> None:
    hidden = secrets("ada", ("orange.example.org",), "/home/ada", {"/tmp/honed-board-x": "TMP"})
    text = "ada at orange, orange.example.org: /home/ada/.cache, /tmp/honed-board-x/s; ada's Mali-ada, canada"
    assert anonymous(text, hidden) == "USER at HOST, HOST: ~/.cache, TMP/s; USER's Mali-ada, canada"
    assert secrets("root", ("localhost",), "/root", {}) == {}


def test_ranks() -> None:
    assert report.spearman([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert report.spearman([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert report.spearman([(1, 1), (2, 1), (3, 1)]) == 0
    assert report.spearman([(1, 1), (2, 3), (3, 2), (4, 4)]) == pytest.approx(0.8)


def test_the_table_says_what_was_predicted_measured_and_wrong(programs: list[Program]) -> None:
    mine = [replace(programs[n], plain_us=20.0, packed_us=10.0 * (n + 1)) for n in range(4)]
    found = [
        Measured(us=30.0, least_us=29.0, runs=9),
        Measured(us=60.0, least_us=59.0, runs=9, differs=0.5),
        Measured(us=90.0, least_us=89.0, runs=9, differs=0.001),
        Measured(failed="it took more than 30 s"),
    ]
    text = report.kernel_tables(mine, found)
    assert "3 of 4 measured; measured over predicted: median 3.00, from 3.00 to 3.00" in text
    assert "rank correlation 1.00 in all, 1.00 among schedules of a task" in text
    assert "takes 1.00 times the fastest one's time" in text
    assert text.count("answers differ") == 1
    assert "answers differ by 0.5 of the largest value" in text
    assert "it took more than 30 s" in text


def test_what_trusting_the_prediction_costs_is_told(programs: list[Program]) -> None:
    mine = [replace(programs[n], packed_us=10.0 * (n + 1)) for n in range(3)]
    found = [Measured(us=us, least_us=us, runs=9) for us in (30.0, 20.0, 40.0)]
    text = report.kernel_tables(mine, found)
    assert "0.50 among schedules of a task" in text
    assert "takes 1.50 times the fastest one's time" in text


def test_the_models_that_failed_say_why() -> None:
    rows = [Served(name="a", added_s=1.0, first_ms=2.0, trials=3, tuned_ms=1.0, text="2 times faster"),
            Served(name="b", text="no compiler")]  # fmt: skip
    text = report.model_table(rows)
    assert "a      1.0             2.00      3       1.00     2 times faster" in text
    assert text.splitlines()[2].endswith("no compiler")


class Told:
    """Stands for a service whose commands take some time, by a clock of ours."""

    folder = Path("/nonexistent")

    def __init__(self, clock: list[float], takes: dict[str, float]) -> None:
        self.clock, self.takes = clock, takes
        self.given: list[tuple[str, str]] = []

    def __call__(self, *words: str, seconds: float, enough: float | None = None) -> dict[str, object]:
        name = words[2].removeprefix("--name=") if words[0] == "add" else words[1]
        self.given.append((words[0], name))
        self.clock[0] += (
            self.takes.get(name, self.takes[words[0]]) if words[0] == "add" else self.takes[words[0]]
        )
        self.clock[0] += enough or 0.0
        if words[:2] == ("bench", "yolox-nano"):
            raise Failed("it was lost")
        return {"median_ms": 1.0, "trials": 5, "sentence": "2 times faster"}


def test_models_are_all_served_before_the_first_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the time does not suffice for is left out, with a reason."""
    clock = [0.0]
    monkeypatch.setattr(models, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(models, "hone", lambda *_words, seconds: {})
    told = Told(clock, {"add": 20.0, "bench": 5.0, "tune": 20.0, "lightglue": 10.0, "super-resolution": 5.0})
    found = models.measure(cast("Service", told), 300.0)
    tuned = [name for command, name in told.given if command == "tune"]
    assert [command for command, _ in told.given[:10]] == ["add", "bench"] * 5
    assert tuned == ["super-resolution", "lightglue"], "those that were added fastest"
    assert clock[0] <= 300.0
    assert [one.text for one in found] == [
        "no time was left to tune it",
        "no time was left to tune it",
        "2 times faster",
        "it was lost",
        "2 times faster",
    ]
    clock[0] = 0.0
    assert {one.text for one in models.measure(cast("Service", told), -1.0)} == {"no time was left for it"}


def test_a_machine_that_is_far_too_slow_keeps_to_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(models, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Slow(Told):
        def __call__(self, *words: str, seconds: float, enough: float | None = None) -> dict[str, object]:
            self.clock[0] += seconds
            raise Failed(f"it took more than {seconds:.0f} s")

    found = models.measure(cast("Service", Slow(clock, {})), 400.0)
    assert clock[0] <= 400.0
    assert [one.text for one in found] == ["it took more than 200 s"] * 2 + ["no time was left for it"] * 3


def test_a_device_that_is_lost_leaves_the_faults_and_the_time_to_be_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(*_: object, seconds: float) -> None:
        raise DeviceError(f"no answer within {seconds:g} s")

    monkeypatch.setattr(board, "survey", lost)
    monkeypatch.setattr(board, "hone", lambda *_, seconds: {"findings": []})
    text = "".join(board._parts(None, tmp_path, 600.0))
    assert "There is none to measure: no answer within 120 s" in text
    assert text.index("== Faults in the kernel log meanwhile ==") < text.index("Took ")


def test_the_start_of_the_service_is_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, given = [0.0], list[float]()
    monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    @contextmanager
    def slowly(*_: object) -> Iterator[None]:
        clock[0] += 60.0
        yield

    def measure(_: object, seconds: float) -> list[Served]:
        given.append(seconds)
        return []

    monkeypatch.setattr(board, "Service", slowly)
    monkeypatch.setattr(models, "measure", measure)
    assert list(board._models("0:0", tmp_path, 400.0))
    assert given == [340.0]


def test_predictions_are_not_taken_for_those_of_another_device() -> None:
    assert "which Mali-G57 MC1 is not" in board._comparable("Mali-G57 MC1")
    assert "which" not in board._comparable("Mali-LODX r0p0")


def test_a_command_that_fails_is_told_in_its_words() -> None:
    with pytest.raises(Failed, match="no service"):
        hone("status", seconds=60.0, socket=Path("/nonexistent/s"))


def test_every_anchor_has_its_source() -> None:
    known = anchors.load()
    figures = [figure for each in known.anchor for figure in (*each.cpu, *each.gpu, *each.npu)]
    assert {figure.source for figure in figures} == set(known.sources)
    assert all(figure.value > 0 for figure in figures)
    names = [each.model for each in known.anchor]
    assert len(names) == len(set(names)) == 24
    assert {anchors.SQUEEZENET, anchors.LIGHTGLUE} <= set(names)


def test_what_others_get_stands_beside_what_is_measured_here() -> None:
    found = [
        Served(name="squeezenet", first_ms=9.0, tuned_ms=4.25),
        Served(name="lightglue", first_ms=31.5),
        Served(name="yolox-nano", first_ms=1.0),  # nobody publishes it
        Served(name="mobilenet", text="no time was left for it"),
    ]
    lines = anchors.beside(found).splitlines()
    row = {line.split("  ")[0]: line.split() for line in lines}
    assert row["model, ms"][-2:] == ["honed", "here"]
    assert row["SqueezeNet 1.1"][2:] == ["3.66", "(ncnn-cpu)", "7.1", "(ncnn-vulkan)", "4.25"]
    assert row["LightGlue-192"] == ["LightGlue-192", "944.6", "(tvm)", "31.50"]
    assert row["ResNet50"][-3:] == ["(int8,", "rknn)", "-"]
    assert any(line.startswith("ncnn-cpu: ncnn on an Orange Pi 5") for line in lines)


def test_a_model_that_failed_is_not_beside_the_others() -> None:
    assert "nan" not in anchors.beside([Served(name="squeezenet", text="it failed")])
