"""ONNX models that end ONNX Runtime's process, or take long, by what they are given; and innocent ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]
Integers = type[np.int32] | type[np.int64]
SIZE = 64  # of `looping`'s square input
_KINDS: dict[Integers, int] = {np.int32: TensorProto.INT32, np.int64: TensorProto.INT64}


def _packed(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], known: list[Any]) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializer=known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def adding(number: float) -> bytes:
    """y = x + number, of any number of floats."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    known = [numpy_helper.from_array(np.array([number], np.float32), "number")]
    return _packed([helper.make_node("Add", ["x", "number"], ["y"])], ends[:1], ends[1:], known)


def uninferable() -> bytes:
    """y = a * b: ONNX's own shape inference ends the process that loads it (onnx/onnx, issue 8207)."""
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("a", []), ("b", [2]))]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return _packed([helper.make_node("Einsum", ["a", "b"], ["y"], equation="...,...->...")], ends, [y], [])


def filling(number: float, mib: int) -> bytes:
    """y = w[i], of a table of so many MiB that is full of the number."""
    table = numpy_helper.from_array(np.full(mib << 18, number, np.float32), "w")
    i = helper.make_tensor_value_info("i", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    return _packed([helper.make_node("Gather", ["w", "i"], ["y"])], [i], [y], [table])


def dividing(kind: Integers, op: str = "Div") -> bytes:
    """y = x / d of integers, or the rest: the processor raises a signal for the smallest integer by -1."""
    ends = [helper.make_tensor_value_info(name, _KINDS[kind], ["n"]) for name in ("x", "d", "y")]
    return _packed([helper.make_node(op, ["x", "d"], ["y"])], ends[:2], ends[2:], [])


def dividend(kind: Integers, *, deadly: bool = False) -> dict[str, Array]:
    """Inputs of `dividing`, which end the process if they are `deadly`."""
    x = np.array([np.iinfo(kind).min if deadly else 7, 9, 100, 25], kind)
    return {"x": x, "d": np.array([-1, 2, 7, 5], kind)}


def looping() -> bytes:
    """h = tanh(h w + x), n times, from h = x: n chooses how long it takes."""
    rng = np.random.default_rng(47)
    w = (np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0] * 0.5).astype(np.float32)
    square = [SIZE, SIZE]
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["h", "w"], ["p"]),
            helper.make_node("Add", ["p", "x"], ["s"]),
            helper.make_node("Tanh", ["s"], ["h2"]),
            helper.make_node("Identity", ["c"], ["c2"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, square),
        ],
        [
            helper.make_tensor_value_info("c2", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h2", TensorProto.FLOAT, square),
        ],
    )
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, square),
        helper.make_tensor_value_info("n", TensorProto.INT64, []),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, square)]
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    return _packed([loop], inputs, outputs, [numpy_helper.from_array(w, "w")])


def rounds(n: int, seed: int = 0) -> dict[str, Array]:
    """Inputs of `looping` for n rounds."""
    x = np.random.default_rng(seed).standard_normal((SIZE, SIZE)).astype(np.float32) * np.float32(0.3)
    return {"x": x, "n": np.array(n)}


def looped(inputs: dict[str, Array]) -> Array:
    """What `looping` answers; of many rounds the last change nothing."""
    w = (np.linalg.qr(np.random.default_rng(47).standard_normal((SIZE, SIZE)))[0] * 0.5).astype(np.float32)
    h = inputs["x"].astype(np.float64)
    for _ in range(min(int(inputs["n"]), 60)):
        h = np.tanh(h @ w + inputs["x"])
    return h
