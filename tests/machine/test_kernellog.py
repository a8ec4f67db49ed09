"""Every record of the drivers' tables is recognised for what it is, ordinary ones are not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.kernellog.fault import Driver, Severity
from honed.machine.kernellog.parse import parse

SAMPLES = [
    json.loads(line)
    for line in Path(__file__).with_name("test_kernellog_samples.jsonl").read_text().splitlines()
]
LETTERS = {"G": "queue", "C": "context", "R": "reset", "D": "device-lost", "P": "process-killed"}


@dataclass(frozen=True)
class Row:
    """A record built from a driver's format, and what must be read from it."""

    driver: Driver
    message: str
    severity: Severity
    says: dict[str, Any] = field(default_factory=dict)


MALI, PANTHOR, PANFROST = "mali fb000000.gpu: ", "panthor fb000000.gpu: [drm] ", "panfrost ff9a0000.gpu: "
OWNER = {"tgid": 186878, "context": 753, "group": 1}
STREAM = (
    "{word}.EXCEPTION_TYPE: 0x{code:x} ({name})\n{word}.EXCEPTION_DATA: 0x0\n"
    "{word}_INFO.EXCEPTION_DATA: 0x0\n"
)
TRACE = (
    "CS_FATAL_TRACE_ID0.EXCEPTION_TRACE_ID0: 0x0\nCS_FATAL_TRACE_ID1.EXCEPTION_TRACE_ID1:  0x0\n"
    "CS_FATAL_TRACE_TASK.EXCEPTION_TRACE_TASK: 0x0\n"
)
PAGE = (
    "Unhandled Page fault in AS1 at VA 0x00007FE0DA65CB80\nReason: {reason}\nraw fault status: 0x210002C1\n"
    "exception type 0xC1: TRANSLATION_FAULT at level 1\naccess type 0x2: READ\nsource id 0x2100{more}\n"
    "pid: 1693\n"
)
PAGE_SAYS = {
    "kind": "page-fault",
    "tid": 1693,
    "tgid": None,
    "address_space": 1,
    "code": 0xC1,
}
Q, C, R, D = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST


def stream(word: str, code: int, name: str = "X") -> str:
    return STREAM.format(word=word, code=code, name=name)


