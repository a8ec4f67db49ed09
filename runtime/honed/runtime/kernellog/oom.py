"""Records of the kernel's out-of-memory killer, for the whole machine and for a control group's limit."""

from __future__ import annotations

from typing import Final

from .fault import Driver, Pattern, Severity, starts

PATTERNS: Final = (
    Pattern(
        start=starts(
            r"(?:Memory cgroup out of memory|Out of memory[^:\n]{0,60}): "
            r"Kill(?:ed)? process (?P<tgid>\d{1,10})(?: \((?P<comm>[^\n]*?)\))?"
        ),
        severity=Severity.PROCESS_KILLED,
        kind="killed",
        driver=Driver.KERNEL,
    ),
)
