"""Provides the held sketch, whose work-items hold tiles of operands in registers, and its tiles for Malis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ExprRV, LoopRV

from honed.machine.families import DriverClass
from honed.tuner.lower import ROLLED
from honed.tuner.lower.sums import LONGEST, MOST_OF_TURN
from honed.tuner.search.packing import flatten
from honed.tuner.search.parts import (
    LINE,
    REDUCE,
    WARP,
    BlockInfo,
    Keep,
    SketchLimits,
    accumulate,
    busiest,
    by_single_items,
    calls,
    contraction,
    fuse,
    hold,
    lanes_of,
    last_axis,
    launch_others,
    off_usual,
    planes,
    require,
    require_found,
    sample_tile,
    sketch,
    vectorise,
    write_out,
)
from honed.tuner.search.traces import Decision, ScheduleTrace, Tile, divisors

# The held sketch: a work-item holds tiles of its operands in registers while it multiplies them. For
# contractions on devices whose compilers load every operand in place. An operand that lies along the
# reduction (the rows of a left matrix) is loaded in vectors of several steps before the first of them, one
# that lies along the lanes (the rows of a right matrix) in whole vectors step by step; every multiplication
# then reads registers. Work-items are two-dimensional, neighbours along the lanes, so that the elements of
# one row that a warp loads lie side by side.

_MOST_WINDOW = 25  # Unrolled steps of a convolution's window: 5 x 5
_TURN = 4  # Vectors along the reduction in a turn of its loop
# Terms of the longest sums whose loops Mesa 25 unrolls: their halves go in pairs, and need no turns. Twice as
# many where the results pass through a sigmoid, as it then unrolls before it takes vectors apart.
_UNROLLED, _SIGMOID = 32, frozenset({"sigmoid"})


@dataclass(frozen=True, slots=True)
class _HeldTile:
    """A work-item's share of one axis: the loop, and the number of its steps, open or fixed."""

    loop: LoopRV
    steps: ExprRV | int


@dataclass(slots=True)
class _HeldLoops:
    """The loops of a contraction by level; `tiles` are those of a work-item, by the number of their axis."""

    groups: list[LoopRV]
    threads: list[LoopRV]  # At most two: of the rows, then of the lanes
    outside: list[LoopRV]  # Loops of the reduction
    inside: list[int]  # The unrolled axes of the reduction
    vector: list[LoopRV]  # The lanes
    tiles: dict[int, _HeldTile]
    # Loops of the reduction in a turn, around those that an operand is held for
    turn: list[LoopRV] = field(default_factory=list)


@sketch(10)
def tile_held(schedule: Schedule, limits: SketchLimits, most: int) -> None:
    """Tile a contraction over work-items that hold its operands."""
    require(by_single_items(limits))
    before, rest = contraction(schedule, Keep.PADDING)
    rest = flatten(schedule, before, rest) or rest
    main = rest[0]
    reads = range(len(schedule.get(main.block).reads))
    along = [require_found(last_axis(schedule, main.block, n)) for n in reads]
    lanes = lanes_of(main.extents[main.spatial[-1]], most)
    laned = main.spatial[-1]
    turns = limits.pairs_in_turns and laned in along and not _is_unrolled(schedule, rest)
    rolled = _loads_too_much(schedule, rest, lanes)
    loops = _split(schedule, main, limits, lanes, turns=turns)
    require(all(axis in loops.tiles for axis in along))
    written_out = [loops.tiles[n].loop for n in loops.inside]
    spatial = [loops.tiles[n].loop for n in main.spatial if n in loops.tiles]
    within = [*written_out, *spatial]
    if loops.turn:  # A turn has the sums of one vector of each row open at once
        within = [spatial[-1], *loops.turn, *within[:-1]]
    schedule.reorder(*loops.groups, *loops.threads, *loops.outside, *within, *loops.vector)
    under = _bind(schedule, loops)
    tail = accumulate(schedule, rest)
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    vectorise(schedule, tail, under, lanes, limits)
    for number, axis in enumerate(along):
        at = [*loops.outside, *loops.turn][-1] if main.kinds[axis] == REDUCE else written_out[-1]
        width = lanes if axis == laned else loops.tiles[axis].steps
        hold(schedule, main.block, number, at, width)
    write_out(schedule, [*within, *loops.vector])
    schedule.decompose_reduction(main.block, loops.outside[0])
    if limits.loads_ahead and rolled:
        schedule.annotate(loops.outside[-1], ROLLED, 1)
    launch_others(schedule, before, rest, limits, most)


