"""A liar of each kind is refused by its own check, with every other check switched off."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.machine.kernellog.reader import KmsgReader, Record
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.program import MemoryValue
from honed.tuner.measure.candidate import MeasureLimits, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Outcome, Verdict
from tests.pocl import ONE
from tests.tuner.liars import compiler_abort, honest, kinds, owned_clocks
from tests.tuner.liars.checking import COMMAND, NAMES, MeasurerOfManyChecks

N = honest.N
# Verdicts are looked at and not times; a busy machine may take its time to run anything.
LIMITS = MeasureLimits(run_seconds=10.0, timing_seconds=0.02, warm_seconds=0.0)
NONE = frozenset(NAMES)  # to be left out: all of them
Judge = Callable[..., Verdict]


def only(*checks: str) -> frozenset[str]:
    """What to leave out, so that only these are made."""
    assert NONE.issuperset(checks)
    return NONE.difference(checks)


@pytest.fixture(scope="module")
def judge(device: Device, profile: DeviceProfile, workload: Workload) -> Iterator[Judge]:
    """The verdict on a source, with a child for each of the limits and commands."""
    open_ones: dict[object, MeasurerOfManyChecks] = {}

    def verdict(
        source: str,
        without: frozenset[str],
        *,
        inner: tuple[MemoryValue, ...] = (),
        task: Workload = workload,
        limits: MeasureLimits = LIMITS,
        command: tuple[str, ...] = COMMAND,
    ) -> Verdict:
        key = (limits, command) if command == COMMAND else (limits, command, without)
        if key not in open_ones:
            open_ones[key] = MeasurerOfManyChecks(
                device.spec, profile, limits, without=without, command=command
            )
        measurer = open_ones[key]
        if command == COMMAND:
            measurer.leave_out(without)
        measurer.load(task)
        return measurer.measure(honest.candidate(task, source, groups=N // 64, inner=inner))

    yield verdict
    for measurer in open_ones.values():
        measurer.close()


def passes_without(judge: Judge, liar: str, **more: Any) -> None:
    """What makes sure that it is the check that refuses, not something else."""
    found = judge(liar, NONE, **more)
    assert found.outcome is Outcome.RIGHT, found


def test_does_nothing(judge: Judge) -> None:
    passes_without(judge, kinds.DOES_NOTHING)
    found = judge(kinds.DOES_NOTHING, only("written"))
    assert found.outcome is Outcome.UNWRITTEN
    assert f"{N} of {N}" in found.reason


def test_writes_half_its_output(judge: Judge) -> None:
    passes_without(judge, kinds.WRITES_HALF)
    found = judge(kinds.WRITES_HALF, only("written"))
    assert found.outcome is Outcome.UNWRITTEN
    assert f"{N // 2} of {N}" in found.reason


@pytest.mark.parametrize("which", [0, 1, 2])
def test_right_on_one_input_only(judge: Judge, workload: Workload, which: int, tmp_path: Path) -> None:
    liar = kinds.right_only_for(np.load(workload.folder / f"{which}.0.npy")[0])
    assert judge(liar, only("right")).outcome is Outcome.WRONG
    one = replace(workload, folder=tmp_path, sets=1)
    for parameter in (0, 1):
        array = np.load(workload.folder / f"{which}.{parameter}.npy")
        np.save(one.folder / f"0.{parameter}.npy", array)
    assert judge(liar, only("right"), task=one).outcome is Outcome.RIGHT


def test_remembers_that_it_ran(judge: Judge) -> None:
    """Right in the runs that are looked at one by one, nothing any more when timed."""
    inner = (MemoryValue(dtype="int32", shape=(N,)),)
    passes_without(judge, kinds.REMEMBERS, inner=inner)
    assert judge(kinds.REMEMBERS, only("right"), inner=inner).outcome is Outcome.WRONG


@pytest.mark.parametrize("off", ["right", "repeated"])
def test_reads_what_nobody_wrote(judge: Judge, off: str) -> None:
    """Within the tolerance, and other bits each time: only comparing runs with each other shows it."""
    inner = (MemoryValue(dtype="float32", shape=(N,)),)
    passes_without(judge, kinds.READS_WHAT_NOBODY_WROTE, inner=inner)
    found = judge(kinds.READS_WHAT_NOBODY_WROTE, only(off), inner=inner)
    if off == "right":
        assert found.outcome is Outcome.RIGHT
        return
    assert found.outcome is Outcome.WRONG
    assert f"{N} of {N} elements of output 1" in found.reason


def test_reads_beyond_its_input(judge: Judge) -> None:
    """The guard band there is poisoned otherwise in each of two runs."""
    liar = kinds.reads_beyond(N)
    assert judge(liar, only("right")).outcome is Outcome.RIGHT
    assert judge(liar, only("repeated")).outcome is Outcome.WRONG


def test_right_once(judge: Judge) -> None:
    inner = (MemoryValue(dtype="uint32", shape=(N,)),)
    passes_without(judge, kinds.RIGHT_ONCE, inner=inner)
    assert judge(kinds.RIGHT_ONCE, only("right"), inner=inner).outcome is Outcome.WRONG


def test_skips_what_is_there_already(judge: Judge) -> None:
    """Right wherever it finds poison, so in every run that is looked at, and quick when timed."""
    assert judge(kinds.SKIPS_WHAT_IS_THERE, only("right", "repeated")).outcome is Outcome.RIGHT
    assert judge(kinds.SKIPS_WHAT_IS_THERE, only("right", "stale")).outcome is Outcome.WRONG


def test_keeps_its_answers(judge: Judge) -> None:
    """Right always, and quick as long as its inputs stay the same: a time that no app will see."""
    inner = (MemoryValue(dtype="float32", shape=(N,)),)
    all_others = frozenset({"anew"})
    assert judge(kinds.KEEPS_ITS_ANSWERS, all_others, inner=inner).outcome is Outcome.RIGHT
    found = judge(kinds.KEEPS_ITS_ANSWERS, only("anew"), inner=inner)
    assert found.outcome is Outcome.IMPOSSIBLE
    assert "does not compute anew" in found.reason


def test_declares_more_local_memory_than_there_is(judge: Judge, device: Device) -> None:
    """No check: a driver may refuse to build it, or have the room all the same, as PoCL since 4.0 has."""
    has = device.profile.limits.local_mem_bytes
    assert judge(kinds.declares_local(64), NONE).outcome is Outcome.RIGHT
    found = judge(kinds.declares_local(has // 4 + 64), NONE)
    if ONE != "basic":
        assert found.outcome is Outcome.RIGHT
        return
    assert found.outcome is Outcome.BUILD
    assert "local" in found.reason


@pytest.mark.parametrize("element", [N, N + 16383, -1, -500])
def test_writes_past_its_output(judge: Judge, element: int) -> None:
    found = judge(kinds.writes_at(element), only("guards"))
    assert found.outcome is Outcome.OUT_OF_BOUNDS
    where = f"{4 * (element - N)} bytes beyond its end" if element > 0 else f"{-4 * element - 3} bytes before"
    assert where in found.reason
    assert "output 1: 4 bytes" in found.reason


def test_writes_past_its_output_is_for_the_guards_to_see(judge: Judge) -> None:
    passes_without(judge, kinds.writes_at(N))


@pytest.mark.parametrize("element", [N, -1])
def test_reads_past_its_input_and_drops_the_value(judge: Judge, element: int) -> None:
    passes_without(judge, kinds.reads_at(element))
    assert judge(kinds.reads_at(element), frozenset(["fence"])).outcome is Outcome.RIGHT
    found = judge(kinds.reads_at(element), only("fence"))
    assert found.outcome is Outcome.OUT_OF_BOUNDS
    assert "it reads or writes outside of its buffers" in found.reason


def test_writes_past_an_inner_buffer(judge: Judge) -> None:
    found = judge(
        kinds.WRITES_BEYOND_INNER, only("guards"), inner=(MemoryValue(dtype="float32", shape=(N,)),)
    )
    assert found.outcome is Outcome.OUT_OF_BOUNDS
    assert "inner buffer 0: 4 bytes, the nearest of them 0 bytes beyond its end" in found.reason


def test_writes_into_its_input(judge: Judge) -> None:
    passes_without(judge, kinds.WRITES_ITS_INPUT)
    found = judge(kinds.WRITES_ITS_INPUT, only("inputs"))
    assert found.outcome is Outcome.OUT_OF_BOUNDS
    assert "input 0" in found.reason


def test_reports_end_before_start(judge: Judge) -> None:
    command = (sys.executable, "-m", "tests.tuner.liars.backwards")
    found = judge(honest.SCALE, only("completed"), command=command)
    assert found.outcome is Outcome.RUN
    assert "START" in found.reason


@pytest.mark.slow
def test_its_clock_counts_something_else(judge: Judge) -> None:
    command = (sys.executable, "-m", "tests.tuner.liars.slow_clock")
    assert judge(kinds.LONG, NONE, command=command).outcome is Outcome.RIGHT
    found = judge(kinds.LONG, only("wall"), command=command)
    assert found.outcome is Outcome.RUN
    assert "the host waited" in found.reason


def test_claims_far_more_than_the_peak(judge: Judge, profile: DeviceProfile, workload: Workload) -> None:
    """A kernel that returns at once, for work that would take the device a second at three times its peak."""
    assert profile.peaks is not None
    claimed = replace(workload, flops=int(3 * profile.peaks.fp32_gflops * 1e9))
    found = judge(kinds.DOES_NOTHING, only("possible"), task=claimed)
    assert found.outcome is Outcome.IMPOSSIBLE
    assert "peak" in found.reason


def beyond_the_peak(workload: Workload, profile: DeviceProfile) -> Workload:
    """What is believable on evidence only, where a launch takes what `owned_clocks` says it does."""
    assert profile.peaks is not None
    return replace(workload, flops=int(1.9e9 * profile.peaks.fp32_gflops * owned_clocks.SECONDS))


def test_beyond_the_peak_by_a_clock_that_runs_slow(
    judge: Judge, profile: DeviceProfile, workload: Workload
) -> None:
    command, claimed = owned_clocks.command(2.0), beyond_the_peak(workload, profile)
    passes_without(judge, honest.SCALE, task=claimed, command=command)
    found = judge(honest.SCALE, only("possible"), task=claimed, command=command)
    assert found.outcome is Outcome.IMPOSSIBLE
    assert "the host counts" in found.reason


def test_a_right_kernel_beyond_the_peak_raises_it(
    device: Device, profile: DeviceProfile, workload: Workload
) -> None:
    """No right candidate lies beyond the peaks, whatever they were believed to be before."""
    assert profile.peaks is not None
    claimed = beyond_the_peak(workload, profile)
    with Measurer(device.spec, profile, LIMITS, command=owned_clocks.command(1.0)) as measurer:
        measurer.load(claimed)
        found = measurer.measure(honest.candidate(workload, honest.SCALE, groups=N // 64))
        assert found.outcome is Outcome.RIGHT, found
        assert found.timing is not None
        assert claimed.flops / found.timing.median_s * 1e-9 <= measurer.peaks.fp32_gflops * (1 + 1e-9)
        assert measurer.peaks.fp32_gflops > profile.peaks.fp32_gflops
        assert "fp32_gflops" in measurer.peaks.raised


def test_claims_to_move_more_than_memory_can(
    judge: Judge, profile: DeviceProfile, workload: Workload
) -> None:
    """What would take the device a second at three times its peak, as above."""
    assert profile.peaks is not None
    claimed = replace(workload, flops=0, bytes=int(3 * profile.peaks.bandwidth_gbs * 1e9))
    found = judge(kinds.DOES_NOTHING, only("possible"), task=claimed)
    assert found.outcome is Outcome.IMPOSSIBLE
    assert "GB/s" in found.reason


def test_takes_too_long(judge: Judge) -> None:
    long = kinds.LONG.replace("30000", "3000")  # still a millisecond and more
    passes_without(judge, long)
    found = judge(long, only("deadline"), limits=replace(LIMITS, run_seconds=1e-4))
    assert found.outcome is Outcome.DEADLINE


@pytest.mark.slow
def test_never_ends(judge: Judge) -> None:
    """No check: the parent kills the child whatever is switched off."""
    found = judge(kinds.ENDLESS, NONE, limits=replace(LIMITS, run_seconds=1.0, build_seconds=4.0))
    assert found.outcome is Outcome.DEADLINE


def test_barrier_in_divergent_control_flow(judge: Judge) -> None:
    found = judge(kinds.DIVERGENT_BARRIER, only("barriers"))
    assert found.outcome is Outcome.BARRIER
    assert "in [ i ] > 0.0f" in found.reason


def test_crashes_the_drivers_compiler(judge: Judge) -> None:
    found = judge(honest.SCALE + compiler_abort.MARK, NONE, command=compiler_abort.COMMAND)
    assert found.outcome is Outcome.BUILD
    assert "SIGABRT" in found.reason
    assert "Cannot select" in found.reason


@pytest.mark.slow
def test_crashes_pocl_for_real(judge: Judge, device: Device) -> None:
    """PoCL 3.1 runs out of stack over recursion, which OpenCL C does not allow."""
    if "Portable Computing Language" not in device.profile.identity.platform:
        pytest.skip("it is PoCL's crash")
    found = judge(kinds.RECURSIVE, NONE)
    assert found.outcome in (Outcome.BUILD, Outcome.CRASH)


def test_does_not_compile(judge: Judge) -> None:
    found = judge(kinds.NOT_C, NONE)
    assert found.outcome is Outcome.BUILD
    assert "nonsense" in found.reason


def test_its_source_is_too_long(judge: Judge, profile: DeviceProfile) -> None:
    long = honest.SCALE + "//" + "x" * profile.rules.max_source_bytes
    assert judge(long, only("source")).outcome is Outcome.BUILD
    passes_without(judge, long)


def test_asks_for_more_memory_than_allowed(judge: Judge) -> None:
    huge = (MemoryValue(dtype="float32", shape=(1 << 28,)),)
    limits = replace(LIMITS, memory_bytes=512 << 20)
    found = judge(kinds.WRITES_BEYOND_INNER, only("memory"), inner=huge, limits=limits)
    assert found.outcome is Outcome.MEMORY
    assert "1024 MiB" in found.reason


def test_exhausts_memory(judge: Judge) -> None:
    """The same with that check off: then the child's own limit holds."""
    huge = (MemoryValue(dtype="float32", shape=(1 << 28,)),)
    limits = replace(LIMITS, memory_bytes=512 << 20)
    found = judge(kinds.WRITES_BEYOND_INNER, NONE, inner=huge, limits=limits)
    assert found.outcome is Outcome.MEMORY


