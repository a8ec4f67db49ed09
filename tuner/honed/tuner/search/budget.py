"""Estimates the least registers that a schedule's kernel holds: the accumulators of one work-item."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.tirx.analysis import undefined_vars

from honed.tuner.lower.statements import parts

_BITS = 32  # Bits of a register
_Loops = tuple[tirx.For, ...]  # The outermost first
_Placed = tuple[s_tir.SBlockRealize, _Loops]  # A block and the loops around it


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The least resources that a schedule needs from the compiler and the device's registers."""

    registers: int  # Registers of 32 bits for the largest private reduction of one work-item
    statements: int  # Copies of statements that the most unrolled block expands to


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """The sizes of work-groups that a device runs well."""

    least: int  # Work-items of a group, where there are several groups
    most: int
    warp: int = 1  # Work-items that run in step: a group of other numbers leaves lanes idle

    def allow(self, threads: int, groups: int) -> bool:
        """Return whether `groups` groups of `threads` work-items each run well.

        Groups may be partial warps where the total of work-items is no multiple of a warp.
        """
        if threads > self.most or (threads < self.least and groups > 1):
            return False
        return threads % self.warp == 0 or threads * groups % self.warp != 0


@dataclass(frozen=True, slots=True, eq=False)
class Nest:
    """The loops around one block of a scheduled function, grouped by what their extents count."""

    held: _Loops  # Elements that one work-item holds of a private reduction
    bits: int  # Bits of such an element; 0 where the block is no private reduction
    unrolled: _Loops  # Copies of the block that are written out


@dataclass(frozen=True, slots=True, eq=False)
class LaunchLoops:
    """The loops bound to the work-items of a group, and those bound to groups, of one launch."""

    threads: _Loops
    groups: _Loops


def size_of(func: tirx.PrimFunc, least_bits: int = 1) -> Size:
    """Return the size of a scheduled function before lowering.

    An element takes at least `least_bits` bits.
    """
    found = nests(func)
    held = [registers(_steps(one.held), one.bits, least_bits) for one in found]
    return Size(
        registers=max(held, default=0), statements=max((_steps(one.unrolled) for one in found), default=0)
    )


def registers(elements: int, bits: int, least_bits: int) -> int:
    """Return the registers that private results of `bits` each take."""
    return math.ceil(elements * max(bits, least_bits) / _BITS) if bits else 0


def nests(func: tirx.PrimFunc) -> list[Nest]:
    """Return the nests of all blocks."""
    found = list(_blocks(func.body, (), nested=True))
    return [_nest(realize, around, found) for realize, around in found]


def launches_of(func: tirx.PrimFunc) -> list[tuple[int, int]]:
    """Return work-items per work-group, and work-groups, of each launch of a scheduled function."""
    return [(_steps(launch.threads), _steps(launch.groups)) for launch in launches(func)]


def launches(func: tirx.PrimFunc) -> list[LaunchLoops]:
    """Return the loops of each launch of a scheduled function."""
    outermost = [around for _, around in _blocks(func.body, (), nested=False)]
    return [
        LaunchLoops(_loops_with_tag(around, "threadIdx"), _loops_with_tag(around, "blockIdx"))
        for around in outermost
    ]


def _loops_with_tag(loops: _Loops, tag: str) -> _Loops:
    return tuple(loop for loop in loops if _tag(loop).startswith(tag))


def _steps(loops: _Loops) -> int:
    return math.prod(int(loop.extent) for loop in loops)


def _blocks(stmt: tirx.Stmt, around: _Loops, *, nested: bool) -> Iterator[_Placed]:
    """Yield every block with the loops around it, the outermost first.

    The root block contains others. Without `nested`, no block that lies in another is included.
    """
    within = parts(stmt)
    if isinstance(stmt, tirx.For):
        around = (*around, stmt)
    elif isinstance(stmt, s_tir.SBlockRealize):
        root = str(stmt.block.name_hint) == "root"
        if nested or not root:
            yield stmt, around
        within = [stmt.block.body] if nested or root else []
    for part in within:
        yield from _blocks(part, around, nested=nested)


def _nest(realize: s_tir.SBlockRealize, around: _Loops, others: Sequence[_Placed]) -> Nest:
    """Return the nest of a block.

    A private result is held for each step of the loops around it that are neither threads nor reduced. Loops
    that contain all blocks which use the result do not count either: each iteration reuses the memory of the
    previous one.
    """
    block = realize.block
    unrolled = tuple(loop for loop in around if loop.kind == tirx.ForKind.UNROLLED)
    reduced: set[Any] = set()
    if block.writes and str(block.writes[0].source.scope()) == "local":
        for axis, value in zip(block.iter_vars, realize.iter_values, strict=True):
            if axis.iter_type == tirx.IterVar.CommReduce:
                reduced.update(undefined_vars(value, []))
    if not reduced:
        return Nest((), 0, unrolled)
    bits = int("".join(c for c in str(block.writes[0].source.dtype) if c.isdigit()) or 8)
    turns = _count_shared_loops(block.writes[0].source, around, others)
    # Virtual threads do not run in turn.
    kept = (loop for n, loop in enumerate(around) if n >= turns or _tag(loop))
    held = tuple(loop for loop in kept if _private(loop) and loop.loop_var not in reduced)
    return Nest(held, bits, unrolled)


def _count_shared_loops(buffer: ir.Var, around: _Loops, others: Sequence[_Placed]) -> int:
    """Return how many of the outermost loops around a block are around every use of its buffer."""
    shared = len(around)
    for realize, loops in others:
        if any(used.source.same_as(buffer) for used in (*realize.block.reads, *realize.block.writes)):
            same = (one.same_as(other) for one, other in zip(around, loops, strict=False))
            shared = min(shared, next((n for n, equal in enumerate(same) if not equal), len(loops)))
    return shared


def _private(loop: tirx.For) -> bool:
    """Return whether one work-item runs all of a loop (virtual threads belong to one work-item)."""
    return isinstance(loop.extent, tirx.IntImm) and not _tag(loop).startswith(("blockIdx", "threadIdx"))


def _tag(loop: tirx.For) -> str:
    return str(loop.thread_binding.thread_tag) if loop.thread_binding is not None else ""


@derived_object
class Budget(ms.postproc.PyPostproc):  # type: ignore[misc]
    """A postprocessor that refuses schedules that would spill registers or overload the driver's compiler."""

    def __init__(self, most: Size, threads: Threads, least_bits: int) -> None:
        """Set the limits; `least_bits` is the least that an element in a register takes."""
        super().__init__()
        self.most = most
        self.threads = threads
        self.least_bits = least_bits

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """Do nothing: the context is not used."""

    def apply(self, sch: Schedule) -> bool:
        """Return whether the schedule may be kept."""
        func = sch.mod["main"]
        return self.allows(size_of(func, self.least_bits), launches_of(func))

    def allows(self, size: Size, groups: Iterable[tuple[int, int]]) -> bool:
        """Return whether a schedule of that size may be kept; `groups` are as of `launches_of`."""
        if size.registers > self.most.registers or size.statements > self.most.statements:
            return False
        return all(self.threads.allow(threads, count) for threads, count in groups)

    def clone(self) -> Budget:
        """Return another budget of equal limits."""
        return Budget(self.most, self.threads, self.least_bits)
