"""One file in ONNX Runtime, without a service."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")
from honed.cpu.session import Session
from honed.daemon.interface import OpenTensor


def tensor(name: str, shape: list[int | str | None]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def two_rows(path: Path, rows: str | None, others: str | None) -> Path:
    """Two inputs of any number of rows each, whose products could share memory if these were equal."""
    nodes = [
        helper.make_node("MatMul", ["a", "w"], ["a1"]),
        helper.make_node("ReduceSum", ["a1"], ["sum"], keepdims=0),
        helper.make_node("Add", ["b", "sum"], ["b0"]),
        helper.make_node("MatMul", ["b0", "w"], ["b1"]),
        helper.make_node("ReduceMax", ["b1"], ["most"], keepdims=0),
        helper.make_node("Add", ["a", "most"], ["a2"]),
        helper.make_node("MatMul", ["a2", "w"], ["y"]),
    ]
    inputs = [tensor("a", [rows, 4]), tensor("b", [others, 4])]
    weights = [numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")]
    graph = helper.make_graph(nodes, "g", inputs, [tensor("y", [rows, 4])], initializer=weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def check(session: Session) -> None:
    for rows, others in ((3, 5), (7, 2), (2, 70)):
        given = {"a": np.ones((rows, 4), np.float32), "b": np.ones((others, 4), np.float32)}
        np.testing.assert_array_equal(session.run(given)["y"], np.full((rows, 4), 4 * rows + 2))


@pytest.mark.parametrize("name", ["?", None])
def test_dimensions_without_a_name_are_independent_of_each_other(tmp_path: Path, name: str | None) -> None:
    session = Session(two_rows(tmp_path / "m.onnx", name, name), 1)
    assert session.interface.inputs == (
        OpenTensor(name="a", dtype="float32", shape=(-1, 4), symbols=("", "")),
        OpenTensor(name="b", dtype="float32", shape=(-1, 4), symbols=("", "")),
    )
    check(session)


def test_a_name_that_stands_for_several_sizes_does_not_matter(tmp_path: Path) -> None:
    session = Session(two_rows(tmp_path / "m.onnx", "n", "n"), 1)
    assert [each.symbols for each in session.interface.inputs] == [("n", ""), ("n", "")]
    check(session)


def test_dimensions_tell_their_names(tmp_path: Path) -> None:
    session = Session(two_rows(tmp_path / "m.onnx", "n", "m"), 1)
    assert [each.symbols for each in session.interface.inputs] == [("n", ""), ("m", "")]
