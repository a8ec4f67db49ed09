"""TopK on a device: any type, axis and number, equals by their place, NaN last; and what it takes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from honed.machine import devices
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.compiler.verification import run_model
from honed.tuner.frontend import normalise
from honed.tuner.frontend.rules import indexing
from honed.tuner.lower.functions.sorting import SortedRuns
from honed.tuner.lower.module import UntunedKernels
from honed.tuner.lower.schedule import default_kernels

pytestmark = pytest.mark.tvm
Array = np.ndarray[Any, Any]


def top_k(shape: tuple[int, ...], kind: str, count: int, axis: int, *, largest: bool) -> onnx.ModelProto:
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    node = helper.make_node("TopK", ["x", "k"], ["best", "places"], axis=axis, largest=int(largest))
    graph = helper.make_graph(
        [node],
        "top",
        [helper.make_tensor_value_info("x", elem, shape)],
        [
            helper.make_tensor_value_info("best", elem, None),
            helper.make_tensor_value_info("places", onnx.TensorProto.INT64, None),
        ],
        [numpy_helper.from_array(np.array([count], np.int64), "k")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def places_of(x: Array, count: int, axis: int, *, largest: bool) -> Array:
    """Return the places of the best by NumPy's stable sort."""
    keys = np.moveaxis(x, axis, -1)
    if x.dtype.kind == "f":
        keys = np.where(np.isnan(keys), -np.inf if largest else np.inf, keys)
    rank = np.argsort(keys[..., ::-1] if largest else keys, axis=-1, kind="stable")
    order = keys.shape[-1] - 1 - rank[..., ::-1] if largest else rank
    return np.moveaxis(order[..., :count], -1, axis)


def check(
    x: Array, count: int, axis: int, *, largest: bool, kernels: UntunedKernels = default_kernels
) -> None:
    model = top_k(x.shape, x.dtype.name, count, axis, largest=largest)
    got = run_model(model, {"x": x}, devices.select(""), first=kernels)
    places = places_of(x, count, axis, largest=largest)
    np.testing.assert_array_equal(got["places"], places)
    np.testing.assert_array_equal(got["best"], np.take_along_axis(x, places, axis))


def values(shape: tuple[int, ...], kind: str, distinct: int, nan: float, seed: int = 0) -> Array:
    """Return values with many equals, a share of them NaN where the type has it."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, distinct, shape).astype(kind)
    if x.dtype.kind == "f":
        x[rng.random(shape) < nan] = np.nan
    return x


KINDS = ["float16", "float32", "float64", "int32", "int64", "int8", "uint8"]


@pytest.mark.parametrize(
    ("kind", "size"),  # by pairs, and by merging: what is not slow takes turns
    [
        pytest.param(kind, size, marks=() if n % 2 == (size == 9) else pytest.mark.slow)
        for n, kind in enumerate(KINDS)
        for size in (9, 100)
    ],
)
def test_every_type(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "_PAIRS", 64)
    check(values((2, size), kind, 100, 0.1), min(size, 77), -1, largest=True)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([1, 2, 17, 513, 1024, 1500]),
    st.floats(0, 1),
    st.sampled_from([(0, 1), (1, 3), (2, 2)]),
    st.booleans(),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([0.0, 0.2, 1.0]),
)
def test_any_axis_and_number(
    size: int, share: float, around: tuple[int, int], largest: bool, distinct: int, nan: float
) -> None:
    axis, other = around
    shape = [other, other, other]
    shape[axis] = size
    count = max(1, round(share * size))
    x = values(tuple(shape), "float32", distinct, nan)
    check(x, count, axis, largest=largest, kernels=untuned_kernels)


def test_infinities_and_both_zeros_are_numbers() -> None:
    x = np.tile(np.array([0.0, -0.0, np.inf, -np.inf, 1, np.nan], np.float32), 5)[None]
    check(x, 30, 1, largest=True)
    check(x, 30, 1, largest=False)


@pytest.mark.parametrize(("size", "count"), [(25_600, 200), (700_000, 300), (100_000, 100_000)])
def test_no_value_is_much_larger_than_the_row(size: int, count: int) -> None:
    done = normalise(top_k((1, size), "float32", count, -1, largest=True))
    made = [*done.model.graph.value_info, *done.model.graph.output]
    sizes = [math.prod(d.dim_value for d in v.type.tensor_type.shape.dim) for v in made]
    assert max(sizes) <= size
    assert sum(numpy_helper.to_array(t).nbytes for t in done.model.graph.initializer) <= 16 * size
    runs, launches = SortedRuns.first(1, size, count), 1
    while runs.count > 1:
        assert runs.held <= size
        runs, launches = runs.merge(count), launches + 1
    assert runs.held == count
    assert launches <= 1 + math.ceil(math.log2(size / 16))
