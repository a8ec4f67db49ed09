"""Whether the machine runs on a battery (Documentation/ABI/testing/sysfs-class-power)."""

from __future__ import annotations

from pathlib import Path

from honed.machine import sysfs

from .readings import Sample


def power(root: Path) -> Sample:
    """1 while a battery of the machine discharges, else 0; batteries of mice and the like do not count."""
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
