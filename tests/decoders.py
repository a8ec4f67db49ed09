"""Small decoders as exporters write them, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper, numpy_helper

VOCABULARY = 50
HEADS, SIZE = 2, 4
_GENAI = ("input_ids", "tokens"), ("attention_mask", "total")
WIDTH = HEADS * SIZE
KINDS = {np.dtype(np.float32): onnx.TensorProto.FLOAT, np.dtype(np.int64): onnx.TensorProto.INT64}
Array = NDArray[Any]


class _Graph:
    """Nodes and weights, as they come."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._rng = np.random.default_rng(7)

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = name or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def constant(self, value: Any, kind: Any = np.int64) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, kind), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self._rng.standard_normal(shape) * 0.7, np.float32)

    def heads(self, rows: str) -> str:
        split = self.op("Reshape", rows, self.constant([0, 0, HEADS, SIZE]))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def attend(self, query: str, keys: str, values: str, mask: str = "") -> str:
        turned = self.op("Transpose", keys, perm=[0, 1, 3, 2])
        scores = self.op("MatMul", query, turned)
        scores = self.op("Add", scores, mask) if mask else scores
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        rows = self.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.op("Reshape", rows, self.constant([0, 0, WIDTH]))


def _info(name: str, kind: Any, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, KINDS[np.dtype(kind)], shape)


