"""A measuring child whose driver reports half the time that kernels take: faked, as no driver at hand does
that. Everything but the reading of events is the real child.
"""

from __future__ import annotations

from typing import Any

from honed.tuner.measure import child, timing
from honed.tuner.measure.checks import Launched


def halved(event: Any) -> Launched:
    """The driver's reading, ending half-way."""
    launched = timing.reading(event)
    return Launched(launched.status, launched.start, (launched.start + launched.end + 1) // 2)


if __name__ == "__main__":
    child.main(read=halved)
