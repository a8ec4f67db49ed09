"""Records that only Arm's kbase for job-manager GPUs (Midgard, Bifrost, early Valhall) writes."""

from __future__ import annotations

from typing import Final

from .fault import Driver, Severity
from .pattern import Pattern, in_file

_JM_RB: Final = in_file("backend/gpu/mali_kbase_jm_rb.c")
_JD: Final = in_file("mali_kbase_jd.c")
_JS_BACKEND: Final = in_file("backend/gpu/mali_kbase_js_backend.c")
_JM_HW: Final = in_file("backend/gpu/mali_kbase_jm_hw.c")
_DEVICE_HW_JM: Final = in_file("device/backend/mali_kbase_device_hw_jm.c")
_DEVICE_HW: Final = in_file("backend/gpu/mali_kbase_device_hw.c")
_MMU_JM: Final = in_file("mmu/backend/mali_kbase_mmu_jm.c")
_MMU: Final = in_file("mali_kbase_mmu.c")

_QUEUE, _CONTEXT, _RESET = Severity.QUEUE, Severity.CONTEXT, Severity.RESET

PATTERNS: Final = (
    Pattern(
        "error detected from slot %d, job status 0x%08x (%s)",
        _QUEUE,
        "job-error",
        _JM_RB("kbase_gpu_complete_hw", "Midgard r27p0, r27p0 to r51p0"),
        fields=("slot", "code", "name"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "t6xx: GPU fault 0x%02lx from job slot %d",
        _QUEUE,
        "job-fault",
        _JD("kbase_jd_done_worker", "Midgard r27p0, r27p0 to r51p0"),
        fields=("code", "slot"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "JS: Job Hard-Stopped (took more than %u ticks at %u ms/tick)",
        _QUEUE,
        "job-stopped",
        _JS_BACKEND("timer_callback", "Midgard r27p0, r27p0 to r51p0"),
        driver=Driver.KBASE_JM,
        hang=True,
    ),
    Pattern(
        "JS: Job has been on the GPU for too long",
        _RESET,
        "job-timeout",
        _JS_BACKEND("timer_callback", "Midgard r27p0, r27p0 to r51p0"),
        driver=Driver.KBASE_JM,
        hang=True,
    ),
    Pattern(
        "Timeout in waiting for job slot %u to become free for ctx %d_%u",
        _QUEUE,
        "job-timeout",
        _JM_HW("kbasep_jm_wait_js_free", "r43p0 to r51p0"),
        fields=("slot", "tgid", "context"),
        driver=Driver.KBASE_JM,
        hang=True,
    ),
    Pattern(
        "Jobs failed to be killed (within %d ms) as part of context termination",
        _QUEUE,
        "termination-timeout",
        _JM_HW("kbase_jm_wait_for_zero_jobs", "Midgard r27p0"),
        driver=Driver.KBASE_JM,
        hang=True,
    ),
    Pattern(
        "Issuing GPU soft-reset because jobs failed to be killed (within %d ms)",
        _RESET,
        "termination-timeout",
        _JM_HW("kbase_jm_wait_for_zero_jobs", "r32p1 to r51p0"),
        driver=Driver.KBASE_JM,
        hang=True,
    ),
    Pattern(
        "Issueing GPU soft-reset because jobs failed to be killed (within %d ms)",
        _RESET,
        "termination-timeout",
        _JM_HW("kbase_jm_wait_for_zero_jobs", "Midgard r27p0, r27p0 to r28p0"),
        driver=Driver.KBASE_JM,
        hang=True,
    ),
    Pattern(
        "Issueing GPU soft-reset after hard stopping due to hardware issue",
        _RESET,
        "reset",
        _JM_HW("kbase_job_slot_hardstop", "Midgard r27p0"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "GPU Fault 0x%08x (%s) at PA 0x%pK",
        _CONTEXT,
        "gpu-fault",
        _DEVICE_HW_JM("kbase_report_gpu_fault", "r47p0 to r51p0"),
        fields=("status", "name", "address"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "GPU Fault 0x%08x (%s) at 0x%016llx",
        _CONTEXT,
        "gpu-fault",
        _DEVICE_HW_JM("kbase_report_gpu_fault", "r27p0 to r44p1")
        + _DEVICE_HW("kbase_report_gpu_fault", "Midgard r27p0, r28p0"),
        fields=("status", "name", "address"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "There were multiple GPU faults - some have not been reported",
        _CONTEXT,
        "gpu-fault",
        _DEVICE_HW_JM("kbase_report_gpu_fault", "r27p0 to r51p0")
        + _DEVICE_HW("kbase_report_gpu_fault", "Midgard r27p0, r28p0"),
        driver=Driver.KBASE_JM,
        consequence=True,
    ),
    Pattern(
        (
            "Unhandled Page fault in AS%u at VA 0x%016llX\nReason: %s\nraw fault status: "
            "0x%X\nexception type 0x%X: %s\naccess type 0x%X: %s\npid: %d"
        ),
        _CONTEXT,
        "page-fault",
        _MMU_JM("kbase_mmu_report_fault_and_kill", "r50p0 to r51p0"),
        fields=("address_space", "address", None, None, "code", "name", None, "access", "tid"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        (
            "Unhandled Page fault in AS%d at VA 0x%016llX\nReason: %s\nraw fault status: "
            "0x%X\ndecoded fault status: %s\n"
        ),
        _CONTEXT,
        "page-fault",
        _MMU("kbase_mmu_report_fault_and_kill", "Midgard r27p0"),
        fields=("address_space", "address"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "GPU bus fault in AS%u at PA %pK\nraw fault status: 0x%X\n",
        _CONTEXT,
        "bus-fault",
        _MMU_JM("kbase_gpu_report_bus_fault_and_kill", "r38p1 to r51p0"),
        fields=("address_space", "address"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "GPU bus fault in AS%d at VA 0x%016llX\nraw fault status: 0x%X\n",
        _CONTEXT,
        "bus-fault",
        _MMU_JM("kbase_gpu_report_bus_fault_and_kill", "r27p0 to r35p0"),
        fields=("address_space", "address"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "Bus error in AS%u at PA=0x%pK, IPA=0x%pK",
        _CONTEXT,
        "bus-fault",
        _MMU_JM("kbase_mmu_interrupt_process", "r47p0 to r51p0"),
        fields=("address_space", "address"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "GPU bus error occurred. For this GPU version we now soft-reset as part of bus error recovery",
        _RESET,
        "bus-fault",
        _MMU("kbase_mmu_interrupt_process", "Midgard r27p0"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        (
            "Unhandled page fault. For this GPU version we now soft-reset the GPU as part of page "
            "fault recovery."
        ),
        _RESET,
        "page-fault",
        _MMU("kbase_mmu_report_fault_and_kill", "Midgard r27p0"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "Preparing to soft-reset GPU: Waiting (up to %d ms) for all jobs",
        _RESET,
        "reset",
        _JM_HW("kbase_reset_gpu_locked", "r49p0 to r51p0"),
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        "Preparing to soft-reset GPU: Waiting (upto %d ms) for all jobs",
        _RESET,
        "reset",
        _JM_HW("kbase_reset_gpu_locked", "Midgard r27p0, r27p0 to r48p0"),
        driver=Driver.KBASE_JM,
    ),
)