CSF = [
    Row(
        Driver.KBASE,
        f"{MALI}Ctx 186878_753 Group 1 CSG 2 CSI: 3\n{stream('CS_FAULT', 0x49)}",
        Q,
        {**OWNER, "kind": "cs-fault", "code": 0x49, "meaning": "invalid instruction", "consequence": False},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}Ctx 186878_753 Group 1 CSG 2 CSI: 3\n{stream('CS_FATAL', 0x40)}",
        Q,
        {**OWNER, "kind": "cs-fatal"},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}Ctx 186878_753 Group 1 CSG 2 CSI: 3\n{stream('CS_FATAL', 0x41)}",
        R,
        {**OWNER, "code": 0x41},
    ),
    Row(Driver.KBASE, f"{MALI}Ctx 186878_753 Group 1 CSG 2 CSI: 3\n{stream('CS_FATAL', 0x68)}", R, OWNER),
    Row(
        Driver.KBASE,
        f"{MALI}Ctx 186878_753 Group 1 CSG -1 CSI: 3\n{stream('CS_FAULT', 0x4B)}",
        Q,
        {**OWNER, "consequence": True},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}CSI: 3\n{stream('CS_FAULT', 0xF)}",
        Q,
        {"tgid": None, "consequence": True},
    ),
    Row(Driver.KBASE, f"{MALI}CSG: 1, CSI: 3\n{stream('CS_FATAL', 0x48)}", Q, {"group": 1}),
    Row(
        Driver.KBASE,
        f"{MALI}Ctx 186878_753 Group 1 CSG 2 CSI: 3\n{stream('CS_FATAL', 0x48)}{TRACE}",
        Q,
        {**OWNER, "code": 0x48},
    ),
    Row(Driver.KBASE, MALI + PAGE.format(reason="Memory is not mapped on the GPU", more=""), C, PAGE_SAYS),
    Row(
        Driver.KBASE,
        MALI + PAGE.format(reason="x", more=" (core_id:utlb:IR 0x1:0x2:0x3): shader core, load/store"),
        C,
        PAGE_SAYS,
    ),
    Row(
        Driver.KBASE,
        MALI + PAGE.format(reason="Page allocation failure", more=""),
        Severity.OUT_OF_MEMORY,
        PAGE_SAYS,
    ),
    Row(
        Driver.KBASE,
        f"{MALI}GPU bus fault in AS2 at PA 00000000deadbeef\nPA_VALID: true\nraw fault status: 0x80\n"
        "exception type 0x80: GPU_BUS_FAULT\naccess type 0x3: WRITE\nsource id 0x1\npid: 77\n",
        C,
        {
            "kind": "bus-fault",
            "tid": 77,
            "address_space": 2,
            "code": 0x80,
        },
    ),
    Row(
        Driver.KBASE,
        f"{MALI}GPU bus fault in AS2 at VA 0x00000000DEADBEEF\nVA_VALID: false\n"
        "raw fault status: 0x80\npid: 77\n",
        C,
        {"tid": 77},
    ),
    Row(Driver.KBASE, f"{MALI}GPU bus fault in AS2 at PA (ptrval)\npid: 77\n", C, {"tid": 77}),
    Row(
        Driver.KBASE,
        f"{MALI}GPU Fault 0x00000088 (GPU_SHAREABILITY_FAULT) in AS3 at 0x0000000012345678\n"
        "ASID_VALID: true,  ADDRESS_VALID: true\n",
        C,
        {"code": 0x88, "address_space": 3, "name": "GPU_SHAREABILITY_FAULT"},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}GPU Fault 0x00000180 (X) in AS3 at PA 0x0000000012345678\n",
        C,
        {"code": 0x80},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}Unexpected Page fault in firmware address space at VA 0x0000000004000000\n"
        "raw fault status: 0xC3\nexception type 0xC3: X\naccess type 0x3: WRITE\nsource id 0x0\n",
        R,
        {"tid": None, "code": 0xC3},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}Notify the event notification thread, forward progress timeout (2621440 cycles)\n",
        Q,
        {"tgid": None},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}[18446744073709551615] Iterator PROGRESS_TIMER timeout notification received for group 1 "
        "of ctx 186878_753 on slot 2 with state 1",
        Q,
        {"tgid": 186878, "context": 753, "group": 1},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}[123] term request timeout (3000 ms) for group 1 of context 186878_753 on slot 2",
        Q,
        {"tgid": 186878, "context": 753, "group": 1},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}[123] Group 1 of context 186878_753 on slot 2 failed to suspend (timeout 3000 ms)",
        Q,
        {"tgid": 186878, "context": 753, "group": 1},
    ),
    Row(
        Driver.KBASE,
        f"{MALI}AS_ACTIVE bit stuck for as 1, might be caused by slow clock",
        R,
        {"address_space": 1},
    ),
    Row(Driver.KBASE, f"{MALI}L2_PWRTRANS 0000000000000001 set for too long", R),
    Row(Driver.KBASE, f"{MALI}Flush for GPU page table update did not complete. Issuing GPU soft-reset", R),
    Row(Driver.KBASE, f"{MALI}Sending reset to GPU - all running jobs will be lost", R),
    Row(Driver.KBASE, f"{MALI}Preparing to soft-reset GPU", R),
    Row(Driver.KBASE, f"{MALI}Resetting GPU (allowing up to 500 ms)", R),
    Row(Driver.KBASE, f"{MALI}Reset complete", R),
    Row(Driver.KBASE, f"{MALI}Soft-reset failed", D),
    Row(Driver.KBASE, f"{MALI}MCU re-init failed trying full firmware reload", R),
    Row(Driver.KBASE, f"{MALI}MCU Re-init failed even after trying full firmware reload, ret = [3]", D),
    Row(Driver.KBASE, f"{MALI}Reset failed to complete", D),
    Row(
        Driver.KBASE,
        f"{MALI}Failed to soft-reset GPU (timed out after 500 ms), now attempting a hard reset\n",
        R,
        {"kind": "soft-reset-failed"},
    ),
    Row(Driver.KBASE, f"{MALI}Failed to hard-reset the GPU (timed out after 500 ms)", D),
    Row(Driver.KBASE, f"{MALI}Failed to allocate 4096 pages of memory", Severity.OUT_OF_MEMORY),
    Row(
        Driver.KERNEL,
        "Out of memory: Killed process 4321 (python3) total-vm:1kB, anon-rss:1kB",
        Severity.PROCESS_KILLED,
        {"tgid": 4321, "comm": "python3", "device": None},
    ),
    Row(
        Driver.KERNEL,
        "Memory cgroup out of memory: Killed process 4321 (a (b) c) total-vm:1kB",
        Severity.PROCESS_KILLED,
        {"tgid": 4321},
    ),
]
JM = [
    Row(
        Driver.KBASE_JM,
        f"{MALI}error detected from slot 1, job status 0x00000058 (DATA_INVALID_FAULT)",
        Q,
        {"code": 0x58, "name": "DATA_INVALID_FAULT", "meaning": "invalid data", "tgid": None},
    ),
    Row(
        Driver.KBASE_JM,
        f"{MALI}t6xx: GPU fault 0x4002 from job slot 0",
        Q,
        {"code": 0x4002, "meaning": None},
    ),
    Row(
        Driver.KBASE_JM,
        f"{MALI}JS: Job Hard-Stopped (took more than 50 ticks at 100 ms/tick)",
        Q,
    ),
    Row(
        Driver.KBASE_JM,
        f"{MALI}JS: Job has been on the GPU for too long (JS_RESET_TICKS_SS hit)",
        R,
    ),
    *(
        Row(
            Driver.KBASE_JM,
            f"{MALI}Preparing to soft-reset GPU: Waiting ({to} 3000 ms) for all jobs to complete soft-stop",
            R,
        )
        for to in ("up to", "upto")
    ),
    *(
        Row(
            Driver.KBASE_JM,
            f"{MALI}GPU Fault 0x00000088 (UNKNOWN) at {address}",
            C,
            {"code": 0x88, "address_space": None, "name": "UNKNOWN"},
        )
        for address in ("0x0000000012345678", "PA 0x0000000012345678")
    ),
    Row(
        Driver.KBASE_JM,
        f"{MALI}GPU bus fault in AS2 at PA 00000000deadbeef\nraw fault status: 0x80\n"
        "exception type 0x80: GPU_BUS_FAULT\nexception data 0x1\npid: 77\n",
        C,
        {"tid": 77, "code": 0x80},
    ),
]
OPEN = [
    Row(
        Driver.PANTHOR,
        f"{PANTHOR}CSG slot 2 CS slot: 3\n{stream('CS_FATAL', 0x48)}",
        Q,
        {"code": 0x48, "tgid": None, "device": "fb000000.gpu"},
    ),
    Row(Driver.PANTHOR, f"{PANTHOR}CSG slot 2 CS slot: 3\n{stream('CS_FATAL', 0x41)}", R),
    Row(
        Driver.PANTHOR,
        f"{PANTHOR}CSG slot 2 CS slot: 3\n{stream('CS_FAULT', 0x4B)}",
        Q,
        {"consequence": True},
    ),
    Row(
        Driver.PANTHOR,
        f"{PANTHOR}CS_FATAL: pid=12725, comm=my app, v2\n",
        Q,
        {"tgid": 12725, "comm": "my app, v2", "announces": True},
    ),
    Row(Driver.PANTHOR, f"{PANTHOR}CS_FAULT: pid=12725, comm=labwc", Q, {"tgid": 12725, "announces": True}),
    Row(
        Driver.PANTHOR,
        "panthor fb000000.gpu-panthor: [drm:job_timedout [panthor]] *ERROR* job timeout\n",
        Q,
        {"tgid": None, "device": "fb000000.gpu-panthor"},
    ),
    Row(
        Driver.PANTHOR,
        f"{PANTHOR}job timeout: pid=12725, comm=labwc, seqno=18446744073709551615",
        Q,
        {"tgid": 12725, "comm": "labwc"},
    ),
    Row(Driver.PANTHOR, f"{PANTHOR}CSG slot 2 progress timeout", Q),
    Row(
        Driver.PANTHOR,
        f"{PANTHOR}CSG_PROGRESS_TIMER_EVENT: pid=9, comm=x",
        Q,
        {"tgid": 9, "announces": True},
    ),
    Row(
        Driver.PANTHOR,
        f"{PANTHOR}*ERROR* Unhandled Page fault in AS1 at VA 0x0000007FFF002000\n"
        "raw fault status: 0x80003C3\n"
        "decoded fault status: SLAVE FAULT\nexception type 0xC3: TRANSLATION_FAULT_3\n"
        "access type 0x3: WRITE\nsource id 0x800\n",
        C,
        {"tid": None, "address_space": 1, "code": 0xC3},
    ),
    Row(
        Driver.PANTHOR, f"{PANTHOR}GPU Fault 0x80 (GPU_BUS_FAULT) at 0x0000000012345678\n", C, {"code": 0x80}
    ),
    Row(Driver.PANTHOR, f"{PANTHOR}FW ping timeout, scheduling a reset", R),
    Row(Driver.PANTHOR, f"{PANTHOR}*ERROR* Failed to boot MCU after reset, making device unusable.", D),
    Row(
        Driver.PANFROST,
        f"{PANFROST}js fault, js=1, status=DATA_INVALID_FAULT, head=0xaaed380, tail=0xaaed380",
        Q,
        {"name": "DATA_INVALID_FAULT", "device": "ff9a0000.gpu"},
    ),
    Row(
        Driver.PANFROST,
        f"{PANFROST}gpu sched timeout, js=0, config=0x7b00, status=0x8, head=0x0, tail=0x0, sched_job=1",
        R,
    ),
    Row(
        Driver.PANFROST,
        PANFROST + PAGE.format(reason="TODO", more=""),
        C,
        {"kind": "page-fault", "address_space": 1},
    ),
]


