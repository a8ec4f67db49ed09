"""Which shapes a model is asked for, and how often: a bounded count that decays. No I/O, no clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from honed.daemon.core.decayedusage import DecayedUsage, make_room
from honed.daemon.store.names import Shapes


@dataclass(slots=True, kw_only=True)
class AskedShapes:
    """Shapes of all inputs; `requests` decay.

    `failed` is why they could not be compiled, under what `under` says, or "".
    """

    shapes: Shapes
    requests: DecayedUsage = field(default_factory=DecayedUsage)
    failed: str = ""
    under: str = ""


class ShapeRequests:
    """What one model is asked for, by the name of the variant that it would be."""

    def __init__(self, known: Mapping[str, AskedShapes] | None = None) -> None:
        self.known = dict(known or {})

    def ask(self, name: str, shapes: Shapes, now: float, half_life: float) -> None:
        """Count a request."""
        self._get(name, shapes, now, half_life).requests.add(1.0, now, half_life)

    def fail(self, name: str, shapes: Shapes, reason: str, under: str, now: float, half_life: float) -> None:
        """Remember that they could not be compiled, and with what."""
        found = self._get(name, shapes, now, half_life)
        found.failed, found.under = reason, under

    def settle(self, now: float, half_life: float) -> None:
        """Let every count decay up to `now`; from here on another half-life may hold."""
        for each in self.known.values():
            each.requests.settle(now, half_life)

    def _get(self, name: str, shapes: Shapes, now: float, half_life: float) -> AskedShapes:
        found = self.known.get(name)
        if found is None:
            make_room(self.known, lambda each: each.requests.value(now, half_life))
            found = self.known[name] = AskedShapes(shapes=dict(shapes))
        return found
