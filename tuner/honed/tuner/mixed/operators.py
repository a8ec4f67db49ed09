"""Evaluates single nodes: with ONNX Runtime where it can, else with ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from honed.tuner.halves import Array

Run = Callable[[Sequence[Array]], Array]  # of the inputs that are there, in order
_HALF, _SINGLE = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT


class Operators:
    """Makes evaluators of nodes; equal nodes share one."""

    def __init__(self, model: onnx.ModelProto, types: Mapping[str, int], threads: int) -> None:
        """`types` are the element types of all values by name."""
        self._model = model
        self._types = types
        self._threads = threads
        self._made: dict[bytes, Run] = {}

    def of(self, node: onnx.NodeProto) -> Run:
        """What evaluates a node; the type of its result does not depend on that of its operands."""
        return self._evaluator(_alone(node, self._types))

    def halved(self) -> Callable[[Array], Array]:
        """What rounds float32 to fp16 and gives it as float32; what is too large becomes infinite.

        ONNX Runtime does so several times as fast as NumPy.
        """
        nodes = [
            helper.make_node("Cast", ["input"], ["half"], to=_HALF),
            helper.make_node("Cast", ["half"], ["output"], to=_SINGLE),
        ]
        ends = [[helper.make_tensor_value_info(name, _SINGLE, None)] for name in ("input", "output")]
        run = self._evaluator(helper.make_graph(nodes, "graph", *ends))
        return lambda array: run([array])

    def _evaluator(self, graph: onnx.GraphProto) -> Run:
        model = helper.make_model(
            graph, ir_version=self._model.ir_version, opset_imports=list(self._model.opset_import)
        )
        key = model.SerializeToString(deterministic=True)
        if key not in self._made:
            self._made[key] = _onnxruntime(key, self._threads) or _reference(model)
        return self._made[key]


def _alone(node: onnx.NodeProto, types: Mapping[str, int]) -> onnx.GraphProto:
    """A graph of one node, whose values have names that say nothing and no shapes."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = "node"
    given = []
    for index, name in enumerate(node.input):
        if name:
            copy.input[index] = f"input_{index}"
            given.append(helper.make_tensor_value_info(f"input_{index}", types[name], None))
    copy.output[0] = "output"
    return helper.make_graph(
        [copy], "graph", given, [helper.make_tensor_value_info("output", types[node.output[0]], None)]
    )


def _onnxruntime(model: bytes, threads: int) -> Run | None:
    """None where it is not installed or does not know the operator for these types."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001  it has no common class for what it does not implement
        return None
    names = [i.name for i in session.get_inputs()]
    return lambda given: np.asarray(session.run(None, dict(zip(names, given, strict=True)))[0])


def _reference(model: onnx.ModelProto) -> Run:
    evaluator = ReferenceEvaluator(model)
    names = [i.name for i in model.graph.input]

    def run(given: Sequence[Array]) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(evaluator.run(None, dict(zip(names, given, strict=True)))[0])

    return run
