"""Everything a machine shows of itself, read below a root folder without any privilege."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from honed.machine import sysfs

from . import thermal
from .gpu import Gpu
from .own import Own, OwnShare, cores
from .readings import Sample

_SOME = re.compile(r"^some avg10=(\d+(?:\.\d+)?)", re.MULTILINE)  # Documentation/accounting/psi.rst
_WAITED_FOR = {"cpu": "the CPU", "memory": "memory", "io": "the disk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSignals:
    """What was read at one time: the signals, and our own share in them."""

    samples: tuple[Sample, ...]
    own: Own


class Signals:
    """Reads the signals; never raises for what a machine lacks. Blocks, for 100 ms at most."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._gpu = Gpu(root)
        self._own = OwnShare(root)

    def read(self, now: float, own: Collection[int]) -> MachineSignals:
        """The signals at `now` (seconds of a steady clock); `own` are the processes of service and tuners."""
        samples = (
            *pressure(self._root),
            load(self._root),
            *self._gpu.samples(now),
            *thermal.samples(self._root),
            power(self._root),
        )
        return MachineSignals(samples=samples, own=self._own.measure(own, now))


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


def power(root: Path) -> Sample:
    """1 while a battery of the machine discharges, else 0; batteries of mice and the like do not count.

    Documentation/ABI/testing/sysfs-class-power.
    """
    online: list[str] = []
    batteries: list[tuple[str, str]] = []
    for supply in sysfs.entries(root / "sys/class/power_supply"):
        kind = sysfs.read(supply / "type")
        if sysfs.read(supply / "scope") == "Device":
            continue
        if kind == "Battery":
            batteries.append((supply.name, sysfs.read(supply / "status") or "Unknown"))
        elif sysfs.number(supply / "online"):
            online.append(supply.name)
    discharging = [name for name, status in batteries if status == "Discharging"]
    if discharging:
        return _power(1.0, f"battery {discharging[0]} discharges")
    if online:
        return _power(0.0, f"on power from {online[0]}")
    if batteries:
        return _power(0.0, f"battery {batteries[0][0]} is {batteries[0][1].lower()}")
    return _power(None, "no battery and no supply that tells")


def _power(value: float | None, text: str) -> Sample:
    return Sample(signal="power", value=value, unit="", text=text)
