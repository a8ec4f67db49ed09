"""What memory a child may take."""

from __future__ import annotations

import resource
from pathlib import Path


def bound_data(more: int) -> None:
    """Allow `more` bytes beyond what the process has now, so that a compiler gone wild ends alone.

    RLIMIT_DATA and not RLIMIT_AS: drivers reserve address space far beyond what they use.
    """
    now = data_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def data_bytes() -> int:
    """What RLIMIT_DATA bounds, now."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
