"""Untrusted files: every way a file can be wrong is one clear sentence."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError, EncodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from honed.onnxfile import reading
from honed.runtime.errors import HonedError, InvalidArgument, MissingFiles, ModelRefused
from honed.tuner.frontend import load, normalise

pytestmark = pytest.mark.tvm


def small_model() -> onnx.ModelProto:
    """y = relu(x @ w + b)."""
    rng = np.random.default_rng(0)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["m"]),
            helper.make_node("Add", ["m", "b"], ["a"]),
            helper.make_node("Relu", ["a"], ["y"]),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 4])],
        [
            numpy_helper.from_array(rng.normal(size=(8, 4)).astype(np.float32), "w"),
            numpy_helper.from_array(rng.normal(size=4).astype(np.float32), "b"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def write(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def one_sentence(error: pytest.ExceptionInfo[HonedError]) -> None:
    text = str(error.value)
    assert text
    assert "\n" not in text


def test_a_good_file_is_taken(tmp_path: Path) -> None:
    assert len(load(write(tmp_path, small_model())).graph.node) == 3


def test_every_cut_is_refused_or_still_a_model(tmp_path: Path) -> None:
    data = small_model().SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelRefused) as error:
            load(path)
        one_sentence(error)


@pytest.mark.parametrize(
    "data", [b"", b"hello, world\n" * 100, b"\x7fELF" + bytes(1000), b"PK\x03\x04" + bytes(99)]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelRefused, match="not an ONNX model") as error:
        load(path)
    one_sentence(error)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 0.9999), st.binary(min_size=0, max_size=4)), min_size=1, max_size=4))
def test_mutated_files_never_escape(tmp_path: Path, changes: list[tuple[float, bytes]]) -> None:
    data = bytearray(small_model().SerializeToString())
    for place, new in changes:
        start = int(place * len(data))
        data[start : start + max(1, len(new))] = new
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    try:
        normalise(load(path))
    except HonedError as error:
        assert "\n" not in str(error)  # noqa: PT017 - a model that survives its mutation is right too


def test_too_large_a_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as stream:
        stream.truncate(1 << 33)
    with pytest.raises(ModelRefused, match="above the limit"):
        load(path)
    with pytest.raises(ModelRefused, match="above the limit of 100"):
        reading.read(write(tmp_path, small_model()), file_bytes=100)


def test_what_is_no_file_is_an_argument_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing.onnx"):
        with pytest.raises(InvalidArgument):
            load(path)


def test_all_unknown_operators_are_named(tmp_path: Path) -> None:
    model = small_model()
    for index, op in enumerate(("Frobnicate", "Twiddle")):
        model.graph.node.append(helper.make_node(op, ["y"], [f"z{index}"], name=f"node{index}"))
    with pytest.raises(ModelRefused, match="Frobnicate, Twiddle") as error:
        load(write(tmp_path, model))
    assert len(error.value.reasons) == 2
    assert "node1" in error.value.reasons[1]


def test_what_onnx_runtime_alone_has_in_onnx_domain_is_taken(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 13]> g (float[2,8] x, float[8] s) => (float[2,8] y) { %s }'
    body = "a = LayerNormalization (x, s) y = SimplifiedLayerNormalization (a, s)"
    file = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text % body), file)
    model = load(file)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 13)]
    assert {node.domain for node in model.graph.node} == {""}


def test_a_newer_opset_is_refused(tmp_path: Path) -> None:
    model = small_model()
    model.opset_import[0].version = 99
    with pytest.raises(ModelRefused, match="opset 99"):
        load(write(tmp_path, model))


@pytest.mark.parametrize("op", ["Relu", "BitCast"])
def test_opset_26_is_taken_whether_or_not_onnx_knows_it(tmp_path: Path, op: str) -> None:
    text = '<ir_version: 13, opset_import: ["": 26]> g (float[2,8] x) => (float[2,8] y) { y = %s (x) }'
    file = tmp_path / "m.onnx"
    proto = onnx.parser.parse_model(text % "Relu")
    proto.graph.node[0].op_type = op
    onnx.save(proto, file)
    assert [(node.domain, node.op_type) for node in load(file).graph.node] == [("", op)]


def test_a_deprecated_operator_is_said_to_be_that(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 18]> g (float[1,4,2] x, float[2] s, float[2] b) '
        "=> (float[1,4,2] y) { y = GroupNormalization <num_groups = 2> (x, s, b) z = Nowhere (x) }"
    )
    file = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), file)
    with pytest.raises(
        ModelRefused, match="does not define: Nowhere and deprecates: GroupNormalization"
    ) as error:
        load(file)
    assert any("export it with a newer opset" in reason for reason in error.value.reasons)


def test_names_that_are_no_text_are_refused(tmp_path: Path) -> None:
    data = small_model().SerializeToString().replace(b"MatMul", b"Mat\xff\xfel")
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelRefused, match="UTF-8"):
        load(path)


def test_control_characters_do_not_reach_messages(tmp_path: Path) -> None:
    model = small_model()
    model.graph.node.append(helper.make_node("Bad\x1b[31m\nop", ["y"], ["z"], name="a\r\nb"))
    with pytest.raises(ModelRefused) as error:
        load(write(tmp_path, model))
    assert str(error.value).isprintable()
    assert all(reason.isprintable() for reason in error.value.reasons)


@pytest.mark.parametrize("dims", [[8, 5], [8, -4], [1 << 40, 1 << 40], [0], [1 << 62] * 300])
def test_tensors_hold_what_their_shape_says(tmp_path: Path, dims: list[int]) -> None:
    model = small_model()
    del model.graph.initializer[0].dims[:]
    model.graph.initializer[0].dims.extend(dims)
    with pytest.raises(ModelRefused, match="damaged"):
        load(write(tmp_path, model))


def external(folder: Path, **entries: str) -> Path:
    """The small model with its weights outside, described by `entries`."""
    model = small_model()
    weights = model.graph.initializer[0]
    folder.mkdir(exist_ok=True)
    (folder / "weights.bin").write_bytes(bytes(16) + weights.raw_data)
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        weights.external_data.add(key=key, value=value)
    return write(folder, model)


def test_external_data_is_read_from_beside_the_model(tmp_path: Path) -> None:
    path = external(tmp_path, location="weights.bin", offset="16", length="128")
    expected = numpy_helper.to_array(small_model().graph.initializer[0])
    assert np.array_equal(numpy_helper.to_array(load(path).graph.initializer[0]), expected)


def test_missing_external_data_is_listed(tmp_path: Path) -> None:
    with pytest.raises(MissingFiles, match=r"other\.bin") as error:
        load(external(tmp_path, location="other.bin"))
    assert error.value.files == ("other.bin",)
    assert error.value.reasons


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../weights.bin", "a/../../weights.bin", "..\\weights.bin", "link.bin", "folder", ""],
)
def test_external_data_elsewhere_is_refused(tmp_path: Path, location: str) -> None:
    inner = tmp_path / "inner"
    path = external(inner, location=location)
    (tmp_path / "weights.bin").write_bytes(bytes(1000))
    (inner / "link.bin").symlink_to(tmp_path / "weights.bin")
    (inner / "folder").mkdir()
    with pytest.raises(ModelRefused) as error:
        load(path)
    assert not isinstance(error.value, MissingFiles)
    one_sentence(error)


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": "-16"},
        {"offset": "17"},
        {"offset": "1000000"},
        {"length": "127"},
        {"length": "1000000000000"},
        {"offset": "sixteen"},
    ],
)
def test_external_ranges_must_fit(tmp_path: Path, entries: dict[str, str]) -> None:
    with pytest.raises(ModelRefused, match="external data") as error:
        load(external(tmp_path, location="weights.bin", **entries))
    one_sentence(error)


def test_external_data_has_a_limit(tmp_path: Path) -> None:
    path = external(tmp_path, location="weights.bin", offset="16")
    with pytest.raises(ModelRefused, match="more than the limit"):
        reading.read(path, external_bytes=100)


@pytest.mark.parametrize("failure", [DecodeError, EncodeError])
@pytest.mark.parametrize(("left", "raised"), [(1 << 10, MemoryError), (1 << 30, None), (float("inf"), None)])
def test_protobuf_fails_for_want_of_memory_only_where_little_is_left(
    monkeypatch: pytest.MonkeyPatch,
    failure: type[Exception],
    left: float,
    raised: type[Exception] | None,
) -> None:
    monkeypatch.setattr(reading, "data_left", lambda: left)
    with pytest.raises(raised or failure), reading.protobuf_memory(1 << 20):
        raise failure("Failed to serialize proto")
