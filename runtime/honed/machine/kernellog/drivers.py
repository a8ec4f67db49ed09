"""Records of drivers: kbase (Arm's own of Mali GPUs), the open ones of boards, PCs'; and of the kernel.

Versions of kbase are Arm's releases, g29p1 that of Rockchip's kernels; its files are below the driver's
folder, `mali_kbase`, `midgard` or `valhall`. Versions of the open drivers are Linux's, and their files are
below `drivers/gpu/drm`, in the driver's folder.

Of a PC's GPU it is enough to know that it hung, was reset or was lost, and to which process that happened:
honed serves boards.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from honed.machine.kernellog.fault import (
    FIRMWARE_INTERNAL_ERROR,
    UNRECOVERABLE,
    Driver,
    Pattern,
    RecordTable,
    Severity,
)

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST
_FATAL_CODES = {UNRECOVERABLE: _RESET}
_KBASE_FATAL_CODES = {UNRECOVERABLE: _RESET, FIRMWARE_INTERNAL_ERROR: _RESET}

# fmt: off
# Only for job-manager GPUs (Midgard, Bifrost, early Valhall).
_jm = partial(Pattern, driver=Driver.KBASE_JM)
_JM_ROWS = (
    _jm("job-error", _QUEUE, "error detected from slot %d, job status 0x%08x (%s)",
        "backend/gpu/mali_kbase_jm_rb.c kbase_gpu_complete_hw Midgard r27p0, r27p0 to r51p0, g29p1",
        "- code name"),
    _jm("job-fault", _QUEUE, "t6xx: GPU fault 0x%02lx from job slot %d",
        "mali_kbase_jd.c kbase_jd_done_worker Midgard r27p0, r27p0 to r51p0, g29p1", "code"),
    _jm("job-stopped", _QUEUE, "JS: Job Hard-Stopped (took more than %u ticks at %u ms/tick)",
        "backend/gpu/mali_kbase_js_backend.c timer_callback Midgard r27p0, r27p0 to r51p0, g29p1"),
    _jm("job-timeout", _RESET, "JS: Job has been on the GPU for too long",
        "backend/gpu/mali_kbase_js_backend.c timer_callback Midgard r27p0, r27p0 to r51p0, g29p1"),
    _jm("job-timeout", _QUEUE, "Timeout in waiting for job slot %u to become free for ctx %d_%u",
        "backend/gpu/mali_kbase_jm_hw.c kbasep_jm_wait_js_free r43p0 to r51p0, g29p1", "- tgid context"),
    _jm("termination-timeout", _QUEUE,
        "Jobs failed to be killed (within %d ms) as part of context termination",
        "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs Midgard r27p0"),
    _jm("termination-timeout", _RESET,
        "Issuing GPU soft-reset because jobs failed to be killed (within %d ms)",
        "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs r32p1 to r51p0, g29p1"),
    _jm("termination-timeout", _RESET,
        "Issueing GPU soft-reset because jobs failed to be killed (within %d ms)",
        "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs Midgard r27p0, r27p0 to r28p0"),
    _jm("reset", _RESET, "Issueing GPU soft-reset after hard stopping due to hardware issue",
        "backend/gpu/mali_kbase_jm_hw.c kbase_job_slot_hardstop Midgard r27p0"),
    _jm("gpu-fault", _CONTEXT, "GPU Fault 0x%08x (%s) at PA 0x%pK",
        "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r47p0 to r51p0, g29p1",
        "status name"),
    _jm("gpu-fault", _CONTEXT, "GPU Fault 0x%08x (%s) at 0x%016llx",
        "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r27p0 to r44p1; "
        "backend/gpu/mali_kbase_device_hw.c kbase_report_gpu_fault Midgard r27p0, r28p0", "status name"),
    _jm("gpu-fault", _CONTEXT, "There were multiple GPU faults - some have not been reported",
        "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r27p0 to r51p0, g29p1; "
        "backend/gpu/mali_kbase_device_hw.c kbase_report_gpu_fault Midgard r27p0, r28p0", consequence=True),
    _jm("page-fault", _CONTEXT,
        "Unhandled Page fault in AS%u at VA 0x%016llX\nReason: %s\nraw fault status: 0x%X\nexception type "
        "0x%X: %s\naccess type 0x%X: %s\npid: %d",
        "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_report_fault_and_kill r50p0 to r51p0, g29p1",
        "address_space - - - code name - - tid"),
    _jm("page-fault", _CONTEXT,
        "Unhandled Page fault in AS%d at VA 0x%016llX\nReason: %s\nraw fault status: 0x%X\ndecoded fault "
        "status: %s\n",
        "mali_kbase_mmu.c kbase_mmu_report_fault_and_kill Midgard r27p0", "address_space"),
    _jm("bus-fault", _CONTEXT, "GPU bus fault in AS%u at PA %pK\nraw fault status: 0x%X\n",
        "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r38p1 to r51p0, g29p1",
        "address_space"),
    _jm("bus-fault", _CONTEXT, "GPU bus fault in AS%d at VA 0x%016llX\nraw fault status: 0x%X\n",
        "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0",
        "address_space"),
    _jm("bus-fault", _CONTEXT, "Bus error in AS%u at PA=0x%pK, IPA=0x%pK",
        "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0, g29p1", "address_space"),
    _jm("bus-fault", _RESET,
        "GPU bus error occurred. For this GPU version we now soft-reset as part of bus error recovery",
        "mali_kbase_mmu.c kbase_mmu_interrupt_process Midgard r27p0"),
    _jm("page-fault", _RESET,
        "Unhandled page fault. For this GPU version we now soft-reset the GPU as part of page fault "
        "recovery.",
        "mali_kbase_mmu.c kbase_mmu_report_fault_and_kill Midgard r27p0"),
    _jm("reset", _RESET, "Preparing to soft-reset GPU: Waiting (up to %d ms) for all jobs",
        "backend/gpu/mali_kbase_jm_hw.c kbase_reset_gpu_locked r49p0 to r51p0, g29p1"),
    _jm("reset", _RESET, "Preparing to soft-reset GPU: Waiting (upto %d ms) for all jobs",
        "backend/gpu/mali_kbase_jm_hw.c kbase_reset_gpu_locked Midgard r27p0, r27p0 to r48p0"),
)

# Rows only for command-stream GPUs (late Valhall, 5th generation).
_CSF_ROWS = (
    Pattern("cs-fault", _QUEUE, "Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
            "csf/mali_kbase_csf.c kbase_csf_report_cs_fault_info r32p1 to r54p1; "
            "csf/mali_kbase_csf.c handle_fault_event g29p1", "tgid context group - - code name"),
    Pattern("cs-fatal", _QUEUE, "Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
            "csf/mali_kbase_csf.c kbase_csf_report_cs_fatal_info r32p1 to r54p1; "
            "csf/mali_kbase_csf.c handle_fatal_event g29p1",
            "tgid context group - - code name", by_code=_KBASE_FATAL_CODES),
    Pattern("cs-fault", _QUEUE, "CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
            "csf/mali_kbase_csf.c handle_fault_event r27p0", "- code name"),
    Pattern("cs-fatal", _QUEUE, "CSG: %d, CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
            "csf/mali_kbase_csf.c handle_fatal_event r27p0", "group - code name", by_code=_KBASE_FATAL_CODES),
    Pattern("group-error", _QUEUE, "Fatal: group_%d_%d_%d exceeded shared region map retry limit",
            "csf/mali_kbase_csf_mcu_shared_reg.c notify_group_csg_reg_map_error r42p0 to r54p1, g29p1",
            "tgid context group"),
    Pattern("tiler-out-of-memory", _QUEUE, "Queue group to be terminated, couldn't handle the OoM event",
            "csf/mali_kbase_csf.c kbase_queue_oom_event r27p0 to r54p1, g29p1"),
    Pattern("tiler-out-of-memory", _QUEUE, "Unable to prevent GPU reset, couldn't handle the OoM event",
            "csf/mali_kbase_csf.c oom_event_worker r47p0 to r54p1, g29p1", consequence=True),
    Pattern("gpu-fault", _CONTEXT, "GPU Fault 0x%08x (%s) in AS%u at PA 0x%pK",
            "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_gpu_fault_worker r47p0 to r54p1, g29p1",
            "status name address_space"),
    Pattern("gpu-fault", _CONTEXT, "GPU Fault 0x%08x (%s) in AS%u at 0x%016llx",
            "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_gpu_fault_worker r27p0 to r44p1",
            "status name address_space"),
    Pattern("gpu-fault", _CONTEXT, "GPU fault in protected mode",
            "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_interrupt r27p0 to r54p1, g29p1"),
    Pattern("bus-fault", _CONTEXT, "fail to handle GPU bus fault ...",
            "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_fault_interrupt r35p0 to r54p1, g29p1"),
    Pattern("bus-fault", _RESET, "GPU bus fault triggering gpu-reset ...",
            "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_fault_interrupt r27p0 to r54p1, g29p1"),
    Pattern("firmware-page-fault", _RESET, "Unexpected Page fault in firmware address space at VA 0x%016llX",
            "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_mcu_as_fault_and_reset r27p0 to r54p1, g29p1"),
    Pattern("firmware-fault", _RESET, "MCU encountered unrecoverable error",
            "csf/mali_kbase_csf.c handle_glb_fatal_event r48p0 to r54p1, g29p1"),
    Pattern("firmware-fault", _RESET, "GLB_FATAL_STATUS: %s",
            "csf/mali_kbase_csf.c handle_glb_fatal_event r48p0 to r54p1, g29p1", "name"),
    Pattern("firmware-fault", _RESET, "Version check failed in firmware reboot.",
            "csf/mali_kbase_csf_firmware.c kbase_csf_firmware_reload_completed r27p0 to r54p1, g29p1"),
    Pattern("firmware-timeout", _RESET, "Timed out waiting for fw boot completion",
            "csf/mali_kbase_csf_firmware.c wait_for_firmware_boot r27p0 to r54p1, g29p1"),
    Pattern("firmware-timeout", _RESET, "[%llu] Timeout (%d ms) waiting for global request %x to complete",
            "csf/mali_kbase_csf_firmware.c wait_for_global_request_with_timeout r35p0 to r54p1, g29p1"),
    Pattern("firmware-timeout", _RESET, "Wait for MCU wake up failed on GPU reset",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_worker r35p0 to r54p1, g29p1"),
    Pattern("progress-timeout", _QUEUE,
            "Notify the event notification thread, forward progress timeout (%llu cycles)",
            "csf/mali_kbase_csf.c report_group_timeout_error r32p1 to r54p1, g29p1"),
    Pattern("progress-timeout", _QUEUE,
            "[%llu] Iterator PROGRESS_TIMER timeout notification received for group %u of ctx %d_%d on slot "
            "%u",
            "csf/mali_kbase_csf.c handle_progress_timer_events r35p0 to r54p1, g29p1",
            "- group tgid context"),
    Pattern("progress-timeout", _QUEUE, "%s: PROGRESS_TIMER timeout notified, CSG_%d_%d_%d, slot %u",
            "csf/mali_kbase_csf_scheduler.c cleanup_csg_slot r54p1", "- tgid context group"),
    Pattern("termination-timeout", _QUEUE,
            "[%llu] term request timeout (%d ms) for group %d of context %d_%d on slot %d",
            "csf/mali_kbase_csf_scheduler.c term_group_sync r35p0 to r54p1, g29p1", "- - group tgid context"),
    Pattern("termination-timeout", _QUEUE,
            "[%llu] Wait for MCU active failed when terminating group %d of context %d_%d on slot %d",
            "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_deschedule r38p1 to r54p1, g29p1",
            "- group tgid context"),
    Pattern("termination-timeout", _QUEUE,
            "[%llu] Wait for MCU active failed when when terminating group %d of context %d_%d on slot %d",
            "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_deschedule r35p0",
            "- group tgid context"),
    Pattern("termination-timeout", _QUEUE,
            "[%llu] Wait for MCU active failed for stopping queue on csi %d bound to group %d of context "
            "%d_%d on slot %d",
            "csf/mali_kbase_csf_scheduler.c scheduler_activate_on_queue_stop r35p0 to r54p1, g29p1",
            "- - group tgid context"),
    Pattern("suspension-timeout", _QUEUE, "[%llu] Group %d of context %d_%d on slot %u failed to suspend",
            "csf/mali_kbase_csf_scheduler.c program_suspending_csg_slots r35p0 to r54p1, g29p1",
            "- group tgid context"),
    Pattern("suspension-timeout", _QUEUE,
            "[%llu] LRU idle group %d of context %d_%d failed to suspend on slot %d",
            "csf/mali_kbase_csf_scheduler.c evict_lru_or_blocked_csg r40p0 to r54p1, g29p1",
            "- group tgid context"),
    Pattern("suspension-timeout", _QUEUE, "[%llu] Timeout waiting for the group %d to suspend on slot %d",
            "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_copy_suspend_buf r35p0 to r54p1, g29p1",
            "- group"),
    Pattern("suspension-timeout", _QUEUE,
            "[%llu] Suspend request sent on CSG slots 0x%lx timed out for slots 0x%lx",
            "csf/mali_kbase_csf_scheduler.c wait_csg_slots_suspend r40p0 to r54p1, g29p1"),
    Pattern("suspension-timeout", _QUEUE,
            "[%llu] Timeout waiting for CSG slots to suspend, slot_mask: 0x%*pb",
            "csf/mali_kbase_csf_scheduler.c wait_csg_slots_suspend r35p0 to r38p1"),
    Pattern("suspension-timeout", _RESET,
            "[%llu] Timeout (%d ms) waiting for CSG slots to suspend on power down",
            "csf/mali_kbase_csf_scheduler.c suspend_active_groups_on_powerdown r35p0 to r54p1, g29p1"),
    Pattern("suspension-timeout", _RESET, "Timeout waiting for CSG slots to suspend before reset",
            "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r35p0 to r54p1, g29p1"),
    Pattern("start-timeout", _RESET, "[%llu] Timeout (%d ms) waiting for CSG slots to start",
            "csf/mali_kbase_csf_scheduler.c wait_csg_slots_start r35p0 to r54p1, g29p1"),
    Pattern("start-timeout", _QUEUE, "[%llu] slot %d timeout (%d ms) on up-running",
            "csf/mali_kbase_csf_scheduler.c prepare_all_csg_suspension r35p0 to r54p1; "
            "csf/mali_kbase_csf_scheduler.c halt_csg_slot g29p1"),
    Pattern("group-timeout", _QUEUE, "[%llu] Timeout (%d ms) on CSG_REQ:STATUS_UPDATE",
            "csf/mali_kbase_csf_scheduler.c scheduler_update_idle_slots_status r35p0 to r54p1, g29p1"),
    Pattern("group-timeout", _RESET, "[%llu] Timeout (%d ms) on CSG_REQ:EP_CFG",
            "csf/mali_kbase_csf_scheduler.c wait_csg_slots_finish_prio_update r35p0 to r54p1, g29p1"),
    Pattern("stream-timeout", _QUEUE,
            "[%llu] Timeout (%d ms) waiting for queue to start on csi %d bound to group %d on slot %d",
            "csf/mali_kbase_csf_scheduler.c halt_stream_sync r35p0 to r54p1, g29p1", "- - - group"),
    Pattern("stream-timeout", _QUEUE,
            "[%llu] Timeout (%d ms) waiting for queue to stop on csi %d bound to group %d on slot %d",
            "csf/mali_kbase_csf_scheduler.c halt_stream_sync r35p0 to r54p1, g29p1", "- - - group"),
    Pattern("stream-timeout", _QUEUE,
            "[%llu] Timeout (%d ms) waiting for queue stop ack on csi %d bound to group %d on slot %d",
            "csf/mali_kbase_csf_scheduler.c sched_halt_stream r35p0 to r54p1, g29p1", "- - - group"),
    Pattern("stream-timeout", _QUEUE, "[%llu] Group-%d failed to get a slot for stopping the queue on csi %d",
            "csf/mali_kbase_csf_scheduler.c sched_halt_stream r35p0 to r54p1, g29p1", "- group"),
    Pattern("protected-mode-timeout", _RESET, "Possible GPU hang in Protected mode",
            "csf/mali_kbase_csf_scheduler.c scheduler_force_protm_exit r38p1 to r54p1, g29p1"),
    Pattern("protected-mode-timeout", _RESET,
            "Group-%d of context %d_%d ran in protected mode for too long on slot %d",
            "csf/mali_kbase_csf_scheduler.c scheduler_force_protm_exit r38p1 to r54p1, g29p1",
            "group tgid context"),
    Pattern("protected-mode-timeout", _RESET, "[%llu] Timeout (%d ms), protm_quit wait skipped",
            "csf/mali_kbase_csf_scheduler.c scheduler_protm_wait_quit r35p0 to r54p1, g29p1"),
    Pattern("protected-mode-timeout", _RESET, "Timeout for actual pmode entry after PROTM_ENTER ack",
            "csf/mali_kbase_csf_firmware.c kbase_csf_wait_protected_mode_enter r38p1 to r54p1, g29p1"),
    Pattern("mmu-stuck", _RESET, "AS_ACTIVE bit stuck for MCU AS. Might be caused by unstable GPU clk/pwr",
            "csf/mali_kbase_csf_firmware.c wait_ready r43p0 to r54p1, g29p1"),
    Pattern("mmu-stuck", _RESET, "AS_ACTIVE_INT bit stuck for AS %d used by MCU FW",
            "backend/gpu/mali_kbase_pm_driver.c wait_mcu_as_inactive r38p1 to r54p1, g29p1", "address_space"),
    Pattern("flush-stuck", _RESET, "[%llu] Timeout waiting for CACHE_CLN_INV_L2_LSC",
            "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r44p1 to r54p1, g29p1; "
            "csf/mali_kbase_csf.c flush_gpu_cache_on_fatal_error r44p1 to r54p1, g29p1"),
    Pattern("flush-stuck", _RESET,
            "[%llu] Timeout waiting for CACHE_CLN_INV_L2 to complete before Tiler heap reclaim",
            "csf/mali_kbase_csf_tiler_heap_reclaim.c kbase_csf_tiler_heap_reclaim_unused_pages r47p0 to "
            "r54p1; csf/mali_kbase_csf_tiler_heap_reclaim.c reclaim_unused_heap_pages g29p1"),
    Pattern("flush-stuck", _RESET, "[%llu] Timeout waiting for cache clean to complete",
            "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r35p0 to r43p0; "
            "csf/mali_kbase_csf.c flush_gpu_cache_on_fatal_error r40p0 to r43p0"),
    Pattern("reset", _RESET, "Preparing to soft-reset GPU",
            "csf/mali_kbase_csf_reset_gpu.c kbase_reset_gpu r27p0 to r54p1, g29p1"),
    Pattern("reset", _RESET, "Timed out waiting for the GPU reset to complete",
            "csf/mali_kbase_csf_reset_gpu.c kbase_reset_gpu_wait r27p0 to r54p1, g29p1", consequence=True),
    Pattern("soft-reset-failed", _RESET, "MCU re-init failed trying full firmware reload",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
    Pattern("reset-failed", _LOST, "Soft-reset failed",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
    Pattern("reset-failed", _LOST, "L2 power up failed after the soft-reset",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
    Pattern("reset-failed", _LOST, "MCU Re-init failed even after trying full firmware reload",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
    Pattern("reset-failed", _LOST, "Reset failed to complete",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_end_hw_access r27p0 to r54p1, g29p1"),
    Pattern("reset-failed", _LOST, "Unsuccessful GPU reset detected when",
            "mali_kbase_mem_linux.c kbase_csf_user_io_pages_vm_close r27p0 to r54p1, g29p1",
            consequence=True),
)

# Rows for both kinds of GPUs.
_BOTH_ROWS = (
    Pattern("page-fault", Severity.OUT_OF_MEMORY,
            "Unhandled Page fault in AS%u at VA 0x%016llX\nReason: Page allocation failure",
            "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_fault_and_kill Midgard r27p0, r27p0 to r54p1, "
            "g29p1", "address_space"),
    Pattern("page-fault", _CONTEXT, "Unhandled Page fault in AS%u at VA 0x%016llX",
            "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_fault_and_kill Midgard r27p0, r27p0 to r54p1, "
            "g29p1", "address_space"),
    Pattern("bus-fault", _CONTEXT, "GPU bus fault in AS%u at PA %pK",
            "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r38p1 to r51p0, g29p1; "
            "mmu/backend/mali_kbase_mmu_csf.c kbase_gpu_report_bus_fault_and_kill r38p1 to r54p1, g29p1",
            "address_space"),
    Pattern("bus-fault", _CONTEXT, "GPU bus fault in AS%d at VA 0x%016llX",
            "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0; "
            "mmu/backend/mali_kbase_mmu_csf.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0",
            "address_space"),
    Pattern("page-fault", _CONTEXT, "Page fault in AS%d at VA 0x%016llx with no context present!",
            "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_interrupt_process r47p0 to r54p1, g29p1; "
            "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0, g29p1",
            "address_space"),
    Pattern("bus-fault", _CONTEXT, "Bus error in AS%d at PA 0x%pK with no context present!",
            "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_interrupt_process r47p0 to r54p1, g29p1; "
            "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0, g29p1",
            "address_space"),
    Pattern("page-fault", _CONTEXT, "%s in AS%d at 0x%016llx with no context present!",
            "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process Midgard r27p0, r27p0 to r44p1",
            "- address_space"),
    Pattern("allocation", Severity.OUT_OF_MEMORY, "Page allocation failure of %zu pages: managed %zu pages",
            "mmu/mali_kbase_mmu.c page_fault_try_alloc r40p0 to r54p1, g29p1"),
    Pattern("allocation", Severity.OUT_OF_MEMORY, "Failed to allocate %lld pages",
            "mali_kbase_mem_linux.c kbase_mem_alloc Midgard r27p0, r27p0 to r54p1, g29p1"),
    Pattern("mmu-stuck", _RESET, "AS_ACTIVE bit stuck for as %u",
            "mmu/mali_kbase_mmu_hw_direct.c wait_ready r38p1 to r54p1, g29p1", "address_space"),
    Pattern("mmu-stuck", _RESET, "AS_ACTIVE bit stuck, might be caused by slow/unstable GPU clock",
            "csf/mali_kbase_csf_firmware.c wait_ready r27p0 to r42p0; "
            "mmu/mali_kbase_mmu_hw_direct.c wait_ready r27p0 to r35p0"),
    Pattern("mmu-stuck", _RESET, "AS_ACTIVE bit stuck",
            "backend/gpu/mali_kbase_mmu_hw_direct.c wait_ready Midgard r27p0"),
    Pattern("flush-stuck", _RESET, "Flush for GPU page table update did not complete",
            "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker Midgard r27p0, r27p0 to r54p1, g29p1"),
    Pattern("flush-stuck", _RESET, "Flush for GPU page fault due to write access did not complete",
            "mmu/mali_kbase_mmu.c kbase_gpu_mmu_handle_write_faulting_as r43p0 to r51p0, g29p1"),
    Pattern("flush-stuck", _RESET, "Flush for physical address range did not complete",
            "mmu/mali_kbase_mmu.c mmu_flush_pa_range r40p0 to r54p1, g29p1"),
    Pattern("flush-stuck", _RESET, "Invalidate after GPU page table update did not complete",
            "mmu/mali_kbase_mmu.c mmu_invalidate r38p1 to r54p1, g29p1"),
    Pattern("flush-stuck", _RESET, "Invalidation for MMU did not complete on handling page fault @ VA 0x%llx",
            "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker r47p0 to r54p1, g29p1"),
    Pattern("flush-stuck", _RESET, "Invalidation for MMU did not complete on handling page fault @ 0x%llx",
            "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker r38p1 to r44p1"),
    Pattern("flush-stuck", _RESET,
            "%s: failed to lock MMU region or flush GPU cache. Issuing GPU soft-reset to recover.",
            "mmu/mali_kbase_mmu.c kbase_mmu_migrate_page r41p0 to r42p0"),
    Pattern("flush-stuck", _RESET, "Cache clean timed out (2s). Triggering GPU reset to recover.",
            "device/mali_kbase_device_hw.c kbase_gpu_wait_cache_clean g29p1 of mali-dkms"),
    Pattern("flush-stuck", _RESET, "Cache clean timed out. Might be caused by unstable GPU clk/pwr",
            "device/mali_kbase_device_hw.c kbase_gpu_wait_cache_clean_timeout r44p1 to r54p1, g29p1"),
    Pattern("flush-stuck", _RESET, "Stuck waiting on %s bit, might be",
            "device/mali_kbase_device_hw.c busy_wait_cache_operation r38p1 to r54p1, g29p1"),
    Pattern("flush-stuck", _RESET, "CLEAN_CACHES_COMPLETED bit stuck",
            "device/mali_kbase_device_hw.c busy_wait_cache_clean_irq r35p0"),
    Pattern("power-stuck", _RESET, "L2_PWRTRANS %016llx set for too long",
            "mmu/mali_kbase_mmu_hw_direct.c wait_l2_power_trans_complete r47p0 to r54p1, g29p1"),
    Pattern("power-stuck", _RESET, "SHADER_PWRTRANS %016llx set for too long",
            "mmu/mali_kbase_mmu_hw_direct.c wait_cores_power_trans_complete r44p1 to r54p1, g29p1"),
    Pattern("power-stuck", _RESET, "SHADER_PWRTRANS set for too long",
            "mmu/mali_kbase_mmu_hw_direct.c wait_cores_power_trans_complete r38p1 to r43p0"),
    Pattern("power-stuck", _RESET, "Power transition timed out unexpectedly",
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_timed_out Midgard r27p0, r27p0 to r43p0"),
    Pattern("power-stuck", _RESET, "Wait for desired PM state with L2 powered timed out",
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_wait_for_l2_powered r44p1 to r54p1, g29p1"),
    Pattern("power-stuck", _RESET, "Wait for power transition timed out",
            "backend/gpu/mali_kbase_pm_driver.c pm_wait_for_desired_state r44p1 to r54p1, g29p1"),
    Pattern("power-stuck", _RESET, "Wait for cores down scaling timed out",
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_wait_for_cores_down_scale r44p1 to r54p1, g29p1"),
    Pattern("power-stuck", _RESET, "Wait for poweroff work timed out",
            "backend/gpu/mali_kbase_pm_driver.c pm_wait_for_poweroff_work_complete r44p1 to r54p1, g29p1"),
    Pattern("gpu-lost", _RESET, "GPU lost in state %s",
            "arbiter/mali_kbase_arbiter_pm.c kbase_gpu_lost r27p0 to r54p1, g29p1"),
    Pattern("gpu-lost", _RESET, "GPU lost while stopping",
            "arbiter/mali_kbase_arbiter_pm.c kbase_gpu_lost r54p1"),
    Pattern("reset", _RESET, "Resorting to GPU reset for policy change",
            "backend/gpu/mali_kbase_pm_policy.c kbase_pm_set_policy r32p1 to r54p1, g29p1"),
    Pattern("reset", _RESET, "Sending reset to GPU - all running jobs will be lost",
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_reset_complete Midgard r27p0, r27p0 to r54p1; "
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_timed_out g29p1"),
    Pattern("reset", _RESET, "Resetting GPU (allowing up to %d ms)",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_once r27p0 to r54p1, g29p1; "
            "backend/gpu/mali_kbase_jm_hw.c kbasep_reset_timeout_worker Midgard r27p0, r27p0 to r51p0, "
            "g29p1"),
    Pattern("soft-reset-failed", _RESET,
            "Failed to soft-reset GPU (timed out after %d ms), now attempting a hard reset",
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1, g29p1"),
    Pattern("reset", _RESET, "Reset complete",
            "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r27p0 to r54p1, g29p1; "
            "backend/gpu/mali_kbase_jm_hw.c kbasep_reset_timeout_worker Midgard r27p0, r27p0 to r51p0, "
            "g29p1"),
    Pattern("reset-failed", _LOST, "Reset interrupt didn't reach CPU.",
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1, g29p1"),
    Pattern("reset-failed", _LOST, "Failed to hard-reset the GPU (timed out after %d ms)",
            "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1, g29p1"),
    Pattern("reset-failed", _LOST, "PWR_STATUS value (%llx) doesn't allow GPU reset",
            "backend/gpu/mali_kbase_pm_driver.c pwr_status_gpu_reset_allowed r54p1"),
)
# fmt: on

_KBASE = RecordTable(driver=Driver.KBASE, words=("mali",), patterns=(*_JM_ROWS, *_CSF_ROWS, *_BOTH_ROWS))

# fmt: off
# panthor, the open driver of command-stream Mali GPUs. Newer kernels write the process
# (`CS_FATAL: pid=..., comm=...`) in a record of its own just before.
_PANTHOR_ROWS = (
    Pattern("cs-fatal", _QUEUE, "CSG slot %d CS slot: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
            "panthor_sched.c cs_slot_process_fatal_event_locked 6.12 to 7.3",
            "- - code name", by_code=_FATAL_CODES),
    Pattern("cs-fault", _QUEUE, "CSG slot %d CS slot: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
            "panthor_sched.c cs_slot_process_fault_event_locked 6.12 to 7.3", "- - code name"),
    Pattern("cs-fatal", _QUEUE, "CS_FATAL: pid=%d, comm=%s",
            "panthor_sched.c cs_slot_process_fatal_event_locked 6.18 to 7.3", "tgid comm", announces=True),
    Pattern("cs-fault", _QUEUE, "CS_FAULT: pid=%d, comm=%s",
            "panthor_sched.c cs_slot_process_fault_event_locked 6.18 to 7.3", "tgid comm", announces=True),
    Pattern("progress-timeout", _QUEUE, "CSG_PROGRESS_TIMER_EVENT: pid=%d, comm=%s",
            "panthor_sched.c csg_slot_process_progress_timer_event_locked 6.18 to 7.3",
            "tgid comm", announces=True),
    Pattern("progress-timeout", _QUEUE, "CSG slot %d progress timeout",
            "panthor_sched.c csg_slot_process_progress_timer_event_locked 6.12 to 7.3"),
    Pattern("job-timeout", _QUEUE, "job timeout: pid=%d, comm=%s, seqno=%llu",
            "panthor_sched.c queue_timedout_job 6.18 to 7.3", "tgid comm"),
    Pattern("job-timeout", _QUEUE, "job timeout", "panthor_sched.c queue_timedout_job 6.12"),
    Pattern("tiler-out-of-memory", _QUEUE, "Failed to extend the tiler heap",
            "panthor_sched.c group_process_tiler_oom 6.12 to 7.3"),
    Pattern("suspension-timeout", _QUEUE, "CSG suspend failed, escalating to termination",
            "panthor_sched.c panthor_sched_suspend 6.12 to 7.3"),
    Pattern("group-timeout", _RESET, "CSG %d update request timedout",
            "panthor_sched.c csgs_upd_ctx_apply_locked 6.12 to 7.3"),
    Pattern("page-fault", _CONTEXT, "Unhandled Page fault in AS%d at VA 0x%016llX",
            "panthor_mmu.c panthor_mmu_irq_handler 6.12 to 7.3", "address_space"),
    Pattern("gpu-fault", _CONTEXT, "GPU Fault 0x%08x (%s) at 0x%016llx",
            "panthor_gpu.c panthor_gpu_irq_handler 6.12 to 7.3", "status name"),
    Pattern("gpu-fault", _CONTEXT, "GPU Fault in protected mode",
            "panthor_gpu.c panthor_gpu_irq_handler 6.12 to 7.3"),
    Pattern("mmu-stuck", _RESET, "AS_ACTIVE bit stuck", "panthor_mmu.c wait_ready 6.12 to 7.3"),
    Pattern("flush-stuck", _RESET, "Flush caches timeout",
            "panthor_gpu.c panthor_gpu_flush_caches 6.12 to 7.3"),
    Pattern("power-stuck", _RESET, "timeout waiting on %s:%llx power transition",
            "panthor_gpu.c panthor_gpu_block_power_on 6.12 to 7.3"),
    Pattern("power-stuck", _RESET, "timeout waiting on %s:%llx readiness",
            "panthor_gpu.c panthor_gpu_block_power_on 6.12 to 7.3"),
    Pattern("power-stuck", _RESET, "timeout waiting on %s power domain transition",
            "panthor_pwr.c panthor_pwr_domain_transition 6.18 to 7.3"),
    Pattern("power-stuck", _RESET, "Retracting %s domain timeout",
            "panthor_pwr.c retract_domain 6.18 to 7.3"),
    Pattern("power-stuck", _RESET, "Delegating %s domain timeout",
            "panthor_pwr.c delegate_domain 6.18 to 7.3"),
    Pattern("power-stuck", _RESET, "%s domain power in transition, pwrtrans(0x%llx)",
            "panthor_pwr.c panthor_pwr_domain_wait_transition 7.2 to 7.3"),
    Pattern("power-stuck", _RESET, "%s domain retract pending", "panthor_pwr.c retract_domain 7.2 to 7.3"),
    Pattern("firmware-fault", _RESET, "Invalid state on CSG %d (state=%d)",
            "panthor_sched.c csg_slot_sync_state_locked 7.2 to 7.3"),
    Pattern("firmware-timeout", _RESET, "FW ping timeout, scheduling a reset",
            "panthor_fw.c panthor_fw_ping_work 6.12 to 7.3"),
    Pattern("firmware-timeout", _RESET, "Timed out waiting for MCU to halt",
            "panthor_fw.c panthor_fw_wait_mcu_halted 6.18 to 7.3"),
    Pattern("firmware-timeout", _RESET, "Failed to stop MCU", "panthor_fw.c panthor_fw_stop 6.12 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "Soft reset timeout",
            "panthor_gpu.c panthor_gpu_soft_reset 6.12 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "RESET timed out (0x%x)",
            "panthor_pwr.c panthor_pwr_reset 6.18 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "FW %s reset failed",
            "panthor_fw.c panthor_fw_post_reset 6.12 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "Fast reset failed, trying a slow reset",
            "panthor_device.c panthor_device_resume 6.12 to 7.3"),
    Pattern("reset-failed", _LOST, "Failed to boot MCU after reset, making device unusable.",
            "panthor_device.c panthor_device_reset_work 6.12 to 7.3"),
    Pattern("reset-failed", _LOST, "Failed to boot MCU (status=%s)",
            "panthor_fw.c panthor_fw_start 6.12 to 7.3"),
)

# Driver panfrost, the open one of job-manager Mali GPUs. None names a process.
_PANFROST_ROWS = (
    Pattern("job-fault", _QUEUE, "js fault, js=%d, status=%s, head=0x%x, tail=0x%x",
            "panfrost_job.c panfrost_job_handle_err 5.10 to 7.3", "- name"),
    Pattern("job-stopped", _QUEUE, "Soft-stop failed", "panfrost_job.c panfrost_reset 6.1 to 7.3"),
    Pattern("job-timeout", _RESET, "gpu sched timeout, js=%d, config=0x%x, status=0x%x",
            "panfrost_job.c panfrost_job_timedout 5.10 to 7.3"),
    Pattern("page-fault", _CONTEXT, "Unhandled Page fault in AS%d at VA 0x%016llX",
            "panfrost_mmu.c panfrost_mmu_irq_handler_thread 5.10 to 7.3", "address_space"),
    Pattern("gpu-fault", _CONTEXT, "GPU Fault 0x%08x (%s) at 0x%016llx",
            "panfrost_gpu.c panfrost_gpu_irq_handler 5.10 to 7.3", "status name"),
    Pattern("gpu-fault", _CONTEXT, "There were multiple GPU faults - some have not been reported",
            "panfrost_gpu.c panfrost_gpu_irq_handler 5.10 to 7.3", consequence=True),
    Pattern("mmu-stuck", _RESET, "AS_ACTIVE bit stuck", "panfrost_mmu.c wait_ready 5.10 to 7.3"),
    Pattern("power-stuck", _RESET, "error powering up gpu",
            "panfrost_gpu.c panfrost_gpu_power_on 5.10 to 7.3"),
    Pattern("power-stuck", _RESET, "shader power transition timeout",
            "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 7.3"),
    Pattern("power-stuck", _RESET, "tiler power transition timeout",
            "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 7.3"),
    Pattern("power-stuck", _RESET, "l2 power transition timeout",
            "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "gpu soft reset timed out, attempting hard reset",
            "panfrost_gpu.c panfrost_gpu_soft_reset 6.12 to 7.3"),
    Pattern("reset-failed", _LOST, "gpu soft reset timed out",
            "panfrost_gpu.c panfrost_gpu_soft_reset 5.10 to 6.1"),
    Pattern("reset-failed", _LOST, "gpu hard reset timed out",
            "panfrost_gpu.c panfrost_gpu_soft_reset 6.12 to 7.3"),
)

# Driver lima, the open one of Mali-400 and Mali-450. None names a process. The processor (`gp`, `pp0`, ...)
# is first; before Linux 6.12 it was written out in the message.
_LIMA_ROWS = (
    Pattern("job-error", _QUEUE, "%s error irq state=%x status=%x",
            "lima_pp.c lima_pp_handle_irq 5.10 to 7.3; lima_gp.c lima_gp_irq_handler 5.10 to 7.3"),
    Pattern("job-fault", _QUEUE, "%s task error int_state=%x status=%x",
            "lima_gp.c lima_gp_task_error 5.10 to 7.3"),
    Pattern("job-fault", _QUEUE, "%s task error %d int_state=%x status=%x",
            "lima_pp.c lima_pp_task_error 5.10 to 7.3"),
    Pattern("page-fault", _CONTEXT, "%s page fault at 0x%x from bus id %d of type %s",
            "lima_mmu.c lima_mmu_irq_handler 5.10 to 7.3"),
    Pattern("bus-fault", _CONTEXT, "%s irq bus error", "lima_mmu.c lima_mmu_irq_handler 6.12 to 7.3"),
    Pattern("job-timeout", _RESET, "%s job timeout", "lima_sched.c lima_sched_timedout_job 5.10 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "%s soft reset time out",
            "lima_gp.c lima_gp_soft_reset_async_wait 5.10 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "%s reset time out",
            "lima_pp.c lima_pp_soft_reset_async_wait_one 5.10 to 7.3"),
    Pattern("soft-reset-failed", _RESET, "%s bus stop timeout",
            "lima_pp.c lima_pp_hard_reset 6.12 to 7.3; lima_gp.c lima_gp_hard_reset 5.10 to 7.3"),
    Pattern("reset-failed", _LOST, "%s hard reset timeout",
            "lima_pp.c lima_pp_hard_reset 5.10 to 7.3; lima_gp.c lima_gp_hard_reset 5.10 to 7.3"),
    Pattern("mmu-stuck", _RESET, "%s command %x timeout", "lima_mmu.c lima_mmu_send_command 5.10 to 7.3"),
    Pattern("flush-stuck", _RESET, "%s wait command timeout",
            "lima_l2_cache.c lima_l2_cache_wait_idle 5.10 to 7.3"),
    Pattern("power-stuck", _RESET, "%s timeout wait pmu cmd", "lima_pmu.c lima_pmu_wait_cmd 6.12 to 7.3"),
    Pattern("power-stuck", _RESET, "timeout wait pmu cmd", "lima_pmu.c lima_pmu_wait_cmd 5.10 to 6.1"),
)

# Driver msm, the open one of Adreno GPUs. Hangs name the task but not its id.
_MSM_ROWS = (
    Pattern("hang", _QUEUE, "%s: hangcheck detected gpu lockup rb %d!",
            "msm_gpu.c hangcheck_handler 5.10 to 6.18"),
    Pattern("reset", _RESET, "%s: hangcheck recover!", "msm_gpu.c recover_worker 5.10 to 6.18"),
    Pattern("owner", _QUEUE, "%s: offending task: %s (%s)",
            "msm_gpu.c recover_worker 5.10 to 6.18", "- comm", consequence=True),
    Pattern("owner", _QUEUE, "%s: offending task: unknown",
            "msm_gpu.c recover_worker 6.12 to 6.18", consequence=True),
    Pattern("hang", _RESET, "gpu fault ring %d fence %x status %8.8X",
            "adreno/a6xx_gpu.c a6xx_fault_detect_irq 5.10 to 6.18; "
            "adreno/a5xx_gpu.c a5xx_fault_detect_irq 5.10 to 6.18"),
    Pattern("hang", _RESET, "%s: preemption timed out",
            "adreno/a6xx_preempt.c a6xx_preempt_timer 6.18; "
            "adreno/a5xx_preempt.c a5xx_preempt_timer 5.10 to 6.18"),
    Pattern("job-fault", _RESET, "!!!!!!!!!!!!!!!! preemption faulted !!!!!!!!!!!!!! irq",
            "adreno/a6xx_preempt.c a6xx_preempt_irq 6.18"),
    Pattern("hang", _QUEUE, "%s: timeout waiting for GPU to idle!",
            "adreno/a4xx_gpu.c a4xx_idle 5.10 to 6.18"),
    Pattern("hang", _QUEUE, "%s: %ps: timeout waiting for GPU to idle: status %8.8X",
            "adreno/a6xx_gpu.c a6xx_idle 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_idle 5.10 to 6.18"),
    Pattern("hang", _QUEUE, "%s: timeout waiting to drain ringbuffer %d",
            "adreno/adreno_gpu.c adreno_idle 5.10 to 6.18"),
    Pattern("hang", _QUEUE, "timeout waiting for space in ringbuffer %d",
            "adreno/adreno_gpu.c adreno_wait_ring 5.10 to 6.18"),
    Pattern("page-fault", _CONTEXT, "MMU_PAGE_FAULT: %08X", "adreno/a2xx_gpu.c a2xx_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP | opcode error | possible opcode=0x%8.8X",
            "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18; "
            "adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP illegal instruction error",
            "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP | protected mode error | %s | addr=0x%8.8X",
            "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18; "
            "adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP | HW fault | status=0x%8.8X",
            "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18; "
            "adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP | DMA error", "adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP | AHB error | addr=%X access=%s error=%d",
            "adreno/a5xx_gpu.c a5xx_cp_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP | AHB bus error", "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP AHB error interrupt",
            "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP ucode error interrupt",
            "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "CP VSD decoder parity error",
            "adreno/a6xx_gpu.c a6xx_cp_hw_err_irq 5.10 to 6.18"),
    Pattern("bus-fault", _QUEUE, "RBBM | AHB bus error | %s | addr=0x%X",
            "adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
    Pattern("bus-fault", _QUEUE, "RBBM | AHB transfer timeout",
            "adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
    Pattern("bus-fault", _QUEUE, "RBBM | ATB ASYNC overflow",
            "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
    Pattern("bus-fault", _QUEUE, "RBBM | ATB bus overflow",
            "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_rbbm_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "UCHE | Out of bounds access | addr=0x%llX",
            "adreno/a5xx_gpu.c a5xx_uche_err_irq 5.10 to 6.18"),
    Pattern("job-error", _QUEUE, "UCHE | Out of bounds access",
            "adreno/a6xx_gpu.c a6xx_irq 5.10 to 6.18; adreno/a5xx_gpu.c a5xx_uche_err_irq 5.10 to 6.18"),
    Pattern("firmware-timeout", _RESET, "GMU watchdog expired",
            "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
    Pattern("firmware-timeout", _RESET, "Timeout waiting for GMU OOB set %s: 0x%x",
            "adreno/a6xx_gmu.c a6xx_gmu_set_oob 5.10 to 6.18"),
    Pattern("firmware-timeout", _RESET, "Message %s id %d timed out waiting for response",
            "adreno/a6xx_hfi.c a6xx_hfi_wait_for_msg_interrupt 5.10 to 6.18"),
    Pattern("firmware-fault", _RESET, "GMU AHB bus error", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
    Pattern("firmware-fault", _RESET, "GMU fence error: 0x%x", "adreno/a6xx_gmu.c a6xx_gmu_irq 5.10 to 6.18"),
    Pattern("firmware-fault", _RESET, "GMU firmware fault", "adreno/a6xx_gmu.c a6xx_hfi_irq 5.10 to 6.18"),
    Pattern("firmware-timeout", _RESET, "GMU firmware initialization timed out",
            "adreno/a6xx_gmu.c a6xx_gmu_start 5.10 to 6.18"),
    Pattern("power-stuck", _RESET, "cx gdsc didn't collapse", "adreno/a6xx_gpu.c a6xx_recover 6.12 to 6.18"),
    Pattern("power-stuck", _RESET, "GPU RSC sequence stuck while waking up the GPU",
            "adreno/a6xx_gmu.c a6xx_rpmh_start 5.10 to 6.18"),
    Pattern("reset-failed", _LOST, "gpu hw init failed: %d",
            "adreno/adreno_gpu.c adreno_recover 5.10 to 6.18; "
            "adreno/adreno_device.c adreno_load_gpu 5.10 to 6.18"),
    Pattern("page-fault", _CONTEXT, "*** gpu fault: ttbr0=%.16llx iova=%.16lx dir=%s type=%s source=%s",
            "adreno/adreno_gpu.c adreno_fault_handler 6.12 to 6.18; "
            "adreno/a6xx_gpu.c a6xx_fault_handler 6.1"),
    Pattern("page-fault", _CONTEXT, "*** gpu fault: iova=%.16lx flags=%d",
            "adreno/adreno_gpu.c adreno_fault_handler 6.12 to 6.18; "
            "adreno/a6xx_gpu.c a6xx_fault_handler 6.1"),
    Pattern("page-fault", _CONTEXT, "*** gpu fault: iova=%08lx, flags=%d",
            "adreno/a5xx_gpu.c a5xx_fault_handler 5.10 to 6.1; adreno/a6xx_gpu.c a6xx_fault_handler 5.10"),
    Pattern("page-fault", _CONTEXT, "*** fault: iova=%16lx, flags=%d",
            "msm_iommu.c msm_gpu_fault_handler 5.10 to 6.18"),
)

# Rockchip's NPU: rknpu is its own driver (`drivers/rknpu`, in its own versions), rocket the open one
# (`drivers/accel/rocket`). None names a process. Page faults of rocket's are the IOMMU driver's.
_RKNPU_ROWS = (
    Pattern("job-timeout", _RESET, "job timeout, flags: %#x:", "rknpu_job.c rknpu_job_abort 0.9.8"),
    Pattern("job-timeout", _QUEUE, "failed to wait job, task counter: %d, flags: %#x, ret = %d",
            "rknpu_job.c rknpu_job_wait 0.9.8"),
    Pattern("job-error", _QUEUE, "job commit failed", "rknpu_job.c rknpu_job_wait 0.9.8"),
    Pattern("job-error", _QUEUE, "job abort, flags: %#x, ret: %d",
            "rknpu_job.c rknpu_job_abort 0.9.8", consequence=True),
    Pattern("job-error", _QUEUE, "invalid irq status: %#x, raw status: %#x, require mask: %#x",
            "rknpu_job.c rknpu_irq_handler 0.9.8"),
    Pattern("reset", _RESET, "soft reset", "rknpu_reset.c rknpu_soft_reset 0.9.8"),
    Pattern("reset-failed", _LOST, "failed to soft reset for rknpu: %d",
            "rknpu_reset.c rknpu_soft_reset 0.9.8"),
    Pattern("reset-failed", _LOST, "failed to assert rknpu reset: %d",
            "rknpu_reset.c rknpu_reset_assert 0.9.8"),
    Pattern("reset-failed", _LOST, "failed to deassert rknpu reset: %d",
            "rknpu_reset.c rknpu_reset_deassert 0.9.8"),
)
_ROCKET_ROWS = (
    Pattern("job-timeout", _RESET, "NPU job timed out", "rocket_job.c rocket_job_timedout 6.12 to 7.3"),
)
# fmt: on

_PANTHOR = RecordTable(
    driver=Driver.PANTHOR, words=("panthor",), functions=("panthor",), patterns=_PANTHOR_ROWS
)
_PANFROST = RecordTable(
    driver=Driver.PANFROST, words=("panfrost",), functions=("panfrost",), patterns=_PANFROST_ROWS
)
_LIMA = RecordTable(driver=Driver.LIMA, words=("lima",), functions=("lima",), patterns=_LIMA_ROWS)
_MSM = RecordTable(
    driver=Driver.MSM,
    words=("msm", "msm_dpu", "msm_mdp", "msm_mdss", "mdp4", "adreno"),
    functions=("msm", "adreno", "a2xx", "a3xx", "a4xx", "a5xx", "a6xx", "a8xx"),
    openings=("*** gpu fault: ", "*** fault: "),
    patterns=_MSM_ROWS,
)
_ROCKET = RecordTable(driver=Driver.ROCKET, words=("rocket",), patterns=_ROCKET_ROWS)
_RKNPU = RecordTable(
    driver=Driver.RKNPU, words=("RKNPU",), openings=("RKNPU: ",), inner="RKNPU: ", patterns=_RKNPU_ROWS
)

# PCs


def _words(kind: str, severity: Severity, words: str, source: str) -> Pattern:
    """Return the row for records of any driver that hold one of these words."""
    return Pattern(kind, severity, kind, source, expression=rf"[^\n]{{0,120}}?(?:{words})")


_RESETS: Final = (
    "drm_drv.c drm_dev_wedged_event 6.18; amd/amdgpu/amdgpu_device.c amdgpu_device_gpu_recover 5.10 to 6.18; "
    "i915/gt/intel_reset.c intel_gt_reset 5.10 to 6.18; xe/xe_gt.c gt_reset 6.12 to 6.18"
)
_PC_ROWS: Final = (
    _words(
        "gpu-lost",
        _LOST,
        r"wedged, needs recovery|declaring it wedged|declared device \S{1,40} as wedged|device lost|"
        r"[Rr]eset(?:\(\d{1,5}\))? failed|[Rr]ecovery [Ff]ailed|Failed to reset chip|GPU reset not supported",
        _RESETS,
    ),
    _words(
        "reset",
        _RESET,
        "GPU reset|Resetting |recovered through reset|reset (?:started|queued|done)",
        _RESETS,
    ),
    _words(
        "hang",
        _QUEUE,
        r"GPU HANG|due to GPU hang|Timedout job|ring \S{1,60} timeout|page fault",
        "amd/amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.18; "
        "i915/i915_gpu_error.c error_msg 5.10 to 6.18; "
        "xe/xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18",
    ),
)

# Logging, what was corrected, the display: no work is lost. Numbers: NVIDIA's "XID Errors".
_NOTICES: Final = "14|16|19|23|63|87|92|93|125|154|156|160|162|163|164|165|168|176"
_LOSSES: Final = "48|62|64|74|79|95|119|120|140|143|158"
_PCI: Final = r"(?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?"
_INSTANCE: Final = r"(?: GPU-I:\d{1,5}(?: GPU-CI:\d{1,5})?)?"  # Instance of a GPU that several users share
_PROCESS: Final = r"(?:, pid='?(?:(?P<tgid>\d{1,10})|[^,\n]{0,40}?)'?(?=,|$))?(?:, name=(?P<comm>[^,\n]*))?"


def _xids(severity: Severity, numbers: str, *, consequence: bool = False) -> Pattern:
    """Return the row for the Xids with these numbers."""
    return Pattern(
        "xid",
        severity,
        "NVRM: Xid (PCI:%04x:%02x:%02x): %d, pid=%s, name=%s, %s",
        "src/nvidia/src/kernel/gpu/rc/kernel_rc.c krcReportXid_IMPL 595.45.04",
        expression=rf"NVRM: Xid \(PCI:{_PCI}{_INSTANCE}\): (?P<xid>{numbers})\b{_PROCESS}",
        consequence=consequence,
    )


_AMDGPU = RecordTable(
    driver=Driver.AMDGPU, words=("amdgpu",), functions=("amdgpu",), openings=("amdgpu: ",), patterns=_PC_ROWS
)
_I915 = RecordTable(driver=Driver.I915, words=("i915",), functions=("i915", "intel"), patterns=_PC_ROWS)
_XE = RecordTable(driver=Driver.XE, words=("xe",), functions=("xe",), patterns=_PC_ROWS)
_NVIDIA = RecordTable(
    driver=Driver.NVIDIA,
    openings=("NVRM: Xid (PCI:", "NVRM: GPU "),
    patterns=(
        _xids(_LOST, _LOSSES),
        _xids(_QUEUE, "45", consequence=True),  # Channels that are removed after another fault
        _xids(_QUEUE, rf"(?!(?:{_NOTICES})\b)\d{{1,5}}"),
        Pattern(
            "gpu-lost",
            _LOST,
            "NVRM: GPU %04x:%02x:%02x.%x: GPU has fallen off the bus.",
            "src/nvidia/arch/nvalloc/unix/src/osinit.c osHandleGpuLost 595.45.04",
            expression=rf"NVRM: GPU {_PCI}: GPU has fallen off the bus",
        ),
    ),
)

# The kernel's out-of-memory killer, for the whole machine and for a control group's limit.
_OUT_OF_MEMORY = (
    Pattern(
        "killed",
        Severity.PROCESS_KILLED,
        "%s: Killed process %d (%s)",
        "mm/oom_kill.c __oom_kill_process 5.10 to 6.18",
        expression=(
            r"(?:Memory cgroup out of memory|Out of memory[^:\n]{0,60}): "
            r"Kill(?:ed)? process (?P<tgid>\d{1,10})(?: \((?P<comm>[^\n]*?)\))?"
        ),
    ),
)
TABLES: Final = (
    _KBASE, _PANTHOR, _PANFROST, _LIMA, _ROCKET, _RKNPU, _AMDGPU, _I915, _XE, _MSM, _NVIDIA,
    RecordTable(
        driver=Driver.KERNEL,
        openings=("Memory cgroup out of memory: ", "Out of memory: ", "Out of memory ("),
        patterns=_OUT_OF_MEMORY,
    ),
)  # fmt: skip
