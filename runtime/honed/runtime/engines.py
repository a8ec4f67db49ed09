"""Decides which of two engines or programs runs a model, or a partition of one, from their times.

Runs in turns find the faster one, whatever other load the machine has meanwhile: the one rule for versions of
a model, for engines, for compiled partitions, and for what `hone tune` found.

It also has ONNX Runtime's optimisation levels and error messages, and the limits of a process that runs
partitions.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import comb
from typing import Any, Final

# Two equally fast programs: one look at the times finds one of them surely faster with this probability; all
# looks of a comparison together do so with less than 3 % (tests/runtime/test_comparison.py).
_CHANCE: Final = 1 / 512
MIN_PAIRS, MAX_PAIRS = 3, 60  # Pairs of runs
COMPARISON_SECONDS: Final = 5.0  # Total seconds that runs may take, once there are MIN_PAIRS pairs
TIE = 1.2  # A compiled model may be slower by this factor, as it leaves the processor to apps
Clock = Callable[[], int | None]  # Returns Hz, None if unknown
# ONNX Runtime's optimisation levels, highest first, with its own names of them.
LEVELS = {
    "all": "ORT_ENABLE_ALL",
    "layout": "ORT_ENABLE_LAYOUT",
    "extended": "ORT_ENABLE_EXTENDED",
    "basic": "ORT_ENABLE_BASIC",
    "none": "ORT_DISABLE_ALL",
}
HIGHEST, LOWEST = "all", "none"
PROVING_MIB = 1024  # Memory of the partitions' process while a model is verified after compiling, in MiB


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
    fewer than MIN_PAIRS other pairs exist when the comparison ends.

    No number of pairs can reveal load that slows one of the programs alone (one that runs on all cores,
    beside one that runs on a GPU): that takes a quiet machine.
    """

    allowance: float
    most: int = MAX_PAIRS
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
        if self.tried < MIN_PAIRS:
            return False
        taken = sum(map(sum, (*self.pairs, *self._uneven)))
        spent = self.tried >= self.most or taken >= COMPARISON_SECONDS
        return spent or (len(self.pairs) >= MIN_PAIRS and self.sure)

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
        return chances <= _CHANCE * 2.0**count

    def _within(self) -> tuple[int, int]:
        """Return the number of quieter pairs within the allowance, and the number of quieter pairs."""
        quiet = self._quiet()
        return sum(second <= self.allowance * first for first, second in quiet), len(quiet)

    def _quiet(self) -> list[tuple[float, float]]:
        pairs = self.pairs if len(self.pairs) >= MIN_PAIRS else [*self.pairs, *self._uneven]
        return sorted(pairs, key=sum)[: (len(pairs) + 1) // 2]


def allowance(*, same_cores: bool) -> float:
    """Return how many times as long as the CPU engine a compiled model may take and still serve.

    With `same_cores` (a processor under OpenCL) a compiled model frees no core for apps, so it must be as
    fast.
    """
    return 1.0 if same_cores else TIE


def can_compiled_serve(compiled: float, cpu: float, *, same_cores: bool) -> bool:
    """Return whether a compiled model is fast enough to serve, by its time and the CPU engine's."""
    return compiled <= allowance(same_cores=same_cores) * cpu


def session_options(onnxruntime: Any, threads: int, level: str, *, spinning: bool, arena: bool = True) -> Any:
    """Return SessionOptions of the module `onnxruntime` with which the CPU engine runs a model."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, LEVELS[level])
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = arena
    options.log_severity_level = 4
    # Threads wait actively within a run, and not after it, which would take the cores from apps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    return options


_MOST_SAID = 300  # Characters
_SOURCE = re.compile(r"(?:Status Message: )?(?:[^\s'\"]*/)?[\w.-]+\.(?:cc|cpp|cu|h|hpp|inl):\d+ ")
_NAME = re.compile(r"[\w~]+(?:\(\))? ")
_BEHIND_PARAMETERS = re.compile(r"(?: const| noexcept|::<lambda)|(?=\()| (?=\[with )")
_CONDITION = re.compile(r"^(?:(?!\. ).)*? was false\. (?=\S)")


def message_of(error: Exception) -> str:
    """Return the message of an error of ONNX Runtime on one line.

    Leaves out the prefix, the paths, functions and conditions of its source code, and sentences that would
    not end within _MOST_SAID characters.
    """
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from \S+ failed: ?", "", text)
    text = re.sub(r" Name:''", "", text)
    while found := _SOURCE.search(text):
        text = text[: found.start()] + _CONDITION.sub("", _without_function(text[found.end() :]))
    if len(text) > _MOST_SAID:
        whole = max(text.rfind(end, 0, _MOST_SAID) for end in (". ", "; "))
        text = text[:whole] if whole > 0 else text[:_MOST_SAID].rpartition(" ")[0] + " ..."
    return text.strip() or type(error).__name__


def _without_function(text: str) -> str:
    """Return the text after the function name, and its parameters if any, with which it begins."""
    name, parenthesis, _ = text.partition("(")
    if not parenthesis or "::" not in name or ". " in name:
        return _NAME.sub("", text, count=1)
    at = _closing_index(text, len(name))
    while found := _BEHIND_PARAMETERS.match(text, at):
        opening = next((n for n in range(found.end(), len(text)) if text[n] in "([<"), len(text))
        bracketed = not found.group() or found.group() in ("::<lambda", " ")
        at = _closing_index(text, opening) if bracketed else found.end()
    return text[at:].lstrip(" >")


def _closing_index(text: str, opening: int) -> int:
    """Return the index after the bracket that closes the one at `opening`, or the end of the text."""
    depth = 0
    for n in range(opening, len(text)):
        depth += (text[n] in "([") - (text[n] in ")]")
        if depth == 0:
            return n + 1
    return len(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLimits:
    """Limits of partitions: threads of one run (0: one for each big core) and memory in MiB (0: no limit)."""

    threads: int = 0
    memory_mib: int = 0


UNLIMITED = PartLimits()
