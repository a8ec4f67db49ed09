"""Generated inputs keep to what a model's nodes allow, are fresh, seeded and of several distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, parser

from honed.runtime.errors import InvalidArgument, ModelRefused

from .parsing import generate, parsed


def _values(model: onnx.ModelProto, name: str, count: int = 6) -> np.ndarray:
    return np.stack([given_[name] for given_ in generate(model, count)])


def test_every_set_is_fresh_and_the_seed_repeats_it() -> None:
    model = parsed("f (float[3,4] a, float[3,4] b) => (float[3,4] c) { c = Add(a, b) }")
    sets = generate(model, 3, seed=7)
    flat = [s[n].tobytes() for s in sets for n in ("a", "b")]
    assert len(set(flat)) == 6
    assert [s[n].tobytes() for s in generate(model, 3, seed=7) for n in ("a", "b")] == flat
    assert generate(model, 1, seed=8)[0]["a"].tobytes() != flat[0]
    assert all(s["a"].dtype == np.float32 and s["a"].shape == (3, 4) for s in sets)


def test_distributions_differ() -> None:
    model = parsed("f (float[1000] a) => (float[1000] b) { b = Relu(a) }")
    normal, uniform, sparse = (s["a"] for s in generate(model, 3))
    assert normal.min() < -2
    assert normal.max() > 2
    assert (uniform >= 0).all()
    assert uniform.max() <= 1
    assert 350 < np.count_nonzero(sparse == 0) < 650


@pytest.mark.parametrize("dtype", ["float16", "double", "int8", "uint8", "uint16", "int64", "bool"])
def test_types_scalars_and_empty_tensors(dtype: str) -> None:
    model = parsed(
        f"f ({dtype}[2,3] a, {dtype} s, {dtype}[0,4] e) => ({dtype}[2,3] x, {dtype} y, {dtype}[0,4] z)"
        "{ x = Identity(a) y = Identity(s) z = Identity(e) }"
    )
    for values in generate(model, 3):
        assert [values[n].shape for n in "ase"] == [(2, 3), (), (0, 4)]
        assert {str(v.dtype) for v in values.values()} == {"float64" if dtype == "double" else dtype}


def test_booleans_are_mixed() -> None:
    model = parsed("f (bool[9] a) => (bool[9] b) { b = Not(a) }")
    for values in generate(model, 4):
        assert 4 <= np.count_nonzero(values["a"]) <= 5


@given(size=st.integers(1, 40), axis=st.sampled_from([0, 1, -1, -2]))
def test_gather_indices_are_in_range(size: int, axis: int) -> None:
    shape = (size, 50) if axis in (0, -2) else (50, size)
    data = helper.make_tensor_value_info("data", TensorProto.FLOAT, shape)
    indices = helper.make_tensor_value_info("indices", TensorProto.INT32, [7])
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    node = helper.make_node("Gather", ["data", "indices"], ["out"], axis=axis)
    model = helper.make_model(helper.make_graph([node], "f", [data, indices], [out]))
    values = _values(model, "indices")
    assert (values < size).all()
    assert (values >= -size).all()
    assert (values[:2] >= 0).all()


def test_indices_are_followed_through_casts_and_reshapes_and_every_use_counts() -> None:
    model = parsed(
        "f (float[5,2] d, float[9,2] e, int32[2,3] i) => (float[6,2] x, float[2,3,2] y)"
        "<int64[1] flat = {-1}>"
        "{ w = Cast<to = 7>(i) r = Reshape(w, flat) x = Gather(d, r) y = Gather(e, i) }"
    )
    values = _values(model, "i", 9)
    assert values.max() == 4
    assert values.min() == -5


def test_subgraphs_and_functions_are_searched_too() -> None:
    inside = parsed(
        "f (bool c, float[5] d, int64[4] i) => (float[4] y) { y = If (c) <"
        "then_branch = g () => (float[4] t) { t = Gather(d, i) },"
        "else_branch = h () => (float[4] t) { t = Gather(d, i) }> }"
    )
    called = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18, "own": 1]>'
        "f (float[5] d, int64[4] i) => (float[4] y) { y = own.pick(d, i) }"
        '<domain: "own", opset_import: ["": 18]> pick (a, b) => (c) { c = Gather(a, b) }'
    )
    for model in (inside, called):
        values = _values(model, "i")
        assert values.min() >= -5
        assert 3 <= values.max() <= 4


@pytest.mark.parametrize(
    ("text", "high"),
    [
        ("f (float[4,5] x, int64[4] i) => (float[4] y) { y = NegativeLogLikelihoodLoss(x, i) }", 4),
        ("f (float[4,5] x, int64[4] i) => (float[4] y) { y = SoftmaxCrossEntropyLoss(x, i) }", 4),
        ("f (float[1,2,9,4] x, float[1,2,3,4] u, int64[1] i) => (float[1,2,9,4] y)"
         "{ y = TensorScatter(x, u, i) }", 6),
        ("f (float[3,1,8,8] x, float[5,4] r, int64[5] i) => (float[5,1,1,1] y) { y = RoiAlign(x, r, i) }", 2),
    ],
)  # fmt: skip
def test_numbers_of_rows_are_not_negative(text: str, high: int) -> None:
    values = _values(parsed(text, 24), "i", 12)
    assert values.min() == 0
    assert values.max() == high


@pytest.mark.parametrize(
    ("given", "node", "low", "high"),
    [
        ("int32[2,3] i", "y, m = com.microsoft.EmbedLayerNormalization (i, , w, p, , g, g)", 0, 6),
        ("int64[2,3] i, float[2,3,4] x", "y = com.microsoft.RotaryEmbedding (x, i, w, w)", 0, 6),
        ("int64[1] i, float[2,3,4] x", "y = com.microsoft.RotaryEmbedding (x, i, w, w)", 0, 4),
    ],
)
def test_indices_of_onnx_runtimes_operators_are_in_range(given: str, node: str, low: int, high: int) -> None:
    header = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>'
    model = parser.parse_model(f"{header} f ({given}) => (float[2,3,4] y) {{ {node} }}")
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)
        for name, shape in {"w": (7, 4), "p": (3, 4), "g": (4,)}.items()
    )
    values = _values(model, "i", 40)
    assert (values.min(), values.max()) == (low, high)


def test_shapes_computed_by_the_graph_are_followed() -> None:
    text = (
        "f (float[3,5] x, int64[9] i) => (float[9,5] y) <int64[1] one = {1}, int64[1] last = {-1}> {"
        "s = Shape(x) m = Gather(s, one) t = Concat<axis = 0>(last, m)"
        "a = Reshape(x, t) u = Shape(a) b = Reshape(x, u) y = Gather(b, i) }"
    )
    values = _values(parsed(text, 13), "i", 9)  # inference follows Shape from opset 15 only
    assert (values.min(), values.max()) == (-3, 2)


def test_where_the_shape_is_unknown_the_first_index_is_taken() -> None:
    model = parsed(
        "f (float[3] x, bool[3] c, int64[2] i) => (float[2] y) { a = Compress(x, c) y = Gather(a, i) }"
    )
    model.graph.node[0].op_type = "Unknown"
    assert (_values(model, "i") == 0).all()


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_indices_are_distinct_unless_reduced(reduction: str) -> None:
    model = parsed(
        "f (float[4,6] d, int64[4,6] i, float[4,6] u) => (float[4,6] y)"
        f'{{ y = ScatterElements<axis = 1, reduction = "{reduction}">(d, i, u) }}'
    )
    values = _values(model, "i")
    assert values.min() >= -6
    assert values.max() <= 5
    distinct = all(len(set(row % 6)) == 6 for row in values.reshape(-1, 6))
    assert distinct == (reduction == "none")


def test_scatter_nd_tuples_are_distinct() -> None:
    model = parsed(
        "f (float[3,4,2] d, int64[5,2] i, float[5,2] u) => (float[3,4,2] y) { y = ScatterND(d, i, u) }"
    )
    for rows in _values(model, "i"):
        assert len({tuple(r) for r in rows}) == 5
        assert (rows < (3, 4)).all()
        assert (rows >= 0).all()


@pytest.mark.parametrize(("op", "dtype"), [("Div", "int32"), ("Div", "float"), ("Mod", "int8")])
def test_divisors_are_not_zero(op: str, dtype: str) -> None:
    model = parsed(f"f ({dtype}[500] a, {dtype}[500] b) => ({dtype}[500] c) {{ c = {op}(a, b) }}")
    assert (_values(model, "b") != 0).all()
    assert (_values(model, "a") == 0).any()


@pytest.mark.parametrize(
    ("op", "low", "high"),
    [("Log", 0.0, np.inf), ("Sqrt", 0.0, np.inf), ("Asin", -1, 1), ("Acosh", 1, np.inf)],
)
def test_domains_of_functions_are_kept(op: str, low: float, high: float) -> None:
    model = parsed(f"f (float[400] a) => (float[400] b) {{ b = {op}(a) }}", 22)
    values = _values(model, "a")
    assert (values >= low).all()
    assert (values <= high).all()
    assert np.unique(values).size > 100


def test_powers_are_defined() -> None:
    model = parsed("f (int32[90] a, int32[90] b) => (int32[90] c) { c = Pow(a, b) }")
    assert _values(model, "b").min() >= 0
    model = parsed("f (float[90] a, float[90] b) => (float[90] c) { c = Pow(a, b) }")
    assert _values(model, "a").min() > 0
    model = parsed("f (float[90] a) => (float[90] c) <float two = {2.0}> { c = Pow(a, two) }")
    assert _values(model, "a").min() < 0


def test_a_mask_holds_zeros_and_ones_and_shifts_stay_below_the_width() -> None:
    model = parsed("f (int64[1,64] attention_mask) => (float[1,64] y) { y = Cast<to = 1>(attention_mask) }")
    assert set(np.unique(_values(model, "attention_mask"))) == {0, 1}
    model = parsed('f (uint8[90] a, uint8[90] b) => (uint8[90] c) { c = BitShift<direction = "LEFT">(a, b) }')
    assert _values(model, "b").max() == 7


def test_initializers_that_are_inputs_are_constants() -> None:
    model = parsed("f (float[2] a, float[2] w) => (float[2] c) <float[2] w = {1, 2}> { c = Add(a, w) }")
    assert [list(s) for s in generate(model, 1)] == [["a"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f (float[4] a, int64[2] s) => (float[2,2] y) { y = Reshape(a, s) }", "input 's' decides a shape"),
        (
            "f (float[3] d, int64[5] i, float[5] u) => (float[3] y) { y = ScatterElements(d, i, u) }",
            "5 indices of 3 places",
        ),
        ("f (float[0,2] d, int64[5] i) => (float[5,2] y) { y = Gather(d, i) }", "axis of size 0"),
        (
            "f (float[3] d, int64[1,3] i, float[3] u) => (float[3] y)"
            "<int64[1] s = {3}> { j = Reshape(i, s) y = ScatterElements(d, j, u) }",
            "rearranged",
        ),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ModelRefused, match=expected) as caught:
        generate(parsed(text), 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [["n", 3], None])
def test_symbolic_shapes_are_refused(shape: Sequence[str | int] | None) -> None:
    a = helper.make_tensor_value_info("a", TensorProto.FLOAT, shape)
    b = helper.make_tensor_value_info("b", TensorProto.FLOAT, shape)
    model = helper.make_model(helper.make_graph([helper.make_node("Relu", ["a"], ["b"])], "f", [a], [b]))
    with pytest.raises(InvalidArgument, match="--shape a="):
        generate(model)


def test_types_honed_does_not_carry_are_refused() -> None:
    model = parsed("f (string[2] a) => (string[2] b) { b = Identity(a) }")
    with pytest.raises(InvalidArgument, match="type honed carries"):
        generate(model)


def _over_a_cache(inputs: str, nodes: str, past: int) -> onnx.ModelProto:
    """GroupQueryAttention for three new rows, over a cache of nine in all."""
    new, old = "float[2,3,4]", f"float[2,1,{past},4]"
    model = parsed(
        f"f ({new} q, {new} k, {new} v, {old} pk, {old} pv, {inputs}) => ({new} y) {{ {nodes}"
        " y = com.microsoft.GroupQueryAttention<num_heads = 1, kv_num_heads = 1>"
        "(q, k, v, pk, pv, ends, total) }"
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def test_masks_that_are_counted_for_a_cache_have_room_for_the_new_rows() -> None:
    counting = "one = Constant<value = int64[1] {1}>() sum = ReduceSum<keepdims = 0>(mask, one)"
    nodes = f"{counting} less = Sub(sum, one) ends = Cast<to = 6>(less)"
    model = _over_a_cache("int64[2,9] mask, int32 total", nodes, past=9)
    masks = _values(model, "mask", 12)
    assert (masks.sum(-1).min(), masks.sum(-1).max()) == (3, 9)
    assert (np.diff(masks, axis=-1) <= 0).all()
    assert (_values(model, "total") == 3).all()  # several new rows of several sequences are prompts


@pytest.mark.parametrize("past", [6, 9])
def test_ends_of_a_cache_are_within_it(past: int) -> None:
    model = _over_a_cache("int32[2] ends", "total = Constant<value = int32 {9}>()", past)
    found = _values(model, "ends", 40)
    assert (found.min(), found.max()) == (2, 8)


def test_a_setting_is_what_it_is_compared_with_in_the_smallest_ranges() -> None:
    """A voice detector refuses any other rate than one that it knows."""
    model = parsed(
        "f (int64 rate, int64[8] many) => (bool a, bool[8] b)"
        "{ known = Constant<value = int64 {16000}>() a = Equal(rate, known) b = Equal(many, known) }"
    )
    rates = {int(made["rate"]) for made in generate(model, 6, shrink=2)}
    assert rates == {16000}
    assert len({int(made["rate"]) for made in generate(model, 6)}) > 2
    assert all((made["many"] != 16000).any() for made in generate(model, 6, shrink=2))
