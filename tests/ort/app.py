"""What apps of the tests begin with: routes that decide after few runs, and a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from honed.ort import install, policy

SIZE = 64
MOST_SECONDS = 200.0
SHAPES: tuple[int | str, ...] = ("rows", SIZE)


def quick() -> Any:
    """Return ONNX Runtime with its runs routed, whatever they cost, once a compiled form is there."""
    policy.ROW, policy.TRY_ROW, policy.CHECK_ROW = 4, 2, 1
    policy._FIRST_PAUSE = policy._LONGEST_PAUSE = 50_000_000
    install()
    import onnxruntime

    from honed.ort import routing

    routing._ALLOWANCE = 10_000.0
    routing._process.account.begun = -(10**18)
    return onnxruntime


def model(scale: float = 1.0, *, location: str = "", folder: Path = Path()) -> bytes:
    """y = relu(x w) + bias, of any number of rows; the weights lie in a file `location`, if that is given."""
    weights = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) * np.float32(scale)
    known = [numpy_helper.from_array(weights, "w")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Relu", ["product"], ["positive"]),
        helper.make_node("Add", ["positive", "bias"], ["y"]),
    ]
    ends = {
        "x": helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPES),
        "bias": helper.make_tensor_value_info("bias", TensorProto.FLOAT, []),
        "y": helper.make_tensor_value_info("y", TensorProto.FLOAT, SHAPES),
    }
    graph = helper.make_graph(nodes, "g", [ends["x"], ends["bias"]], [ends["y"]], initializer=known)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if location:
        onnx.external_data_helper.convert_model_to_external_data(made, location=location, size_threshold=0)
        onnx.external_data_helper.write_external_data_tensors(made, str(folder))
    return bytes(made.SerializeToString())


def feed(rows: int = 8, bias: float = 0.5) -> dict[str, Any]:
    """Inputs of so many rows."""
    x = np.linspace(-2, 2, rows * SIZE, dtype=np.float32).reshape(rows, SIZE)
    return {"x": x, "bias": np.array(bias, np.float32)}


def routes(session: Any) -> list[Any]:
    """The routes of a session."""
    return [kind.route for kind in session._honed._kinds.values()] if session._honed else []


def until_routed(session: Any, given: Mapping[str, Any], names: Sequence[str] | None = None) -> Any:
    """Run until runs of this kind are routed; return the answer of one that was."""
    end = time.monotonic() + MOST_SECONDS
    while time.monotonic() < end:
        before = {id(route): route.routed_runs for route in routes(session)}
        found = session.run(names, given)
        if any(r.state == "routed" and r.routed_runs > before.get(id(r), 0) for r in routes(session)):
            return found
        time.sleep(0.02)
    raise AssertionError([(route.state, route.why) for route in routes(session)])
