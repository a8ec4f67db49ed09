"""The type and static shape of every value of a model whose inputs have static shapes.

ONNX's inference follows shapes that the graph computes (Shape, Gather, Concat, Reshape) in the newest
operator sets only. So those small computations are done here, and inference is asked again, until nothing is
learnt.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from honed.protocol.errors import ModelRefused
from honed.tuner.standins import with_stand_ins

from . import graphs
from .graphs import TypedValue

_ROUNDS = 16
_MOST_FLOATS = 64  # that shapes are computed with: scales of a Resize, not weights
# Operators that shapes are computed with; none makes more elements than it is given.
_FOLDED = {
    "Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Sub",
    "Unsqueeze",
}  # fmt: skip


def infer(model: onnx.ModelProto) -> dict[str, TypedValue]:
    """Every value of the main graph whose type and static shape can be found out, by name.

    Raises ModelRefused where the shapes the model states contradict each other.
    """
    for _ in range(_ROUNDS):
        known = _inferred(model)
        if all(name in known for n in model.graph.node for name in n.output if name):
            break
        learnt = _computed(model, known)
        if not learnt:
            break
        model = _with_constants(model, learnt)
    return known


def _inferred(model: onnx.ModelProto) -> dict[str, TypedValue]:
    try:
        graph = shape_inference.infer_shapes(with_stand_ins(model), data_prop=True).graph
    except (shape_inference.InferenceError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ModelRefused(f"shapes cannot be inferred ({reason}); check the model") from error
    known = {t.name: graphs.of_tensor(t) for t in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        value = graphs.of_info(info)
        if value is not None:
            known[info.name] = value
    return {name: value for name, value in known.items() if value is not None}


def _computed(model: onnx.ModelProto, known: Mapping[str, TypedValue]) -> dict[str, np.ndarray]:
    """What Shape nodes, the whole numbers computed from them, and scales come to."""
    constants = graphs.constants(model)
    learnt: dict[str, np.ndarray] = {}
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        if node.op_type == "Shape" and node.input[0] in known:
            shape = known[node.input[0]].shape
            part = shape[slice(graphs.attribute(node, "start", 0), graphs.attribute(node, "end", len(shape)))]
            learnt[node.output[0]] = np.array(part, np.int64)
        elif node.op_type in _FOLDED and inputs and all(n in constants or n in learnt for n in inputs):
            value = _fold(node, {n: learnt.get(n, constants.get(n)) for n in inputs}, model)
            if value is not None:
                learnt[node.output[0]] = value
    return learnt


def _fold(
    node: onnx.NodeProto, given: Mapping[str, np.ndarray | None], model: onnx.ModelProto
) -> np.ndarray | None:
    """The value of one node; None where it is no number that decides shapes, or cannot be computed."""
    values = {name: value for name, value in given.items() if value is not None}
    if not all(map(_decides_shapes, values.values())):
        return None
    graph = helper.make_graph(
        [node],
        "folded",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in values.items()
        ],
        [onnx.ValueInfoProto(name=node.output[0])],
    )
    single = helper.make_model(graph, ir_version=model.ir_version, opset_imports=list(model.opset_import))
    try:
        (value,) = ReferenceEvaluator(single).run(None, dict(values))
    except Exception:  # noqa: BLE001  the node is untrusted, and nothing is lost by not knowing its value
        return None
    return value if isinstance(value, np.ndarray) and _decides_shapes(value) else None


def _decides_shapes(value: np.ndarray) -> bool:
    return value.dtype.kind in "iu" or (value.dtype.kind == "f" and value.size <= _MOST_FLOATS)


def _with_constants(model: onnx.ModelProto, learnt: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A copy with constants in place of the nodes that make what was learnt."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    kept = [node for node in copy.graph.node if learnt.keys().isdisjoint(node.output)]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in learnt.items())
    return copy