class InjectedLog:
    """A kernel log in which a fault appears while a candidate runs: made up, as no GPU is there to make one.

    With `kmsg` it goes through the real /dev/kmsg, and only the mark that a program wrote it is taken off;
    what else is written there is not its own.
    """

    def __init__(self, kmsg: bool = False) -> None:
        self.armed: str | None = None
        self._reads = 0
        self._written: list[str] = []
        self._kmsg = KmsgReader() if kmsg else None
        self._ends = os.pipe()

    def arm(self, text: str) -> None:
        """Have `text` logged at the second look from now: the first comes right before the candidate runs."""
        self.armed, self._reads = text, 0

    def fileno(self) -> int:
        return self._kmsg.fileno() if self._kmsg else self._ends[0]

    def read(self) -> list[Record]:
        text, self._reads = self.armed, self._reads + 1
        if text is not None and self._reads == 2:
            self.armed = None
            if self._kmsg is None:
                return [_record(text)]
            Path("/dev/kmsg").write_text(text)
            self._written.append(text.rstrip("\n"))
        found = self._kmsg.read() if self._kmsg else []
        return [replace(record, genuine=True) for record in found if record.message in self._written]

    def close(self) -> None:
        for end in self._ends:
            os.close(end)
        if self._kmsg:
            self._kmsg.close()


