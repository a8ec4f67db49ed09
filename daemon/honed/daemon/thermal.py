"""Temperatures as the kernel tells them (Documentation/ABI/testing/sysfs-class-thermal)."""

from __future__ import annotations

from pathlib import Path

_LOWEST, _HIGHEST = -100.0, 300.0  # degrees Celsius; sensors that are off tell what lies outside


def temperatures(root: Path = Path("/")) -> dict[str, float]:
    """Degrees Celsius by sensor; of zones of one type the hottest. Empty where the machine has none."""
    found: dict[str, float] = {}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        try:
            kind = (zone / "type").read_text(errors="replace").strip()
            celsius = int((zone / "temp").read_text()) / 1000
        except (OSError, ValueError):  # the zone is disabled, or its driver has no answer now
            continue
        if kind and _LOWEST < celsius < _HIGHEST:
            found[kind] = max(celsius, found.get(kind, celsius))
    return found
