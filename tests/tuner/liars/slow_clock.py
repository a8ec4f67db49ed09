"""A measuring child whose driver gives ticks of a 24 MHz counter for nanoseconds: faked, as no driver at
hand does that. Everything but the reading of events is the real child.
"""

from __future__ import annotations

from typing import Any

from honed.tuner.measure import child, timing
from honed.tuner.measure.checks import Launched


def ticks(event: Any) -> Launched:
    """The driver's reading in steps of 41.7 ns."""
    launched = timing.reading(event)
    return Launched(launched.status, launched.start * 24 // 1000, launched.end * 24 // 1000)


if __name__ == "__main__":
    child.main(read=ticks)
