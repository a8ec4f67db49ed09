"""The imported module run on an OpenCL device: signature, types at the border, indices out of range."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.machine import devices
from honed.runtime.compiled.model import Precondition
from honed.tuner.compiler.verification import run_model
from honed.tuner.frontend import import_relax, normalise
from honed.tuner.lower.schedule import default_kernels
from tests.tuner.search.search_functions import imagined

relax = pytest.importorskip("tvm.relax")
pytestmark = [pytest.mark.tvm, pytest.mark.opencl]


def one_node(
    op: str,
    data: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray],
    opset: int = 18,
    **attrs: Any,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(op, [*data, *constants], ["y"], **attrs)],
        "one",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in data.items()
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run(
    op: str, data: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray] | None = None, **attrs: Any
) -> np.ndarray:
    model = one_node(op, data, constants or {}, **attrs)
    return run_model(model, data, devices.select(None), first=default_kernels)["y"]


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels have indices that no request may have: what nodes compute is not checked."""
    monkeypatch.setattr(Precondition, "allows", lambda *_: True)


WILD = np.array([2, -1, 5, -6, 1 << 40, -(1 << 40), np.iinfo(np.int64).max, np.iinfo(np.int64).min])
TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)


def clamped(indices: np.ndarray, extent: int) -> np.ndarray:
    """What an index out of range reads: the nearest element."""
    return np.clip(np.where(indices < 0, indices + extent, indices), 0, extent - 1)


def test_parameters_are_the_inputs_and_the_result_is_a_tuple() -> None:
    graph = helper.make_graph(
        [helper.make_node("Add", ["b", "a"], ["y"])],
        "two",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT16, s)
            for n, s in (("b", [2, 3]), ("a", [3]), ("c", [7]))
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [2, 3])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    main = import_relax(normalise(proto, profile=imagined("mali", fp16=False)))["main"]
    assert [[int(d) for d in p.ty.shape] for p in main.params] == [[2, 3], [3], [7]]
    assert all(str(p.ty.dtype) == "float32" for p in main.params)
    assert len(main.ret_ty.fields) == 1


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_gather_stays_in_range(dtype: type[np.signedinteger[Any]]) -> None:
    limits = np.iinfo(dtype)
    indices = np.clip(WILD, limits.min, limits.max).astype(dtype)
    got = run("Gather", {"x": TABLE, "i": indices}, axis=0)
    np.testing.assert_array_equal(got, TABLE[clamped(indices.astype(object), 5).astype(np.int64)])


def test_gather_elements_stays_in_its_row() -> None:
    indices = np.stack([WILD[:4], WILD[4:]])
    got = run("GatherElements", {"x": TABLE, "i": indices}, axis=1)
    expected = np.take_along_axis(TABLE[:2], clamped(indices.astype(object), 4).astype(np.int64), 1)
    np.testing.assert_array_equal(got, expected)


def test_gather_nd_stays_in_range() -> None:
    indices = np.stack([WILD, WILD[::-1]], axis=-1)
    got = run("GatherND", {"x": TABLE, "i": indices})
    rows, columns = (clamped(indices[:, j].astype(object), n).astype(np.int64) for j, n in ((0, 5), (1, 4)))
    np.testing.assert_array_equal(got, TABLE[rows, columns])


@pytest.mark.parametrize("reduction", ["none", "add"])
def test_scatter_elements_drops_what_is_out_of_range(reduction: str) -> None:
    updates = np.full((len(WILD), 4), 100, np.float32)
    indices = np.repeat(WILD[:, None], 4, axis=1)
    x = np.zeros((len(WILD), 4), np.float32)
    got = run("ScatterElements", {"x": x, "i": indices, "u": updates}, axis=0, reduction=reduction)
    expected = np.zeros_like(x)
    for index in WILD:
        place = int(index) + (len(WILD) if index < 0 else 0)
        if 0 <= place < len(WILD):
            expected[place] = 100 if reduction == "none" else expected[place] + 100
    np.testing.assert_array_equal(got, expected)


def test_scatter_nd_writes_nothing_outside() -> None:
    updates = np.arange(8, dtype=np.float32) + 100
    got = run("ScatterND", {"x": TABLE.reshape(-1), "i": WILD[:, None], "u": updates})
    untouched = [i for i in range(20) if i not in clamped(WILD.astype(object), 20)]
    np.testing.assert_array_equal(got[untouched], TABLE.reshape(-1)[untouched])
    assert got[2] == 100


def test_one_hot_is_off_where_the_index_is_out_of_range() -> None:
    values = np.array([2, 7], np.float32)
    got = run("OneHot", {"i": WILD}, {"depth": np.array(5), "v": values})
    assert got.shape == (8, 5)
    assert [int((row == 7).sum()) for row in got] == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("mode", "padding"),
    [
        ("linear", "zeros"),
        pytest.param("linear", "border", marks=pytest.mark.slow),
        pytest.param("linear", "reflection", marks=pytest.mark.slow),
        pytest.param("nearest", "zeros", marks=pytest.mark.slow),
        pytest.param("cubic", "border", marks=pytest.mark.slow),
    ],
)
def test_grid_sample_survives_any_position(mode: str, padding: str) -> None:
    x = np.ones((1, 1, 3, 4), np.float32)
    wild = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 3.0, -1.0, 0.0], np.float32)
    grid = np.stack([wild, wild[::-1]], axis=-1).reshape(1, 2, 4, 2)
    got = run("GridSample", {"x": x, "g": grid}, opset=20, mode=mode, padding_mode=padding)
    assert got.shape == (1, 1, 2, 4)
    assert np.isfinite(got).all()


@pytest.mark.slow
def test_roi_align_survives_any_region() -> None:
    x = np.ones((2, 1, 4, 5), np.float32)
    rois = np.array([[0, 0, 3, 3], [-1e30, 1e30, np.inf, -np.inf], [np.nan] * 4], np.float32)
    batches = np.array([1, 1 << 40, -(1 << 40)])
    got = run(
        "RoiAlign",
        {"x": x, "r": rois, "b": batches},
        opset=16,
        output_height=2,
        output_width=2,
        sampling_ratio=2,
    )
    assert got.shape == (3, 1, 2, 2)
    assert got[0, 0, 1, 1] == 1


@pytest.mark.parametrize("op", ["MatMul", "Add"])
def test_half_precision_models_keep_their_types_where_the_device_lacks_it(op: str) -> None:
    x = np.array([[1, 2], [3, 4]], np.float16)
    graph = helper.make_graph(
        [helper.make_node(op, ["a", "b"], ["y"])],
        "half",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT16, [2, 2]) for n in "ab"],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, [2, 2])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    got = run_model(proto, {"a": x, "b": x}, devices.select(None), "fp32")["y"]
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, x @ x if op == "MatMul" else x + x)