def _is_unrolled(schedule: Schedule, rest: Sequence[BlockInfo]) -> bool:
    """Return whether Mesa 25 unrolls the loop over a sum, whose results the other parts use."""
    main, *tail = rest
    sigmoid = any(calls(schedule, part.block, _SIGMOID) for part in tail)
    return main.reduced <= _UNROLLED * (1 + sigmoid)


def _loads_too_much(schedule: Schedule, rest: Sequence[BlockInfo], lanes: int) -> bool:
    """Return whether a loop over a sum would spill where its compiler unrolls it and loads ahead.

    Rows of few vectors spill, too, as do those of eight where a sum is added up twice, and results that a
    mask chooses.
    """
    main, *tail = rest
    vectors = main.extents[main.spatial[-1]] // lanes
    read = (str(one.source.dtype) for part in tail for one in schedule.get(part.block).reads)
    masked = any(not dtype.startswith("float") for dtype in read)
    return masked or vectors < _WIDE or (vectors == _WIDE and main.reduced > LONGEST)


def _split(
    schedule: Schedule, main: BlockInfo, limits: SketchLimits, lanes: int, *, turns: bool
) -> _HeldLoops:
    """Split the axes; the last of the output has the lanes, the one before it the rows of a group.

    With `turns` a turn of the loop over a sum of halves has several vectors along it.
    """
    found = _HeldLoops([], [], [], [], [], {})
    result = schedule.get(main.block).writes[0].source
    loops, what = schedule.get_loops(main.block), main
    *others, last = what.spatial
    rows = max((n for n in others if what.extents[n] > 1), default=None)
    for n in others:
        loop = loops[n]
        if what.extents[n] > 1:
            loop, found.tiles[n] = _tile(schedule, loop, limits.tile)
        if n == rows:
            loop, threads, _ = sample_tile(schedule, loop, max(limits.threads))
            found.threads.append(threads)
        found.groups.append(loop)
    vectors, vector = schedule.split(loops[last], [None, lanes])
    found.vector.append(vector)
    outer, found.tiles[last] = _tile(schedule, vectors, limits.vectors)
    outer, threads, _ = sample_tile(schedule, outer, max(limits.threads))
    found.groups.append(outer)
    found.threads.append(threads)
    long = [n for n in what.reducing if what.extents[n] > 1]
    found.outside = [loops[n] for n in what.reducing if n not in long]
    if len(long) == 1:
        widest = max(int(read.source.dtype.bits) for read in schedule.get(main.block).reads) // 8
        most = min(limits.unroll, limits.vector_bytes // widest)
        outer, found.tiles[long[0]] = _tile(schedule, loops[long[0]], most)
        if turns and str(result.dtype) == "float16":
            outer, turn, _ = sample_tile(schedule, outer, _TURN)
            found.turn.append(turn)
        found.outside.append(outer)
        found.inside = long
        return found
    if math.prod(what.extents[n] for n in long[1:]) > _MOST_WINDOW:
        raise ValueError("a window is too large to be written out")
    found.outside.append(loops[long[0]])
    found.inside = long[1:]
    found.tiles |= {n: _HeldTile(loops[n], what.extents[n]) for n in found.inside}
    return found


def _tile(schedule: Schedule, loop: LoopRV, most: int) -> tuple[LoopRV, _HeldTile]:
    """Split off at most `most` steps of a loop for a work-item, a sampled number."""
    outer, inner, steps = sample_tile(schedule, loop, most)
    return outer, _HeldTile(inner, steps)


def _bind(schedule: Schedule, loops: _HeldLoops) -> LoopRV:
    """Bind groups and work-items, the lanes' axis to x; return the loop that a work-item runs under."""
    *others, along = loops.groups
    if others:
        schedule.bind(fuse(schedule, others), "blockIdx.y")
    schedule.bind(along, "blockIdx.x")
    for loop, tag in zip(reversed(loops.threads), ("threadIdx.x", "threadIdx.y"), strict=False):
        schedule.bind(loop, tag)
    return loops.threads[-1]


# A step of the sum loads one element for each row of the tile and one for each column, and multiplies each
# with each: the squarer and larger the tile, the fewer loads. The size at which its kernel spills is data,
# compiled by Mesa for products of many shapes (docs/dev/measurements.md).

# Work-items along the lanes, where the cores have as much to do. Where rows are shorter, as of images of 4 x
# 4, Mesa 26.2 unrolls the loop over the sum and loads ahead until its registers spill.
_WIDE = 8
_TILES = 5  # Tiles of a product at least
_ITEMS = 256  # Work-items of a group at most, as the family's rules say
_FMA = 4  # Multiply-adds of a work-item in a clock
_VECTOR_BYTES = 16  # Bytes of an operand that `tile_held` loads at most
_SINGLE = 4  # Bytes of an element that is not multiplied in pairs
_ADDRESS = {DriverClass.MESA_26: 4}  # Instructions for the address of a load, by class of drivers
_LOADED = {DriverClass.MESA_26: 8}  # Elements that one instruction loads, by class of drivers
_LEAST_LOADED = 4  # Default for drivers of other classes
_CLEARLY = 1.05  # Factor in clocks by one bound from which a board tries both tiles


@dataclass(frozen=True, slots=True)
class _Room:
    """Accumulators that registers hold, and the steps of the sum that rows are then loaded for at once."""

    element_bytes: int
    lanes: int  # Lanes of a vector
    # Largest number of terms of the sum: halves are added up twice from 257 on (lower.sums.LONGEST)
    terms: float
    accumulators: int
    steps: int
    over: int = 0  # Applies to sums of more terms: Mesa unrolls loops of few turns and loads ahead in them


_ROOMS_OF_ALL = (
    _Room(2, 8, 256, 40, 4),
    _Room(2, 8, math.inf, 32, 4),
    _Room(2, 4, 256, 32, 4),
    _Room(2, 4, math.inf, 20, 2),
    _Room(4, 4, 32, 24, 2),
    _Room(4, 4, math.inf, 40, 1, over=32),
)
_ROOMS = (*_ROOMS_OF_ALL, _Room(4, 4, math.inf, 32, 2, over=63))
# Mesa 26.1 and later: two halves share a register. Tiles of 8 x 8 take fewer loads, but spill for some
# products, those of 6 x 8 where a sum is added up twice.
_ROOMS_OF = {
    DriverClass.MESA_26: (
        *_ROOMS_OF_ALL,
        _Room(2, 8, 256, 48, 4),
        _Room(2, 8, 128, 64, 2, over=64),
        _Room(4, 4, math.inf, 32, 2, over=64),
    )
}
# Sums of halves where each turn of a loop adds sixteen terms up before it adds them to the carried ones.
_ROOMS_OF_TURNS = (_Room(2, 4, math.inf, 24, 4), _Room(2, 4, 256, 32, 4))
_TRIALS = {
    DriverClass.MESA_26: (
        _Room(2, 8, math.inf, 48, 4),
        _Room(2, 8, math.inf, 64, 2),
        _Room(2, 8, math.inf, 32, 4),  # Leaves registers for pointers: by `alu` 331 us for 349 with 6 x 8
        _Room(2, 8, math.inf, 48, 8),  # Loads 16 bytes of both operands: 337 us, and spills by a hair
    )
}


@dataclass(frozen=True, slots=True)
class _Product:
    """The tiles of a sketch with the places of their steps, and the lanes of its vectors."""

    others: list[tuple[int, Tile]]
    rows: tuple[int, Tile]
    high: tuple[int, Tile]
    vectors: tuple[int, Tile]
    wide: tuple[int, Tile]
    steps: tuple[int, Tile]
    turn: list[tuple[int, Tile]]  # Tile of the steps in a turn, where there is one
    lanes: int
    vectors_of_rows: bool  # Rows are loaded in vectors

    @property
    def beside(self) -> int:
        """Products that are computed at once."""
        return math.prod(tile.extent for _, tile in self.others)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the widest operand."""
        return _VECTOR_BYTES // self.steps[1].most

    def warps(self, cut: _Cut) -> int:
        """Return the number of warps that the busiest core runs."""
        items = (self.rows[1].extent // cut.rows) * (self.vectors[1].extent // cut.vectors)
        return busiest(cut.high * cut.wide, self.beside * items)

    def rooms(self, among: Sequence[_Room]) -> list[_Room]:
        """Return the rooms of its type and vectors."""
        kind, terms = (self.element_bytes, self.lanes), self.steps[1].extent
        return [
            one for one in among if (one.element_bytes, one.lanes) == kind and one.over < terms <= one.terms
        ]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A candidate tile: rows and vectors of a work-item, work-items along both, and steps of the sum."""

    rows: int
    high: int
    vectors: int
    wide: int
    steps: int


def held_tiles(sketch: ScheduleTrace, driver: DriverClass, *, trial: bool) -> list[ScheduleTrace]:
    """Return the sketch with its best tile, in a `trial` also with those that only a board can judge.

    The latter may spill with the driver, or are better by one of the two bounds. Return none where it is of
    another kind, has no rows or has short vectors.
    """
    found = _product(sketch)
    if found is None:
        return []
    served = _ROOMS_OF_TURNS if found.turn else _ROOMS_OF.get(driver, _ROOMS)
    rooms: list[tuple[_Room, ...]] = [served]
    if trial:
        rooms += [(room,) for room in _TRIALS.get(driver, ())]
    best = [min(_cuts(found, one), key=lambda cut: _rank(found, cut, driver), default=None) for one in rooms]
    chosen = [cut for cut in best if cut is not None]
    if trial and best[0] is not None and not found.turn:
        chosen += _by_one_bound(found, best[0], list(_cuts(found, served)), driver)
    return [sketch.with_most(_decisions(found, cut)) for cut in dict.fromkeys(chosen)]


def _by_one_bound(product: _Product, served: _Cut, among: Sequence[_Cut], driver: DriverClass) -> list[_Cut]:
    """Return the tiles that are clearly better than the `served` one by a bound of the bench.

    By the busiest pipe addresses cost nothing; by `alu` they are issued as multiplications are.
    """
    loaded, found = _LOADED.get(driver, _LEAST_LOADED), list[_Cut]()
    for address in dict.fromkeys((0, _ADDRESS.get(driver, 0))):

        def clocks(cut: _Cut, address: int = address) -> float:
            return max(_lines(product, cut, loaded), _issue_clocks(product, cut, address))

        best = min(among, key=clocks)
        if clocks(served) > _CLEARLY * clocks(best):
            found.append(best)
    return found


def held_clocks(start: ScheduleTrace, driver: DriverClass = DriverClass.ARM) -> float:
    """Return the clocks of the busiest core for a step of the sum with a tile of `held_tiles`, else 0."""
    found = _product(start)
    if found is None:
        return 0.0
    tiles = (found.rows, found.high, found.vectors, found.wide, found.steps)
    return _rank(found, _Cut(*(tile.factors[-1] for _, tile in tiles)), driver)[0]


def _product(sketch: ScheduleTrace) -> _Product | None:
    text, tiles = str(sketch.steps), sketch.tiles
    packs = "TransformLayout" in text and "TransformBlockLayout" not in text
    if "threadIdx.y" not in text or packs:
        return None
    for end in range(len(tiles), max(_TILES, len(tiles) - 1) - 1, -1):
        *others, rows, high, vectors, wide, steps = tiles[:end]
        if high[1].most == wide[1].most:
            by_vectors = sketch.splits_by(rows[0]) > 1
            own = rows, high, vectors, wide, steps, tiles[end:]
            return _Product(others, *own, sketch.lanes, by_vectors)
    return None  # The sum has several axes


def _cuts(product: _Product, rooms: Sequence[_Room]) -> Iterator[_Cut]:
    """Yield all tiles that fit the registers, in groups of whole warps."""
    rows, vectors = product.rows[1], product.vectors[1]
    for room in product.rooms(rooms):
        steps = math.gcd(product.steps[1].extent, room.steps)
        for tall in divisors(rows.extent, rows.most):
            if product.vectors_of_rows and tall & (tall - 1):
                continue
            most = min(vectors.most, room.accumulators // (tall * product.lanes))
            for long in divisors(vectors.extent, most):
                high_wide = rows.extent // tall, vectors.extent // long
                items = math.prod(high_wide) * product.beside
                for high, wide in planes(*high_wide, _ITEMS, items):
                    yield _Cut(tall, high, long, wide, steps)


def _rank(product: _Product, cut: _Cut, driver: DriverClass) -> tuple[float, ...]:
    """Rank by clocks, then by how far the group is from the usual one; rows are loaded in long vectors.

    A clock loads a line. Where turns are added up the slower of loads and multiplications counts, else the
    root of the squares of the clocks of both, which is between the bounds of the bench.
    """
    beside = abs(math.log2(cut.wide / _WIDE)), off_usual(cut.high * cut.wide)
    lines = _lines(product, cut, _LOADED.get(driver, _LEAST_LOADED))
    if product.turn:
        clocks = max(lines, _multiply_clocks(product, cut))
    else:
        clocks = math.hypot(lines, _issue_clocks(product, cut, _ADDRESS.get(driver, 0)))
    return clocks, lines, -cut.steps, *beside, cut.rows


def _multiply_clocks(product: _Product, cut: _Cut) -> float:
    """Return the clocks in which the busiest core multiplies halves for a step of the sum.

    Halves go in pairs where turns are added up, with one addition after the terms of a turn.
    """
    alone = cut.rows * product.lanes > MOST_OF_TURN
    each = 1.0 if alone else 1 / 2 + 1 / (_TURN * cut.steps)
    return product.warps(cut) * cut.rows * cut.vectors * product.lanes * each / _FMA


def _issue_clocks(product: _Product, cut: _Cut, address: int) -> float:
    """Return the clocks in which the busiest core issues a step of the sum's instructions, halves in pairs.

    These are multiplications, and `address` additions for the address of each load.
    """
    columns = cut.vectors * product.lanes * product.element_bytes
    multiplied = cut.rows * columns / _SINGLE
    loads = cut.rows / cut.steps + math.ceil(columns / _VECTOR_BYTES)
    return product.warps(cut) * (multiplied + address * loads) / _FMA


def _lines(product: _Product, cut: _Cut, loaded: int) -> float:
    """Return the lines of memory that the busiest core touches for a step of the sum.

    An instruction loads `loaded` elements. Rows are loaded for several steps at once.
    """
    size, group = product.element_bytes, cut.high * cut.wide
    span = cut.vectors * product.lanes * size  # Bytes of a row that belong to a work-item
    warps = [range(n, min(n + WARP, group)) for n in range(0, group, WARP)]
    touched = 0.0
    for warp in warps:
        down, across = {n // cut.wide for n in warp}, {n % cut.wide for n in warp}
        loads = range(0, span, loaded * size)
        columns = sum(len({(place * span + at) // LINE for place in across}) for at in loads)
        touched += cut.rows * len(down) / cut.steps + columns
    return product.warps(cut) * touched / len(warps)


def _decisions(product: _Product, cut: _Cut) -> dict[int, Decision]:
    rows, columns = product.rows[1].extent, product.vectors[1].extent
    turns = product.steps[1].extent // cut.steps
    wanted = (
        *((tile, tile[1].extent, 1) for tile in product.others),
        (product.rows, rows, cut.rows),
        (product.high, rows // cut.rows, cut.high),
        (product.vectors, columns, cut.vectors),
        (product.wide, columns // cut.vectors, cut.wide),
        (product.steps, product.steps[1].extent, cut.steps),
        *((tile, turns, divisors(turns, tile[1].most)[-1]) for tile in product.turn),
    )
    return {place: tile.cut(inner, extent) for (place, tile), extent, inner in wanted}
