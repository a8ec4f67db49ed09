"""Neighbouring slices that the same becomes of are joined: the same answers, in fewer launches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from honed.machine.devices import Device
from honed.tuner import frontend
from honed.tuner.compiler.verification import run_model
from honed.tuner.graph import PASSES, Pass
from honed.tuner.graph.pairs import join_pairs
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.module import read_program
from tests.tuner.search.search_functions import imagined

from .graphs import after, answers, operators, parsed, weights

pytestmark = pytest.mark.tvm

PAIRS = Pass("pairs", join_pairs)
FLOAT = onnx.TensorProto.FLOAT


def _half(value: str, side: str) -> str:
    """The rotary encoding of heads of the product: `side` is l for its left columns, r for the right ones."""
    ends = {"l": "i0, i16", "r": "i16, i32"}[side]
    v = value
    return f"""{v}s = Slice(p, {ends}, i2, i1) {v}h = Reshape({v}s, heads)
        {v}t = Transpose <perm = [0, 2, 1, 3]> ({v}h) {v}e = Slice({v}t, i0, i4, i3, i1)
        {v}o = Slice({v}t, i4, i8, i3, i1) {v}n = Neg({v}o) {v}c = Concat <axis = 3> ({v}n, {v}e)
        {v}a = Mul({v}t, cos) {v}b = Mul({v}c, sin) {v} = Add({v}a, {v}b)"""


_SCORES = "turned = Transpose <perm = [0, 1, 3, 2]> (k) y = MatMul(q, turned)"


def _model(body: str, shape: str = "2,2,6,6") -> onnx.ModelProto:
    given = "float[2,6,8] x, float[2,1,6,8] cos, float[2,1,6,8] sin"
    text = f"({given}) => (float[{shape}] y) {{ p = MatMul(x, w) {body} }}"
    ends = {f"i{n}": np.array([n]) for n in (0, 1, 2, 3, 4, 8, 16, 24, 32)}
    return parsed(text, w=weights(8, 32), heads=np.array([2, 6, 2, 8]), **ends)


def test_queries_and_keys_are_turned_at_once() -> None:
    model = after(_model(f"{_half('q', 'l')} {_half('k', 'r')} {_SCORES}"), [PAIRS])
    assert operators(model)["Neg"] == operators(model)["Add"] == 1


def test_keys_may_lie_before_queries() -> None:
    model = after(_model(f"{_half('q', 'r')} {_half('k', 'l')} {_SCORES}"), [PAIRS])
    assert operators(model)["Neg"] == 1


_BOTH = f"{_half('q', 'l')} {_half('k', 'r')}"
_ALSO = f"{_BOTH} {_SCORES.replace('y =', 'z =')} y = Add(z, f)"
_LEFT_ALONE = {
    "another factor": f"{_BOTH} {_SCORES}".replace("kb = Mul(kc, sin)", "kb = Mul(kc, cos)"),
    "another operator": f"{_BOTH} {_SCORES}".replace("kn = Neg(ko)", "kn = Relu(ko)"),
    "no neighbours": f"{_BOTH} {_SCORES}".replace("ks = Slice(p, i16, i32", "ks = Slice(p, i8, i24"),
    "read on the way": _ALSO.replace("y =", "f = ReduceMax <axes = [3]> (kn) y ="),
    "read by others than products": _ALSO.replace("y =", "f = ReduceMax <axes = [3]> (q) y ="),
    "a factor of its own": f"{_BOTH} {_SCORES}".replace("qa = Mul(qt, cos)", "qa = Mul(qt, qt)"),
}


@pytest.mark.parametrize("name", _LEFT_ALONE)
def test_what_does_not_become_the_same_is_left_alone(name: str) -> None:
    assert frontend.normalise(_model(_LEFT_ALONE[name]), passes=[PAIRS]).applied[0].times == 0


def test_moves_alone_are_left_to_views() -> None:
    body = """s = Slice(p, i0, i16, i2, i1) a = Reshape(s, heads) q = Transpose <perm = [0, 2, 1, 3]> (a)
        t = Slice(p, i16, i32, i2, i1) b = Reshape(t, heads) kt = Transpose <perm = [0, 2, 3, 1]> (b)
        y = MatMul(q, kt)"""
    assert frontend.normalise(_model(body), passes=[PAIRS]).applied[0].times == 0


def test_what_is_repeated_along_the_axis_of_the_parts_is_left_alone() -> None:
    body = """r = Relu(x) a = Slice(r, i0, i1, i1, i1) b = Slice(r, i1, i2, i1, i1)
        ra = Reshape(a, row) rb = Reshape(b, row) ta = Mul(a, ra) tb = Mul(b, rb)
        pa = MatMul(ta, w) pb = MatMul(tb, w) y = Add(pa, pb)"""
    ends = {f"i{n}": np.array([n]) for n in (0, 1, 2)}
    text = f"(float[1,2,5] x) => (float[1,5,3] y) {{ {body} }}"
    model = parsed(text, w=weights(5, 3), row=np.array([1, 5, 1]), **ends)
    assert operators(after(model, [PAIRS]))["Mul"] == 2


def _repeatable(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(one, other, strict=True))


def _chain(rng: np.random.Generator) -> onnx.ModelProto:
    """Two neighbouring slices of a value, and random operators that make the same of both."""
    made: list[tuple[str, tuple[int, ...]]] = [("0", (2, 3, 4))]
    nodes = [helper.make_node("Relu", ["x"], ["r"])]
    constants = {"axis": np.array([1])}
    for n, side in enumerate("ab"):
        bounds = {f"from{side}": np.array([3 * n]), f"to{side}": np.array([3 * n + 3])}
        constants |= bounds
        nodes.append(helper.make_node("Slice", ["r", *bounds, "axis"], [f"{side}0"]))

    def both(op_type: str, name: str, *given: str, shared: tuple[str, ...] = (), **attributes: Any) -> None:
        for side in "ab":
            inputs = [f"{side}{one}" for one in given]
            nodes.append(helper.make_node(op_type, [*inputs, *shared], [side + name], **attributes))

    for name in map(str, range(1, int(rng.integers(2, 7)))):
        given, shape = made[rng.integers(len(made))]
        kind = rng.integers(5)
        if kind == 0:
            both("Tanh", name, given)
        elif kind == 1:
            constants[f"c{name}"] = weights(*(int(rng.choice((1, extent))) for extent in shape))
            both("Mul", name, given, shared=(f"c{name}",))
        elif kind == 2:
            fit = [
                (o, s) for o, s in made if all(a == b or 1 in (a, b) for a, b in zip(s, shape, strict=True))
            ]
            other, its = fit[rng.integers(len(fit))]
            both("Add", name, given, other)
            shape = tuple(map(max, shape, its))
        elif kind == 3:
            first, second, third = shape
            shape = [(second, third, first), (1, first * second, third), (first, 1, second * third)][
                rng.integers(3)
            ]
            constants[f"s{name}"] = np.array(shape)
            both("Reshape", name, given, shared=(f"s{name}",))
        else:
            perm = [int(axis) for axis in rng.permutation(3)]
            both("Transpose", name, given, perm=perm)
            shape = tuple(shape[axis] for axis in perm)
        made.append((name, shape))
    end, shape = made[-1]
    constants["w"] = weights(shape[-1], 2)
    both("MatMul", "end", end, shared=("w",))
    outputs = [helper.make_tensor_value_info(f"{side}end", FLOAT, (*shape[:-1], 2)) for side in "ab"]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, (2, 6, 4))],
        outputs,
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@given(st.integers(0, 2**32 - 1))
def test_whatever_becomes_of_both_the_answers_are_the_same(seed: int) -> None:
    after(_chain(np.random.default_rng(seed)), [PAIRS])


@pytest.mark.opencl
def test_a_pair_saves_a_launch_and_is_right(device: Device) -> None:
    model = _model(f"{_half('q', 'l')} {_half('k', 'r')} {_SCORES}")
    rng = np.random.default_rng(1)
    shapes = {"x": (2, 6, 8), "cos": (2, 1, 6, 8), "sin": (2, 1, 6, 8)}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    (expected,) = answers(model, given)
    np.testing.assert_allclose(run_model(model, given, device)["y"], expected, atol=1e-4, rtol=1e-4)
    launches = {}
    for label, passes in (("on", PASSES), ("off", [one for one in PASSES if one.name != "pairs"])):
        module = frontend.import_relax(frontend.normalise(model, passes=passes))
        launches[label] = len(read_program(legalize(module, imagined("gpu"))[0]).calls)
    assert launches == {"on": 3, "off": 4}
