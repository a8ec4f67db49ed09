"""A measuring child whose driver reports END before START: faked, as no driver at hand does that on
request. Everything but the reading of events is the real child.
"""

from __future__ import annotations

from typing import Any

from honed.tuner.measure import child, timing
from honed.tuner.measure.checks import Launched


def backwards(event: Any) -> Launched:
    """The driver's reading with the ends exchanged."""
    launched = timing.reading(event)
    return Launched(launched.status, launched.end, launched.start)


if __name__ == "__main__":
    child.main(read=backwards)
