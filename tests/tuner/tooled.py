"""Small models as exporters write them, and what ONNX Runtime's optimiser and quantisers make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.transformers import optimizer
from onnxruntime.transformers.fusion_options import FusionOptions

WIDTH, HEADS, LENGTH, BATCH, WORDS = 16, 4, 6, 2, 30


@dataclass
class Sketch:
    """A graph being written: nodes in order, and constants."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def constant(self, data: Any, dtype: Any = np.float32) -> str:
        """The name of a constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(data, dtype), name))
        return name

    def weights(self, *shape: int) -> str:
        """Random numbers of such a size that products keep theirs."""
        rng = np.random.default_rng((len(self.constants), *shape))
        return self.constant(rng.standard_normal(shape) / np.sqrt(shape[0]))

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        """The output of a node."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **attrs))
        return name

    def model(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        """The whole, valid; shapes of values inside are inferred."""
        graph = helper.make_graph(self.nodes, "sketch", inputs, outputs, self.constants)
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.checker.check_model(made, full_check=True)
        return onnx.shape_inference.infer_shapes(made)

    def dense(self, x: str, width: int, columns: int) -> str:
        """A product with weights, plus a bias."""
        return self("Add", self("MatMul", x, self.weights(width, columns)), self.weights(columns))

    def normalised(self, x: str) -> str:
        """A layer normalisation as PyTorch exported it before ONNX had one."""
        centred = self("Sub", x, self("ReduceMean", x, axes=[-1]))
        variance = self("ReduceMean", self("Pow", centred, self.constant(2.0)), axes=[-1])
        root = self("Sqrt", self("Add", variance, self.constant(1e-5)))
        scaled = self("Mul", self("Div", centred, root), self.constant(np.linspace(0.5, 1.5, WIDTH)))
        return self("Add", scaled, self.constant(np.linspace(-0.1, 0.1, WIDTH)))

    def gelu(self, x: str) -> str:
        """Gelu as PyTorch exports it."""
        erf = self("Erf", self("Div", x, self.constant(np.sqrt(2.0))))
        return self("Mul", self("Mul", x, self("Add", erf, self.constant(1.0))), self.constant(0.5))

    def attended(self, x: str, mask: str) -> str:
        """Self-attention as transformers' BERT exports it."""
        size = WIDTH // HEADS

        def apart(perm: Sequence[int]) -> str:
            whole = self.dense(x, WIDTH, WIDTH)
            shape = self.constant([BATCH, LENGTH, HEADS, size], np.int64)
            return self("Transpose", self("Reshape", whole, shape), perm=perm)

        q, k, v = apart([0, 2, 1, 3]), apart([0, 2, 3, 1]), apart([0, 2, 1, 3])
        scores = self("Div", self("MatMul", q, k), self.constant(np.sqrt(size)))
        shares = self("Softmax", self("Add", scores, mask), axis=3)
        joined = self("Transpose", self("MatMul", shares, v), perm=[0, 2, 1, 3])
        flat = self("Reshape", joined, self.constant([BATCH, LENGTH, WIDTH], np.int64))
        return self.dense(flat, WIDTH, WIDTH)


def bert(layers: int = 1) -> onnx.ModelProto:
    """A small BERT as PyTorch exports it: words, segments and mask in, the last layer's states out."""
    s = Sketch()
    words = s("Gather", s.weights(WORDS, WIDTH), "input_ids", axis=0)
    segments = s("Gather", s.weights(2, WIDTH), "token_type_ids", axis=0)
    places = s.constant(np.arange(LENGTH)[None], np.int64)
    positions = s("Gather", s.weights(LENGTH, WIDTH), places, axis=0)
    x = s.normalised(s("Add", s("Add", words, segments), positions))
    axes = [s.constant([axis], np.int64) for axis in (1, 2)]
    mask = s("Unsqueeze", s("Unsqueeze", "attention_mask", axes[0]), axes[1])
    hidden = s("Sub", s.constant(1.0), s("Cast", mask, to=TensorProto.FLOAT))
    mask = s("Mul", hidden, s.constant(-10000.0))
    for _ in range(layers):
        x = s.normalised(s("Add", s.attended(x, mask), x))
        inner = s.gelu(s.dense(x, WIDTH, 2 * WIDTH))
        x = s.normalised(s("Add", s.dense(inner, 2 * WIDTH, WIDTH), x))
    s.nodes[-1].output[0] = "states"
    ids = ("input_ids", "attention_mask", "token_type_ids")
    return s.model(
        [helper.make_tensor_value_info(n, TensorProto.INT64, [BATCH, LENGTH]) for n in ids],
        [helper.make_tensor_value_info("states", TensorProto.FLOAT, [BATCH, LENGTH, WIDTH])],
    )


def voice(direction: str = "forward", steps: int = 3) -> onnx.ModelProto:
    """An LSTM and a dense layer, its state in and out."""
    s, count, hidden = Sketch(), 2 if direction == "bidirectional" else 1, 8
    w, r = s.weights(count, 4 * hidden, WIDTH), s.weights(count, 4 * hidden, hidden)
    b = s.weights(count, 8 * hidden)
    s.nodes.append(
        helper.make_node(
            "LSTM",
            ["x", w, r, b, "", "h", "c"],
            ["sequence", "h_after", "c_after"],
            name="lstm",
            hidden_size=hidden,
            direction=direction,
        )
    )
    flat = s("Reshape", "sequence", s.constant([steps, count * hidden], np.int64))
    s.dense(flat, count * hidden, 5)
    s.nodes[-1].output[0] = "y"
    state = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [count, 1, hidden]) for n in ("h", "c")]
    after = [
        helper.make_tensor_value_info(f"{n}_after", TensorProto.FLOAT, [count, 1, hidden]) for n in ("h", "c")
    ]
    return s.model(
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [steps, 1, WIDTH]), *state],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [steps, 5]), *after],
    )


