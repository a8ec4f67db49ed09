"""Records of kbase, Arm's own driver of Mali GPUs.

Versions are Arm's releases, g29p1 that of Rockchip's kernels; files are below the driver's folder,
`mali_kbase`, `midgard` or `valhall`.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import (
    FIRMWARE_INTERNAL_ERROR,
    UNRECOVERABLE,
    Driver,
    RecordTable,
    Severity,
    SourceTree,
)

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST
_FATAL_CODES = {UNRECOVERABLE: _RESET, FIRMWARE_INTERNAL_ERROR: _RESET}

# fmt: off
# Only for job-manager GPUs (Midgard, Bifrost, early Valhall).
_jm = SourceTree(driver=Driver.KBASE_JM).rows
_JM_ROWS = (
    *_jm("job-error", _QUEUE)(
        ("error detected from slot %d, job status 0x%08x (%s)",
         "backend/gpu/mali_kbase_jm_rb.c kbase_gpu_complete_hw Midgard r27p0, r27p0 to r51p0, g29p1",
         "slot code name"),
    ),
    *_jm("job-fault", _QUEUE)(
        ("t6xx: GPU fault 0x%02lx from job slot %d",
         "mali_kbase_jd.c kbase_jd_done_worker Midgard r27p0, r27p0 to r51p0, g29p1", "code slot"),
    ),
    *_jm("job-stopped", _QUEUE, hang=True)(
        ("JS: Job Hard-Stopped (took more than %u ticks at %u ms/tick)",
         "backend/gpu/mali_kbase_js_backend.c timer_callback Midgard r27p0, r27p0 to r51p0, g29p1"),
    ),
    *_jm("job-timeout", _RESET, hang=True)(
        ("JS: Job has been on the GPU for too long",
         "backend/gpu/mali_kbase_js_backend.c timer_callback Midgard r27p0, r27p0 to r51p0, g29p1"),
    ),
    *_jm("job-timeout", _QUEUE, hang=True)(
        ("Timeout in waiting for job slot %u to become free for ctx %d_%u",
         "backend/gpu/mali_kbase_jm_hw.c kbasep_jm_wait_js_free r43p0 to r51p0, g29p1",
         "slot tgid context"),
    ),
    *_jm("termination-timeout", _QUEUE, hang=True)(
        ("Jobs failed to be killed (within %d ms) as part of context termination",
         "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs Midgard r27p0"),
    ),
    *_jm("termination-timeout", _RESET, hang=True)(
        ("Issuing GPU soft-reset because jobs failed to be killed (within %d ms)",
         "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs r32p1 to r51p0, g29p1"),
        ("Issueing GPU soft-reset because jobs failed to be killed (within %d ms)",
         "backend/gpu/mali_kbase_jm_hw.c kbase_jm_wait_for_zero_jobs Midgard r27p0, r27p0 to r28p0"),
    ),
    *_jm("reset", _RESET)(
        ("Issueing GPU soft-reset after hard stopping due to hardware issue",
         "backend/gpu/mali_kbase_jm_hw.c kbase_job_slot_hardstop Midgard r27p0"),
    ),
    *_jm("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) at PA 0x%pK",
         "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r47p0 to r51p0, g29p1",
         "status name address"),
        ("GPU Fault 0x%08x (%s) at 0x%016llx",
         "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r27p0 to r44p1; "
         "backend/gpu/mali_kbase_device_hw.c kbase_report_gpu_fault Midgard r27p0, r28p0",
         "status name address"),
    ),
    *_jm("gpu-fault", _CONTEXT, consequence=True)(
        ("There were multiple GPU faults - some have not been reported",
         "device/backend/mali_kbase_device_hw_jm.c kbase_report_gpu_fault r27p0 to r51p0, g29p1; "
         "backend/gpu/mali_kbase_device_hw.c kbase_report_gpu_fault Midgard r27p0, r28p0"),
    ),
    *_jm("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%u at VA 0x%016llX\nReason: %s\nraw fault status: 0x%X\nexception "
         "type 0x%X: %s\naccess type 0x%X: %s\npid: %d",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_report_fault_and_kill r50p0 to r51p0, g29p1",
         "address_space address - - code name - access tid"),
        ("Unhandled Page fault in AS%d at VA 0x%016llX\nReason: %s\nraw fault status: 0x%X\ndecoded "
         "fault status: %s\n",
         "mali_kbase_mmu.c kbase_mmu_report_fault_and_kill Midgard r27p0", "address_space address"),
    ),
    *_jm("bus-fault", _CONTEXT)(
        ("GPU bus fault in AS%u at PA %pK\nraw fault status: 0x%X\n",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r38p1 to r51p0, g29p1",
         "address_space address"),
        ("GPU bus fault in AS%d at VA 0x%016llX\nraw fault status: 0x%X\n",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0",
         "address_space address"),
        ("Bus error in AS%u at PA=0x%pK, IPA=0x%pK",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0, g29p1",
         "address_space address"),
    ),
    *_jm("bus-fault", _RESET)(
        ("GPU bus error occurred. For this GPU version we now soft-reset as part of bus error recovery",
         "mali_kbase_mmu.c kbase_mmu_interrupt_process Midgard r27p0"),
    ),
    *_jm("page-fault", _RESET)(
        ("Unhandled page fault. For this GPU version we now soft-reset the GPU as part of page fault "
         "recovery.",
         "mali_kbase_mmu.c kbase_mmu_report_fault_and_kill Midgard r27p0"),
    ),
    *_jm("reset", _RESET)(
        ("Preparing to soft-reset GPU: Waiting (up to %d ms) for all jobs",
         "backend/gpu/mali_kbase_jm_hw.c kbase_reset_gpu_locked r49p0 to r51p0, g29p1"),
        ("Preparing to soft-reset GPU: Waiting (upto %d ms) for all jobs",
         "backend/gpu/mali_kbase_jm_hw.c kbase_reset_gpu_locked Midgard r27p0, r27p0 to r48p0"),
    ),
)

# Rows only for command-stream GPUs (late Valhall, 5th generation).
_csf = SourceTree().rows
_CSF_ROWS = (
    *_csf("cs-fault", _QUEUE)(
        ("Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c kbase_csf_report_cs_fault_info r32p1 to r54p1; "
         "csf/mali_kbase_csf.c handle_fault_event g29p1",
         "tgid context group slot stream code name"),
    ),
    *_csf("cs-fatal", _QUEUE, by_code=_FATAL_CODES)(
        ("Ctx %d_%d Group %d CSG %d CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c kbase_csf_report_cs_fatal_info r32p1 to r54p1; "
         "csf/mali_kbase_csf.c handle_fatal_event g29p1",
         "tgid context group slot stream code name"),
    ),
    *_csf("cs-fault", _QUEUE)(
        ("CSI: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c handle_fault_event r27p0", "stream code name"),
    ),
    *_csf("cs-fatal", _QUEUE, by_code=_FATAL_CODES)(
        ("CSG: %d, CSI: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
         "csf/mali_kbase_csf.c handle_fatal_event r27p0", "group stream code name"),
    ),
    *_csf("group-error", _QUEUE)(
        ("Fatal: group_%d_%d_%d exceeded shared region map retry limit",
         "csf/mali_kbase_csf_mcu_shared_reg.c notify_group_csg_reg_map_error r42p0 to r54p1, g29p1",
         "tgid context group"),
    ),
    *_csf("tiler-out-of-memory", _QUEUE)(
        ("Queue group to be terminated, couldn't handle the OoM event",
         "csf/mali_kbase_csf.c kbase_queue_oom_event r27p0 to r54p1, g29p1"),
    ),
    *_csf("tiler-out-of-memory", _QUEUE, consequence=True)(
        ("Unable to prevent GPU reset, couldn't handle the OoM event",
         "csf/mali_kbase_csf.c oom_event_worker r47p0 to r54p1, g29p1"),
    ),
    *_csf("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) in AS%u at PA 0x%pK",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_gpu_fault_worker r47p0 to r54p1, g29p1",
         "status name address_space address"),
        ("GPU Fault 0x%08x (%s) in AS%u at 0x%016llx",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_gpu_fault_worker r27p0 to r44p1",
         "status name address_space address"),
        ("GPU fault in protected mode",
         "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_interrupt r27p0 to r54p1, g29p1"),
    ),
    *_csf("bus-fault", _CONTEXT)(
        ("fail to handle GPU bus fault ...",
         "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_fault_interrupt r35p0 to r54p1, g29p1"),
    ),
    *_csf("bus-fault", _RESET)(
        ("GPU bus fault triggering gpu-reset ...",
         "device/backend/mali_kbase_device_hw_csf.c kbase_gpu_fault_interrupt r27p0 to r54p1, g29p1"),
    ),
    *_csf("firmware-page-fault", _RESET)(
        ("Unexpected Page fault in firmware address space at VA 0x%016llX",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_mcu_as_fault_and_reset r27p0 to r54p1, g29p1",
         "address"),
    ),
    *_csf("firmware-fault", _RESET)(
        ("MCU encountered unrecoverable error",
         "csf/mali_kbase_csf.c handle_glb_fatal_event r48p0 to r54p1, g29p1"),
        ("GLB_FATAL_STATUS: %s",
         "csf/mali_kbase_csf.c handle_glb_fatal_event r48p0 to r54p1, g29p1", "name"),
        ("Version check failed in firmware reboot.",
         "csf/mali_kbase_csf_firmware.c kbase_csf_firmware_reload_completed r27p0 to r54p1, g29p1"),
    ),
    *_csf("firmware-timeout", _RESET, hang=True)(
        ("Timed out waiting for fw boot completion",
         "csf/mali_kbase_csf_firmware.c wait_for_firmware_boot r27p0 to r54p1, g29p1"),
        ("[%llu] Timeout (%d ms) waiting for global request %x to complete",
         "csf/mali_kbase_csf_firmware.c wait_for_global_request_with_timeout r35p0 to r54p1, g29p1"),
        ("Wait for MCU wake up failed on GPU reset",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_worker r35p0 to r54p1, g29p1"),
    ),
    *_csf("progress-timeout", _QUEUE, hang=True)(
        ("Notify the event notification thread, forward progress timeout (%llu cycles)",
         "csf/mali_kbase_csf.c report_group_timeout_error r32p1 to r54p1, g29p1"),
        ("[%llu] Iterator PROGRESS_TIMER timeout notification received for group %u of ctx %d_%d on slot %u",
         "csf/mali_kbase_csf.c handle_progress_timer_events r35p0 to r54p1, g29p1",
         "- group tgid context slot"),
        ("%s: PROGRESS_TIMER timeout notified, CSG_%d_%d_%d, slot %u",
         "csf/mali_kbase_csf_scheduler.c cleanup_csg_slot r54p1", "- tgid context group slot"),
    ),
    *_csf("termination-timeout", _QUEUE, hang=True)(
        ("[%llu] term request timeout (%d ms) for group %d of context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c term_group_sync r35p0 to r54p1, g29p1",
         "- - group tgid context slot"),
        ("[%llu] Wait for MCU active failed when terminating group %d of context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_deschedule r38p1 to r54p1, g29p1",
         "- group tgid context slot"),
        ("[%llu] Wait for MCU active failed when when terminating group %d of context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_deschedule r35p0",
         "- group tgid context slot"),
        ("[%llu] Wait for MCU active failed for stopping queue on csi %d bound to group %d of "
         "context %d_%d on slot %d",
         "csf/mali_kbase_csf_scheduler.c scheduler_activate_on_queue_stop r35p0 to r54p1, g29p1",
         "- stream group tgid context slot"),
    ),
    *_csf("suspension-timeout", _QUEUE, hang=True)(
        ("[%llu] Group %d of context %d_%d on slot %u failed to suspend",
         "csf/mali_kbase_csf_scheduler.c program_suspending_csg_slots r35p0 to r54p1, g29p1",
         "- group tgid context slot"),
        ("[%llu] LRU idle group %d of context %d_%d failed to suspend on slot %d",
         "csf/mali_kbase_csf_scheduler.c evict_lru_or_blocked_csg r40p0 to r54p1, g29p1",
         "- group tgid context slot"),
        ("[%llu] Timeout waiting for the group %d to suspend on slot %d",
         "csf/mali_kbase_csf_scheduler.c kbase_csf_scheduler_group_copy_suspend_buf r35p0 to r54p1, g29p1",
         "- group slot"),
        ("[%llu] Suspend request sent on CSG slots 0x%lx timed out for slots 0x%lx",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_suspend r40p0 to r54p1, g29p1"),
        ("[%llu] Timeout waiting for CSG slots to suspend, slot_mask: 0x%*pb",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_suspend r35p0 to r38p1"),
    ),
    *_csf("suspension-timeout", _RESET, hang=True)(
        ("[%llu] Timeout (%d ms) waiting for CSG slots to suspend on power down",
         "csf/mali_kbase_csf_scheduler.c suspend_active_groups_on_powerdown r35p0 to r54p1, g29p1"),
        ("Timeout waiting for CSG slots to suspend before reset",
         "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r35p0 to r54p1, g29p1"),
    ),
    *_csf("start-timeout", _RESET, hang=True)(
        ("[%llu] Timeout (%d ms) waiting for CSG slots to start",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_start r35p0 to r54p1, g29p1"),
    ),
    *_csf("start-timeout", _QUEUE, hang=True)(
        ("[%llu] slot %d timeout (%d ms) on up-running",
         "csf/mali_kbase_csf_scheduler.c prepare_all_csg_suspension r35p0 to r54p1; "
         "csf/mali_kbase_csf_scheduler.c halt_csg_slot g29p1", "- slot"),
    ),
    *_csf("group-timeout", _QUEUE, hang=True)(
        ("[%llu] Timeout (%d ms) on CSG_REQ:STATUS_UPDATE",
         "csf/mali_kbase_csf_scheduler.c scheduler_update_idle_slots_status r35p0 to r54p1, g29p1"),
    ),
    *_csf("group-timeout", _RESET, hang=True)(
        ("[%llu] Timeout (%d ms) on CSG_REQ:EP_CFG",
         "csf/mali_kbase_csf_scheduler.c wait_csg_slots_finish_prio_update r35p0 to r54p1, g29p1"),
    ),
    *_csf("stream-timeout", _QUEUE, hang=True)(
        ("[%llu] Timeout (%d ms) waiting for queue to start on csi %d bound to group %d on slot %d",
         "csf/mali_kbase_csf_scheduler.c halt_stream_sync r35p0 to r54p1, g29p1", "- - stream group slot"),
        ("[%llu] Timeout (%d ms) waiting for queue to stop on csi %d bound to group %d on slot %d",
         "csf/mali_kbase_csf_scheduler.c halt_stream_sync r35p0 to r54p1, g29p1", "- - stream group slot"),
        ("[%llu] Timeout (%d ms) waiting for queue stop ack on csi %d bound to group %d on slot %d",
         "csf/mali_kbase_csf_scheduler.c sched_halt_stream r35p0 to r54p1, g29p1", "- - stream group slot"),
        ("[%llu] Group-%d failed to get a slot for stopping the queue on csi %d",
         "csf/mali_kbase_csf_scheduler.c sched_halt_stream r35p0 to r54p1, g29p1", "- group stream"),
    ),
    *_csf("protected-mode-timeout", _RESET, hang=True)(
        ("Possible GPU hang in Protected mode",
         "csf/mali_kbase_csf_scheduler.c scheduler_force_protm_exit r38p1 to r54p1, g29p1"),
        ("Group-%d of context %d_%d ran in protected mode for too long on slot %d",
         "csf/mali_kbase_csf_scheduler.c scheduler_force_protm_exit r38p1 to r54p1, g29p1",
         "group tgid context slot"),
        ("[%llu] Timeout (%d ms), protm_quit wait skipped",
         "csf/mali_kbase_csf_scheduler.c scheduler_protm_wait_quit r35p0 to r54p1, g29p1"),
        ("Timeout for actual pmode entry after PROTM_ENTER ack",
         "csf/mali_kbase_csf_firmware.c kbase_csf_wait_protected_mode_enter r38p1 to r54p1, g29p1"),
    ),
    *_csf("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck for MCU AS. Might be caused by unstable GPU clk/pwr",
         "csf/mali_kbase_csf_firmware.c wait_ready r43p0 to r54p1, g29p1"),
        ("AS_ACTIVE_INT bit stuck for AS %d used by MCU FW",
         "backend/gpu/mali_kbase_pm_driver.c wait_mcu_as_inactive r38p1 to r54p1, g29p1", "address_space"),
    ),
    *_csf("flush-stuck", _RESET)(
        ("[%llu] Timeout waiting for CACHE_CLN_INV_L2_LSC",
         "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r44p1 to r54p1, g29p1; "
         "csf/mali_kbase_csf.c flush_gpu_cache_on_fatal_error r44p1 to r54p1, g29p1"),
        ("[%llu] Timeout waiting for CACHE_CLN_INV_L2 to complete before Tiler heap reclaim",
         "csf/mali_kbase_csf_tiler_heap_reclaim.c kbase_csf_tiler_heap_reclaim_unused_pages r47p0 to r54p1; "
         "csf/mali_kbase_csf_tiler_heap_reclaim.c reclaim_unused_heap_pages g29p1"),
        ("[%llu] Timeout waiting for cache clean to complete",
         "csf/mali_kbase_csf_scheduler.c suspend_active_queue_groups_on_reset r35p0 to r43p0; "
         "csf/mali_kbase_csf.c flush_gpu_cache_on_fatal_error r40p0 to r43p0"),
    ),
    *_csf("reset", _RESET)(
        ("Preparing to soft-reset GPU",
         "csf/mali_kbase_csf_reset_gpu.c kbase_reset_gpu r27p0 to r54p1, g29p1"),
    ),
    *_csf("reset", _RESET, consequence=True)(
        ("Timed out waiting for the GPU reset to complete",
         "csf/mali_kbase_csf_reset_gpu.c kbase_reset_gpu_wait r27p0 to r54p1, g29p1"),
    ),
    *_csf("soft-reset-failed", _RESET)(
        ("MCU re-init failed trying full firmware reload",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
    ),
    *_csf("reset-failed", _LOST)(
        ("Soft-reset failed",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
        ("L2 power up failed after the soft-reset",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
        ("MCU Re-init failed even after trying full firmware reload",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r38p1 to r54p1, g29p1"),
        ("Reset failed to complete",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_end_hw_access r27p0 to r54p1, g29p1"),
    ),
    *_csf("reset-failed", _LOST, consequence=True)(
        ("Unsuccessful GPU reset detected when",
         "mali_kbase_mem_linux.c kbase_csf_user_io_pages_vm_close r27p0 to r54p1, g29p1"),
    ),
)

# Rows for both kinds of GPUs.
_both = SourceTree().rows
_BOTH_ROWS = (
    *_both("page-fault", Severity.OUT_OF_MEMORY)(
        ("Unhandled Page fault in AS%u at VA 0x%016llX\nReason: Page allocation failure",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_fault_and_kill Midgard r27p0, r27p0 to r54p1, "
         "g29p1", "address_space address"),
    ),
    *_both("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%u at VA 0x%016llX",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_report_fault_and_kill Midgard r27p0, r27p0 to r54p1, "
         "g29p1", "address_space address"),
    ),
    *_both("bus-fault", _CONTEXT)(
        ("GPU bus fault in AS%u at PA %pK",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r38p1 to r51p0, g29p1; "
         "mmu/backend/mali_kbase_mmu_csf.c kbase_gpu_report_bus_fault_and_kill r38p1 to r54p1, g29p1",
         "address_space address"),
        ("GPU bus fault in AS%d at VA 0x%016llX",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0; "
         "mmu/backend/mali_kbase_mmu_csf.c kbase_gpu_report_bus_fault_and_kill r27p0 to r35p0",
         "address_space address"),
    ),
    *_both("page-fault", _CONTEXT)(
        ("Page fault in AS%d at VA 0x%016llx with no context present!",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_interrupt_process r47p0 to r54p1, g29p1; "
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0, g29p1",
         "address_space address"),
    ),
    *_both("bus-fault", _CONTEXT)(
        ("Bus error in AS%d at PA 0x%pK with no context present!",
         "mmu/backend/mali_kbase_mmu_csf.c kbase_mmu_interrupt_process r47p0 to r54p1, g29p1; "
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process r47p0 to r51p0, g29p1",
         "address_space address"),
    ),
    *_both("page-fault", _CONTEXT)(
        ("%s in AS%d at 0x%016llx with no context present!",
         "mmu/backend/mali_kbase_mmu_jm.c kbase_mmu_interrupt_process Midgard r27p0, r27p0 to r44p1",
         "- address_space address"),
    ),
    *_both("allocation", Severity.OUT_OF_MEMORY)(
        ("Page allocation failure of %zu pages: managed %zu pages",
         "mmu/mali_kbase_mmu.c page_fault_try_alloc r40p0 to r54p1, g29p1"),
        ("Failed to allocate %lld pages",
         "mali_kbase_mem_linux.c kbase_mem_alloc Midgard r27p0, r27p0 to r54p1, g29p1"),
    ),
    *_both("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck for as %u",
         "mmu/mali_kbase_mmu_hw_direct.c wait_ready r38p1 to r54p1, g29p1", "address_space"),
        ("AS_ACTIVE bit stuck, might be caused by slow/unstable GPU clock",
         "csf/mali_kbase_csf_firmware.c wait_ready r27p0 to r42p0; mmu/mali_kbase_mmu_hw_direct.c "
         "wait_ready r27p0 to r35p0"),
        ("AS_ACTIVE bit stuck", "backend/gpu/mali_kbase_mmu_hw_direct.c wait_ready Midgard r27p0"),
    ),
    *_both("flush-stuck", _RESET)(
        ("Flush for GPU page table update did not complete",
         "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker Midgard r27p0, r27p0 to r54p1, g29p1"),
        ("Flush for GPU page fault due to write access did not complete",
         "mmu/mali_kbase_mmu.c kbase_gpu_mmu_handle_write_faulting_as r43p0 to r51p0, g29p1"),
        ("Flush for physical address range did not complete",
         "mmu/mali_kbase_mmu.c mmu_flush_pa_range r40p0 to r54p1, g29p1"),
        ("Invalidate after GPU page table update did not complete",
         "mmu/mali_kbase_mmu.c mmu_invalidate r38p1 to r54p1, g29p1"),
        ("Invalidation for MMU did not complete on handling page fault @ VA 0x%llx",
         "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker r47p0 to r54p1, g29p1", "address"),
        ("Invalidation for MMU did not complete on handling page fault @ 0x%llx",
         "mmu/mali_kbase_mmu.c kbase_mmu_page_fault_worker r38p1 to r44p1", "address"),
        ("%s: failed to lock MMU region or flush GPU cache. Issuing GPU soft-reset to recover.",
         "mmu/mali_kbase_mmu.c kbase_mmu_migrate_page r41p0 to r42p0"),
        ("Cache clean timed out (2s). Triggering GPU reset to recover.",
         "device/mali_kbase_device_hw.c kbase_gpu_wait_cache_clean g29p1 of mali-dkms"),
        ("Cache clean timed out. Might be caused by unstable GPU clk/pwr",
         "device/mali_kbase_device_hw.c kbase_gpu_wait_cache_clean_timeout r44p1 to r54p1, g29p1"),
        ("Stuck waiting on %s bit, might be",
         "device/mali_kbase_device_hw.c busy_wait_cache_operation r38p1 to r54p1, g29p1"),
        ("CLEAN_CACHES_COMPLETED bit stuck", "device/mali_kbase_device_hw.c busy_wait_cache_clean_irq r35p0"),
    ),
    *_both("power-stuck", _RESET)(
        ("L2_PWRTRANS %016llx set for too long",
         "mmu/mali_kbase_mmu_hw_direct.c wait_l2_power_trans_complete r47p0 to r54p1, g29p1"),
        ("SHADER_PWRTRANS %016llx set for too long",
         "mmu/mali_kbase_mmu_hw_direct.c wait_cores_power_trans_complete r44p1 to r54p1, g29p1"),
        ("SHADER_PWRTRANS set for too long",
         "mmu/mali_kbase_mmu_hw_direct.c wait_cores_power_trans_complete r38p1 to r43p0"),
        ("Power transition timed out unexpectedly",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_timed_out Midgard r27p0, r27p0 to r43p0"),
        ("Wait for desired PM state with L2 powered timed out",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_wait_for_l2_powered r44p1 to r54p1, g29p1"),
        ("Wait for power transition timed out",
         "backend/gpu/mali_kbase_pm_driver.c pm_wait_for_desired_state r44p1 to r54p1, g29p1"),
        ("Wait for cores down scaling timed out",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_wait_for_cores_down_scale r44p1 to r54p1, g29p1"),
        ("Wait for poweroff work timed out",
         "backend/gpu/mali_kbase_pm_driver.c pm_wait_for_poweroff_work_complete r44p1 to r54p1, g29p1"),
    ),
    *_both("gpu-lost", _RESET)(
        ("GPU lost in state %s", "arbiter/mali_kbase_arbiter_pm.c kbase_gpu_lost r27p0 to r54p1, g29p1"),
        ("GPU lost while stopping", "arbiter/mali_kbase_arbiter_pm.c kbase_gpu_lost r54p1"),
    ),
    *_both("reset", _RESET)(
        ("Resorting to GPU reset for policy change",
         "backend/gpu/mali_kbase_pm_policy.c kbase_pm_set_policy r32p1 to r54p1, g29p1"),
        ("Sending reset to GPU - all running jobs will be lost",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_reset_complete Midgard r27p0, r27p0 to r54p1; "
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_timed_out g29p1"),
        ("Resetting GPU (allowing up to %d ms)",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_once r27p0 to r54p1, g29p1; "
         "backend/gpu/mali_kbase_jm_hw.c kbasep_reset_timeout_worker Midgard r27p0, r27p0 to r51p0, g29p1"),
    ),
    *_both("soft-reset-failed", _RESET)(
        ("Failed to soft-reset GPU (timed out after %d ms), now attempting a hard reset",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1, g29p1"),
    ),
    *_both("reset", _RESET)(
        ("Reset complete",
         "csf/mali_kbase_csf_reset_gpu.c kbase_csf_reset_gpu_now r27p0 to r54p1, g29p1; "
         "backend/gpu/mali_kbase_jm_hw.c kbasep_reset_timeout_worker Midgard r27p0, r27p0 to r51p0, g29p1"),
    ),
    *_both("reset-failed", _LOST)(
        ("Reset interrupt didn't reach CPU.",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1, g29p1"),
        ("Failed to hard-reset the GPU (timed out after %d ms)",
         "backend/gpu/mali_kbase_pm_driver.c kbase_pm_do_reset Midgard r27p0, r27p0 to r54p1, g29p1"),
        ("PWR_STATUS value (%llx) doesn't allow GPU reset",
         "backend/gpu/mali_kbase_pm_driver.c pwr_status_gpu_reset_allowed r54p1"),
    ),
)
# fmt: on

KBASE: Final = RecordTable(
    driver=Driver.KBASE, words=("mali",), patterns=(*_JM_ROWS, *_CSF_ROWS, *_BOTH_ROWS)
)
