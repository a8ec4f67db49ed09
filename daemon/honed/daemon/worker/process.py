"""A process that runs models, and the link to it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from honed.machine import aiochildren
from honed.machine.aiochildren import Child
from honed.machine.children import Bounds, python
from honed.protocol.errors import HonedError
from honed.protocol.peer import Peer
from honed.protocol.wire import APART, FrameLimits
from honed.runtime.calling.aiolink import AsyncLink
from honed.runtime.execution.partlimits import UNLIMITED, PartLimits

# Answers hold the outputs of one inference, which are bounded before it runs (see `inference`).
FRAMES = FrameLimits(max_bytes=1 << 30, max_values=1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgram:
    """What a worker runs: a module that answers as `hosting` has it, with `argument`, within its memory.

    `more` arguments come behind that, and what tells users of the memory, which is that of `setting`.
    `niceness` is the least it has.
    """

    module: str
    argument: str
    memory_mib: int
    setting: str
    more: tuple[str, ...] = ()
    niceness: int = 0

    @property
    def bound(self) -> str:
        """The memory, and the setting to raise where that is too little; "" for no limit."""
        return f"{self.memory_mib} MiB of {self.setting}" if self.memory_mib else ""


def device_program(spec: str, memory_mib: int, parts: PartLimits = UNLIMITED) -> WorkerProgram:
    """The worker of an OpenCL device; `parts` is for its process that runs parts of models."""
    more = (str(parts.threads), str(parts.memory_mib))
    return WorkerProgram(
        module="honed.daemon.worker",
        argument=spec,
        memory_mib=memory_mib,
        setting="limits.worker_memory_mib",
        more=more,
    )


async def spawn(
    program: WorkerProgram, cache_dir: Path, lost: Callable[[], HonedError], *, niceness: int = 0
) -> tuple[Child, AsyncLink]:
    """Start a worker; `lost` makes the error of calls cut short. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        command = python(
            program.module,
            str(theirs.fileno()),
            str(cache_dir),
            program.argument,
            *program.more,
            program.bound,
        )
        bounds = Bounds(memory_mib=program.memory_mib, niceness=max(niceness, program.niceness))
        try:
            process = await aiochildren.spawn(command, bounds, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    peer = Peer(serves=False, receiving=FRAMES, sending=FRAMES, large=APART)
    return process, AsyncLink(ours, peer, lost=lost)
