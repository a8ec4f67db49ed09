"""What an ONNX file declares of itself, beside what ONNX says it holds."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from honed.daemon.store.compiled import TensorSpec
from honed.daemon.store.declared import _model, read_declared
from honed.protocol.errors import ModelRefused

NAMES = st.text(min_size=1, max_size=12)
SIZES = st.lists(st.one_of(st.integers(0, 1 << 40), st.just(None), NAMES), max_size=5)
KINDS = {TensorProto.FLOAT: "float32", TensorProto.INT64: "int64", TensorProto.STRING: "string"}


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """Any inputs and initialisers, some with data beside the file, and a node with a graph inside."""
    names = draw(st.lists(NAMES, unique=True, min_size=2, max_size=6))
    kinds = st.sampled_from(list(KINDS))
    ends = [helper.make_tensor_value_info(name, draw(kinds), draw(SIZES)) for name in names]
    cut = draw(st.integers(1, len(names) - 1))
    known = [numpy_helper.from_array(np.arange(3.0), name) for name in names[:cut] if draw(st.booleans())]
    inner = numpy_helper.from_array(np.ones(1, np.float32), "c")
    for tensor in (*known, inner):
        if draw(st.booleans()):
            onnx.external_data_helper.set_external_data(tensor, f"{tensor.name}.bin")
            tensor.data_location = TensorProto.EXTERNAL
    constant = helper.make_node("Constant", [], ["c"], value=inner)
    branch = helper.make_graph([constant], "b", [], [helper.make_empty_tensor_value_info("c")])
    node = helper.make_node("If", [names[0]], [names[-1]], then_branch=branch, else_branch=branch)
    graph = helper.make_graph([node], draw(NAMES), ends[:cut], ends[cut:], initializer=known)
    return helper.make_model(graph, producer_name=draw(NAMES))


def spec(info: onnx.ValueInfoProto) -> TensorSpec:
    """What is said of an input or output."""
    dims = info.type.tensor_type.shape.dim
    shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)
    symbols = tuple(d.dim_param for d in dims)
    kind = KINDS[info.type.tensor_type.elem_type]
    return TensorSpec(name=info.name, dtype=kind, shape=shape, symbols=symbols)


@given(models())
def test_inputs_outputs_and_files_beside_are_read(model: onnx.ModelProto) -> None:
    found = _model(memoryview(model.SerializeToString()))
    known = {tensor.name: tensor for tensor in model.graph.initializer}
    assert found.interface.inputs == tuple(spec(i) for i in model.graph.input if i.name not in known)
    assert found.interface.outputs == tuple(map(spec, model.graph.output))
    branch = model.graph.node[0].attribute[0].g.node[0].attribute[0].t
    outside = [t.name for t in (*known.values(), branch) if t.data_location == TensorProto.EXTERNAL]
    assert set(found.external) == {f"{name}.bin" for name in outside}


@given(models(), st.data())
def test_damaged_files_are_refused_or_read(model: onnx.ModelProto, data: st.DataObject) -> None:
    whole = bytearray(model.SerializeToString())
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ModelRefused):
        _model(memoryview(bytes(whole[: data.draw(st.integers(0, len(whole)))])))


@pytest.mark.parametrize("data", [b"", b"abc", b"\xff" * 40, b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_what_is_no_model(data: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(ModelRefused, match="no ONNX"):
        read_declared(path)


def test_inputs_that_are_no_tensors_are_refused() -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [1]))
    ends = [helper.make_value_info(name, kind) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    with pytest.raises(ModelRefused, match="'x' is no tensor"):
        _model(memoryview(helper.make_model(graph).SerializeToString()))
