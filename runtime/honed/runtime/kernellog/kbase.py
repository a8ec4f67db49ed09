"""Records that Arm's kbase, the vendor's driver of Mali GPUs, writes for both kinds.

Versions are Arm's releases; files are below its folder, `mali_kbase` or `midgard`.
"""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_MMU_CSF: Final = in_file("mmu/backend/mali_kbase_mmu_csf.c")
_MMU_JM: Final = in_file("mmu/backend/mali_kbase_mmu_jm.c")
_MMU: Final = in_file("mmu/mali_kbase_mmu.c")
_MEM_LINUX: Final = in_file("mali_kbase_mem_linux.c")
_MMU_HW_DIRECT: Final = in_file("mmu/mali_kbase_mmu_hw_direct.c")
_FIRMWARE: Final = in_file("csf/mali_kbase_csf_firmware.c")
_MMU_HW_DIRECT_OLD: Final = in_file("backend/gpu/mali_kbase_mmu_hw_direct.c")
_DEVICE_HW: Final = in_file("device/mali_kbase_device_hw.c")
_PM_DRIVER: Final = in_file("backend/gpu/mali_kbase_pm_driver.c")
_ARBITER_PM: Final = in_file("arbiter/mali_kbase_arbiter_pm.c")
_PM_POLICY: Final = in_file("backend/gpu/mali_kbase_pm_policy.c")
_RESET_GPU: Final = in_file("csf/mali_kbase_csf_reset_gpu.c")
_JM_HW: Final = in_file("backend/gpu/mali_kbase_jm_hw.c")

