"""Records of amdgpu, with its part for compute (amdkfd).

The process and the address of a fault are in records of their own after it. Which way the GPU is reset
(`MODE1 reset` and the like) is written at boot and suspend too and is in no row here.
"""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_GMC_V12_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gmc_v12_0.c", "Linux ")
_GMC_V11_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gmc_v11_0.c", "Linux ")
_GMC_V10_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gmc_v10_0.c", "Linux ")
_GMC_V9_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gmc_v9_0.c", "Linux ")
_GMC_V8_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gmc_v8_0.c", "Linux ")
_GMC_V7_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gmc_v7_0.c", "Linux ")
_GMC_V6_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gmc_v6_0.c", "Linux ")
_AMDGPU_VM: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu_vm.c", "Linux ")
_AMDGPU_JOB: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu_job.c", "Linux ")
_GFX_V9_4_3: Final = in_file("drivers/gpu/drm/amd/amdgpu/gfx_v9_4_3.c", "Linux ")
_SDMA_V4_4_2: Final = in_file("drivers/gpu/drm/amd/amdgpu/sdma_v4_4_2.c", "Linux ")
_MES_V12_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/mes_v12_0.c", "Linux ")
_MES_V11_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/mes_v11_0.c", "Linux ")
_KFD_DEVICE_QUEUE_MANAGER: Final = in_file("drivers/gpu/drm/amd/amdkfd/kfd_device_queue_manager.c", "Linux ")
_KFD_EVENTS: Final = in_file("drivers/gpu/drm/amd/amdkfd/kfd_events.c", "Linux ")
_AMDGPU_AMDKFD_GFX_V9: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu_amdkfd_gfx_v9.c", "Linux ")
_AMDGPU_DEVICE: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu_device.c", "Linux ")
_AMDGPU_GFX: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu_gfx.c", "Linux ")
_GFX_V8_0: Final = in_file("drivers/gpu/drm/amd/amdgpu/gfx_v8_0.c", "Linux ")
_AMDGPU_RAS: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu_ras.c", "Linux ")
_NBIO_V7_9: Final = in_file("drivers/gpu/drm/amd/amdgpu/nbio_v7_9.c", "Linux ")
_NBIO_V7_4: Final = in_file("drivers/gpu/drm/amd/amdgpu/nbio_v7_4.c", "Linux ")
_SMU_V13_0_10: Final = in_file("drivers/gpu/drm/amd/amdgpu/smu_v13_0_10.c", "Linux ")
_AMDGPU_DRV: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu_drv.c", "Linux ")
_AMDGPU: Final = in_file("drivers/gpu/drm/amd/amdgpu/amdgpu.h", "Linux ")
_MXGPU_NV: Final = in_file("drivers/gpu/drm/amd/amdgpu/mxgpu_nv.c", "Linux ")
_MXGPU_AI: Final = in_file("drivers/gpu/drm/amd/amdgpu/mxgpu_ai.c", "Linux ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "[%s] page fault (src_id:%u ring:%u vmid:%u pasid:%u)",
        _CONTEXT,
        "page-fault",
        _GMC_V12_0("gmc_v12_0_process_interrupt", "6.12 to 6.18"),
    ),
    Pattern(
        "[%s] page fault (src_id:%u ring:%u vmid:%u pasid:%u, for process %s pid %d thread %s pid %d)",
        _CONTEXT,
        "page-fault",
        _GMC_V11_0("gmc_v11_0_process_interrupt", "6.1")
        + _GMC_V10_0("gmc_v10_0_process_interrupt", "5.10 to 6.1"),
        fields=(None, None, None, None, None, "comm", "tgid", None, "tid"),
    ),
    Pattern(
        "[%s] %s page fault (src_id:%u ring:%u vmid:%u pasid:%u)",
        _CONTEXT,
        "page-fault",
        _GMC_V9_0("gmc_v9_0_process_interrupt", "6.12 to 6.18"),
    ),
    Pattern(
        "[%s] %s page fault (src_id:%u ring:%u vmid:%u pasid:%u, for process %s pid %d thread %s pid %d)",
        _CONTEXT,
        "page-fault",
        _GMC_V9_0("gmc_v9_0_process_interrupt", "5.10 to 6.1"),
        fields=(None, None, None, None, None, None, "comm", "tgid", None, "tid"),
    ),
    Pattern(
        "GPU fault detected: %d 0x%08x for process %s pid %d thread %s pid %d",
        _CONTEXT,
        "page-fault",
        _GMC_V8_0("gmc_v8_0_process_interrupt", "5.10 to 6.1"),
        fields=(None, None, "comm", "tgid", None, "tid"),
    ),
    Pattern(
        "GPU fault detected: %d 0x%08x",
        _CONTEXT,
        "page-fault",
        _GMC_V8_0("gmc_v8_0_process_interrupt", "5.10 to 6.18"),
    ),
    Pattern(
        "VM fault (0x%02x, vmid %d, pasid %d) at page %u, %s from",
        _CONTEXT,
        "page-fault",
        _GMC_V8_0("gmc_v8_0_vm_decode_fault", "5.10 to 6.18")
        + _GMC_V7_0("gmc_v7_0_vm_decode_fault", "5.10 to 6.18"),
        fields=(None, None, None, None, "access"),
        consequence=True,
    ),
    Pattern(
        "VM fault (0x%02x, vmid %d) at page %u, %s from",
        _CONTEXT,
        "page-fault",
        _GMC_V6_0("gmc_v6_0_vm_decode_fault", "5.10 to 6.18"),
        fields=(None, None, None, "access"),
        consequence=True,
    ),
    Pattern(
        "  in page starting at address 0x%016llx from",
        _CONTEXT,
        "page-fault",
        _GMC_V9_0("gmc_v9_0_process_interrupt", "5.10 to 6.18"),
        fields=("address",),
        consequence=True,
    ),
    Pattern(
        "Can't handle page fault (%d)",
        _CONTEXT,
        "page-fault",
        _AMDGPU_VM("amdgpu_vm_handle_fault", "5.10 to 6.18"),
        consequence=True,
    ),
    Pattern(
        " Process %s pid %d thread %s pid %d",
        _QUEUE,
        "owner",
        _AMDGPU_VM("amdgpu_vm_print_task_info", "6.18"),
        fields=("comm", "tgid", None, "tid"),
        consequence=True,
    ),
    Pattern(
        "Process information: process %s pid %d thread %s pid %d",
        _QUEUE,
        "owner",
        _AMDGPU_JOB("amdgpu_job_timedout", "5.10 to 6.12"),
        fields=("comm", "tgid", None, "tid"),
        consequence=True,
    ),
    Pattern(
        "Illegal register access in command stream",
        _QUEUE,
        "job-error",
        _GFX_V9_4_3("gfx_v9_4_3_priv_reg_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "Illegal opcode in command stream",
        _QUEUE,
        "job-error",
        _GFX_V9_4_3("gfx_v9_4_3_bad_op_irq", "6.12 to 6.18"),
    ),
    Pattern(
        "Illegal instruction in command stream",
        _QUEUE,
        "job-error",
        _GFX_V9_4_3("gfx_v9_4_3_priv_inst_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "Illegal instruction in SDMA command stream",
        _QUEUE,
        "job-error",
        _SDMA_V4_4_2("sdma_v4_4_2_process_illegal_inst_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "ring %s timeout, signaled seq=%u, emitted seq=%u",
        _QUEUE,
        "job-timeout",
        _AMDGPU_JOB("amdgpu_job_timedout", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "ring %s timeout, but soft recovered",
        _QUEUE,
        "job-timeout",
        _AMDGPU_JOB("amdgpu_job_timedout", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern("Starting %s ring reset", _QUEUE, "ring-reset", _AMDGPU_JOB("amdgpu_job_timedout", "6.18")),
    Pattern("Ring %s reset succeeded", _QUEUE, "ring-reset", _AMDGPU_JOB("amdgpu_job_timedout", "6.18")),
    Pattern("Ring %s reset failed", _RESET, "soft-reset-failed", _AMDGPU_JOB("amdgpu_job_timedout", "6.18")),
    Pattern(
        "reset gfx queue (%d:%d:%d: vmid:%d)",
        _QUEUE,
        "queue-reset",
        _MES_V12_0("mes_v12_0_reset_queue_mmio", "6.18")
        + _MES_V11_0("mes_v11_0_reset_queue_mmio", "6.12 to 6.18"),
    ),
    Pattern(
        "reset compute queue (%d:%d:%d)",
        _QUEUE,
        "queue-reset",
        _MES_V12_0("mes_v12_0_reset_queue_mmio", "6.18")
        + _MES_V11_0("mes_v11_0_reset_queue_mmio", "6.12 to 6.18"),
    ),
    Pattern(
        "reset sdma queue (%d:%d:%d)",
        _QUEUE,
        "queue-reset",
        _MES_V12_0("mes_v12_0_reset_queue_mmio", "6.18") + _MES_V11_0("mes_v11_0_reset_queue_mmio", "6.18"),
    ),
    Pattern(
        "queue id 0x%0x at pasid %d is reset",
        _QUEUE,
        "queue-reset",
        _KFD_DEVICE_QUEUE_MANAGER("set_queue_as_reset", "6.18"),
    ),
    Pattern(
        "Queues reset on process %s tid %d thread %s pid %d",
        _QUEUE,
        "queue-reset",
        _KFD_EVENTS("kfd_signal_reset_event", "6.12 to 6.18"),
        fields=("comm", "tgid", None, "tid"),
    ),
    Pattern(
        "Resetting wave fronts (cpsch) on dev %p",
        _QUEUE,
        "queue-reset",
        _KFD_DEVICE_QUEUE_MANAGER("process_termination_cpsch", "5.10 to 6.18"),
    ),
    Pattern(
        "Resetting wave fronts (nocpsch) on dev %p",
        _QUEUE,
        "queue-reset",
        _KFD_DEVICE_QUEUE_MANAGER("destroy_queue_nocpsch_locked", "5.10 to 6.18"),
    ),
    Pattern(
        "cp queue preemption time out",
        _QUEUE,
        "termination-timeout",
        _AMDGPU_AMDKFD_GFX_V9("kgd_gfx_v9_hqd_destroy", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "qcm fence wait loop timeout expired",
        _RESET,
        "termination-timeout",
        _KFD_DEVICE_QUEUE_MANAGER("amdkfd_fence_wait_timeout", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "The cp might be in an unrecoverable state due to an unsuccessful queues preemption",
        _RESET,
        "termination-timeout",
        _KFD_DEVICE_QUEUE_MANAGER("unmap_queues_cpsch", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "MES might be in unrecoverable state, issue a GPU reset",
        _RESET,
        "firmware-fault",
        _KFD_DEVICE_QUEUE_MANAGER("resume_all_queues_mes", "6.1 to 6.18"),
    ),
    Pattern(
        "Timeout waiting for VM flush ACK!",
        _QUEUE,
        "flush-stuck",
        _GMC_V9_0("gmc_v9_0_flush_gpu_tlb", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Timeout waiting for VM flush hub: %d!",
        _QUEUE,
        "flush-stuck",
        _GMC_V10_0("gmc_v10_0_flush_gpu_tlb", "6.1 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Timeout waiting for sem acquire in VM flush!",
        _QUEUE,
        "flush-stuck",
        _GMC_V9_0("gmc_v9_0_flush_gpu_tlb", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "IP block:%s is hung!",
        _RESET,
        "job-timeout",
        _AMDGPU_DEVICE("amdgpu_device_ip_check_soft_reset", "5.10 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Send SIGBUS to process %s(pasid:%d)",
        _CONTEXT,
        "memory-error",
        _KFD_EVENTS("kfd_signal_poison_consumed_event", "6.12 to 6.18"),
        fields=("comm",),
    ),
    Pattern(
        "CP ECC ERROR IRQ", _RESET, "memory-error", _AMDGPU_GFX("amdgpu_gfx_cp_ecc_error_irq", "5.10 to 6.18")
    ),
    Pattern(
        "CP EDC/ECC error detected.",
        _RESET,
        "memory-error",
        _GFX_V8_0("gfx_v8_0_cp_ecc_error_irq", "5.10 to 6.18"),
    ),
    Pattern(
        "uncorrectable hardware error (ERREVENT_ATHUB_INTERRUPT) detected!",
        _RESET,
        "memory-error",
        _AMDGPU_RAS("amdgpu_ras_global_ras_isr", "6.18"),
    ),
    Pattern(
        "socket: %d, die: %d, %lld new uncorrectable hardware errors detected in %s block",
        _RESET,
        "memory-error",
        _AMDGPU_RAS("amdgpu_ras_error_generate_report", "6.12 to 6.18"),
    ),
    Pattern(
        "socket: %d, die: %d %ld uncorrectable hardware errors detected in %s block",
        _RESET,
        "memory-error",
        _AMDGPU_RAS("amdgpu_ras_query_error_status", "6.1"),
    ),
    Pattern(
        "%ld uncorrectable hardware errors detected in %s block",
        _RESET,
        "memory-error",
        _NBIO_V7_9("nbio_v7_9_handle_ras_controller_intr_no_bifring", "5.10 to 6.18"),
    ),
    Pattern(
        "RAS controller interrupt triggered by NBIF error",
        _RESET,
        "memory-error",
        _NBIO_V7_9("nbio_v7_9_handle_ras_controller_intr_no_bifring", "6.12 to 6.18")
        + _NBIO_V7_4("nbio_v7_4_handle_ras_controller_intr_no_bifring", "5.10 to 6.18"),
    ),
    Pattern("GPU reset begin!", _RESET, "reset", _AMDGPU_DEVICE("amdgpu_device_gpu_recover", "5.10 to 6.18")),
    Pattern(
        "VRAM is lost due to GPU reset!",
        _RESET,
        "reset",
        _AMDGPU_DEVICE("amdgpu_device_reinit_after_reset", "5.10 to 6.18"),
    ),
    Pattern(
        "soft reset failed, will fallback to full reset!",
        _RESET,
        "soft-reset-failed",
        _AMDGPU_DEVICE("amdgpu_device_pre_asic_reset", "5.10 to 6.18"),
    ),
    Pattern(
        "GPU reset succeeded, trying to resume",
        _RESET,
        "reset",
        _SMU_V13_0_10("smu_v13_0_10_mode2_restore_hwcontext", "5.10 to 6.18"),
    ),
    Pattern(
        "GPU reset(%d) succeeded!",
        _RESET,
        "reset",
        _AMDGPU_DEVICE("amdgpu_device_sched_resume", "5.10 to 6.18"),
    ),
    Pattern(
        "GPU reset end with ret = %d",
        _RESET,
        "reset",
        _AMDGPU_DEVICE("amdgpu_device_gpu_recover", "5.10 to 6.18"),
    ),
    Pattern(
        "GPU reset(%d) failed",
        _LOST,
        "reset-failed",
        _AMDGPU_DEVICE("amdgpu_device_sched_resume", "5.10 to 6.18"),
    ),
    Pattern(
        "GPU Recovery Failed: %d", _LOST, "reset-failed", _AMDGPU_JOB("amdgpu_job_timedout", "6.1 to 6.18")
    ),
    Pattern(
        "GPU pre asic reset failed with err, %d for drm dev",
        _LOST,
        "reset-failed",
        _AMDGPU_DEVICE("amdgpu_device_asic_reset", "5.10 to 6.18")
        + _AMDGPU_DRV("amdgpu_drv_delayed_reset_work_handler", "6.1 to 6.12"),
    ),
    Pattern(
        "ASIC reset failed with error, %d",
        _LOST,
        "reset-failed",
        _SMU_V13_0_10("smu_v13_0_10_mode2_perform_reset", "5.10 to 6.18"),
    ),
    Pattern(
        "GPU recovery disabled.",
        _LOST,
        "reset-failed",
        _AMDGPU_DEVICE("amdgpu_device_should_recover_gpu", "5.10 to 6.18"),
    ),
    Pattern(
        "PCI error: detected callback!!", _RESET, "reset", _AMDGPU_DEVICE("amdgpu_pci_error_detected", "6.18")
    ),
    Pattern(
        "PCI error: slot reset callback!!",
        _RESET,
        "reset",
        _AMDGPU_DEVICE("amdgpu_pci_slot_reset", "5.10 to 6.18"),
    ),
    Pattern(
        "PCIe error recovery failed, err:%d",
        _LOST,
        "reset-failed",
        _AMDGPU_DEVICE("amdgpu_pci_slot_reset", "5.10 to 6.18"),
    ),
    Pattern(
        "device lost from bus!",
        _LOST,
        "gpu-lost",
        _AMDGPU("amdgpu_device_bus_status_check", "6.18")
        + _AMDGPU_DEVICE("amdgpu_device_health_check", "6.12"),
    ),
    Pattern(
        "VF is in an unrecoverable state. Runtime Services are halted.",
        _LOST,
        "gpu-lost",
        _MXGPU_NV("xgpu_nv_mailbox_rcv_irq", "6.18") + _MXGPU_AI("xgpu_ai_mailbox_rcv_irq", "6.18"),
    ),
)
