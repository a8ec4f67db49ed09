"""The tables that searches on GPUs and processors begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from honed.tuner.lower.opencl import lower_function
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules, traces
from honed.tuner.search.budget import launches_of
from honed.tuner.search.decisions import Drawn, Tile, read
from honed.tuner.search.draw import Drawing
from honed.tuner.search.starts import groups_of, starts

from .search_functions import dense, imagined, tasks

pytestmark = pytest.mark.tvm


def sketched(func: object, family: str = "gpu") -> list[Drawn]:
    one = imagined(family)
    return [read(traces.to_text(s.trace)) for s in rules.space(func, target_for(one), one)]


@pytest.mark.parametrize(
    ("m", "n", "k"), [(192, 512, 512), (1, 512, 256), (7, 13, 31), (1000, 24, 64), (1024, 1024, 1024)]
)
def test_rows_of_the_tables_fit_the_extents(m: int, n: int, k: int) -> None:
    func = dense(m, n, k)
    found = starts(sketched(func))
    assert found
    assert len({one.text() for one in found}) == len(found)
    for one in found:
        tiles = [d for d in one.decisions.values() if isinstance(d, Tile)]
        assert all(tile.factors[-1] <= tile.most for tile in tiles)
        played = traces.apply(one.text(), func).trace  # its tiles are of the loops that they split
        assert read(traces.to_text(played)).decisions == one.decisions


def test_a_large_product_begins_with_the_tile_that_was_fastest() -> None:
    (first, *_) = starts(sketched(dense(4096, 4096, 64)))
    inner = [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    assert inner == [8, 8, 2, 1, 16, 2, 16]


def test_an_images_columns_take_from_its_rows_what_they_are_too_few_for(tmp_path: Path) -> None:
    (task, *_) = tasks("convolution 1x1", tmp_path, imagined("gpu"))
    (first, *_) = starts(sketched(task.func))
    inner = [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    channels, rows, columns = inner[0:3], inner[3:6], inner[6:9]
    assert channels[0] > 1
    assert rows[1] * columns[1] > columns[1]


@pytest.mark.parametrize("family", ["cpu", "mali"])
def test_other_families_have_none(family: str) -> None:
    assert starts(sketched(dense(192, 512, 512), family)) == []


@pytest.mark.parametrize(("m", "n", "k"), [(192, 512, 512), (8, 64, 512), (1000, 24, 64)])
def test_the_groups_of_a_row_are_those_of_its_launch(m: int, n: int, k: int) -> None:
    one = imagined("gpu")
    drawing = Drawing(dense(m, n, k), one, seed=1)
    rows = [row for sketch in range(drawing.sketches) for row in drawing.tabled(sketch)]
    played = [(row, func) for row in rows if (func := drawing.played(row)) is not None]
    assert played
    for row, func in played:
        assert groups_of(row.row.drawn) == max(groups for _, groups in launches_of(func))


def test_draws_begin_with_the_tables_and_are_kernels() -> None:
    one, func = imagined("gpu"), dense(192, 512, 512)
    one = replace(one, limits=replace(one.limits, local_mem_bytes=48 << 10))  # NVIDIA's
    drawing = Drawing(func, one, seed=1)
    wanted = {text for made in starts(sketched(func)) for text in [str(sorted(made.decisions.items()))]}
    begun = [next(drawing.of(n)) for n in range(drawing.sketches)]
    same = [d for d in begun if str(sorted(read(d.trace).decisions.items())) in wanted]
    assert len(same) >= 3  # of the tile and of each number of slices
    for drawn in same:
        lower_function(drawn.scheduled, "main", target_for(one), one)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convolution 3x3", [1, 1, 13]),  # of 13 x 13 pixels a row, each of them a vector
        ("depthwise convolution", [1, 1, 7]),  # a single vector of channels has none beside it
        ("convolution 1x1 of rows of vectors", [4, 4, 1, 1]),  # channels, rows, vectors of pixels, no window
    ],
)
def test_processors_begin_with_the_best_rectangle(name: str, expected: list[int], tmp_path: Path) -> None:
    (task, *_) = tasks(name, tmp_path, imagined("cpu"))
    (first, *_) = starts(sketched(task.func, "cpu"))
    inner = [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    assert inner == expected
