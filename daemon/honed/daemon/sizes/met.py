"""Which sizes parts of a model meet, and how often: a bounded count that decays. No I/O, no clocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from honed.daemon.core.decayedusage import DecayedUsage, make_room
from honed.protocol.results import MetSizes


class SizesMet:
    """What one model's parts were met in. Counts decay."""

    def __init__(self, known: Mapping[MetSizes, DecayedUsage] | None = None) -> None:
        self.known = dict(known or {})

    def meet(self, sizes: Iterable[MetSizes], now: float, half_life: float) -> None:
        """Count those of a request; what no form can be for, as nothing at all, is passed over."""
        for met in sizes:
            if not all(met.sizes):
                continue
            if met not in self.known:
                make_room(self.known, lambda each: each.value(now, half_life))
            self.known.setdefault(met, DecayedUsage()).add(1.0, now, half_life)

    def settle(self, now: float, half_life: float) -> None:
        """Let every count decay up to `now`; from here on another half-life may hold."""
        for each in self.known.values():
            each.settle(now, half_life)

    def counts(self, now: float, half_life: float) -> dict[MetSizes, float]:
        """How often each was met, by what counts now."""
        return {met: usage.value(now, half_life) for met, usage in self.known.items()}
