"""Finds which of two programs is faster, by runs in turns, whatever other load the machine has meanwhile.

The one rule for versions of a model, for engines, for compiled partitions, and for what `hone tune` found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb
from typing import Final

# Two equally fast programs: one look at the times finds one of them surely faster with this probability; all
# looks of a comparison together do so with less than 3 % (tests/runtime/test_comparison.py).
CHANCE: Final = 1 / 512
LEAST, MOST = 3, 60  # Pairs of runs
Clock = Callable[[], int | None]  # Returns Hz, None if unknown
SECONDS: Final = 5.0  # Total seconds that the runs of a comparison may take, once there are LEAST pairs


@dataclass(slots=True)
class PairedTiming:
    """Pairs of runs, one of each program right after the other; times in seconds.

    The second program is `within_allowance` if it takes at most `allowance` times as long as the first.

    Other work on a machine can only make a run longer, and it comes in bursts. So only the quieter half of
    the pairs counts: those whose two times have the lowest sum. In a pair of equally fast programs either run
    is the longer one with the same probability, whatever the load and whichever pairs are chosen by their
    sum. How often each is the longer one is therefore a sign test, which needs no model of the load. Every
    other pair begins with the second program, as a clock that drifts makes later runs longer.

    A pair whose runs the GPU did at two clocks does not count, as it says nothing of the programs, unless
    fewer than LEAST other pairs exist when the comparison ends.

    No number of pairs can reveal load that slows one of the programs alone (one that runs on all cores,
    beside one that runs on a GPU): that takes a quiet machine.
    """

    allowance: float
    most: int = MOST
    pairs: list[tuple[float, float]] = field(default_factory=list)
    _uneven: list[tuple[float, float]] = field(default_factory=list)  # Pairs whose runs had two clocks

    def add(self, first: float, second: float, clocks: tuple[int | None, int | None] = (None, None)) -> None:
        """Count one run of each program; `clocks` are the GPU's right after each in Hz, None if unknown."""
        even = None in clocks or clocks[0] == clocks[1]
        (self.pairs if even else self._uneven).append((first, second))

    def take_turns(self, *runners: Callable[[], float], clock: Clock = lambda: None) -> PairedTiming:
        """Run both programs in turns until `within_allowance` is decided; return this comparison.

        Each runner returns its seconds, and `clock` the GPU's clock after it. Raises what a runner raises.
        """
        while not self.done:
            seconds, clocks = [0.0, 0.0], list[int | None]((None, None))
            for which in self.order:
                seconds[which] = runners[which]()
                clocks[which] = clock()
            self.add(seconds[0], seconds[1], (clocks[0], clocks[1]))
        return self

    @property
    def tried(self) -> int:
        """The number of pairs run, including those at two clocks."""
        return len(self.pairs) + len(self._uneven)

    @property
    def order(self) -> tuple[int, int]:
        """The order of the programs in the next pair: (0, 1) or (1, 0)."""
        return (1, 0) if self.tried % 2 else (0, 1)

    @property
    def done(self) -> bool:
        """Return whether no more pairs are needed: the result is sure, or pairs or time are used up."""
        if self.tried < LEAST:
            return False
        taken = sum(map(sum, (*self.pairs, *self._uneven)))
        spent = self.tried >= self.most or taken >= SECONDS
        return spent or (len(self.pairs) >= LEAST and self.sure)

    @property
    def times(self) -> tuple[float, float]:
        """The median time in seconds of each program over the quieter half of the pairs."""
        quiet = self._quiet()
        first, second = (sorted(times)[(len(quiet) - 1) // 2] for times in zip(*quiet, strict=True))
        return first, second

    @property
    def within_allowance(self) -> bool:
        """Return whether the second program takes at most `allowance` times as long as the first.

        Both the pairs and the medians must say so: where they disagree, the difference is noise.
        """
        within, count = self._within()
        first, second = self.times
        return 2 * within >= count and second <= self.allowance * first

    @property
    def sure(self) -> bool:
        """Return whether more pairs would surely leave `within_allowance` as it is."""
        within, count = self._within()
        fewer = min(within, count - within)
        chances: int = sum(comb(count, number) for number in range(fewer + 1))
        return chances <= CHANCE * 2.0**count

    def _within(self) -> tuple[int, int]:
        """Return the number of quieter pairs within the allowance, and the number of quieter pairs."""
        quiet = self._quiet()
        return sum(second <= self.allowance * first for first, second in quiet), len(quiet)

    def _quiet(self) -> list[tuple[float, float]]:
        pairs = self.pairs if len(self.pairs) >= LEAST else [*self.pairs, *self._uneven]
        return sorted(pairs, key=sum)[: (len(pairs) + 1) // 2]
