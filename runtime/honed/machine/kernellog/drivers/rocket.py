"""Records of rocket, the open driver of Rockchip's NPU. Its page faults are the IOMMU driver's."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import SourceTree

_RESET = Severity.RESET

_rows = SourceTree("drivers/accel/rocket/", "Linux ").rows

# fmt: off
PATTERNS: Final = (
    *_rows("job-timeout", _RESET, hang=True)(
        ("NPU job timed out", "rocket_job.c rocket_job_timedout 6.12 to 6.18"),
    ),
)
# fmt: on
