"""Records of panthor, the open driver of command-stream Mali GPUs.

Newer kernels write the process (`CS_FATAL: pid=..., comm=...`) in a record of its own just before.
"""

from __future__ import annotations

from typing import Final

from .fault import UNRECOVERABLE, Severity
from .pattern import Pattern, in_file

_SCHED: Final = in_file("drivers/gpu/drm/panthor/panthor_sched.c", "Linux ")
_MMU: Final = in_file("drivers/gpu/drm/panthor/panthor_mmu.c", "Linux ")
_GPU: Final = in_file("drivers/gpu/drm/panthor/panthor_gpu.c", "Linux ")
_PWR: Final = in_file("drivers/gpu/drm/panthor/panthor_pwr.c", "Linux ")
_FW: Final = in_file("drivers/gpu/drm/panthor/panthor_fw.c", "Linux ")
_DEVICE: Final = in_file("drivers/gpu/drm/panthor/panthor_device.c", "Linux ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_FATAL_CODES: Final = {UNRECOVERABLE: _RESET}

PATTERNS: Final = (
    Pattern(
        "CSG slot %d CS slot: %d\nCS_FATAL.EXCEPTION_TYPE: 0x%x (%s)",
        _QUEUE,
        "cs-fatal",
        _SCHED("cs_slot_process_fatal_event_locked", "6.12 to 6.18"),
        fields=("slot", "stream", "code", "name"),
        by_code=_FATAL_CODES,
    ),
    Pattern(
        "CSG slot %d CS slot: %d\nCS_FAULT.EXCEPTION_TYPE: 0x%x (%s)",
        _QUEUE,
        "cs-fault",
        _SCHED("cs_slot_process_fault_event_locked", "6.12 to 6.18"),
        fields=("slot", "stream", "code", "name"),
    ),
    Pattern(
        "CS_FATAL: pid=%d, comm=%s",
        _QUEUE,
        "cs-fatal",
        _SCHED("cs_slot_process_fatal_event_locked", "6.18"),
        fields=("tgid", "comm"),
        announces=True,
    ),
    Pattern(
        "CS_FAULT: pid=%d, comm=%s",
        _QUEUE,
        "cs-fault",
        _SCHED("cs_slot_process_fault_event_locked", "6.18"),
        fields=("tgid", "comm"),
        announces=True,
    ),
    Pattern(
        "CSG_PROGRESS_TIMER_EVENT: pid=%d, comm=%s",
        _QUEUE,
        "progress-timeout",
        _SCHED("csg_slot_process_progress_timer_event_locked", "6.18"),
        fields=("tgid", "comm"),
        hang=True,
        announces=True,
    ),
    Pattern(
        "CSG slot %d progress timeout",
        _QUEUE,
        "progress-timeout",
        _SCHED("csg_slot_process_progress_timer_event_locked", "6.12 to 6.18"),
        fields=("slot",),
        hang=True,
    ),
    Pattern(
        "job timeout: pid=%d, comm=%s, seqno=%llu",
        _QUEUE,
        "job-timeout",
        _SCHED("queue_timedout_job", "6.18"),
        fields=("tgid", "comm"),
        hang=True,
    ),
    Pattern("job timeout", _QUEUE, "job-timeout", _SCHED("queue_timedout_job", "6.12"), hang=True),
    Pattern(
        "Failed to extend the tiler heap",
        _QUEUE,
        "tiler-out-of-memory",
        _SCHED("group_process_tiler_oom", "6.12 to 6.18"),
    ),
    Pattern(
        "CSG suspend failed, escalating to termination",
        _QUEUE,
        "suspension-timeout",
        _SCHED("panthor_sched_suspend", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern(
        "CSG %d update request timedout",
        _RESET,
        "group-timeout",
        _SCHED("csgs_upd_ctx_apply_locked", "6.12 to 6.18"),
        fields=("slot",),
        hang=True,
    ),
    Pattern(
        "Unhandled Page fault in AS%d at VA 0x%016llX",
        _CONTEXT,
        "page-fault",
        _MMU("panthor_mmu_irq_handler", "6.12 to 6.18"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "GPU Fault 0x%08x (%s) at 0x%016llx",
        _CONTEXT,
        "gpu-fault",
        _GPU("panthor_gpu_irq_handler", "6.12 to 6.18"),
        fields=("status", "name", "address"),
    ),
    Pattern(
        "GPU Fault in protected mode", _CONTEXT, "gpu-fault", _GPU("panthor_gpu_irq_handler", "6.12 to 6.18")
    ),
    Pattern("AS_ACTIVE bit stuck", _RESET, "mmu-stuck", _MMU("wait_ready", "6.12 to 6.18")),
    Pattern("Flush caches timeout", _RESET, "flush-stuck", _GPU("panthor_gpu_flush_caches", "6.12 to 6.18")),
    Pattern(
        "timeout waiting on %s:%llx power transition",
        _RESET,
        "power-stuck",
        _GPU("panthor_gpu_block_power_on", "6.12 to 6.18"),
    ),
    Pattern(
        "timeout waiting on %s:%llx readiness",
        _RESET,
        "power-stuck",
        _GPU("panthor_gpu_block_power_on", "6.12 to 6.18"),
    ),
    Pattern(
        "timeout waiting on %s power domain transition",
        _RESET,
        "power-stuck",
        _PWR("panthor_pwr_domain_transition", "6.18"),
    ),
    Pattern("Retracting %s domain timeout", _RESET, "power-stuck", _PWR("retract_domain", "6.18")),
    Pattern("Delegating %s domain timeout", _RESET, "power-stuck", _PWR("delegate_domain", "6.18")),
    Pattern(
        "FW ping timeout, scheduling a reset",
        _RESET,
        "firmware-timeout",
        _FW("panthor_fw_ping_work", "6.12 to 6.18"),
        hang=True,
    ),
    Pattern(
        "Timed out waiting for MCU to halt",
        _RESET,
        "firmware-timeout",
        _FW("panthor_fw_wait_mcu_halted", "6.18"),
        hang=True,
    ),
    Pattern(
        "Failed to stop MCU", _RESET, "firmware-timeout", _FW("panthor_fw_stop", "6.12 to 6.18"), hang=True
    ),
    Pattern(
        "Soft reset timeout", _RESET, "soft-reset-failed", _GPU("panthor_gpu_soft_reset", "6.12 to 6.18")
    ),
    Pattern("RESET timed out (0x%x)", _RESET, "soft-reset-failed", _PWR("panthor_pwr_reset", "6.18")),
    Pattern("FW %s reset failed", _RESET, "soft-reset-failed", _FW("panthor_fw_post_reset", "6.12 to 6.18")),
    Pattern(
        "Fast reset failed, trying a slow reset",
        _RESET,
        "soft-reset-failed",
        _DEVICE("panthor_device_resume", "6.12 to 6.18"),
    ),
    Pattern(
        "Failed to boot MCU after reset, making device unusable.",
        _LOST,
        "reset-failed",
        _DEVICE("panthor_device_reset_work", "6.12 to 6.18"),
    ),
    Pattern("Failed to boot MCU (status=%s)", _LOST, "reset-failed", _FW("panthor_fw_start", "6.12 to 6.18")),
)
