"""Twins become one with a batch axis where that saves launches, and answer as before."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from honed.tuner import lightglue
from honed.tuner.graph import PASSES, Pass
from honed.tuner.graph.twins import fuse_horizontally

from .graphs import SAME, TOWERS, after, operators, parsed, weights

TWINS = (Pass("twins", fuse_horizontally),)
# What makes `o` of `x`, of `z` of another twin, and of the twin's input.
STEPS = {
    "dense": "{o} = MatMul({x}, w{n})",
    "relu": "{o} = Relu({x})",
    "scale": "{o} = Mul({x}, scale)",
    "own": "{o} = Add({x}, b{n}{i})",
    "softmax": "{o} = Softmax<axis=-1>({x})",
    "norm": "{o} = LayerNormalization({x}, gain, gain)",
    "turn": "{o}t = Transpose<perm=[0,2,1]>({x}) {o} = Reshape({o}t, flat)",
    "heads": "{o}r = Reshape({x}, heads) {o}t = Transpose<perm=[0,2,1,3]>({o}r) {o} = Reshape({o}t, flat)",
    "other": "{o} = Sub({x}, {z})",
    "attend": "{o}t = Transpose<perm=[0,2,1]>({z}) {o}s = MatMul({x}, {o}t) {o} = MatMul({o}s, {x})",
    "swap": "{o} = Tanh({z})",
    "part": "{o}a = Slice({x}, four, eight, two) {o}b = Neg({o}a) {o} = Concat<axis=2>({o}a, {o}b)",
    "mean": "{o}m = ReduceMean<axes=[-1],keepdims=1>({x}) {o} = Sub({x}, {o}m)",
    "residual": "{o} = Add({x}, {first})",
    "pad": "{o}p = Slice({x}, four, eight, two) {o} = Pad({o}p, pads)",
}
CONSTANTS = {
    "w": weights(8, 8, seed=99),
    "scale": np.float32(0.5),
    "gain": weights(8),
    "flat": np.array([1, 4, 8]),
    "heads": np.array([1, 4, 2, 4]),
    "four": np.array([4]),
    "eight": np.array([8]),
    "two": np.array([2]),
    "pads": np.array([0, 0, 4, 0, 0, 0]),
}


def test_towers_of_the_same_weights_become_one() -> None:
    done = after(parsed(TOWERS, **SAME), TWINS)
    assert operators(done) == {"Concat": 1, "MatMul": 3, "Relu": 1, "Softmax": 1, "Slice": 2}


def test_equal_weights_under_other_names_are_the_same() -> None:
    text = TOWERS.replace("MatMul(y, w)", "MatMul(y, k)")
    done = after(parsed(text, **SAME, k=SAME["w"]), TWINS)
    assert operators(done)["MatMul"] == 3


def test_towers_of_other_weights_are_left_alone() -> None:
    text = TOWERS.replace("(y, w)", "(y, k)").replace("(f, w2)", "(f, k2)").replace("(h, w3)", "(h, k3)")
    others = {f"k{name[1:]}": value + np.float32(1) for name, value in SAME.items()}
    model = parsed(text, **SAME, **others)
    assert operators(after(model, TWINS)) == operators(after(model, ()))


def test_what_does_not_pay_is_left_alone() -> None:
    """A stack and two slices for one product less."""
    text = """(float[1,6,8] x, float[1,6,8] y) => (float[1,6,8] u, float[1,6,8] v) {
        u = MatMul(x, w) v = MatMul(y, w) }"""
    assert operators(after(parsed(text, w=SAME["w"]), TWINS)) == {"MatMul": 2}


def test_large_borders_do_not_pay() -> None:
    """What is copied there takes longer than the launches saved."""
    text = TOWERS.replace("1,6,8", "1,70000,8")
    assert "Concat" not in operators(after(parsed(text, **SAME), TWINS))


def test_a_twin_is_not_merged_with_its_ancestor() -> None:
    """The same weights applied again and again."""
    text = """(float[1,6,8] x) => (float[1,6,8] u) {
        a = MatMul(x, w) b = MatMul(a, w) c = MatMul(b, w) u = MatMul(c, w) }"""
    assert operators(after(parsed(text, w=SAME["w"]), TWINS)) == {"MatMul": 4}


def test_cross_attention_reads_the_stack_in_another_order() -> None:
    text = """(float[1,6,8] x, float[1,6,8] y) => (float[1,6,8] u) {
        a = MatMul(x, w) b = MatMul(y, w) p = Transpose<perm=[0,2,1]>(a) q = Transpose<perm=[0,2,1]>(b)
        c = MatMul(a, q) d = MatMul(b, p) e = Softmax(c) f = Softmax(d) g = MatMul(e, y) h = MatMul(f, x)
        i = MatMul(g, w2) j = MatMul(h, w2) k = MatMul(i, w3) l = MatMul(j, w3) u = Sub(k, l) }"""
    done = after(parsed(text, **SAME), TWINS)
    assert operators(done)["MatMul"] == 5
    backwards = [n for n in done.graph.node if n.op_type == "Slice" and _starts(done, n) == [-1]]
    assert len(backwards) == 1


def _starts(model: onnx.ModelProto, node: onnx.NodeProto) -> list[int]:
    (found,) = (t for t in model.graph.initializer if t.name == node.input[1])
    return [int(v) for v in numpy_helper.to_array(found)]


def test_twins_may_read_the_same_one_of_others() -> None:
    text = TOWERS.replace("b = Relu(a)", "i = Softmax(a) b = Sub(a, i)")
    text = text.replace("f = Relu(e)", "j = Softmax(e) f = Sub(a, j)")
    done = after(parsed(text, **SAME), TWINS)
    assert operators(done)["Sub"] == 1


def test_constants_of_each_twin_are_stacked() -> None:
    text = TOWERS.replace("b = Relu(a)", "b = Add(a, k)").replace("f = Relu(e)", "f = Add(e, l)")
    done = after(parsed(text, **SAME, k=weights(6, 8, seed=3), l=weights(6, 8, seed=4)), TWINS)
    assert operators(done)["Add"] == 1
    assert (2, 6, 8) in {tuple(t.dims) for t in done.graph.initializer}


def test_three_images_in_convolutions_are_three_of_a_batch() -> None:
    model = _convolutions(3)
    done = operators(after(model, TWINS))
    assert done["Conv"] == 2
    assert done["MaxPool"] == 1


def _convolutions(images: int) -> onnx.ModelProto:
    lines = [
        f"c{n} = Conv<pads=[1,1,1,1]>(x{n}, w) r{n} = Relu(c{n}) p{n} = MaxPool<kernel_shape=[2,2]>(r{n}) "
        f"d{n} = Conv(p{n}, w2) m{n} = ReduceMean<axes=[2,3],keepdims=0>(d{n})"
        for n in range(images)
    ]
    heads = ", ".join(f"float[1,3,8,8] x{n}" for n in range(images))
    joined = f"y = Concat<axis=1>({', '.join(f'm{n}' for n in range(images))})"
    text = f"({heads}) => (float[1,{4 * images}] y) {{ {' '.join(lines)} {joined} }}"
    return parsed(text, w=weights(4, 3, 3, 3), w2=weights(4, 4, 1, 1))


@settings(max_examples=30)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=3, max_size=12), st.integers(2, 3))
@example(["dense", "attend", "attend", "attend", "mean", "pad", "attend"], 3)
def test_made_up_twins_answer_as_before(steps: list[str], count: int) -> None:
    model = _made_up(steps, count)
    after(model, TWINS)
    after(model, PASSES)


def _made_up(steps: list[str], count: int) -> onnx.ModelProto:
    """Twins of [1, 4, 8] values that do what `steps` say, some of it with each other's values."""
    first = [f"x{i}" for i in range(count)]
    lines = [f"y{i} = MatMul(x{i}, w)" for i in range(count)]
    now, constants = [f"y{i}" for i in range(count)], dict(CONSTANTS)
    for n, kind in enumerate(steps):
        constants[f"w{n}"] = weights(8, 8, seed=n)
        constants |= {f"b{n}{i}": weights(4, 8, seed=10 * n + i) for i in range(count)}
        made = [f"v{n}{i}" for i in range(count)]
        for i, o in enumerate(made):
            places = {"o": o, "x": now[i], "z": now[(i + 1) % count], "first": first[i]}
            lines.append(STEPS[kind].format(**places, n=n, i=i))
        now = made
    inputs, outputs = (", ".join(f"float[1,4,8] {name}" for name in names) for names in (first, now))
    text = f"({inputs}) => ({outputs}) {{ {' '.join(lines)} }}"
    read = {name: value for name, value in constants.items() if re.search(rf"\b{name}\b", text)}
    return parsed(text, **read)


@pytest.mark.slow
def test_the_images_of_lightglue_become_one() -> None:
    model = lightglue.build(16)
    done = operators(after(model, TWINS))
    assert done["Softmax"] == 18  # of 36
    assert done["MatMul"] <= 122  # of 241
