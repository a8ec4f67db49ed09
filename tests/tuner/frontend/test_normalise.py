"""Normalisation: what the user sees is kept, shapes become static, every reason for refusal is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from honed.runtime.errors import InvalidArgument, ModelRefused
from honed.tuner.frontend import StaticTensorSpec, builder, normalise
from honed.tuner.frontend.importing import CORE
from honed.tuner.frontend.rules import RULES
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name: str, shape: Sequence[int | str | None] | None, elem: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: dict[str, Any] | None = None,
    opset: int = 17,
    **extra: Any,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    graph = helper.make_graph(nodes, "test", inputs, outputs, tensors)
    domains = {n.domain for n in nodes} - {""}
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10, **extra)


node = helper.make_node


def evaluate(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return list(onnx.reference.ReferenceEvaluator(proto).run(None, feeds))


def reasons(proto: onnx.ModelProto, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ModelRefused) as error:
        normalise(proto, **options)
    assert str(error.value).isprintable()
    assert error.value.reasons
    return error.value.reasons


def operators(proto: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def test_a_leading_symbolic_dimension_becomes_one_and_is_noted() -> None:
    done = normalise(
        model([node("Relu", ["x"], ["y"])], [info("x", ["batch", 3])], [info("y", ["batch", 3])])
    )
    assert done.inputs == (StaticTensorSpec(name="x", dtype="float32", shape=(1, 3)),)
    assert done.outputs[0].shape == (1, 3)
    assert "batch" in done.notes[0]


def test_given_shapes_are_bound_wherever_the_dimension_stands() -> None:
    proto = model(
        [node("Add", ["a", "b"], ["y"])],
        [info("a", [1, "n", 4]), info("b", ["n", 1])],
        [info("y", [1, "n", 4])],
    )
    done = normalise(proto, shapes={"a": (1, 7, 4)})
    assert [i.shape for i in done.inputs] == [(1, 7, 4), (7, 1)]
    assert done.notes == ()


def test_question_marks_name_no_dimension() -> None:
    """Paddle's exporter writes one for each dimension it has no name for."""
    proto = model([node("Relu", ["x"], ["y"])], [info("x", [1, "?", "?"])], [info("y", None)])
    assert normalise(proto, shapes={"x": (1, 4, 7)}).inputs[0].shape == (1, 4, 7)


def test_an_inner_name_is_never_taken_for_a_batch() -> None:
    proto = model(
        [node("Add", ["a", "b"], ["y"])], [info("a", [1, "n"]), info("b", ["n", 1])], [info("y", None)]
    )
    found = reasons(proto)
    assert len(found) == 2
    assert "--shape a=1,n" in found[0]


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"z": (1,)}, "'z'"),
        ({"x": (1, 3)}, "2 dimensions"),
        ({"x": (1, 3, 5)}, "is 4 in the model"),
        ({"x": (1, 0, 4)}, "between 1"),
        ({"x": (1, -1, 4)}, "between 1"),
    ],
)
def test_shapes_that_contradict_the_model(shapes: dict[str, tuple[int, ...]], text: str) -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", [1, "n", 4])], [info("y", None)])
    with pytest.raises(InvalidArgument, match=text):
        normalise(proto, shapes=shapes)


def test_a_shape_that_is_not_given_at_all() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [info("x", None)], [info("y", None)])
    assert "--shape x=" in reasons(proto)[0]
    assert normalise(proto, shapes={"x": (2, 3)}).outputs[0].shape == (2, 3)


def test_shape_arithmetic_is_folded_away() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["n1"]),
        node("Concat", ["n1", "minus"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["y"]),
    ]
    constants = {"zero": np.array(0), "axes": np.array([0]), "minus": np.array([-1])}
    done = normalise(model(nodes, [info("x", [2, 3, 4])], [info("y", None)], constants))
    assert operators(done.model) == ["Reshape"]
    assert done.outputs[0].shape == (2, 12)


