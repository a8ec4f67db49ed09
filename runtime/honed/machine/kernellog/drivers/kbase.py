"""Records that Arm's kbase, the vendor's driver of Mali GPUs, writes for both kinds.

Versions are Arm's releases; files are below its folder, `mali_kbase` or `midgard`.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_CONTEXT, _RESET, _LOST = Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree().rows

# fmt: off
PATTERNS: Final = (
    *_rows("page-fault", Severity.OUT_OF_MEMORY)(
        ("Unhandled Page fault in AS%u at VA 0x%016llX\nReason: Page allocation failure",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_fault_and_kill Midgard r27p0, r27p0 to r54p1",
         "address_space address"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%u at VA 0x%016llX",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_fault_and_kill Midgard r27p0, r27p0 to r54p1",
         "address_space address"),
    ),
    *_rows("bus-fault", _CONTEXT)(
        ("GPU bus fault in AS%u at PA %pK",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r38p1 to r51p0; "
         "mmu/backend/mali_kbase_mmu_csf.c kbase_gpu_report_bus_fault_and_kill r38p1 to r54p1",
         "address_space address"),
        ("GPU bus fault in AS%d at VA 0x%016llX",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0; "
         "mmu/backend/mali_kbase_mmu_csf.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0",
         "address_space address"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("Page fault in AS%d at VA 0x%016llx with no context present!",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_interrupt_process r47p0 to r54p1; "
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0",
         "address_space address"),
    ),
    *_rows("bus-fault", _CONTEXT)(
        ("Bus error in AS%d at PA 0x%pK with no context present!",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_interrupt_process r47p0 to r54p1; "
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0",
         "address_space address"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("%s in AS%d at 0x%016llx with no context present!",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process Midgard r27p0, r27p0 to r44p1",
         "- address_space address"),
    ),
    *_rows("allocation", Severity.OUT_OF_MEMORY)(
        ("Page allocation failure of %zu pages: managed %zu pages",
         "mmu/mali_kbase_mmu.c page_fault_try_alloc r40p0 to r54p1"),
        ("Failed to allocate %lld pages",
         "mali_kbase_mem_linux.c kbase_mem_alloc Midgard r27p0, r27p0 to r54p1"),
    ),
    *_rows("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck for as %u",
         "mmu/mali_kbase_mmu_hw_direct.c wait_ready r38p1 to r54p1", "address_space"),
        ("AS_ACTIVE bit stuck, might be caused by slow/unstable GPU clock",
         "csf/mali_kbase_csf_firmware.c wait_ready r27p0 to r42p0; mmu/mali_kbase_mmu_hw_direct.c "
         "wait_ready r27p0 to r35p0"),
        ("AS_ACTIVE bit stuck", "backend/gpu/mali_kbase_mmu_hw_direct.c wait_ready Midgard r27p0"),
    ),
    *_rows("flush-stuck", _RESET)(
        ("Flush for GPU page table update did not complete",
         "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker Midgard r27p0, r27p0 to r54p1"),
        ("Flush for GPU page fault due to write access did not complete",
         "mmu/mali_kbase_mmu.c kbase_gpu_mmu_handle_write_faulting_as r43p0 to r51p0"),
        ("Flush for physical address range did not complete",
         "mmu/mali_kbase_mmu.c mmu_flush_pa_range r40p0 to r54p1"),
        ("Invalidate after GPU page table update did not complete",
         "mmu/mali_kbase_mmu.c mmu_invalidate r38p1 to r54p1"),
        ("Invalidation for MMU did not complete on handling page fault @ VA 0x%llx",
         "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker r47p0 to r54p1", "address"),
        ("Invalidation for MMU did not complete on handling page fault @ 0x%llx",
         "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker r38p1 to r44p1", "address"),
        ("%s: failed to lock MMU region or flush GPU cache. Issuing GPU soft-reset to recover.",
         "mmu/mali_kbase_mmu.c kbase_mmu_migrate_page r41p0 to r42p0"),
        ("Cache clean timed out. Might be caused by unstable GPU clk/pwr",
         "device/mali_kbase_device_hw.c kbase_gpu_wait_cache_clean_timeout r44p1 to r54p1"),
        ("Stuck waiting on %s bit, might be",
         "device/mali_kbase_device_hw.c busy_wait_cache_operation r38p1 to r54p1"),
        ("CLEAN_CACHES_COMPLETED bit stuck", "device/mali_kbase_device_hw.c busy_wait_cache_clean_irq r35p0"),
    ),
    *_rows("power-stuck", _RESET)(
        ("L2_PWRTRANS %016llx set for too long",
         "mmu/mali_kbase_mmu_hw_direct.c wait_l2_power_trans_complete r47p0 to r54p1"),
        ("SHADER_PWRTRANS %016llx set for too long",
         "mmu/mali_kbase_mmu_hw_direct.c wait_cores_power_trans_complete r44p1 to r54p1"),
        ("SHADER_PWRTRANS set for too long",
         "mmu/mali_kbase_mmu_hw_direct.c wait_cores_power_trans_complete r38p1 to r43p0"),
        ("Power transition timed out unexpectedly",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_timed_out Midgard r27p0, r27p0 to r43p0"),
        ("Wait for desired PM state with L2 powered timed out",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_wait_for_l2_powered r44p1 to r54p1"),
        ("Wait for power transition timed out",
         "backend/gpu/mali_kbase_pm_driver.c pm_wait_for_desired_state r44p1 to r54p1"),
        ("Wait for cores down scaling timed out",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_wait_for_cores_down_scale r44p1 to r54p1"),
        ("Wait for poweroff work timed out",
         "backend/gpu/mali_kbase_pm_driver.c pm_wait_for_poweroff_work_complete r44p1 to r54p1"),
    ),
    *_rows("gpu-lost", _RESET)(
        ("GPU lost in state %s", "arbiter/mali_kbase_arbiter_pm.c kbase_gpu_lost r27p0 to r54p1"),
        ("GPU lost while stopping", "arbiter/mali_kbase_arbiter_pm.c kbase_gpu_lost r54p1"),
    ),
    *_rows("reset", _RESET)(
        ("Resorting to GPU reset for policy change",
         "backend/gpu/mali_kbase_pm_policy.c kbase_pm_set_policy r32p1 to r54p1"),
        ("Sending reset to GPU - all running jobs will be lost",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_reset_complete Midgard r27p0, r27p0 to r54p1"),
        ("Resetting GPU (allowing up to %d ms)",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_once r27p0 to r54p1; "
         "backend/gpu/mali_kbase_jm_hw.c kbasep_reset_timeout_worker Midgard r27p0, r27p0 to r51p0"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("Failed to soft-reset GPU (timed out after %d ms), now attempting a hard reset",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1"),
    ),
    *_rows("reset", _RESET)(
        ("Reset complete",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r27p0 to r54p1; "
         "backend/gpu/mali_kbase_jm_hw.c kbasep_reset_timeout_worker Midgard r27p0, r27p0 to r51p0"),
    ),
    *_rows("reset-failed", _LOST)(
        ("Reset interrupt didn't reach CPU.",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1"),
        ("Failed to hard-reset the GPU (timed out after %d ms)",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1"),
        ("PWR_STATUS value (%llx) doesn't allow GPU reset",
         "backend/gpu/mali_kbase_pm_driver.c pwr_status_gpu_reset_allowed r54p1"),
    ),
)
# fmt: on
