"""How much of the CPUs' time others took while something was measured here, from /proc/stat (proc(5))."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_LEAST = 10  # ticks between two readings that say anything; a tick is 10 ms


@dataclass(frozen=True, slots=True)
class LoadReading:
    """Seconds since the machine started, of all CPUs together; `own` are this process's."""

    total: float
    busy: float
    own: float


def read(stat: Path = Path("/proc/stat")) -> LoadReading | None:
    """The figures now; None where /proc does not have them."""
    try:
        return parse(stat.read_text(), time.process_time())
    except (OSError, ValueError):
        return None


def parse(stat: str, own: float) -> LoadReading:
    """A reading from the text of /proc/stat; raises ValueError where it has no line for all CPUs.

    Time that a hypervisor gave to others ("steal") counts as busy. Guests' time stands in "user" already.
    """
    name, *fields = stat.partition("\n")[0].split()
    if name != "cpu" or len(fields) < 8:
        raise ValueError("/proc/stat does not begin with the time of all CPUs")
    user, nice, system, idle, iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    tick = 1 / os.sysconf("SC_CLK_TCK")
    busy = user + nice + system + irq + softirq + steal
    return LoadReading(total=(busy + idle + iowait) * tick, busy=busy * tick, own=own)


def others(before: LoadReading | None, after: LoadReading | None) -> float | None:
    """The share, 0 to 1, of all CPUs that neither idled nor worked for this process; None if not known."""
    if before is None or after is None:
        return None
    total = after.total - before.total
    if total < _LEAST / os.sysconf("SC_CLK_TCK"):
        return None
    busy = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, busy / total))
