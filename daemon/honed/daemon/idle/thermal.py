"""Temperatures of the chip, with the trip points at which the machine itself throttles."""

from __future__ import annotations

from pathlib import Path

from . import tree
from .readings import Sample

_FIRST = ("gpu", "soc", "package")  # zones that say most of a GPU beside a CPU; others only without them
_OTHERS = ("cpu", "core", "pkg", "center", "acpitz")
_PLAUSIBLE = (-40_000, 200_000)  # millidegrees; drivers report what they cannot measure outside
_THROTTLES = ("passive", "hot", "critical")  # not "active": a fan starts


def temperatures(root: Path) -> list[Sample]:
    """The zones of GPU and chip, °C; `limit` is the lowest trip point of each."""
    zones = tree.entries(root / "sys/class/thermal")
    named = [(zone, tree.read(zone / "type") or "") for zone in zones if zone.name.startswith("thermal_zone")]
    for words in (_FIRST, _OTHERS):
        hottest: dict[str, Sample] = {}
        for zone, kind in named:
            sample = _sample(zone, kind) if any(word in kind.lower() for word in words) else None
            if sample is not None and (sample.value or 0) >= (_value(hottest.get(kind))):
                hottest[kind] = sample
        if hottest:
            return [hottest[kind] for kind in sorted(hottest)]
    return [Sample(signal="temperature", value=None, unit="°C", text="no thermal zone of a chip")]


def _value(sample: Sample | None) -> float:
    return sample.value if sample is not None and sample.value is not None else float("-inf")


def _sample(zone: Path, kind: str) -> Sample | None:
    millidegrees = tree.number(zone / "temp")
    if millidegrees is None or not _PLAUSIBLE[0] < millidegrees < _PLAUSIBLE[1]:
        return None
    trip = _lowest_trip(zone)
    return Sample(
        signal=f"temperature {kind}",
        value=millidegrees / 1000,
        unit="°C",
        text=f"throttled at {trip:g} °C" if trip is not None else "no trip point",
        limit=trip,
    )


def _lowest_trip(zone: Path) -> float | None:
    """°C; trip points at or below 0 are not set."""
    trips: list[float] = []
    for file in tree.entries(zone):
        if file.name.startswith("trip_point_") and file.name.endswith("_type"):
            at = tree.number(file.with_name(file.name.removesuffix("_type") + "_temp"))
            if at is not None and 0 < at < _PLAUSIBLE[1] and tree.read(file) in _THROTTLES:
                trips.append(at / 1000)
    return min(trips, default=None)
