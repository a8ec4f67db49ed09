"""Provides the elements of sketches: blocks and their kinds, lanes, groups, and the loops of a work-item."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TypeVar

from tvm import ir, s_tir, sym, tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.tirx.analysis import undefined_vars
from tvm_ffi import structural_walk

from honed.tuner.lower.workload import marks_of

from .traces import divisors

# Functions that cost many instructions; everything else may as well be computed again.
_DEAR = frozenset({"exp", "erf", "tanh", "pow", "log", "sin", "cos", "sigmoid"})
CHOICES = frozenset({"if_then_else", "likely"})  # The second marks a value as a select
SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce
T = TypeVar("T")
_VECTORS = (16, 8, 4, 2)  # OpenCL's vector lengths except 3
COPIED = 8  # Channels whose elements at one place a work-item computes
_JOB = 1024  # Elements that a work-group of a processor moves at most, where a row has no more


class Keep(Enum):
    """A choice of the blocks read by a reduction that are computed only once.

    Others are computed once per term.

    Blocks are chosen by the intrinsics that they call.
    """

    NOTHING = frozenset[str]()
    DEAR = _DEAR
    PADDING = _DEAR | CHOICES  # Includes blocks that choose between values: the zeros around a padded input


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchLimits:
    """The limits of sketches for a family of devices."""

    vector_bytes: int  # Bytes of the widest load that pays
    tile: int  # Steps of one axis of a register tile
    vectors: int  # Vectors of a register tile along its lanes
    unroll: int  # Steps of the innermost reduction loop
    tail_unroll: int  # Steps of the blocks after a reduction
    threads: tuple[int, ...]  # Work-items per work-group to choose from
    row_bytes: int  # Bytes of one intermediate row that a work-item keeps private
    contractions: bool  # False: groups that share operands are always better at them
    accumulators: int  # Most accumulators of a convolution's work-item, because its sums are long
    loads_ahead: bool = False  # The compiler unrolls loops that a schedule does not, and loads ahead of them
    # The compiler pairs halves only within a turn of a loop, so few sums of a turn are open at once
    pairs_in_turns: bool = False

    @property
    def groups_of_one(self) -> bool:
        """Return whether a work-group is one work-item, as on processors, where it is a thread's job."""
        return self.threads == (1,)


class NotApplicable(ValueError):
    """Raised if a sketch does not apply to a function."""


def require(fits: bool) -> None:
    """Raise NotApplicable unless a function has what a sketch needs."""
    if not fits:
        raise NotApplicable("the sketch does not apply to this function")


def require_found(found: T | None) -> T:
    """Return what a sketch needs; raise NotApplicable where it was not found."""
    if found is None:
        raise NotApplicable("the sketch does not apply to this function")
    return found


# Schedules a function with the most lanes of a vector; raises ValueError where the sketch does not fit it.
Sketch = Callable[[Schedule, SketchLimits, int], None]
SKETCHES: dict[int, Sketch] = {}  # Sketches by place


def sketch(place: int, **options: Keep) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a sketch, with its own options, to be tried on every function in the order of places.

    Draws depend on the order, so the places of other sketches must not change.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        if place in SKETCHES:
            raise ValueError(f"{function.__name__} is at the place {place} of another sketch; take another")
        SKETCHES[place] = partial(function, **options)
        return function

    return add


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """The description of a block: the kinds and extents of its axes, in order."""

    block: SBlockRV
    name: str
    kinds: tuple[int, ...]
    extents: tuple[int, ...]

    @property
    def is_reduction(self) -> bool:
        """Return whether the block reduces along some axis."""
        return REDUCE in self.kinds

    @property
    def spatial(self) -> list[int]:
        """Numbers of the spatial axes."""
        return [n for n, kind in enumerate(self.kinds) if kind == SPATIAL]

    @property
    def reducing(self) -> list[int]:
        """Numbers of the axes that it reduces along."""
        return [n for n, kind in enumerate(self.kinds) if kind == REDUCE]

    @property
    def reduced(self) -> int:
        """Number of elements reduced into one."""
        return math.prod(self.extents[n] for n in self.reducing)


