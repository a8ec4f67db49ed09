"""The tables that searches begin with."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest
from tvm import te, tirx, topi

from honed.machine.families import DriverClass
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.lower.workload import mark_constants
from honed.tuner.search import rules, traces
from honed.tuner.search.budget import launches_of, size_of
from honed.tuner.search.draw import SpaceSampler
from honed.tuner.search.sketches import starts
from honed.tuner.search.sketches.convolutions import packed_clocks, window_tile
from honed.tuner.search.sketches.grouped import groups_of
from honed.tuner.search.sketches.held import held_clocks
from honed.tuner.search.traces import ScheduleTrace, Tile, read
from honed.tuner.tune.extract import extract
from honed.valhall.bench import bench_profile
from tests.tuner.graph.graphs import parsed
from tests.tuner.lower.test_decoders import packed as few_bits

from .search_functions import dense, imagined, tasks

pytestmark = pytest.mark.tvm


def sketched(func: object, family: str = "gpu") -> list[ScheduleTrace]:
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


def test_windows_of_several_rows_share_what_is_copied(tmp_path: Path) -> None:
    (task, *_) = tasks("convolution, padded after 3x3", tmp_path, imagined("gpu"))
    (first, *_) = starts(sketched(task.func))
    tiles = [d for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    _, rows, columns = (tiles[n : n + 3] for n in range(0, 9, 3))
    assert rows[1].factors[-1] > 1
    assert columns[1].factors[-1] > 1
    assert tiles[-1].most * 9 <= 64, "few channels at once: each brings nine terms"


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),  # vectors, rows and terms
    [
        (192, 512, 512, [4, 4, 4]),
        (191, 256, 256, [4, 4, 4]),  # rows are rounded up
        (97, 83, 131, [3, 5, 1]),
        (1, 1000, 1280, [3, 4]),
    ],
)
def test_constants_of_products_on_processors_are_laid_out_for_the_squarest_tile(
    m: int, n: int, k: int, expected: list[int]
) -> None:
    func = mark_constants(dense(m, n, k), [1], imagined("cpu"))
    first, *_ = starts(sketched(func, "cpu"))
    inner = [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    assert inner == expected


def test_processors_have_none_for_products_of_what_changes() -> None:
    assert starts(sketched(dense(192, 512, 512), "cpu")) == []


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "expected"),  # rows, work-items, vectors, work-items and steps of the sum
    [
        (192, 256, 256, "float16", [8, 4, 1, 16, 4]),
        (200, 256, 256, "float16", [8, 5, 1, 16, 4]),
        (200, 256, 512, "float16", [4, 10, 1, 8, 4]),  # a long sum is added up twice
        (49, 960, 160, "float16", [7, 1, 1, 16, 4]),  # vectors of 4 leave room for all divisors of the rows
        (128, 196, 512, "float16", [2, 16, 1, 7, 2]),  # groups of one column would touch a line for each row
        (192, 256, 256, "float32", [8, 4, 1, 16, 2]),
        (100, 400, 300, "float32", [5, 4, 1, 20, 2]),
        (16, 64, 64, "float16", [4, 2, 1, 8, 4]),  # a small product keeps all cores busy
    ],
)
def test_products_on_malis_begin_with_the_tile_of_fewest_clocks(
    m: int, n: int, k: int, dtype: str, expected: list[int]
) -> None:
    func, one = dense(m, n, k, dtype), imagined("mali")
    first = min(starts(sketched(func, "mali")), key=held_clocks)
    inner = [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    assert inner == expected
    scheduled = traces.apply(first.text(), func).mod["main"]
    assert rules.budget(one).allows(size_of(scheduled, 32), launches_of(scheduled))
    lower_function(scheduled, "main", target_for(one), one)


@pytest.mark.parametrize(
    ("driver", "terms", "trial", "rows"),
    [
        (DriverClass.ARM, 256, True, {4}),
        (DriverClass.MESA_26, 256, False, {6}),
        (DriverClass.MESA_26, 512, False, {4}),  # a tile of 6 x 8 spills where a sum is added up twice
        (DriverClass.MESA_26, 256, True, {4, 6, 8}),
        (DriverClass.MESA_26, 512, True, {4, 6, 8}),
    ],
)
def test_drivers_that_pair_halves_have_room_for_taller_tiles(
    driver: DriverClass, terms: int, trial: bool, rows: set[int]
) -> None:
    sketches = [one for one in sketched(dense(192, 256, terms, "float16"), "mali") if one.lanes == 8]
    found = starts(sketches, driver, trial=trial)
    assert {one.tiles[0][1].factors[-1] for one in found} == rows
    steps = {
        tiles[4][1].factors[-1] for one in found if (tiles := one.tiles)[0][1].factors[-1] == max(rows - {8})
    }
    assert (8 in steps) == (trial and driver is DriverClass.MESA_26), "16 bytes of both operands"


def test_halves_that_are_multiplied_in_pairs_wait_for_lines_that_few_columns_share() -> None:
    """Groups of two columns would touch twice as many lines, those of 4 x 8 load twice as often."""
    driver = DriverClass.MESA_26
    found = starts(sketched(dense(32, 2704, 128, "float16"), "mali"), driver)
    first = min(found, key=lambda one: held_clocks(one, driver))
    assert [tile.factors[-1] for _, tile in first.tiles] == [8, 1, 1, 169, 2]


def test_a_search_begins_with_what_either_bound_of_the_bench_calls_best_by_far() -> None:
    """By Mesa 26.2 the second takes 0.86 of the first's time by pipes, and 1.15 of it by `alu`."""
    sketches = sketched(dense(64, 2704, 64, "float16"), "mali")

    def tiles(*, trial: bool) -> list[list[int]]:
        found = starts(sketches, DriverClass.MESA_26, trial=trial)
        return [[tile.factors[-1] for _, tile in one.tiles][:5] for one in found]

    assert [4, 16, 1, 13, 4] in tiles(trial=False)
    assert [8, 4, 1, 52, 4] not in tiles(trial=False)
    assert [8, 4, 1, 52, 4] in tiles(trial=True)


