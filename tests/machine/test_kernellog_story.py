"""Records of one fault are one story, of two faults two; and the story is laid at the right door."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.kernellog.fault import Driver, Severity
from honed.machine.kernellog.parse import parse
from honed.machine.kernellog.story import (
    LATE_S,
    Attribution,
    DatedFault,
    FaultIncident,
    GpuRun,
    Process,
    attribute,
    group,
    ids_of,
)

MALI, JM, PANTHOR = "mali fb000000.gpu: ", "mali ffe40000.gpu: ", "panthor fb000000.gpu: [drm] "


def at(second: float, message: str) -> DatedFault:
    fault = parse(message)
    assert fault is not None
    return DatedFault(fault=fault, monotonic_s=second)


def page_fault(tid: int, prefix: str = MALI) -> str:
    return f"{prefix}Unhandled Page fault in AS1 at VA 0x1000\nexception type 0xC1: X\npid: {tid}"


def stream(word: str, code: int, owner: str = "1693_0", group_: int = 0) -> str:
    first = f"{MALI}Ctx {owner} Group {group_} CSG 0 CSI: 1\n"
    return f"{first}CS_{word}.EXCEPTION_TYPE: 0x{code:x} (X)\nCS_{word}.EXCEPTION_DATA: 0x0"


def only(stories: list[FaultIncident]) -> FaultIncident:
    assert len(stories) == 1
    return stories[0]


def test_page_fault_with_its_consequences_is_one_story() -> None:
    story = only(
        group(
            [
                at(10.000, page_fault(1693)),
                at(10.001, stream("FAULT", 0x48)),
                at(10.002, stream("FAULT", 0x0F)),
                at(10.003, stream("FATAL", 0x48)),
            ]
        )
    )
    assert (story.tgid, story.tid) == (1693, 1693)
    assert (story.severity, story.driver, story.device) == (Severity.CONTEXT, Driver.KBASE, "fb000000.gpu")
    assert story.cause.kind == "page-fault"
    assert [story.is_consequence(fault) for fault in story.faults] == [False, True, True, True]
    assert story.first_s == 10.0


def test_page_fault_reported_late_is_still_the_cause() -> None:
    story = only(group([at(1.00, stream("FAULT", 0x48)), at(1.08, page_fault(1700))]))
    assert story.cause.kind == "page-fault"
    assert (story.tgid, story.tid) == (1693, 1700)


def test_page_fault_takes_the_other_groups_of_its_context() -> None:
    records = [
        at(1, page_fault(1693)),
        at(1.1, stream("FAULT", 0x48)),
        at(1.2, stream("FATAL", 0x48, group_=1)),
    ]
    assert len(only(group(records)).seen) == 3


def test_two_groups_without_a_page_fault_are_two_stories() -> None:
    stories = group([at(1, stream("FATAL", 0x49)), at(1, stream("FATAL", 0x49, group_=1))])
    assert [story.cause.group for story in stories] == [0, 1]


def test_two_processes_at_once_are_two_stories() -> None:
    records = [
        at(1.00, page_fault(100)),
        at(1.01, page_fault(200)),
        at(1.02, stream("FAULT", 0x48, "200_1")),
        at(1.03, stream("FAULT", 0x48, "100_0")),
    ]
    stories = group(records)
    assert [(s.tid, s.tgid, len(s.seen)) for s in stories] == [(100, 100, 2), (200, 200, 2)]


def test_a_thread_of_either_process_is_a_story_of_its_own() -> None:
    records = [
        at(1.00, stream("FAULT", 0x48, "100_0")),
        at(1.01, stream("FAULT", 0x48, "200_1")),
        at(1.02, page_fault(205)),
    ]
    assert [len(story.seen) for story in group(records)] == [1, 1, 1]


def test_the_same_process_later_is_another_story() -> None:
    assert len(group([at(1, stream("FATAL", 0x40)), at(3, stream("FATAL", 0x40))])) == 2


def test_endless_faults_do_not_make_an_endless_story() -> None:
    assert len(group([at(i / 2, stream("FAULT", 0x49)) for i in range(100)])) >= 3


def test_a_reset_joins_the_fault_before_it() -> None:
    story = only(
        group(
            [
                at(1.0, stream("FATAL", 0x41)),
                at(1.1, f"{MALI}Sending reset to GPU - all running jobs will be lost"),
                at(4.3, f"{MALI}Resetting GPU (allowing up to 500 ms)"),
                at(4.6, f"{MALI}Failed to hard-reset the GPU (timed out after 500 ms)"),
            ]
        )
    )
    assert (story.severity, story.tgid, story.cause.code) == (Severity.DEVICE_LOST, 1693, 0x41)


def test_job_manager_story() -> None:
    story = only(
        group(
            [
                at(1.0, page_fault(55, JM)),
                at(1.1, f"{JM}error detected from slot 1, job status 0x00000003 (STOPPED)"),
                at(1.2, f"{JM}Preparing to soft-reset GPU: Waiting (up to 3000 ms) for all jobs"),
            ]
        )
    )
    assert (story.driver, story.tid, story.severity) == (Driver.KBASE_JM, 55, Severity.RESET)


def test_devices_are_kept_apart() -> None:
    assert len(group([at(1, page_fault(5)), at(1, page_fault(5, JM))])) == 2


def test_panthor_names_the_process_just_before() -> None:
    slot = f"{PANTHOR}CSG slot 0 CS slot: 0\nCS_FATAL.EXCEPTION_TYPE: 0x48 (CS_BUS_FAULT)"
    records = [
        at(1.0, f"{PANTHOR}CS_FATAL: pid=10, comm=a"),
        at(1.0, slot),
        at(1.1, f"{PANTHOR}CS_FATAL: pid=20, comm=b"),
        at(1.1, slot),
    ]
    assert [(story.tgid, len(story.seen)) for story in group(records)] == [(10, 2), (20, 2)]


def test_killed_process_joins_only_its_own_story() -> None:
    killed = "Out of memory: Killed process 1693 (python3)"
    story = only(group([at(1.0, stream("FATAL", 0x60)), at(1.2, killed)]))
    assert story.severity is Severity.PROCESS_KILLED
    assert len(group([at(1.0, stream("FATAL", 0x60, "5_0")), at(1.2, killed)])) == 2


def test_nvidia_events_of_one_process_are_one_story() -> None:
    xid = "NVRM: Xid (PCI:0000:c1:00): {}, pid=7, name=python3, Ch 1"
    story = only(group([at(1, xid.format(31)), at(1.1, xid.format(31)), at(1.2, xid.format(45))]))
    assert (story.cause.code, story.tgid) == (31, 7)


def test_job_manager_gpu_fault_with_its_reset_is_the_job_managers() -> None:
    story = only(
        group(
            [
                at(1.0, f"{JM}GPU Fault 0x00000088 (UNKNOWN) at 0x0000000012345678"),
                at(1.1, f"{JM}There were multiple GPU faults - some have not been reported"),
                at(3.0, f"{JM}Resetting GPU (allowing up to 500 ms)"),
                at(
                    3.5, f"{JM}Failed to soft-reset GPU (timed out after 500 ms), now attempting a hard reset"
                ),
                at(3.6, f"{JM}Reset complete"),
            ]
        )
    )
    assert (story.driver, story.severity) == (Driver.KBASE_JM, Severity.RESET)
    assert story.cause.code == 0x88


AMD, ADRENO = "amdgpu 0000:03:00.0: amdgpu: ", "adreno 5000000.gpu: "


def test_amdgpus_are_kept_apart() -> None:
    second = AMD.replace("03", "04")
    assert len(group([at(1, f"{AMD}GPU reset begin!"), at(1, f"{second}GPU reset begin!")])) == 2


def test_what_msm_says_of_its_parts_is_one_story() -> None:
    story = only(
        group(
            [
                at(1.0, f"{ADRENO}CP | opcode error | possible opcode=0x00000000"),
                at(
                    1.5,
                    "msm_dpu ae01000.mdp: [drm:recover_worker [msm]] *ERROR* 67.5.20.1: hangcheck recover!",
                ),
                at(1.6, "platform 506a000.gmu: GMU watchdog expired"),
                at(1.7, "*** gpu fault: iova=0000000040c0f000 flags=1 (0,0,0,0)"),
            ]
        )
    )
    assert (story.driver, story.device, story.severity) == (Driver.MSM, "5000000.gpu", Severity.RESET)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 20),
            st.sampled_from(
                [
                    page_fault(100),
                    page_fault(205),
                    stream("FAULT", 0x48, "100_0"),
                    stream("FATAL", 0x0F, "200_1"),
                    f"{MALI}Resetting GPU (allowing up to 500 ms)",
                    f"{PANTHOR}CS_FATAL: pid=10, comm=a",
                    f"{PANTHOR}CSG slot 0 progress timeout",
                    "Out of memory: Killed process 100 (a)",
                ]
            ),
        ),
        max_size=30,
    )
)
def test_every_record_is_in_exactly_one_story(records: list[tuple[float, str]]) -> None:
    seen = [at(second, message) for second, message in records]
    stories = group(seen)
    assert sorted(id(one) for story in stories for one in story.seen) == sorted(map(id, seen))
    for story in stories:
        assert len({fault.tgid for fault in story.faults} - {None}) <= 1
        assert len({fault.device for fault in story.faults} - {None}) <= 1
        assert story.severity.rank == max(fault.severity.rank for fault in story.faults)
        assert [one.monotonic_s for one in story.seen] == sorted(one.monotonic_s for one in story.seen)


def process(ids: set[int] | None, *spans: tuple[float, float | None]) -> Process:
    runs = tuple(GpuRun(name=f"candidate {i}", started_s=s, ended_s=e) for i, (s, e) in enumerate(spans))
    return Process(ids=None if ids is None else frozenset(ids), runs=runs)


NAMED_STORY = only(group([at(10, page_fault(1695)), at(10.01, stream("FAULT", 0x48))]))
NAMELESS_STORY = only(group([at(10, f"{JM}t6xx: GPU fault 0x4002 from job slot 0")]))


def test_named_process_and_its_running_candidate() -> None:
    mine = process({1693, 1695}, (8, 9), (9.5, None))
    other = process({2000}, (9, None))
    attribution = attribute(NAMED_STORY, [other, mine])
    assert attribution == Attribution(named=True, runs=mine.runs[1:])


@pytest.mark.parametrize("ids", [{1693}, {1695}])
def test_process_or_thread_suffices(ids: set[int]) -> None:
    assert attribute(NAMED_STORY, [process(ids, (9, None))]).named


def test_fault_of_a_stranger_is_nobodys_of_ours() -> None:
    attribution = attribute(NAMED_STORY, [process({3000}, (9, None))])
    assert attribution == Attribution(named=False)


def test_in_a_container_time_decides() -> None:
    mine = process(None, (9, None))
    attribution = attribute(NAMED_STORY, [mine, process(None, (1, 2))])
    assert attribution == Attribution(named=False, runs=mine.runs)


def test_nameless_fault_goes_to_who_ran_alone() -> None:
    late = 10 - LATE_S / 2
    mine = process({1}, (9, late))
    attribution = attribute(NAMELESS_STORY, [mine, process({2}, (11, None))])
    assert attribution == Attribution(named=False, runs=mine.runs)


@pytest.mark.parametrize(
    "others", [[], [process({1}, (9, None)), process({2}, (9, None))], [process({1}, (1, 2))]]
)
def test_nameless_fault_of_several_or_nobody_is_unknown(others: list[Process]) -> None:
    assert attribute(NAMELESS_STORY, others) == Attribution(named=False)


def test_two_runs_in_the_window_may_both_have_done_it() -> None:
    attribution = attribute(NAMELESS_STORY, [process({1}, (9, 9.95), (9.96, None))])
    assert len(attribution.runs) == 2


def fake_proc(folder: Path, statuses: dict[int, str]) -> Path:
    """A /proc whose namespace is the initial one."""
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/pid").symlink_to("/proc/self/ns/pid")
    for tid, text in statuses.items():
        (folder / "50/task" / str(tid)).mkdir(parents=True)
        (folder / "50/task" / str(tid) / "status").write_text(text)
    return folder


@pytest.fixture
def initial_namespace(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this machine's pid namespace count as the initial one, which it is not inside a container."""
    inode = os.stat("/proc/self/ns/pid").st_ino
    return lambda: monkeypatch.setattr("honed.machine.kernellog.story._INITIAL_PID_NAMESPACE", inode)


def test_ids_are_the_outermost_of_process_and_threads(
    tmp_path: Path, initial_namespace: Callable[[], None]
) -> None:
    proc = fake_proc(
        tmp_path, {50: "Name:\tx\nNSpid:\t50\t1\n", 51: "NSpid:\t51\t2\n", 52: "Name:\tolder kernel\n"}
    )
    initial_namespace()
    assert ids_of(50, proc) == {50, 51}
    assert ids_of(60, proc) == frozenset()


def test_ids_are_unknown_in_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("honed.machine.kernellog.story._INITIAL_PID_NAMESPACE", 1)
    assert ids_of(os.getpid()) is None
    assert ids_of(1, tmp_path / "missing") is None


def test_ids_of_a_real_process_with_a_thread(initial_namespace: Callable[[], None]) -> None:
    initial_namespace()
    code = (
        "import threading, sys\nthreading.Thread(target=sys.stdin.read).start()\n"
        "print([t.native_id for t in threading.enumerate()], flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        threads = set(map(int, child.stdout.readline().strip("[]\n").split(",")))
        assert len(threads) == 2
        assert ids_of(child.pid) == threads
    assert ids_of(child.pid) == frozenset()