def xid(number: int, severity: Severity, says: dict[str, Any] | None = None, tail: str = "") -> Row:
    message = f"NVRM: Xid (PCI:0000:c1:00): {number}, pid=2646416, name=python{tail}"
    says = {"code": number, "tgid": 2646416, "comm": "python", "device": "0000:c1:00", **(says or {})}
    return Row(Driver.NVIDIA, message, severity, says)


NVIDIA = [
    *(xid(number, Q, {"consequence": number == 45}) for number in (8, 13, 31, 43, 45, 109)),
    *(xid(number, D) for number in (48, 64, 79, 95, 119, 120)),
    xid(
        31,
        Q,
        {},
        ", Ch 0000000a, intr 0. MMU Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_8 faulted @ "
        "0x8f44_ffe00000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
    ),
    Row(
        Driver.NVIDIA,
        "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
        D,
        {"tgid": None, "comm": None},
    ),
    Row(
        Driver.NVIDIA,
        "NVRM: Xid (PCI:0000:01:00): 13, pid='<unknown>', name=<unknown>, Graphics SM",
        Q,
        {"tgid": None, "comm": "<unknown>"},
    ),
    Row(
        Driver.NVIDIA,
        "NVRM: Xid (PCI:0000:01:00): 999, pid=5, x",
        Q,
        {"code": 999, "meaning": None, "tgid": 5},
    ),
    Row(
        Driver.NVIDIA,
        "NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:00): 94, pid=7194, name=python, Contained: CE",
        Q,
        {"device": "0000:01:00", "tgid": 7194, "code": 94},
    ),
    Row(Driver.NVIDIA, "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.", D, {"device": "0000:01:00"}),
]
AMD, XE = "amdgpu 0000:c1:00.0: amdgpu: ", "xe 0000:03:00.0: [drm] GT0: "
# What else their prefixes and inner lines can be; the rest of the other drivers': test_kernellog_tables.py.
OTHERS = [
    Row(Driver.AMDGPU, f"{AMD}GPU reset begin!", R, {"device": "0000:c1:00.0", "kind": "reset"}),
    Row(Driver.AMDGPU, f"{AMD}GPU reset(1) failed", D),
    Row(Driver.AMDGPU, f"{AMD}[gfxhub] page fault (src_id:0 ring:24 vmid:3 pasid:32771)", Q),
    Row(Driver.AMDGPU, "amdgpu 0000:c1:00.0: [drm] device wedged, but recovered through reset", R),
    Row(Driver.AMDGPU, "amdgpu 0000:c1:00.0: [drm] device wedged, needs recovery", D),
    Row(
        Driver.AMDGPU,
        "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx_0.0.0 timeout, signaled seq=22, emitted seq=24",
        Q,
        {"device": None},
    ),
    Row(
        Driver.I915,
        "i915 0000:00:02.0: [drm] GPU HANG: ecode 12:1:85dffffb, in chrome:cs0 [2611]",
        Q,
        {"device": "0000:00:02.0"},
    ),
    Row(Driver.I915, "i915 0000:00:02.0: [drm] Resetting chip for stopped heartbeat on rcs0", R),
    Row(Driver.I915, "i915 0000:00:02.0: [drm] *ERROR* Failed to reset chip", D),
    Row(Driver.XE, f"{XE}Timedout job: seqno=4294967169, guc_id=3, flags=0x0 in glmark2 [2611]", Q),
    Row(Driver.XE, f"{XE}reset started", R),
    Row(Driver.XE, "xe 0000:03:00.0: [drm] CRITICAL: Xe has declared device 0000:03:00.0 as wedged.", D),
    Row(
        Driver.MSM,
        "platform 506a000.gmu: [drm:a6xx_gmu_set_oob [msm]] *ERROR* Timeout waiting for GMU OOB set "
        "GPU_SET: 0x0",
        R,
        {"device": "506a000.gmu"},
    ),
    Row(
        Driver.MSM,
        "*** gpu fault: ttbr0=0000000101a2e000 iova=0000000040c0f000 dir=READ type=TRANSLATION source=CP "
        "(0,0,0,1)",
        C,
        {"device": None},
    ),
    Row(
        Driver.MSM,
        "*** fault: iova=        40c0f000, flags=1",
        C,
    ),
    Row(Driver.LIMA, "[drm:lima_sched_timedout_job [lima]] *ERROR* lima job timeout", R),
    Row(Driver.RKNPU, "RKNPU fdab0000.npu: RKNPU: failed to soft reset for rknpu: -22", D),
    Row(Driver.ROCKET, "rocket fdab0000.npu: NPU job timed out", R, {"device": "fdab0000.npu"}),
]
ROWS = [*CSF, *JM, *OPEN, *NVIDIA, *OTHERS]
ORDINARY = [
    "mali fb000000.gpu: Loaded external GPU firmware",
    "mali fb000000.gpu: Probed as mali0",
    "mali fb000000.gpu: Ctx 1_0 Group 0 CSG 0 CSI: 0",
    "panthor fb000000.gpu: [drm] mali-g610 id 0xa867 major 0x0 minor 0x0 status 0x5",
    "panfrost ff9a0000.gpu: clock rate = 600000000",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    "NVRM: GPU at PCI:0000:c1:00: GPU-1234",
    "mali fb000000.gpu: Kernel DDK version g18p0-01eac0",
    "mali fb000000.gpu: GPU identified as 0x7 arch 10.8.6 r0p0 status 0",
    "mali fb000000.gpu: Register state:",
    "mali fb000000.gpu: ctx:4321_7 kcpu queue:0 still waiting for fence[00000000a] context#seqno:x#1",
    "panthor fb000000.gpu: [drm] CSF FW using interface v1.1.0, Features 0x0 Instrumentation features 0x71",
    "panthor fb000000.gpu: [drm] clock rate = 1000000000",
    "panfrost ff9a0000.gpu: mali-t860 id 0x860 major 0x2 minor 0x0 status 0x0",
    "lima ff300000.gpu: gp - mali450 version major 0 minor 0",
    "lima ff300000.gpu: l2_cache0 64K, 4-way, 64byte cache line, 128bit external bus",
    "rocket fdab0000.npu: Rockchip NPU core 0 version: 1179210309",
    "RKNPU fdab0000.npu: RKNPU: Initialized RKNPU driver: v0.9.8 for 20240828",
    "RKNPU: invalid rknpu task number!",
    "amdgpu: Virtual CRAT table created for CPU",
    "amdgpu: SRAT table not found",
    "amdgpu 0000:03:00.0: amdgpu: MODE1 reset",
    "amdgpu 0000:03:00.0: amdgpu: VRAM: 16368M 0x0000008000000000 - 0x00000083FEFFFFFF (16368M used)",
    "amdgpu 0000:03:00.0: amdgpu: ring gfx_0.0.0 uses VM inv eng 0 on hub 0",
    "amdgpu 0000:03:00.0: [drm] fb0: amdgpudrmfb frame buffer device",
    "[drm] amdgpu kernel modesetting enabled.",
    "[drm:amdgpu_device_ip_init [amdgpu]] *ERROR* hw_init of IP block <gfx_v9_0> failed -22",
    "[drm:some_function [nouveau]] *ERROR* Illegal instruction in command stream",
    "[drm] *ERROR* Reset complete",
    "i915 0000:00:02.0: [drm] GT0: GuC firmware i915/adlp_guc_70.bin version 70.20.0",
    "i915 0000:00:02.0: [drm] Finished loading DMC firmware i915/adlp_dmc.bin (v2.20)",
    "xe 0000:03:00.0: [drm] Using GuC firmware from i915/dg2_guc_70.bin version 70.44.1",
    "msm_dpu ae01000.display-controller: bound 5000000.gpu (ops a3xx_ops [msm])",
    "msm_dpu ae01000.display-controller: [drm:msm_gpu_init] *ERROR* could not get clocks",
    "adreno 5000000.gpu: supply vdd not found, using dummy regulator",
    "platform 5000000.gpu: GMU watchdog expired",
    "platform fb000000.gpu: Reset complete",
    *(f"NVRM: Xid (PCI:0000:01:00): {number}, pid=5, name=x, said" for number in (23, 63, 92, 154, 162)),
    "NVRM: GPU 0000:01:00.0: Opened with coherent memory",
    "*** gpu is fine ***",
    "oom_reaper: reaped process 4321 (python3), now anon-rss:0kB",
    "audit: mali fb000000.gpu: Reset complete",
    "usb 1-1: device says 'NVRM: Xid (PCI:0000:01:00): 79'",
    "other fb000000.gpu: Reset complete",
    "",
    "\n",
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["message"][:50])
def test_samples_from_the_field(sample: dict[str, Any]) -> None:
    fault = parse(sample["message"])
    if sample["driver"] is None:
        assert fault is None
        return
    assert fault is not None
    assert fault.driver == sample["driver"]
    assert fault.severity == LETTERS[sample["severity"]]
    assert (fault.tgid, fault.tid) == (sample["tgid"], sample["tid"])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.message[:60])
