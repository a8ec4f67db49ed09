"""Comparison: which of two programs is faster, by runs in turns, whatever else the machine does meanwhile.

The one rule for versions of a model, for engines, for compiled parts, and for what `hone tune` found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb
from typing import Final

# Where both programs take equally long, one look at the times calls one of them surely faster with this
# probability; with all looks of a comparison that is below 3 % (tests/runtime/test_comparison.py).
CHANCE: Final = 1 / 512
LEAST, MOST = 3, 60  # Pairs of runs
Clock = Callable[[], int | None]  # In Hz, None where it is not known
SECONDS: Final = 5.0  # That the runs of a comparison may take together, beyond the least


@dataclass(slots=True)
class PairedTiming:
    """Pairs of runs, one of each program right after the other; times in seconds.

    The second program `within_allowance` where it takes at most `allowance` times as long as the first.

    Other work on a machine can only make a run longer, and it comes in bursts. So only the quieter half of
    the pairs counts: those whose two times have the lowest sum. In a pair of equally fast programs either run
    is the longer one with the same probability, whatever the load and whichever pairs are chosen by their
    sum. How often each is the longer one is therefore a sign test, which needs no model of the load.
    Every other pair begins with the second program, as a clock that drifts makes later runs longer.

    A pair whose runs the GPU did at two clocks says nothing of the programs and does not count, unless there
    are hardly others when the comparison has taken as long as it may.

    What load does to one of the programs alone (one that runs on all cores, beside one that runs on a GPU)
    no number of pairs can tell: that takes a quiet machine.
    """

    allowance: float
    most: int = MOST
    pairs: list[tuple[float, float]] = field(default_factory=list)
    _uneven: list[tuple[float, float]] = field(default_factory=list)  # At two clocks

    def add(self, first: float, second: float, clocks: tuple[int | None, int | None] = (None, None)) -> None:
        """Count one run of each; `clocks` are those of the GPU right after each, None where not known."""
        even = None in clocks or clocks[0] == clocks[1]
        (self.pairs if even else self._uneven).append((first, second))

    def take_turns(self, *runners: Callable[[], float], clock: Clock = lambda: None) -> PairedTiming:
        """Run both programs in turns until it is known whether the second holds; return this comparison.

        Each runner gives its seconds, and `clock` the GPU's clock after it. Raises what a runner raises.
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
        """How many pairs have run, those at two clocks among them."""
        return len(self.pairs) + len(self._uneven)

    @property
    def order(self) -> tuple[int, int]:
        """Which program the next pair runs first, 0 or 1, and which then."""
        return (1, 0) if self.tried % 2 else (0, 1)

    @property
    def done(self) -> bool:
        """Whether no more pairs are needed: it is sure, or has taken as long as it may."""
        if self.tried < LEAST:
            return False
        taken = sum(map(sum, (*self.pairs, *self._uneven)))
        spent = self.tried >= self.most or taken >= SECONDS
        return spent or (len(self.pairs) >= LEAST and self.sure)

    @property
    def times(self) -> tuple[float, float]:
        """The median of each program over the quieter half of the pairs."""
        quiet = self._quiet()
        first, second = (sorted(times)[(len(quiet) - 1) // 2] for times in zip(*quiet, strict=True))
        return first, second

    @property
    def within_allowance(self) -> bool:
        """Whether the second program takes at most `allowance` times as long as the first."""
        within, count = self._within()
        if 2 * within != count:
            return 2 * within > count
        first, second = self.times
        return second <= self.allowance * first

    @property
    def sure(self) -> bool:
        """Whether `within_allowance` is what more pairs would say, too."""
        within, count = self._within()
        fewer = min(within, count - within)
        chances: int = sum(comb(count, number) for number in range(fewer + 1))
        return chances <= CHANCE * 2.0**count

    def _within(self) -> tuple[int, int]:
        """Return how many of the quieter pairs have a fast enough second, and how many pairs these are."""
        quiet = self._quiet()
        return sum(second <= self.allowance * first for first, second in quiet), len(quiet)

    def _quiet(self) -> list[tuple[float, float]]:
        pairs = self.pairs if len(self.pairs) >= LEAST else [*self.pairs, *self._uneven]
        return sorted(pairs, key=sum)[: (len(pairs) + 1) // 2]