_CONTEXT, _RESET, _LOST = Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "Unhandled Page fault in AS%u at VA 0x%016llX\nReason: Page allocation failure",
        Severity.OUT_OF_MEMORY,
        "page-fault",
        _MMU_CSF("kbase_mmu_report_fault_and_kill", "Midgard r27p0, r27p0 to r54p1"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "Unhandled Page fault in AS%u at VA 0x%016llX",
        _CONTEXT,
        "page-fault",
        _MMU_CSF("kbase_mmu_report_fault_and_kill", "Midgard r27p0, r27p0 to r54p1"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "GPU bus fault in AS%u at PA %pK",
        _CONTEXT,
        "bus-fault",
        _MMU_JM("kbase_gpu_report_bus_fault_and_kill", "r38p1 to r51p0")
        + _MMU_CSF("kbase_gpu_report_bus_fault_and_kill", "r38p1 to r54p1"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "GPU bus fault in AS%d at VA 0x%016llX",
        _CONTEXT,
        "bus-fault",
        _MMU_JM("kbase_gpu_report_bus_fault_and_kill", "r27p0 to r35p0")
        + _MMU_CSF("kbase_gpu_report_bus_fault_and_kill", "r27p0 to r35p0"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "Page fault in AS%d at VA 0x%016llx with no context present!",
        _CONTEXT,
        "page-fault",
        _MMU_CSF("kbase_mmu_interrupt_process", "r47p0 to r54p1")
        + _MMU_JM("kbase_mmu_interrupt_process", "r47p0 to r51p0"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "Bus error in AS%d at PA 0x%pK with no context present!",
        _CONTEXT,
        "bus-fault",
        _MMU_CSF("kbase_mmu_interrupt_process", "r47p0 to r54p1")
        + _MMU_JM("kbase_mmu_interrupt_process", "r47p0 to r51p0"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "%s in AS%d at 0x%016llx with no context present!",
        _CONTEXT,
        "page-fault",
        _MMU_JM("kbase_mmu_interrupt_process", "Midgard r27p0, r27p0 to r44p1"),
        fields=(None, "address_space", "address"),
    ),
    Pattern(
        "Page allocation failure of %zu pages: managed %zu pages",
        Severity.OUT_OF_MEMORY,
        "allocation",
        _MMU("page_fault_try_alloc", "r40p0 to r54p1"),
    ),
    Pattern(
        "Failed to allocate %lld pages",
        Severity.OUT_OF_MEMORY,
        "allocation",
        _MEM_LINUX("kbase_mem_alloc", "Midgard r27p0, r27p0 to r54p1"),
    ),
    Pattern(
        "AS_ACTIVE bit stuck for as %u",
        _RESET,
        "mmu-stuck",
        _MMU_HW_DIRECT("wait_ready", "r38p1 to r54p1"),
        fields=("address_space",),
    ),
    Pattern(
        "AS_ACTIVE bit stuck, might be caused by slow/unstable GPU clock",
        _RESET,
        "mmu-stuck",
        _FIRMWARE("wait_ready", "r27p0 to r42p0") + _MMU_HW_DIRECT("wait_ready", "r27p0 to r35p0"),
    ),
    Pattern("AS_ACTIVE bit stuck", _RESET, "mmu-stuck", _MMU_HW_DIRECT_OLD("wait_ready", "Midgard r27p0")),
    Pattern(
        "Flush for GPU page table update did not complete",
        _RESET,
        "flush-stuck",
        _MMU("kbase_mmu_page_fault_worker", "Midgard r27p0, r27p0 to r54p1"),
    ),
    Pattern(
        "Flush for GPU page fault due to write access did not complete",
        _RESET,
        "flush-stuck",
        _MMU("kbase_gpu_mmu_handle_write_faulting_as", "r43p0 to r51p0"),
    ),
    Pattern(
        "Flush for physical address range did not complete",
        _RESET,
        "flush-stuck",
        _MMU("mmu_flush_pa_range", "r40p0 to r54p1"),
    ),
    Pattern(
        "Invalidate after GPU page table update did not complete",
        _RESET,
        "flush-stuck",
        _MMU("mmu_invalidate", "r38p1 to r54p1"),
    ),
    Pattern(
        "Invalidation for MMU did not complete on handling page fault @ VA 0x%llx",
        _RESET,
        "flush-stuck",
        _MMU("kbase_mmu_page_fault_worker", "r47p0 to r54p1"),
        fields=("address",),
    ),
    Pattern(
        "Invalidation for MMU did not complete on handling page fault @ 0x%llx",
        _RESET,
        "flush-stuck",
        _MMU("kbase_mmu_page_fault_worker", "r38p1 to r44p1"),
        fields=("address",),
    ),
    Pattern(
        "%s: failed to lock MMU region or flush GPU cache. Issuing GPU soft-reset to recover.",
        _RESET,
        "flush-stuck",
        _MMU("kbase_mmu_migrate_page", "r41p0 to r42p0"),
    ),
    Pattern(
        "Cache clean timed out. Might be caused by unstable GPU clk/pwr",
        _RESET,
        "flush-stuck",
        _DEVICE_HW("kbase_gpu_wait_cache_clean_timeout", "r44p1 to r54p1"),
    ),
    Pattern(
        "Stuck waiting on %s bit, might be",
        _RESET,
        "flush-stuck",
        _DEVICE_HW("busy_wait_cache_operation", "r38p1 to r54p1"),
    ),
    Pattern(
        "CLEAN_CACHES_COMPLETED bit stuck",
        _RESET,
        "flush-stuck",
        _DEVICE_HW("busy_wait_cache_clean_irq", "r35p0"),
    ),
    Pattern(
        "L2_PWRTRANS %016llx set for too long",
        _RESET,
        "power-stuck",
        _MMU_HW_DIRECT("wait_l2_power_trans_complete", "r47p0 to r54p1"),
    ),
    Pattern(
        "SHADER_PWRTRANS %016llx set for too long",
        _RESET,
        "power-stuck",
        _MMU_HW_DIRECT("wait_cores_power_trans_complete", "r44p1 to r54p1"),
    ),
    Pattern(
        "SHADER_PWRTRANS set for too long",
        _RESET,
        "power-stuck",
        _MMU_HW_DIRECT("wait_cores_power_trans_complete", "r38p1 to r43p0"),
    ),
    Pattern(
        "Power transition timed out unexpectedly",
        _RESET,
        "power-stuck",
        _PM_DRIVER("kbase_pm_timed_out", "Midgard r27p0, r27p0 to r43p0"),
    ),
    Pattern(
        "Wait for desired PM state with L2 powered timed out",
        _RESET,
        "power-stuck",
        _PM_DRIVER("kbase_pm_wait_for_l2_powered", "r44p1 to r54p1"),
    ),
    Pattern(
        "Wait for power transition timed out",
        _RESET,
        "power-stuck",
        _PM_DRIVER("pm_wait_for_desired_state", "r44p1 to r54p1"),
    ),
    Pattern(
        "Wait for cores down scaling timed out",
        _RESET,
        "power-stuck",
        _PM_DRIVER("kbase_pm_wait_for_cores_down_scale", "r44p1 to r54p1"),
    ),
    Pattern(
        "Wait for poweroff work timed out",
        _RESET,
        "power-stuck",
        _PM_DRIVER("pm_wait_for_poweroff_work_complete", "r44p1 to r54p1"),
    ),
    Pattern("GPU lost in state %s", _RESET, "gpu-lost", _ARBITER_PM("kbase_gpu_lost", "r27p0 to r54p1")),
    Pattern("GPU lost while stopping", _RESET, "gpu-lost", _ARBITER_PM("kbase_gpu_lost", "r54p1")),
    Pattern(
        "Resorting to GPU reset for policy change",
        _RESET,
        "reset",
        _PM_POLICY("kbase_pm_set_policy", "r32p1 to r54p1"),
    ),
    Pattern(
        "Sending reset to GPU - all running jobs will be lost",
        _RESET,
        "reset",
        _PM_DRIVER("kbase_pm_reset_complete", "Midgard r27p0, r27p0 to r54p1"),
    ),
    Pattern(
        "Resetting GPU (allowing up to %d ms)",
        _RESET,
        "reset",
        _RESET_GPU("kbase_csf_reset_gpu_once", "r27p0 to r54p1")
        + _JM_HW("kbasep_reset_timeout_worker", "Midgard r27p0, r27p0 to r51p0"),
    ),
    Pattern(
        "Failed to soft-reset GPU (timed out after %d ms), now attempting a hard reset",
        _RESET,
        "soft-reset-failed",
        _PM_DRIVER("kbase_pm_do_reset", "Midgard r27p0, r27p0 to r54p1"),
    ),
    Pattern(
        "Reset complete",
        _RESET,
        "reset",
        _RESET_GPU("kbase_csf_reset_gpu_now", "r27p0 to r54p1")
        + _JM_HW("kbasep_reset_timeout_worker", "Midgard r27p0, r27p0 to r51p0"),
    ),
    Pattern(
        "Reset interrupt didn't reach CPU.",
        _LOST,
        "reset-failed",
        _PM_DRIVER("kbase_pm_do_reset", "Midgard r27p0, r27p0 to r54p1"),
    ),
    Pattern(
        "Failed to hard-reset the GPU (timed out after %d ms)",
        _LOST,
        "reset-failed",
        _PM_DRIVER("kbase_pm_do_reset", "Midgard r27p0, r27p0 to r54p1"),
    ),
    Pattern(
        "PWR_STATUS value (%llx) doesn't allow GPU reset",
        _LOST,
        "reset-failed",
        _PM_DRIVER("pwr_status_gpu_reset_allowed", "r54p1"),
    ),
)
