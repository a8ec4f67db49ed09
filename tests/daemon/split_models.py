"""Models that run in parts, and what ONNX Runtime makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

SIZE, STRIDE = 64, 8


def detector(folder: Path, seed: int = 0) -> Path:
    """A backbone of convolutions with boxes and scores, and non-maximum suppression behind it.

    `found` and `classes` have as many rows as the image has objects; `scores` is of fixed shape.
    """
    r = np.random.default_rng(seed)
    cells = (SIZE // STRIDE) ** 2
    constants: dict[str, Any] = {
        "to_boxes": np.array([1, 4, cells]),
        "to_scores": np.array([1, 3, cells]),
        "grid": _grid(cells),
        "most": np.array([20]),
        "overlap": np.array([0.4], np.float32),
        "least": np.array([0.6], np.float32),
        "two": np.array([2]),
        "one": np.array([1]),
        "zero": np.array([0]),
    }
    nodes = []
    value, channels = "image", 3
    for n in range(3):
        made = 16 << n
        constants[f"w{n}"] = _weights(r, made, channels, 3)
        nodes += [
            helper.make_node("Conv", [value, f"w{n}"], [f"c{n}"], strides=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{n}"], [f"r{n}"]),
        ]
        value, channels = f"r{n}", made
    constants["wb"], constants["ws"] = _weights(r, 4, channels, 1), _weights(r, 3, channels, 1)
    nodes += [
        helper.make_node("Conv", [value, "wb"], ["b"]),
        helper.make_node("Conv", [value, "ws"], ["s"]),
        helper.make_node("Reshape", ["b", "to_boxes"], ["b1"]),
        helper.make_node("Transpose", ["b1"], ["b2"], perm=[0, 2, 1]),
        helper.make_node("Reshape", ["s", "to_scores"], ["s1"]),
        helper.make_node("Sigmoid", ["s1"], ["scores"]),
        helper.make_node("Add", ["b2", "grid"], ["boxes"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "most", "overlap", "least"], ["chosen"]),
        helper.make_node("Gather", ["chosen", "two"], ["rows"], axis=1),
        helper.make_node("Squeeze", ["rows", "one"], ["row"]),
        helper.make_node("Squeeze", ["boxes", "zero"], ["all_boxes"]),
        helper.make_node("Gather", ["all_boxes", "row"], ["found"], axis=0),
        helper.make_node("Gather", ["chosen", "one"], ["kinds"], axis=1),
        helper.make_node("Squeeze", ["kinds", "one"], ["classes"]),
    ]
    outputs = [
        helper.make_tensor_value_info("found", TensorProto.FLOAT, ["n", 4]),
        helper.make_tensor_value_info("classes", TensorProto.INT64, ["n"]),
        helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 3, cells]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIZE, SIZE])
    return _written(folder / "detector.onnx", nodes, [image], outputs, constants)


def two_stage(
    folder: Path, seed: int = 1, *, channels: int = 32, bins: int = 4, hidden: int = 64, most: int = 60
) -> Path:
    """In the style of Mask R-CNN: proposals, suppression, what lies in each box left, and heads for these.

    Heads have a layer of `hidden` on `bins` x `bins` x `channels` of each of `most` boxes at most.
    """
    r = np.random.default_rng(seed)
    cells, classes = (SIZE // 4) ** 2, 5
    side = SIZE // 4
    places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(1, cells, 2) * 4.0
    constants: dict[str, Any] = {
        "w0": _weights(r, 16, 3, 3),
        "w1": _weights(r, channels, 16, 3),
        "wb": _weights(r, 4, channels, 1),
        "ws": _weights(r, 1, channels, 1),
        "to_boxes": np.array([1, 4, cells]),
        "to_scores": np.array([1, 1, cells]),
        "anchors": np.concatenate([places - 6, places + 6], -1).astype(np.float32),
        "most": np.array([most]),
        "overlap": np.array([0.3], np.float32),
        "least": np.array([0.6], np.float32),
        "two": np.array([2]),
        "one": np.array([1]),
        "zero": np.array([0]),
        "flat": np.array([-1, channels * bins**2]),
        "hidden_w": (r.normal(size=(channels * bins**2, hidden)) / 20).astype(np.float32),
        "class_w": (r.normal(size=(hidden, classes)) / 8).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["image", "w0"], ["c0"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"]),
        helper.make_node("Conv", ["r0", "w1"], ["c1"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["features"]),
        helper.make_node("Conv", ["features", "wb"], ["b"]),
        helper.make_node("Reshape", ["b", "to_boxes"], ["b1"]),
        helper.make_node("Transpose", ["b1"], ["b2"], perm=[0, 2, 1]),
        helper.make_node("Add", ["b2", "anchors"], ["proposals"]),
        helper.make_node("Conv", ["features", "ws"], ["s"]),
        helper.make_node("Sigmoid", ["s"], ["s1"]),
        helper.make_node("Reshape", ["s1", "to_scores"], ["objectness"]),
        helper.make_node(
            "NonMaxSuppression", ["proposals", "objectness", "most", "overlap", "least"], ["chosen"]
        ),
        helper.make_node("Gather", ["chosen", "two"], ["rows"], axis=1),
        helper.make_node("Squeeze", ["rows", "one"], ["row"]),
        helper.make_node("Squeeze", ["proposals", "zero"], ["all"]),
        helper.make_node("Gather", ["all", "row"], ["boxes"], axis=0),
        helper.make_node("Gather", ["chosen", "zero"], ["images"], axis=1),
        helper.make_node("Squeeze", ["images", "one"], ["of_image"]),
        helper.make_node(
            "RoiAlign",
            ["features", "boxes", "of_image"],
            ["pooled"],
            output_height=bins,
            output_width=bins,
            spatial_scale=0.25,
            sampling_ratio=2,
        ),
        helper.make_node("Reshape", ["pooled", "flat"], ["rois"]),
        helper.make_node("MatMul", ["rois", "hidden_w"], ["h"]),
        helper.make_node("Relu", ["h"], ["h1"]),
        helper.make_node("MatMul", ["h1", "class_w"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["classes"], axis=1),
    ]
    outputs = [
        helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ["n", 4]),
        helper.make_tensor_value_info("classes", TensorProto.FLOAT, ["n", classes]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIZE, SIZE])
    return _written(folder / "two_stage.onnx", nodes, [image], outputs, constants)


def sparse(folder: Path) -> Path:
    """Convolutions around a selection whose size depends on the data, though not that of its result."""
    r = np.random.default_rng(3)
    constants = {
        "w1": _weights(r, 16, 8, 3),
        "w2": _weights(r, 16, 16, 3),
        "half": np.array(0.5, np.float32),
        "none": np.zeros((1, 16, 48, 48), np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["positive"]),
        helper.make_node("Greater", ["positive", "half"], ["large"]),
        helper.make_node("NonZero", ["large"], ["places"]),
        helper.make_node("Transpose", ["places"], ["where"], perm=[1, 0]),
        helper.make_node("GatherND", ["positive", "where"], ["chosen"]),
        helper.make_node("Sqrt", ["chosen"], ["less"]),
        helper.make_node("ScatterND", ["none", "where", "less"], ["thin"]),
        helper.make_node("Conv", ["thin", "w2"], ["d"], pads=[1, 1, 1, 1]),
        helper.make_node("Tanh", ["d"], ["answer"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 48, 48])
    answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, [1, 16, 48, 48])
    return _written(folder / "sparse.onnx", nodes, [x], [answer], constants)


def hopeless(folder: Path) -> Path:
    """Hardly anything can be compiled: the sizes of what it works on depend on the data from the start."""
    nodes = [
        helper.make_node("Relu", ["x"], ["positive"]),
        helper.make_node("NonZero", ["positive"], ["places"]),
        helper.make_node("Cast", ["places"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["floats"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["turned", "floats"], ["answer"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 8])
    answer = helper.make_tensor_value_info("answer", TensorProto.FLOAT, ["n", "n"])
    return _written(folder / "hopeless.onnx", nodes, [x], [answer], {})


def reference(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """What ONNX Runtime gives for the whole file."""
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def images(count: int, seed: int = 5) -> list[Any]:
    """Images with more and fewer objects."""
    r = np.random.default_rng(seed)
    return [(r.normal(size=(1, 3, SIZE, SIZE)) * (0.05 + 0.15 * n)).astype(np.float32) for n in range(count)]


def _grid(cells: int) -> Any:
    side = SIZE // STRIDE
    places = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(1, cells, 2) * float(STRIDE)
    return np.concatenate([places - STRIDE, places + STRIDE], -1).astype(np.float32)


def _weights(r: np.random.Generator, made: int, given: int, kernel: int) -> Any:
    scale = np.sqrt(2 / (kernel * kernel * given))
    return (r.normal(size=(made, given, kernel, kernel)) * scale).astype(np.float32)


def _written(
    path: Path, nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], constants: dict[str, Any]
) -> Path:
    initial = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, path.stem, inputs, outputs, initializer=initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path