def network() -> onnx.ModelProto:
    """Convolutions with what static quantisation has operators for, and a dense layer."""
    s = Sketch()
    a = s("Relu", s("Conv", "x", s.weights(8, 3, 3, 3), s.weights(8), pads=[1, 1, 1, 1]))
    a = s("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2])
    left = s("Conv", a, s.weights(8, 8, 1, 1), s.weights(8))
    right = s("LeakyRelu", s("Conv", a, s.weights(8, 1, 3, 3), s.weights(8), pads=[1, 1, 1, 1], group=8))
    joined = s("Concat", s("Add", left, right), s("Mul", s("Sigmoid", left), left), axis=1)
    pooled = s("AveragePool", joined, kernel_shape=[2, 2], strides=[2, 2])
    flat = s("Flatten", s("GlobalAveragePool", pooled))
    s("Softmax", s("Gemm", flat, s.weights(16, 6), s.weights(6)), axis=1)
    s.nodes[-1].output[0] = "y"
    return s.model(
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 12, 12])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 6])],
    )


def given(model: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs: words below WORDS, masks and segments of 0 and 1, normally distributed numbers."""
    rng, found = np.random.default_rng(seed), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        if kind.elem_type == TensorProto.FLOAT:
            found[value.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            top = WORDS if value.name == "input_ids" else 2
            found[value.name] = rng.integers(0, top, shape).astype(
                helper.tensor_dtype_to_np_dtype(kind.elem_type)
            )
            if "mask" in value.name:
                found[value.name][..., 0] = 1
    return found


class _Calibration(CalibrationDataReader):  # type: ignore[misc]  # the tool has no types
    def __init__(self, model: onnx.ModelProto) -> None:
        self._left: Iterator[dict[str, np.ndarray]] = iter([given(model, seed) for seed in range(4)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def optimised(model: onnx.ModelProto, folder: Path, *, multi_head: bool = False) -> onnx.ModelProto:
    """By `onnxruntime.transformers.optimizer`."""
    onnx.save(model, folder / "plain.onnx")
    options = FusionOptions("bert")
    options.use_multi_head_attention = multi_head
    done = optimizer.optimize_model(
        str(folder / "plain.onnx"),
        "bert",
        num_heads=HEADS,
        hidden_size=WIDTH,
        optimization_options=options,
        opt_level=0,
    )
    done.save_model_to_file(str(folder / "optimised.onnx"))
    return onnx.load(folder / "optimised.onnx")


def quantised(model: onnx.ModelProto, folder: Path, weights: QuantType = QuantType.QInt8) -> onnx.ModelProto:
    """By `quantize_dynamic`."""
    onnx.save(model, folder / "float.onnx")
    quantize_dynamic(folder / "float.onnx", folder / "dynamic.onnx", weight_type=weights)
    return onnx.load(folder / "dynamic.onnx")


def calibrated(
    model: onnx.ModelProto, folder: Path, form: QuantFormat, activations: QuantType = QuantType.QUInt8
) -> onnx.ModelProto:
    """By `quantize_static`: operators on integers, or pairs of QuantizeLinear and DequantizeLinear."""
    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx",
        folder / "static.onnx",
        _Calibration(model),
        quant_format=form,
        activation_type=activations,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    return onnx.load(folder / "static.onnx")


def saved_by_runtime(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """As ONNX Runtime saves the graph that it optimised for processors, short of layouts of its own."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "saved.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "saved.onnx")
