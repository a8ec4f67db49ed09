"""What a process sees to itself: that it ends with its parent, and takes no more than it may."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent (a process id) ends, whatever it hangs in.

    More exactly when the parent's thread that started it ends. Ends it now where the parent is gone already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(127)


def limit(kind: int, most: int) -> None:
    """Lower a limit (a RLIMIT of `resource`) of this process and its children; a lower one stays."""
    _, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(kind, (most, most))


def limit_data(most: int) -> None:
    """Limit what may be written to, in bytes.

    RLIMIT_DATA and not RLIMIT_AS: OpenCL drivers reserve address space far beyond what they use.
    """
    limit(resource.RLIMIT_DATA, most)


def data_bytes() -> int:
    """What `limit_data` bounds, now."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
