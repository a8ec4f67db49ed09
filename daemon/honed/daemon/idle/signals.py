"""Reads the signals of idleness: load, the GPU, temperatures, and honed's own share."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from honed.machine.files import entries, gpu_clocks, system_number, system_text
from honed.machine.processors import cores, tree_seconds

_SOME = re.compile(r"^some avg10=(\d+(?:\.\d+)?)", re.MULTILINE)  # Documentation/accounting/psi.rst
_WAITED_FOR = {"cpu": "the CPU", "memory": "memory", "io": "the disk"}
_LOAD = re.compile(r"(\d{1,3})(?:@\d+(?:Hz)?)?")  # As "12@300000000Hz", Rockchip's devfreq
_FIXED_GOVERNORS = ("performance", "powersave", "userspace")
_ENGINE = re.compile(r"^drm-engine-([\w-]+):\s*(\d+) ns$", re.MULTILINE)  # See gpu/drm-usage-stats.rst
_CLIENT = re.compile(r"^drm-client-id:\s*(\d+)$", re.MULTILINE)
_DRIVER = re.compile(r"^drm-driver:\s*(panthor|panfrost)$", re.MULTILINE)
_FIRST = ("gpu", "soc", "package")  # Zones that say most of a GPU beside a CPU; others only without them
_OTHERS = ("cpu", "core", "pkg", "center", "acpitz")
_PLAUSIBLE = (-40_000, 200_000)  # Millidegrees; drivers report values outside for failed measurements
_THROTTLES = ("passive", "hot", "critical")  # Types of trip points; "active" only starts a fan
_LOAD_SECONDS = 60.0  # Documentation/filesystems/proc.rst, loadavg
_PRESSURE_SECONDS = 10.0  # Documentation/accounting/psi.rst, avg10
Verdict = Literal["quiet", "busy", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSignals:
    """The signals read at a time, and honed's own share in them."""

    samples: tuple[Sample, ...]
    own: OwnLoad


