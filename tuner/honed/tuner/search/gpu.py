"""Schedules in which the work-items of a group share work: MetaSchedule's rules, filled in from our data.

Its rules cover every block: contractions are tiled over groups, virtual threads, threads and registers (with
the operands copied through local memory where that pays), long reductions are split over the threads of a
group, and whatever is left is bound to the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.schedule_rule.multi_level_tiling import ReuseType
from tvm.target import Target

from honed.machine.profile import ScheduleRules

from .sketches.grouped import GroupTile
from .traces import as_module, tune_context

_STRUCTURE = "SSSRRSRS"  # group, virtual thread, thread, reduce, reduce, registers, reduce, registers
_BINDS = ("blockIdx.x", "vthread.x", "threadIdx.x")
_REGISTERS_AT, _LOCAL_AT = 3, 4  # levels of the structure under which results and operands are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How contractions are tiled."""

    shared_reads: bool  # copy the operands of a group's tile through local memory
    vector_lens: tuple[int, ...]  # elements of one load of such a copy
    innermost: int  # most elements of a tile's innermost level, per axis


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """What MetaSchedule's rules are given for a family."""

    tile: GroupTile | None  # of the grouped sketch
    tiling: Tiling | None  # where that does not fit; without it contractions are only bound
    threads: tuple[int, ...]  # work-items per work-group to choose from
    grid: int  # most work-groups of what is bound without tiles; beyond that work-items loop
    unroll: tuple[int, ...]  # steps to choose from

    def within(self, rules: ScheduleRules) -> GroupRules:
        """Without what the profile rules out: larger work-groups, copies into local memory."""
        local = rules.local_memory
        return replace(
            self,
            tile=self.tile and replace(self.tile, shared=self.tile.shared and local),
            tiling=self.tiling and replace(self.tiling, shared_reads=self.tiling.shared_reads and local),
            threads=tuple(t for t in self.threads if t <= rules.max_threads) or (1,),
        )


def group_space(func: tirx.PrimFunc, target: Target, rules: GroupRules) -> list[Schedule]:
    """Every schedule that the rules make of `func`, with its numbers open; some may be bound incompletely.

    `group_postprocs` completes them; candidates are worth nothing without.
    """
    generator = ms.space_generator.PostOrderApply(sch_rules=_rules(rules), postprocs=[], mutator_probs={})
    strategy = ms.search_strategy.ReplayTrace()
    context = tune_context(as_module(func), target, generator, strategy, seed=1, threads=1)
    return list(context.generate_design_space())


def group_postprocs(rules: GroupRules) -> list[ms.Postproc]:
    """What turns a draw from `group_space` into a kernel."""
    p = ms.postproc
    return [
        p.DisallowDynamicLoop(),
        p.RewriteCooperativeFetch(),
        p.RewriteUnboundBlock(rules.grid),
        p.RewriteParallelVectorizeUnroll(),
        p.RewriteReductionBlock(),
    ]


def _rules(rules: GroupRules) -> list[ms.ScheduleRule]:
    r = ms.schedule_rule
    made: list[ms.ScheduleRule] = [r.InlineConstantScalars(), _inline()]
    if rules.tiling is not None:
        made = [_tiling(rules.tiling), *made]
    if len(rules.threads) > 1:
        made.append(r.CrossThreadReduction(thread_extents=list(rules.threads)))
    if len(rules.unroll) > 1:
        made.append(
            r.ParallelizeVectorizeUnroll(
                max_jobs_per_core=-1,
                max_vectorize_extent=-1,
                unroll_max_steps=list(rules.unroll),
                unroll_explicit=True,
            )
        )
    made.append(
        r.AutoBind(
            max_threadblocks=rules.grid,
            thread_extents=list(rules.threads),
            max_threads_per_block=max(rules.threads),
        )
    )
    return made


def _tiling(tiling: Tiling) -> ms.ScheduleRule:
    return ms.schedule_rule.MultiLevelTiling(
        structure=_STRUCTURE,
        tile_binds=list(_BINDS),
        max_innermost_factor=tiling.innermost,
        vector_load_lens=list(tiling.vector_lens) if tiling.shared_reads else None,
        reuse_read=ReuseType(req="must", levels=[_LOCAL_AT], scope="shared") if tiling.shared_reads else None,
        reuse_write=ReuseType(req="must", levels=[_REGISTERS_AT], scope="local"),
    )


def _inline() -> ms.ScheduleRule:
    return ms.schedule_rule.AutoInline(
        into_producer=True,
        into_consumer=True,
        inline_const_tensor=True,
        disallow_if_then_else=False,
        require_injective=False,
        require_ordered=False,
        disallow_op=None,
    )
