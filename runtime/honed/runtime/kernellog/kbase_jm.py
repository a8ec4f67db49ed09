"""Records that only Arm's kbase for job-manager GPUs (Midgard, Bifrost) writes. None names a process."""

from __future__ import annotations

from typing import Final

from .fault import Driver, Pattern, Severity, starts

PATTERNS: Final = (
    Pattern(
        start=starts(
            r"error detected from slot (?P<slot>\d{1,3}), job status 0x(?P<code>[0-9A-Fa-f]{1,8})"
            r"(?: \((?P<name>[^)\n]*)\))?"
        ),
        severity=Severity.QUEUE,
        kind="job-error",
        driver=Driver.KBASE_JM,
    ),
    Pattern(  # the code is one of the driver's own, of software
        start=starts(r"t6xx: GPU fault 0x(?P<code>[0-9A-Fa-f]{1,16}) from job slot (?P<slot>\d{1,3})"),
        severity=Severity.QUEUE,
        kind="job-fault",
        driver=Driver.KBASE_JM,
    ),
    Pattern(
        start=starts(r"JS: Job Hard-Stopped \(took more than"),
        severity=Severity.QUEUE,
        kind="job-stopped",
        driver=Driver.KBASE_JM,
        hang=True,
    ),
    Pattern(
        start=starts(r"JS: Job has been on the GPU for too long"),
        severity=Severity.RESET,
        kind="job-timeout",
        driver=Driver.KBASE_JM,
        hang=True,
    ),
)
