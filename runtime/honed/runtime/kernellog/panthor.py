"""Records of panthor, the open driver of command-stream Mali GPUs.

Newer kernels write the process (`CS_FATAL: pid=..., comm=...`) in a record of its own just before.
"""

from __future__ import annotations

from typing import Final

from .fault import UNRECOVERABLE, Pattern, Severity, starts
from .mmu import GPU_FAULT, PAGE_FAULT

PREFIX: Final = "panthor"

_PROCESS = r"pid=(?P<tgid>\d{1,10}), comm=(?P<comm>[^\n]*?)"
_SLOT = r"CSG slot (?P<slot>-?\d{1,10})"
_FATAL_CODES = {UNRECOVERABLE: Severity.RESET}

PATTERNS: Final = (
    Pattern(
        start=starts(rf"{_SLOT} CS slot: (?P<stream>\d{{1,10}})\nCS_FATAL\b"),
        severity=Severity.QUEUE,
        kind="cs-fatal",
        by_code=_FATAL_CODES,
    ),
    Pattern(
        start=starts(rf"{_SLOT} CS slot: (?P<stream>\d{{1,10}})\nCS_FAULT\b"),
        severity=Severity.QUEUE,
        kind="cs-fault",
    ),
    Pattern(
        start=starts(rf"CS_FATAL: {_PROCESS}$"), severity=Severity.QUEUE, kind="cs-fatal", announces=True
    ),
    Pattern(
        start=starts(rf"CS_FAULT: {_PROCESS}$"), severity=Severity.QUEUE, kind="cs-fault", announces=True
    ),
    Pattern(
        start=starts(rf"CSG_PROGRESS_TIMER_EVENT: {_PROCESS}$"),
        severity=Severity.QUEUE,
        kind="progress-timeout",
        hang=True,
        announces=True,
    ),
    Pattern(
        start=starts(rf"{_SLOT} progress timeout"),
        severity=Severity.QUEUE,
        kind="progress-timeout",
        hang=True,
    ),
    Pattern(
        start=starts(rf"job timeout: {_PROCESS}(?:, seqno=\d{{1,20}})?$"),
        severity=Severity.QUEUE,
        kind="job-timeout",
        hang=True,
    ),
    Pattern(start=starts(r"job timeout\b"), severity=Severity.QUEUE, kind="job-timeout", hang=True),
    PAGE_FAULT,
    GPU_FAULT,
    Pattern(
        start=starts(r"FW ping timeout, scheduling a reset"), severity=Severity.RESET, kind="firmware-timeout"
    ),
    Pattern(
        start=starts(r"Failed to boot MCU after reset"), severity=Severity.DEVICE_LOST, kind="reset-failed"
    ),
)
