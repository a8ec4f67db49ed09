"""Rewriting rules keep the meaning: ONNX Runtime gives the same answers before and after."""

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

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.tvm


def make(
    op: str,
    data: Mapping[str, np.ndarray],
    constants: Mapping[str, Any],
    opset: int,
    outputs: int,
    attrs: Mapping[str, Any],
) -> onnx.ModelProto:
    """One node: inputs in the order of `data`, then `constants`; a None constant is left out."""
    names = [*data, *("" if v is None else k for k, v in constants.items())]
    results = [f"y{i}" for i in range(outputs)]
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items() if v is not None]
    graph = helper.make_graph(
        [helper.make_node(op, names, results, **{k: v for k, v in attrs.items() if v is not None})],
        "rule",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in data.items()
        ],
        [onnx.ValueInfoProto(name=r) for r in results],
        tensors,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(model)
    elem = [o.type.tensor_type.elem_type for o in inferred.graph.output]
    for output, kind in zip(model.graph.output, elem, strict=True):
        output.CopyFrom(helper.make_tensor_value_info(output.name, kind or TensorProto.FLOAT, None))
    return model


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    known = {i.name for i in session.get_inputs()}
    return list(session.run(None, {k: v for k, v in feeds.items() if k in known}))


def same(
    op: str,
    data: Mapping[str, np.ndarray],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
    outputs: int = 1,
    tolerance: float = 2e-5,
    **attrs: Any,
) -> None:
    model = make(op, data, constants or {}, opset, outputs, attrs)
    expected = run(model, data)
    done = normalise(model)
    onnx.checker.check_model(done.model, full_check=True)
    for spec, got, wanted in zip(done.outputs, run(done.model, data), expected, strict=True):
        assert (spec.dtype, spec.shape) == (wanted.dtype.name, wanted.shape)
        if wanted.dtype.kind == "f":
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
        else:
            np.testing.assert_array_equal(got, wanted)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


small = st.integers(1, 5)


@given(st.lists(small, min_size=1, max_size=3), st.data())
def test_slice(shape: list[int], draw: st.DataObject) -> None:
    axes = draw.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    bound = st.integers(-8, 8) | st.just(99)
    step = st.integers(-3, 3).filter(bool)
    starts, ends, steps = ([draw.draw(kind) for _ in axes] for kind in (bound, bound, step))
    x = floats(*shape)
    constants = {
        k: np.array(v) for k, v in zip(("s", "e", "a", "t"), (starts, ends, axes, steps), strict=True)
    }
    same("Slice", {"x": x}, constants)  # of no elements, too


@given(
    st.lists(st.integers(2, 4), min_size=1, max_size=3),
    st.sampled_from(["constant", "edge", "reflect"]),
    st.data(),
)
def test_pad(shape: list[int], mode: str, draw: st.DataObject) -> None:
    low = -1 if mode == "constant" else 0
    pads = [draw.draw(st.integers(low, 1 if mode == "reflect" else 3)) for _ in range(2 * len(shape))]
    if any(n + a + z < 1 for n, a, z in zip(shape, pads, pads[len(shape) :], strict=False)):
        pads = [abs(p) for p in pads]
    fill = np.float32(1.5) if mode == "constant" else None
    same("Pad", {"x": floats(*shape)}, {"pads": np.array(pads), "fill": fill}, mode=mode)