@pytest.mark.parametrize(
    ("m", "k", "expected"),  # rows, work-items, vectors, work-items, steps of the sum and their turns
    [(192, 256, [6, 4, 1, 16, 4, 4]), (192, 512, [6, 4, 1, 16, 4, 4]), (64, 40, [4, 8, 1, 8, 4, 2])],
)
def test_mesa_25_adds_sixteen_terms_up_before_the_sum_that_a_loop_carries(
    m: int, k: int, expected: list[int]
) -> None:
    one = bench_profile("mali-g610", "25.0")
    drawing = SpaceSampler(dense(m, 256, k, "float16"), one, seed=1)
    (row,) = (row for sketch in range(drawing.sketches) for row in drawing.rows_of(sketch))
    assert [tile.factors[-1] for _, tile in row.drawn.tiles] == expected
    played = drawing.schedule_of(row)
    assert played is not None
    source = lower_function(played.mod["main"], "main", target_for(one), one).source
    turn = re.search(r"  for .*?\n  }", source, re.DOTALL)
    assert turn is not None
    rows, *_, steps, turns = expected
    assert turn[0].count("_part_") == rows * (1 + 2 * steps * turns + 1), "set, multiplied and added up"


@pytest.mark.parametrize(
    ("terms", "then", "rows", "turns"),
    [
        (32, "y = Relu(c)", 8, False),
        (64, "s = Sigmoid(c) y = Mul(c, s)", 8, False),
        (64, "y = Relu(c)", 4, True),
        (96, "s = Sigmoid(c) y = Mul(c, s)", 4, True),
    ],
)
def test_mesa_25_unrolls_short_sums_which_then_need_no_turns(
    terms: int, then: str, rows: int, turns: bool, tmp_path: Path
) -> None:
    (first, *_) = of_mesa_25(pointwise(terms, 64, then, tmp_path))
    steps = [tile.factors[-1] for _, tile in first.tiles]
    assert (steps[0], len(steps) == 6) == (rows, turns)


def test_a_product_of_one_row_is_no_packed_convolution(tmp_path: Path) -> None:
    """With its turns it has as many tiles as one."""
    assert of_mesa_25(pointwise(128, 1, "y = Sigmoid(c)", tmp_path)) == []


