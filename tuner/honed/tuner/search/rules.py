"""Opens the space of schedules for a function, by the rules of a device family, which are data.

`space` is the entry point of the search: it returns the schedules with open numbers that a family's rules
allow for a function; `postprocs` are what the search must apply to each draw from them. Besides sketches
there are MetaSchedule's rules, in which the work-items of a group share work: they cover every block. They
tile contractions over groups, virtual threads, threads and registers (with the operands copied through local
memory where that pays), split long reductions over the threads of a group, and bind other loops to the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.schedule_rule.multi_level_tiling import ReuseType
from tvm.target import Target

from honed.machine.families import DriverClass
from honed.machine.profile import DeviceProfile, ScheduleRules
from honed.tuner.lower.statements import nodes

from .budget import Budget, Size, Threads
from .parts import SKETCHES, Keep, SketchLimits, inline_elementwise, lane_choices
from .sketches.attention import attention, attention_groups, attention_row
from .sketches.blocked import separable
from .sketches.grouped import SLICES, GroupTile, tile_grouped, tile_sliced
from .sketches.one_row import one_row
from .sketches.tile import points
from .traces import again, as_module, new_schedule, steps, tune_context

_STRUCTURE = "SSSRRSRS"  # Group, virtual thread, thread, reduce, reduce, registers, reduce, registers
_BINDS = ("blockIdx.x", "vthread.x", "threadIdx.x")
_REGISTERS_AT, _LOCAL_AT = 3, 4  # Levels of the structure under which results and operands are kept
_Try = Callable[[Schedule], None]  # Schedules a whole function; raises ValueError where that does not fit
# Attempts with other numbers: TVM simplifies some indices so that a later step does not find the block
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """The parameters of MetaSchedule's rules for a family. Without a tile contractions are only bound."""

    tile: GroupTile | None = None  # Tile of the grouped sketch, and of tiles where that does not fit
    innermost: int = 0  # Most elements of a tile's innermost level, per axis; 0: there are no such tiles
    threads: tuple[int, ...] = (1,)  # Work-items per work-group to choose from
    grid: int = 1 << 16  # Most work-groups of loops bound without tiles; beyond that work-items loop

    def within(self, rules: ScheduleRules) -> GroupRules:
        """Return the rules limited by the profile: no larger work-groups, no copies into local memory."""
        return replace(
            self,
            tile=self.tile and replace(self.tile, shared=self.tile.shared and rules.local_memory),
            threads=tuple(t for t in self.threads if t <= rules.max_threads) or (1,),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRules:
    """The rules for a family of devices.

    `most` limits the size of schedules: accumulators that spill cost more than a larger tile wins.
    """

    sketches: SketchLimits
    groups: GroupRules | None  # Work-groups that share work; None where they win nothing
    most: Size
    least_threads: int  # Work-items of a work-group, where there are several groups
    warp: int = 1  # Work-items that run in step; groups are whole warps
    element_bits: int = 1  # Least bits of a register that an element takes


# Work-groups of one: a work-group is one thread of the processor. 32 vector registers of 64 bytes with
# AVX-512 hold 512 fp32 accumulators.
_CPU = FamilyRules(
    sketches=SketchLimits(
        vector_bytes=64,
        tile=16,
        vectors=4,
        unroll=8,
        tail_unroll=64,
        threads=(1,),
        row_bytes=16 << 10,
        contractions=True,
        accumulators=512,
    ),
    groups=None,
    most=Size(registers=512, statements=512),
    least_threads=1,
)
# Facts: 64 registers a thread, then spills: 48 accumulators leave room for operands and addresses; Mesa
# before 26.1 gives a half a register of its own. Warps of 16. Local memory is ordinary memory, so nothing is
# copied into it (a reduction's partial results still travel through it). Loads up to 128 bits.
_MALI = FamilyRules(
    sketches=SketchLimits(
        vector_bytes=16,
        tile=8,
        vectors=2,
        unroll=8,
        tail_unroll=16,
        threads=(16, 32, 64, 128),
        row_bytes=1 << 10,
        contractions=True,
        accumulators=48,
    ),
    groups=GroupRules(
        tile=GroupTile(
            shared=False,
            copied=(),
            registers=8,
            threads=16,
            virtual=1,
            reduced=16,
            sliced=1 << 14,
            unroll=(0, 4, 16),
        ),
        innermost=8,
        threads=(16, 32, 64, 128, 256),
        grid=1024,
    ),
    most=Size(registers=48, statements=256),
    least_threads=1,
    warp=16,
    element_bits=32,
)
# Two halves share a register: room for tiles of 8 x 8. Loops of up to 32 turns are unrolled, despite pragmas.
_MALI_MESA_26 = replace(_MALI, sketches=replace(_MALI.sketches, loads_ahead=True), element_bits=24)
# NVIDIA: 255 registers a thread; 64 to 128 accumulators leave room for operands and addresses. Groups smaller
# than a warp of 32 leave lanes idle.
_GPU = FamilyRules(
    sketches=SketchLimits(
        vector_bytes=16,
        tile=8,
        vectors=2,
        unroll=8,
        tail_unroll=64,
        threads=(32, 64, 128, 256),
        row_bytes=1 << 10,
        contractions=False,
        accumulators=160,
    ),
    groups=GroupRules(
        tile=GroupTile(
            shared=True,
            copied=(1, 2, 4),
            registers=16,
            threads=64,
            virtual=4,
            reduced=32,
            sliced=1 << 18,
            unroll=(0, 16, 64, 512),
        ),
        innermost=64,
        threads=(32, 64, 128, 256, 512, 1024),
        grid=4096,
    ),
    most=Size(registers=160, statements=1024),
    least_threads=32,
)
# Rules for functions that no sketch fits, on families without groups: every loop nest bound to the grid.
_LAST_RESORT = GroupRules()
_MANY = 1 << 14  # Elements of a function's last output that keep a device busy
_FAMILIES = {"cpu": _CPU, "mali": _MALI, "gpu": _GPU}


def rules_of(profile: DeviceProfile) -> FamilyRules:
    """Return the rules of the device's family and driver, within the profile's limits."""
    rules = profile.rules
    family = _FAMILIES[rules.family]
    if family is _MALI and profile.driver is DriverClass.MESA_26:
        family = _MALI_MESA_26
    limits = family.sketches
    return replace(
        family,
        sketches=replace(
            limits,
            vector_bytes=min(limits.vector_bytes, rules.max_vector_bytes),
            unroll=min(limits.unroll, rules.max_unroll),
            threads=tuple(t for t in limits.threads if t <= rules.max_threads),
            pairs_in_turns=profile.pairs_in_turns,
        ),
        groups=family.groups and family.groups.within(rules),
    )


def space(func: tirx.PrimFunc, target: Target, profile: DeviceProfile) -> list[Schedule]:
    """Return schedules of `func` with open numbers; each represents all candidates with its steps.

    Candidates are draws that passed `postprocs`. The space is empty only for functions without blocks
    (opaque), and for those of steps that depend on one another (`in_steps`).
    """
    return list(each_of_space(func, target, profile))


def each_of_space(func: tirx.PrimFunc, target: Target, profile: DeviceProfile) -> Iterator[Schedule]:
    """Yield the schedules of `space`, which are made one by one."""
    if in_steps(func):
        return
    for of_one_form in (attention_space, separable_space, one_row_space, point_space):
        if made := of_one_form(func, profile):
            yield from made
            return
    rules = rules_of(profile)
    groups, none = rules.groups, True
    for one in sketches(func, rules.sketches):
        yield one
        none = False
    if groups is None or groups.tile is None:
        if none:
            yield from _group_space(func, target, _LAST_RESORT)
        return
    tiled = grouped_sketches(func, groups.tile, rules.sketches)
    yield from tiled
    if tiled and _elements(func) >= _MANY:
        return
    if tiled:  # Too few elements to keep the device busy: have groups reduce together, too
        groups = replace(groups, innermost=0)
    yield from _group_space(func, target, groups)


def in_steps(func: tirx.PrimFunc) -> bool:
    """Return whether a block of a function computes each element in steps, with numbers of its own.

    Its loops may be shared out among work-items, but not become vectors: TVM would have one such number for
    all elements of a vector.
    """
    blocks = nodes(func.body, s_tir.SBlock)
    return any(block.alloc_buffers for block in blocks if block.iter_vars)


def attention_space(func: tirx.PrimFunc, profile: DeviceProfile) -> list[Schedule]:
    """Return `space` of an attention; empty for all other functions, and where its rows do not fit.

    Groups share rows where local memory pays, or have one each where there are few. The sketches that copy
    the operands there come first: on an H100, LightGlue's attentions take 16 us with copies, and 26 us where
    operands are read in place.
    """
    rules = rules_of(profile)
    limits, by = rules.sketches, rules.groups.tile if rules.groups is not None else None
    lanes = lane_choices(func, limits)
    tries: list[_Try] = [partial(attention, limits=limits, most=n) for n in lanes]
    begun = new_schedule(as_module(func))
    if by is not None and by.shared:
        if rows := list(_different(begun, [partial(attention_row, limits=limits, most=n) for n in lanes])):
            return rows
        tries += [
            partial(attention_groups, by=by, limits=limits, most=lanes[0], copied=copied)
            for copied in (True, False)
        ]
    return list(_different(begun, tries))


def separable_space(func: tirx.PrimFunc, profile: DeviceProfile) -> list[Schedule]:
    """Return `space` of two convolutions in one function; empty for all other functions."""
    limits = rules_of(profile).sketches
    tries = [partial(separable, limits=limits, most=n) for n in lane_choices(func, limits)]
    return list(_different(new_schedule(as_module(func)), tries))


def one_row_space(func: tirx.PrimFunc, profile: DeviceProfile) -> list[Schedule]:
    """Return `space` of a norm with products of its row; empty for all other functions and on processors."""
    if not profile.family.rows:
        return []
    tries = [partial(one_row, limits=rules_of(profile).sketches)]
    return list(_different(new_schedule(as_module(func)), tries))


def point_space(func: tirx.PrimFunc, profile: DeviceProfile) -> list[Schedule]:
    """Return `space` of a function that transforms tiles; empty for all other functions.

    Other sketches, and default rules, unroll all of its sums for each element.
    """
    return list(_fitting(func, [partial(points, limits=rules_of(profile).sketches)]))


def sketches(func: tirx.PrimFunc, limits: SketchLimits) -> Iterator[Schedule]:
    """Yield every sketch that fits a function; none where the sketches do not understand its blocks."""
    tries = [
        lambda schedule, make=make, lanes=lanes: make(schedule, limits, lanes)
        for _, make in sorted(SKETCHES.items())
        for lanes in lane_choices(func, limits)
    ]
    return _fitting(func, tries)


def grouped_sketches(func: tirx.PrimFunc, by: GroupTile, limits: SketchLimits) -> list[Schedule]:
    """Return the grouped sketches with and without vectors; none where the function is no contraction.

    Where operands are copied, there are sketches with and without loads ahead. Where there are few outputs,
    there is also the sliced sketch.
    """
    lanes = lane_choices(func, limits)
    tries: list[_Try] = [
        partial(tile_grouped, by=by, limits=limits, most=n, ahead=ahead)
        for n in (*lanes, 1)
        for ahead in ((True, False) if by.shared else (False,))
    ]
    if _elements(func) <= by.sliced:
        tries += [partial(tile_sliced, by=by, limits=limits, most=lanes[0], slices=n) for n in SLICES]
    return list(_fitting(func, tries))


def _fitting(func: tirx.PrimFunc, tries: Iterable[_Try]) -> Iterator[Schedule]:
    """Yield the schedules of the tries that fit a function, once its elementwise blocks are inlined."""
    return _different(again(_inline(as_module(func))), tries)


@lru_cache(maxsize=1)  # Shared by all kinds of sketches of one function
def _inline(module: IRModule) -> Schedule:
    """Return a schedule with elementwise blocks inlined, as every sketch does first or goes on from there."""
    inlined = new_schedule(module)
    inline_elementwise(inlined, Keep.PADDING)
    return inlined


def _different(begun: Schedule, tries: Iterable[_Try]) -> Iterator[Schedule]:
    """Yield the schedules of the tries that fit, without duplicates."""
    found: set[str] = set()
    for make in tries:
        for _ in range(_ATTEMPTS):
            schedule = begun.copy()
            try:
                make(schedule)
            except s_tir.ScheduleError:
                continue  # The function lacks the sketch's form after all, or at least with these numbers
            except ValueError:
                break  # The function lacks the form
            if (text := steps(schedule.trace)) not in found:
                found.add(text)
                yield schedule
            break


def _elements(func: tirx.PrimFunc) -> int:
    """Return the elements of the function's last output."""
    return math.prod(int(extent) for extent in func.params[-1].shape)


def _group_space(func: tirx.PrimFunc, target: Target, rules: GroupRules) -> list[Schedule]:
    """Return every schedule of MetaSchedule's rules for `func`; `completing` binds the loops they leave."""
    generator = ms.space_generator.PostOrderApply(sch_rules=_rules(rules), postprocs=[], mutator_probs={})
    strategy = ms.search_strategy.ReplayTrace()
    context = tune_context(as_module(func), target, generator, strategy, seed=1, threads=1)
    return list(context.generate_design_space())


def _rules(rules: GroupRules) -> list[ms.ScheduleRule]:
    r, tile = ms.schedule_rule, rules.tile
    inline = r.AutoInline(
        into_producer=True,
        into_consumer=True,
        inline_const_tensor=True,
        disallow_if_then_else=False,
        require_injective=False,
        require_ordered=False,
        disallow_op=None,
    )
    made: list[ms.ScheduleRule] = [r.InlineConstantScalars(), inline]
    if tile is not None and rules.innermost:
        tiling = r.MultiLevelTiling(
            structure=_STRUCTURE,
            tile_binds=list(_BINDS),
            max_innermost_factor=rules.innermost,
            vector_load_lens=list(tile.copied) if tile.shared else None,
            reuse_read=ReuseType(req="must", levels=[_LOCAL_AT], scope="shared") if tile.shared else None,
            reuse_write=ReuseType(req="must", levels=[_REGISTERS_AT], scope="local"),
        )
        made = [tiling, *made]
    if len(rules.threads) > 1:
        made.append(r.CrossThreadReduction(thread_extents=list(rules.threads)))
    if tile is not None:
        made.append(
            r.ParallelizeVectorizeUnroll(
                max_jobs_per_core=-1,
                max_vectorize_extent=-1,
                unroll_max_steps=list(tile.unroll),
                unroll_explicit=True,
            )
        )
    bind = r.AutoBind(
        max_threadblocks=rules.grid,
        thread_extents=list(rules.threads),
        max_threads_per_block=max(rules.threads),
    )
    return [*made, bind]


def postprocs(profile: DeviceProfile) -> list[ms.Postproc]:
    """Return the postprocessors of every draw from the profile's spaces, in order; new objects each time."""
    found = completing(profile)
    if rules_of(profile).groups is not None:
        found.append(ms.postproc.VerifyGPUCode())
    return found


def completing(profile: DeviceProfile) -> list[ms.Postproc]:
    """Return `postprocs` without the last, which lowers the draw for a check that lowering repeats."""
    groups, p = rules_of(profile).groups, ms.postproc
    if groups is None:
        return [budget(profile)]
    return [
        budget(profile),
        p.DisallowDynamicLoop(),
        p.RewriteCooperativeFetch(),
        p.RewriteUnboundBlock(groups.grid),
        p.RewriteParallelVectorizeUnroll(),
        p.RewriteReductionBlock(),
    ]


def budget(profile: DeviceProfile) -> Budget:
    """Return the budget that refuses draws that the profile's devices would run badly."""
    rules = rules_of(profile)
    threads = Threads(least=rules.least_threads, most=profile.rules.max_threads, warp=rules.warp)
    return Budget(rules.most, threads, rules.element_bits)
