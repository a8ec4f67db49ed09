"""What honed.ort reads of an ONNX file, beside what ONNX says it holds."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from honed.ort import errors
from honed.ort.modelproto import describe

NAMES = st.text(min_size=1, max_size=12)
SIZES = st.lists(st.one_of(st.integers(0, 1 << 40), st.just(None), NAMES), max_size=5)
KINDS = st.sampled_from([TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING, TensorProto.FLOAT16])


@st.composite
def models(draw: st.DrawFn) -> onnx.ModelProto:
    """Any inputs, initialisers and metadata, and a node."""
    names = draw(st.lists(NAMES, unique=True, min_size=2, max_size=6))
    ends = [helper.make_tensor_value_info(name, draw(KINDS), draw(SIZES)) for name in names]
    cut = draw(st.integers(1, len(names) - 1))
    known = [numpy_helper.from_array(np.arange(3.0), name) for name in names[:cut] if draw(st.booleans())]
    node = helper.make_node("Identity", [names[0]], [names[-1]])
    graph = helper.make_graph([node], draw(NAMES), ends[:cut], ends[cut:], initializer=known)
    model = helper.make_model(graph, producer_name=draw(NAMES), model_version=draw(st.integers(0, 1 << 40)))
    helper.set_model_props(model, draw(st.dictionaries(NAMES, st.text(max_size=40), max_size=4)))
    model.domain, model.doc_string = draw(NAMES), draw(NAMES)
    return model


def shape(info: onnx.ValueInfoProto) -> list[int | str | None]:
    """As ONNX Runtime tells it."""
    dims = info.type.tensor_type.shape.dim
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]


@given(models())
def test_everything_an_app_asks_for_is_read(model: onnx.ModelProto) -> None:
    found = describe(model.SerializeToString())
    known = {tensor.name for tensor in model.graph.initializer}
    wanted = [info for info in model.graph.input if info.name not in known]
    assert [(i.name, i.shape) for i in found.inputs] == [(i.name, shape(i)) for i in wanted]
    assert {i.name for i in found.overridable} == known & {i.name for i in model.graph.input}
    assert [(o.name, o.shape) for o in found.outputs] == [(o.name, shape(o)) for o in model.graph.output]
    by_type = {TensorProto.FLOAT: "float", TensorProto.INT64: "int64", TensorProto.STRING: "string"}
    for ours, info in zip(found.inputs, wanted, strict=True):
        kind = by_type.get(info.type.tensor_type.elem_type, "float16")
        assert ours.type == f"tensor({kind})"
    meta = found.metadata
    assert (meta.producer_name, meta.graph_name) == (model.producer_name, model.graph.name)
    assert (meta.domain, meta.description) == (model.domain, model.doc_string)
    assert meta.version == model.model_version or not model.model_version
    assert meta.custom_metadata_map == {p.key: p.value for p in model.metadata_props}


@given(models(), st.data())
def test_damaged_files_are_refused_or_read(model: onnx.ModelProto, data: st.DataObject) -> None:
    whole = bytearray(model.SerializeToString())
    for _ in range(data.draw(st.integers(0, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(errors.InvalidProtobuf, errors.InvalidArgument):
        describe(cut)


@pytest.mark.parametrize("data", [b"abc", b"\xff" * 40, b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_what_is_no_model(data: bytes) -> None:
    with pytest.raises(errors.InvalidProtobuf, match="no ONNX"):
        describe(data)


def test_without_a_graph_it_is_no_model() -> None:
    with pytest.raises(errors.InvalidArgument, match="No graph"):
        describe(b"")
