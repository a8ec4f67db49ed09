"""Records of panfrost, the open driver of job-manager Mali GPUs. None names a process."""

from __future__ import annotations

from typing import Final

from .fault import Pattern, Severity, starts
from .mmu import GPU_FAULT, PAGE_FAULT

PREFIX: Final = "panfrost"

PATTERNS: Final = (
    Pattern(
        start=starts(r"js fault, js=(?P<slot>\d{1,3}), status=(?P<name>[^,\n]*)"),
        severity=Severity.QUEUE,
        kind="job-fault",
    ),
    Pattern(
        start=starts(r"gpu sched timeout, js=(?P<slot>\d{1,3})"),
        severity=Severity.RESET,
        kind="job-timeout",
        hang=True,
    ),
    PAGE_FAULT,
    GPU_FAULT,
)
