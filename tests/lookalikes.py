"""Models that ONNX Runtime's optimisers take for something that they are not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def layer_norm(shape: Sequence[int | str | None], scale: Sequence[float]) -> onnx.ModelProto:
    """Build what ONNX Runtime 1.31 takes for SimplifiedLayerNormalization.

    That does not load where `x` has rank 1, nor run where the scale is wider than `x`.
    """
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[-1]),
        helper.make_node("Sub", ["x", "mean"], ["d"]),
        helper.make_node("Pow", ["d", "two"], ["square"]),
        helper.make_node("ReduceMean", ["square"], ["variance"], axes=[-1]),
        helper.make_node("Add", ["variance", "little"], ["above"]),
        helper.make_node("Sqrt", ["above"], ["deviation"]),
        helper.make_node("Div", ["d", "deviation"], ["normal"]),
        helper.make_node("Mul", ["scale", "normal"], ["y"]),
    ]
    known = {"two": 2, "little": 1e-5, "scale": scale}
    constants = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in known.items()]
    ends = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(shape)),
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def normalised(x: np.ndarray, scale: Sequence[float]) -> np.ndarray:
    """Return the answer of `layer_norm`."""
    d = x.astype(np.float64) - x.mean(-1, keepdims=True)
    answer = d / np.sqrt((d**2).mean(-1, keepdims=True) + 1e-5) * np.array(scale)
    return np.asarray(answer, np.float32)


def fails_optimised(model: onnx.ModelProto, x: np.ndarray) -> bool:
    """Return whether this ONNX Runtime does not load the model, or run it, when it optimises."""
    try:
        onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    except Exception:  # noqa: BLE001  its errors have no class of their own
        return True
    return False