def test_folded_integer_division_truncates() -> None:
    constants = {"a": np.array([-7, 7, -8]), "b": np.array([2, -2, 4])}
    nodes = [node("Div", ["a", "b"], ["q"]), node("Add", ["q", "x"], ["y"])]
    done = normalise(model(nodes, [info("x", [3], INT64)], [info("y", None, INT64)], constants))
    assert evaluate(done.model, {"x": np.zeros(3, np.int64)})[0].tolist() == [-3, -3, -2]


def test_every_kind_of_constant_node() -> None:
    nodes = [
        node("Constant", [], ["a"], value_float=2.0),
        node("Constant", [], ["b"], value_floats=[1.0, 2.0]),
        node("Constant", [], ["i"], value_int=1),
        node("Constant", [], ["axes"], value_ints=[0]),
        node("Constant", [], ["t"], value=numpy_helper.from_array(np.array([3.0], np.float32))),
        node("Mul", ["x", "a"], ["p"]),
        node("Add", ["p", "b"], ["q"]),
        node("Add", ["q", "t"], ["r"]),
        node("Unsqueeze", ["r", "axes"], ["u"]),
        node("Gather", ["u", "i"], ["y"], axis=1),
    ]
    proto = model(nodes, [info("x", [2])], [info("y", None)])
    x = np.array([1.0, 5.0], np.float32)
    assert evaluate(normalise(proto).model, {"x": x})[0].tolist() == [15.0]


def test_initialisers_listed_as_inputs_are_frozen() -> None:
    proto = model(
        [node("Add", ["x", "w"], ["y"])],
        [info("x", [2]), info("w", [2])],
        [info("y", [2])],
        {"w": np.ones(2, np.float32)},
    )
    assert [i.name for i in normalise(proto).inputs] == ["x"]


def test_names_of_inputs_and_outputs_are_kept_whatever_they_are() -> None:
    names = ["x:0", "input.1", "a/b c", "ключ", "y:0", "0"]
    proto = model(
        [node("Add", [names[0], names[1]], [names[4]]), node("Mul", [names[2], names[3]], [names[5]])],
        [info(n, [2]) for n in names[:4]],
        [info(n, [2]) for n in names[4:]],
    )
    done = normalise(proto)
    assert [i.name for i in done.inputs] == names[:4]
    assert [o.name for o in done.outputs] == names[4:]
    assert [i.name for i in done.model.graph.input] == names[:4]
    assert [o.name for o in done.model.graph.output] == names[4:]


def test_outputs_that_are_inputs_constants_or_each_other() -> None:
    nodes = [node("Relu", ["x"], ["y"]), node("Identity", ["y"], ["z"]), node("Identity", ["x"], ["same"])]
    proto = model(
        nodes,
        [info("x", [2]), info("unused", [3], INT64)],
        [info(n, [2]) for n in ("y", "z", "same", "c")],
        {"c": np.array([5, 6], np.float32)},
    )
    done = normalise(proto)
    assert [i.name for i in done.inputs] == ["x", "unused"]
    got = evaluate(done.model, {"x": np.array([-1, 1], np.float32), "unused": np.zeros(3, np.int64)})
    assert [v.tolist() for v in got] == [[0, 1], [0, 1], [-1, 1], [5, 6]]


