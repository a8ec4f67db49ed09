"""State that grows from run to run."""

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
