"""Whether the machine is idle, from the verdicts. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from honed.protocol.service import SignalReading

from .readings import value_text
from .settings import IdleSettings

MAX_GAP = 20.0  # seconds between two looks, after which nothing is known of the time between
# Judged without settling: requests have a quiet time of their own.
_OF_THE_SERVICE = ("requests", "queue", "adding", "worker")


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
