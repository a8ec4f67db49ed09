"""Provides sketches: whole schedules of functions with open numbers, and numbers that do well in them.

Tile sizes, lanes and unrolling are sampled, so that the search can change them. Four shapes of work cover
models, on devices without local memory worth copying into:

- tile: one work-item computes a tile of the output in registers, vectorised along one axis of it (dense,
  batched matmul, convolution, pooling);
- rows and columns: one work-item computes whole rows or columns, with every reduction along them (softmax,
  normalisation, reductions);
- stream: one work-item moves a few vectors (elementwise chains, transposes, concatenation);
- whole: a reduction to a single element, in parts and then all of them.

Each is a function with the decorator `@sketch` (`search/parts.py`), in any file of this folder. Those that
`search/rules.py` calls by name are for functions of one form alone. Tables of good tiles, with which a search
begins, are beside their sketches.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from honed.machine.families import DriverClass
from honed.tuner.search.traces import ScheduleTrace

from .attention import attention_tile
from .blocked import blocked_rectangle, moved_lines
from .blockwise import blockwise_tile, shared_tile
from .convolutions import packed_tile, point_groups, window_tile
from .grouped import group_tiles, slices_of
from .held import held_tiles
from .one_row import one_row_tile
from .processors import rectangle
from .rows import shared_rows_tile

for _found in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_found.name)

# Tables of a single row: each function knows one kind of sketch.
_SINGLES = (
    rectangle,
    blocked_rectangle,
    moved_lines,
    window_tile,
    point_groups,
    attention_tile,
    shared_tile,
    one_row_tile,
    shared_rows_tile,
)


def starts(
    sketches: Sequence[ScheduleTrace], driver: DriverClass = DriverClass.ARM, *, trial: bool = False
) -> list[ScheduleTrace]:
    """Return the sketches that have tables, with the numbers of each row of their tables; none twice.

    On Malis they are those of the class of driver. In a `trial` there are rows, too, that are not served
    before they are measured.

    Of the grouped sketches, only the first without shared sums gets its table's rows, and every one with
    shared sums.
    """
    found: dict[str, ScheduleTrace] = {}
    tiled = False
    for sketch in sketches:
        rows = [one for single in _SINGLES if (one := single(sketch)) is not None]
        by_driver = (blockwise_tile(sketch, driver), packed_tile(sketch, driver))
        rows += [one for one in by_driver if one is not None]
        rows += held_tiles(sketch, driver, trial=trial)
        slices = slices_of(sketch)
        if slices is not None and (slices or not tiled):
            rows += group_tiles(sketch, slices)
            tiled = tiled or not slices
        found |= {one.text(): one for one in rows}
    return list(found.values())