def decoder(
    path: Path,
    *,
    layers: int = 2,
    encoder: bool = False,
    slow: int = 0,
    mask: bool = True,
    positions: bool = True,
) -> Path:
    """Write a decoder in Optimum's convention, which attends to an encoder's output with `encoder`.

    Without `mask` or `positions` these are no inputs: where its tokens stand follows from its state's length.
    It keeps what it makes of that only if it is told that there is no cache.
    Twice `slow` operators are one kernel, and take ONNX Runtime a run each: the compiled form is the faster
    engine.
    """
    g = _Graph()
    batch, tokens, past, total = "batch", "tokens", "past", "past + tokens"
    inputs = [_info("input_ids", np.int64, [batch, tokens])]
    if mask:
        inputs.append(_info("attention_mask", np.int64, [batch, total]))
    if positions:
        inputs.append(_info("position_ids", np.int64, [batch, tokens]))
    outputs = [_info("logits", np.float32, [batch, tokens, VOCABULARY])]
    if encoder:
        inputs.append(_info("encoder_hidden_states", np.float32, [batch, "encoded", WIDTH]))
        inputs.append(helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1]))
    x = g.op("Gather", g.weight(VOCABULARY, WIDTH), "input_ids")
    # A token sees those before it and itself, but those that the mask hides: column j of row i is hidden
    # where j > past + i.
    first = "past_key_values.0.decoder.key" if encoder else "past_key_values.0.key"
    zero, one = g.constant(0), g.constant(1)
    before = g.op("Squeeze", g.op("Shape", first, start=2, end=3))
    columns = g.op("Add", before, g.op("Squeeze", g.op("Shape", "input_ids", start=1, end=2)))
    column = g.op("Range", zero, columns, one)
    places = g.op("Range", before, columns, one)
    x = g.op("Add", x, g.op("Gather", g.weight(2048, WIDTH), "position_ids" if positions else places))
    row = g.op("Unsqueeze", places, g.constant([1]))
    hidden = g.op("Cast", g.op("Greater", column, row), to=onnx.TensorProto.FLOAT)
    if mask:
        seen = g.op("Cast", "attention_mask", to=onnx.TensorProto.FLOAT)
        padding = g.op("Unsqueeze", g.op("Sub", g.constant(1, np.float32), seen), g.constant([1, 2]))
        hidden = g.op("Add", hidden, padding)
    bias = g.op("Mul", hidden, g.constant(-1e4, np.float32))
    for layer in range(layers):
        query, key, value = (g.heads(g.op("MatMul", x, g.weight(WIDTH, WIDTH))) for _ in range(3))
        for what, new in (("key", key), ("value", value)):
            name = f"past_key_values.{layer}.decoder.{what}" if encoder else f"past_key_values.{layer}.{what}"
            after = name.replace("past_key_values", "present")
            g.op("Concat", name, new, name=after, axis=2)
            inputs.append(_info(name, np.float32, [batch, HEADS, past, SIZE]))
            outputs.append(_info(after, np.float32, [batch, HEADS, total, SIZE]))
        keys, values = outputs[-2].name, outputs[-1].name
        x = g.op("Add", x, g.attend(query, keys, values, bias))
        if encoder:
            x = g.op("Add", x, _cross(g, x, layer, inputs, outputs))
    begun, half = x, g.constant(0.5, np.float32)
    for _ in range(slow):
        x = g.op("Add", g.op("Mul", x, half), begun)
    g.op("MatMul", x, g.weight(WIDTH, VOCABULARY), name="logits")
    graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, initializer=g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def grouped(path: Path, *, layers: int = 2, mask: bool = True) -> Path:
    """Write a decoder in onnxruntime-genai's convention: two heads of queries for each of keys and values.

    Without `mask`, the number of rows is the size of its first cache.
    """
    g = _Graph()
    width, size = 32, 8
    inputs = [_info(name, np.int64, ["batch", length]) for name, length in _GENAI[: 1 + mask]]
    outputs = [_info("logits", np.float32, ["batch", "tokens", VOCABULARY])]
    int32 = onnx.TensorProto.INT32
    if mask:
        ones = g.op("ReduceSum", "attention_mask", g.constant([1]), keepdims=0)
        columns = g.op("Gather", g.op("Shape", "attention_mask"), g.constant(1))
    else:
        sizes = g.op("Shape", "past_key_values.0.key", start=2, end=3), g.op("Shape", "input_ids", start=1)
        ones = g.op("Add", *sizes)
        columns = g.op("Squeeze", ones)
    lengths = g.op("Cast", g.op("Sub", ones, g.constant(1)), to=int32)
    total = g.op("Cast", columns, to=int32)
    x = g.op("Gather", g.weight(VOCABULARY, width), "input_ids")
    for layer in range(layers):
        names = [f"past_key_values.{layer}.{what}" for what in ("key", "value")]
        afters = [name.replace("past_key_values", "present") for name in names]
        inputs += [_info(name, np.float32, ["batch", 2, "past", size]) for name in names]
        outputs += [_info(name, np.float32, ["batch", 2, "total", size]) for name in afters]
        rows = [g.op("MatMul", x, g.weight(width, of)) for of in (width, width // 2, width // 2)]
        mixed = f"mixed{layer}"
        g.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*rows, *names, lengths, total],
                [mixed, *afters],
                domain="com.microsoft",
                num_heads=4,
                kv_num_heads=2,
            )
        )
        x = g.op("Add", x, g.op("MatMul", mixed, g.weight(width, width)))
    g.op("MatMul", x, g.weight(width, VOCABULARY), name="logits")
    graph = helper.make_graph(g.nodes, "decoder", inputs, outputs, initializer=g.weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def _cross(
    g: _Graph, x: str, layer: int, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
) -> str:
    """Attention to the encoder's output, whose keys and values are made in the branch without a cache."""
    query = g.heads(g.op("MatMul", x, g.weight(WIDTH, WIDTH)))
    used = []
    for what in ("key", "value"):
        name = f"past_key_values.{layer}.encoder.{what}"
        after = name.replace("past_key_values", "present")
        made = g.heads(g.op("MatMul", "encoder_hidden_states", g.weight(WIDTH, WIDTH)))
        branches = []
        for branch, kept in (("then", name), ("else", made)):
            # As Optimum's: with the cache the output is empty, and what was given is used.
            empty = numpy_helper.from_array(np.zeros((0, HEADS, 1, SIZE), np.float32), f"{after}.e")
            ends = [f"{after}.{branch}.u", f"{after}.{branch}.o"]
            second = f"{after}.e" if branch == "then" else kept
            body = [
                helper.make_node("Identity", [kept], ends[:1]),
                helper.make_node("Identity", [second], ends[1:]),
            ]
            infos = [_info(end, np.float32, [None, HEADS, None, SIZE]) for end in ends]
            weights = [empty] if branch == "then" else []
            branches.append(helper.make_graph(body, branch, [], infos, initializer=weights))
        g.nodes.append(
            helper.make_node(
                "If",
                ["use_cache_branch"],
                [f"{after}.used", after],
                then_branch=branches[0],
                else_branch=branches[1],
            )
        )
        used.append(f"{after}.used")
        inputs.append(_info(name, np.float32, ["batch", HEADS, "encoded", SIZE]))
        outputs.append(_info(after, np.float32, ["batch", HEADS, "encoded", SIZE]))
    return g.attend(query, *used)


class InApp:
    """A decoder in ONNX Runtime with its cache in the app: what honed's answers are compared with."""

    def __init__(self, path: Path, **constants: Array) -> None:
        self._session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        self._shapes = {each.name: each.shape for each in self._session.get_inputs()}
        self._outputs = [each.name for each in self._session.get_outputs()]
        self._constants = constants
        self.state: dict[str, Array] = {}
        self.tokens = 0

    def step(self, ids: Array) -> Array:
        """The logits of tokens [batch, n]."""
        before, self.tokens = self.tokens, self.tokens + ids.shape[1]
        given: dict[str, Array] = {
            "input_ids": ids,
            "attention_mask": np.ones((ids.shape[0], self.tokens), np.int64),
            "position_ids": np.arange(before, self.tokens)[None].repeat(ids.shape[0], 0),
            "use_cache_branch": np.array([before > 0]),
            **self._constants,
            **self.state,
        }
        for name, (_, *sizes) in self._shapes.items():
            if name not in given:
                empty = [size if isinstance(size, int) else 0 for size in sizes]
                given[name] = np.zeros((ids.shape[0], *empty), np.float32)
        feed = {name: given[name] for name in self._shapes}
        found: Mapping[str, Array] = dict(zip(self._outputs, self._session.run(None, feed), strict=True))
        for name in self._shapes:
            after = found.get(name.replace("past_key_values", "present"))
            if name.startswith("past") and after is not None and not (before and ".encoder." in name):
                self.state[name] = after
        return found["logits"]
