"""Operators that the reference computes itself agree with ONNX Runtime, and values are given up in time."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser

from honed.tuner.verify.confined import EvaluationLimits
from honed.tuner.verify.evaluator import Reference, evaluate
from honed.tuner.verify.operators import _read_last

SHAPES = [
    ((2, 6, 9, 7), (8, 6, 3, 3), {"pads": [1, 0, 2, 1]}),
    ((1, 6, 11, 8), (6, 1, 3, 2), {"group": 6, "strides": [2, 1], "auto_pad": "SAME_UPPER"}),
    ((1, 4, 10, 9), (6, 2, 3, 3), {"group": 2, "dilations": [2, 3], "auto_pad": "VALID"}),
    ((1, 3, 7, 6), (4, 3, 4, 3), {"strides": [3, 2], "auto_pad": "SAME_LOWER"}),
    ((2, 3, 12), (5, 3, 4), {"strides": [2], "pads": [1, 2]}),
]


def single(op: str, given: dict[str, np.ndarray], **attributes: object) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in given.items()
    ]
    made = {"Conv": TensorProto.FLOAT, "ConvInteger": TensorProto.INT32}.get(op, TensorProto.UINT8)
    output = helper.make_tensor_value_info("y", made, None)
    graph = helper.make_graph([helper.make_node(op, list(given), ["y"], **attributes)], "g", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def agrees(model: onnx.ModelProto, given: dict[str, np.ndarray], most: float) -> None:
    found = evaluate(model, [given], evaluators=["reference"])
    assert isinstance(found, Reference), found
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, given)
    assert found.outputs[0]["y"].dtype == expected.dtype
    np.testing.assert_allclose(found.outputs[0]["y"].astype(float), expected.astype(float), atol=most)


@pytest.mark.parametrize(("x", "w", "attributes"), SHAPES)
def test_convolutions_of_floats(
    x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, object]
) -> None:
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("x", x), ("w", w))}
    given["b"] = rng.standard_normal(w[0]).astype(np.float32)
    agrees(single("Conv", given, **attributes), given, 1e-4)


@pytest.mark.parametrize(("x", "w", "attributes"), SHAPES[:2])
def test_convolutions_of_bytes(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, object]) -> None:
    rng = np.random.default_rng(0)
    bytes_ = {name: rng.integers(0, 256, shape, np.uint8) for name, shape in (("x", x), ("w", w))}
    given = {**bytes_, "zx": np.uint8(131), "zw": np.uint8(7)}
    given = {name: np.asarray(value) for name, value in given.items()}
    agrees(single("ConvInteger", given, **attributes), given, 0)
    scaled = {
        "x": bytes_["x"], "sx": np.float32(0.02), "zx": np.uint8(131),
        "w": bytes_["w"], "sw": np.float32(0.01), "zw": np.uint8(7),
        "sy": np.float32(0.5), "zy": np.uint8(100),
    }  # fmt: skip
    scaled = {name: np.asarray(value) for name, value in scaled.items()}
    agrees(single("QLinearConv", scaled, **attributes), scaled, 1)


def test_each_value_is_given_up_after_its_last_use() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (float[4] x, bool go) => (float[4] y, float[4] b) {'
        "a = Neg(x) b = Abs(a) c = Sin(a)"
        "d = If (go) <then_branch = g () => (float[4] t) { t = Cos(c) },"
        "else_branch = h () => (float[4] e) { e = Identity(x) }> y = Add(d, b) }"
    )
    last = _read_last(model)
    assert [each & {"x", "a", "b", "c", "d"} for each in last] == [set(), set(), {"a"}, {"x", "c"}, {"d"}]


def test_a_long_chain_needs_no_more_memory_than_its_largest_values() -> None:
    """Sixty values of 32 MiB are 1.9 GiB."""
    count = 60
    nodes = [helper.make_node("Neg", [f"v{n}"], [f"v{n + 1}"]) for n in range(count)]
    nodes += [helper.make_node("ReduceMax", [f"v{count}"], ["y"], keepdims=0)]
    nodes.insert(0, helper.make_node("Expand", ["x", "size"], ["v0"]))
    size = onnx.numpy_helper.from_array(np.array([8 << 20]), "size")
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])]
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])]
    graph = helper.make_graph(nodes, "g", given, output, [size])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    limits = EvaluationLimits(memory_bytes=1800 << 20)
    found = evaluate(model, [{"x": np.array([3], np.float32)}], limits, ["reference"])
    assert isinstance(found, Reference), found
    assert found.outputs[0]["y"] == 3
