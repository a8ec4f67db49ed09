"""Decides whether the machine is idle, from its signals, the time of day and the settings. No clock."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from honed.daemon.settings.schema import setting
from honed.protocol.errors import InvalidArgument
from honed.protocol.service import SignalReading

from .signals import OwnLoad, Sample, Verdict, value_text

TRIP_MARGIN = 5.0  # °C below the machine's own trip point
COOL_MARGIN = 5.0  # °C below the limit at which the machine counts as cool again
MAX_GAP = 20.0  # Maximum seconds between two readings that count as continuous
# Signals without settling time, as requests have their own quiet time.
_OF_THE_SERVICE = ("requests", "queue", "adding", "worker")
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The context of verdicts on samples.

    own: the share of the CPU of tuners and service. leased: a tuner may be using the GPU. was_idle: the
    machine counted as idle until now. minute: local time, minutes after midnight.
    """

    own: OwnLoad
    leased: bool
    was_idle: bool
    minute: int


def judge(samples: Iterable[Sample], settings: IdleSettings, context: Context) -> tuple[SignalReading, ...]:
    """Return each sample with its verdict, and the configured window."""
    known = list(samples)
    utilisation = any(sample.signal == "gpu" and sample.value is not None for sample in known)
    readings = [_judge(sample, settings, context, utilisation) for sample in known]
    return (*readings, _window(settings, context.minute))


def _judge(sample: Sample, settings: IdleSettings, context: Context, utilisation: bool) -> SignalReading:
    if sample.value is None:
        return _reading(sample, "absent")
    match sample.signal:
        case "requests":
            waits = sample.value < settings.quiet_seconds
            note = f"quiet after {settings.quiet_seconds:g} s"
            return _reading(sample, "busy", note) if waits else _reading(sample, "quiet")
        case "cpu pressure":
            return _at_most(sample, settings.max_pressure_percent, context.own.cpu_percent)
        case "memory pressure" | "io pressure":
            return _at_most(sample, settings.max_pressure_percent)
        case "load":
            return _at_most(sample, settings.max_load_per_core, context.own.load_per_core)
        case "gpu" | "gpu clock" if context.leased:
            return _reading(sample, "quiet", "not judged while a tuner uses it")
        case "gpu clock" if utilisation:
            return _reading(sample, "quiet", "not judged: its use is known")
        case "gpu" | "gpu clock":
            return _at_most(sample, settings.max_gpu_percent)
        case "power":
            return _reading(sample, "busy" if sample.value > 0 and not settings.on_battery else "quiet")
        case name if name.startswith("temperature"):
            trip = sample.limit if sample.limit is not None else math.inf
            bound = min(settings.max_temperature_c, trip - TRIP_MARGIN)
            return _at_most(sample, bound if context.was_idle else bound - COOL_MARGIN)
        case _:  # A count that must be 0
            return _reading(sample, "busy" if sample.value > 0 else "quiet")


def _at_most(sample: Sample, bound: float, own: float = 0.0) -> SignalReading:
    assert sample.value is not None
    notes = [f"our own {own:.2g} taken off"] if own >= 0.01 else []
    if sample.value - own > bound:
        return _reading(sample, "busy", *notes, f"busy above {bound:g}")
    return _reading(sample, "quiet", *notes)


def _window(settings: IdleSettings, minute: int) -> SignalReading:
    allowed = parse(settings.window)
    if allowed is None:
        anytime = Sample(signal="window", value=None, unit="", text="tuning at any time of day")
        return _reading(anytime, "absent")
    text = f"it is {minute // 60:02d}:{minute % 60:02d}; tuning at {settings.window}"
    sample = Sample(signal="window", value=float(minute), unit="min", text=text)
    return _reading(sample, "quiet" if allowed.holds(minute) else "busy")


