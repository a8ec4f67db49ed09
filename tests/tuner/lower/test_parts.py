"""A compiled model says which operators each of its steps computes, and which passes made those."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from honed.runtime.compiled import validate
from honed.runtime.compiled.model import CompiledModel, Launch, SourceModel
from honed.tuner import frontend
from honed.tuner.compiler.assemble import assemble
from honed.tuner.lower.module import lower_module
from tests.runtime.builder import PROFILE
from tests.tuner.graph.graphs import SAME, TOWERS, parsed, weights

pytestmark = pytest.mark.tvm


def _compiled(model: onnx.ModelProto) -> CompiledModel:
    normalised = frontend.normalise(model)
    given = frontend.import_named(normalised)
    lowered = lower_module(given.module, PROFILE, names=given.names)
    source = SourceModel(sha256="0" * 64, filename="m", producer="", opset=17, precision="fp32", notes=())
    compiled, _ = assemble(source, PROFILE, normalised, lowered, None)
    validate.check(compiled)
    return compiled


def test_every_operator_is_in_one_part_and_every_step_too() -> None:
    model = parsed(
        "(float[5,8] x) => (float[5,8] y, float[5,8] z) {"
        " r = Reshape(x, s) a = MatMul(r, w) b = Relu(a) c = MatMul(b, v) d = Relu(c)"
        " y = Reshape(d, t) z = Identity(y) }",
        w=weights(8, 8),
        v=weights(8, 8, seed=1),
        s=np.array([1, 5, 8]),
        t=np.array([5, 8]),
    )
    compiled = _compiled(model)
    fused = [[one.op for one in part.operators] for part in compiled.parts]
    assert fused == [["MatMul", "Relu"], ["MatMul", "Relu"]]
    views = [(v.operator.op, v.shape, compiled.buffers[v.buffer].place) for v in compiled.views]
    assert views == [("Reshape", (1, 5, 8), "input"), ("Reshape", (5, 8), "output")]
    numbers = [n for part in compiled.parts for n in part.steps]
    assert numbers == [n for n, step in enumerate(compiled.steps) if isinstance(step, Launch)]


def test_parts_know_the_passes_that_made_their_operators() -> None:
    compiled = _compiled(parsed(TOWERS, **SAME))
    products = [one for part in compiled.parts for one in part.operators if one.op == "MatMul"]
    assert len(products) == 3
    assert all("twins" in one.passes for one in products)
    plain = _compiled(parsed("(float[4] x) => (float[4] y) { y = Relu(x) }"))
    assert [one.passes for part in plain.parts for one in part.operators] == [()]


def test_a_product_that_writes_its_transpose_is_named_with_it() -> None:
    compiled = _compiled(
        parsed(
            "(float[2,4,8,8] x, float[2,4,8,16] v) => (float[2,8,4,16] y)"
            " { a = MatMul(x, v) y = Transpose<perm=[0,2,1,3]>(a) }"
        )
    )
    assert [[one.op for one in part.operators] for part in compiled.parts] == [["MatMul", "Transpose"]]


def test_products_that_read_one_value_by_strides_keep_their_names() -> None:
    """Each reads a view of its own, and all call one function."""
    compiled = _compiled(
        parsed(
            "(float[8,4] x, float[8,8] u) => (float[4,8] y0, float[4,8] y1, float[4,8] y2)"
            " { t = Transpose<perm=[1,0]>(x) v = Softmax(u) w = Tanh(u)"
            " a = MatMul(t, u) y0 = Relu(a) b = MatMul(t, v) y1 = Relu(b) c = MatMul(t, w) y2 = Relu(c) }"
        )
    )
    found = {part.operators[-1].name: part.operators[0].name for part in compiled.parts}
    assert {name: found.get(name) for name in ("y0", "y1", "y2")} == {
        "y0": "a/MatMul",
        "y1": "b/MatMul",
        "y2": "c/MatMul",
    }
