"""What a function's blocks are, for the sketches to choose by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import SBlockRV
from tvm.tirx.analysis import undefined_vars
from tvm_ffi import structural_walk

# Functions that cost many instructions; everything else may as well be computed again.
_DEAR = frozenset({"exp", "erf", "tanh", "pow", "log", "sin", "cos", "sigmoid"})
CHOICES = frozenset({"if_then_else", "likely"})  # a select says that it is one by the second
SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


class Keep(Enum):
    """Which blocks that a reduction reads are computed once, instead of once for each term of the sum."""

    NOTHING = "nothing"
    DEAR = "dear"  # calls a function (exp, erf)
    PADDING = "padding"  # those, and what chooses between values: the zeros around a padded input


_KEPT = {Keep.NOTHING: frozenset[str](), Keep.DEAR: _DEAR, Keep.PADDING: _DEAR | CHOICES}


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
    def spatial(self) -> list[int]:
        """The numbers of the axes that stay."""
        return [n for n, kind in enumerate(self.kinds) if kind == SPATIAL]

    @property
    def reducing(self) -> list[int]:
        """The numbers of the axes that it reduces along."""
        return [n for n, kind in enumerate(self.kinds) if kind == REDUCE]

    @property
    def reduced(self) -> int:
        """Elements reduced into one."""
        return math.prod(self.extents[n] for n in self.reducing)


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


def inline_elementwise(schedule: Schedule, keep: Keep) -> None:
    """Inline every block that can be computed where it is used, and fold tails into their producers.

    Of the blocks that are read by a reduction, those that `keep` names stay.
    """
    for block in blocks(schedule)[:-1]:
        found = info(schedule, block)
        if found is None or found.is_reduction:
            continue
        if _feeds_reduction(schedule, block) and calls(schedule, block, _KEPT[keep]):
            continue
        try:
            schedule.compute_inline(block)
        except s_tir.ScheduleError:
            continue


def kept_axes(schedule: Schedule, producer: SBlockRV, consumer: SBlockRV) -> tuple[int, ...] | None:
    """The axes of `consumer` that index what it reads of `producer`, in order; None where it reads nothing.

    Raises ValueError where it reads more than one element, or at computed indices.
    """
    written = schedule.get(producer).writes[0].source
    reader: s_tir.SBlock = schedule.get(consumer)
    axes = [axis.var for axis in reader.iter_vars]
    found: list[int] | None = None
    for read in reader.reads:
        if not read.source.same_as(written):
            continue
        found = found or []
        for span in read.region:
            at = next((n for n, var in enumerate(axes) if span.min.same_as(var)), None)
            if not is_number(span.extent, 1) or (at is None and not is_number(span.min, 0)):
                raise ValueError("a reduction is read at computed indices")
            if at is not None and at not in found:
                found.append(at)
    return None if found is None else tuple(found)


def reads_along(schedule: Schedule, block: SBlockRV, axis: int) -> list[int]:
    """Which of a block's reads depend on one of its axes, by their index."""
    found: s_tir.SBlock = schedule.get(block)
    var = found.iter_vars[axis].var
    return [
        n
        for n, read in enumerate(found.reads)
        if any(var.same_as(used) for span in read.region for used in undefined_vars(span.min, []))
    ]


def last_axis(schedule: Schedule, block: SBlockRV, read: int) -> int | None:
    """Which axis of a block moves along the last dimension (of more than one element) of what it reads.

    None where the dimension is read at a computed index, or there is none.
    """
    found: s_tir.SBlock = schedule.get(block)
    region = found.reads[read]
    for extent, span in zip(reversed(region.source.shape), reversed(region.region), strict=True):
        if not is_number(extent, 1):
            return next((n for n, axis in enumerate(found.iter_vars) if span.min.same_as(axis.var)), None)
    return None


def step_along(schedule: Schedule, block: SBlockRV, read: int, axis: int) -> int | None:
    """How far one step of an axis of a block moves along the last dimension of what it reads.

    None where that is no number.
    """
    found: s_tir.SBlock = schedule.get(block)
    at = found.reads[read].region[-1].min
    linear = sym.detect_linear_equation(at, [found.iter_vars[axis].var])
    return int(linear[0]) if linear and isinstance(linear[0], tirx.IntImm) else None


def is_number(value: ir.Expr, number: int) -> bool:
    """Whether an expression is that number."""
    return isinstance(value, tirx.IntImm) and int(value) == number


def _feeds_reduction(schedule: Schedule, block: SBlockRV) -> bool:
    consumers = [info(schedule, c) for c in schedule.get_consumers(block)]
    return any(c is None or c.is_reduction for c in consumers)


def is_dear(schedule: Schedule, block: SBlockRV) -> bool:
    """Whether computing a block again costs more than keeping what it computed."""
    return calls(schedule, block, _DEAR)


def calls(schedule: Schedule, block: SBlockRV, names: frozenset[str]) -> bool:
    """Whether a block calls any of the intrinsics."""
    found = False

    def call(node: ir.Call) -> None:
        nonlocal found
        name = str(getattr(node.op, "name", ""))
        found = (
            found or name.rpartition(".")[2] in names
        )  # of the dialects tirx (exp) and prim (if_then_else)

    structural_walk(schedule.get(block).body, [(ir.Call, call)], order="post")
    return found
