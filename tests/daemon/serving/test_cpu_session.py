"""One file in ONNX Runtime, without a service."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")
from honed.cpu import session as sessions
from honed.cpu.session import Session, pack_bits, prepare, unpack_bits
from honed.daemon.store.compiled import TensorSpec
from honed.machine.processors import Processor, ThreadPlacement
from honed.process.children import output
from honed.protocol.errors import InvalidArgument
from honed.runtime.dtypes import NARROW, DType, dtype
from honed.runtime.engines import HIGHEST, LOWEST
from tests import lookalikes
from tests.daemon.running import DEADLINE


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
        TensorSpec(name="a", dtype="float32", shape=(-1, 4), symbols=("", "")),
        TensorSpec(name="b", dtype="float32", shape=(-1, 4), symbols=("", "")),
    )
    check(session)


def test_a_name_that_stands_for_several_sizes_does_not_matter(tmp_path: Path) -> None:
    session = Session(two_rows(tmp_path / "m.onnx", "n", "n"), 1)
    assert [each.symbols for each in session.interface.inputs] == [("n", ""), ("n", "")]
    check(session)


def test_dimensions_tell_their_names(tmp_path: Path) -> None:
    session = Session(two_rows(tmp_path / "m.onnx", "n", "m"), 1)
    assert [each.symbols for each in session.interface.inputs] == [("n", ""), ("m", "")]


@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.BFLOAT16])
def test_scalars_stay_scalars(tmp_path: Path, kind: int) -> None:
    ends = [helper.make_tensor_value_info(name, kind, []) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    session = Session(path, 1)
    given = np.full((), 3, dtype(session.interface.inputs[0].dtype).numpy)
    assert session.run({"x": given})["y"].shape == ()
    assert session.run({"x": given})["y"] == given


def cast(path: Path, source: int, target: int) -> Path:
    """A model that converts 7 elements."""
    ends = [helper.make_tensor_value_info(n, t, [7]) for n, t in (("x", source), ("y", target))]
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=target)], "g", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11), path)
    return path


@pytest.mark.parametrize("narrow", NARROW, ids=[each.name for each in NARROW])
def test_types_that_numpy_does_not_have(tmp_path: Path, narrow: DType) -> None:
    named = narrow.name
    signed = not named.startswith("u") and "e8m0" not in named
    x = np.array([0.5, 1, 2, -1, 1, 0.5, 2] if "int" not in named else [0, 1, 1, -1, 0, 1, 1], np.float32)
    x = x if signed else np.abs(x)
    down = Session(cast(tmp_path / "down.onnx", TensorProto.FLOAT, narrow.number), 1)
    up = Session(cast(tmp_path / "up.onnx", narrow.number, TensorProto.FLOAT), 1)
    assert [end.dtype for end in (*down.interface.outputs, *up.interface.inputs)] == [narrow.name] * 2
    y = down.run({"x": x})["y"]
    assert y.dtype == narrow.numpy
    assert y.nbytes == x.size * narrow.itemsize
    np.testing.assert_array_equal(y.astype(np.float32), x)
    np.testing.assert_array_equal(up.run({"x": y})["y"], x)
    down.try_out()
    up.try_out()


@given(st.sampled_from([2, 4]), st.booleans(), st.data())
def test_packing_keeps_elements(bits: int, signed: bool, data: st.DataObject) -> None:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    elements = np.array(data.draw(st.lists(st.integers(low, high), max_size=40)), np.int8).view(np.uint8)
    whole = pack_bits(elements, bits)
    assert whole.size == -(-elements.size * bits // 8)
    np.testing.assert_array_equal(unpack_bits(whole, bits, elements.size, signed=signed), elements)


def test_strings(tmp_path: Path) -> None:
    ends = [helper.make_tensor_value_info(n, TensorProto.STRING, ["n"]) for n in ("x", "z", "y")]
    graph = helper.make_graph([helper.make_node("StringConcat", ["x", "z"], ["y"])], "g", ends[:2], ends[2:])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    session = Session(path, 1)
    session.try_out()
    given = {"x": np.array(["a", "ü"], object), "z": np.array(["", "€"], object)}
    assert session.run(given)["y"].tolist() == ["a", "ü€"]


def test_the_process_keeps_to_the_big_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[int]] = []
    board = (Processor(number=0, core=0, capacity=414), Processor(number=3, core=3, capacity=1024))

    def keep(process: int, numbers: Iterable[int]) -> None:
        assert process == 0
        kept.append(list(numbers))

    monkeypatch.setattr(sessions, "processors", lambda root, allowed: board)
    monkeypatch.setattr(sessions, "thread_stacks", lambda nbytes: None)
    monkeypatch.setattr(os, "sched_setaffinity", keep)
    assert prepare(0) == ThreadPlacement(threads=1, processors=(3,))
    assert kept == [[3]]
    assert prepare(2) == ThreadPlacement(threads=2)
    assert kept == [[3]]


ARENA = """
import sys
from honed.cpu.session import _options
from honed.process.limits import limit_data

