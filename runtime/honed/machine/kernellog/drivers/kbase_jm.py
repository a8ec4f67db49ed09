"""Records that only Arm's kbase for job-manager GPUs (Midgard, Bifrost, early Valhall) writes."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Driver, Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _CONTEXT, _RESET = Severity.QUEUE, Severity.CONTEXT, Severity.RESET

_rows = SourceTree(driver=Driver.KBASE_JM).rows

# fmt: off
PATTERNS: Final = (
    *_rows("job-error", _QUEUE)(
        ("error detected from slot %d, job status 0x%08x (%s)",
         "backend/gpu/mali_kbase_jm_rb.c kbase_gpu_complete_hw Midgard r27p0, r27p0 to r51p0",
         "slot code name"),
    ),
    *_rows("job-fault", _QUEUE)(
        ("t6xx: GPU fault 0x%02lx from job slot %d",
         "mali_kbase_jd.c kbase_jd_done_worker Midgard r27p0, r27p0 to r51p0", "code slot"),
    ),
    *_rows("job-stopped", _QUEUE, hang=True)(
        ("JS: Job Hard-Stopped (took more than %u ticks at %u ms/tick)",
         "backend/gpu/mali_kbase_js_backend.c timer_callback Midgard r27p0, r27p0 to r51p0"),
    ),
    *_rows("job-timeout", _RESET, hang=True)(
        ("JS: Job has been on the GPU for too long",
         "backend/gpu/mali_kbase_js_backend.c timer_callback Midgard r27p0, r27p0 to r51p0"),
    ),
    *_rows("job-timeout", _QUEUE, hang=True)(
        ("Timeout in waiting for job slot %u to become free for ctx %d_%u",
         "backend/gpu/mali_kbase_jm_hw.c kbasep_jm_wait_js_free r43p0 to r51p0", "slot tgid context"),
    ),
    *_rows("termination-timeout", _QUEUE, hang=True)(
        ("Jobs failed to be killed (within %d ms) as part of context termination",
         "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs Midgard r27p0"),
    ),
    *_rows("termination-timeout", _RESET, hang=True)(
        ("Issuing GPU soft-reset because jobs failed to be killed (within %d ms)",
         "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs r32p1 to r51p0"),
        ("Issueing GPU soft-reset because jobs failed to be killed (within %d ms)",
         "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs Midgard r27p0, r27p0 to r28p0"),
    ),
    *_rows("reset", _RESET)(
        ("Issueing GPU soft-reset after hard stopping due to hardware issue",
         "backend/gpu/mali_kbase_jm_hw.c kbase_job_slot_hardstop Midgard r27p0"),
    ),
    *_rows("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) at PA 0x%pK",
         "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r47p0 to r51p0",
         "status name address"),
        ("GPU Fault 0x%08x (%s) at 0x%016llx",
         "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r27p0 to r44p1; "
         "backend/gpu/mali_kbase_device_hw.c kbase_report_gpu_fault Midgard r27p0, r28p0",
         "status name address"),
    ),
    *_rows("gpu-fault", _CONTEXT, consequence=True)(
        ("There were multiple GPU faults - some have not been reported",
         "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r27p0 to r51p0; "
         "backend/gpu/mali_kbase_device_hw.c kbase_report_gpu_fault Midgard r27p0, r28p0"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%u at VA 0x%016llX\nReason: %s\nraw fault status: 0x%X\nexception "
         "type 0x%X: %s\naccess type 0x%X: %s\npid: %d",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_report_fault_and_kill r50p0 to r51p0",
         "address_space address - - code name - access tid"),
        ("Unhandled Page fault in AS%d at VA 0x%016llX\nReason: %s\nraw fault status: 0x%X\ndecoded "
         "fault status: %s\n",
         "mali_kbase_mmu.c kbase_mmu_report_fault_and_kill Midgard r27p0", "address_space address"),
    ),
    *_rows("bus-fault", _CONTEXT)(
        ("GPU bus fault in AS%u at PA %pK\nraw fault status: 0x%X\n",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r38p1 to r51p0",
         "address_space address"),
        ("GPU bus fault in AS%d at VA 0x%016llX\nraw fault status: 0x%X\n",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0",
         "address_space address"),
        ("Bus error in AS%u at PA=0x%pK, IPA=0x%pK",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0",
         "address_space address"),
    ),
    *_rows("bus-fault", _RESET)(
        ("GPU bus error occurred. For this GPU version we now soft-reset as part of bus error recovery",
         "mali_kbase_mmu.c kbase_mmu_interrupt_process Midgard r27p0"),
    ),
    *_rows("page-fault", _RESET)(
        ("Unhandled page fault. For this GPU version we now soft-reset the GPU as part of page fault "
         "recovery.",
         "mali_kbase_mmu.c kbase_mmu_report_fault_and_kill Midgard r27p0"),
    ),
    *_rows("reset", _RESET)(
        ("Preparing to soft-reset GPU: Waiting (up to %d ms) for all jobs",
         "backend/gpu/mali_kbase_jm_hw.c kbase_reset_gpu_locked r49p0 to r51p0"),
        ("Preparing to soft-reset GPU: Waiting (upto %d ms) for all jobs",
         "backend/gpu/mali_kbase_jm_hw.c kbase_reset_gpu_locked Midgard r27p0, r27p0 to r48p0"),
    ),
)
# fmt: on
