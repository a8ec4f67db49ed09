"""Records of panthor, the open driver of command-stream Mali GPUs.

Newer kernels write the process (`CS_FATAL: pid=..., comm=...`) in a record of its own just before.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import UNRECOVERABLE, Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_FATAL_CODES: Final = {UNRECOVERABLE: _RESET}

_rows = SourceTree("drivers/gpu/drm/panthor/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("cs-fatal", _QUEUE, by_code=_FATAL_CODES)(
        ("CSG slot %d CS slot: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
         "panthor_sched.c cs_slot_process_fatal_event_locked 6.12 to 6.18", "slot stream code name"),
    ),
    *_rows("cs-fault", _QUEUE)(
        ("CSG slot %d CS slot: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
         "panthor_sched.c cs_slot_process_fault_event_locked 6.12 to 6.18", "slot stream code name"),
    ),
    *_rows("cs-fatal", _QUEUE, announces=True)(
        ("CS_FATAL: pid=%d, comm=%s", "panthor_sched.c cs_slot_process_fatal_event_locked 6.18", "tgid comm"),
    ),
    *_rows("cs-fault", _QUEUE, announces=True)(
        ("CS_FAULT: pid=%d, comm=%s", "panthor_sched.c cs_slot_process_fault_event_locked 6.18", "tgid comm"),
    ),
    *_rows("progress-timeout", _QUEUE, hang=True, announces=True)(
        ("CSG_PROGRESS_TIMER_EVENT: pid=%d, comm=%s",
         "panthor_sched.c csg_slot_process_progress_timer_event_locked 6.18", "tgid comm"),
    ),
    *_rows("progress-timeout", _QUEUE, hang=True)(
        ("CSG slot %d progress timeout",
         "panthor_sched.c csg_slot_process_progress_timer_event_locked 6.12 to 6.18", "slot"),
    ),
    *_rows("job-timeout", _QUEUE, hang=True)(
        ("job timeout: pid=%d, comm=%s, seqno=%llu", "panthor_sched.c queue_timedout_job 6.18", "tgid comm"),
        ("job timeout", "panthor_sched.c queue_timedout_job 6.12"),
    ),
    *_rows("tiler-out-of-memory", _QUEUE)(
        ("Failed to extend the tiler heap", "panthor_sched.c group_process_tiler_oom 6.12 to 6.18"),
    ),
    *_rows("suspension-timeout", _QUEUE, hang=True)(
        ("CSG suspend failed, escalating to termination",
         "panthor_sched.c panthor_sched_suspend 6.12 to 6.18"),
    ),
    *_rows("group-timeout", _RESET, hang=True)(
        ("CSG %d update request timedout", "panthor_sched.c csgs_upd_ctx_apply_locked 6.12 to 6.18", "slot"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%d at VA 0x%016llX",
         "panthor_mmu.c panthor_mmu_irq_handler 6.12 to 6.18", "address_space address"),
    ),
    *_rows("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) at 0x%016llx",
         "panthor_gpu.c panthor_gpu_irq_handler 6.12 to 6.18", "status name address"),
        ("GPU Fault in protected mode", "panthor_gpu.c panthor_gpu_irq_handler 6.12 to 6.18"),
    ),
    *_rows("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck", "panthor_mmu.c wait_ready 6.12 to 6.18"),
    ),
    *_rows("flush-stuck", _RESET)(
        ("Flush caches timeout", "panthor_gpu.c panthor_gpu_flush_caches 6.12 to 6.18"),
    ),
    *_rows("power-stuck", _RESET)(
        ("timeout waiting on %s:%llx power transition",
         "panthor_gpu.c panthor_gpu_block_power_on 6.12 to 6.18"),
        ("timeout waiting on %s:%llx readiness", "panthor_gpu.c panthor_gpu_block_power_on 6.12 to 6.18"),
        ("timeout waiting on %s power domain transition", "panthor_pwr.c panthor_pwr_domain_transition 6.18"),
        ("Retracting %s domain timeout", "panthor_pwr.c retract_domain 6.18"),
        ("Delegating %s domain timeout", "panthor_pwr.c delegate_domain 6.18"),
    ),
    *_rows("firmware-timeout", _RESET, hang=True)(
        ("FW ping timeout, scheduling a reset", "panthor_fw.c panthor_fw_ping_work 6.12 to 6.18"),
        ("Timed out waiting for MCU to halt", "panthor_fw.c panthor_fw_wait_mcu_halted 6.18"),
        ("Failed to stop MCU", "panthor_fw.c panthor_fw_stop 6.12 to 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("Soft reset timeout", "panthor_gpu.c panthor_gpu_soft_reset 6.12 to 6.18"),
        ("RESET timed out (0x%x)", "panthor_pwr.c panthor_pwr_reset 6.18"),
        ("FW %s reset failed", "panthor_fw.c panthor_fw_post_reset 6.12 to 6.18"),
        ("Fast reset failed, trying a slow reset", "panthor_device.c panthor_device_resume 6.12 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("Failed to boot MCU after reset, making device unusable.",
         "panthor_device.c panthor_device_reset_work 6.12 to 6.18"),
        ("Failed to boot MCU (status=%s)", "panthor_fw.c panthor_fw_start 6.12 to 6.18"),
    ),
)
# fmt: on
