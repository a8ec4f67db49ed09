"""State that grows from run to run, of one sequence or of several that are run as one."""

from __future__ import annotations

from typing import NamedTuple


class Growth(NamedTuple):
    """Values that grow along an axis: the input that has those so far, and the output with new ones.

    New ones are last in the output, or where it is as long as the input, behind those so far: perhaps in the
    same buffer, to which then nothing is copied.
    """

    input: str
    output: str
    axis: int


class Slot(NamedTuple):
    """Which of `of` sequences one is that lie one behind the other along the first axis of what grows."""

    at: int
    of: int

    def within(self, size: int) -> slice:
        """Return its part of a first axis of that size."""
        part = size // self.of
        return slice(self.at * part, (self.at + 1) * part)