def part_of(schedule: Schedule, block: SBlockRV) -> BlockInfo:
    """Return the description of a block; raise ValueError where the block is not understood."""
    found: s_tir.SBlock = schedule.get(block)
    axes = list(found.iter_vars)
    if any(a.iter_type not in (SPATIAL, REDUCE) or not isinstance(a.dom.extent, tirx.IntImm) for a in axes):
        raise ValueError("an axis is neither spatial nor a reduction")
    return BlockInfo(
        block=block,
        name=str(found.name_hint),
        kinds=tuple(int(axis.iter_type) for axis in axes),
        extents=tuple(int(axis.dom.extent) for axis in axes),
    )


def blocks(schedule: Schedule) -> list[SBlockRV]:
    """Return the blocks under the root, in order of execution."""
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def inline_elementwise(schedule: Schedule, keep: Keep) -> None:
    """Inline every block that can be computed where it is used, and fold tails into their producers.

    Blocks that a reduction reads stay if `keep` names them.
    """
    for block in blocks(schedule)[:-1]:
        if _reduces(schedule, block):
            continue
        feeds = any(_reduces(schedule, consumer) for consumer in schedule.get_consumers(block))
        if feeds and calls(schedule, block, keep.value):
            continue
        try:
            schedule.compute_inline(block)
        except s_tir.ScheduleError:
            continue


def _reduces(schedule: Schedule, block: SBlockRV) -> bool:
    """Return whether a block has axes that are not spatial, or have no fixed extent."""
    axes = schedule.get(block).iter_vars
    return any(axis.iter_type != SPATIAL or not isinstance(axis.dom.extent, tirx.IntImm) for axis in axes)


def axes_kept(schedule: Schedule, producer: SBlockRV, consumer: SBlockRV) -> tuple[int, ...] | None:
    """Return the axes of `consumer` that index what it reads of `producer`; None where it reads nothing.

    The axes are in the order of the indices. Raises ValueError where it reads more than one element, or at
    computed indices.
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
    """Return the indices of a block's reads that depend on one of its axes."""
    found: s_tir.SBlock = schedule.get(block)
    var = found.iter_vars[axis].var
    return [
        n
        for n, read in enumerate(found.reads)
        if any(var.same_as(used) for span in read.region for used in undefined_vars(span.min, []))
    ]


def read_along_rows(schedule: Schedule, main: BlockInfo) -> int | None:
    """Return which of two operands the last axis of the result moves along; None if not exactly one."""
    found = reads_along(schedule, main.block, main.spatial[-1])
    return found[0] if len(found) == 1 and len(schedule.get(main.block).reads) == 2 else None


def last_axis(schedule: Schedule, block: SBlockRV, read: int) -> int | None:
    """Return which axis of a block moves along the last dimension of one of its operands.

    That dimension has more than one element. Return None where it is read at a computed index, or there is
    none.
    """
    found: s_tir.SBlock = schedule.get(block)
    region = found.reads[read]
    for extent, span in zip(reversed(region.source.shape), reversed(region.region), strict=True):
        if not is_number(extent, 1):
            return next((n for n, axis in enumerate(found.iter_vars) if span.min.same_as(axis.var)), None)
    return None


def step_along(schedule: Schedule, block: SBlockRV, read: int, axis: int) -> int | None:
    """Return how far one step of an axis of a block moves along the last dimension of an operand.

    Return None where that is no number.
    """
    found: s_tir.SBlock = schedule.get(block)
    at = found.reads[read].region[-1].min
    linear = sym.detect_linear_equation(at, [found.iter_vars[axis].var])
    return int(linear[0]) if linear and isinstance(linear[0], tirx.IntImm) else None


def is_number(value: ir.Expr, number: int) -> bool:
    """Return whether an expression is the constant `number`."""
    return isinstance(value, tirx.IntImm) and int(value) == number


def is_dear(schedule: Schedule, block: SBlockRV) -> bool:
    """Return whether computing a block again costs more than storing its result."""
    return calls(schedule, block, _DEAR)


