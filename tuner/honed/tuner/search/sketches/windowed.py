"""The windowed sketch: a work-item holds the piece of an image under its pixels while a window moves over it.

For convolutions of each channel by itself on devices whose compilers load every operand where it stands.
Neighbouring pixels read nearly the same elements: each is loaded once, the zeros around the image told apart
once, and all steps of the window read registers.
"""

from __future__ import annotations

from itertools import product

from tvm.s_tir import Schedule

from honed.tuner.search.decisions import Drawn, best_group, divisors
from honed.tuner.search.parts import (
    BlockPart,
    Keep,
    SketchLimits,
    accumulate,
    below,
    bind,
    by_single_items,
    contraction,
    lanes_of,
    last_axis,
    launch_others,
    maker,
    reads_along,
    sample_tile,
    sketch,
    step_along,
    vectorise,
)

_MOST_WINDOW = 25  # steps: 5 x 5
_MOST_STEPS = 200  # that are written out
_PIXELS = 16  # of a work-item; fewer where the window moves by several, over a larger piece
ROWS = 4  # of them at most


@sketch(40)
def windowed(schedule: Schedule, limits: SketchLimits, most: int) -> bool:
    """Tile the image of a convolution without a sum over channels. False where the function is none."""
    found = contraction(schedule, Keep.PADDING) if by_single_items(limits) else None
    if found is None:
        return False
    before, rest = found
    main = rest[0]
    image = _image(schedule, main)
    if image is None:
        return False
    spatial = main.spatial
    loops = schedule.get_loops(main.block)
    window = [loops[n] for n in main.reducing]
    step = step_along(schedule, main.block, image, spatial[-1])
    room = min(_PIXELS // step, _MOST_STEPS // main.reduced) if step else 0
    if room == 0:
        return False
    lanes = lanes_of(main.extents[spatial[-1]], min(most, room))
    outer = [loops[n] for n in spatial]
    pieces, vector = schedule.split(outer[-1], [None, lanes])
    outer[-1], pixels, _ = sample_tile(schedule, pieces, room // lanes)
    outer[-2], rows, _ = sample_tile(schedule, outer[-2], ROWS)
    schedule.reorder(*outer, *window, rows, pixels, vector)
    under = bind(schedule, outer, limits)
    tail = accumulate(schedule, rest)
    schedule.reverse_compute_at(tail, under, preserve_unit_loops=True)
    vectorise(schedule, tail, under, lanes, limits)
    padded = maker(schedule, main.block, image, before)
    if padded is not None:
        held = padded.block
        schedule.set_scope(held, 0, "local")
    else:
        held = schedule.cache_read(main.block, image, "local")
    schedule.compute_at(held, under, preserve_unit_loops=True)
    for loop in (*below(schedule, held, under), *window, rows, pixels, vector):
        schedule.unroll(loop)
    schedule.decompose_reduction(main.block, window[0])
    launch_others(schedule, [p for p in before if p is not padded], rest, limits, most)
    return True


def _image(schedule: Schedule, main: BlockPart) -> int | None:
    """The number of the operand that a window moves over; None where the function is another."""
    spatial = main.spatial
    if len(spatial) < 3 or not 1 < main.reduced <= _MOST_WINDOW:
        return None
    found = reads_along(schedule, main.block, spatial[-1])
    if len(found) != 1 or last_axis(schedule, main.block, found[0]) is not None:
        return None
    by_itself = any(len(reads_along(schedule, main.block, n)) == 2 for n in spatial[:-2])
    return found[0] if by_itself else None


# ---- Rectangles of the sketch `windowed` that do well on Malis, told from extents alone. Pure ----
#
# A work-item loads the piece of the image under its pixels and a border: the larger and squarer the
# rectangle, the less border. docs/measurements.md compares them with draws.

_BORDER = 2  # of a window of 3 x 3


def window_tile(sketch: Drawn) -> Drawn | None:
    """The sketch with its best rectangle; None where it is of another kind."""
    tiles = sketch.tiles
    if not sketch.by_groups or "ComputeAt" not in sketch.names:
        return None
    if len(tiles) != 3 or tiles[1][1].most != ROWS:
        return None
    (at_pixels, pixels), (at_rows, rows), (at_threads, threads) = tiles
    lanes = sketch.lanes
    fitting = (
        (long, tall)
        for long, tall in product(divisors(pixels.extent), divisors(rows.extent))
        if tall <= ROWS and long * tall <= pixels.most
    )
    long, tall = min(fitting, key=lambda cut: (_loads(cut[0] * lanes, cut[1]), -cut[0]))
    items = threads.extent * pixels.factors[1] * rows.factors[1] // (long * tall)
    group = best_group(items, threads.most)
    return sketch.with_most(
        {at_pixels: pixels.cut(long), at_rows: rows.cut(tall), at_threads: threads.cut(group, items)}
    )


def _loads(long: int, tall: int) -> float:
    """Elements of the image for each pixel."""
    return (long + _BORDER) * (tall + _BORDER) / (long * tall)