def test_rows_of_the_drivers(row: Row) -> None:
    fault = parse(row.message)
    assert fault is not None
    assert (fault.driver, fault.severity) == (row.driver, row.severity)
    assert {name: getattr(fault, name) for name in row.says} == row.says
    assert fault.text == row.message.rstrip("\n")


@pytest.mark.parametrize("message", ORDINARY)
def test_ordinary_records_are_no_faults(message: str) -> None:
    assert parse(message) is None


def test_every_severity_occurs() -> None:
    assert {row.severity for row in ROWS} == set(Severity)


def test_record_that_quotes_another_device_is_no_fault() -> None:
    message = f"{MALI}Reset complete"
    assert parse(message, device="fb000000.gpu") is not None
    assert parse(message, device="1-1") is None


def test_severities_are_ordered() -> None:
    assert Severity.QUEUE.rank < Severity.CONTEXT.rank < Severity.RESET.rank < Severity.DEVICE_LOST.rank


@given(st.text(max_size=400))
def test_any_text(text: str) -> None:
    parse(text)
    for prefix in (MALI, PANTHOR, PANFROST, "NVRM: Xid (PCI:0000:01:00): ", "Out of memory: Killed process "):
        parse(prefix + text)


@given(st.sampled_from(ROWS), st.data())
def test_truncated_and_damaged_records(row: Row, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(row.message)))
    insert = data.draw(st.text(max_size=10))
    parse(row.message[:cut])
    parse(row.message[:cut] + insert + row.message[cut:])
    parse(insert + row.message)
    parse(row.message[:cut], device=data.draw(st.none() | st.text(max_size=10)))


@given(st.sampled_from(ROWS), st.integers(11, 10_000))
def test_absurdly_long_numbers(row: Row, digits: int) -> None:
    parse(row.message.replace("1", "1" * digits))


def test_a_long_record_costs_little() -> None:
    parse(MALI + "L2_PWRTRANS" * 100_000)
    parse("NVRM: Xid (PCI:0000:01:00): 31, pid=" + "'" * 100_000 + " faulted @ 0x" * 100_000)
