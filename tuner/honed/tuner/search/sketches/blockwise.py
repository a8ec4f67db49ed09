"""Schedules products with packed constants in blocks that share a scale, as language models have them.

A work-item computes a tile of rows and vectors of columns. It adds up a block in registers, out of words that
it unpacks as it goes, and scales that sum once. On processors words and scales lie in panels one vector of
columns wide, so that they are read from end to end. Where work-items of a group share work, they share the
blocks of a single row: its columns alone would keep no device busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import LoopRV, SBlockRV

from honed.machine.families import DriverClass
from honed.tuner.lower import ROLLED
from honed.tuner.search.packing import launch_rows, pack
from honed.tuner.search.parts import (
    BlockInfo,
    Keep,
    SketchLimits,
    accumulate,
    alone,
    below,
    best_group,
    bind,
    by_single_items,
    compute_in,
    fuse,
    hold,
    is_constant,
    is_elementwise,
    lanes_of,
    parts,
    reads_along,
    require,
    sample_tile,
    sketch,
    store_partial,
    sum_steps,
    vectorise,
    write_out,
)
from honed.tuner.search.traces import ScheduleTrace, divisors


@sketch(75)
def blockwise(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile a product that sums blocks before it scales them."""
    found = parts(schedule, Keep.NOTHING)
    require(_is_blockwise(found))
    sums, whole, *tails = found
    lanes = lanes_of(whole.extents[-2], most)
    laid_out = _lay_out(schedule, sums, whole, lanes) if limits.groups_of_one else []
    outer, tile, blocks = _tile(schedule, whole, lanes, limits)
    under = bind(schedule, outer, limits)
    result = accumulate(schedule, found[1:])
    schedule.reverse_compute_at(result, under, preserve_unit_loops=True)
    vectorise(schedule, result, under, lanes, limits)
    write_out(schedule, tile)
    compute_in(schedule, sums.block, blocks, "local")
    *rows, columns, terms = below(schedule, sums.block, blocks)
    holds = by_single_items(limits)
    most_written = min(limits.unroll, _of_word(schedule, sums)) if holds else limits.unroll
    steps, written, count = sample_tile(schedule, terms, most_written)
    vectors, vector = schedule.split(columns, [None, lanes])
    schedule.reorder(steps, written, *rows, vectors, vector)
    if holds:
        hold(schedule, sums.block, _still_operand(schedule, sums), steps, count)
        if limits.loads_ahead and math.prod(whole.extents[:-2]) > 1:
            schedule.annotate(steps, ROLLED, 1)
    write_out(schedule, [written, *rows, vectors, vector])
    schedule.decompose_reduction(sums.block, steps)
    schedule.decompose_reduction(whole.block, blocks)
    for block in laid_out:
        launch_rows(schedule, block, lanes)
    if tails and not is_elementwise(tails[0], whole):
        alone(schedule, tails[0], limits, most)


_ITEMS = 32  # Columns of a group at most, and work-items that share each


