"""Where the wall clock's seconds of a candidate go. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from honed.jobs.events import Spent

# Phases of a measurement, as the measuring child announces them. Some drivers compile at the first launch.
_BUILDING, _TIMING = ("build", "first"), ("time",)


def on_candidate(phases: Mapping[str, float], seconds: float) -> Spent:
    """A candidate took `seconds` altogether; `phases` is `Measurer.spent` of it."""
    build = sum(phases.get(phase, 0.0) for phase in _BUILDING)
    timing = sum(phases.get(phase, 0.0) for phase in _TIMING)
    return Spent(build=build, check=max(0.0, seconds - build - timing), measure=timing)
