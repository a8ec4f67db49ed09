"""How much a Mali GPU is used, and its clock: under kbase, panthor and panfrost (facts: docs/idle.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from honed.machine import sysfs

from .readings import Sample

_LOAD = re.compile(r"(\d{1,3})(?:@\d+(?:Hz)?)?")  # "12@300000000Hz", Rockchip's devfreq
_FIXED_GOVERNORS = ("performance", "powersave", "userspace")
_ENGINE = re.compile(r"^drm-engine-([\w-]+):\s*(\d+) ns$", re.MULTILINE)  # gpu/drm-usage-stats.rst
_CLIENT = re.compile(r"^drm-client-id:\s*(\d+)$", re.MULTILINE)
_DRIVER = re.compile(r"^drm-driver:\s*(panthor|panfrost)$", re.MULTILINE)


class Gpu:
    """The first Mali GPU below a root folder. Remembers what engines had worked when it last looked."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._looked = 0.0
        self._engines: dict[tuple[str, str], int] = {}

    def samples(self, now: float) -> list[Sample]:
        """Utilisation and clock; `now` in seconds of a steady clock. May block for 100 ms (kbase)."""
        folder = next(iter(sysfs.gpu_clocks(self._root)), None)
        return [self._utilisation(folder, now), _clock(folder)]

    def _utilisation(self, devfreq: Path | None, now: float) -> Sample:
        if devfreq and _suspended(devfreq):
            return _used(0.0, "the GPU is suspended")  # its devfreq may keep the last figure before that
        found = _LOAD.fullmatch(sysfs.read(devfreq / "load") or "") if devfreq else None
        if found:
            return _used(float(found[1]), "of the time, says its devfreq")
        percent = sysfs.number(self._root / "sys/class/misc/mali0/device/utilisation")
        if percent is not None:
            return _used(float(percent), "of 100 ms, says kbase")
        percent_open = self._by_open_drivers(now)
        if percent_open is not None:
            return _used(percent_open, "of the time by processes that may be looked into")
        return _used(None, "no driver tells how much a GPU is used")

    def _by_open_drivers(self, now: float) -> float | None:
        """The busiest engine's share since the last call, percent; None where engines are not counted.

        Counting is off until root writes to the driver's `profiling` file; counters are then missing or 0.
        """
        before, since = self._engines, now - self._looked
        self._engines, self._looked = dict(self._counters()), now
        totals: dict[str, int] = {}
        for (client, engine), ns in self._engines.items():
            if ns:
                spent = max(0, ns - before.get((client, engine), ns))
                totals[engine] = totals.get(engine, 0) + spent
        if not totals or not before or since <= 0:
            return None
        return min(100.0, max(totals.values()) / since / 1e7)

    def _counters(self) -> Iterator[tuple[tuple[str, str], int]]:
        """(client, engine) and nanoseconds, of each process whose files this one may look into."""
        for process in sysfs.entries(self._root / "proc"):
            if not process.name.isdecimal():
                continue
            for link in sysfs.entries(process / "fd"):
                if not _is_render_node(link):
                    continue
                text = sysfs.read(process / "fdinfo" / link.name) or ""
                client = _CLIENT.search(text)
                if client and _DRIVER.search(text):
                    yield from (((client[1], name), int(ns)) for name, ns in _ENGINE.findall(text))


def _is_render_node(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith("/dev/dri/")
    except OSError:
        return False


def _suspended(devfreq: Path) -> bool:
    return sysfs.read(devfreq / "device/power/runtime_status") == "suspended"


def _used(percent: float | None, text: str) -> Sample:
    return Sample(signal="gpu", value=percent, unit="%", text=text)


def _clock(devfreq: Path | None) -> Sample:
    """How far the clock is raised, percent of the way from its lowest to its highest."""
    if devfreq is None:
        return _raised(None, "no GPU with a devfreq clock")
    current = sysfs.number(devfreq / "cur_freq")
    if current is None:
        return _raised(None, f"{devfreq.name} does not tell its clock")
    if _suspended(devfreq):
        return _raised(0.0, "the GPU is suspended")
    governor = sysfs.read(devfreq / "governor") or "unknown"
    low, high = _range(devfreq)
    if governor in _FIXED_GOVERNORS or high <= low:
        return _raised(None, f"{_mhz(current)} MHz, which governor {governor} keeps")
    percent = min(100.0, max(0.0, 100 * (current - low) / (high - low)))
    return _raised(percent, f"{_mhz(current)} of {_mhz(low)} to {_mhz(high)} MHz by governor {governor}")


def _range(devfreq: Path) -> tuple[int, int]:
    """Lowest and highest frequency in Hz; older kernels say 0 for no bound of their own."""
    steps = (sysfs.read(devfreq / "available_frequencies") or "").split()
    known = [int(step) for step in steps if step.isdecimal()] or [0]
    low, high = sysfs.number(devfreq / "min_freq"), sysfs.number(devfreq / "max_freq")
    return low or min(known), high or max(known)


def _mhz(hertz: int) -> int:
    return round(hertz / 1e6)


def _raised(percent: float | None, text: str) -> Sample:
    return Sample(signal="gpu clock", value=percent, unit="%", text=text)
