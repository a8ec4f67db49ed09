"""Models for programs that others wrote: with random weights, in the forms that these programs read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

_ROOT = Path(__file__).resolve().parents[2]
_WORDS, _WIDTH, _LAYERS = 100, 128, 4
_FLOAT = TensorProto.FLOAT
Tensor = tuple[str, int, Sequence[Any]]
# Metadata that sherpa-onnx requires of such a model.
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

    def weight(self, *shape: int, scale: float = 1.0) -> str:
        scale *= max(1, math.prod(shape[1:] if len(shape) > 2 else shape[:-1])) ** -0.5
        return self.constant((self._random.standard_normal(shape) * scale).astype(np.float32))

    def constant(self, values: ArrayLike, dtype: type = np.float32) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(values, dtype), f"w{len(self.weights)}"))
        return f"w{len(self.weights) - 1}"

    def add(self, operator: str, *inputs: str, output: str = "", **attributes: object) -> str:
        name = output or f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def convolve(self, at: str, taken: int, given: int, stride: int = 1) -> str:
        """Convolve by 3x3, and rectify."""
        weight = self.weight(given, taken, 3, 3, scale=2**0.5)
        return self.add("Relu", self.add("Conv", at, weight, pads=[1, 1, 1, 1], strides=[stride, stride]))

    def transform(self, at: str, width: int, layers: int, ignored: str = "") -> str:
        """Add layers of a transformer of one head, with `ignored` added to its scores."""
        for _ in range(layers):
            q, k, v = (self.add("MatMul", at, self.weight(width, width)) for _ in range(3))
            scores = self.add("MatMul", q, self.add("Transpose", k, perm=[0, 2, 1]))
            scores = self.add("Mul", scores, self.constant([width**-0.5]))
            shares = self.add("Softmax", self.add("Add", scores, ignored) if ignored else scores, axis=-1)
            at = self.normalise(self.add("Add", at, self.add("MatMul", shares, v)), width)
            wide = self.add("Relu", self.add("MatMul", at, self.weight(width, 4 * width)))
            narrow = self.add("MatMul", wide, self.weight(4 * width, width))
            at = self.normalise(self.add("Add", at, narrow), width)
        return at

    def normalise(self, at: str, width: int) -> str:
        scale, bias = self.constant(np.ones(width)), self.constant(np.zeros(width))
        return self.add("LayerNormalization", at, scale, bias, axis=-1)

    def save(self, path: Path, inputs: Sequence[Tensor], outputs: Sequence[Tensor], **metadata: str) -> None:
        """Write the model; outputs are what the graph computes by these names."""
        ends = [[helper.make_tensor_value_info(*each) for each in end] for end in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, path.stem, *ends, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        helper.set_model_props(model, metadata)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path)


def _write_json(folder: Path, **files: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def write_images(path: Path) -> None:
    """Write four convolutions with x [b, 3, 160, 160] and y."""
    graph, at, channels = _Graph(), "x", 3
    for wide, stride in ((32, 2), (64, 2), (64, 1), (64, 1)):
        at, channels = graph.convolve(at, channels, wide, stride), wide
    graph.add("Identity", at, output="y")
    # GStreamer asks for the kind of each output.
    graph.save(path, [("x", _FLOAT, ["b", 3, 160, 160])], [("y", _FLOAT, ["b", 64, 40, 40])], y="features")


def _tokenizer() -> dict[str, object]:
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    vocabulary |= {f"w{i}": i + 4 for i in range(_WORDS - 4)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
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


def write_embedder(folder: Path) -> None:
    """Write a small BERT as transformers.js reads it: configuration, tokenizer, and onnx/model.onnx."""
    graph = _Graph()
    at = graph.add("Gather", graph.weight(_WORDS, _WIDTH), "input_ids")
    kept = graph.add("Cast", "attention_mask", to=TensorProto.FLOAT)
    kept = graph.add("Unsqueeze", kept, graph.constant([1], np.int64))
    ignored = graph.add("Mul", graph.add("Sub", kept, graph.constant([1])), graph.constant([1e4]))
    graph.add("Identity", graph.transform(at, _WIDTH, _LAYERS, ignored), output="last_hidden_state")
    inputs = [(name, TensorProto.INT64, ["b", "t"]) for name in ("input_ids", "attention_mask")]
    graph.save(folder / "onnx" / "model.onnx", inputs, [("last_hidden_state", _FLOAT, ["b", "t", _WIDTH])])
    _write_json(
        folder,
        config={"model_type": "bert", "hidden_size": _WIDTH, "architectures": ["BertModel"]},
        tokenizer_config={
            "tokenizer_class": "BertTokenizer",
            "pad_token": "[PAD]",
            "model_max_length": 64,
        },
        tokenizer=_tokenizer(),
    )


def write_voice(folder: Path) -> None:
    """Write a voice as piper reads it: phonemes in, 256 samples for each out, as of VITS's decoder."""
    graph, channels = _Graph(), 128
    phonemes = graph.add("Gather", graph.weight(256, channels), "input")
    paces = graph.add("Gather", "scales", graph.constant([1], np.int64))
    at = graph.add("Transpose", graph.add("Mul", phonemes, paces), perm=[0, 2, 1])
    for _ in range(3):
        wide = graph.add("Conv", at, graph.weight(channels, channels, 5), pads=[2, 2])
        at = graph.add("Add", at, graph.add("LeakyRelu", wide, alpha=0.1))
    for times in (8, 8, 4):
        weight = graph.weight(channels, channels // 2, 2 * times)
        at = graph.add("ConvTranspose", at, weight, strides=[times], pads=[times // 2, times // 2])
        at, channels = graph.add("LeakyRelu", at, alpha=0.1), channels // 2
    samples = graph.add("Tanh", graph.add("Conv", at, graph.weight(1, channels, 7, scale=30), pads=[3, 3]))
    graph.add("Unsqueeze", samples, graph.constant([1], np.int64), output="output")
    ends = [("input", TensorProto.INT64, ["b", "t"]), ("input_lengths", TensorProto.INT64, ["b"])]
    graph.save(
        folder / "voice.onnx", [*ends, ("scales", _FLOAT, [3])], [("output", _FLOAT, ["b", 1, 1, "samples"])]
    )
    letters = "_^$ abcdefghijklmnopqrstuvwxyz,."
    settings = {
        "audio": {"sample_rate": 22050},
        "espeak": {"voice": "en"},
        "phoneme_type": "text",
        "num_symbols": 256,
        "num_speakers": 1,
        "phoneme_id_map": {letter: [i] for i, letter in enumerate(letters)},
    }
    _write_json(folder, **{"voice.onnx": settings})


def write_clip(folder: Path) -> None:
    """Write a small CLIP as immich reads it: `visual` and `textual`, with configuration and tokenizer."""
    side, patch, width, layers, tokens = 224, 32, 256, 6, 77
    _write_json(folder, config={"text_cfg": {"context_length": tokens}})

    graph = _Graph()
    patches = graph.add("Conv", "image", graph.weight(width, 3, patch, patch), strides=[patch, patch])
    rows = graph.add("Reshape", patches, graph.constant([1, width, (side // patch) ** 2], np.int64))
    rows = graph.add("Transpose", rows, perm=[0, 2, 1])
    rows = graph.add("Concat", graph.weight(1, 1, width), rows, axis=1)
    rows = graph.add("Add", rows, graph.weight(1, (side // patch) ** 2 + 1, width))
    first = graph.add("Gather", graph.transform(rows, width, layers), graph.constant(0, np.int64), axis=1)
    graph.add("MatMul", first, graph.weight(width, 512), output="embedding")
    embedding = [("embedding", _FLOAT, [1, 512])]
    graph.save(folder / "visual" / "model.onnx", [("image", _FLOAT, [1, 3, side, side])], embedding)
    pixels = {"mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28], "interpolation": "bicubic"}
    _write_json(folder / "visual", preprocess_cfg={"size": side, **pixels})

    graph = _Graph()
    words = graph.add("Gather", graph.weight(_WORDS, width), "text")
    rows = graph.add("Add", words, graph.weight(1, tokens, width))
    later = graph.constant(np.triu(np.full((tokens, tokens), -1e4), 1))
    end = graph.add("ArgMax", "text", axis=1, keepdims=0)
    last = graph.add(
        "GatherND", graph.transform(rows, width, layers, later), _pairs(graph, end), batch_dims=0
    )
    graph.add("MatMul", last, graph.weight(width, 512), output="embedding")
    graph.save(folder / "textual" / "model.onnx", [("text", TensorProto.INT32, [1, tokens])], embedding)
    _write_json(folder / "textual", tokenizer=_tokenizer(), tokenizer_config={"pad_token": "[PAD]"})


def _pairs(graph: _Graph, columns: str) -> str:
    """Return [[0, column]], for a batch of one."""
    column = graph.add("Unsqueeze", columns, graph.constant([1], np.int64))
    return graph.add("Concat", graph.constant([[0]], np.int64), column, axis=1)


def write_faces(folder: Path) -> None:
    """Write a detector of faces (SCRFD's outputs) and an embedder of faces, as insightface reads them."""
    graph, at, channels = _Graph(), "input.1", 3
    levels = []
    for wide in (16, 32, 64, 96, 96):
        at, channels = graph.convolve(at, channels, wide, 2), wide
        levels.append((at, wide))
    outputs = []
    marks = np.array([[-1, -1], [1, -1], [0, 0], [-0.8, 1], [0.8, 1]]).ravel() * 2
    heads = (("score", 1, 3.0, [-6.0]), ("bbox", 4, 0.3, [4.0] * 4), ("kps", 10, 0.1, marks))
    for name, given, scale, bias in heads:
        for level, (features, taken) in enumerate(levels[2:]):
            weight = graph.weight(2 * given, taken, 3, 3, scale=scale)
            found = graph.add("Conv", features, weight, graph.constant(np.tile(bias, 2)), pads=[1, 1, 1, 1])
            rows = graph.add("Transpose", found, perm=[0, 2, 3, 1])
            rows = graph.add("Reshape", rows, graph.constant([-1, given], np.int64))
            graph.add("Sigmoid" if name == "score" else "Identity", rows, output=f"{name}{level}")
            outputs.append((f"{name}{level}", _FLOAT, [f"n{level}", given]))
    pixels = [("input.1", _FLOAT, [1, 3, "h", "w"])]
    graph.save(folder / "detection" / "model.onnx", pixels, outputs)

    graph, at, channels = _Graph(), "input.1", 3
    for wide in (32, 64, 128, 256):
        at, channels = graph.convolve(at, channels, wide, 2), wide
        at = graph.add("Add", at, graph.convolve(at, wide, wide))
    flat = graph.add("Flatten", at)
    graph.add("MatMul", flat, graph.weight(256 * 7 * 7, 512), output="embedding")
    pixels = [("input.1", _FLOAT, ["batch", 3, 112, 112])]
    graph.save(folder / "recognition" / "model.onnx", pixels, [("embedding", _FLOAT, ["batch", 512])])


def write_denoiser(path: Path) -> None:
    """Write the tests' denoiser of speech with the metadata that sherpa-onnx asks for."""
    model = onnx.load(_ROOT / "tests" / "models" / "gtcrn_simple.onnx")
    helper.set_model_props(model, _GTCRN)
    onnx.save(model, path)
