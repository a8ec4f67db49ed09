"""Records of the kernel's out-of-memory killer, for the whole machine and for a control group's limit."""

from __future__ import annotations

from typing import Final

from honed.machine.kernellog.fault import Severity
from honed.machine.kernellog.pattern import Pattern, SourceTree

OPENINGS: Final = ("Memory cgroup out of memory: ", "Out of memory: ", "Out of memory (")

PATTERNS: Final = (
    Pattern(
        "%s: Killed process %d (%s)",
        Severity.PROCESS_KILLED,
        "killed",
        SourceTree(release="Linux ").sources("mm/oom_kill.c __oom_kill_process 5.10 to 6.18"),
        expression=(
            r"(?:Memory cgroup out of memory|Out of memory[^:\n]{0,60}): "
            r"Kill(?:ed)? process (?P<tgid>\d{1,10})(?: \((?P<comm>[^\n]*?)\))?"
        ),
    ),
)
