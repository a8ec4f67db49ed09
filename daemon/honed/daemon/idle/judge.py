"""From samples to verdicts, and to whether the machine is idle, by the bounds of [idle].

Pure: times are arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from honed.protocol.service import SignalReading

from . import window
from .own import Own
from .readings import Sample, Verdict, value_text
from .settings import IdleSettings

TRIP_MARGIN = 5.0  # °C below the machine's own trip point
COOL_MARGIN = 5.0  # °C below the bound that it must get before it counts as cool again
MAX_GAP = 20.0  # seconds between two looks, after which nothing is known of the time between
# Judged without settling: requests have a quiet time of their own.
_OF_THE_SERVICE = ("requests", "queue", "adding", "worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What the verdicts depend on besides the samples.

    own: the share of the CPU of tuners and service. leased: a tuner may be using the GPU. was_idle: the
    machine counted as idle until now. minute: local time, minutes after midnight.
    """

    own: Own
    leased: bool
    was_idle: bool
    minute: int


def judge(samples: Iterable[Sample], settings: IdleSettings, context: Context) -> tuple[SignalReading, ...]:
    """Each sample with its verdict, and the configured window."""
    known = list(samples)
    utilisation = any(sample.signal == "gpu" and sample.value is not None for sample in known)
    readings = [_judged(sample, settings, context, utilisation) for sample in known]
    return (*readings, _window(settings, context.minute))


def _judged(sample: Sample, settings: IdleSettings, context: Context, utilisation: bool) -> SignalReading:
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
            return _cool(sample, settings, context.was_idle)
        case _:  # counts of what must be none
            return _reading(sample, "busy" if sample.value > 0 else "quiet")


def _at_most(sample: Sample, bound: float, own: float = 0.0) -> SignalReading:
    assert sample.value is not None
    notes = [f"our own {own:.2g} taken off"] if own >= 0.01 else []
    if sample.value - own > bound:
        return _reading(sample, "busy", *notes, f"busy above {bound:g}")
    return _reading(sample, "quiet", *notes)


def _cool(sample: Sample, settings: IdleSettings, was_idle: bool) -> SignalReading:
    assert sample.value is not None
    bound = settings.max_temperature_c
    if sample.limit is not None:
        bound = min(bound, sample.limit - TRIP_MARGIN)
    if not was_idle:
        bound -= COOL_MARGIN
    if sample.value > bound:
        return _reading(sample, "busy", f"busy above {bound:g}")
    return _reading(sample, "quiet")


def _window(settings: IdleSettings, minute: int) -> SignalReading:
    allowed = window.parse(settings.window)
    if allowed is None:
        return SignalReading(
            signal="window", value=None, unit="", verdict="absent", text="tuning at any time of day"
        )
    return SignalReading(
        signal="window",
        value=float(minute),
        unit="min",
        verdict="quiet" if allowed.holds(minute) else "busy",
        text=f"it is {window.clock_text(minute)}; tuning at {settings.window}",
    )


def _reading(sample: Sample, verdict: Verdict, *notes: str) -> SignalReading:
    text = ", ".join((sample.text, *notes))
    return SignalReading(
        signal=sample.signal, value=sample.value, unit=sample.unit, verdict=verdict, text=text
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """`idle`, and why as half a sentence; taken at `at`.

    quiet_since: since when the machine has been quiet as far as was seen, apart from the service's own
    requests; None while it is not.
    """

    idle: bool
    why: str
    at: float
    quiet_since: float | None


def decide(
    readings: Sequence[SignalReading], settings: IdleSettings, now: float, before: Decision | None = None
) -> Decision:
    """The decision at `now` (seconds of a steady clock), given the one before.

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
