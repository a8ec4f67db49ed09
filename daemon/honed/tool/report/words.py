"""How the page says what several of its parts say."""

from __future__ import annotations

from datetime import datetime
from xml.etree.ElementTree import Element

from .markup import badge, element

QUANTILES = ("p50", "p95", "p99", "longest")
_TIMES = "\N{MULTIPLICATION SIGN}"
_STATES = {"READY": "good", "UNAVAILABLE": "bad", "FAILED": "bad", "ready": "good"}


def day(seconds: float) -> str:
    """A moment of local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def moment(seconds: float) -> Element:
    """The same, for a table."""
    iso = datetime.fromtimestamp(seconds).astimezone().isoformat("T", "seconds")
    return element("time", day(seconds), datetime=iso)


def gain_text(gain: float | None) -> str:
    """How many times as fast, as in 1.42."""
    if gain is None:
        return "-"
    return f"{gain:,.0f}{_TIMES}" if gain >= 100 else f"{gain:.2f}{_TIMES}"


def state_badge(state: str) -> Element:
    """A state in its colour, and in words."""
    return badge(state.lower(), _STATES.get(state, "warn"))
