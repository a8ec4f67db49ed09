"""ONNX Runtime's own forms of ONNX's operators, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from honed.runtime.errors import ModelRefused
from honed.tuner.frontend import normalise

from .test_quantised import integers, number
from .test_rules import floats, run

pytestmark = pytest.mark.tvm
flags = st.booleans()


def model(
    op: str,
    data: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray | None],
    outputs: Sequence[Any],
    attrs: Any,
) -> onnx.ModelProto:
    names = [*data, *("" if v is None else k for k, v in constants.items())]
    results = [f"y{i}" for i in range(len(outputs))]
    kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(kind)) for kind in outputs]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, domain="com.microsoft", **attrs)],
        "forms",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in data.items()
        ],
        [helper.make_tensor_value_info(r, k, None) for r, k in zip(results, kinds, strict=True)],
        [numpy_helper.from_array(v, k) for k, v in constants.items() if v is not None],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def same(
    op: str,
    data: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray | None] | None = None,
    outputs: Sequence[Any] = (np.float32,),
    *,
    tolerance: float = 1e-4,
    **attrs: Any,
) -> None:
    """One operator on inputs, then constants, as ONNX Runtime answers; integers may be off by one."""
    made = model(op, data, constants or {}, outputs, attrs)
    expected, done = run(made, data), normalise(made)
    for got, wanted in zip(run(done.model, data), expected, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype.kind == "f":
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
        else:
            assert np.abs(got.astype(np.int64) - wanted.astype(np.int64)).max() <= 1


def test_operators_that_are_as_onnx_has_them() -> None:
    x = floats(2, 5, 12)
    same("GatherND", {"x": x}, {"i": np.array([[0, 1], [1, 3]])})
    same("GridSample", {"x": floats(1, 2, 5, 4), "g": floats(1, 3, 3, 2)}, mode="bilinear")
    same("Trilu", {"x": x}, upper=0)
    same("ExpandDims", {"x": x}, {"a": np.array(-1, np.int32)})
    same("Pad", {"x": x}, {"p": np.array([[0, 1, 0, 0, 2, 1]])}, mode="reflect")
    same("QuantizeLinear", {"x": x}, {"s": number(0.001), "z": number(30000, np.uint16)}, [np.uint16])
    same(
        "QuantizeLinear",
        {"x": x},
        {"s": np.full(5, 0.02, np.float32), "z": integers(np.uint8, 5)},
        [np.uint8],
        axis=1,
    )
    same("DequantizeLinear", {"x": integers(np.int16, 3, 4)}, {"s": number(0.01), "z": number(3, np.int16)})
    left, right = integers(np.int16, 3, 4) // 64, integers(np.int16, 4, 5, seed=1) // 64
    same("MatMulInteger16", {"x": left, "y": right}, outputs=[np.int32])
    image = integers(np.uint8, 1, 6, 5, 4)
    same(
        "NhwcMaxPool",
        {"x": image},
        outputs=[np.uint8],
        kernel_shape=[2, 2],
        strides=[2, 2],
        pads=[1, 0, 0, 0],
    )


@given(flags, flags, st.sampled_from(["A", "B"]), st.floats(0.25, 4))
def test_products_with_batches_behind_rows(left: bool, right: bool, side: str, alpha: float) -> None:
    def laid(rows: int, columns: int, moved: bool, turned: bool, seed: int) -> np.ndarray:
        one, other = (columns, rows) if turned else (rows, columns)
        return floats(*((one, 2, 3, other) if moved else (2, 3, one, other)), seed=seed)

    data = {"x": laid(4, 5, side == "A", left, 0), "y": laid(5, 6, side == "B", right, 1)}
    attrs = {f"transBatch{side}": 1, "transA": int(left), "transB": int(right), "alpha": alpha}
    same("FusedMatMul", data, **attrs)


@pytest.mark.parametrize(
    ("name", "alpha", "beta"),
    [
        ("Relu", 0.0, 0.0),
        ("LeakyRelu", 0.3, 0.0),
        ("Tanh", 0.0, 0.0),
        ("Sigmoid", 0.0, 0.0),
        ("HardSigmoid", 0.3, 0.4),
        ("Elu", 1.5, 0.0),
    ],
)
def test_gemm_with_an_activation(name: str, alpha: float, beta: float) -> None:
    data = {"x": floats(4, 5), "y": floats(6, 5, seed=1), "b": floats(6, seed=2)}
    same(
        "FusedGemm", data, activation=name, activation_alpha=alpha, activation_beta=beta, transB=1, alpha=0.5
    )


@given(
    st.sampled_from([2, 4, 8]), st.sampled_from([16, 40, 64]), st.sampled_from(["", "packed", "float"]), flags
)
def test_products_with_weights_of_few_bits(bits: int, terms: int, zeros: str, bias: bool) -> None:
    rng, blocks = np.random.default_rng((bits, terms)), -(-terms // 16)
    zero = None
    if zeros == "packed" or (zeros and bits == 8):
        zero = rng.integers(0, 256, (5, -(-blocks * bits // 8))).astype(np.uint8)
    elif zeros:
        zero = floats(5, blocks, seed=3)
    constants = {
        "w": rng.integers(0, 256, (5, blocks, 2 * bits)).astype(np.uint8),
        "s": np.abs(floats(5, blocks, seed=1)) / 2**bits,
        "z": zero if bits != 2 or zeros == "packed" else None,
        "g": None,
        "b": floats(5, seed=2) if bias else None,
    }
    while constants and constants[[*constants][-1]] is None:
        constants.pop([*constants][-1])
    data = {"x": floats(2, 3, terms)}
    same("MatMulNBits", data, constants, K=terms, N=5, bits=bits, block_size=16, tolerance=1e-3)


def test_weights_of_few_bits_that_are_ordered_for_a_machine_are_refused() -> None:
    constants = {"w": integers(np.uint8, 5, 1, 8), "s": floats(5, 1)}
    attrs = {"K": 16, "N": 5, "bits": 4, "block_size": 16, "weight_prepacked": 1}
    with pytest.raises(ModelRefused, match="ordered for one machine"):
        normalise(model("MatMulNBits", {"x": floats(2, 16)}, constants, [np.float32], attrs))


def test_convolution_with_channels_last() -> None:
    scales = {"s": number(0.02), "p": number(120, np.uint8), "w": integers(np.int8, 6, 4, 3, 3)}
    scales |= {
        "t": np.full(6, 0.01, np.float32),
        "q": np.zeros(6, np.int8),
        "u": number(0.5),
        "z": number(99, np.uint8),
    }
    data = {"x": integers(np.uint8, 1, 6, 5, 4)}
    same("QLinearConv", data, scales, [np.uint8], channels_last=1, pads=[1, 1, 1, 1])


def test_selection_of_integers() -> None:
    # ONNX Runtime crashes where scales are not constants.
    constants = {"s": number(0.02), "p": number(120, np.uint8), "y": integers(np.uint8, 3, 4, seed=1)}
    constants |= {"t": number(0.03), "q": number(99, np.uint8), "u": number(0.04), "z": number(88, np.uint8)}
    same("QLinearWhere", {"c": floats(3, 4) > 0, "x": integers(np.uint8, 3, 4)}, constants, [np.uint8])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("segmented", [False, True])
def test_embedding_of_integers(masked: bool, segmented: bool) -> None:
    ids = np.array([[1, 2, 3], [4, 5, 0]], np.int32)
    tables = {
        k: integers(np.uint8, *shape, seed=i)
        for i, (k, shape) in enumerate({"w": (9, 8), "o": (6, 8), "e": (2, 8), "g": (8,), "b": (8,)}.items())
    }
    wanted: dict[str, np.ndarray | None] = {"k": (ids % 2).astype(np.int32), **tables}
    wanted["m"] = np.array([[1, 1, 0], [1, 1, 1]], np.int32) if masked else None
    for prefix, values in (("s", number(0.01)), ("z", number(110, np.uint8))):
        wanted |= {prefix + name: values for name in "woegb"}
    if not segmented:
        wanted |= dict.fromkeys(["k", "e", "se", "ze"])
    same("QEmbedLayerNormalization", {"i": ids}, wanted, [np.float32, np.int32], epsilon=1e-5)


@given(st.integers(1, 4), st.integers(1, 3), flags, flags, flags, flags)
def test_lstm_of_integers(
    steps: int, batch: int, both: bool, signed: bool, columns: bool, started: bool
) -> None:
    width, hidden, count, kind = 6, 8, 2 if both else 1, np.int8 if signed else np.uint8
    shape = (count, 4 * hidden) if columns else (count,)
    zero = np.full(shape, 0 if signed else 120, kind)
    constants: dict[str, np.ndarray | None] = {
        "W": integers(kind, count, width, 4 * hidden),
        "R": integers(kind, count, hidden, 4 * hidden, seed=1),
        "B": floats(count, 8 * hidden) * np.float32(0.1),
        "lengths": None,
        "h": floats(count, batch, hidden, seed=3) if started else None,
        "c": floats(count, batch, hidden, seed=4) if started else None,
        "P": None,
    }
    for i, name in enumerate("WR"):
        constants[f"{name}_scale"] = np.abs(floats(*shape, seed=i)) * np.float32(0.003) + np.float32(0.001)
        constants[f"{name}_zero"] = zero
    # One step of what is quantised, should rounding choose another.
    same(
        "DynamicQuantizeLSTM",
        {"X": floats(steps, batch, width)},
        constants,
        [np.float32] * 3,
        hidden_size=hidden,
        direction="bidirectional" if both else "forward",
        tolerance=5e-3,
    )


def test_lstm_of_integers_that_starts_from_zeros_given() -> None:
    shape = (1, 32)
    constants = {"W": integers(np.int8, 1, 6, 32), "R": integers(np.int8, 1, 8, 32), "B": None, "l": None}
    data = {"X": floats(2, 1, 6), "h": np.zeros((1, 1, 8), np.float32), "c": np.zeros((1, 1, 8), np.float32)}
    names = ["X", "W", "R", "", "", "h", "c", "", "ws", "z", "rs", "z"]
    scales = {"ws": np.full(shape, 0.01, np.float32), "rs": np.full(shape, 0.01, np.float32)}
    made = model(
        "DynamicQuantizeLSTM",
        data,
        constants | scales | {"z": np.zeros(shape, np.int8)},
        [np.float32],
        {"hidden_size": 8},
    )
    made.graph.node[0].input[:] = names
    np.testing.assert_allclose(run(normalise(made).model, data)[0], run(made, data)[0], atol=5e-3)


def test_lstm_of_integers_whose_sequences_differ_is_refused() -> None:
    constants = {"W": integers(np.int8, 1, 6, 32), "R": integers(np.int8, 1, 8, 32), "B": None}
    constants["lengths"] = np.array([1, 2], np.int32)
    made = model("DynamicQuantizeLSTM", {"X": floats(2, 2, 6)}, constants, [np.float32], {"hidden_size": 8})
    with pytest.raises(ModelRefused, match="differ in length"):
        normalise(made)


def test_integers_that_are_all_zero_are_quantised_as_onnx_runtime_does() -> None:
    graph = helper.make_graph(
        [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])],
        "zeros",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [
            helper.make_tensor_value_info("y", TensorProto.UINT8, [4]),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("z", TensorProto.UINT8, []),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    data = {"x": np.zeros(4, np.float32)}
    for got, wanted in zip(run(normalise(made).model, data), run(made, data), strict=True):
        np.testing.assert_array_equal(got, wanted)