@given(
    st.integers(1, 2),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]),
    st.tuples(*[st.integers(0, 2)] * 4),
)
def test_conv(
    n: int, group: int, k: int, stride: int, dilation: int, mode: str, pads: tuple[int, ...]
) -> None:
    if mode != "NOTSET" and dilation > 1:
        dilation = 1
    x, w = floats(n, 4, 9, 8), floats(8, 4 // group, k, 2, seed=1)
    same(
        "Conv",
        {"x": x},
        {"w": w, "b": floats(8)},
        group=group,
        strides=[stride, 1],
        dilations=[dilation, dilation],
        auto_pad=mode,
        pads=list(pads) if mode == "NOTSET" else None,
    )


@given(
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.tuples(*[st.integers(0, 2)] * 4),
    st.integers(0, 1),
)
def test_conv_transpose(
    group: int, k: int, stride: int, dilation: int, pads: tuple[int, ...], extra: int
) -> None:
    extra = min(extra, stride - 1)
    pads = tuple(min(p, (k - 1) * dilation) for p in pads)
    if (4 - 1) * stride + (k - 1) * dilation + 1 + extra - max(pads[0] + pads[2], pads[1] + pads[3]) < 1:
        return
    same(
        "ConvTranspose",
        {"x": floats(1, 4, 5, 4)},
        {"w": floats(4, 3, k, k, seed=1), "b": floats(3 * group)},
        group=group,
        strides=[stride, stride],
        dilations=[dilation, dilation],
        pads=list(pads),
        output_padding=[extra, extra],
    )


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_conv_transpose_by_output(mode: str, stride: int) -> None:
    data, w = {"x": floats(1, 2, 5, 4)}, {"w": floats(2, 3, 3, 3, seed=1)}
    same("ConvTranspose", data, w, strides=[stride] * 2, auto_pad=mode)
    same("ConvTranspose", data, w, strides=[stride] * 2, output_shape=[5 * stride, 4 * stride])


@given(
    st.sampled_from(["MaxPool", "AveragePool"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.tuples(*[st.integers(0, 1)] * 4),
    st.booleans(),
    st.booleans(),
)
def test_pool(
    op: str, k: int, stride: int, dilation: int, pads: tuple[int, ...], ceil: bool, counted: bool
) -> None:
    average = op == "AveragePool"
    if average and ceil:
        dilation = 1  # ONNX Runtime counts the last window otherwise
    if k == 1:
        pads = (0, 0, 0, 0)
    same(
        op,
        {"x": floats(1, 2, 8, 7)},
        opset=19,
        outputs=1 if average else 2,
        kernel_shape=[k, k],
        strides=[stride, stride],
        dilations=[dilation, dilation],
        pads=list(pads),
        ceil_mode=int(ceil),
        count_include_pad=int(counted) if average else None,
    )


@pytest.mark.parametrize("coordinates", ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("sizes", [(7, 9), (3, 2), (10, 4)])
def test_resize(coordinates: str, mode: str, sizes: tuple[int, int]) -> None:
    target = np.array([1, 2, *sizes])
    same(
        "Resize",
        {"x": floats(1, 2, 5, 4)},
        {"roi": None, "scales": None, "sizes": target},
        mode=mode,
        coordinate_transformation_mode=coordinates,
    )


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("scales", [(2.0, 3.0), (0.6, 0.8), (1.5, 2.5)])
def test_resize_nearest(nearest: str, scales: tuple[float, float]) -> None:
    factors = np.array([1, 1, *scales], np.float32)
    same(
        "Resize",
        {"x": floats(1, 2, 5, 4)},
        {"roi": None, "scales": factors},
        mode="nearest",
        nearest_mode=nearest,
    )


@given(st.lists(small, min_size=2, max_size=3), st.data())
def test_gather_and_scatter_elements(shape: list[int], draw: st.DataObject) -> None:
    axis = draw.draw(st.integers(-len(shape), len(shape) - 1))
    inner = [draw.draw(st.integers(1, d)) for d in shape]
    count = int(np.prod(inner))
    extent = shape[axis]
    found = draw.draw(st.lists(st.integers(-extent, extent - 1), min_size=count, max_size=count))
    indices = np.array(found).reshape(inner)
    same("GatherElements", {"x": floats(*shape), "i": indices}, axis=axis)
    same("GatherElements", {"x": floats(*shape)}, {"i": indices}, axis=axis)
    data = {"x": floats(*shape), "i": indices, "u": floats(*inner, seed=3)}
    reduction = draw.draw(st.sampled_from(["add", "mul", "max", "min"]))
    same("ScatterElements", data, axis=axis, opset=18, reduction=reduction)


@pytest.mark.parametrize("constant", [True, False])
def test_scatter_keeps_the_last_update(constant: bool) -> None:
    x, i, u = floats(3, 5), np.array([[1, -1, 1], [0, 2, 4]]), floats(2, 3, seed=1)
    if constant:
        model = make("ScatterElements", {"x": x}, {"i": i, "u": u}, 18, 1, {"axis": 1})
    else:
        model = make("ScatterElements", {"x": x, "i": i, "u": u}, {}, 18, 1, {"axis": 1})
    got = run(normalise(model).model, {"x": x, "i": i, "u": u})[0]
    expected = x.copy()
    for row in range(2):
        for column in range(3):
            expected[row, i[row, column]] = u[row, column]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_gather_and_scatter_nd(batch: int, depth: int) -> None:
    x = floats(3, 4, 5, 2)
    rng = np.random.default_rng(0)
    shape = (3, 6, depth) if batch else (2, 3, depth)
    indices = np.stack(
        [rng.integers(-x.shape[batch + j], x.shape[batch + j], shape[:-1]) for j in range(depth)], -1
    )
    same("GatherND", {"x": x, "i": indices}, batch_dims=batch)
    if not batch:
        updates = floats(*shape[:-1], *x.shape[depth:], seed=2)
        same("ScatterND", {"x": x, "i": indices, "u": updates}, opset=18, reduction="add")


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_top_k_with_ties(largest: int, axis: int) -> None:
    x = np.round(floats(6, 7))
    same("TopK", {"x": x}, {"k": np.array([4])}, outputs=2, axis=axis, largest=largest)


@pytest.mark.parametrize(
    "equation",
    [
        "ij,jk->ik",
        "bij,bjk->bik",
        "...ij,...jk->...ik",
        "ij->ji",
        "ii->i",
        "ij->",
        "i,j->ij",
        "bij,kj->bki",
        "ij,jk,kl->il",
    ],
)
def test_einsum(equation: str) -> None:
    sizes = dict(zip("ijklmnb", (2, 3, 4, 3, 2, 5, 2), strict=True))
    data: dict[str, np.ndarray] = {}
    for index, term in enumerate(equation.partition("->")[0].split(",")):
        shape = [sizes[t] for t in term.replace("...", "b")]
        if term == "ii":
            shape = [3, 3]
        data[f"x{index}"] = floats(*shape, seed=index)
    same("Einsum", data, equation=equation, tolerance=1e-4)


@pytest.mark.parametrize(
    ("op", "shapes", "constants", "opset", "attrs"),
    [
        ("Softmax", [(2, 3, 4)], {}, 11, {"axis": 1}),
        ("LogSoftmax", [(2, 3, 4)], {}, 9, {"axis": 2}),
        ("Hardmax", [(2, 3, 4)], {}, 11, {"axis": 1}),
        ("Clip", [(3, 4)], {}, 6, {"min": -0.5, "max": 0.5}),
        ("Upsample", [(1, 2, 3, 4)], {"s": np.array([1, 1, 2, 3], np.float32)}, 9, {"mode": "nearest"}),
        ("Slice", [(4, 5)], {}, 9, {"starts": [1, -3], "ends": [3, 9], "axes": [0, 1]}),
        ("Pad", [(2, 3)], {}, 2, {"pads": [1, 0, 0, 2], "value": 1.5}),
        ("Squeeze", [(1, 3, 1)], {}, 11, {"axes": [0]}),
        ("Unsqueeze", [(3,)], {}, 11, {"axes": [0, 2]}),
        ("Split", [(6, 2)], {}, 11, {"axis": 0, "split": [6]}),
        ("ReduceSum", [(2, 3, 4)], {}, 11, {"axes": [1], "keepdims": 0}),
        ("ReduceLogSumExp", [(2, 3, 4)], {}, 13, {"axes": [0, -1]}),
        ("Dropout", [(2, 3)], {}, 7, {"ratio": 0.3}),
        ("BatchNormalization", [(2, 3, 4)], {k: np.array([1, 2, 3], np.float32) for k in "sbmv"}, 7, {}),
        ("Resize", [(1, 2, 3, 4)], {"s": np.array([1, 1, 2, 2], np.float32)}, 10, {"mode": "linear"}),
        (
            "GroupNormalization",
            [(2, 4, 3)],
            {k: np.array([1, 2], np.float32) for k in "sb"},
            18,
            {"num_groups": 2},
        ),
        ("LRN", [(1, 5, 3, 3)], {}, 13, {"size": 3, "alpha": 0.1}),
        ("LpPool", [(1, 2, 5, 5)], {}, 11, {"kernel_shape": [2, 2], "p": 3}),
        ("Celu", [(3, 4)], {}, 12, {"alpha": 0.7}),
        ("PRelu", [(2, 3, 4)], {"s": np.array([[0.1], [0.2], [0.3]], np.float32)}, 9, {}),
        ("InstanceNormalization", [(2, 3, 5)], {k: np.array([1, 2, 3], np.float32) for k in "sb"}, 6, {}),
        ("MatMul", [(2, 3, 1), (1, 4)], {}, 13, {}),
        (
            "Gemm",
            [(3, 4), (3, 5)],
            {"c": np.ones(5, np.float32)},
            13,
            {"transA": 1, "alpha": 0.5, "beta": 2.0},
        ),
        ("DepthToSpace", [(1, 8, 2, 3)], {}, 13, {"blocksize": 2, "mode": "CRD"}),
        ("SpaceToDepth", [(1, 2, 4, 6)], {}, 13, {"blocksize": 2}),
        ("Tile", [(2, 3)], {"r": np.array([2, 3])}, 13, {}),
        ("Trilu", [(2, 4, 3)], {"k": np.array(1)}, 14, {"upper": 0}),
        ("DFT", [(1, 10, 3, 1)], {}, 17, {"axis": 1, "onesided": 1}),
        ("ReverseSequence", [(4, 3, 2)], {"n": np.array([4, 2, 1])}, 10, {"time_axis": 0, "batch_axis": 1}),
        ("MeanVarianceNormalization", [(2, 3, 4, 2)], {}, 13, {}),
        ("GridSample", [(1, 2, 5, 4)], {"g": floats(1, 3, 6, 2)}, 16, {"padding_mode": "reflection"}),
        ("ArgMax", [(3, 5)], {}, 13, {"axis": 1, "select_last_index": 1}),
        ("CumSum", [(3, 5)], {"a": np.array(1)}, 14, {"reverse": 1}),
        ("Mod", [(3, 5), (3, 5)], {}, 13, {"fmod": 1}),
    ],
)
def test_operators_at_the_opsets_models_come_in(
    op: str, shapes: Sequence[tuple[int, ...]], constants: dict[str, Any], opset: int, attrs: dict[str, Any]
) -> None:
    data = {f"x{i}": floats(*shape, seed=i) for i, shape in enumerate(shapes)}
    same(op, data, constants, opset=opset, tolerance=1e-4, **attrs)


def contrib(op: str, data: Mapping[str, np.ndarray], names: Sequence[str], **attrs: Any) -> None:
    """One operator of com.microsoft on the inputs that `names` lists, against ONNX Runtime."""
    kinds = {k: helper.np_dtype_to_tensor_dtype(v.dtype) for k, v in data.items()}
    kind = kinds[names[2] if op == "QLinearConcat" else names[0]]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["out"], domain="com.microsoft", **attrs)],
        "contrib",
        [helper.make_tensor_value_info(k, kinds[k], v.shape) for k, v in data.items()],
        [helper.make_tensor_value_info("out", kind, None)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    (expected,), (got,) = run(model, data), run(normalise(model).model, data)
    assert expected.dtype == got.dtype
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    else:
        assert np.abs(got.astype(int) - expected.astype(int)).max() <= 1  # its kernels round in other places


def test_operators_of_onnx_runtime() -> None:
    x, y, g = floats(2, 3, 8), floats(2, 3, 8, seed=1), floats(8, seed=2)
    contrib("Gelu", {"x": x}, ["x"])
    contrib("BiasGelu", {"x": x, "g": g}, ["x", "g"])
    contrib("FastGelu", {"x": x, "g": g}, ["x", "g"])
    contrib("QuickGelu", {"x": x}, ["x"], alpha=1.5)
    contrib("FusedMatMul", {"x": x, "y": y}, ["x", "y"], transB=1, alpha=0.5)
    contrib("SkipLayerNormalization", {"x": x, "y": y, "g": g, "b": g}, ["x", "y", "g", "b"], epsilon=1e-5)
    image, w = floats(1, 2, 5, 5), floats(3, 2, 3, 3, seed=1)
    contrib("FusedConv", {"x": image, "w": w}, ["x", "w"], activation="LeakyRelu", activation_params=[0.2])
    contrib("FusedConv", {"x": image, "w": w}, ["x", "w"], activation="Relu", pads=[1, 1, 1, 1])


def test_quantised_operators_of_onnx_runtime() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, (1, 4, 5, 5), np.uint8) for _ in range(2))
    s, t = np.float32(0.02), np.float32(0.05)
    z = np.uint8(120)
    data = {"a": a, "b": b, "s": np.array(s), "t": np.array(t), "z": np.array(z)}
    contrib("QLinearAdd", data, ["a", "s", "z", "b", "t", "z", "t", "z"])
    contrib("QLinearMul", data, ["a", "s", "z", "b", "t", "z", "t", "z"])
    contrib("QLinearConcat", data, ["t", "z", "a", "s", "z", "b", "t", "z"], axis=1)
    one = {k: v for k, v in data.items() if k != "b"}
    contrib("QLinearLeakyRelu", one, ["a", "s", "z", "t", "z"], alpha=0.1)
    contrib("QLinearGlobalAveragePool", one, ["a", "s", "z", "t", "z"], channels_last=0)
    contrib("QLinearSigmoid", one, ["a", "t", "z", "s", "z"])


def test_integer_convolution() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (1, 4, 6, 5), np.uint8)
    w = rng.integers(-128, 128, (6, 2, 3, 3), np.int8)
    zero = {"w": w, "xz": np.array(7, np.uint8), "wz": np.array(0, np.int8)}
    model = make("ConvInteger", {"x": x}, zero, 10, 1, {"group": 2, "pads": [1, 1, 1, 1], "strides": [2, 1]})
    expected = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]
    np.testing.assert_array_equal(run(normalise(model).model, {"x": x})[0], expected)


@pytest.mark.parametrize(
    ("op", "constants", "attrs", "text"),
    [
        ("Gather", {"i": np.array([5])}, {"axis": 0}, "out of range"),
        ("Reshape", {"s": np.array([5, 5])}, {}, "does not fit"),
        ("Squeeze", {"a": np.array([1])}, {}, "not all 1"),
        ("Transpose", {}, {"perm": [0, 0]}, "permutation"),
        (
            "Slice",
            {"s": np.array([0]), "e": np.array([2]), "a": np.array([0]), "t": np.array([0])},
            {},
            "step",
        ),
        ("Split", {"s": np.array([1, 1])}, {}, "splits"),
        ("Concat", {}, {"axis": 7}, "range"),
        ("MaxPool", {}, {"kernel_shape": [2, 2]}, "dimensions"),
        ("Einsum", {}, {"equation": "ijk->k"}, "does not fit"),
    ],
)
def test_nonsense_is_refused(op: str, constants: dict[str, Any], attrs: dict[str, Any], text: str) -> None:
    names = ["x", *constants]
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y", "z"] if op == "Split" else ["y"], **attrs)],
        "nonsense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(ModelRefused, match=text):
        normalise(model)
