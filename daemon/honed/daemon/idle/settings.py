"""What counts as idle: the [idle] table of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from honed.daemon.settings.sections import setting

from . import window


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSettings:
    """Bounds with their defaults; docs/idle.md says what is read and compared with them.

    enabled: whether tuning is allowed at all.
    quiet_seconds: without any request before the device may be used for tuning.
    settle_seconds: that all other signals must have been quiet before; busy counts at once.
    max_pressure_percent: of the last ten seconds in which some task waited for the CPU, memory or disk.
    max_load_per_core: runnable and waiting tasks, mean of the last minute, for each core.
    max_gpu_percent: share of time that the GPU is used by others; also how far its clock may be raised.
    max_temperature_c: of the GPU or the chip, degrees Celsius.
    on_battery: whether tuning goes on while a battery discharges.
    window: local times between which tuning is allowed, "22:00-06:30"; "" for any time.
    max_candidate_seconds: the longest time that a tuner may ask for to leave the device.
    """

    enabled: bool = setting(True)
    quiet_seconds: float = setting(30.0, unit="s", minimum=0)
    settle_seconds: float = setting(5.0, unit="s", minimum=0)
    max_pressure_percent: float = setting(10.0, unit="%", minimum=0)
    max_load_per_core: float = setting(0.5, minimum=0)
    max_gpu_percent: float = setting(10.0, unit="%", minimum=0)
    max_temperature_c: float = setting(75.0, unit="°C", minimum=0)
    on_battery: bool = setting(False)
    window: str = setting("", check=window.parse)
    max_candidate_seconds: float = setting(10.0, unit="s", minimum=0.1)