@sketch(74)
def share_blocks(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Share the blocks of one row among the work-items of a group, which then add up their partial sums."""
    require(not limits.contractions)
    found = parts(schedule, Keep.NOTHING)
    require(_is_blockwise(found))
    sums, whole, *tails = found
    require(math.prod(whole.extents[:-2]) == 1)
    *ones, columns, blocks = schedule.get_loops(whole.block)
    group, item, items = sample_tile(schedule, columns, _ITEMS)
    mine, part, slices = sample_tile(schedule, blocks, _ITEMS)
    schedule.reorder(*ones, group, part, item, mine)
    partial = schedule.rfactor(part, 0)
    *ones, group, part, item, mine = schedule.get_loops(partial)
    groups, thread = fuse(schedule, [*ones, group]), fuse(schedule, [part, item])
    schedule.bind(groups, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    store_partial(schedule, partial, thread)
    sum_steps(schedule, sums, partial, mine, limits)
    if tails and is_elementwise(tails[0], whole):
        schedule.set_scope(whole.block, 0, "shared")
        result = tails[0].block
    else:
        result = schedule.cache_write(whole.block, 0, "shared")
        for tail in tails:
            alone(schedule, tail, limits, most)
    for block in (whole.block, result):  # Both precede the splits, because TVM ignores conditions here
        schedule.reverse_compute_at(block, groups, preserve_unit_loops=True)
    for block in (whole.block, result):
        _, *threads = schedule.split(below(schedule, block, groups)[-1], [None, slices, items])
        schedule.bind(fuse(schedule, threads), "threadIdx.x")
    summed, *_, thread = below(schedule, whole.block, groups)
    schedule.reorder(thread, summed)
    schedule.decompose_reduction(whole.block, summed)


def _is_blockwise(all_blocks: Sequence[BlockInfo]) -> bool:
    """Return whether blocks are sums [rows, blocks, columns] over terms, summed up, and perhaps a tail."""
    if [part.is_reduction for part in all_blocks] not in ([True, True], [True, True, False]):
        return False
    sums, whole = all_blocks[:2]
    last = len(whole.kinds) - 1
    if last < 1 or whole.reducing != [last] or sums.reducing != [last + 1]:
        return False
    *rows, columns, blocks = whole.extents
    return sums.extents[:-1] == (*rows, blocks, columns)


def _still_operand(schedule: Schedule, sums: BlockInfo) -> int:
    """Return the number of the operand that the columns of a product do not move along."""
    along = reads_along(schedule, sums.block, len(sums.kinds) - 2)
    return next(n for n in range(len(schedule.get(sums.block).reads)) if n not in along)


def _of_word(schedule: Schedule, sums: BlockInfo) -> int:
    """Return how many numbers a word has, by the words [blocks, words, 1, columns]; zeros have 1 for each."""
    reads = schedule.get(sums.block).reads
    along = reads_along(schedule, sums.block, len(sums.kinds) - 2)
    return sums.extents[-1] // max(int(reads[n].source.shape[1]) for n in along)


def _lay_out(schedule: Schedule, sums: BlockInfo, whole: BlockInfo, lanes: int) -> list[SBlockRV]:
    """Return the blocks that lay out the constants that are read along the columns."""
    return [
        pack(schedule, part.block, n, columns, lanes)
        for part, columns in ((sums, len(sums.kinds) - 2), (whole, len(whole.kinds) - 2))
        for n in reads_along(schedule, part.block, columns)
        if is_constant(schedule, schedule.get(part.block).reads[n].source)
    ]


def _tile(
    schedule: Schedule, whole: BlockInfo, lanes: int, limits: SketchLimits
) -> tuple[list[LoopRV], list[LoopRV], LoopRV]:
    """Return the loops of the grid, those of a tile with the lanes last, and the loop over blocks."""
    *outer, columns, blocks = schedule.get_loops(whole.block)
    rest, vector = schedule.split(columns, [None, lanes])
    groups, vectors, _ = sample_tile(schedule, rest, limits.vectors)
    tile = [vectors, vector]
    rows = [n for n, extent in enumerate(whole.extents[:-2]) if extent > 1]
    if rows:
        outer[rows[-1]], held, _ = sample_tile(schedule, outer[rows[-1]], limits.tile)
        tile.insert(0, held)
    outer.append(groups)
    schedule.reorder(*outer, blocks, *tile)
    return outer, tile, blocks


_MOST, _MOST_IN_GROUPS = 12, 4  # Vectors of a tile, as sums of a block and again as sums of all
_MOST_ROWS = 6  # Rows of a tile: each is broadcast on its own
# Malis unpack a vector once for as many rows as registers hold sums for. 4 rows of 8 halves spill by Mesa
# before 26.1, which gives a half a register of its own. A single row is bound by memory: many work-items read
# more at once.
_ROWS, _SUMS, _FEW_SUMS, _SUMS_OF_ONE_ROW = 4, {DriverClass.MESA_26: 32}, 16, 4


def blockwise_tile(sketch: ScheduleTrace, driver: DriverClass) -> ScheduleTrace | None:
    """Return the sketch with its best tile; None where it is of another kind, or its vectors are too long."""
    holds = sketch.names.count("CacheRead")
    counts = sketch.names.count("DecomposeReduction"), sketch.names.count("ComputeAt")
    if holds > 1 or counts != (2, 1 + holds) or len(sketch.tiles) < 2:
        return None
    (_, columns), *between, (last, terms) = sketch.tiles
    rows, most = (between[:-1], _MOST_IN_GROUPS) if sketch.by_groups else (between, _MOST)
    if holds:
        most = (_SUMS.get(driver, _FEW_SUMS) if rows else _SUMS_OF_ONE_ROW) // sketch.lanes
        if most < (_ROWS if rows else 1):
            return None
    allowed = [divisors(columns.extent, columns.most), *(divisors(one.extent, _MOST_ROWS) for _, one in rows)]
    fitting = [steps for steps in product(*allowed) if math.prod(steps) <= most]
    if holds or sketch.by_groups:  # A vector is unpacked once for all rows
        steps = max(fitting, key=lambda s: (math.prod(s[1:]), s[0]))
    else:
        steps = max(fitting, key=lambda s: (math.prod(s) / sum(s), s[0]))
    changed = sketch.cut(steps) | {last: terms.cut(divisors(terms.extent, terms.most)[-1])}
    if sketch.by_groups:
        place, threads = between[-1]
        items = columns.extent * math.prod(one.extent for _, one in rows) // math.prod(steps)
        changed[place] = threads.cut(best_group(items, threads.most), items)
    return sketch.with_most(changed)


_LEAST_ITEMS, _MANY_GROUPS = 8, 1024  # Columns whose words are a sector of 32 bytes; groups for any device
_MOST_THREADS = 256  # Work-items of a group
_SHARED = 3  # Reductions that are decomposed where a group shares the blocks


def shares_blocks(sketch: ScheduleTrace) -> bool:
    """Return whether work-items of a group share the blocks of a row."""
    counts = sketch.names.count("DecomposeReduction"), sketch.names.count("RFactor"), len(sketch.tiles)
    return counts == (_SHARED, 1, _SHARED)


def shared_tile(sketch: ScheduleTrace) -> ScheduleTrace | None:
    """Return the sketch with as many groups as keep a device busy; None where it is of another kind."""
    if not shares_blocks(sketch):
        return None
    (first, columns), (second, blocks), (last, terms) = sketch.tiles
    wide = [n for n in divisors(columns.extent, columns.most) if n >= _LEAST_ITEMS]
    items = next((n for n in wide if columns.extent // n <= _MANY_GROUPS), (wide or [1])[-1])
    slices = divisors(blocks.extent, min(blocks.most, _MOST_THREADS // items))[-1]
    written = divisors(terms.extent, terms.most)[-1]
    return sketch.with_most({first: columns.cut(items), second: blocks.cut(slices), last: terms.cut(written)})