def pointwise(given: int, made: int, then: str, folder: Path) -> tirx.PrimFunc:
    """A convolution c without a window, and what is computed of it."""
    text = f"(float[1,{given},52,52] x, float[{made},{given},1,1] w) => (float[1,{made},52,52] y)"
    return in_halves(f"{text} {{ c = Conv (x, w) {then} }}", folder)


def of_mesa_25(func: tirx.PrimFunc) -> list[ScheduleTrace]:
    """The tables' rows for a function, the best first."""
    one = bench_profile("mali-g610", "25.0")
    sketches = [read(traces.to_text(sketch.trace)) for sketch in rules.space(func, target_for(one), one)]
    return sorted(starts(sketches, one.driver), key=lambda row: held_clocks(row, one.driver))


def test_rows_that_lie_side_by_side_are_as_many_as_a_vector_has() -> None:
    a, b = (te.placeholder((256, n), "float16", name=f"of{n}") for n in (192, 384))
    func = te.create_prim_func([a, b, topi.matmul(a, b, transp_a=True)])
    one = bench_profile("mali-g610", "26.2")
    drawing = SpaceSampler(func, one, seed=1)
    rows = [row for sketch in range(drawing.sketches) for row in drawing.rows_of(sketch)]
    assert {row.drawn.tiles[0][1].factors[-1] for row in rows} <= {4, 8}
    for row in rows:
        played = drawing.schedule_of(row)
        assert played is not None
        lower_function(played.mod["main"], "main", target_for(one), one)


@pytest.mark.parametrize(
    # By lanes: warps of a core, times the lines of its rows' and columns' loads; clocks of multiplications.
    ("m", "n", "k", "lines", "multiplied"),
    [
        (192, 256, 256, {4: 24 * (8 / 4 + 2), 8: 24 * (2 * 4 / 4 + 4)}, 96),
        (1280, 16, 112, {4: 10 * (8 + 1), 8: 8 * (10 + 2)}, 40),  # of eight lanes the elements would be fewer
    ],
)
def test_tiles_on_malis_compare_by_the_lines_that_a_step_touches_and_by_what_it_multiplies(
    m: int, n: int, k: int, lines: dict[int, float], multiplied: float
) -> None:
    found = starts(sketched(dense(m, n, k, "float16"), "mali"))
    clocks = {one.lanes: held_clocks(one) for one in found}
    assert clocks == {lanes: math.hypot(each, multiplied) for lanes, each in lines.items()}


@pytest.mark.parametrize(
    ("mesa", "columns", "turns"),
    [
        ("26.2", 16, [("get_group_id(2)", "3"), ("get_group_id(2)", "28")]),  # added up twice
        ("26.2", 64, [("get_group_id(2)", "3"), ("get_group_id(2)", "28")]),
        ("26.2", 128, [("0", "3"), ("0", "28")]),
        ("25.0", 16, [("0", "21")]),
    ],
)
def test_mesa_26_unrolls_no_sums_over_short_rows(
    mesa: str, columns: int, turns: list[tuple[str, str]]
) -> None:
    one, func = bench_profile("mali-g610", mesa), dense(112, columns, 336, "float16")
    drawing = SpaceSampler(func, one, seed=1)
    (first, *_) = (row for sketch in range(drawing.sketches) for row in drawing.rows_of(sketch))
    played = drawing.schedule_of(first)
    assert played is not None
    source = lower_function(played.mod["main"], "main", target_for(one), one).source
    assert re.findall(r"for \(int \w+ = (.+?); \w+ < (\d+);", source) == turns


@pytest.mark.parametrize(("dtype", "start"), [("bool", "get_group_id(2)"), ("float16", "0")])
def test_mesa_26_unrolls_no_sums_of_which_a_mask_chooses(dtype: str, start: str) -> None:
    of = [((64, 64), "float16"), ((64, 512), "float16"), ((64, 512), dtype)]
    a, b, mask = (te.placeholder(shape, kind, name=f"of{n}") for n, (shape, kind) in enumerate(of))
    product, zero = topi.matmul(a, b), tirx.const(0, dtype)
    chosen = te.compute(
        product.shape,
        lambda i, j: tirx.Select(mask[i, j] != zero, product[i, j], tirx.const(0, "float16")),
    )
    one = bench_profile("mali-g610", "26.2")
    drawing = SpaceSampler(te.create_prim_func([a, b, mask, chosen]), one, seed=1)
    (first, *_) = (row for sketch in range(drawing.sketches) for row in drawing.rows_of(sketch))
    played = drawing.schedule_of(first)
    assert played is not None
    source = lower_function(played.mod["main"], "main", target_for(one), one).source
    assert re.findall(r"for \(int \w+ = (.+?); \w+ < 16;", source) == [start]


