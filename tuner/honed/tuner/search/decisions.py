"""The numbers drawn in a schedule, apart from its steps: traces as values that can be changed. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

_POSTPROCESSING = "EnterPostproc"  # what follows was added to the draw, and is added to the next one anew
# Steps that look blocks up or inline them: how many there are depends on what is fused around the main block.
_AROUND = frozenset({"GetSBlock", "GetChildBlocks", "GetConsumers", "GetProducers", "GetLoops"}) | {
    "ComputeInline",
    "ReverseComputeInline",
}


@dataclass(frozen=True, slots=True)
class Tile:
    """A loop's extent as a product of factors, the outermost first."""

    factors: tuple[int, ...]
    most: int  # that the innermost may be

    @property
    def extent(self) -> int:
        """Of the loop."""
        return math.prod(self.factors)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several options, by its place among them."""

    index: int
    options: int


Decision = Tile | Choice


@dataclass(frozen=True, slots=True)
class Drawn:
    """A schedule's steps, and the decisions in them by the place of the step that made each."""

    steps: tuple[Any, ...]
    decisions: Mapping[int, Decision]

    @property
    def form(self) -> tuple[tuple[str, int], ...]:
        """What schedules of the same kind of function have in common, whatever its sizes and what is inlined.

        The names of the steps, with the number of factors of each tile.
        """
        return tuple(
            (name, self._parts(n))
            for n, step in enumerate(self.steps)
            if (name := str(step[0])) not in _AROUND
        )

    def with_decisions(self, changed: Mapping[int, Decision]) -> Drawn:
        """The same steps with some decisions changed."""
        return replace(self, decisions=MappingProxyType({**self.decisions, **changed}))

    def text(self) -> str:
        """The trace as `traces.apply` plays it."""
        made = [[n, _plain(decision)] for n, decision in sorted(self.decisions.items())]
        return json.dumps([self.steps, made], separators=(",", ":"))

    def _parts(self, place: int) -> int:
        decision = self.decisions.get(place)
        return len(decision.factors) if isinstance(decision, Tile) else 0


def read(text: str) -> Drawn:
    """Take a trace of `traces.to_text` apart, without what was added after the draw.

    Raises ValueError for what is none. Decisions of other kinds than tiles and choices are drawn anew when
    it is played.
    """
    try:
        steps, made = json.loads(text)
        names = [str(step[0]) for step in steps]
        end = names.index(_POSTPROCESSING) if _POSTPROCESSING in names else len(names)
        found = {int(n): _decision(steps[n], decision) for n, decision in made if n < end}
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"this is no trace of a schedule: {text[:60]}") from error
    decisions = {n: decision for n, decision in found.items() if decision is not None}
    return Drawn(tuple(steps[:end]), MappingProxyType(decisions))


def _decision(step: Any, made: Any) -> Decision | None:
    name, _, attributes, _ = step
    if name == "SamplePerfectTile":
        factors = tuple(int(factor) for factor in made)
        most = int(attributes[1])
        return Tile(factors, most if most > 0 else math.prod(factors))
    if name == "SampleCategorical":
        return Choice(int(made), len(attributes[0]))
    return None


def _plain(decision: Decision) -> int | list[int]:
    return list(decision.factors) if isinstance(decision, Tile) else decision.index
