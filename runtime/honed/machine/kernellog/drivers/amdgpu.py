"""Records of amdgpu, with its part for compute (amdkfd).

The process and the address of a fault are in records of their own after it. Which way the GPU is reset
(`MODE1 reset` and the like) is written at boot and suspend too and is in no row here.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/amd/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("page-fault", _CONTEXT)(
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
    *_rows("page-fault", _CONTEXT, consequence=True)(
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
    *_rows("owner", _QUEUE, consequence=True)(
        (" Process %s pid %d thread %s pid %d",
         "amdgpu/amdgpu_vm.c amdgpu_vm_print_task_info 6.18", "comm tgid - tid"),
        ("Process information: process %s pid %d thread %s pid %d",
         "amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.12", "comm tgid - tid"),
    ),
    *_rows("job-error", _QUEUE)(
        ("Illegal register access in command stream",
         "amdgpu/gfx_v9_4_3.c gfx_v9_4_3_priv_reg_irq 5.10 to 6.18"),
        ("Illegal opcode in command stream", "amdgpu/gfx_v9_4_3.c gfx_v9_4_3_bad_op_irq 6.12 to 6.18"),
        ("Illegal instruction in command stream",
         "amdgpu/gfx_v9_4_3.c gfx_v9_4_3_priv_inst_irq 5.10 to 6.18"),
        ("Illegal instruction in SDMA command stream",
         "amdgpu/sdma_v4_4_2.c sdma_v4_4_2_process_illegal_inst_irq 5.10 to 6.18"),
    ),
    *_rows("job-timeout", _QUEUE, hang=True)(
        ("ring %s timeout, signaled seq=%u, emitted seq=%u",
         "amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.18"),
        ("ring %s timeout, but soft recovered", "amdgpu/amdgpu_job.c amdgpu_job_timedout 5.10 to 6.18"),
    ),
    *_rows("ring-reset", _QUEUE)(
        ("Starting %s ring reset", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.18"),
        ("Ring %s reset succeeded", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("Ring %s reset failed", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.18"),
    ),
    *_rows("queue-reset", _QUEUE)(
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
    *_rows("termination-timeout", _QUEUE, hang=True)(
        ("cp queue preemption time out", "amdgpu/amdgpu_amdkfd_gfx_v9.c kgd_gfx_v9_hqd_destroy 5.10 to 6.18"),
    ),
    *_rows("termination-timeout", _RESET, hang=True)(
        ("qcm fence wait loop timeout expired",
         "amdkfd/kfd_device_queue_manager.c amdkfd_fence_wait_timeout 5.10 to 6.18"),
        ("The cp might be in an unrecoverable state due to an unsuccessful queues preemption",
         "amdkfd/kfd_device_queue_manager.c unmap_queues_cpsch 5.10 to 6.18"),
    ),
    *_rows("firmware-fault", _RESET)(
        ("MES might be in unrecoverable state, issue a GPU reset",
         "amdkfd/kfd_device_queue_manager.c resume_all_queues_mes 6.1 to 6.18"),
    ),
    *_rows("flush-stuck", _QUEUE, hang=True)(
        ("Timeout waiting for VM flush ACK!", "amdgpu/gmc_v9_0.c gmc_v9_0_flush_gpu_tlb 5.10 to 6.18"),
        ("Timeout waiting for VM flush hub: %d!", "amdgpu/gmc_v10_0.c gmc_v10_0_flush_gpu_tlb 6.1 to 6.18"),
        ("Timeout waiting for sem acquire in VM flush!",
         "amdgpu/gmc_v9_0.c gmc_v9_0_flush_gpu_tlb 5.10 to 6.18"),
    ),
    *_rows("job-timeout", _RESET, hang=True)(
        ("IP block:%s is hung!", "amdgpu/amdgpu_device.c amdgpu_device_ip_check_soft_reset 5.10 to 6.18"),
    ),
    *_rows("memory-error", _CONTEXT)(
        ("Send SIGBUS to process %s(pasid:%d)",
         "amdkfd/kfd_events.c kfd_signal_poison_consumed_event 6.12 to 6.18", "comm"),
    ),
    *_rows("memory-error", _RESET)(
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
    *_rows("reset", _RESET)(
        ("GPU reset begin!", "amdgpu/amdgpu_device.c amdgpu_device_gpu_recover 5.10 to 6.18"),
        ("VRAM is lost due to GPU reset!",
         "amdgpu/amdgpu_device.c amdgpu_device_reinit_after_reset 5.10 to 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("soft reset failed, will fallback to full reset!",
         "amdgpu/amdgpu_device.c amdgpu_device_pre_asic_reset 5.10 to 6.18"),
    ),
    *_rows("reset", _RESET)(
        ("GPU reset succeeded, trying to resume",
         "amdgpu/smu_v13_0_10.c smu_v13_0_10_mode2_restore_hwcontext 5.10 to 6.18"),
        ("GPU reset(%d) succeeded!", "amdgpu/amdgpu_device.c amdgpu_device_sched_resume 5.10 to 6.18"),
        ("GPU reset end with ret = %d", "amdgpu/amdgpu_device.c amdgpu_device_gpu_recover 5.10 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("GPU reset(%d) failed", "amdgpu/amdgpu_device.c amdgpu_device_sched_resume 5.10 to 6.18"),
        ("GPU Recovery Failed: %d", "amdgpu/amdgpu_job.c amdgpu_job_timedout 6.1 to 6.18"),
        ("GPU pre asic reset failed with err, %d for drm dev",
         "amdgpu/amdgpu_device.c amdgpu_device_asic_reset 5.10 to 6.18; amdgpu/amdgpu_drv.c "
         "amdgpu_drv_delayed_reset_work_handler 6.1 to 6.12"),
        ("ASIC reset failed with error, %d",
         "amdgpu/smu_v13_0_10.c smu_v13_0_10_mode2_perform_reset 5.10 to 6.18"),
        ("GPU recovery disabled.", "amdgpu/amdgpu_device.c amdgpu_device_should_recover_gpu 5.10 to 6.18"),
    ),
    *_rows("reset", _RESET)(
        ("PCI error: detected callback!!", "amdgpu/amdgpu_device.c amdgpu_pci_error_detected 6.18"),
        ("PCI error: slot reset callback!!", "amdgpu/amdgpu_device.c amdgpu_pci_slot_reset 5.10 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("PCIe error recovery failed, err:%d", "amdgpu/amdgpu_device.c amdgpu_pci_slot_reset 5.10 to 6.18"),
    ),
    *_rows("gpu-lost", _LOST)(
        ("device lost from bus!",
         "amdgpu/amdgpu.h amdgpu_device_bus_status_check 6.18; amdgpu/amdgpu_device.c "
         "amdgpu_device_health_check 6.12"),
        ("VF is in an unrecoverable state. Runtime Services are halted.",
         "amdgpu/mxgpu_nv.c xgpu_nv_mailbox_rcv_irq 6.18; amdgpu/mxgpu_ai.c xgpu_ai_mailbox_rcv_irq 6.18"),
    ),
)
# fmt: on
