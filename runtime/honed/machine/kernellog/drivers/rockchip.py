"""Records of the drivers of Rockchip's NPU: rknpu is its own, rocket the open one. None names a process.

Page faults of rocket's are the IOMMU driver's.
"""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_QUEUE, _RESET, _LOST = Severity.QUEUE, Severity.RESET, Severity.DEVICE_LOST

_rknpu = SourceTree("drivers/rknpu/", "rknpu ").rows
_rocket = SourceTree("drivers/accel/rocket/", "Linux ").rows

# fmt: off
RKNPU: Final = (
    *_rknpu("job-timeout", _RESET, hang=True)(
        ("job timeout, flags: %#x:", "rknpu_job.c rknpu_job_abort 0.9.8"),
    ),
    *_rknpu("job-timeout", _QUEUE, hang=True)(
        ("failed to wait job, task counter: %d, flags: %#x, ret = %d", "rknpu_job.c rknpu_job_wait 0.9.8"),
    ),
    *_rknpu("job-error", _QUEUE)(
        ("job commit failed", "rknpu_job.c rknpu_job_wait 0.9.8"),
    ),
    *_rknpu("job-error", _QUEUE, consequence=True)(
        ("job abort, flags: %#x, ret: %d", "rknpu_job.c rknpu_job_abort 0.9.8"),
    ),
    *_rknpu("job-error", _QUEUE)(
        ("invalid irq status: %#x, raw status: %#x, require mask: %#x",
         "rknpu_job.c rknpu_irq_handler 0.9.8"),
    ),
    *_rknpu("reset", _RESET)(
        ("soft reset", "rknpu_reset.c rknpu_soft_reset 0.9.8"),
    ),
    *_rknpu("reset-failed", _LOST)(
        ("failed to soft reset for rknpu: %d", "rknpu_reset.c rknpu_soft_reset 0.9.8"),
        ("failed to assert rknpu reset: %d", "rknpu_reset.c rknpu_reset_assert 0.9.8"),
        ("failed to deassert rknpu reset: %d", "rknpu_reset.c rknpu_reset_deassert 0.9.8"),
    ),
)
ROCKET: Final = (
    *_rocket("job-timeout", _RESET, hang=True)(
        ("NPU job timed out", "rocket_job.c rocket_job_timedout 6.12 to 6.18"),
    ),
)
# fmt: on
