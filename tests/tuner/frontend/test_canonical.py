"""What ONNX Runtime loads is loaded for compiling, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from honed.protocol.errors import ModelRefused
from honed.tuner import frontend

Change = Callable[[onnx.ModelProto], None]
_CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    _CHANGES[function.__name__] = function
    return function


def info(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def plain() -> onnx.ModelProto:
    """y = relu(x + k), opset 17."""
    nodes = [helper.make_node("Add", ["x", "k"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    weights = [numpy_helper.from_array(np.float32([1, 2]), "k")]
    graph = helper.make_graph(nodes, "g", [info("x", 2)], [info("y", 2)], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@change
def nothing(_: onnx.ModelProto) -> None:
    pass


@change
def the_graph_has_no_name(model: onnx.ModelProto) -> None:
    model.graph.name = ""


@change
def an_output_has_no_shape(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


@change
def an_output_has_no_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].ClearField("type")


@change
def nodes_are_out_of_order(model: onnx.ModelProto) -> None:
    nodes = list(model.graph.node)[::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@change
def the_domain_is_spelled_out(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.domain = "ai.onnx"
    model.opset_import[0].domain = "ai.onnx"


@change
def nodes_alone_spell_the_domain_out(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        node.domain = "ai.onnx"


@change
def the_import_alone_spells_the_domain_out(model: onnx.ModelProto) -> None:
    model.opset_import[0].domain = "ai.onnx"


@change
def an_opset_is_imported_twice(model: onnx.ModelProto) -> None:
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))


@change
def a_known_domain_is_not_imported(model: onnx.ModelProto) -> None:
    model.graph.node[1].op_type, model.graph.node[1].domain = "FastGelu", "com.microsoft"


@change
def initialisers_are_no_inputs_as_of_old(model: onnx.ModelProto) -> None:
    model.ir_version, model.opset_import[0].version = 3, 8


@change
def an_initialiser_is_an_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(info("k", 2))


@change
def an_initialiser_is_there_twice(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.float32([3, 4]), "k"))


@change
def an_initialiser_has_no_name(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.float32(1), ""))


@change
def an_output_is_an_input(model: onnx.ModelProto) -> None:
    model.graph.output.append(info("x", 2))


@change
def an_output_is_an_initialiser(model: onnx.ModelProto) -> None:
    model.graph.output.append(info("k", 2))


@change
def an_output_is_listed_twice(model: onnx.ModelProto) -> None:
    model.graph.output.append(model.graph.output[0])


@change
def an_output_has_another_shape_than_it_says(model: onnx.ModelProto) -> None:
    model.graph.output[0].CopyFrom(info("y", 2, 1))


@change
def a_value_has_another_shape_than_it_says(model: onnx.ModelProto) -> None:
    model.graph.value_info.append(info("a", 5))


@change
def nothing_needs_what_cannot_be_compiled(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("NonZero", ["a"], ["unused"]))


@change
def a_branch_stands_before_what_it_reads(model: onnx.ModelProto) -> None:
    branches = [
        helper.make_graph([helper.make_node(op, ["a"], [op])], op, [], [info(op, 2)]) for op in ("Abs", "Neg")
    ]
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "c"))
    nodes = [chosen, model.graph.node[0]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


@pytest.mark.parametrize("name", _CHANGES)
def test_what_onnx_runtime_loads_is_loaded(name: str, tmp_path: Path) -> None:
    model = plain()
    _CHANGES[name](model)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    onnxruntime.set_default_logger_severity(4)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = {"x": np.float32([-4, 3])}
    expected = dict(zip([o.name for o in session.get_outputs()], session.run(None, x), strict=True))
    made = frontend.normalise(frontend.load(path), precision="fp32")
    onnx.checker.check_model(made.model)
    assert [spec.name for spec in made.inputs] == ["x"]
    assert [spec.name for spec in made.outputs] == list(expected)
    for spec, value in zip(made.outputs, ReferenceEvaluator(made.model).run(None, x), strict=True):
        np.testing.assert_allclose(value, expected[spec.name], rtol=1e-5, atol=1e-5)
        assert (spec.shape, spec.dtype) == (value.shape, value.dtype.name)


def test_an_input_without_a_shape_is_given_one(tmp_path: Path) -> None:
    model = plain()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    loaded = frontend.load(path)
    with pytest.raises(ModelRefused, match="add --shape x="):
        frontend.normalise(loaded)
    assert frontend.normalise(loaded, shapes={"x": (2,)}).outputs[0].shape == (2,)


def test_a_circle_is_refused(tmp_path: Path) -> None:
    model = plain()
    model.graph.node[0].input[1] = "y"
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelRefused, match="not a valid ONNX model"):
        frontend.load(path)


@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_a_resize_by_scales_is_as_in_onnx_runtime(mode: str) -> None:
    """Lengths are rounded in float32, corners are aligned by lengths after rounding."""
    r = np.random.default_rng(0)
    transforms = ["half_pixel", "asymmetric", "pytorch_half_pixel", "align_corners", "half_pixel_symmetric"]
    for transform in [*transforms, "tf_crop_and_resize"]:
        for scales in ((2.35, 3.3), (1.7, 0.35), (1.15, 0.6), *r.uniform(0.3, 3.5, (3, 2))):
            sides = [20, int(r.integers(6, 24))]
            region = np.float32([0, 0, 0.1, 0.2, 1, 1, 0.8, 0.9] if transform[:2] == "tf" else [])
            attrs = {"mode": mode, "coordinate_transformation_mode": transform}
            graph = helper.make_graph(
                [helper.make_node("Resize", ["x", "region", "scales"], ["y"], **attrs)],
                "g",
                [info("x", 1, 1, *sides)],
                [info("y", 1, 1, "h", "w")],
                [
                    numpy_helper.from_array(np.float32([1, 1, *scales]), "scales"),
                    numpy_helper.from_array(region, "region"),
                ],
            )
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
            x = {"x": r.normal(size=(1, 1, *sides)).astype(np.float32)}
            session = onnxruntime.InferenceSession(model.SerializeToString())
            (expected,) = session.run(None, x)
            made = frontend.normalise(model, precision="fp32").model
            (found,) = ReferenceEvaluator(made).run(None, x)
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