def calls(schedule: Schedule, block: SBlockRV, names: frozenset[str]) -> bool:
    """Return whether a block calls any of the intrinsics, of dialects tirx (exp) and prim (if_then_else)."""
    found: list[ir.Call] = []
    structural_walk(schedule.get(block).body, [(ir.Call, found.append)], order="post")
    return any(str(getattr(call.op, "name", "")).rpartition(".")[2] in names for call in found)


def lane_choices(func: tirx.PrimFunc, limits: SketchLimits) -> tuple[int, ...]:
    """Return the lanes worth trying: the widest load of the function's narrowest float, and half of it.

    Halves never go down to single elements: fp16 arithmetic comes in pairs.
    """
    sizes = [int(str(b.dtype)[5:]) // 8 for b in func.params if str(b.dtype).startswith("float")]
    widest = max(1, min(16, limits.vector_bytes // min(sizes, default=4)))
    return (widest, widest // 2) if widest > 2 else (widest,)


def lanes_of(extent: int, most: int) -> int:
    """Return the length of the longest OpenCL vector, at most `most` lanes, that divides `extent`."""
    return next((v for v in _VECTORS if v <= most and extent % v == 0), 1)


def parts(schedule: Schedule, keep: Keep = Keep.DEAR) -> list[BlockInfo]:
    """Return the blocks left after inlining; raise ValueError where one is not understood."""
    inline_elementwise(schedule, keep)
    return [part_of(schedule, block) for block in blocks(schedule)]


def is_contraction(schedule: Schedule, blocks: Sequence[BlockInfo]) -> bool:
    """Return whether blocks are one reduction over several operands, whose elements are used repeatedly."""
    reductions = [p for p in blocks if p.is_reduction]
    return len(reductions) == 1 and len(schedule.get(reductions[0].block).reads) > 1


def contraction(schedule: Schedule, keep: Keep) -> tuple[list[BlockInfo], list[BlockInfo]]:
    """Return the blocks computed before a contraction, and the contraction with its tail, if it has one.

    Raises NotApplicable where the function is no contraction.
    """
    found = parts(schedule, keep)
    before = [p for p in found if not p.is_reduction and p is not found[-1]]
    rest = found[len(before) :]
    require([p.is_reduction for p in rest] in ([True], [True, False]))
    require(SPATIAL in rest[0].kinds and is_contraction(schedule, found))
    return before, rest


def maker(schedule: Schedule, main: SBlockRV, read: int, before: Sequence[BlockInfo]) -> BlockInfo | None:
    """Return which of the blocks before it makes an operand of a block; None where it is an input."""
    source = schedule.get(main).reads[read].source
    return next((p for p in before if schedule.get(p.block).writes[0].source.same_as(source)), None)


def by_single_items(limits: SketchLimits) -> bool:
    """Return whether contractions are computed by work-items, many to a group, that share nothing."""
    return limits.contractions and not limits.groups_of_one


def accumulate(schedule: Schedule, rest: Sequence[BlockInfo]) -> SBlockRV:
    """Have a reduction add up in registers.

    Return the block that writes the result, the elementwise tail if any.
    """
    main = rest[0].block
    if len(rest) == 2 and is_elementwise(rest[1], rest[0]):
        keep_in(schedule, main, "local")
        return rest[1].block
    return schedule.cache_write(main, 0, "local")


def sample_tile(schedule: Schedule, loop: LoopRV, most: int) -> tuple[LoopRV, LoopRV, ExprRV]:
    """Split off at most `most` steps of a loop, a sampled number.

    Return the outer loop, the steps, their number.
    """
    factors = schedule.sample_perfect_tile(loop, n=2, max_innermost_factor=most)
    outer, inner = schedule.split(loop, factors)
    return outer, inner, factors[1]


def sample_any(schedule: Schedule, options: Sequence[int]) -> ExprRV:
    """Sample one of the options, all equally likely, and return it."""
    return schedule.sample_categorical(list(options), [1.0 / len(options)] * len(options))


def unroll_some(schedule: Schedule, loop: LoopRV, options: Sequence[int]) -> None:
    """Unroll the loops under a loop up to a number of steps that is sampled from `options`."""
    schedule.annotate(loop, "pragma_auto_unroll_max_step", sample_any(schedule, options))


def unroll(schedule: Schedule, loops: Sequence[LoopRV]) -> None:
    """Unroll all of the loops."""
    for loop in loops:
        schedule.unroll(loop)


def write_out(schedule: Schedule, loops: Sequence[LoopRV]) -> None:
    """Vectorise the last of the loops and unroll the others."""
    schedule.vectorize(loops[-1])
    unroll(schedule, loops[:-1])


def fuse(schedule: Schedule, loops: Sequence[LoopRV]) -> LoopRV:
    """Fuse several loops into one."""
    return schedule.fuse(*loops) if len(loops) > 1 else loops[0]


def bind(schedule: Schedule, loops: Sequence[LoopRV], limits: SketchLimits) -> LoopRV:
    """Bind fused loops to the grid; return the loop that one work-item runs under.

    Work-groups divide the loops evenly: TVM does not apply the condition that guards a last, partial group to
    the blocks that are computed under the loop later, and these would then write out of bounds.
    """
    fused = fuse(schedule, loops)
    if limits.groups_of_one:
        schedule.bind(fused, "blockIdx.x")
        return fused
    outer, inner, _ = sample_tile(schedule, fused, max(limits.threads))
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    return inner


def bind_plane(schedule: Schedule, groups: Sequence[LoopRV], items: Sequence[LoopRV]) -> None:
    """Bind two loops of groups and two of work-items, each along y and then x."""
    for bound, kind in ((groups, "blockIdx"), (items, "threadIdx")):
        for loop, axis in zip(bound, "yx", strict=True):
            schedule.bind(loop, f"{kind}.{axis}")


def bind_items(schedule: Schedule, down: LoopRV, across: LoopRV) -> None:
    """Bind two loops to a group's work-items along y and x."""
    schedule.bind(down, "threadIdx.y")
    schedule.bind(across, "threadIdx.x")


def bind_alone(schedule: Schedule, loop: LoopRV, limits: SketchLimits) -> None:
    """Bind the outer loop of a block under which no other block is computed; a last group may be partial."""
    if limits.groups_of_one:
        schedule.bind(loop, "blockIdx.x")
        return
    outer, inner = schedule.split(loop, [None, sample_any(schedule, limits.threads)])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")


def bind_copied(
    schedule: Schedule, loops: Sequence[LoopRV], axis: int, most: int, vector: LoopRV, limits: SketchLimits
) -> None:
    """Bind loops so that a work-item computes the same place for up to `most` steps of one of them.

    Index computations for the place serve all of these; each has a `vector` of its own.
    """
    outer = list(loops)
    copies = next(n for n in range(most, 0, -1) if int(schedule.get(loops[axis]).extent) % n == 0)
    outer[axis], copied = schedule.split(loops[axis], [None, copies])
    schedule.reorder(*outer, copied, vector)
    bind_alone(schedule, fuse(schedule, outer), limits)
    schedule.unroll(copied)
    schedule.vectorize(vector)


def alone(schedule: Schedule, part: BlockInfo, limits: SketchLimits, most: int) -> None:
    """Compute an elementwise block in a launch of its own.

    A work-item has a vector. Where none divides the rows, it has an element of several channels, except on
    GPUs, which hide the cost of indices.
    """
    if limits.groups_of_one:
        _by_rows(schedule, part, most)
        return
    loops, extents = schedule.get_loops(part.block), part.extents
    lanes = lanes_of(extents[-1], most)
    rest, vector = schedule.split(loops[-1], [None, lanes])
    loops = [*loops[:-1], rest]
    first = next((n for n, extent in enumerate(extents[:-1]) if extent > 1), None)
    if lanes == 1 and first is not None and by_single_items(limits):
        bind_copied(schedule, loops, first, COPIED, vector, limits)
        return
    bind_alone(schedule, fuse(schedule, loops), limits)
    schedule.vectorize(vector)


def launch_others(
    schedule: Schedule,
    before: Sequence[BlockInfo],
    rest: Sequence[BlockInfo],
    limits: SketchLimits,
    most: int,
) -> None:
    """Launch the blocks that a contraction, the first block of `rest`, does not compute itself.

    These are the blocks `before` it, and a tail that is not elementwise.
    """
    for part in before:
        alone(schedule, part, limits, most)
    if len(rest) == 2 and not is_elementwise(rest[1], rest[0]):
        alone(schedule, rest[1], limits, most)


def _by_rows(schedule: Schedule, part: BlockInfo, most: int) -> None:
    """Give each work-group enough of a block's last axes for a job that is worth its launch.

    Where elements are chosen, as zeros around an image, the driver's compiler makes better vectors of the
    rows. Rows of one vector are a block's channels, which are chosen alike.
    """
    loops, extents = list(schedule.get_loops(part.block)), part.extents
    first = len(loops) - 1
    while first > 0 and math.prod(extents[first - 1 :]) <= _JOB:
        first -= 1
    groups = fuse(schedule, loops[:first]) if first else schedule.add_unit_loop(loops[0])
    schedule.bind(groups, "blockIdx.x")
    if extents[-1] == most or not calls(schedule, part.block, CHOICES):
        _, vector = schedule.split(loops[-1], [None, lanes_of(extents[-1], most)])
        schedule.vectorize(vector)


def is_constant(schedule: Schedule, operand: ir.Var) -> bool:
    """Return whether an operand is a parameter that is equal in all inferences."""
    func = schedule.mod["main"]
    return any(func.params[n].same_as(operand) for n in marks_of(func))


def is_elementwise(tail: BlockInfo, main: BlockInfo) -> bool:
    """Return whether a tail has one element for each result of a reduction, and can be computed with it.

    A tail that pads or repeats has more elements, and the additional ones belong to no tile of the reduction.
    """
    return math.prod(tail.extents) == math.prod(main.extents[n] for n in main.spatial)


def below(schedule: Schedule, block: SBlockRV, under: LoopRV) -> list[LoopRV]:
    """Return the loops of `block` inside the loop `under`."""
    loops = list(schedule.get_loops(block))
    marker = schedule.get(under)
    at = next(n for n, loop in enumerate(loops) if schedule.get(loop).same_as(marker))
    return loops[at + 1 :]


def vectorise(schedule: Schedule, block: SBlockRV, under: LoopRV, lanes: int, limits: SketchLimits) -> None:
    """Vectorise a block's work per work-item by `lanes` of its innermost axis, and unroll the rest."""
    inner = below(schedule, block, under)
    if not inner:
        return
    rest, vector = schedule.split(inner[-1], [None, lanes])
    schedule.vectorize(vector)
    unroll_some(schedule, inner[0] if len(inner) > 1 else rest, (0, limits.tail_unroll))


def keep_in(schedule: Schedule, block: SBlockRV, scope: str) -> None:
    """Keep all outputs of a block (the value and the place of a largest element) in memory of a scope."""
    for number in range(len(schedule.get(block).writes)):
        schedule.set_scope(block, number, scope)


def compute_in(schedule: Schedule, block: SBlockRV, under: LoopRV, scope: str) -> None:
    """Compute a block under a loop, and keep its outputs in "local" (private) or "shared" memory."""
    schedule.compute_at(block, under, preserve_unit_loops=True)
    keep_in(schedule, block, scope)


def store_partial(schedule: Schedule, partial: SBlockRV, thread: LoopRV) -> SBlockRV:
    """Have work-items compute partial sums in registers; return the block that shares them with the group."""
    kept = schedule.cache_write(partial, 0, "local")
    schedule.reverse_compute_at(kept, thread, preserve_unit_loops=True)
    schedule.set_scope(kept, 0, "shared")
    return kept


def sum_steps(
    schedule: Schedule, sums: BlockInfo, partial: SBlockRV, mine: LoopRV, limits: SketchLimits
) -> None:
    """Sum a work-item's steps, each of which is a sum in registers, under the loop over these steps."""
    compute_in(schedule, sums.block, mine, "local")
    steps, written, _ = sample_tile(schedule, below(schedule, sums.block, mine)[-1], limits.unroll)
    schedule.unroll(written)
    schedule.decompose_reduction(sums.block, steps)
    schedule.decompose_reduction(partial, mine)


def partial_results(schedule: Schedule, part: BlockInfo, most: int) -> SBlockRV | None:
    """Split the innermost reduction into lanes with a partial result each.

    None where its length forbids it.
    """
    lanes = lanes_of(part.extents[-1], most)
    if lanes == 1:
        return None
    _, vector = schedule.split(schedule.get_loops(part.block)[-1], [None, lanes])
    return schedule.rfactor(vector, factor_axis=len(part.spatial))


def keep_partial(schedule: Schedule, partial: SBlockRV, under: LoopRV) -> None:
    """Compute partial results under a loop in private memory, a vector of them at once."""
    compute_in(schedule, partial, under, "local")
    lanes, *rest = below(schedule, partial, under)  # TVM's rfactor makes their axis a block's first
    schedule.reorder(*rest, lanes)
    schedule.vectorize(lanes)


def hold(schedule: Schedule, main: SBlockRV, read: int, at: LoopRV, width: ExprRV | int) -> None:
    """Load the tile of an operand into registers under a loop, in vectors of `width` along its last axis."""
    dimensions = [int(extent) for extent in schedule.get(main).reads[read].source.shape]
    copy = schedule.cache_read(main, read, "local")
    schedule.compute_at(copy, at, preserve_unit_loops=True)
    inner = below(schedule, copy, at)
    units = next(n for n, extent in enumerate(reversed(dimensions)) if extent > 1)
    last = fuse(schedule, inner[len(inner) - 1 - units :])
    rest, vector = schedule.split(last, [None, width])
    schedule.vectorize(vector)
    unroll(schedule, [*inner[: len(inner) - 1 - units], rest])


def keep_private(schedule: Schedule, block: SBlockRV, elements: int, limits: SketchLimits) -> None:
    """Keep the `elements` that a block computes per work-item in private memory.

    Raises ValueError where they are too many, because blocks of one kernel have no other memory to share.
    """
    buffer = schedule.get(block).writes[0].source
    if elements * int(str(buffer.dtype).strip("abcdefghijklmnopqrstuvwxyz") or 8) // 8 > limits.row_bytes:
        raise ValueError("a row is too long to be kept by one work-item")
    keep_in(schedule, block, "local")


# ---- Groups that keep a Mali's cores busy ----

_CORES, WARP = 4, 16  # Those of a Mali-G610, and work-items of a warp
LINE = 64  # Bytes of a cache line
_GROUP = 64  # Work-items of a group, where cores stay equally busy


def whole_warps(group: int, items: int) -> bool:
    """Return whether a group is whole warps, if a launch of `items` has any, as the budget demands."""
    return group % WARP == 0 or items % WARP != 0


def best_group(items: int, most: int) -> int:
    """Return the group size, within a limit, that gives all cores an equal share of work."""
    groups = [n for n in divisors(items, most) if whole_warps(n, items)]
    return min(groups, key=lambda n: (busiest(n, items), off_usual(n)))


def planes(rows: int, columns: int, most: int, items: int) -> Iterator[tuple[int, int]]:
    """Yield groups of at most `most` work-items along two axes: whole warps, where a launch has some."""
    for high in divisors(rows):
        for wide in divisors(columns):
            if high * wide <= most and whole_warps(high * wide, items):
                yield high, wide


def off_usual(group: int) -> float:
    """Return how far a group is from the usual one; it decides between groups that load cores equally."""
    return abs(math.log2(group / _GROUP))


def busiest(group: int, items: int) -> int:
    """Return the warps of the core that runs most.

    Groups are dealt out whole; partial warps take as long as whole ones.
    """
    return math.ceil(items // group / _CORES) * math.ceil(group / WARP)
