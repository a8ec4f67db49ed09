"""Lengths that no tile divides are rounded up: the same answers, from products that have tiles."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.machine.devices import Device
from honed.tuner import frontend
from honed.tuner.compiler.verification import run_model
from honed.tuner.graph import Pass, lengths
from honed.tuner.graph.lengths import pad_lengths

from .graphs import after, answers, operators, parsed, weights

pytestmark = pytest.mark.tvm

LENGTHS = Pass("lengths", pad_lengths)
ATTENTION = """(float[2,37,16] x) => (float[2,37,16] y) <int64[4] heads = {2, 37, 2, 8}, float root = {0.35},
    int64[3] rows = {2, 37, 16}> {
    p = MatMul(x, wq) q = Reshape(p, heads) qt = Transpose <perm = [0, 2, 1, 3]> (q)
    r = MatMul(x, wk) k = Reshape(r, heads) kt = Transpose <perm = [0, 2, 3, 1]> (k)
    t = MatMul(x, wv) v = Reshape(t, heads) vt = Transpose <perm = [0, 2, 1, 3]> (v)
    s = MatMul(qt, kt) m = Mul(s, root) a = Softmax <axis = -1> (m) o = MatMul(a, vt)
    ot = Transpose <perm = [0, 2, 1, 3]> (o) z = Reshape(ot, rows) l = MatMul(z, wo) y = Add(l, x) }"""
PROJECTIONS = {name: weights(16, 16, seed=n) for n, name in enumerate(("wq", "wk", "wv", "wo"))}


def products(model: onnx.ModelProto) -> list[tuple[int, ...]]:
    """Shapes of the results of all products."""
    shapes = {
        i.name: tuple(d.dim_value for d in i.type.tensor_type.shape.dim) for i in model.graph.value_info
    }
    return [shapes[n.output[0]] for n in model.graph.node if n.op_type == "MatMul"]


def test_an_attention_of_odd_length_is_computed_as_a_longer_one() -> None:
    model = after(parsed(ATTENTION, **PROJECTIONS), [LENGTHS])
    assert sorted(products(model)) == [(2, 2, 40, 8), (2, 2, 40, 40), *[(2, 40, 16)] * 4]
    assert operators(model)["Slice"] == 2, "the last element of the input, and the end of the output"
    assert operators(model)["Add"] == 2, "a mask, and the residual"


@pytest.mark.opencl
def test_the_answers_on_a_device_are_those_of_the_model_as_it_was(device: Device) -> None:
    model = parsed(ATTENTION, **PROJECTIONS)
    x = np.random.default_rng(1).standard_normal((2, 37, 16)).astype(np.float32)
    (expected,) = answers(frontend.normalise(model, passes=()).model, {"x": x})
    found = run_model(model, {"x": x}, device, "fp32")
    np.testing.assert_allclose(found["y"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "why"),
    [(36, "tiles of four divide it"), (31, "it is short, and no sequence")],
)
def test_others_are_left(length: int, why: str) -> None:
    text = ATTENTION.replace("37", str(length))
    graph = parsed(text, **PROJECTIONS)
    assert operators(after(graph, [LENGTHS])) == operators(after(graph, [])), why


def test_one_product_does_not_pay_for_extending_and_cutting_off() -> None:
    model = parsed("(float[37,16] x) => (float[37,16] y) { y = MatMul(x, w) }", w=weights(16, 16))
    assert "Slice" not in operators(after(model, [LENGTHS]))


def test_what_lies_beyond_is_as_finite_as_the_last_element() -> None:
    """Zeros there would be divided by zero, and make all that they are multiplied with no number."""
    norms = "q2 = Mul(x, x) n2 = ReduceSum(q2, last) n = Sqrt(n2) u = Div(x, n)"
    text = f"""(float[1,37,16] x) => (float[1,37,16] y) <int64[1] last = {{-1}}> {{ {norms}
        ut = Transpose <perm = [0, 2, 1]> (u) s = MatMul(u, ut) a = Softmax <axis = -1> (s)
        o = MatMul(a, u) p = MatMul(o, wq) z = MatMul(p, wk) y = MatMul(z, wv) }}"""
    model = after(parsed(text, **{k: PROJECTIONS[k] for k in ("wq", "wk", "wv")}), [LENGTHS])
    assert (1, 40, 40) in products(model)


# A node or more behind the last value, `{v}` of shape [1, 37, 8], that make `{o}` of the same shape.
STEPS = (
    "{o} = Relu({v})",
    "{o} = MatMul({v}, w)",
    "{o}a = MatMul({v}, w) {o} = Add({o}a, {v})",
    "{o} = Mul({v}, rows)",
    "{o} = Add({v}, x)",
    "{o} = Softmax <axis = 1> ({v})",
    "{o} = LogSoftmax <axis = 1> ({v})",
    "{o} = Softmax <axis = 2> ({v})",
    "{o} = LayerNormalization <axis = -1> ({v}, scale)",
    "{o}m = ReduceMean <axes = [1]> ({v}) {o} = Sub({v}, {o}m)",
    "{o}m = ReduceMean <axes = [2]> ({v}) {o} = Sub({v}, {o}m)",
    ("{o}t = Transpose <perm = [0, 2, 1]> ({v}) {o}s = MatMul({v}, {o}t) {o}a = Softmax({o}s) "
         "{o} = MatMul({o}a, {v})"),
    "{o}t = Transpose <perm = [0, 2, 1]> ({v}) {o}g = MatMul({o}t, {v}) {o} = MatMul({v}, {o}g)",
    ("{o}t = Transpose <perm = [0, 2, 1]> ({v}) {o}s = Softmax <axis = 2> ({o}t) "
         "{o}g = MatMul({o}s, {v}) {o} = MatMul({v}, {o}g)"),
    "{o}f = Slice({v}, i0, i4, i2) {o}l = Slice({v}, i4, i8, i2) {o} = Concat <axis = 2> ({o}l, {o}f)",
    "{o}f = Slice({v}, i0, i4, i1) {o}l = Slice({v}, i4, i37, i1) {o} = Concat <axis = 1> ({o}l, {o}f)",
    "{o}r = Reshape({v}, flat) {o} = Reshape({o}r, back)",
    ("{o}r = Reshape({v}, heads) {o}t = Transpose <perm = [0, 2, 1, 3]> ({o}r) "
         "{o}s = Transpose <perm = [0, 2, 1, 3]> ({o}t) {o} = Reshape({o}s, back)"),
)  # fmt: skip
CONSTANTS = {
    "w": weights(8, 8),
    "rows": weights(1, 37, 1),
    "scale": weights(8),
    "flat": np.array([1, 37 * 8]),
    "back": np.array([1, 37, 8]),
    "heads": np.array([1, 37, 2, 4]),
    **{f"i{n}": np.array([n]) for n in (0, 1, 2, 4, 8, 37)},
}


@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=6))
def test_random_chains_answer_the_same(steps: list[str]) -> None:
    body, value = "h = MatMul(x, w) ", "h"
    for n, step in enumerate(steps):
        body += step.format(v=value, o=f"v{n}") + " "
        value = f"v{n}"
    text = f"(float[1,37,8] x) => (float[1,37,8] y) {{ {body} y = Identity({value}) }}"
    with pytest.MonkeyPatch.context() as patch:  # round every length, whether it pays or not
        patch.setattr(lengths, "_PRODUCTS", 0)
        patch.setattr(lengths, "_SHARE", 0.0)
        after(parsed(text, **CONSTANTS), [LENGTHS], tolerance=1e-4)
