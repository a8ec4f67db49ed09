"""NaN and infinities through all that compares, as ONNX Runtime without optimisation has them.

Elementwise operators are joined to one output, so that a model of them is few kernels. Where ONNX Runtime
says one thing for some shapes and another for others, what honed does is written here (docs/operators.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import NodeProto, helper, numpy_helper

from honed.machine.devices import Device
from honed.tuner.compiler.verification import run_model

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]

NAN, INF = np.nan, np.inf
VALUES = [NAN, INF, -INF, 1, -2, 0.5, -0.0, 3, 65504, -65504]
# Kept apart by kind: one NaN makes NaN of a whole sum.
ROWS = np.array(
    [
        [-INF] * 6,
        [INF] * 6,
        [1, 2, INF, -INF, 0, 3],
        [-INF, -INF, 1, -INF, -INF, -3],
        [-INF, -INF, -INF, -INF, -INF, 5],
        [4, -INF, 4, 2, 4, 1],
    ]
)
HOLES = np.array(
    [
        [NAN, 1, 2, 3, 0, 1],
        [1, NAN, 3, 2, NAN, 3],
        [3, 2, 1, NAN, 3, NAN],
        [NAN] * 6,
        [-INF, NAN, INF, 0, 1, 2],
    ]
)
UNARY: Sequence[tuple[str, Mapping[str, float]]] = (
    ("HardSigmoid", {"alpha": 1.5, "beta": -1.0}),
    *((name, {}) for name in (
        "Abs", "Ceil", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log",
        "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Softplus",
        "Softsign", "Sqrt", "Tanh", "ThresholdedRelu",
    )),
)  # fmt: skip
DTYPES = ["float32", "float16"]


class Graph:
    """A model that is made node by node; all values are of one dtype unless they say otherwise."""

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self.nodes: list[NodeProto] = []
        self.inputs: dict[str, np.ndarray] = {}
        self.constants: list[onnx.TensorProto] = []
        self.outputs: list[str] = []

    def given(self, values: object) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs[name] = np.asarray(values).astype(self.dtype)
        return name

    def constant(self, values: object, dtype: str = "") -> str:
        name = f"c{len(self.constants)}"
        array = np.asarray(values).astype(dtype or self.dtype)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def __call__(self, op: str, *inputs: str, **attrs: object) -> str:
        name = f"v{len(self.nodes)}_{op}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attrs))
        return name

    def wanted(self, *names: str) -> None:
        """An output of these, one behind the other where they are several."""
        self.outputs.append(self("Concat", *names, axis=0) if len(names) > 1 else names[0])

    def model(self) -> onnx.ModelProto:
        of = helper.np_dtype_to_tensor_dtype(self.dtype)
        inputs = [helper.make_tensor_value_info(n, of, v.shape) for n, v in self.inputs.items()]
        made = helper.make_graph(
            self.nodes, "g", inputs, [onnx.ValueInfoProto(name=n) for n in self.outputs], self.constants
        )
        model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)

    def reference(self) -> dict[str, np.ndarray]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(self.model().SerializeToString(), options)
        return dict(zip(self.outputs, session.run(None, self.inputs), strict=True))

    def check(self, device: Device, **known: np.ndarray) -> None:
        """Compare what is compiled with ONNX Runtime, or with what is `known`."""
        found, expected = run_model(self.model(), self.inputs, device), self.reference() | known
        tolerance = 1e-5 if self.dtype.itemsize > 2 else 4e-3
        for name in self.outputs:
            with np.errstate(invalid="ignore"):
                np.testing.assert_allclose(
                    found[name].astype(np.float64), expected[name].astype(np.float64),
                    rtol=tolerance, atol=tolerance, equal_nan=True, err_msg=name,
                )  # fmt: skip


def bounded(g: Graph, x: str) -> list[str]:
    """All kinds of bounds, on either side and on both."""
    low, high, none = g.constant(-1), g.constant(2), g.constant(NAN)
    given, missing = g.given(0.25), g.given(NAN)
    clips = [
        (low, high),
        (low,),
        ("", high),
        (),
        (given, high),
        (missing, high),
        (none, none),
        (low, missing),
    ]
    sides = [(x, low), (low, x), (x, given), (given, x), (x, missing), (missing, x), (x, low, given, high)]
    return [g("Clip", x, *c) for c in clips] + [g(op, *side) for op in ("Max", "Min") for side in sides]


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise(dtype: str, device: Device) -> None:
    g = Graph(dtype)
    x, twice = (
        g.given(VALUES * 4),
        g.given(np.repeat(VALUES, 4)),
    )  # forty: whole vectors, and all pairs of kinds
    g.wanted(*[g(op, x, **attrs) for op, attrs in UNARY])
    g.wanted(*bounded(g, x))
    pairs = [g(op, x, twice) for op in ("Max", "Min", "Add", "Mul", "PRelu", "Mod") if op != "Mod"]
    g.wanted(
        *pairs, *[g("Cast", g(op, x, twice), to=1 if dtype == "float32" else 10) for op in ("Less", "Equal")]
    )
    g.check(device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype: str, device: Device) -> None:
    g = Graph(dtype)
    last, first = g.constant([1], "int64"), g.constant([0], "int64")
    rows, columns = g.given(ROWS), g.given(ROWS.T)
    for op in ("ReduceMax", "ReduceMin", "ReduceLogSumExp"):
        g.wanted(g(op, rows, last, keepdims=0))
        g.wanted(g(op, columns, first, keepdims=0))
    both = g.given(np.concatenate([ROWS, HOLES]))
    for op in ("Softmax", "LogSoftmax"):
        g.wanted(g(op, both, axis=1))
    for op in ("ArgMax", "ArgMin"):
        g.wanted(g(op, rows, axis=1, keepdims=0))
        g.wanted(g(op, rows, axis=1, select_last_index=1))
    g.check(device)


def holed(size: int) -> np.ndarray:
    """Rows with NaN first, in the middle, last, in two places, throughout, and nowhere."""
    rows = np.tile(np.roll(np.arange(size) % 7, 3).astype(np.float64), (6, 1))
    for row, where in enumerate(([0], [size // 2], [-1], [1, size // 2], slice(None))):
        rows[row, where] = NAN
    rows[1, 0], rows[2, 1] = INF, -INF
    return rows


@pytest.mark.parametrize("size", [6, 37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_left_out_of_extremes(dtype: str, size: int, device: Device) -> None:
    """ONNX Runtime has it where it comes first, and in windows of some shapes: docs/operators.md says so."""
    g, held = Graph(dtype), np.concatenate([holed(size), HOLES] if size == HOLES.shape[1] else [holed(size)])
    rows, columns, windows = g.given(held), g.given(held.T), g.given(held[None])
    for op in ("ReduceMax", "ReduceMin"):
        g.wanted(g(op, rows, g.constant([1], "int64"), keepdims=0))
        g.wanted(g(op, columns, g.constant([0], "int64"), keepdims=0))
    g.wanted(g("GlobalMaxPool", windows))
    g.wanted(g("MaxPool", windows, kernel_shape=[3], strides=[3]))
    most, least = (np.where(np.isnan(held), end, held) for end in (-INF, INF))
    pooled = most[:, : size // 3 * 3].reshape(1, len(held), -1, 3).max(-1)
    known = (*[most.max(1)] * 2, *[least.min(1)] * 2, most.max(1)[None, :, None], pooled)
    g.check(device, **dict(zip(g.outputs, known, strict=True)))


@pytest.mark.parametrize("size", [6, 37])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_left_out_of_places(dtype: str, size: int, device: Device) -> None:
    """As in ONNX Runtime, but where it stands first."""
    g, held = Graph(dtype), np.concatenate([holed(size), HOLES] if size == HOLES.shape[1] else [holed(size)])
    rows, columns = g.given(held), g.given(held.T)
    for op in ("ArgMax", "ArgMin"):
        g.wanted(g(op, rows, axis=1, keepdims=0), g(op, columns, axis=0, keepdims=0))
    g.wanted(g("Hardmax", rows, axis=1))
    most, least = (np.where(np.isnan(held), end, held) for end in (-INF, INF))
    known = [np.tile(most.argmax(1), 2), np.tile(least.argmin(1), 2), np.eye(size)[most.argmax(1)]]
    reference = g.reference()[g.outputs[0]][: len(held)]
    g.check(device, **dict(zip(g.outputs, known, strict=True)))
    later = ~np.isnan(held[:, 0])
    np.testing.assert_array_equal(reference[later], known[0][: len(held)][later])


@pytest.mark.parametrize("pads", [[0, 0], [1, 1]])
def test_windows_of_infinities(pads: list[int], device: Device) -> None:
    """ONNX Runtime makes -3.4e38 of -inf in some windows of float32, and of float16 never."""
    half, g = Graph("float16"), Graph("float32")
    for graph in (half, g):
        x = graph.given(ROWS.reshape(1, 2, 3, 6))
        graph.wanted(graph("MaxPool", x, kernel_shape=[2, 2], pads=pads * 2))
        graph.wanted(graph("MaxPool", x, kernel_shape=[2, 2], pads=pads * 2, dilations=[1, 2]))
        graph.wanted(graph("GlobalMaxPool", x))
    g.check(device, **half.reference())


@pytest.mark.parametrize("channels", [6, 16, 32])
def test_behind_convolutions(channels: int, device: Device) -> None:
    """In the kernel of a convolution, and in layouts of blocks of channels."""
    g, rng = Graph("float32"), np.random.default_rng(0)
    shape = (1, channels, 4, 6)
    x, w = g.given(rng.normal(size=shape)), g.constant(rng.normal(size=(channels, channels, 1, 1)))
    special = rng.choice([0.0] * 8 + VALUES[:8], shape)
    s, zeros = g.given(special), g.given(rng.choice([-INF, INF, 1], shape, p=[0.8, 0.1, 0.1]))
    other = g.constant(rng.normal(size=(channels, channels, 1, 1)))
    for op in ("Relu", "HardSigmoid", "Sign", "LeakyRelu"):
        g.wanted(g(op, g("Add", g("Conv", x, w), s)))
    g.wanted(g("Clip", g("Add", g("Conv", x, w), s), g.constant(0), g.constant(6)))
    g.wanted(g("Max", g("Add", g("Conv", x, w), s), g("Conv", x, other)))
    pooled = g("MaxPool", g("Add", g("Conv", x, w), zeros), kernel_shape=[2, 2], strides=[2, 2])
    g.wanted(pooled)
    g.check(device, **{pooled: _pooled(g.reference()[pooled], g, zeros)})


def _pooled(found: np.ndarray, g: Graph, zeros: str) -> np.ndarray:
    windows = g.inputs[zeros].reshape(*found.shape[:3], 2, found.shape[3], 2)
    return np.where(np.isneginf(windows).all((3, 5)), -INF, found)
