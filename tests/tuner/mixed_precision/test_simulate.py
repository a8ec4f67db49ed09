"""What is computed on the processor is what the graph in fp16 computes, and finds what fp16 cannot do."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from honed.tuner.frontend import Normalised, normalise
from honed.tuner.frontend.normalise import in_half
from honed.tuner.graph.fp16_casts import Exemptions
from honed.tuner.mixed_precision import child
from honed.tuner.mixed_precision.child import BOUND, PrecisionAnswer, Simulation, decide


def _normalised(text: str, **constants: np.ndarray) -> Normalised:
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]>\n{text}')
    model.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(v, np.float32), name) for name, v in constants.items()
    )
    return normalise(model)


def _decided(
    normalised: Normalised, *sets: dict[str, np.ndarray], operations: int = 10**11
) -> PrecisionAnswer:
    return decide(normalised.model, list(sets), operations=operations)


def _normal(*shape: int) -> np.ndarray:
    return np.random.standard_normal(shape).astype(np.float32)


CHAIN = _normalised(
    "f (float[4,6] x, float[6] z) => (float[4,6] y, float[6,4] t, bool[4,6] b) {"
    "a = Mul(x, w) c = Add(a, z) d = Transpose(c) e = Sub(d, v) r = Relu(e) t = Sqrt(r)"
    "g = Transpose(r) h = Concat<axis = 0>(g, c) i, j = Split<num_outputs = 2>(h) k = Mul(i, j)"
    "y = Add(k, x) b = Greater(k, x) }",
    w=[[3.3], [0.1], [1e-3], [700.0]],
    v=[0.7, 1e5, 1e-6, 2.0],
)
NAMES = Simulation(CHAIN.model, []).operators


@given(st.frozensets(st.sampled_from(NAMES)))
def test_the_graph_with_its_casts_computes_the_same(single: frozenset[str]) -> None:
    keep = Exemptions(single=single)
    values = {"x": 3 * _normal(4, 6), "z": _normal(6)}
    simulation = Simulation(CHAIN.model, [values])
    halved = in_half(CHAIN, keep)
    onnx.checker.check_model(halved.model, full_check=True)
    types = {i.name: i.type.tensor_type.elem_type for i in halved.model.graph.input}
    feeds = {n: v.astype(helper.tensor_dtype_to_np_dtype(types[n])) for n, v in values.items()}
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(halved.model).run(None, feeds)
    found = simulation.outputs(0, keep)
    for name, value in zip(("y", "t", "b"), expected, strict=True):
        np.testing.assert_array_equal(found[name], value.astype(found[name].dtype))


def test_what_is_kept_entirely_is_exact_and_of_float32() -> None:
    keep = Exemptions(single=frozenset(NAMES))
    simulation = Simulation(CHAIN.model, [{"x": _normal(4, 6), "z": _normal(6)}])
    assert simulation.deviation(keep, 1).error == 0
    assert in_half(CHAIN, keep).precision == "fp32"


def test_a_value_between_operators_in_float32_may_be_too_large_for_fp16() -> None:
    model = _normalised(
        "f (float[2,8] x) => (float[2,8] y) { a = Mul(x, w) b = Mul(a, v) y = MatMul(b, u) }",
        w=1e6, v=1e-6, u=_normal(8, 8),
    )  # fmt: skip
    found = _decided(model, {"x": _normal(2, 8)})
    assert found.plain == math.inf
    assert found.single == tuple(n.output[0] for n in model.model.graph.node[:2])
    assert found.error is not None
    assert found.error <= BOUND


def _added_one_by_one(left: np.ndarray, right: np.ndarray) -> float:
    total = np.float16(0)
    for a, b in zip(left.astype(np.float16), right.astype(np.float16), strict=True):
        total = np.float16(np.float32(total) + np.float32(a) * np.float32(b))
    return float(total)


@pytest.mark.parametrize("shapes", [((3, 5, 40), (40, 7)), ((40,), (40, 7)), ((2, 5, 40), (2, 40, 1))])
def test_errors_of_a_matrix_product_are_those_of_its_elements(shapes: tuple[tuple[int, ...], ...]) -> None:
    left, right = (_normal(*shape) for shape in shapes)
    node = helper.make_node("MatMul", ["a", "b"], ["c"])
    found = child.product_errors(node, (left, right), np.random.default_rng(0))
    assert found.shape == (child.SAMPLE,)
    rows = np.atleast_2d(left).reshape(-1, 40)
    columns = right.swapaxes(-1, -2).reshape(-1, 40)
    halves = [r.astype(np.float16).astype(np.float64) for r in (rows, columns)]
    known = {
        np.float32(_added_one_by_one(a, b) - float(x @ y))
        for a, x in zip(rows, halves[0], strict=True)
        for b, y in zip(columns, halves[1], strict=True)
    }
    assert all(np.isclose(each, list(known), rtol=0, atol=1e-5).any() for each in found)


def test_errors_of_a_convolution_are_of_windows_and_their_filters() -> None:
    """Filters of one weight pick an element, whose product is rounded and not added to anything."""
    attrs = {"strides": [2, 1], "pads": [1, 0, 1, 2], "dilations": [1, 2], "group": 2}
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attrs)
    data, weights = _normal(2, 4, 7, 9), np.zeros((6, 2, 3, 2), np.float32)
    weights[:, 1, 2, 1] = 1
    np.testing.assert_array_equal(child.product_errors(node, (data, weights), np.random.default_rng(0)), 0)
    weights[:] = _normal(6, 2, 3, 2)
    found = child.product_errors(node, (data, weights), np.random.default_rng(0))
    assert 0 < np.abs(found).max() < 0.05


def test_a_small_network_needs_nothing() -> None:
    model = _normalised(
        "f (float[4,16] x) => (float[4,8] y) { a = MatMul(x, w) b = Add(a, c) r = Relu(b) y = MatMul(r, v) }",
        w=np.eye(16), c=np.ones(16), v=np.eye(16)[:, :8],
    )  # fmt: skip
    found = _decided(model, {"x": _normal(4, 16)}, {"x": _normal(4, 16)})
    assert (found.single, found.wide, found.halves, found.trials) == ((), (), 1.0, 1)


def test_a_small_convolutional_network_needs_nothing() -> None:
    model = _normalised(
        "f (float[1,3,16,16] x) => (float[1,10] y) {"
        "a = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w) b = Relu(a) c = Conv<group = 8>(b, v)"
        "d = GlobalAveragePool(c) e = Flatten(d) y = MatMul(e, u) }",
        w=_normal(8, 3, 3, 3) / 5, v=_normal(8, 1, 3, 3) / 3, u=_normal(8, 10) / 3,
    )  # fmt: skip
    found = _decided(model, {"x": _normal(1, 3, 16, 16)})
    assert found.wide == ()
    assert found.halves == 1
    assert found.error is not None
    assert found.error <= BOUND


def test_sums_whose_terms_cancel_are_added_up_in_float32() -> None:
    """The first half of the terms adds up to about 1,024, where halves are whole numbers."""
    row = np.repeat([2, -2], 512) + _normal(1024) / 4
    model = _normalised("f (float[4,1024] x) => (float[4,4] y) { y = MatMul(x, w) }", w=np.ones((1024, 4)))
    found = _decided(model, {"x": np.tile(row, (4, 1)).astype(np.float32)})
    assert found.plain is not None
    assert found.plain > BOUND
    assert found.single == ()
    assert len(found.wide) == 1


def test_whole_numbers_must_be_equal() -> None:
    model = _normalised("f (float[1,8192] x) => (int64[1] y) { y = ArgMax<axis = 1, keepdims = 0>(x) }")
    x = np.linspace(0, 1, 8192, dtype=np.float32)[None]
    found = _decided(model, {"x": x})
    assert found.plain == math.inf
    assert found.output == "y"


def test_work_is_bounded_by_fewer_sets_and_then_not_done() -> None:
    model = _normalised("f (float[4,64] x) => (float[4,64] y) { y = MatMul(x, w) }", w=_normal(64, 64))
    sets = [{"x": _normal(4, 64)}] * 3
    cost = Simulation(model.model, []).cost
    assert _decided(model, *sets, operations=50 * cost).sets == 3
    assert _decided(model, *sets, operations=500 * cost).sets == 3
    assert _decided(model, *sets, operations=20 * cost).sets == 1
    nothing = _decided(model, *sets, operations=cost)
    assert (nothing.single, nothing.trials, nothing.plain) == (None, 0, None)


def test_the_child_knows_nothing_of_the_compiler() -> None:
    code = (
        "import sys, honed.tuner.mixed_precision.child\n"
        "found = [m for m in sys.modules if m.split('.')[0] == 'tvm']\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
