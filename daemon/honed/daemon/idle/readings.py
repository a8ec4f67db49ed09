"""What a signal shows, and what that means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["quiet", "busy", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A signal as it was read. `value` is None where this machine does not show it; `text` then says why.

    `limit`: a bound the machine itself names for this value, in the same unit.
    """

    signal: str
    value: float | None
    unit: str
    text: str
    limit: float | None = None


def value_text(value: float | None, unit: str) -> str:
    """A value with its unit for people; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:.4g}{'' if unit in ('%', '') else ' '}{unit}"
