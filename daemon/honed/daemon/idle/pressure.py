"""How much the machine is used: pressure stall information and the load average."""

from __future__ import annotations

import re
from pathlib import Path

from honed.machine import sysfs

from .readings import Sample

_SOME = re.compile(r"^some avg10=(\d+(?:\.\d+)?)", re.MULTILINE)  # Documentation/accounting/psi.rst
_WAITED_FOR = {"cpu": "the CPU", "memory": "memory", "io": "the disk"}


def pressure(root: Path) -> list[Sample]:
    """Pressure on CPU, memory and I/O: percent of the last ten seconds in which some task waited for it."""
    return [_pressure(root, kind) for kind in _WAITED_FOR]


def _pressure(root: Path, kind: str) -> Sample:
    found = _SOME.search(sysfs.read(root / "proc/pressure" / kind) or "")
    return Sample(
        signal=f"{kind} pressure",
        value=float(found[1]) if found else None,
        unit="%",
        text=f"of 10 s some task waited for {_WAITED_FOR[kind]}"
        if found
        else "the kernel does not tell (CONFIG_PSI, psi=1 on its command line)",
    )


def load(root: Path) -> Sample:
    """Runnable and waiting tasks, mean of the last minute, for each core."""
    count = cores(root)
    try:
        tasks = float((sysfs.read(root / "proc/loadavg") or "").split()[0])
    except (IndexError, ValueError):
        return Sample(signal="load", value=None, unit="per core", text="the kernel does not tell")
    text = f"{tasks:.2f} in all, on {count} cores, mean of a minute"
    return Sample(signal="load", value=tasks / count, unit="per core", text=text)


def cores(root: Path) -> int:
    """Processors that are online; 1 where the machine does not tell."""
    count = 0
    for part in (sysfs.read(root / "sys/devices/system/cpu/online") or "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            count += int(last or first) - int(first) + 1
    return max(1, count)