def test_local_functions_are_expanded_with_their_attributes() -> None:
    scaled = node("LeakyRelu", ["a"], ["b"])
    scaled.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    inner = helper.make_function(
        "my", "Inner", ["a"], ["b"], [scaled], [helper.make_opsetid("", 17)], ["slope"]
    )
    outer_nodes = [node("Inner", ["p"], ["q"], domain="my", slope=0.5), node("Neg", ["q"], ["r"])]
    outer = helper.make_function(
        "my", "Outer", ["p"], ["r"], outer_nodes, [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    )
    proto = model(
        [node("Outer", ["x"], ["y"], domain="my")],
        [info("x", [2])],
        [info("y", None)],
        functions=[outer, inner],
    )
    x = np.array([-4, 3], np.float32)
    assert evaluate(normalise(proto).model, {"x": x})[0].tolist() == [2, -3]


def test_functions_that_call_themselves_are_refused() -> None:
    body = [node("Again", ["a"], ["b"], domain="my")]
    again = helper.make_function("my", "Again", ["a"], ["b"], body, [helper.make_opsetid("my", 1)])
    proto = model(
        [node("Again", ["x"], ["y"], domain="my")],
        [info("x", [2])],
        [info("y", None)],
        functions=[again],
    )
    assert "nested" in reasons(proto)[0]


def test_functions_that_double_at_every_level_are_refused_in_time() -> None:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    functions = [helper.make_function("my", "F0", ["a"], ["b"], [node("Identity", ["a"], ["b"])], opsets)]
    for level in range(1, 30):
        body = [node(f"F{level - 1}", [a], [b], domain="my") for a, b in (("a", "m"), ("m", "b"))]
        functions.append(helper.make_function("my", f"F{level}", ["a"], ["b"], body, opsets))
    proto = model(
        [node("F29", ["x"], ["y"], domain="my")], [info("x", [2])], [info("y", None)], functions=functions
    )
    with pytest.raises(ModelRefused, match="grows beyond"):
        normalise(proto)


def test_constants_are_bounded_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("Tile", ["w", "r"], [f"t{i}"]) for i in range(8)]
    nodes += [node("MatMul", ["x", f"t{i}"], [f"y{i}"]) for i in range(8)]
    constants = {"w": np.ones((64, 64), np.float32), "r": np.array([1, 4])}
    proto = model(nodes, [info("x", [64, 64])], [info(f"y{i}", None) for i in range(8)], constants)
    monkeypatch.setattr(builder, "CONSTANT_BYTES", 200_000)
    with pytest.raises(ModelRefused, match="constants grow"):
        normalise(proto)


def test_what_swells_is_computed_at_run_time() -> None:
    shape = {"s": np.array([1024, 1024])}
    nodes = [node("ConstantOfShape", ["s"], ["c"]), node("Add", ["c", "x"], ["y"])]
    done = normalise(model(nodes, [info("x", [1024])], [info("y", None)], shape))
    assert sum(t.ByteSize() for t in done.model.graph.initializer) < 1000


def branches(condition: str) -> list[onnx.NodeProto]:
    then = helper.make_graph([node("Neg", ["x"], ["t"])], "then", [], [info("t", [2])])
    other = helper.make_graph([node("Sin", ["x"], ["e"])], "else", [], [info("e", [2])])
    return [node("If", [condition], ["y"], then_branch=then, else_branch=other, name="choice")]


def test_a_constant_condition_chooses_a_branch() -> None:
    proto = model(branches("c"), [info("x", [2])], [info("y", [2])], {"c": np.array(True)})
    assert operators(normalise(proto).model) == ["Neg"]


def test_a_condition_at_run_time_chooses_between_both_branches() -> None:
    proto = model(branches("c"), [info("x", [2]), info("c", [], BOOL)], [info("y", [2])])
    assert operators(normalise(proto).model)[-1] == "Where"


def test_every_reason_is_given_at_once() -> None:
    nodes = [
        node("NonZero", ["x"], ["nz"], name="find"),
        node("Det", ["big"], ["d"], name="volume"),
        node("GRU", ["s", "w", "r"], ["g", "h"], name="gate", hidden_size=2),
        node("Relu", ["g"], ["after"]),
        node("TfIdfVectorizer", ["after3"], ["l"], name="memory"),
        node("Custom", ["x"], ["cu"], name="own", domain="com.example"),
    ]
    inputs = [
        info("x", [2]),
        info("big", [9, 9]),
        info("s", [400, 1, 2]),
        info("w", [1, 6, 2]),
        info("r", [1, 6, 2]),
        info("after3", ["a", "b", 2]),
    ]
    outputs = [info(n, None) for n in ("nz", "d", "after", "l", "cu")]
    found = reasons(model(nodes, inputs, outputs))
    text = " | ".join(found)
    for expected in ("NonZero", "Det", "GRU", "TfIdfVectorizer", "com.example", "'after3'"):
        assert expected in text
    assert "gate" in text
    assert len(found) == 6


