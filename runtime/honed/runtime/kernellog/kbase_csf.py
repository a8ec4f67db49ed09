"""Records that only Arm's kbase for command-stream GPUs (late Valhall, 5th generation) writes."""

from __future__ import annotations

from typing import Final

from .fault import FIRMWARE_INTERNAL_ERROR, UNRECOVERABLE, Severity
from .pattern import Pattern, in_file

_STREAMS: Final = in_file("csf/mali_kbase_csf.c")
_CSF_MCU_SHARED_REG: Final = in_file("csf/mali_kbase_csf_mcu_shared_reg.c")
_MMU_CSF: Final = in_file("mmu/backend/mali_kbase_mmu_csf.c")
_DEVICE_HW_CSF: Final = in_file("device/backend/mali_kbase_device_hw_csf.c")
_FIRMWARE: Final = in_file("csf/mali_kbase_csf_firmware.c")
_RESET_GPU: Final = in_file("csf/mali_kbase_csf_reset_gpu.c")
_SCHEDULER: Final = in_file("csf/mali_kbase_csf_scheduler.c")
_PM_DRIVER: Final = in_file("backend/gpu/mali_kbase_pm_driver.c")
_CSF_TILER_HEAP_RECLAIM: Final = in_file("csf/mali_kbase_csf_tiler_heap_reclaim.c")
_MEM_LINUX: Final = in_file("mali_kbase_mem_linux.c")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

FATAL_CODES: Final = {UNRECOVERABLE: _RESET, FIRMWARE_INTERNAL_ERROR: _RESET}

