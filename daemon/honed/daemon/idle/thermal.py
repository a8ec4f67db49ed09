"""Temperatures as the kernel tells them (Documentation/ABI/testing/sysfs-class-thermal).

Of the chip's zones also the trip points at which the machine itself throttles.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from honed.machine import sysfs

from .readings import Sample

_FIRST = ("gpu", "soc", "package")  # zones that say most of a GPU beside a CPU; others only without them
_OTHERS = ("cpu", "core", "pkg", "center", "acpitz")
_PLAUSIBLE = (-40_000, 200_000)  # millidegrees; drivers report what they cannot measure outside
_THROTTLES = ("passive", "hot", "critical")  # not "active": a fan starts


@dataclass(frozen=True, slots=True)
class _Zone:
    folder: Path
    celsius: float


def temperatures(root: Path = Path("/")) -> dict[str, float]:
    """°C by type of zone; of zones of one type the hottest. Empty where the machine has none."""
    return {kind: zone.celsius for kind, zone in _hottest(root).items()}


def samples(root: Path) -> list[Sample]:
    """The zones of GPU and chip, °C; `limit` is the lowest trip point of each."""
    hottest = _hottest(root)
    for words in (_FIRST, _OTHERS):
        named = [kind for kind in sorted(hottest) if any(word in kind.lower() for word in words)]
        if named:
            return [_sample(kind, hottest[kind]) for kind in named]
    return [Sample(signal="temperature", value=None, unit="°C", text="no thermal zone of a chip")]


def _hottest(root: Path) -> dict[str, _Zone]:
    """Temperatures by type; zones that are off, or whose driver has no answer now, are left out."""
    found: dict[str, _Zone] = {}
    for folder in sysfs.entries(root / "sys/class/thermal"):
        kind, millidegrees = sysfs.read(folder / "type"), sysfs.number(folder / "temp")
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
    """°C; trip points at or below 0 are not set."""
    trips: list[float] = []
    for file in sysfs.entries(zone):
        if file.name.startswith("trip_point_") and file.name.endswith("_type"):
            at = sysfs.number(file.with_name(file.name.removesuffix("_type") + "_temp"))
            if at is not None and 0 < at < _PLAUSIBLE[1] and sysfs.read(file) in _THROTTLES:
                trips.append(at / 1000)
    return min(trips, default=None)
