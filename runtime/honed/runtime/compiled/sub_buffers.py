"""Checks buffers that lie within others: where they may lie, and which shared bytes steps may touch.

A buffer with all that lie within it is a family. No byte of a family is written through two buffers, and each
byte is written before it is read.

The other modules of rules, too, report broken ones with `require`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from honed.protocol.errors import ModelFileError

from .model import Buffer, Place

_PLACES: tuple[Place, ...] = ("input", "output", "scratch")


def family_of(buffers: Sequence[Buffer], index: int) -> int:
    """Return the index of the buffer that holds a buffer's memory: another, or itself."""
    within = buffers[index].within
    return index if within is None else within


def bytes_of(buffers: Sequence[Buffer], index: int) -> range:
    """Return the byte range of a buffer, counted from the start of its family."""
    buffer = buffers[index]
    start = 0 if buffer.within is None else buffer.offset
    return range(start, start + buffer.nbytes)


def share_bytes(buffers: Sequence[Buffer], one: int, other: int) -> bool:
    """Return whether two buffers are the same, or overlap within one family."""
    if one == other:
        return True
    mine, yours = bytes_of(buffers, one), bytes_of(buffers, other)
    alike = family_of(buffers, one) == family_of(buffers, other)
    return alike and mine.start < yours.stop and yours.start < mine.stop


def families(buffers: Sequence[Buffer]) -> frozenset[int]:
    """Return the indices of buffers that others lie within."""
    return frozenset(b.within for b in buffers if b.within is not None)


def check_declared(buffers: Sequence[Buffer], align: int) -> None:
    """Raise ModelFileError unless each buffer declared to lie within another may, and does.

    `align` is the device's alignment of sub-buffers in bytes.
    """
    for i, buffer in enumerate(buffers):
        if buffer.within is None:
            continue
        where = f"buffer {i} lies within buffer {buffer.within}"
        require(0 <= buffer.within < len(buffers), f"{where}, which does not exist")
        outer = buffers[buffer.within]
        require(outer.within is None, f"{where}, which itself lies within another")
        alike = buffer.place == outer.place and buffer.place in _PLACES
        require(alike, f"{where}, and they are of the places {buffer.place} and {outer.place}")
        require(buffer.dtype == outer.dtype, f"{where}, and they are {buffer.dtype} and {outer.dtype}")
        require(buffer.nbytes > 0, f"{where} and has no bytes")
        aligned = buffer.offset >= 0 and buffer.offset % align == 0
        require(aligned, f"{where} at offset {buffer.offset}, no multiple of {align}")
        end = buffer.offset + buffer.nbytes
        require(end <= outer.nbytes, f"{where}, which has {outer.nbytes} bytes, and ends at {end}")


def check_writers(buffers: Sequence[Buffer], written: Iterable[int]) -> None:
    """Raise ModelFileError where two of the buffers that steps write overlap within one family."""
    spans = sorted((family_of(buffers, i), bytes_of(buffers, i).start, i) for i in set(written))
    for (one, _, i), (other, start, j) in pairwise(spans):
        if one == other and start < bytes_of(buffers, i).stop:
            raise fail(f"steps write buffers {i} and {j}, which share bytes of buffer {one}")


def overlap(buffers: Sequence[Buffer], touched: Iterable[tuple[int, bool]]) -> tuple[int, int] | None:
    """Return two buffers of one family that overlap, one of them written; None without such buffers.

    `touched` are the buffers of a step, each once, and whether it writes them.
    """
    spans = sorted((family_of(buffers, i), bytes_of(buffers, i).start, i, writes) for i, writes in touched)
    furthest: dict[bool, tuple[int, int]] = {}  # Largest end so far, by `writes`, and its buffer
    family = -1
    for root, start, index, writes in spans:
        if root != family:
            family, furthest = root, {}
        for other in (True, False) if writes else (True,):
            if other in furthest and start < furthest[other][0]:
                return furthest[other][1], index
        end = bytes_of(buffers, index).stop
        furthest[writes] = max(furthest.get(writes, (end, index)), (end, index))
    return None


@dataclass()
class WrittenBytes:
    """The written bytes as sorted ranges: `starts[n]` to `ends[n]`."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, span: range) -> None:
        """Add a range of written bytes."""
        first, last = bisect_left(self.ends, span.start), bisect_right(self.starts, span.stop)
        start, end = min([span.start, *self.starts[first:last]]), max([span.stop, *self.ends[first:last]])
        self.starts[first:last], self.ends[first:last] = [start], [end]

    def covers(self, span: range) -> bool:
        """Return whether all bytes of a range were written."""
        at = bisect_right(self.starts, span.start) - 1
        return at >= 0 and span.stop <= self.ends[at]


def fail(problem: str) -> ModelFileError:
    """Return the error for a model that breaks a rule."""
    return ModelFileError(f"{problem}; compile the model again")


def require(condition: bool, problem: str) -> None:
    """Raise the error of `fail` if the condition is false."""
    if not condition:
        raise fail(problem)


def check_there(where: str, what: str, number: int, of: Sequence[object]) -> None:
    """Raise ModelFileError unless `number` is the index of an item of `of`."""
    if not 0 <= number < len(of):
        raise fail(f"{where} names {what} {number}, which does not exist")