PATTERNS: Final = (
    Pattern(
        "Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
        _QUEUE,
        "cs-fault",
        _STREAMS("kbase_csf_report_cs_fault_info", "r32p1 to r54p1"),
        fields=("tgid", "context", "group", "slot", "stream", "code", "name"),
    ),
    Pattern(
        "Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
        _QUEUE,
        "cs-fatal",
        _STREAMS("kbase_csf_report_cs_fatal_info", "r32p1 to r54p1"),
        fields=("tgid", "context", "group", "slot", "stream", "code", "name"),
        by_code=FATAL_CODES,
    ),
    Pattern(
        "CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
        _QUEUE,
        "cs-fault",
        _STREAMS("handle_fault_event", "r27p0"),
        fields=("stream", "code", "name"),
    ),
    Pattern(
        "CSG: %d, CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
        _QUEUE,
        "cs-fatal",
        _STREAMS("handle_fatal_event", "r27p0"),
        fields=("group", "stream", "code", "name"),
        by_code=FATAL_CODES,
    ),
    Pattern(
        "Fatal: group_%d_%d_%d exceeded shared region map retry limit",
        _QUEUE,
        "group-error",
        _CSF_MCU_SHARED_REG("notify_group_csg_reg_map_error", "r42p0 to r54p1"),
        fields=("tgid", "context", "group"),
    ),
    Pattern(
        "Queue group to be terminated, couldn't handle the OoM event",
        _QUEUE,
        "tiler-out-of-memory",
        _STREAMS("kbase_queue_oom_event", "r27p0 to r54p1"),
    ),
    Pattern(
        "Unable to prevent GPU reset, couldn't handle the OoM event",
        _QUEUE,
        "tiler-out-of-memory",
        _STREAMS("oom_event_worker", "r47p0 to r54p1"),
        consequence=True,
    ),
    Pattern(
        "GPU Fault 0x%08x (%s) in AS%u at PA 0x%pK",
        _CONTEXT,
        "gpu-fault",
        _MMU_CSF("kbase_mmu_gpu_fault_worker", "r47p0 to r54p1"),
        fields=("status", "name", "address_space", "address"),
    ),
    Pattern(
        "GPU Fault 0x%08x (%s) in AS%u at 0x%016llx",
        _CONTEXT,
        "gpu-fault",
        _MMU_CSF("kbase_mmu_gpu_fault_worker", "r27p0 to r44p1"),
        fields=("status", "name", "address_space", "address"),
    ),
    Pattern(
        "GPU fault in protected mode",
        _CONTEXT,
        "gpu-fault",
        _DEVICE_HW_CSF("kbase_gpu_interrupt", "r27p0 to r54p1"),
    ),
    Pattern(
        "fail to handle GPU bus fault ...",
        _CONTEXT,
        "bus-fault",
        _DEVICE_HW_CSF("kbase_gpu_fault_interrupt", "r35p0 to r54p1"),
    ),
    Pattern(
        "GPU bus fault triggering gpu-reset ...",
        _RESET,
        "bus-fault",
        _DEVICE_HW_CSF("kbase_gpu_fault_interrupt", "r27p0 to r54p1"),
    ),
    Pattern(
        "Unexpected Page fault in firmware address space at VA 0x%016llX",
        _RESET,
        "firmware-page-fault",
        _MMU_CSF("kbase_mmu_report_mcu_as_fault_and_reset", "r27p0 to r54p1"),
        fields=("address",),
    ),
    Pattern(
        "MCU encountered unrecoverable error",
        _RESET,
        "firmware-fault",
        _STREAMS("handle_glb_fatal_event", "r48p0 to r54p1"),
    ),
    Pattern(
        "GLB_FATAL_STATUS: %s",
        _RESET,
        "firmware-fault",
        _STREAMS("handle_glb_fatal_event", "r48p0 to r54p1"),
        fields=("name",),
    ),
    Pattern(
        "Version check failed in firmware reboot.",
        _RESET,
        "firmware-fault",
        _FIRMWARE("kbase_csf_firmware_reload_completed", "r27p0 to r54p1"),
    ),
    Pattern(
        "Timed out waiting for fw boot completion",
        _RESET,
        "firmware-timeout",
        _FIRMWARE("wait_for_firmware_boot", "r27p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) waiting for global request %x to complete",
        _RESET,
        "firmware-timeout",
        _FIRMWARE("wait_for_global_request_with_timeout", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "Wait for MCU wake up failed on GPU reset",
        _RESET,
        "firmware-timeout",
        _RESET_GPU("kbase_csf_reset_gpu_worker", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "Notify the event notification thread, forward progress timeout (%llu cycles)",
        _QUEUE,
        "progress-timeout",
        _STREAMS("report_group_timeout_error", "r32p1 to r54p1"),
        hang=True,
    ),
    Pattern(
        ("[%llu] Iterator PROGRESS_TIMER timeout notification received for group %u of ctx %d_%d on slot %u"),
        _QUEUE,
        "progress-timeout",
        _STREAMS("handle_progress_timer_events", "r35p0 to r54p1"),
        fields=(None, "group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        "%s: PROGRESS_TIMER timeout notified, CSG_%d_%d_%d, slot %u",
        _QUEUE,
        "progress-timeout",
        _SCHEDULER("cleanup_csg_slot", "r54p1"),
        fields=(None, "tgid", "context", "group", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] term request timeout (%d ms) for group %d of context %d_%d on slot %d",
        _QUEUE,
        "termination-timeout",
        _SCHEDULER("term_group_sync", "r35p0 to r54p1"),
        fields=(None, None, "group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Wait for MCU active failed when terminating group %d of context %d_%d on slot %d",
        _QUEUE,
        "termination-timeout",
        _SCHEDULER("kbase_csf_scheduler_group_deschedule", "r38p1 to r54p1"),
        fields=(None, "group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Wait for MCU active failed when when terminating group %d of context %d_%d on slot %d",
        _QUEUE,
        "termination-timeout",
        _SCHEDULER("kbase_csf_scheduler_group_deschedule", "r35p0"),
        fields=(None, "group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        (
            "[%llu] Wait for MCU active failed for stopping queue on csi %d bound to group %d of "
            "context %d_%d on slot %d"
        ),
        _QUEUE,
        "termination-timeout",
        _SCHEDULER("scheduler_activate_on_queue_stop", "r35p0 to r54p1"),
        fields=(None, "stream", "group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Group %d of context %d_%d on slot %u failed to suspend",
        _QUEUE,
        "suspension-timeout",
        _SCHEDULER("program_suspending_csg_slots", "r35p0 to r54p1"),
        fields=(None, "group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] LRU idle group %d of context %d_%d failed to suspend on slot %d",
        _QUEUE,
        "suspension-timeout",
        _SCHEDULER("evict_lru_or_blocked_csg", "r40p0 to r54p1"),
        fields=(None, "group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout waiting for the group %d to suspend on slot %d",
        _QUEUE,
        "suspension-timeout",
        _SCHEDULER("kbase_csf_scheduler_group_copy_suspend_buf", "r35p0 to r54p1"),
        fields=(None, "group", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Suspend request sent on CSG slots 0x%lx timed out for slots 0x%lx",
        _QUEUE,
        "suspension-timeout",
        _SCHEDULER("wait_csg_slots_suspend", "r40p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout waiting for CSG slots to suspend, slot_mask: 0x%*pb",
        _QUEUE,
        "suspension-timeout",
        _SCHEDULER("wait_csg_slots_suspend", "r35p0 to r38p1"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) waiting for CSG slots to suspend on power down",
        _RESET,
        "suspension-timeout",
        _SCHEDULER("suspend_active_groups_on_powerdown", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "Timeout waiting for CSG slots to suspend before reset",
        _RESET,
        "suspension-timeout",
        _SCHEDULER("suspend_active_queue_groups_on_reset", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) waiting for CSG slots to start",
        _RESET,
        "start-timeout",
        _SCHEDULER("wait_csg_slots_start", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "[%llu] slot %d timeout (%d ms) on up-running",
        _QUEUE,
        "start-timeout",
        _SCHEDULER("prepare_all_csg_suspension", "r35p0 to r54p1"),
        fields=(None, "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) on CSG_REQ:STATUS_UPDATE",
        _QUEUE,
        "group-timeout",
        _SCHEDULER("scheduler_update_idle_slots_status", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) on CSG_REQ:EP_CFG",
        _RESET,
        "group-timeout",
        _SCHEDULER("wait_csg_slots_finish_prio_update", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) waiting for queue to start on csi %d bound to group %d on slot %d",
        _QUEUE,
        "stream-timeout",
        _SCHEDULER("halt_stream_sync", "r35p0 to r54p1"),
        fields=(None, None, "stream", "group", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) waiting for queue to stop on csi %d bound to group %d on slot %d",
        _QUEUE,
        "stream-timeout",
        _SCHEDULER("halt_stream_sync", "r35p0 to r54p1"),
        fields=(None, None, "stream", "group", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms) waiting for queue stop ack on csi %d bound to group %d on slot %d",
        _QUEUE,
        "stream-timeout",
        _SCHEDULER("sched_halt_stream", "r35p0 to r54p1"),
        fields=(None, None, "stream", "group", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Group-%d failed to get a slot for stopping the queue on csi %d",
        _QUEUE,
        "stream-timeout",
        _SCHEDULER("sched_halt_stream", "r35p0 to r54p1"),
        fields=(None, "group", "stream"),
        hang=True,
    ),
    Pattern(
        "Possible GPU hang in Protected mode",
        _RESET,
        "protected-mode-timeout",
        _SCHEDULER("scheduler_force_protm_exit", "r38p1 to r54p1"),
        hang=True,
    ),
    Pattern(
        "Group-%d of context %d_%d ran in protected mode for too long on slot %d",
        _RESET,
        "protected-mode-timeout",
        _SCHEDULER("scheduler_force_protm_exit", "r38p1 to r54p1"),
        fields=("group", "tgid", "context", "slot"),
        hang=True,
    ),
    Pattern(
        "[%llu] Timeout (%d ms), protm_quit wait skipped",
        _RESET,
        "protected-mode-timeout",
        _SCHEDULER("scheduler_protm_wait_quit", "r35p0 to r54p1"),
        hang=True,
    ),
    Pattern(
        "Timeout for actual pmode entry after PROTM_ENTER ack",
        _RESET,
        "protected-mode-timeout",
        _FIRMWARE("kbase_csf_wait_protected_mode_enter", "r38p1 to r54p1"),
        hang=True,
    ),
    Pattern(
        "AS_ACTIVE bit stuck for MCU AS. Might be caused by unstable GPU clk/pwr",
        _RESET,
        "mmu-stuck",
        _FIRMWARE("wait_ready", "r43p0 to r54p1"),
    ),
    Pattern(
        "AS_ACTIVE_INT bit stuck for AS %d used by MCU FW",
        _RESET,
        "mmu-stuck",
        _PM_DRIVER("wait_mcu_as_inactive", "r38p1 to r54p1"),
        fields=("address_space",),
    ),
    Pattern(
        "[%llu] Timeout waiting for CACHE_CLN_INV_L2_LSC",
        _RESET,
        "flush-stuck",
        _SCHEDULER("suspend_active_queue_groups_on_reset", "r44p1 to r54p1")
        + _STREAMS("flush_gpu_cache_on_fatal_error", "r44p1 to r54p1"),
    ),
    Pattern(
        "[%llu] Timeout waiting for CACHE_CLN_INV_L2 to complete before Tiler heap reclaim",
        _RESET,
        "flush-stuck",
        _CSF_TILER_HEAP_RECLAIM("kbase_csf_tiler_heap_reclaim_unused_pages", "r47p0 to r54p1"),
    ),
    Pattern(
        "[%llu] Timeout waiting for cache clean to complete",
        _RESET,
        "flush-stuck",
        _SCHEDULER("suspend_active_queue_groups_on_reset", "r35p0 to r43p0")
        + _STREAMS("flush_gpu_cache_on_fatal_error", "r40p0 to r43p0"),
    ),
    Pattern("Preparing to soft-reset GPU", _RESET, "reset", _RESET_GPU("kbase_reset_gpu", "r27p0 to r54p1")),
    Pattern(
        "Timed out waiting for the GPU reset to complete",
        _RESET,
        "reset",
        _RESET_GPU("kbase_reset_gpu_wait", "r27p0 to r54p1"),
        consequence=True,
    ),
    Pattern(
        "MCU re-init failed trying full firmware reload",
        _RESET,
        "soft-reset-failed",
        _RESET_GPU("kbase_csf_reset_gpu_now", "r38p1 to r54p1"),
    ),
    Pattern(
        "Soft-reset failed", _LOST, "reset-failed", _RESET_GPU("kbase_csf_reset_gpu_now", "r38p1 to r54p1")
    ),
    Pattern(
        "L2 power up failed after the soft-reset",
        _LOST,
        "reset-failed",
        _RESET_GPU("kbase_csf_reset_gpu_now", "r38p1 to r54p1"),
    ),
    Pattern(
        "MCU Re-init failed even after trying full firmware reload",
        _LOST,
        "reset-failed",
        _RESET_GPU("kbase_csf_reset_gpu_now", "r38p1 to r54p1"),
    ),
    Pattern(
        "Reset failed to complete",
        _LOST,
        "reset-failed",
        _RESET_GPU("kbase_csf_reset_end_hw_access", "r27p0 to r54p1"),
    ),
    Pattern(
        "Unsuccessful GPU reset detected when",
        _LOST,
        "reset-failed",
        _MEM_LINUX("kbase_csf_user_io_pages_vm_close", "r27p0 to r54p1"),
        consequence=True,
    ),
)
