"""Models for programs that others wrote: with random weights, in the forms that these programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

_ROOT = Path(__file__).resolve().parents[2]
_WORDS, _WIDTH, _HIDDEN, _LAYERS = 100, 128, 512, 4
# What sherpa-onnx asks a model of this kind for.
_GTCRN = {
    "model_type": "gtcrn",
    "version": "1",
    "sample_rate": "16000",
    "n_fft": "512",
    "hop_length": "256",
    "window_length": "512",
    "window_type": "hann_sqrt",
    "conv_cache_shape": "2,1,16,16,33",
    "tra_cache_shape": "2,3,1,1,16",
    "inter_cache_shape": "2,1,33,16",
}


class _Graph:
    """Nodes and weights; each method returns the name of what it computes."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(7)

    def weight(self, *shape: int) -> str:
        scale = (shape[-2] if len(shape) > 1 else 1) ** -0.5
        return self.constant((self._random.standard_normal(shape) * scale).astype(np.float32))

    def constant(self, values: NDArray[Any]) -> str:
        self.weights.append(numpy_helper.from_array(values, f"w{len(self.weights)}"))
        return f"w{len(self.weights) - 1}"

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: object) -> str:
        name = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def save(self, path: Path, inputs: list[onnx.ValueInfoProto], output: onnx.ValueInfoProto) -> None:
        graph = helper.make_graph(self.nodes, path.stem, inputs, [output], self.weights)
        opsets = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def write_images(path: Path) -> None:
    """Write four convolutions with x [b, 3, 160, 160] and y."""
    graph, at, channels = _Graph(), "x", 3
    for i, wide in enumerate((32, 64, 64, 64)):
        weight = graph.constant(
            (
                np.random.default_rng(i).standard_normal((wide, channels, 3, 3)) * (9 * channels) ** -0.5
            ).astype(np.float32)
        )
        stride = 2 if i < 2 else 1
        convolved = graph.add("Conv", at, weight, pads=[1, 1, 1, 1], strides=[stride, stride])
        at, channels = graph.add("Relu", convolved, output="y" if i == 3 else ""), wide
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3, 160, 160])
    graph.save(path, [image], helper.make_tensor_value_info("y", TensorProto.FLOAT, None))


def write_embedder(folder: Path) -> None:
    """Write a small BERT as transformers.js reads it: configuration, tokenizer, and onnx/model.onnx."""
    (folder / "onnx").mkdir(parents=True)
    graph = _Graph()
    at = graph.add("Gather", graph.weight(_WORDS, _WIDTH), "input_ids")
    kept = graph.add(
        "Unsqueeze", graph.add("Cast", "attention_mask", to=TensorProto.FLOAT), graph.constant(np.array([1]))
    )
    ignored = graph.add(
        "Mul",
        graph.add("Sub", kept, graph.constant(np.array([1], np.float32))),
        graph.constant(np.array([1e4], np.float32)),
    )
    for layer in range(_LAYERS):
        q, k, v = (graph.add("MatMul", at, graph.weight(_WIDTH, _WIDTH)) for _ in range(3))
        scores = graph.add("MatMul", q, graph.add("Transpose", k, perm=[0, 2, 1]))
        scaled = graph.add("Mul", scores, graph.constant(np.array([_WIDTH**-0.5], np.float32)))
        shares = graph.add("Softmax", graph.add("Add", scaled, ignored), axis=-1)
        at = _normalise(graph, graph.add("Add", at, graph.add("MatMul", shares, v)))
        wide = graph.add("Relu", graph.add("MatMul", at, graph.weight(_WIDTH, _HIDDEN)))
        narrow = graph.add("MatMul", wide, graph.weight(_HIDDEN, _WIDTH))
        last = "last_hidden_state" if layer == _LAYERS - 1 else ""
        at = _normalise(graph, graph.add("Add", at, narrow), last)
    sizes = ["b", "t"]
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.INT64, sizes) for n in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, [*sizes, _WIDTH])
    graph.save(folder / "onnx" / "model.onnx", inputs, output)
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3} | {
        f"w{i}": i + 4 for i in range(_WORDS - 4)
    }
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "BertNormalizer", "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "vocab": vocabulary,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
    }
    files = {
        "config.json": {"model_type": "bert", "hidden_size": _WIDTH, "architectures": ["BertModel"]},
        "tokenizer_config.json": {
            "tokenizer_class": "BertTokenizer",
            "pad_token": "[PAD]",
            "model_max_length": 64,
        },
        "tokenizer.json": tokenizer,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def _normalise(graph: _Graph, at: str, output: str = "") -> str:
    ones, zeros = graph.constant(np.ones(_WIDTH, np.float32)), graph.constant(np.zeros(_WIDTH, np.float32))
    return graph.add("LayerNormalization", at, ones, zeros, output=output, axis=-1)


def write_denoiser(path: Path) -> None:
    """Write the tests' denoiser of speech with the metadata that sherpa-onnx asks for."""
    model = onnx.load(_ROOT / "tests" / "models" / "gtcrn_simple.onnx")
    helper.set_model_props(model, _GTCRN)
    onnx.save(model, path)