def _record(text: str) -> Record:
    now = time.monotonic()
    return Record(
        message=text,
        monotonic_s=now,
        realtime_s=time.time(),
        genuine=True,
        device="fb000000.gpu",
    )


def cs_fatal(pid: int | None) -> str:
    return (
        f"mali fb000000.gpu: Ctx {pid}_753 Group 1 CSG 0 CSI: 0\n"
        "CS_FATAL.EXCEPTION_TYPE: 0x40 (CS_CONFIG_FAULT)\n"
        "CS_FATAL.EXCEPTION_DATA: 0x0\nCS_FATAL_INFO.EXCEPTION_DATA: 0x0\n"
    )


@pytest.fixture(params=["made up", "kmsg"])
def log(request: pytest.FixtureRequest) -> Iterator[InjectedLog]:
    if request.param == "kmsg" and not os.access("/dev/kmsg", os.R_OK | os.W_OK):
        pytest.skip("/dev/kmsg is not for this user")
    log = InjectedLog(kmsg=request.param == "kmsg")
    yield log
    log.close()


def test_faults_in_the_kernel_log(
    device: Device, profile: DeviceProfile, workload: Workload, log: InjectedLog
) -> None:
    """Every call succeeds and the answers are right, and the kernel says that it faulted."""
    made = honest.candidate(workload, honest.SCALE, groups=N // 64)
    with Measurer(device.spec, profile, LIMITS, without=only("clean"), kernel_log=log) as measurer:
        measurer.load(workload)
        log.arm(cs_fatal(os.getpid()))
        found = measurer.measure(replace(made, id="beside another's fault"))
        assert found.outcome is Outcome.RIGHT
        assert measurer.take_faults() == []

        pid = measurer.pid
        log.arm(cs_fatal(pid))
        found = measurer.measure(replace(made, id="faulting"))
        assert found.outcome is Outcome.FAULT
        assert "CS_CONFIG_FAULT" in found.reason
        assert [name for name, _ in measurer.take_faults()] == ["faulting"]

        assert measurer.measure(replace(made, id="after")).outcome is Outcome.RIGHT
        assert measurer.pid != pid


@pytest.mark.slow
def test_a_fault_that_is_reported_late_is_not_the_next_ones(
    device: Device, profile: DeviceProfile, workload: Workload
) -> None:
    log = InjectedLog()
    made = honest.candidate(workload, honest.SCALE, groups=N // 64)
    with Measurer(device.spec, profile, LIMITS, without=only("clean"), kernel_log=log) as measurer:
        measurer.load(workload)
        assert measurer.measure(replace(made, id="faulting")).outcome is Outcome.RIGHT
        log.arm(cs_fatal(measurer.pid))
        log.read()
        measurer.settle()
        assert [name for name, _ in measurer.take_faults()] == ["faulting"]
        assert measurer.measure(replace(made, id="next")).outcome is Outcome.RIGHT
    log.close()
