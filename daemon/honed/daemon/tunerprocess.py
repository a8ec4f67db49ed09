"""A child `python -m honed.tuner`: its lines, its limits, its end."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence

from honed.runtime.errors import Unavailable

from . import installed
from .children import Child, kill_group, spawn
from .launch import command

_NICENESS = 10


async def run(
    arguments: Sequence[str],
    on_line: Callable[[bytes], None],
    *,
    memory_mib: int,
    seconds: float | None,
    niceness: int = _NICENESS,
    started: Callable[[Child], None] = lambda _: None,
) -> int:
    """Its exit status, after each line of its standard output was passed on; cancelling ends the child.

    Raises Unavailable without a compiler, and TimeoutError after `seconds`, with the child gone.
    """
    if not installed.compiler():
        raise Unavailable("the compiler is not installed; install honed-tuner (apt install honed-tuner)")
    program = [sys.executable, "-m", "honed.tuner", *arguments]
    process = await spawn(command(program, memory_mib=memory_mib, niceness=niceness), stdout=True)
    try:
        started(process)
        async with asyncio.timeout(seconds):
            await _pass_on(process, on_line)
            return await process.wait()
    finally:
        if process.returncode is None:
            kill_group(process.pid)
            await process.wait()


async def _pass_on(process: Child, on_line: Callable[[bytes], None]) -> None:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # a line longer than can be read
            kill_group(process.pid)
            return
        if not line:
            return
        on_line(line)