def _reading(sample: Sample, verdict: Verdict, *notes: str) -> SignalReading:
    text = ", ".join((sample.text, *notes))
    return SignalReading(
        signal=sample.signal, value=sample.value, unit=sample.unit, verdict=verdict, text=text
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision made at `at` (monotonic seconds): `idle`, and the reason as a clause.

    quiet_since: the time since which the machine has been quiet, apart from the service's own requests; None
    while it is not.
    """

    idle: bool
    why: str
    at: float
    quiet_since: float | None


def decide(
    readings: Sequence[SignalReading], settings: IdleSettings, now: float, before: Decision | None = None
) -> Decision:
    """Return the decision at `now` (monotonic seconds) after the decision `before`.

    Busy counts at once; idle only when all signals of the machine were quiet for `settle_seconds`.
    """
    busy = [reading for reading in readings if reading.verdict == "busy"]
    quiet_since: float | None = None
    if all(reading.signal in _OF_THE_SERVICE for reading in busy):
        known = before is not None and 0 <= now - before.at <= MAX_GAP
        quiet_since = before.quiet_since if before is not None and known else None
        quiet_since = now if quiet_since is None else quiet_since
    why = _why_not(settings, busy, quiet_since, now)
    return Decision(idle=not why, why=why or "all signals are quiet", at=now, quiet_since=quiet_since)


def _why_not(
    settings: IdleSettings, busy: Sequence[SignalReading], quiet_since: float | None, now: float
) -> str:
    if not settings.enabled:
        return "tuning is switched off ([idle] enabled)"
    if busy:
        return "; ".join(
            f"{reading.signal} {value_text(reading.value, reading.unit)}: {reading.text}" for reading in busy
        )
    quiet = now - quiet_since if quiet_since is not None else 0.0
    if quiet < settings.settle_seconds:
        return f"all signals are quiet, but only for {quiet:.0f} of {settings.settle_seconds:g} s"
    return ""


@dataclass(frozen=True, slots=True)
class TimeOfDayWindow:
    """A window of local time from `start` to before `end`, in minutes after midnight; it may cross that."""

    start: int
    end: int

    def holds(self, minute: int) -> bool:
        """Return whether a minute of the day (0 to 1439) lies in the window."""
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end


def parse(text: str) -> TimeOfDayWindow | None:
    """Parse `22:00-06:30` as a window, "" as None: any time.

    Raises InvalidArgument with half a sentence for anything else.
    """
    if not text:
        return None
    first, dash, last = text.partition("-")
    times = [_TIME.fullmatch(part.strip()) for part in (first, last)]
    if not dash or None in times:
        raise InvalidArgument('give two times of day as "22:00-06:30", or "" for any time')
    start, end = (int(time[1]) * 60 + int(time[2]) for time in times if time)
    if start == end:
        raise InvalidArgument('give two times that differ as "22:00-06:30", or "" for any time')
    return TimeOfDayWindow(start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSettings:
    """The [idle] table: the bounds of the signals."""

    enabled: bool = setting("false: never tune", True)
    quiet_seconds: float = setting(
        "Time without a request before tuning may use the device", 30.0, unit="s", minimum=0
    )
    settle_seconds: float = setting(
        "Time for which all other signals must be quiet", 5.0, unit="s", minimum=0
    )
    max_pressure_percent: float = setting(
        "Share of the last 10 s in which some task waited for the CPU, memory or disk",
        10.0,
        unit="%",
        minimum=0,
    )
    max_load_per_core: float = setting("Load average of the last minute, for each core", 0.5, minimum=0)
    max_gpu_percent: float = setting(
        "GPU utilisation by others. Where only its clock is known: how far it is raised",
        10.0,
        unit="%",
        minimum=0,
    )
    max_temperature_c: float = setting(
        "Temperature of the GPU and the chip, at most 5 °C below their trip points",
        75.0,
        unit="°C",
        minimum=0,
    )
    on_battery: bool = setting("true: tune while a battery discharges", False)
    window: str = setting(
        'Local times between which tuning is allowed, "22:00-06:30". Empty: any time', "", check=parse
    )
    max_candidate_seconds: float = setting(
        "Longest time that a tuner may take to leave the device", 10.0, unit="s", minimum=0.1
    )
