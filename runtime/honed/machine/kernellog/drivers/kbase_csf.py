"""Records that only Arm's kbase for command-stream GPUs (late Valhall, 5th generation) writes."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import FIRMWARE_INTERNAL_ERROR, UNRECOVERABLE, Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

FATAL_CODES: Final = {UNRECOVERABLE: _RESET, FIRMWARE_INTERNAL_ERROR: _RESET}

_rows = SourceTree().rows

# fmt: off
PATTERNS: Final = (
    *_rows("cs-fault", _QUEUE)(
        ("Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c kbase_csf_report_cs_fault_info r32p1 to r54p1",
         "tgid context group slot stream code name"),
    ),
    *_rows("cs-fatal", _QUEUE, by_code=FATAL_CODES)(
        ("Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c kbase_csf_report_cs_fatal_info r32p1 to r54p1",
         "tgid context group slot stream code name"),
    ),
    *_rows("cs-fault", _QUEUE)(
        ("CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c handle_fault_event r27p0", "stream code name"),
    ),
    *_rows("cs-fatal", _QUEUE, by_code=FATAL_CODES)(
        ("CSG: %d, CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c handle_fatal_event r27p0", "group stream code name"),
    ),
    *_rows("group-error", _QUEUE)(
        ("Fatal: group_%d_%d_%d exceeded shared region map retry limit",
         "csf/mali_kbase_csf_mcu_shared_reg.c notify_group_csg_reg_map_error r42p0 to r54p1",
         "tgid context group"),
    ),
    *_rows("tiler-out-of-memory", _QUEUE)(
        ("Queue group to be terminated, couldn't handle the OoM event",
         "csf/mali_kbase_csf.c kbase_queue_oom_event r27p0 to r54p1"),
    ),
    *_rows("tiler-out-of-memory", _QUEUE, consequence=True)(
        ("Unable to prevent GPU reset, couldn't handle the OoM event",
         "csf/mali_kbase_csf.c oom_event_worker r47p0 to r54p1"),
    ),
    *_rows("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) in AS%u at PA 0x%pK",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_gpu_fault_worker r47p0 to r54p1",
         "status name address_space address"),
        ("GPU Fault 0x%08x (%s) in AS%u at 0x%016llx",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_gpu_fault_worker r27p0 to r44p1",
         "status name address_space address"),
        ("GPU fault in protected mode",
         "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_interrupt r27p0 to r54p1"),
    ),
    *_rows("bus-fault", _CONTEXT)(
        ("fail to handle GPU bus fault ...",
         "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_fault_interrupt r35p0 to r54p1"),
    ),
    *_rows("bus-fault", _RESET)(
        ("GPU bus fault triggering gpu-reset ...",
         "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_fault_interrupt r27p0 to r54p1"),
    ),
    *_rows("firmware-page-fault", _RESET)(
        ("Unexpected Page fault in firmware address space at VA 0x%016llX",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_mcu_as_fault_and_reset r27p0 to r54p1",
         "address"),
    ),
    *_rows("firmware-fault", _RESET)(
        ("MCU encountered unrecoverable error", "csf/mali_kbase_csf.c handle_glb_fatal_event r48p0 to r54p1"),
        ("GLB_FATAL_STATUS: %s", "csf/mali_kbase_csf.c handle_glb_fatal_event r48p0 to r54p1", "name"),
        ("Version check failed in firmware reboot.",
         "csf/mali_kbase_csf_firmware.c kbase_csf_firmware_reload_completed r27p0 to r54p1"),
    ),
    *_rows("firmware-timeout", _RESET, hang=True)(
        ("Timed out waiting for fw boot completion",
         "csf/mali_kbase_csf_firmware.c wait_for_firmware_boot r27p0 to r54p1"),
        ("[%llu] Timeout (%d ms) waiting for global request %x to complete",
         "csf/mali_kbase_csf_firmware.c wait_for_global_request_with_timeout r35p0 to r54p1"),
        ("Wait for MCU wake up failed on GPU reset",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_worker r35p0 to r54p1"),
    ),
    *_rows("progress-timeout", _QUEUE, hang=True)(
        ("Notify the event notification thread, forward progress timeout (%llu cycles)",
         "csf/mali_kbase_csf.c report_group_timeout_error r32p1 to r54p1"),
        ("[%llu] Iterator PROGRESS_TIMER timeout notification received for group %u of ctx %d_%d on slot %u",
         "csf/mali_kbase_csf.c handle_progress_timer_events r35p0 to r54p1", "- group tgid context slot"),
        ("%s: PROGRESS_TIMER timeout notified, CSG_%d_%d_%d, slot %u",
         "csf/mali_kbase_csf_scheduler.c cleanup_csg_slot r54p1", "- tgid context group slot"),
    ),
    *_rows("termination-timeout", _QUEUE, hang=True)(
        ("[%llu] term request timeout (%d ms) for group %d of context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c term_group_sync r35p0 to r54p1", "- - group tgid context slot"),
        ("[%llu] Wait for MCU active failed when terminating group %d of context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_deschedule r38p1 to r54p1",
         "- group tgid context slot"),
        ("[%llu] Wait for MCU active failed when when terminating group %d of context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_deschedule r35p0",
         "- group tgid context slot"),
        ("[%llu] Wait for MCU active failed for stopping queue on csi %d bound to group %d of "
         "context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c scheduler_activate_on_queue_stop r35p0 to r54p1",
         "- stream group tgid context slot"),
    ),
    *_rows("suspension-timeout", _QUEUE, hang=True)(
        ("[%llu] Group %d of context %d_%d on slot %u failed to suspend",
         "csf/mali_kbase_csf_scheduler.c program_suspending_csg_slots r35p0 to r54p1",
         "- group tgid context slot"),
        ("[%llu] LRU idle group %d of context %d_%d failed to suspend on slot %d",
         "csf/mali_kbase_csf_scheduler.c evict_lru_or_blocked_csg r40p0 to r54p1",
         "- group tgid context slot"),
        ("[%llu] Timeout waiting for the group %d to suspend on slot %d",
         "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_copy_suspend_buf r35p0 to r54p1",
         "- group slot"),
        ("[%llu] Suspend request sent on CSG slots 0x%lx timed out for slots 0x%lx",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_suspend r40p0 to r54p1"),
        ("[%llu] Timeout waiting for CSG slots to suspend, slot_mask: 0x%*pb",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_suspend r35p0 to r38p1"),
    ),
    *_rows("suspension-timeout", _RESET, hang=True)(
        ("[%llu] Timeout (%d ms) waiting for CSG slots to suspend on power down",
         "csf/mali_kbase_csf_scheduler.c suspend_active_groups_on_powerdown r35p0 to r54p1"),
        ("Timeout waiting for CSG slots to suspend before reset",
         "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r35p0 to r54p1"),
    ),
    *_rows("start-timeout", _RESET, hang=True)(
        ("[%llu] Timeout (%d ms) waiting for CSG slots to start",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_start r35p0 to r54p1"),
    ),
    *_rows("start-timeout", _QUEUE, hang=True)(
        ("[%llu] slot %d timeout (%d ms) on up-running",
         "csf/mali_kbase_csf_scheduler.c prepare_all_csg_suspension r35p0 to r54p1", "- slot"),
    ),
    *_rows("group-timeout", _QUEUE, hang=True)(
        ("[%llu] Timeout (%d ms) on CSG_REQ:STATUS_UPDATE",
         "csf/mali_kbase_csf_scheduler.c scheduler_update_idle_slots_status r35p0 to r54p1"),
    ),
    *_rows("group-timeout", _RESET, hang=True)(
        ("[%llu] Timeout (%d ms) on CSG_REQ:EP_CFG",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_finish_prio_update r35p0 to r54p1"),
    ),
    *_rows("stream-timeout", _QUEUE, hang=True)(
        ("[%llu] Timeout (%d ms) waiting for queue to start on csi %d bound to group %d on slot %d",
         "csf/mali_kbase_csf_scheduler.c halt_stream_sync r35p0 to r54p1", "- - stream group slot"),
        ("[%llu] Timeout (%d ms) waiting for queue to stop on csi %d bound to group %d on slot %d",
         "csf/mali_kbase_csf_scheduler.c halt_stream_sync r35p0 to r54p1", "- - stream group slot"),
        ("[%llu] Timeout (%d ms) waiting for queue stop ack on csi %d bound to group %d on slot %d",
         "csf/mali_kbase_csf_scheduler.c sched_halt_stream r35p0 to r54p1", "- - stream group slot"),
        ("[%llu] Group-%d failed to get a slot for stopping the queue on csi %d",
         "csf/mali_kbase_csf_scheduler.c sched_halt_stream r35p0 to r54p1", "- group stream"),
    ),
    *_rows("protected-mode-timeout", _RESET, hang=True)(
        ("Possible GPU hang in Protected mode",
         "csf/mali_kbase_csf_scheduler.c scheduler_force_protm_exit r38p1 to r54p1"),
        ("Group-%d of context %d_%d ran in protected mode for too long on slot %d",
         "csf/mali_kbase_csf_scheduler.c scheduler_force_protm_exit r38p1 to r54p1",
         "group tgid context slot"),
        ("[%llu] Timeout (%d ms), protm_quit wait skipped",
         "csf/mali_kbase_csf_scheduler.c scheduler_protm_wait_quit r35p0 to r54p1"),
        ("Timeout for actual pmode entry after PROTM_ENTER ack",
         "csf/mali_kbase_csf_firmware.c kbase_csf_wait_protected_mode_enter r38p1 to r54p1"),
    ),
    *_rows("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck for MCU AS. Might be caused by unstable GPU clk/pwr",
         "csf/mali_kbase_csf_firmware.c wait_ready r43p0 to r54p1"),
        ("AS_ACTIVE_INT bit stuck for AS %d used by MCU FW",
         "backend/gpu/mali_kbase_pm_driver.c wait_mcu_as_inactive r38p1 to r54p1", "address_space"),
    ),
    *_rows("flush-stuck", _RESET)(
        ("[%llu] Timeout waiting for CACHE_CLN_INV_L2_LSC",
         "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r44p1 to r54p1; "
         "csf/mali_kbase_csf.c flush_gpu_cache_on_fatal_error r44p1 to r54p1"),
        ("[%llu] Timeout waiting for CACHE_CLN_INV_L2 to complete before Tiler heap reclaim",
         "csf/mali_kbase_csf_tiler_heap_reclaim.c kbase_csf_tiler_heap_reclaim_unused_pages r47p0 to r54p1"),
        ("[%llu] Timeout waiting for cache clean to complete",
         "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r35p0 to r43p0; "
         "csf/mali_kbase_csf.c flush_gpu_cache_on_fatal_error r40p0 to r43p0"),
    ),
    *_rows("reset", _RESET)(
        ("Preparing to soft-reset GPU", "csf/mali_kbase_csf_reset_gpu.c kbase_reset_gpu r27p0 to r54p1"),
    ),
    *_rows("reset", _RESET, consequence=True)(
        ("Timed out waiting for the GPU reset to complete",
         "csf/mali_kbase_csf_reset_gpu.c kbase_reset_gpu_wait r27p0 to r54p1"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("MCU re-init failed trying full firmware reload",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1"),
    ),
    *_rows("reset-failed", _LOST)(
        ("Soft-reset failed", "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1"),
        ("L2 power up failed after the soft-reset",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1"),
        ("MCU Re-init failed even after trying full firmware reload",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1"),
        ("Reset failed to complete",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_end_hw_access r27p0 to r54p1"),
    ),
    *_rows("reset-failed", _LOST, consequence=True)(
        ("Unsuccessful GPU reset detected when",
         "mali_kbase_mem_linux.c kbase_csf_user_io_pages_vm_close r27p0 to r54p1"),
    ),
)
# fmt: on
