"""Which steps of a plan depend on constants only, and so are run once, when the model is loaded."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from honed.runtime.compiled.model import Buffer
from honed.runtime.compiled.plan import Use
from honed.runtime.compiled.within import families, family_of

# What is prepared takes memory for as long as the model is loaded, where a step of each inference would have
# it in the arena for a moment. Packing keeps the size of its constants, and a wider type or rows padded to
# vectors at most double it; what grows more is broadcast, and as fast computed anew as read. Small tables are
# always prepared: to launch a kernel takes longer than to fill them.
_GROWTH = 2
_SMALL_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class PreparedRoom:
    """Bytes that all prepared buffers may take, each rounded up to a multiple of `alignment`."""

    nbytes: int
    alignment: int


def align(offset: int, to: int) -> int:
    """`offset` rounded up to a multiple of `to`."""
    return -(-offset // to) * to


def prepared_steps(
    steps: Sequence[Sequence[Use] | None], buffers: Sequence[Buffer], room: PreparedRoom
) -> frozenset[int]:
    """The numbers of the steps that read constants only, or what others of them wrote.

    A step is what it does with buffers, None for a host call, which is never prepared. Each prepared one
    writes scratch buffers that only such steps write, all of them before any other step reads, at most twice
    the bytes of the constants that they depend on, or 16 KiB, and there is `room` for all of them. Buffers
    share no memory yet but with those that they lie within, and such are never prepared.
    """
    shared = families(buffers)
    within = {n for n in range(len(buffers)) if family_of(buffers, n) in shared}
    chosen = {n: step for n, step in enumerate(steps) if step is not None}
    while True:
        refused = _refused(chosen, _changing(steps, chosen) | within, buffers, room)
        if not refused:
            return frozenset(chosen)
        chosen = {n: step for n, step in chosen.items() if n not in refused}


def _changing(steps: Sequence[Sequence[Use] | None], chosen: Container[int]) -> set[int]:
    """The buffers that do not hold one value in all inferences, were the chosen steps prepared.

    Other steps write them, or chosen ones do again after others have read them.
    """
    found, read = set[int](), set[int]()
    for n, step in enumerate(steps):
        for use in step or ():
            if use.writes and (n not in chosen or use.buffer in read):
                found.add(use.buffer)
        if n not in chosen:
            read.update(use.buffer for use in step or () if use.reads)
    return found


def _refused(
    chosen: Mapping[int, Sequence[Use]],
    changing: Container[int],
    buffers: Sequence[Buffer],
    room: PreparedRoom,
) -> set[int]:
    """Those of the chosen steps that cannot be prepared where the buffers in `changing` change."""
    behind = {n: frozenset({n}) for n, buffer in enumerate(buffers) if buffer.place == "constant"}
    left = room.nbytes
    refused = set()
    for n, step in chosen.items():
        read = [use.buffer for use in step if use.reads]
        written = [use.buffer for use in step if use.writes]
        constants = frozenset().union(*(behind.get(b, frozenset()) for b in (*read, *written)))
        allowed = max(_GROWTH * sum(buffers[b].nbytes for b in constants), _SMALL_BYTES)
        grown = sum(buffers[b].nbytes for b in written)
        taken = sum(align(buffers[b].nbytes, room.alignment) for b in written if b not in behind)
        if (
            all(b in behind for b in read)
            and all(buffers[b].place == "scratch" and b not in changing for b in written)
            and grown <= allowed
            and taken <= left
        ):
            left -= taken
            behind.update(dict.fromkeys(written, constants))
        else:
            refused.add(n)
    return refused
