"""Records of panfrost, the open driver of job-manager Mali GPUs. None names a process."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _CONTEXT, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_rows = SourceTree("drivers/gpu/drm/panfrost/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("job-fault", _QUEUE)(
        ("js fault, js=%d, status=%s, head=0x%x, tail=0x%x",
         "panfrost_job.c panfrost_job_handle_err 5.10 to 6.18", "slot name"),
    ),
    *_rows("job-stopped", _QUEUE, hang=True)(
        ("Soft-stop failed", "panfrost_job.c panfrost_reset 6.1 to 6.18"),
    ),
    *_rows("job-timeout", _RESET, hang=True)(
        ("gpu sched timeout, js=%d, config=0x%x, status=0x%x",
         "panfrost_job.c panfrost_job_timedout 5.10 to 6.18", "slot"),
    ),
    *_rows("page-fault", _CONTEXT)(
        ("Unhandled Page fault in AS%d at VA 0x%016llX",
         "panfrost_mmu.c panfrost_mmu_irq_handler_thread 5.10 to 6.18", "address_space address"),
    ),
    *_rows("gpu-fault", _CONTEXT)(
        ("GPU Fault 0x%08x (%s) at 0x%016llx",
         "panfrost_gpu.c panfrost_gpu_irq_handler 5.10 to 6.18", "status name address"),
    ),
    *_rows("gpu-fault", _CONTEXT, consequence=True)(
        ("There were multiple GPU faults - some have not been reported",
         "panfrost_gpu.c panfrost_gpu_irq_handler 5.10 to 6.18"),
    ),
    *_rows("mmu-stuck", _RESET)(
        ("AS_ACTIVE bit stuck", "panfrost_mmu.c wait_ready 5.10 to 6.18"),
    ),
    *_rows("power-stuck", _RESET)(
        ("error powering up gpu", "panfrost_gpu.c panfrost_gpu_power_on 5.10 to 6.18"),
        ("shader power transition timeout", "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 6.18"),
        ("tiler power transition timeout", "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 6.18"),
        ("l2 power transition timeout", "panfrost_gpu.c panfrost_gpu_power_off 6.1 to 6.18"),
    ),
    *_rows("soft-reset-failed", _RESET)(
        ("gpu soft reset timed out, attempting hard reset",
         "panfrost_gpu.c panfrost_gpu_soft_reset 6.12 to 6.18"),
    ),
    *_rows("reset-failed", _LOST)(
        ("gpu soft reset timed out", "panfrost_gpu.c panfrost_gpu_soft_reset 5.10 to 6.1"),
        ("gpu hard reset timed out", "panfrost_gpu.c panfrost_gpu_soft_reset 6.12 to 6.18"),
    ),
)
# fmt: on
