"""Writes an ONNX model of two dense layers to a file, an input to x.npy, and the right output to y.npy.

make_model.py FILE [ROWS]: a model of other rows has other tasks, which tuning of the first does not help.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

INNER = 256


def main(path: str, rows: int = 64) -> None:
    """Write a model whose output is relu(x a) b, computed in double precision."""
    random = np.random.default_rng(7)
    a, b = (random.standard_normal((INNER, INNER)).astype(np.float32) / 16 for _ in range(2))
    x = random.standard_normal((rows, INNER)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "b"], ["y"]),
        ],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (rows, INNER))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (rows, INNER))],
        [numpy_helper.from_array(a, "a"), numpy_helper.from_array(b, "b")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    np.save("x.npy", x)
    wide = x.astype(np.float64), a.astype(np.float64), b.astype(np.float64)
    np.save("y.npy", (np.maximum(wide[0] @ wide[1], 0) @ wide[2]).astype(np.float32))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