def test_many_nodes_of_one_kind_are_counted() -> None:
    nodes = [node("NonZero", ["x"], [f"y{i}"], name=f"n{i}") for i in range(9)]
    proto = model(nodes, [info("x", [2])], [info(f"y{i}", None) for i in range(9)])
    assert reasons(proto) == (
        "NonZero (ai.onnx, opset 17; 9 nodes: n0, n1, n2, ...): the shape of its output depends on the "
        "values of its inputs; honed compiles static shapes only",
    )


def test_tensors_beyond_the_limit_are_refused() -> None:
    huge = {"s": np.array([1 << 20, 1 << 20])}
    proto = model([node("Expand", ["x", "s"], ["y"])], [info("x", [1])], [info("y", None)], huge)
    assert "limit" in reasons(proto)[0]


@pytest.mark.parametrize("elem", [TensorProto.STRING, TensorProto.BFLOAT16, TensorProto.COMPLEX64])
def test_elements_that_are_not_carried(elem: int) -> None:
    proto = model([node("Identity", ["x"], ["y"])], [info("x", [2], elem)], [info("y", [2], elem)])
    assert "which is not compiled" in reasons(proto)[0]


def test_sequences_of_known_length_vanish() -> None:
    nodes = [
        node("SplitToSequence", ["x", "one"], ["s"], axis=0),
        node("SequenceAt", ["s", "last"], ["e"]),
        node("SequenceInsert", ["s", "e", "first"], ["t"]),
        node("SequenceErase", ["t", "last"], ["u"]),
        node("ConcatFromSequence", ["u"], ["y"], axis=0),
    ]
    constants = {"one": np.array(1), "last": np.array(-1), "first": np.array(0)}
    proto = model(nodes, [info("x", [3, 2])], [info("y", None)], constants)
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert evaluate(normalise(proto).model, {"x": x})[0].tolist() == [[4, 5], [0, 1], [2, 3]]


def precise(elem: int) -> onnx.ModelProto:
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    nodes = [
        node("Mul", ["x", "w"], ["m"]),
        node("Cast", ["i"], ["f"], to=elem),
        node("Add", ["m", "f"], ["y"]),
        node("Cast", ["y"], ["z"], to=FLOAT),
    ]
    return model(
        nodes,
        [info("x", [2], elem), info("i", [2], INT64)],
        [info("y", [2], elem), info("z", [2])],
        {"w": np.array([2, 1e6], np.float64).astype(dtype)},
    )


