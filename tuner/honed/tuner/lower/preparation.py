"""Which steps of a plan depend on constants only, and so are run once, when the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from honed.runtime.model import Buffer, HostCall, Kernel, Preparation, Step
from honed.runtime.plan import uses

# What is prepared takes memory for as long as the model is loaded, where a step of each inference would have
# it in the arena for a moment. Packing keeps the size of its constants, and a wider type or rows padded to
# vectors at most double it; what grows more is broadcast, and as fast computed anew as read. Small tables are
# always prepared: to launch a kernel takes longer than to fill them.
_GROWTH = 2
_SMALL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that all prepared buffers may take, each rounded up to a multiple of `alignment`."""

    nbytes: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Divided:
    """Steps by when they run, in their order, and the scratch buffers that become prepared ones."""

    prepare: tuple[Preparation, ...]
    steps: tuple[Step, ...]
    prepared: tuple[int, ...]


def align(offset: int, to: int) -> int:
    """`offset` rounded up to a multiple of `to`."""
    return -(-offset // to) * to


def divide(
    steps: Sequence[Step], buffers: Sequence[Buffer], kernels: Sequence[Kernel], room: Room
) -> Divided:
    """Have launches and copies prepared that read constants only, or what others of them wrote.

    Each writes scratch buffers that only such steps write, at most twice the bytes of the constants that they
    depend on, or 16 KiB, and there is `room` for all of them. Every buffer still stands for one value: none
    shares memory with another yet.
    """
    chosen = {n for n, step in enumerate(steps) if not isinstance(step, HostCall)}
    while refused := _refused(chosen, steps, buffers, kernels, room):
        chosen -= refused
    prepare = [step for n, step in enumerate(steps) if n in chosen and not isinstance(step, HostCall)]
    written = dict.fromkeys(use.buffer for step in prepare for use in uses(kernels, step) if use.writes)
    return Divided(
        prepare=tuple(prepare),
        steps=tuple(step for n, step in enumerate(steps) if n not in chosen),
        prepared=tuple(written),
    )


def _refused(
    chosen: set[int], steps: Sequence[Step], buffers: Sequence[Buffer], kernels: Sequence[Kernel], room: Room
) -> set[int]:
    """Those of the chosen steps that cannot be prepared as long as only the chosen are."""
    behind = {n: frozenset({n}) for n, buffer in enumerate(buffers) if buffer.place == "constant"}
    later = {
        use.buffer
        for n, step in enumerate(steps)
        if n not in chosen
        for use in uses(kernels, step)
        if use.writes
    }
    left = room.nbytes
    refused = set()
    for n in sorted(chosen):
        found = list(uses(kernels, steps[n]))
        read = [use.buffer for use in found if use.reads]
        written = [use.buffer for use in found if use.writes]
        constants = frozenset().union(*(behind.get(b, frozenset()) for b in (*read, *written)))
        allowed = max(_GROWTH * sum(buffers[b].nbytes for b in constants), _SMALL_BYTES)
        grown = sum(buffers[b].nbytes for b in written)
        taken = sum(align(buffers[b].nbytes, room.alignment) for b in written if b not in behind)
        if (
            all(b in behind for b in read)
            and all(buffers[b].place == "scratch" and b not in later for b in written)
            and grown <= allowed
            and taken <= left
        ):
            left -= taken
            behind.update(dict.fromkeys(written, constants))
        else:
            refused.add(n)
    return refused
