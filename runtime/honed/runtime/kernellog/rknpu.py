"""Records of rknpu, Rockchip's own driver of its NPU. None names a process."""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_RKNPU_JOB: Final = in_file("drivers/rknpu/rknpu_job.c", "rknpu ")
_RKNPU_RESET: Final = in_file("drivers/rknpu/rknpu_reset.c", "rknpu ")

_QUEUE, _RESET, _LOST = Severity.QUEUE, Severity.RESET, Severity.DEVICE_LOST

PATTERNS: Final = (
    Pattern(
        "job timeout, flags: %#x:", _RESET, "job-timeout", _RKNPU_JOB("rknpu_job_abort", "0.9.8"), hang=True
    ),
    Pattern(
        "failed to wait job, task counter: %d, flags: %#x, ret = %d",
        _QUEUE,
        "job-timeout",
        _RKNPU_JOB("rknpu_job_wait", "0.9.8"),
        hang=True,
    ),
    Pattern("job commit failed", _QUEUE, "job-error", _RKNPU_JOB("rknpu_job_wait", "0.9.8")),
    Pattern(
        "job abort, flags: %#x, ret: %d",
        _QUEUE,
        "job-error",
        _RKNPU_JOB("rknpu_job_abort", "0.9.8"),
        consequence=True,
    ),
    Pattern(
        "invalid irq status: %#x, raw status: %#x, require mask: %#x",
        _QUEUE,
        "job-error",
        _RKNPU_JOB("rknpu_irq_handler", "0.9.8"),
    ),
    Pattern("soft reset", _RESET, "reset", _RKNPU_RESET("rknpu_soft_reset", "0.9.8")),
    Pattern(
        "failed to soft reset for rknpu: %d", _LOST, "reset-failed", _RKNPU_RESET("rknpu_soft_reset", "0.9.8")
    ),
    Pattern(
        "failed to assert rknpu reset: %d", _LOST, "reset-failed", _RKNPU_RESET("rknpu_reset_assert", "0.9.8")
    ),
    Pattern(
        "failed to deassert rknpu reset: %d",
        _LOST,
        "reset-failed",
        _RKNPU_RESET("rknpu_reset_deassert", "0.9.8"),
    ),
)
