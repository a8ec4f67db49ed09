"""Starts a child process that cannot outlive the service or outgrow its memory.

python -m honed.daemon.launch PARENT_PID MEMORY_MIB NICENESS PROGRAM ARGUMENT...

Runs between fork and exec of a child, where a threaded parent must not run Python itself. It makes
a process group of the child, has the kernel kill it when the service dies, and limits its memory.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from honed.runtime.errors import InvalidArgument
from honed.runtime.offspring import die_with

_MAX_ARGUMENT = 32_000  # letters, of four bytes at most; Linux allows 128 KiB for one


def command(program: list[str], *, memory_mib: int = 0, niceness: int = 0) -> list[str]:
    """The command line that starts `program` through here; `memory_mib` 0: memory is not limited.

    Raises InvalidArgument where an argument, which may be a client's, is none that a process can have.
    """
    for argument in program:
        if "\0" in argument or len(argument) > _MAX_ARGUMENT:
            raise InvalidArgument(
                f"{argument[:80]!r} is too long or holds a zero character; use another name"
            )
    return [
        sys.executable,
        "-m",
        "honed.daemon.launch",
        str(os.getpid()),
        str(memory_mib),
        str(niceness),
        *program,
    ]


def main(arguments: list[str]) -> None:
    """Never returns: the process becomes the program, or exits with 127."""
    parent, memory_mib, niceness = (int(argument) for argument in arguments[:3])
    program = arguments[3:]
    os.setpgid(0, 0)
    die_with(parent)
    if memory_mib:
        # Of data and not of address space: OpenCL drivers reserve far more of that than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_mib << 20, memory_mib << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # When memory runs out, the kernel should end the child and not the service.
    Path("/proc/self/oom_score_adj").write_text("500")
    os.nice(niceness)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
