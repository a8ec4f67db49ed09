"""What tuning has done so far, as tuners report it and the service tells it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Estimated seconds of one inference of a model when its tuning began, and now."""

    before_seconds: float
    now_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HintFigures:
    """Records of a hub by one key: how many were `taken`, and of the last weeks `tried` here and `failed`.

    One fails that is not right here, or far slower than it claims. `aside`: no more of them are tried.
    """

    taken: int
    tried: int
    failed: int
    aside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFigures:
    """Of the records of tuning: `trials` by outcome, `faults` (candidates in quarantine), `gains` by model,
    `hints` of a hub by the name of the key that signed them.

    `reason` is why they cannot be read; there are no figures then.
    """

    trials: dict[str, int]
    faults: int
    gains: dict[str, Gain]
    hints: dict[str, HintFigures] = field(default_factory=dict)
    reason: str = ""