class Signals:
    """A reader of the signals, which never raises for missing ones; it blocks for 100 ms at most."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._gpu = Gpu(root)
        self._own = OwnLoadMeter(root)

    def read(self, now: float, own: Collection[int]) -> MachineSignals:
        """Read the signals at `now` (seconds of a steady clock).

        `own` are the processes of the service and of tuners.
        """
        samples = (
            *pressure(self._root),
            load(self._root),
            *self._gpu.samples(now),
            *thermal_samples(self._root),
            power(self._root),
        )
        return MachineSignals(samples=samples, own=self._own.measure(own, now))


def pressure(root: Path) -> list[Sample]:
    """Return the pressure on CPU, memory and I/O.

    It is the percentage of the last ten seconds in which some task waited.
    """
    return [_pressure(root, kind) for kind in _WAITED_FOR]


def _pressure(root: Path, kind: str) -> Sample:
    found = _SOME.search(system_text(root / "proc/pressure" / kind) or "")
    return Sample(
        signal=f"{kind} pressure",
        value=float(found[1]) if found else None,
        unit="%",
        text=f"of 10 s some task waited for {_WAITED_FOR[kind]}"
        if found
        else "the kernel does not tell (CONFIG_PSI, psi=1 on its command line)",
    )


def load(root: Path) -> Sample:
    """Return the runnable and waiting tasks for each core, mean of the last minute."""
    count = cores(root)
    try:
        tasks = float((system_text(root / "proc/loadavg") or "").split()[0])
    except (IndexError, ValueError):
        return Sample(signal="load", value=None, unit="per core", text="the kernel does not tell")
    text = f"{tasks:.2f} in all, on {count} cores, mean of a minute"
    return Sample(signal="load", value=tasks / count, unit="per core", text=text)


def power(root: Path) -> Sample:
    """Return 1 while a battery of the machine discharges, else 0; batteries of mice etc. do not count.

    Documentation/ABI/testing/sysfs-class-power.
    """
    online: list[str] = []
    batteries: list[tuple[str, str]] = []
    for supply in entries(root / "sys/class/power_supply"):
        kind = system_text(supply / "type")
        if system_text(supply / "scope") == "Device":
            continue
        if kind == "Battery":
            batteries.append((supply.name, system_text(supply / "status") or "Unknown"))
        elif system_number(supply / "online"):
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


class Gpu:
    """The first Mali GPU below a root folder, under kbase, panthor or panfrost (facts: docs/idle.md).

    It stores the counters of engines from the last reading.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._looked = 0.0
        self._engines: dict[tuple[str, str], int] = {}

    def samples(self, now: float) -> list[Sample]:
        """Read utilisation and clock at `now` (monotonic seconds). May block for 100 ms (kbase)."""
        folder = next(iter(gpu_clocks(self._root)), None)
        return [self._utilisation(folder, now), _clock(folder)]

    def _utilisation(self, devfreq: Path | None, now: float) -> Sample:
        if devfreq and _is_suspended(devfreq):
            return _load_sample(0.0, "the GPU is suspended")  # The load of devfreq may be stale then
        found = _LOAD.fullmatch(system_text(devfreq / "load") or "") if devfreq else None
        if found:
            return _load_sample(float(found[1]), "of the time, says its devfreq")
        percent = system_number(self._root / "sys/class/misc/mali0/device/utilisation")
        if percent is not None:
            return _load_sample(float(percent), "of 100 ms, says kbase")
        percent_open = self._by_open_drivers(now)
        if percent_open is not None:
            return _load_sample(percent_open, "of the time by processes that may be looked into")
        return _load_sample(None, "no driver tells how much a GPU is used")

    def _by_open_drivers(self, now: float) -> float | None:
        """Return the busiest engine's share since the last call, percent; None if engines are not counted.

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
        """Yield (client, engine) and nanoseconds, of each process whose files this one may read."""
        for process in entries(self._root / "proc"):
            if not process.name.isdecimal():
                continue
            for link in entries(process / "fd"):
                if not _is_render_node(link):
                    continue
                text = system_text(process / "fdinfo" / link.name) or ""
                client = _CLIENT.search(text)
                if client and _DRIVER.search(text):
                    yield from (((client[1], name), int(ns)) for name, ns in _ENGINE.findall(text))


def _is_render_node(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith("/dev/dri/")
    except OSError:
        return False


def _is_suspended(devfreq: Path) -> bool:
    return system_text(devfreq / "device/power/runtime_status") == "suspended"


def _load_sample(percent: float | None, text: str) -> Sample:
    return Sample(signal="gpu", value=percent, unit="%", text=text)


def _clock(devfreq: Path | None) -> Sample:
    """Return the position of the clock between its lowest and highest frequency, percent."""
    if devfreq is None:
        return _clock_sample(None, "no GPU with a devfreq clock")
    current = system_number(devfreq / "cur_freq")
    if current is None:
        return _clock_sample(None, f"{devfreq.name} does not tell its clock")
    if _is_suspended(devfreq):
        return _clock_sample(0.0, "the GPU is suspended")
    governor = system_text(devfreq / "governor") or "unknown"
    low, high = _range(devfreq)
    if governor in _FIXED_GOVERNORS or high <= low:
        return _clock_sample(None, f"{_mhz(current)} MHz, which governor {governor} keeps")
    percent = min(100.0, max(0.0, 100 * (current - low) / (high - low)))
    return _clock_sample(
        percent, f"{_mhz(current)} of {_mhz(low)} to {_mhz(high)} MHz by governor {governor}"
    )


def _range(devfreq: Path) -> tuple[int, int]:
    """Return the lowest and highest frequency in Hz; older kernels say 0 for no bound of their own."""
    steps = (system_text(devfreq / "available_frequencies") or "").split()
    known = [int(step) for step in steps if step.isdecimal()] or [0]
    low, high = system_number(devfreq / "min_freq"), system_number(devfreq / "max_freq")
    return low or min(known), high or max(known)


def _mhz(hertz: int) -> int:
    return round(hertz / 1e6)


def _clock_sample(percent: float | None, text: str) -> Sample:
    return Sample(signal="gpu clock", value=percent, unit="%", text=text)


@dataclass(frozen=True, slots=True)
class _Zone:
    folder: Path
    celsius: float


def temperatures(root: Path = Path("/")) -> dict[str, float]:
    """Return °C by type of zone, of the hottest for each type; empty if the machine has none.

    Documentation/ABI/testing/sysfs-class-thermal.
    """
    return {kind: zone.celsius for kind, zone in _hottest(root).items()}


def thermal_samples(root: Path) -> list[Sample]:
    """Return the zones of GPU and chip, °C; `limit` is the lowest trip point of each."""
    hottest = _hottest(root)
    for words in (_FIRST, _OTHERS):
        named = [kind for kind in sorted(hottest) if any(word in kind.lower() for word in words)]
        if named:
            return [_sample(kind, hottest[kind]) for kind in named]
    return [Sample(signal="temperature", value=None, unit="°C", text="no thermal zone of a chip")]


def _hottest(root: Path) -> dict[str, _Zone]:
    """Return temperatures by type, without zones that are off, or whose driver has no answer now."""
    found: dict[str, _Zone] = {}
    for folder in entries(root / "sys/class/thermal"):
        kind, millidegrees = system_text(folder / "type"), system_number(folder / "temp")
        if not folder.name.startswith("thermal_zone") or not kind or millidegrees is None:
            continue
        if not _PLAUSIBLE[0] < millidegrees < _PLAUSIBLE[1]:
            continue
        celsius = millidegrees / 1000
        if kind not in found or celsius >= found[kind].celsius:
            found[kind] = _Zone(folder, celsius)
    return found


def _sample(kind: str, zone: _Zone) -> Sample:
    trip = _lowest_trip(zone.folder)
    return Sample(
        signal=f"temperature {kind}",
        value=zone.celsius,
        unit="°C",
        text=f"throttled at {trip:g} °C" if trip is not None else "no trip point",
        limit=trip,
    )


def _lowest_trip(zone: Path) -> float | None:
    """Return the lowest trip point that throttles, °C; those at or below 0 are not set."""
    trips: list[float] = []
    for file in entries(zone):
        if file.name.startswith("trip_point_") and file.name.endswith("_type"):
            at = system_number(file.with_name(file.name.removesuffix("_type") + "_temp"))
            if at is not None and 0 < at < _PLAUSIBLE[1] and system_text(file) in _THROTTLES:
                trips.append(at / 1000)
    return min(trips, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLoad:
    """The share of tuners and service in the machine's figures: percent of all cores, tasks for each core."""

    cpu_percent: float = 0.0
    load_per_core: float = 0.0


