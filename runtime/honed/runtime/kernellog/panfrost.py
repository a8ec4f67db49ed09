"""Records of panfrost, the open driver of job-manager Mali GPUs. None names a process."""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_PANFROST_JOB: Final = in_file("drivers/gpu/drm/panfrost/panfrost_job.c", "Linux ")
_PANFROST_MMU: Final = in_file("drivers/gpu/drm/panfrost/panfrost_mmu.c", "Linux ")
_PANFROST_GPU: Final = in_file("drivers/gpu/drm/panfrost/panfrost_gpu.c", "Linux ")

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "js fault, js=%d, status=%s, head=0x%x, tail=0x%x",
        _QUEUE,
        "job-fault",
        _PANFROST_JOB("panfrost_job_handle_err", "5.10 to 6.18"),
        fields=("slot", "name"),
    ),
    Pattern(
        "Soft-stop failed", _QUEUE, "job-stopped", _PANFROST_JOB("panfrost_reset", "6.1 to 6.18"), hang=True
    ),
    Pattern(
        "gpu sched timeout, js=%d, config=0x%x, status=0x%x",
        _RESET,
        "job-timeout",
        _PANFROST_JOB("panfrost_job_timedout", "5.10 to 6.18"),
        fields=("slot",),
        hang=True,
    ),
    Pattern(
        "Unhandled Page fault in AS%d at VA 0x%016llX",
        _CONTEXT,
        "page-fault",
        _PANFROST_MMU("panfrost_mmu_irq_handler_thread", "5.10 to 6.18"),
        fields=("address_space", "address"),
    ),
    Pattern(
        "GPU Fault 0x%08x (%s) at 0x%016llx",
        _CONTEXT,
        "gpu-fault",
        _PANFROST_GPU("panfrost_gpu_irq_handler", "5.10 to 6.18"),
        fields=("status", "name", "address"),
    ),
    Pattern(
        "There were multiple GPU faults - some have not been reported",
        _CONTEXT,
        "gpu-fault",
        _PANFROST_GPU("panfrost_gpu_irq_handler", "5.10 to 6.18"),
        consequence=True,
    ),
    Pattern("AS_ACTIVE bit stuck", _RESET, "mmu-stuck", _PANFROST_MMU("wait_ready", "5.10 to 6.18")),
    Pattern(
        "error powering up gpu", _RESET, "power-stuck", _PANFROST_GPU("panfrost_gpu_power_on", "5.10 to 6.18")
    ),
    Pattern(
        "shader power transition timeout",
        _RESET,
        "power-stuck",
        _PANFROST_GPU("panfrost_gpu_power_off", "6.1 to 6.18"),
    ),
    Pattern(
        "tiler power transition timeout",
        _RESET,
        "power-stuck",
        _PANFROST_GPU("panfrost_gpu_power_off", "6.1 to 6.18"),
    ),
    Pattern(
        "l2 power transition timeout",
        _RESET,
        "power-stuck",
        _PANFROST_GPU("panfrost_gpu_power_off", "6.1 to 6.18"),
    ),
    Pattern(
        "gpu soft reset timed out, attempting hard reset",
        _RESET,
        "soft-reset-failed",
        _PANFROST_GPU("panfrost_gpu_soft_reset", "6.12 to 6.18"),
    ),
    Pattern(
        "gpu soft reset timed out",
        _LOST,
        "reset-failed",
        _PANFROST_GPU("panfrost_gpu_soft_reset", "5.10 to 6.1"),
    ),
    Pattern(
        "gpu hard reset timed out",
        _LOST,
        "reset-failed",
        _PANFROST_GPU("panfrost_gpu_soft_reset", "6.12 to 6.18"),
    ),
)
