"""Where the wall clock's seconds of a search go. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

# Phases of a measurement, as the measuring child announces them. Some drivers compile at the first launch.
_BUILDING, _TIMING = ("build", "first"), ("time",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds by what was waited for; what goes on beside something else does not count twice."""

    search: float = 0.0  # proposing, lowering and learning
    build: float = 0.0  # the driver's compiler, and the first launch
    check: float = 0.0  # runs on other inputs, comparisons, the kernel log
    measure: float = 0.0  # timing

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            search=self.search + other.search,
            build=self.build + other.build,
            check=self.check + other.check,
            measure=self.measure + other.measure,
        )

    def with_search(self, seconds: float) -> Spent:
        """So much more was spent waiting for the search."""
        return replace(self, search=self.search + seconds)

    def with_candidate(self, phases: Mapping[str, float], seconds: float) -> Spent:
        """A candidate took `seconds` altogether; `phases` is `Measurer.spent` of it."""
        build = sum(phases.get(phase, 0.0) for phase in _BUILDING)
        timing = sum(phases.get(phase, 0.0) for phase in _TIMING)
        rest = max(0.0, seconds - build - timing)
        return self + Spent(build=build, check=rest, measure=timing)

    def plain(self) -> dict[str, float]:
        """For events: seconds by name."""
        named = {"search": self.search, "build": self.build, "check": self.check, "measure": self.measure}
        return {name: round(seconds, 3) for name, seconds in named.items()}