@pytest.mark.parametrize(
    ("elem", "options", "label", "compute"),
    [
        (FLOAT, {}, "fp32", FLOAT),
        (FLOAT, {"precision": "fp16"}, "fp16", TensorProto.FLOAT16),
        (TensorProto.FLOAT16, {"precision": "fp32"}, "fp32", FLOAT),
        (TensorProto.FLOAT16, {"profile": imagined("mali", fp16=False)}, "fp32", FLOAT),
        (TensorProto.FLOAT16, {}, "mixed", TensorProto.FLOAT16),
        (TensorProto.DOUBLE, {"profile": imagined("mali")}, "fp32", FLOAT),
        (TensorProto.DOUBLE, {"precision": "fp32"}, "fp32", FLOAT),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_precision(elem: int, options: dict[str, Any], label: str, compute: int) -> None:
    done = normalise(precise(elem), **options)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(elem)).name
    assert [i.dtype for i in done.inputs] == [dtype, "int64"]
    assert [o.dtype for o in done.outputs] == [dtype, "float32"]
    assert done.model.graph.input[0].type.tensor_type.elem_type == compute
    assert done.precision == label
    onnx.checker.check_model(done.model, full_check=True)
    assert bool(done.notes) == ("profile" in options)


def test_sums_and_exponentials_stay_in_single_precision() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["m"]),
        node("Softmax", ["m"], ["s"]),
        node("LayerNormalization", ["s", "g", "h"], ["n"]),
        node("Add", ["n", "m"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    constants = {
        "w": rng.normal(size=(8, 64)).astype(np.float32),
        "g": np.ones(64, np.float32),
        "h": np.zeros(64, np.float32),
    }
    done = normalise(model(nodes, [info("x", [4, 8])], [info("y", None)], constants), precision="fp16")
    onnx.checker.check_model(done.model, full_check=True)
    kinds = {i.name: i.type.tensor_type.elem_type for i in done.model.graph.value_info}
    by_op = {n.op_type: n for n in done.model.graph.node if n.op_type != "Cast"}
    assert kinds[by_op["Softmax"].input[0]] == kinds[by_op["LayerNormalization"].output[0]] == FLOAT
    assert kinds[by_op["MatMul"].output[0]] == TensorProto.FLOAT16
    assert done.precision == "mixed"


def test_large_constants_stay_finite_in_half_precision() -> None:
    proto = model(
        [node("Add", ["x", "w"], ["y"])],
        [info("x", [1])],
        [info("y", [1])],
        {"w": np.array([-1e9], np.float32)},
    )
    done = normalise(proto, precision="fp16")
    assert np.isfinite(numpy_helper.to_array(done.model.graph.initializer[0])).all()


def test_half_precision_needs_the_device() -> None:
    with pytest.raises(InvalidArgument, match="cl_khr_fp16"):
        normalise(precise(FLOAT), precision="fp16", profile=imagined("mali", fp16=False))


def test_normalised_models_are_valid_and_of_the_core() -> None:
    nodes = [
        node("LayerNormalization", ["x", "scale"], ["n", "mean", "inverse"], axis=-1),
        node("Gemm", ["n", "w", "b"], ["g"], alpha=0.5, transB=1),
        node("Softplus", ["g"], ["s"]),
        node("TopK", ["s", "k"], ["v", "i"]),
        node("CumSum", ["v", "axis"], ["y"], reverse=1, exclusive=1),
    ]
    rng = np.random.default_rng(1)
    constants = {
        "scale": rng.normal(size=6).astype(np.float32),
        "w": rng.normal(size=(5, 6)).astype(np.float32),
        "b": rng.normal(size=5).astype(np.float32),
        "k": np.array([3]),
        "axis": np.array(1),
    }
    proto = model(
        nodes, [info("x", [4, 6])], [info(n, None) for n in ("y", "i", "mean", "inverse")], constants
    )
    done = normalise(proto)
    onnx.checker.check_model(done.model, full_check=True)
    assert set(operators(done.model)) <= set(CORE)
    x = rng.normal(size=(4, 6)).astype(np.float32)
    for got, expected in zip(evaluate(done.model, {"x": x}), evaluate(proto, {"x": x}), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["Add", "Mul", "Sub", "Cast"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.float32])
def test_folded_arithmetic_is_that_of_the_reference_evaluator(op: str, dtype: type[np.generic]) -> None:
    a, b = np.arange(250, 256).astype(dtype), np.arange(6).astype(dtype)
    kinds = [TensorProto.INT8, TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16]
    for to in kinds if op == "Cast" else [None]:
        given = {"a": a} if to else {"a": a, "b": b}
        node = helper.make_node(op, list(given), ["c"], **({"to": to} if to else {}))
        (found,) = builder.evaluate(node, builder.TARGET_OPSET, given)
        (expected,) = ReferenceEvaluator(node).run(None, given)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("where", ["ReferenceEvaluator", "shape_inference.infer_node_outputs"])
def test_memory_that_runs_out_is_no_fault_of_the_node(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def short(*_: object, **__: object) -> None:
        raise RuntimeError("std::bad_alloc")

    monkeypatch.setattr(f"honed.tuner.frontend.builder.{where}", short)
    # Einsum has a rule, Det has none: without its value the latter would be refused as not compiled.
    for op, extra in (("Det", {}), ("Einsum", {"equation": "ii"})):
        nodes = [node(op, ["c"], ["d"], **extra), node("Add", ["x", "d"], ["y"])]
        with pytest.raises(MemoryError):
            normalise(model(nodes, [info("x", [2])], [info("y", None)], {"c": np.eye(2, dtype=np.float32)}))


def test_a_rule_whose_memory_runs_out_is_no_fault_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise MemoryError

    monkeypatch.setitem(RULES, ("", "Relu"), short)
    with pytest.raises(MemoryError):
        normalise(model([node("Relu", ["x"], ["y"])], [info("x", [2])], [info("y", None)]))
