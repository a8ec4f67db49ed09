"""Records of rocket, the open driver of Rockchip's NPU. Its page faults are the IOMMU driver's."""

from __future__ import annotations

from typing import Final

from .fault import Severity
from .pattern import Pattern, in_file

_ROCKET_JOB: Final = in_file("drivers/accel/rocket/rocket_job.c", "Linux ")

_RESET = Severity.RESET

PATTERNS: Final = (
    Pattern(
        "NPU job timed out",
        _RESET,
        "job-timeout",
        _ROCKET_JOB("rocket_job_timedout", "6.12 to 6.18"),
        hang=True,
    ),
)
