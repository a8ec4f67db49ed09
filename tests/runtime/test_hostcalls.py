from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from honed.runtime.compiled import hostrules
from honed.runtime.compiled.hostrules import Signature
from honed.runtime.compiled.model import Attr
from honed.runtime.errors import InvalidArgument
from honed.runtime.execution import hostcalls

Array = NDArray[Any]
SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
FEW_VALUES = hnp.arrays(np.int32, SHAPES, elements=st.integers(-2, 2))  # so that there are ties


def call(
    function: str, inputs: list[Array], outputs: list[tuple[str, tuple[int, ...]]], **attrs: Attr
) -> tuple[Array, ...]:
    """Check, run, and see that the outputs are what was announced."""
    wanted = [Signature(*output) for output in outputs]
    hostrules.check(function, [Signature(a.dtype.name, a.shape) for a in inputs], wanted, attrs)
    results = hostcalls.run(function, inputs, wanted, attrs)
    assert [Signature(r.dtype.name, r.shape) for r in results] == wanted
    return results


def lines(values: Array, axis: int) -> list[list[Any]]:
    """The values along `axis`, one list for each place of the other axes."""
    last = np.moveaxis(values, axis, -1)
    found: list[list[Any]] = last.reshape(int(np.prod(last.shape[:-1])), last.shape[-1]).tolist()
    return found


@settings(max_examples=60)
@given(FEW_VALUES, st.booleans(), st.data())
def test_sorting_is_stable_in_both_directions(values: Array, descending: bool, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-values.ndim, values.ndim - 1))
    (order,) = call("argsort", [values], [("int32", values.shape)], axis=axis, descending=descending)
    (ordered,) = call("sort", [values], [("int32", values.shape)], axis=axis, descending=descending)
    for given_line, order_line, sorted_line in zip(
        lines(values, axis), lines(order, axis), lines(ordered, axis), strict=True
    ):
        sign = -1 if descending else 1
        expected = sorted(range(len(given_line)), key=lambda i: (sign * given_line[i], i))
        assert order_line == expected
        assert sorted_line == [given_line[i] for i in expected]


@settings(max_examples=60)
@given(FEW_VALUES, st.booleans(), st.booleans(), st.data())
def test_topk(values: Array, largest: bool, in_order: bool, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, values.ndim - 1))
    k = data.draw(st.integers(0, values.shape[axis]))
    shape = tuple(k if i == axis else d for i, d in enumerate(values.shape))
    top, order = call(
        "topk",
        [values],
        [("int32", shape), ("int64", shape)],
        axis=axis,
        k=k,
        largest=largest,
        sorted=in_order,
    )
    if k == 0:
        return
    for given_line, top_line, order_line in zip(
        lines(values, axis), lines(top, axis), lines(order, axis), strict=True
    ):
        sign = -1 if largest else 1
        best = sorted(range(len(given_line)), key=lambda i: (sign * given_line[i], i))[:k]
        assert order_line == (best if in_order else sorted(best))
        assert top_line == [given_line[i] for i in order_line]


def test_nan_sorts_as_the_largest() -> None:
    values = np.array([1.0, np.nan, -np.inf, np.inf], np.float32)
    (up,) = call("argsort", [values], [("int64", (4,))], axis=0, descending=False)
    (down,) = call("argsort", [values], [("int64", (4,))], axis=0, descending=True)
    assert up.tolist() == [2, 0, 3, 1]
    assert down.tolist() == [1, 3, 0, 2]


@settings(max_examples=60)
@given(FEW_VALUES, st.booleans(), st.booleans(), st.sampled_from(["cumsum", "cumprod"]), st.data())
def test_scans(values: Array, exclusive: bool, reverse: bool, function: str, data: st.DataObject) -> None:
    axis = data.draw(st.integers(-values.ndim, values.ndim - 1))
    (result,) = call(
        function, [values], [("int64", values.shape)], axis=axis, exclusive=exclusive, reverse=reverse
    )
    for given_line, result_line in zip(lines(values, axis), lines(result, axis), strict=True):
        ahead = given_line[::-1] if reverse else given_line
        terms = [ahead[: i + (not exclusive)] for i in range(len(ahead))]
        expected = [sum(t) if function == "cumsum" else int(np.prod(t)) for t in terms]
        assert result_line == (expected[::-1] if reverse else expected)


def test_a_long_sum_of_halves_is_rounded_once() -> None:
    values = np.full(4096, 0.25, np.float16)
    (result,) = call("cumsum", [values], [("float16", (4096,))], axis=0, exclusive=False, reverse=False)
    assert result[-1] == 1024


