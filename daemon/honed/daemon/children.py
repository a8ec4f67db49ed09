"""Child processes started through `launch`: how they are ended, and what ended them."""

from __future__ import annotations

import contextlib
import os
import signal

# What ends a process that somebody else ends, or that memory runs out for.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def kill_group(pid: int) -> None:
    """Kill a child of `launch` with its process group; one that is gone already is fine."""
    for kill in (os.killpg, os.kill):  # the group is not there yet in a child's first moments
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """What ended a process, from its exit status as Python gives it."""
    if status < 0:
        return f"it was ended by signal {signal.Signals(-status).name}"
    return f"it ended with status {status}"
