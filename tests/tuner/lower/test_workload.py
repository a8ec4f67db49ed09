"""What functions move; those of one form take the same schedule: they differ in offsets and factors alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tvm import te, tirx

from honed.tuner.lower.schedule import default_kernels
from honed.tuner.lower.target import target_for
from honed.tuner.lower.workload import count_reached_bytes, form_key, function_bytes, task_key
from honed.tuner.measure.candidate import Candidate, inference_launches
from honed.tuner.tune.extract import workload
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm

Value = Callable[[te.Tensor, tirx.Var, tirx.Var], tirx.Expr]


def _function(
    value: Value = lambda image, i, j: image[1, i, j] * 0.5, shape: tuple[int, int] = (4, 4)
) -> tirx.PrimFunc:
    image = te.placeholder((16, 16, 16), name="image")
    made = te.compute(shape, lambda i, j: value(image, i, j), name="made")
    return te.create_prim_func([image, made])


@pytest.mark.parametrize(
    "value",
    [
        lambda image, i, j: image[2, i, j] * 0.5,
        lambda image, i, j: image[1, i, j] * 3.0,
        lambda image, i, j: image[1, i + 3, j] * 0.5,
        lambda image, i, j: image[1, i, j + 1] * 0.5,
    ],
    ids=["row", "factor", "first of rows", "first of columns"],
)
def test_offsets_and_factors_are_no_part_of_a_form(value: Value) -> None:
    assert form_key(_function(value)) == form_key(_function())
    assert task_key(_function(value)) != task_key(_function())


@pytest.mark.parametrize(
    "value",
    [
        lambda image, i, j: image[1, i, j] + 0.5,
        lambda image, i, j: image[1, i, j] * image[1, i, j],
        lambda image, i, j: image[1, i, j].astype("float16") * 0.5,
        lambda image, i, j: image[1, i, j * 2] * 0.5,
        lambda image, i, j: image[1, i, j // 2] * 0.5,
        lambda image, i, j: image[1, i, j + i] * 0.5,
        lambda image, i, j: image[1, i, 7 - j] * 0.5,
        lambda image, i, j: image[1, j, i] * 0.5,
        lambda image, i, j: image[i, 1, j] * 0.5,
    ],
    ids=["sum", "square", "type", "stride", "repeat", "skew", "reversed", "transposed", "other axis"],
)
def test_what_computes_or_moves_otherwise_has_another_form(value: Value) -> None:
    assert form_key(_function(value)) != form_key(_function())


def test_other_shapes_and_constants_that_may_be_packed_make_another_form() -> None:
    func = _function()
    others = [_function(shape=(8, 4)), _function(shape=(4, 8)), func.with_attr("honed.constants", [0])]
    assert len({form_key(one) for one in (func, *others)}) == 4


@pytest.mark.parametrize(("looks_up", "moved"), [(True, 8 * 6 * 4), (False, 1000 * 6 * 4)])
def test_of_a_table_only_what_is_looked_up_counts(looks_up: bool, moved: int) -> None:
    table = te.placeholder((1000, 6), "float32", name="table")
    places = te.placeholder((8,), "int32", name="places")
    made = te.compute(
        (8, 6),
        lambda i, j: table[tirx.max(0, tirx.min(places[i], 999)), j] + (0 if looks_up else table[i, j]),
        name="made",
    )
    func, mali = te.create_prim_func([table, places, made]), imagined("mali")
    expected = moved + 8 * 4 + 8 * 6 * 4
    assert function_bytes(func) == expected
    _, lowered, _ = default_kernels(func, "main", target_for(mali), mali)
    assert [launch.bytes for launch in lowered.launches] == [expected]


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        (lambda image, i, j: image[1, i, j] * 0.5, 4 * 4),
        (lambda image, i, j: image[1, i + 3, j] + image[1, i, j], 7 * 4),
        (lambda image, i, j: image[1, i * 5, j] * 0.5, 16 * 4),  # the box around every fifth row
        (lambda image, i, j: image[i, 1, j // 2] * 0.5, 4 * 2),
    ],
    ids=["part", "two parts", "stride", "repeat"],
)
def test_of_what_a_function_reads_in_part_that_part_moves(value: Value, elements: int) -> None:
    func, profile = _function(value), imagined("mali")
    assert count_reached_bytes(func) == 4 * (elements + 4 * 4)
    assert function_bytes(func) == 4 * (16**3 + 4 * 4), "by which schedules are chosen"
    _, lowered, _ = default_kernels(func, "main", target_for(profile), profile)
    launches = inference_launches(workload("", func, 1, Path(), None), Candidate.of("", lowered))
    assert [launch.bytes for launch in launches] == [count_reached_bytes(func)]