@settings(max_examples=60)
@given(st.data())
def test_gather_nd(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=3))
    batch = data.draw(st.integers(0, len(shape) - 1))
    depth = data.draw(st.integers(1, len(shape) - batch))
    many = data.draw(st.integers(0, 3))
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    inner = shape[batch : batch + depth]
    tuples = [
        [data.draw(st.integers(-n, n - 1)) for n in inner] for _ in range(int(np.prod(shape[:batch])) * many)
    ]
    indices = np.array(tuples, np.int64).reshape(*shape[:batch], many, depth)
    out_shape = (*shape[:batch], many, *shape[batch + depth :])
    (result,) = call("gather_nd", [values, indices], [("float32", out_shape)], batch_dims=batch)
    for place in itertools.product(*map(range, (*shape[:batch], many))):
        where = (*place[:-1], *indices[place])
        np.testing.assert_array_equal(result[place], values[where])


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min", "max"])
def test_scatter(reduction: str) -> None:
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    indices = np.array([[0], [-1], [0]])
    updates = np.array([[10, 11], [12, 13], [10, 11]], np.float32)
    (rows,) = call("scatter_nd", [values, indices, updates], [("float32", (3, 2))], reduction=reduction)
    places = np.array([[0, 0], [-1, -1], [0, 0]])
    (elements,) = call(
        "scatter_elements", [values, places, updates], [("float32", (3, 2))], axis=0, reduction=reduction
    )
    join: dict[str, Any] = {
        "none": lambda _, u: u,
        "add": np.add,
        "mul": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }
    expected = values.copy()
    for row, update in zip(indices[:, 0], updates, strict=True):
        expected[row] = join[reduction](expected[row], update)
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(elements, expected)
    assert values[0, 0] == 0  # the input is not changed


@pytest.mark.parametrize("bad", [2, -3, 2**40])
def test_an_index_outside_is_an_error(bad: int) -> None:
    values = np.zeros((2, 2), np.float32)
    with pytest.raises(InvalidArgument, match="outside the data"):
        call("gather_nd", [values, np.array([[bad, 0]])], [("float32", (1,))], batch_dims=0)
    updates = np.zeros((1, 2), np.float32)
    with pytest.raises(InvalidArgument, match="outside the data"):
        call("scatter_nd", [values, np.array([[bad]]), updates], [("float32", (2, 2))], reduction="none")
    with pytest.raises(InvalidArgument, match="outside the data"):
        call(
            "scatter_elements",
            [values, np.array([[0, bad]]), updates],
            [("float32", (2, 2))],
            axis=0,
            reduction="add",
        )


F, I = "float32", "int64"  # noqa: E741
WRONG: list[tuple[str, list[Any], list[Any], dict[str, Attr], str]] = [
    (
        "topk",
        [(F, (3,))],
        [(F, (4,)), (I, (4,))],
        {"axis": 0, "k": 4, "largest": True, "sorted": True},
        "k is 4",
    ),
    ("topk", [(F, (3,))], [(F, (2,))], {"axis": 0, "k": 2, "largest": True, "sorted": True}, "instead of"),
    ("cumsum", [(F, (3,))], [(F, (2,))], {"axis": 0, "exclusive": False, "reverse": False}, "of shape"),
    ("cumsum", [(F, ())], [(F, ())], {"axis": 0, "exclusive": False, "reverse": False}, "outside the 0"),
    ("gather_nd", [(F, (3,)), (F, (1, 1))], [(F, (1,))], {"batch_dims": 0}, "int32 or int64"),
    ("gather_nd", [(F, (3,)), (I, (1, 2))], [(F, (1,))], {"batch_dims": 0}, "do not fit"),
    ("gather_nd", [(F, (3, 2)), (I, (2, 1))], [(F, (2,))], {"batch_dims": 1}, "do not fit"),
    ("scatter_nd", [(F, (3,)), (I, (1, 1)), (F, (2,))], [(F, (3,))], {"reduction": "none"}, "updates"),
    ("scatter_nd", [(F, (3,)), (I, (1, 1)), (F, (1,))], [(F, (3,))], {"reduction": "xor"}, "'xor'"),
    (
        "scatter_elements",
        [(F, (3,)), (I, (4,)), (F, (4,))],
        [(F, (3,))],
        {"axis": 0, "reduction": "none"},
        "do not fit",
    ),
]


@pytest.mark.parametrize(("function", "inputs", "outputs", "attrs", "message"), WRONG)
def test_what_does_not_fit_is_refused(
    function: str, inputs: list[Any], outputs: list[Any], attrs: dict[str, Attr], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        hostrules.check(function, [Signature(*i) for i in inputs], [Signature(*o) for o in outputs], attrs)
