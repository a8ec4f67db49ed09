"""Records of the open drivers of PCs' GPUs: AMD's and Intel's, and what the DRM core writes for them."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Driver, RecordTable, Severity, SourceTree

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

# fmt: off
# The DRM core, for any driver whose GPU has hung.
_drm = SourceTree("drivers/gpu/drm/", "Linux ").rows
_DRM_ROWS = (
    *_drm("reset", _RESET)(
        ("device wedged, but recovered through reset", "drm_drv.c drm_dev_wedged_event 6.18"),
    ),
    *_drm("gpu-lost", _LOST)(
        ("device wedged, needs recovery", "drm_drv.c drm_dev_wedged_event 6.18"),
    ),
)

# amdgpu, with its part for compute (amdkfd). The process and the address of a fault are in records of
# their own after it. Which way the GPU is reset (`MODE1 reset` and the like) is written at boot and suspend
# too and is in no row here.
_amdgpu = SourceTree("drivers/gpu/drm/amd/", "Linux ").rows
_AMDGPU_ROWS = (
    *_amdgpu("page-fault", _CONTEXT)(
        ("[%s] page fault (src_id:%u ring:%u vmid:%u pasid:%u)",
         "amdgpu/gmc_v12_0.c gmc_v12_0_process_interrupt 6.12 to 6.18"),
        ("[%s] page fault (src_id:%u ring:%u vmid:%u pasid:%u, for process %s pid %d thread %s pid %d)",
         "amdgpu/gmc_v11_0.c gmc_v11_0_process_interrupt 6.1; amdgpu/gmc_v10_0.c "
         "gmc_v10_0_process_interrupt 5.10 to 6.1",
         "- - - - - comm tgid - tid"),
        ("[%s] %s page fault (src_id:%u ring:%u vmid:%u pasid:%u)",
         "amdgpu/gmc_v9_0.c gmc_v9_0_process_interrupt 6.12 to 6.18"),
        ("[%s] %s page fault (src_id:%u ring:%u vmid:%u pasid:%u, for process %s pid %d thread %s pid %d)",
         "amdgpu/gmc_v9_0.c gmc_v9_0_process_interrupt 5.10 to 6.1", "- - - - - - comm tgid - tid"),
        ("GPU fault detected: %d 0x%08x for process %s pid %d thread %s pid %d",
         "amdgpu/gmc_v8_0.c gmc_v8_0_process_interrupt 5.10 to 6.1", "- - comm tgid - tid"),
        ("GPU fault detected: %d 0x%08x", "amdgpu/gmc_v8_0.c gmc_v8_0_process_interrupt 5.10 to 6.18"),
    ),
    *_amdgpu("page-fault", _CONTEXT, consequence=True)(
        ("VM fault (0x%02x, vmid %d, pasid %d) at page %u, %s from",
         "amdgpu/gmc_v8_0.c gmc_v8_0_vm_decode_fault 5.10 to 6.18; amdgpu/gmc_v7_0.c "
         "gmc_v7_0_vm_decode_fault 5.10 to 6.18",
         "- - - - access"),
        ("VM fault (0x%02x, vmid %d) at page %u, %s from",
         "amdgpu/gmc_v6_0.c gmc_v6_0_vm_decode_fault 5.10 to 6.18", "- - - access"),
        ("  in page starting at address 0x%016llx from",
         "amdgpu/gmc_v9_0.c gmc_v9_0_process_interrupt 5.10 to 6.18", "address"),
        ("Can't handle page fault (%d)", "amdgpu/amdgpu_vm.c amdgpu_vm_handle_fault 5.10 to 6.18"),
    ),
    *_amdgpu("owner", _QUEUE, consequence=True)(
        (" Process %s pid %d thread %s pid %d",
         "amdgpu/amdgpu_vm.c amdgpu_vm_print_task_info 6.18", "comm tgid - tid"),
        ("Process information: process %s pid %d thread %s pid %d",
         "amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.12", "comm tgid - tid"),
    ),
    *_amdgpu("job-error", _QUEUE)(
        ("Illegal register access in command stream",
         "amdgpu/gfx_v9_4_3.c gfx_v9_4_3_priv_reg_irq 5.10 to 6.18"),
        ("Illegal opcode in command stream", "amdgpu/gfx_v9_4_3.c gfx_v9_4_3_bad_op_irq 6.12 to 6.18"),
        ("Illegal instruction in command stream",
         "amdgpu/gfx_v9_4_3.c gfx_v9_4_3_priv_inst_irq 5.10 to 6.18"),
        ("Illegal instruction in SDMA command stream",
         "amdgpu/sdma_v4_4_2.c sdma_v4_4_2_process_illegal_inst_irq 5.10 to 6.18"),
    ),
    *_amdgpu("job-timeout", _QUEUE, hang=True)(
        ("ring %s timeout, signaled seq=%u, emitted seq=%u",
         "amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.18"),
        ("ring %s timeout, but soft recovered", "amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.18"),
    ),
    *_amdgpu("ring-reset", _QUEUE)(
        ("Starting %s ring reset", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.18"),
        ("Ring %s reset succeeded", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.18"),
    ),
    *_amdgpu("soft-reset-failed", _RESET)(
        ("Ring %s reset failed", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.18"),
    ),
    *_amdgpu("queue-reset", _QUEUE)(
        ("reset gfx queue (%d:%d:%d: vmid:%d)",
         "amdgpu/mes_v12_0.c mes_v12_0_reset_queue_mmio 6.18; amdgpu/mes_v11_0.c "
         "mes_v11_0_reset_queue_mmio 6.12 to 6.18"),
        ("reset compute queue (%d:%d:%d)",
         "amdgpu/mes_v12_0.c mes_v12_0_reset_queue_mmio 6.18; amdgpu/mes_v11_0.c "
         "mes_v11_0_reset_queue_mmio 6.12 to 6.18"),
        ("reset sdma queue (%d:%d:%d)",
         "amdgpu/mes_v12_0.c mes_v12_0_reset_queue_mmio 6.18; amdgpu/mes_v11_0.c "
         "mes_v11_0_reset_queue_mmio 6.18"),
        ("queue id 0x%0x at pasid %d is reset", "amdkfd/kfd_device_queue_manager.c set_queue_as_reset 6.18"),
        ("Queues reset on process %s tid %d thread %s pid %d",
         "amdkfd/kfd_events.c kfd_signal_reset_event 6.12 to 6.18", "comm tgid - tid"),
        ("Resetting wave fronts (cpsch) on dev %p",
         "amdkfd/kfd_device_queue_manager.c process_termination_cpsch 5.10 to 6.18"),
        ("Resetting wave fronts (nocpsch) on dev %p",
         "amdkfd/kfd_device_queue_manager.c destroy_queue_nocpsch_locked 5.10 to 6.18"),
    ),
    *_amdgpu("termination-timeout", _QUEUE, hang=True)(
        ("cp queue preemption time out", "amdgpu/amdgpu_amdkfd_gfx_v9.c kgd_gfx_v9_hqd_destroy 5.10 to 6.18"),
    ),
    *_amdgpu("termination-timeout", _RESET, hang=True)(
        ("qcm fence wait loop timeout expired",
         "amdkfd/kfd_device_queue_manager.c amdkfd_fence_wait_timeout 5.10 to 6.18"),
        ("The cp might be in an unrecoverable state due to an unsuccessful queues preemption",
         "amdkfd/kfd_device_queue_manager.c unmap_queues_cpsch 5.10 to 6.18"),
    ),
    *_amdgpu("firmware-fault", _RESET)(
        ("MES might be in unrecoverable state, issue a GPU reset",
         "amdkfd/kfd_device_queue_manager.c resume_all_queues_mes 6.1 to 6.18"),
    ),
    *_amdgpu("flush-stuck", _QUEUE, hang=True)(
        ("Timeout waiting for VM flush ACK!", "amdgpu/gmc_v9_0.c gmc_v9_0_flush_gpu_tlb 5.10 to 6.18"),
        ("Timeout waiting for VM flush hub: %d!", "amdgpu/gmc_v10_0.c gmc_v10_0_flush_gpu_tlb 6.1 to 6.18"),
        ("Timeout waiting for sem acquire in VM flush!",
         "amdgpu/gmc_v9_0.c gmc_v9_0_flush_gpu_tlb 5.10 to 6.18"),
    ),
    *_amdgpu("job-timeout", _RESET, hang=True)(
        ("IP block:%s is hung!", "amdgpu/amdgpu_device.c amdgpu_device_ip_check_soft_reset 5.10 to 6.18"),
    ),
    *_amdgpu("memory-error", _CONTEXT)(
        ("Send SIGBUS to process %s(pasid:%d)",
         "amdkfd/kfd_events.c kfd_signal_poison_consumed_event 6.12 to 6.18", "comm"),
    ),
    *_amdgpu("memory-error", _RESET)(
        ("CP ECC ERROR IRQ", "amdgpu/amdgpu_gfx.c amdgpu_gfx_cp_ecc_error_irq 5.10 to 6.18"),
        ("CP EDC/ECC error detected.", "amdgpu/gfx_v8_0.c gfx_v8_0_cp_ecc_error_irq 5.10 to 6.18"),
        ("uncorrectable hardware error (ERREVENT_ATHUB_INTERRUPT) detected!",
         "amdgpu/amdgpu_ras.c amdgpu_ras_global_ras_isr 6.18"),
        ("socket: %d, die: %d, %lld new uncorrectable hardware errors detected in %s block",
         "amdgpu/amdgpu_ras.c amdgpu_ras_error_generate_report 6.12 to 6.18"),
        ("socket: %d, die: %d %ld uncorrectable hardware errors detected in %s block",
         "amdgpu/amdgpu_ras.c amdgpu_ras_query_error_status 6.1"),
        ("%ld uncorrectable hardware errors detected in %s block",
         "amdgpu/nbio_v7_9.c nbio_v7_9_handle_ras_controller_intr_no_bifring 5.10 to 6.18"),
        ("RAS controller interrupt triggered by NBIF error",
         "amdgpu/nbio_v7_9.c nbio_v7_9_handle_ras_controller_intr_no_bifring 6.12 to 6.18; "
         "amdgpu/nbio_v7_4.c nbio_v7_4_handle_ras_controller_intr_no_bifring 5.10 to 6.18"),
    ),
    *_amdgpu("reset", _RESET)(
        ("GPU reset begin!", "amdgpu/amdgpu_device.c amdgpu_device_gpu_recover 5.10 to 6.18"),
        ("VRAM is lost due to GPU reset!",
         "amdgpu/amdgpu_device.c amdgpu_device_reinit_after_reset 5.10 to 6.18"),
    ),
    *_amdgpu("soft-reset-failed", _RESET)(
        ("soft reset failed, will fallback to full reset!",
         "amdgpu/amdgpu_device.c amdgpu_device_pre_asic_reset 5.10 to 6.18"),
    ),
    *_amdgpu("reset", _RESET)(
        ("GPU reset succeeded, trying to resume",
         "amdgpu/smu_v13_0_10.c smu_v13_0_10_mode2_restore_hwcontext 5.10 to 6.18"),
        ("GPU reset(%d) succeeded!", "amdgpu/amdgpu_device.c amdgpu_device_sched_resume 5.10 to 6.18"),
        ("GPU reset end with ret = %d", "amdgpu/amdgpu_device.c amdgpu_device_gpu_recover 5.10 to 6.18"),
    ),
    *_amdgpu("reset-failed", _LOST)(
        ("GPU reset(%d) failed", "amdgpu/amdgpu_device.c amdgpu_device_sched_resume 5.10 to 6.18"),
        ("GPU Recovery Failed: %d", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.1 to 6.18"),
        ("GPU pre asic reset failed with err, %d for drm dev",
         "amdgpu/amdgpu_device.c amdgpu_device_asic_reset 5.10 to 6.18; amdgpu/amdgpu_drv.c "
         "amdgpu_drv_delayed_reset_work_handler 6.1 to 6.12"),
        ("ASIC reset failed with error, %d",
         "amdgpu/smu_v13_0_10.c smu_v13_0_10_mode2_perform_reset 5.10 to 6.18"),
        ("GPU recovery disabled.", "amdgpu/amdgpu_device.c amdgpu_device_should_recover_gpu 5.10 to 6.18"),
    ),
    *_amdgpu("reset", _RESET)(
        ("PCI error: detected callback!!", "amdgpu/amdgpu_device.c amdgpu_pci_error_detected 6.18"),
        ("PCI error: slot reset callback!!", "amdgpu/amdgpu_device.c amdgpu_pci_slot_reset 5.10 to 6.18"),
    ),
    *_amdgpu("reset-failed", _LOST)(
        ("PCIe error recovery failed, err:%d", "amdgpu/amdgpu_device.c amdgpu_pci_slot_reset 5.10 to 6.18"),
    ),
    *_amdgpu("gpu-lost", _LOST)(
        ("device lost from bus!",
         "amdgpu/amdgpu.h amdgpu_device_bus_status_check 6.18; amdgpu/amdgpu_device.c "
         "amdgpu_device_health_check 6.12"),
        ("VF is in an unrecoverable state. Runtime Services are halted.",
         "amdgpu/mxgpu_nv.c xgpu_nv_mailbox_rcv_irq 6.18; amdgpu/mxgpu_ai.c xgpu_ai_mailbox_rcv_irq 6.18"),
    ),
)

# i915, Intel's driver for GPUs before Xe2. The process is the one that made the context: a thread's id.
_i915 = SourceTree("drivers/gpu/drm/i915/", "Linux ").rows
_I915_ROWS = (
    *_i915("hang", _QUEUE, hang=True)(
        ("GPU HANG: ecode %d:%x:%08x, in %s [%d]",
         "i915_gpu_error.c error_msg 5.10 to 6.18", "- - - comm tid"),
        ("GPU HANG: ecode %d:%x:%08x", "i915_gpu_error.c error_msg 5.10 to 6.18"),
    ),
    *_i915("context-reset", _CONTEXT, hang=True)(
        ("%s[%d] context reset due to GPU hang", "gt/intel_reset.c mark_guilty 5.10 to 6.18", "comm tid"),
    ),
    *_i915("hang", _QUEUE, hang=True)(
        ("Got hung context on %s with active request", "i915_gpu_error.c capture_engine 6.12 to 6.18"),
    ),
    *_i915("reset", _RESET)(
        ("Resetting chip for %s", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
    ),
    *_i915("engine-reset", _QUEUE)(
        ("Resetting %s for %s", "gt/intel_reset.c __intel_engine_reset_bh 5.10 to 6.18"),
    ),
    *_i915("soft-reset-failed", _RESET)(
        ("%s reset request timed out: {request: %08x, RESET_CTL: %08x}",
         "gt/intel_reset.c gen8_engine_reset_prepare 5.10 to 6.18"),
        ("Engine reset failed on %d:%d (%s) because 0x%08X",
         "gt/uc/intel_guc_submission.c intel_guc_engine_failure_process_msg 6.12 to 6.18"),
        ("GuC engine reset request failed on %d:%d (%s) because 0x%08X",
         "gt/uc/intel_guc_submission.c intel_guc_engine_failure_process_msg 6.1"),
        ("Failed to reset GuC, ret = %d", "gt/uc/intel_uc.c __intel_uc_reset_hw 5.10 to 6.18"),
    ),
    *_i915("firmware-fault", _RESET)(
        ("Crash dump notification", "gt/uc/intel_guc.c intel_guc_crash_process_msg 6.12 to 6.18"),
        ("Exception notification", "gt/uc/intel_guc.c intel_guc_crash_process_msg 6.12 to 6.18"),
        ("Unknown crash notification: 0x%04X", "gt/uc/intel_guc.c intel_guc_crash_process_msg 6.12 to 6.18"),
        ("Received early crash dump notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.12 to 6.18"),
        ("Received early exception notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.12 to 6.18"),
        ("Received early GuC crash dump notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.1"),
        ("Received early GuC exception notification!",
         "gt/uc/intel_guc.c intel_guc_to_host_process_recv_msg 6.1"),
        ("CTB is dead - reason=0x%X", "gt/uc/intel_guc_ct.c ct_dead_ct_worker_func 6.12 to 6.18"),
    ),
    *_i915("flush-stuck", _QUEUE, hang=True)(
        ("TLB invalidation response timed out for seqno %u",
         "gt/uc/intel_guc_submission.c guc_send_invalidate_tlb 6.12 to 6.18"),
    ),
    *_i915("reset-failed", _LOST)(
        ("GPU reset not supported", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
        ("Failed to reset chip", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
        ("Failed to initialise HW following reset (%d)", "gt/intel_reset.c intel_gt_reset 5.10 to 6.18"),
        ("%s timed out, cancelling all in-flight rendering.", "gt/intel_reset.c intel_wedge_me 5.10 to 6.18"),
    ),
    *_i915("gpu-lost", _LOST)(
        ("Failed to initialize GPU, declaring it wedged!", "gt/intel_gt_pm.c intel_gt_resume 6.12 to 6.18"),
        ("Failed to re-initialize GPU[%u], declaring it wedged!",
         "gem/i915_gem_pm.c i915_gem_resume 6.12 to 6.18"),
        ("Lost access to MMIO BAR; all registers now read back as 0xFFFFFFFF!",
         "intel_uncore.c fpga_check_for_unclaimed_mmio 6.1 to 6.18"),
    ),
    *_i915("job-timeout", _QUEUE, hang=True)(
        ("Fence expiration time out i915-%s:%s:%llx!",
         "gt/intel_gt_requests.c intel_gt_watchdog_work 6.1 to 6.18"),
    ),
    *_i915("job-timeout", _QUEUE, hang=True, consequence=True)(
        ("Asynchronous wait on fence %s:%s:%llx timed out (hint:%ps)",
         "i915_sw_fence.c timer_i915_sw_fence_wake 5.10 to 6.18"),
    ),
)

# xe, Intel's driver for newer GPUs.
_xe = SourceTree("drivers/gpu/drm/xe/", "Linux ").rows
_XE_ROWS = (
    *_xe("job-timeout", _QUEUE, hang=True)(
        ("Timedout job: seqno=%u, lrc_seqno=%u, guc_id=%d, flags=0x%lx in %s [%d]",
         "xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18", "- - - - comm tgid"),
        ("Timedout job: seqno=%u", "xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18"),
        ("Check job timeout: seqno=%u", "xe_guc_submit.c check_timeout 6.12 to 6.18"),
    ),
    *_xe("engine-reset", _QUEUE)(
        ("Engine reset: engine_class=%s, logical_mask: 0x%x, guc_id=%d",
         "xe_guc_submit.c xe_guc_exec_queue_reset_handler 6.12 to 6.18"),
    ),
    *_xe("memory-error", _CONTEXT)(
        ("Memory CAT error reported by GuC!",
         "xe_guc_submit.c xe_guc_exec_queue_memory_cat_error_handler 6.18"),
    ),
    *_xe("coredump", _QUEUE, consequence=True)(
        ("Xe device coredump has been created", "xe_devcoredump.c xe_devcoredump 6.12 to 6.18"),
    ),
    *_xe("soft-reset-failed", _RESET)(
        ("GuC engine reset request failed on %d:%d because 0x%08X",
         "xe_guc_submit.c xe_guc_exec_queue_reset_failure_handler 6.12 to 6.18"),
    ),
    *_xe("firmware-timeout", _RESET, hang=True)(
        ("Schedule disable failed to respond", "xe_guc_submit.c guc_exec_queue_timedout_job 6.12 to 6.18"),
        ("No forward process on H2G, reset required", "xe_guc_ct.c guc_ct_send_locked 6.12 to 6.18"),
        ("Timed out wait for G2H, fence %u, action %04x", "xe_guc_ct.c guc_ct_send_recv 6.12 to 6.18"),
    ),
    *_xe("firmware-fault", _RESET)(
        ("G2H channel broken on read, avail=%d, len=%d, reset required", "xe_guc_ct.c g2h_read 6.12 to 6.18"),
        ("G2H channel broken on read, origin=%u, reset required", "xe_guc_ct.c parse_g2h_msg 6.12 to 6.18"),
        ("G2H channel broken on read, type=%u, reset required", "xe_guc_ct.c parse_g2h_msg 6.12 to 6.18"),
        ("GuC Crash dump notification", "xe_guc_ct.c guc_crash_process_msg 6.18"),
        ("GuC Exception notification", "xe_guc_ct.c guc_crash_process_msg 6.18"),
        ("Unknown GuC crash notification: 0x%04X", "xe_guc_ct.c guc_crash_process_msg 6.18"),
        ("Received early GuC crash dump notification!", "xe_guc.c guc_handle_mmio_msg 6.12 to 6.18"),
        ("Received early GuC exception notification!", "xe_guc.c guc_handle_mmio_msg 6.12 to 6.18"),
    ),
    *_xe("flush-stuck", _QUEUE, hang=True)(
        ("TLB invalidation fence timeout, seqno=%d recv=%d",
         "xe_tlb_inval.c xe_tlb_inval_fence_timeout 6.18; xe_gt_tlb_invalidation.c "
         "xe_gt_tlb_fence_timeout 6.12"),
    ),
    *_xe("reset", _RESET)(
        ("trying reset from %ps", "xe_gt.c xe_gt_reset_async 6.18"),
        ("trying reset", "xe_gt.c xe_gt_reset_async 6.12"),
        ("reset queued", "xe_gt.c xe_gt_reset_async 6.12 to 6.18"),
        ("reset started", "xe_gt.c gt_reset 6.12 to 6.18"),
        ("reset done", "xe_gt.c gt_reset 6.12 to 6.18"),
    ),
    *_xe("soft-reset-failed", _RESET)(
        ("reset block failed to get lifted", "xe_gt.c gt_reset 6.18"),
        ("GuC reset timed out, GDRST=%#x", "xe_guc.c xe_guc_reset 6.12 to 6.18"),
    ),
    *_xe("reset-failed", _LOST)(
        ("reset failed (%pe)", "xe_gt.c gt_reset 6.12 to 6.18"),
    ),
    *_xe("gpu-lost", _LOST)(
        ("CRITICAL: Xe has declared device %s as wedged.",
         "xe_device.c xe_device_declare_wedged 6.12 to 6.18"),
        ("Runtime Survivability mode enabled",
         "xe_survivability_mode.c xe_survivability_mode_runtime_enable 6.18"),
    ),
)
# fmt: on

AMDGPU: Final = RecordTable(
    driver=Driver.AMDGPU,
    words=("amdgpu",),
    functions=("amdgpu", "gfx", "gmc", "sdma"),
    openings=("amdgpu: ",),
    inner=r"(?:amdgpu: )?(?:\{\d{1,20}\})?",  # the number of a RAS event
    patterns=(*_AMDGPU_ROWS, *_DRM_ROWS),
)
I915: Final = RecordTable(
    driver=Driver.I915,
    words=("i915",),
    functions=("i915", "intel"),
    openings=("Fence expiration time out i915-", "Asynchronous wait on fence "),
    inner=r"(?:GT\d{1,3}: )?(?:GUC: )?",
    patterns=(*_I915_ROWS, *_DRM_ROWS),
)
XE: Final = RecordTable(
    driver=Driver.XE,
    words=("xe",),
    functions=("xe",),
    inner=r"(?:Tile\d{1,3}: )?(?:GT\d{1,3}: )?",
    patterns=(*_XE_ROWS, *_DRM_ROWS),
)