class OwnLoadMeter:
    """A meter of the CPU time of changing processes with their descendants, as decaying means.

    The means decay like the kernel's figures, so that both fade at the same pace when the work stops.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seconds: dict[int, float] = {}
        self._at: float | None = None
        self._load = 0.0  # Cores, mean of 60 s
        self._pressure = 0.0  # Cores, mean of 10 s

    def measure(self, pids: Collection[int], now: float) -> OwnLoad:
        """Return the share of these processes with all their descendants.

        `now` is in monotonic seconds. A process's time before its first measurement does not count.
        """
        seconds = tree_seconds(self._root, pids)
        passed = now - self._at if self._at is not None else 0.0
        if passed > 0:
            spent = sum(max(0.0, used - self._seconds.get(pid, used)) for pid, used in seconds.items())
            self._load = _decay(self._load, spent, passed, _LOAD_SECONDS)
            self._pressure = _decay(self._pressure, spent, passed, _PRESSURE_SECONDS)
        self._seconds, self._at = seconds, now
        count = cores(self._root)
        return OwnLoad(cpu_percent=100 * self._pressure / count, load_per_core=self._load / count)


def _decay(mean: float, spent: float, passed: float, over: float) -> float:
    kept = math.exp(-passed / over)
    return mean * kept + spent / passed * (1 - kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A reading of a signal; `value` is None if the machine does not show it, and `text` then says why.

    `limit` is the machine's own limit of this value, in the same unit.
    """

    signal: str
    value: float | None
    unit: str
    text: str
    limit: float | None = None


def value_text(value: float | None, unit: str) -> str:
    """Return a value with its unit as text; "-" if there is none."""
    if value is None:
        return "-"
    return f"{value:.4g}{'' if unit in ('%', '') else ' '}{unit}"
