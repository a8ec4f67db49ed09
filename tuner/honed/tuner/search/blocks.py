"""What a function's blocks are, for the sketches to choose by."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import ir, s_tir, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm_ffi import structural_walk

# Functions that cost many instructions; everything else may as well be computed again.
_DEAR = frozenset({"exp", "erf", "tanh", "pow", "log", "sin", "cos", "sigmoid"})
SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block: the kinds and extents of its axes, in order."""

    name: str
    kinds: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def is_reduction(self) -> bool:
        """Whether it reduces along some axis."""
        return REDUCE in self.kinds

    @property
    def reduced(self) -> int:
        """Elements reduced into one."""
        return math.prod(e for k, e in zip(self.kinds, self.extents, strict=True) if k == REDUCE)


def info(schedule: Schedule, block: SBlockRV) -> BlockInfo | None:
    """What a block is; None where an axis is neither spatial nor a reduction, or has no fixed extent."""
    found: s_tir.SBlock = schedule.get(block)
    kinds, extents = [], []
    for axis in found.iter_vars:
        if axis.iter_type not in (SPATIAL, REDUCE) or not isinstance(axis.dom.extent, tirx.IntImm):
            return None
        kinds.append(int(axis.iter_type))
        extents.append(int(axis.dom.extent))
    return BlockInfo(str(found.name_hint), tuple(kinds), tuple(extents))


def blocks(schedule: Schedule) -> list[SBlockRV]:
    """The blocks under the root, in order of execution."""
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def inline_elementwise(schedule: Schedule) -> None:
    """Inline every block that can be computed where it is used, and fold tails into their producers.

    Blocks that are read by a reduction are inlined too, unless they call a function (exp, erf): computing
    that once for each term of the sum would cost more than keeping the value.
    """
    for block in blocks(schedule)[:-1]:
        found = info(schedule, block)
        if found is None or found.is_reduction:
            continue
        if _feeds_reduction(schedule, block) and _is_dear(schedule, block):
            continue
        try:
            schedule.compute_inline(block)
        except s_tir.ScheduleError:
            continue


def _feeds_reduction(schedule: Schedule, block: SBlockRV) -> bool:
    consumers = [info(schedule, c) for c in schedule.get_consumers(block)]
    return any(c is None or c.is_reduction for c in consumers)


def _is_dear(schedule: Schedule, block: SBlockRV) -> bool:
    found = False

    def call(node: ir.Call) -> None:
        nonlocal found
        name = str(getattr(node.op, "name", ""))
        found = found or name.removeprefix("tirx.") in _DEAR

    structural_walk(schedule.get(block).body, [(ir.Call, call)], order="post")
    return found