limit_data(int(sys.argv[1]) << 20)
print(_options(1, "all").enable_cpu_mem_arena)
"""


@pytest.mark.parametrize(("mib", "arena"), [(400, b"False"), (600, b"True")])
def test_a_process_of_little_memory_has_no_arenas(mib: int, arena: bytes) -> None:
    said, death = output((sys.executable, "-c", ARENA, str(mib)), seconds=DEADLINE)
    assert death.status == 0, said
    assert said.strip() == arena


@pytest.mark.parametrize(
    "said",
    [
        "pthread_create failed, error code: 12 error message: Cannot allocate memory",
        "pthread_create failed, error code: 11 error message: Resource temporarily unavailable",
        "std::bad_alloc",
    ],
)
def test_memory_and_threads_that_run_out_are_no_fault_of_the_model(
    tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **settings: Any) -> None:
        raise RuntimeError(said)

    model = two_rows(tmp_path / "m.onnx", "n", "m")
    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(MemoryError, match=said):
        Session(model, 2)


SCALE = (0.5, -2.0)
RUNS, FAILS = np.array([[1, 3]], np.float32), np.array([[3]], np.float32)  # as one that is optimised


def lookalike(path: Path, shape: list[int | str | None], x: np.ndarray) -> Path:
    made = lookalikes.layer_norm(shape, SCALE)
    if not lookalikes.fails_optimised(made, x):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} runs it optimised")
    onnx.save(made, path)
    return path


def test_a_run_that_fails_where_the_plain_one_does_not_is_answered_by_that(tmp_path: Path) -> None:
    session = Session(lookalike(tmp_path / "m.onnx", ["n", "m"], FAILS), 1, level=HIGHEST)
    session.run({"x": RUNS})
    assert not session.lowered
    for x in (FAILS, RUNS):
        np.testing.assert_allclose(session.run({"x": x})["y"], lookalikes.normalised(x, SCALE), atol=1e-5)
        assert "SimplifiedLayerNormalization" in session.lowered


def test_a_form_that_does_not_load_optimised_is_loaded_without(tmp_path: Path) -> None:
    x = np.array([1, 3], np.float32)
    session = Session(lookalike(tmp_path / "m.onnx", [2], x), 1, level=HIGHEST)
    assert "normal" in session.lowered
    np.testing.assert_allclose(session.run({"x": x})["y"], lookalikes.normalised(x, SCALE), atol=1e-5)


@pytest.mark.parametrize("level", [HIGHEST, LOWEST])
def test_inputs_that_no_level_takes_cost_few_loads(
    tmp_path: Path, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(lookalike(tmp_path / "m.onnx", ["n", "m"], FAILS), 1, level=level)
    loads: list[object] = []
    load = sessions._create_session

    def counted(*given: Any) -> Any:
        loads.append(given)
        return load(*given)

    monkeypatch.setattr(sessions, "_create_session", counted)
    for _ in range(9):
        with pytest.raises(InvalidArgument, match="cannot be run on these inputs"):
            session.run({"x": np.ones((1, 5), np.float32)})
    assert len(loads) == (sessions._PLAIN_TRIES if level == HIGHEST else 0)
    assert not session.lowered
    np.testing.assert_allclose(session.run({"x": RUNS})["y"], lookalikes.normalised(RUNS, SCALE), atol=1e-5)
