"""Becomes a program that cannot outlive its parent or exceed its limits; `children.start` starts it.

python -m honed.process.launch PARENT_PID MEMORY_MIB ADDRESS_MIB CPU_SECONDS NICENESS PROGRAM ARGUMENT...

Runs between fork and exec of a child, where a threaded parent must not run Python itself. Each child waits
for it, so it imports little: pathlib alone took a quarter of its time.
"""

from __future__ import annotations

import os
import resource
import sys

from .limits import die_with, limit, limit_data

# The kernel should kill the child first if memory runs out, no app and not its parent; among children, those
# with more niceness.
_OOM_SCORE, _OOM_NICE = 500, 10


def main(arguments: list[str]) -> None:
    """Replace this process by the program, or exit with status 127; never return."""
    parent, memory_mib, address_mib, cpu_seconds, niceness = map(int, arguments[:5])
    program = arguments[5:]
    die_with(parent)
    if memory_mib:
        limit_data(memory_mib << 20)
    if address_mib:
        limit(resource.RLIMIT_AS, address_mib << 20)
    if cpu_seconds:
        limit(resource.RLIMIT_CPU, cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    score, wanted = "/proc/self/oom_score_adj", _OOM_SCORE + _OOM_NICE * max(0, niceness)
    with open(score) as file:
        low = int(file.read()) < wanted
    if low:
        with open(score, "w") as file:
            file.write(str(wanted))
    os.nice(niceness)
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # ONNX Runtime's wheels report to Microsoft otherwise
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
