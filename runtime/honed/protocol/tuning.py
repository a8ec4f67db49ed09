"""What tuning has done so far, as tuners report it and the service tells it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Estimated seconds of one inference of a model when its tuning began, and now."""

    before_seconds: float
    now_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFigures:
    """Of the records of tuning: `trials` by outcome, `faults` (candidates in quarantine), `gains` by model.

    `reason` is why they cannot be read; there are no figures then.
    """

    trials: dict[str, int]
    faults: int
    gains: dict[str, Gain]
    reason: str = ""
