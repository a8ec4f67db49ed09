"""Operators that ONNX Runtime's quantiser and optimiser write, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper

from honed.tuner.frontend import normalise

from .test_rules import floats, run

pytestmark = pytest.mark.tvm
small = st.integers(1, 6)


def integers(dtype: type[np.generic], *shape: int, seed: int = 0) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(limits.min, limits.max + 1, shape).astype(dtype)


def number(value: float, dtype: type[np.generic] = np.float32) -> np.ndarray:
    return np.array(value, dtype)


def same(
    op: str,
    names: Sequence[str],
    data: dict[str, np.ndarray],
    *,
    kind: type[np.generic] = np.float32,
    tolerance: float = 1e-4,
    outputs: Sequence[str] = ("out",),
    exact: bool = False,
    **attrs: Any,
) -> None:
    """One operator on the inputs that `names` lists; integers may be off by one where its kernel rounds."""
    types = {k: helper.np_dtype_to_tensor_dtype(v.dtype) for k, v in data.items()}
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, domain="com.microsoft", **attrs)],
        "quantised",
        [helper.make_tensor_value_info(k, types[k], v.shape) for k, v in data.items()],
        [helper.make_tensor_value_info("out", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    (expected,), (got,) = run(model, data), run(normalise(model).model, data)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    else:
        assert np.abs(got.astype(int) - expected.astype(int)).max() <= (0 if exact else 1)


@given(small, small, small, st.sampled_from([np.uint8, np.int8]), st.booleans(), st.booleans())
def test_products_of_integers_in_float(
    m: int, k: int, n: int, kind: type[np.generic], columns: bool, bias: bool
) -> None:
    data = {"x": integers(np.uint8, 2, m, k), "y": integers(kind, k, n, seed=1), "s": number(0.02)}
    data["t"] = np.abs(floats(n, seed=2)) + 0.01 if columns else number(0.03)
    data["p"] = number(120, np.uint8)
    data["q"] = np.full(n, 3, kind) if columns else number(3, kind)
    names = ["x", "y", "s", "t", "p", "q"]
    if bias:
        data["b"] = floats(n, seed=3)
        names.append("b")
    same("MatMulIntegerToFloat", names, data)


@given(small, st.integers(2, 6), small, st.sampled_from([np.uint8, np.int8]), st.booleans())
def test_products_with_inputs_quantised_by_their_range(
    m: int, k: int, n: int, kind: type[np.generic], bias: bool
) -> None:
    data = {"x": floats(m, k), "y": integers(kind, k, n, seed=1), "t": number(0.03), "q": number(5, kind)}
    names = ["x", "y", "t", "q"]
    if bias:
        data["b"] = floats(n, seed=3)
        names.append("b")
    # One step of the input, should rounding choose another.
    step = float(np.ptp(np.append(data["x"], 0)) / 255 * 130 * 0.03)
    same("DynamicQuantizeMatMul", names, data, tolerance=1.01 * step)


@given(small, small, small, st.integers(0, 1), st.integers(0, 1), st.booleans())
def test_gemm(m: int, k: int, n: int, left: int, right: int, to_integers: bool) -> None:
    data = {
        "x": integers(np.uint8, *((k, m) if left else (m, k))),
        "s": number(0.02),
        "p": number(120, np.uint8),
        "y": integers(np.int8, *((n, k) if right else (k, n)), seed=1),
        "t": number(0.01),
        "q": number(0, np.int8),
        "c": integers(np.int8, n, seed=2).astype(np.int32),
    }
    names = [*data]
    if to_integers:
        data |= {"u": number(0.05), "z": number(128, np.uint8)}
        names = [*data]
    kind = np.uint8 if to_integers else np.float32
    same("QGemm", names, data, kind=kind, transA=left, transB=right, alpha=1.0)


@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 1), st.integers(0, 1), st.integers(0, 1))
def test_average_pool(size: int, stride: int, pad: int, counted: int, last: int) -> None:
    shape = (1, 6, 5, 3) if last else (1, 3, 6, 5)
    data = {"x": integers(np.uint8, *shape), "s": number(0.02), "p": number(120, np.uint8)}
    data |= {"t": number(0.03), "z": number(100, np.uint8)}
    same(
        "QLinearAveragePool",
        [*data],
        data,
        kind=np.uint8,
        kernel_shape=[size, size],
        strides=[stride, stride],
        pads=[pad if size > 1 else 0] * 4,
        count_include_pad=counted,
        channels_last=last,
    )


@given(st.tuples(*[st.integers(2, 6)] * 3), st.integers(0, 2), st.sampled_from([11, 13]))
def test_softmax(shape: tuple[int, int, int], axis: int, opset: int) -> None:
    data = {"x": integers(np.uint8, *shape), "s": number(0.02), "p": number(120, np.uint8)}
    # ONNX Runtime's kernel does not saturate: no answer here is above 255.
    data |= {"t": number(1 / 256), "z": number(0, np.uint8)}
    same("QLinearSoftmax", [*data], data, kind=np.uint8, axis=axis, opset=opset)


@pytest.mark.parametrize("zero", [0, 120, 121])
@pytest.mark.parametrize(
    ("op", "names", "attrs"),
    [
        ("QLinearAveragePool", "xspso", {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ("QLinearMul", "xspyspso", {}),
        ("QLinearAdd", "xspyspso", {}),
        ("QLinearSoftmax", "xspto", {"axis": -1, "opset": 13}),
    ],
)
def test_halves_are_rounded_as_onnx_runtime_does(
    op: str, names: str, attrs: dict[str, Any], zero: int
) -> None:
    data = {"x": integers(np.uint8, 1, 8, 16, 16), "s": number(0.02), "p": number(zero, np.uint8)}
    data |= {"o": number(0 if op == "QLinearSoftmax" else zero, np.uint8)}
    if "y" in names:
        data["y"] = integers(np.uint8, 1, 8, 16, 16, seed=1)
    if "t" in names:
        data["t"] = number(1 / 255)
    same(op, [*names], data, kind=np.uint8, exact=True, **attrs)


@given(small, st.integers(2, 8), st.booleans())
def test_skip_root_mean_square(rows: int, width: int, bias: bool) -> None:
    data = {"x": floats(1, rows, width), "y": floats(1, rows, width, seed=1), "g": floats(width, seed=2)}
    if bias:
        data["b"] = floats(width, seed=3)
    same("SkipSimplifiedLayerNormalization", [*data], data, epsilon=1e-5)


@given(st.integers(1, 3), small, st.integers(2, 8), st.booleans())
def test_embedding(batch: int, length: int, width: int, segments: bool) -> None:
    rng = np.random.default_rng(0)
    data = {"i": rng.integers(0, 9, (batch, length)).astype(np.int32)}
    if segments:
        data["k"] = rng.integers(0, 2, (batch, length)).astype(np.int32)
        data["e"] = floats(2, width, seed=3)
    data |= {"w": floats(9, width), "o": floats(6, width, seed=1), "g": floats(width, seed=4)}
    data["b"] = floats(width, seed=5)
    names = ["i", "k" if segments else "", "w", "o", "e" if segments else "", "g", "b"]
    same("EmbedLayerNormalization", names, data, outputs=("out", "mask"), epsilon=1e-6)