@pytest.mark.parametrize(("m", "n", "k"), [(1, 256, 256), (192, 49, 64)])
def test_malis_have_none_for_products_of_a_vector_and_for_odd_columns(m: int, n: int, k: int) -> None:
    assert starts(sketched(dense(m, n, k, "float16"), "mali")) == []


def test_batches_are_no_part_of_a_tile() -> None:
    a, b = (
        te.placeholder(shape, "float16", name="ab"[n]) for n, shape in enumerate([(4, 96, 64), (4, 64, 96)])
    )
    func = te.create_prim_func([a, b, topi.nn.batch_matmul(a, b, transpose_b=False)])
    (first, *_) = starts(sketched(func, "mali"))
    inner = [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    assert inner == [1, 4, 12, 1, 4, 4]


@pytest.mark.parametrize(("m", "n", "k"), [(192, 512, 512), (8, 64, 512), (1000, 24, 64)])
def test_the_groups_of_a_row_are_those_of_its_launch(m: int, n: int, k: int) -> None:
    one = imagined("gpu")
    drawing = SpaceSampler(dense(m, n, k), one, seed=1)
    rows = [row for sketch in range(drawing.sketches) for row in drawing.rows_of(sketch)]
    played = [(row, made) for row in rows if (made := drawing.schedule_of(row)) is not None]
    assert played
    for row, made in played:
        assert groups_of(row.drawn) == max(groups for _, groups in launches_of(made.mod["main"]))


def test_draws_begin_with_the_tables_and_are_kernels() -> None:
    one, func = imagined("gpu"), dense(192, 512, 512)
    one = replace(one, limits=replace(one.limits, local_mem_bytes=48 << 10))  # NVIDIA's
    drawing = SpaceSampler(func, one, seed=1)
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


def test_processors_cut_no_single_row_as_malis_do(tmp_path: Path) -> None:
    (task, *_) = tasks("convolution 1x1 of a single row", tmp_path, imagined("cpu"))
    assert not any(window_tile(one) for one in sketched(task.func, "cpu"))


@pytest.mark.parametrize(
    ("rows", "driver", "tile"),
    [
        (64, DriverClass.MESA, (1, 4, 4)),  # vectors, rows, lanes
        (64, DriverClass.ARM, (1, 4, 4)),
        (64, DriverClass.MESA_26, (1, 4, 8)),
        (6, DriverClass.MESA_26, (1, 3, 8)),
        (2, DriverClass.MESA, (2, 2, 4)),
        (1, DriverClass.MESA_26, (1, 1, 4)),
    ],
)
def test_as_many_rows_share_what_is_unpacked_as_registers_hold(
    rows: int, driver: DriverClass, tile: tuple[int, int, int], tmp_path: Path
) -> None:
    first, *_ = starts(sketched(packed_product(rows, "mali", tmp_path), "mali"), driver)
    vectors, *held, _, terms = (one.factors[-1] for _, one in first.tiles)
    assert (vectors, math.prod(held), first.lanes) == tile
    assert terms == 4, "as many as a word of 16 bits has"


@pytest.mark.parametrize(("rows", "tile"), [(64, (1, 4)), (6, (1, 3)), (2, (2, 2))])
def test_rows_share_what_is_unpacked_on_gpus(rows: int, tile: tuple[int, int], tmp_path: Path) -> None:
    for one in starts(sketched(packed_product(rows, "gpu", tmp_path))):
        vectors, *held, _, _ = (tile.factors[-1] for _, tile in one.tiles)
        assert (vectors, math.prod(held)) == tile


def packed_product(rows: int, family: str, folder: Path) -> tirx.PrimFunc:
    """A product with weights of 4 bits in blocks of 32."""
    words, scales = few_bits(96, 192, 4, 32)
    product = "com.microsoft.MatMulNBits <K = 96, N = 192, bits = 4, block_size = 32> (x, w, s)"
    text = f"(float[{rows},96] x) => (float[{rows},192] y) {{ y = {product} }}"
    onnx.save(parsed(text, w=words, s=scales), folder / "m.onnx")
    (task,) = extract(folder / "m.onnx", {}, "fp16", imagined(family)).tasks
    return narrow_indices(task.func)


def windows(given: int, made: int, side: int, folder: Path) -> tirx.PrimFunc:
    """A convolution in halves whose windows have three rows and columns."""
    text = (
        f"(float[1,{given},{side},{side}] x, float[{made},{given},3,3] w) "
        f"=> (float[1,{made},{side},{side}] y) {{ y = Conv <pads=[1,1,1,1]> (x, w) }}"
    )
    return in_halves(text, folder)


def in_halves(text: str, folder: Path) -> tirx.PrimFunc:
    """The first function of a graph."""
    onnx.save(parsed(text), folder / "m.onnx")
    (task, *_) = extract(folder / "m.onnx", {}, "fp16", imagined("mali")).tasks
    return narrow_indices(task.func)


def test_windows_along_one_axis_are_cut_as_an_image_of_one_row(tmp_path: Path) -> None:
    cut = []
    for row in ("", "1,"):
        text = (
            f"(float[1,64,{row}500] x, float[96,64,{row}3] w) => (float[1,96,{row}500] y) "
            f"{{ y = Conv <pads=[{'0,1,0,1' if row else '1,1'}]> (x, w) }}"
        )
        rows = starts(sketched(in_halves(text, tmp_path), "mali"))
        cut.append([[tile.factors for _, tile in each.tiles] for each in rows if packed_clocks(each)])
    assert cut[0]
    assert cut[0] == cut[1]


def test_processors_write_few_terms_of_a_sounds_filter_out(tmp_path: Path) -> None:
    text = (
        "(float[1,1,16000] x, float[322,1,320] w) => (float[1,322,99] y) { y = Conv <strides=[160]> (x, w) }"
    )
    one, func = imagined("cpu"), in_halves(text, tmp_path)
    row, *_ = starts(sketched(func, "cpu"))
    lower_function(traces.apply(row.text(), func).mod["main"], "main", target_for(one), one)


@pytest.mark.parametrize(
    ("given", "made", "side", "expected"),  # rows, pieces of a row, and work-items along places and channels
    [
        (48, 192, 13, [1, 1, 1, 16]),  # a row of 13 is one piece: neighbours would load lines of their own
        (64, 64, 56, [1, 1, 8, 2]),
        (512, 512, 7, [1, 1, 1, 16]),
        (3, 64, 111, [1, 3, 111, 1]),
    ],
)
def test_malis_share_lines_of_images_or_of_weights(
    given: int, made: int, side: int, expected: list[int], tmp_path: Path
) -> None:
    one, func = imagined("mali"), windows(given, made, side, tmp_path)
    first = min((row for row in starts(sketched(func, "mali")) if packed_clocks(row)), key=packed_clocks)
    assert [tile.factors[-1] for _, tile in first.tiles] == expected
    scheduled = traces.apply(first.text(), func).mod["main"]
    assert rules.budget(one).allows(size_of(scheduled, 32), launches_of(scheduled))
    lower_function(scheduled, "main", target_for(one), one)


@pytest.mark.parametrize(("driver", "lanes"), [(DriverClass.ARM, 4), (DriverClass.MESA_26, 8)])
def test_windows_have_more_channels_where_halves_share_registers(
    driver: DriverClass, lanes: int, tmp_path: Path
) -> None:
    found = starts(sketched(windows(16, 64, 55, tmp_path), "mali"), driver)
    clocks = {one.lanes: packed_clocks(one, driver) for one in found if packed_clocks(one, driver)}
    assert min(clocks, key=lambda one: clocks[one]) == lanes


@pytest.mark.parametrize(
    ("given", "made", "side", "held"),  # vectors of the image
    [
        (48, 192, 13, 4),  # a row at a time: no other rectangle reads it again
        (64, 64, 26, 8),  # two rows of pixels share two of the image: all are held
    ],
)
def test_malis_hold_no_rows_of_an_image_before_their_turn(
    given: int, made: int, side: int, held: int, tmp_path: Path
) -> None:
    one, func = bench_profile("mali-g610", "26.2"), windows(given, made, side, tmp_path)
    _, lowered, _ = untuned_kernels(func, "main", target_for(one), one)
    (declared,) = re.findall(r"half\d (pad_temp_local_0.*);", lowered.source)
    assert len(declared.split()) == held
    assert re.search(r"\buint\d? conv2d\w*_local_0,", lowered.source), "sums that wait are words"
    assert "for (int rc = get_group_id(2);" in lowered.source, "Mesa 26 would unroll it, and load ahead"


@pytest.mark.parametrize(
    ("channels", "extent", "stride", "window", "expected"),  # pixels of a row as vectors, and rows
    [
        (96, 56, 1, 3, [1, 4]),  # vectors of 4 singles, in four rows
        (64, 55, 1, 3, [11, 1]),
        (144, 28, 1, 5, [1, 2]),  # a larger window is written out for fewer pixels
        (96, 112, 2, 3, [1, 2]),
    ],
)
def test_malis_cut_images_of_single_channels_into_rectangles(
    channels: int, extent: int, stride: int, window: int, expected: list[int], tmp_path: Path
) -> None:
    pads, out = window // 2, (extent - 1) // stride + 1
    graph = (
        f"g (float[1,{channels},{extent},{extent}] x, float[{channels},1,{window},{window}] w) "
        f"=> (float[1,{channels},{out},{out}] y) {{ y = Conv <group={channels}, "
        f"pads=[{pads},{pads},{pads},{pads}], strides=[{stride},{stride}]> (x, w) }}"
    )
    one = imagined("mali")
    onnx.save(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {graph}'), tmp_path / "m.onnx"
    )
    (task, *_) = extract(tmp_path / "m.onnx", {}, "fp32", one).tasks
    (first, *_) = starts(sketched(task.func, "mali"))
    inner = [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    assert inner[:2] == expected
    scheduled = traces.apply(first.text(), task.func).mod["main"]
    assert rules.budget(one).allows(size_of(scheduled, 32), launches_of(scheduled))
    lowered = lower_function(scheduled, "main", target_for(one), one)
    assert len(lowered.launches) == 1, "nothing is padded before"


@pytest.mark.parametrize("family", ["cpu", "gpu"])
def test_attentions_begin_with_tiles_that_fit(family: str, tmp_path: Path) -> None:
    one = imagined(family)
    (task,) = tasks("attention with a mask", tmp_path, one)
    found = starts(sketched(task.func, family))
    assert len(found) == 2
    for start in found:
        played = traces.apply(start.text(), task.func)
        assert read(traces.to_text(played.trace)).decisions == start.decisions
        assert rules.budget(one).apply(played)


def test_sums_of_one_turn_take_the_place_of_the_last_ones(tmp_path: Path) -> None:
    """A row of 32 scores in two turns holds 16 sums at once."""
    (task,) = tasks("attention with a mask", tmp_path, imagined("cpu"))
    first, *_ = starts(sketched(task.func, "cpu"))
    tiles = [(place, d) for place, d in sorted(first.decisions.items()) if isinstance(d, Tile)]
    (_, rows), columns, _, keys, _ = tiles
    one_by_one = {place: Tile((2, 1), tile.most) for place, tile in (columns, keys)}
    played = traces.apply(first.with_decisions(one_by_one).text(), task.func)
    assert size_of(played.mod["main"]).registers == rows.factors[1] * 16


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("convolution 1x1", [4, 1, 1, 12, 2]),  # rows of channels and vectors of pixels, as of a product
        ("convolution 1x1 of two odd images", [1, 11, 8]),  # work-items along both, steps of the sum
    ],
)
def test_malis_begin_with_a_table_for_images_that_are_flat(
    name: str, expected: list[int], tmp_path: Path
) -> None:
    one = imagined("mali")
    (task, *_) = tasks(name, tmp_path, one)
    first = starts(sketched(task.func, "mali"))[0]
    assert [d.factors[-1] for _, d in sorted(first.decisions.items()) if isinstance(d, Tile)] == expected
    scheduled = traces.apply(first.text(), task.func).mod["main"]
    assert rules.budget(one).allows(size_of(scheduled, 32), launches_of(scheduled))
    lower_function(scheduled, "main", target_for(one), one)
