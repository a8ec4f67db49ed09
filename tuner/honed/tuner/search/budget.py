"""An estimate of the registers that a schedule's kernel holds at least: the accumulators of one work-item."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.tirx.analysis import undefined_vars

_BITS = 32  # of a register


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a schedule asks of the compiler and of the device's registers, at least."""

    registers: int  # of 32 bits, for the largest private reduction of one work-item
    statements: int  # into which the most unrolled block is written out


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """What work-groups a device runs well."""

    least: int  # work-items of a group, where there are several groups
    most: int
    warp: int = 1  # work-items that run in step: a group of other numbers leaves lanes idle

    def allow(self, threads: int, groups: int) -> bool:
        """Whether so many work-items a group are run well, by so many groups.

        Where all work-items together are no whole warps, no group can be.
        """
        if threads > self.most or (threads < self.least and groups > 1):
            return False
        return threads % self.warp == 0 or threads * groups % self.warp != 0


def size_of(func: tirx.PrimFunc, least_bits: int = 1) -> Size:
    """The size of a scheduled function, before lowering; `least_bits` is what an element takes at least."""
    return _statement(func.body, [], least_bits)


def launches_of(func: tirx.PrimFunc) -> list[tuple[int, int]]:
    """Work-items per work-group, and work-groups, of what a scheduled function will launch."""
    return _launches(func.body, 1, 1)


def _launches(stmt: tirx.Stmt, threads: int, groups: int) -> list[tuple[int, int]]:
    if isinstance(stmt, tirx.SeqStmt):
        return [found for part in stmt.seq for found in _launches(part, threads, groups)]
    if isinstance(stmt, tirx.For):
        tag = _tag(stmt)
        if tag.startswith("threadIdx"):
            threads *= int(stmt.extent)
        elif tag.startswith("blockIdx"):
            groups *= int(stmt.extent)
        return _launches(stmt.body, threads, groups)
    if isinstance(stmt, tirx.AttrStmt):
        return _launches(stmt.body, threads, groups)
    if isinstance(stmt, tirx.IfThenElse):
        return _launches(stmt.then_case, threads, groups)
    if isinstance(stmt, s_tir.SBlockRealize) and str(stmt.block.name_hint) == "root":
        return _launches(stmt.block.body, threads, groups)
    return [(threads, groups)]


def _statement(stmt: tirx.Stmt, loops: list[tirx.For], bits: int) -> Size:
    if isinstance(stmt, tirx.SeqStmt):
        return _largest(_statement(s, loops, bits) for s in stmt.seq)
    if isinstance(stmt, tirx.For):
        return _statement(stmt.body, [*loops, stmt], bits)
    if isinstance(stmt, tirx.AttrStmt):
        return _statement(stmt.body, loops, bits)
    if isinstance(stmt, tirx.IfThenElse):
        return _statement(stmt.then_case, loops, bits)
    if isinstance(stmt, s_tir.SBlockRealize):
        written_out = math.prod(int(a.extent) for a in loops if a.kind == tirx.ForKind.UNROLLED)
        here = Size(registers=_registers(stmt, loops, bits), statements=written_out)
        return _largest((here, _statement(stmt.block.body, loops, bits)))
    return Size(registers=0, statements=0)


def _largest(sizes: Iterable[Size]) -> Size:
    found = list(sizes)
    return Size(
        registers=max((s.registers for s in found), default=0),
        statements=max((s.statements for s in found), default=0),
    )


def _registers(realize: s_tir.SBlockRealize, loops: list[tirx.For], least_bits: int) -> int:
    """Registers of a block's private results: what its loops cover that are neither threads nor reduced."""
    block = realize.block
    if not block.writes or str(block.writes[0].source.scope()) != "local":
        return 0
    reduced: set[Any] = set()
    for axis, value in zip(block.iter_vars, realize.iter_values, strict=True):
        if axis.iter_type == tirx.IterVar.CommReduce:
            reduced.update(undefined_vars(value, []))
    if not reduced:
        return 0
    covered = math.prod(int(loop.extent) for loop in loops if _private(loop) and loop.loop_var not in reduced)
    bits = int("".join(c for c in str(block.writes[0].source.dtype) if c.isdigit()) or 8)
    return math.ceil(covered * max(bits, least_bits) / _BITS)


def _private(loop: tirx.For) -> bool:
    """Whether one work-item runs all of it (virtual threads are the same work-item)."""
    return isinstance(loop.extent, tirx.IntImm) and not _tag(loop).startswith(("blockIdx", "threadIdx"))


def _tag(loop: tirx.For) -> str:
    return str(loop.thread_binding.thread_tag) if loop.thread_binding is not None else ""


@derived_object
class Budget(ms.postproc.PyPostproc):  # type: ignore[misc]
    """Refuses schedules that would spill registers or drown the driver's compiler, before lowering them."""

    def __init__(self, most: Size, threads: Threads, least_bits: int) -> None:
        """`least_bits` is what an element in a register takes at least."""
        super().__init__()
        self.most = most
        self.threads = threads
        self.least_bits = least_bits

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """Not used."""

    def apply(self, sch: Schedule) -> bool:
        """Whether the schedule may be kept."""
        func = sch.mod["main"]
        size = size_of(func, self.least_bits)
        if size.registers > self.most.registers or size.statements > self.most.statements:
            return False
        return all(self.threads.allow(threads, groups) for threads, groups in launches_of(func))

    def clone(self) -> Budget:
        """Another of the same kind."""
        return Budget(self.most, self.threads, self.least_bits)
