"""Reads facts from an ONNX model in its original form: inputs, nodes in order, constants, shapes.

ONNX's inference follows shapes that the graph computes (Shape, Gather, Concat, Reshape) in the newest
operator sets only. So those small computations are done here, and inference is asked again, until nothing is
learnt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper, inliner, numpy_helper, shape_inference

from honed.onnxfile.contrib_schemas import with_stand_ins
from honed.onnxfile.reading import nodes, reads
from honed.protocol.errors import InvalidArgument, ModelRefused
from honed.runtime.dtypes import DTYPES

# Operators whose result has the least and the greatest element of their first input, where that is constant.
_SPREADING = {"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"}
_MAX_CONSTANT = 4096  # Elements; larger initializers never describe shapes or ranges


# Operators whose outputs hold values of these inputs, moved, cut or converted (None: of all inputs).
MOVING: dict[str, tuple[int, ...] | None] = {
    "Cast": (0,), "CastLike": (0,), "Concat": None, "DepthToSpace": (0,), "Dropout": (0,), "Expand": (0,),
    "Flatten": (0,), "Gather": (0,), "Identity": (0,), "Pad": (0,), "Reshape": (0,), "Slice": (0,),
    "SpaceToDepth": (0,), "Split": (0,), "Squeeze": (0,), "Tile": (0,), "Transpose": (0,), "Unsqueeze": (0,),
    "Where": (1, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedValue:
    """A value with known type and shape: NumPy's name of the type, and static sizes."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that may be changed."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its own functions replaced by their nodes, where they are called."""
    return inliner.inline_local_functions(model) if model.functions else model


def bind_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Return a copy of `model` whose inputs have these static shapes.

    Shapes that the file states for other values are dropped: they may name the dimensions bound here.
    """
    bound = copy_model(model)
    for value in bound.graph.input:
        shape = shapes.get(value.name)
        if shape is None:
            continue
        del value.type.tensor_type.shape.dim[:]
        for extent in shape:
            value.type.tensor_type.shape.dim.add().dim_value = extent
    for value in bound.graph.output:
        value.type.tensor_type.ClearField("shape")
    del bound.graph.value_info[:]
    return bound


def exact(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without permission for ONNX Runtime to quantise products' operands (`accuracy_level`).

    The compiler takes no such leave: products are as exact as their types. Returns the model itself where it
    gives none.
    """

    def level(node: onnx.NodeProto) -> int:
        return attribute(node, "accuracy_level", 0) if node.op_type == "MatMulNBits" else 0

    if not any(level(node) for node in nodes(model.graph.node)):
        return model
    found = copy_model(model)
    for node in nodes(found.graph.node):
        if level(node):
            kept = [each for each in node.attribute if each.name != "accuracy_level"]
            del node.attribute[:]
            node.attribute.extend(kept)
    return found


def inputs(model: onnx.ModelProto) -> tuple[TypedValue, ...]:
    """Return the inputs a caller must give, in order.

    An input with an initializer is a constant and left out. Raises InvalidArgument for an input that is no
    tensor, of a type honed does not carry, or whose shape is not static.
    """
    fixed = {t.name for t in model.graph.initializer}
    return tuple(_require_typed(v) for v in model.graph.input if v.name not in fixed)


def input_names(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of the inputs a caller must provide, of any type and shape, in order."""
    fixed = {t.name for t in model.graph.initializer}
    return tuple(v.name for v in model.graph.input if v.name not in fixed)


def outputs(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the names of the outputs, in order."""
    return tuple(v.name for v in model.graph.output)


def rebuild_model(
    model: onnx.ModelProto,
    made: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """Return a model of other nodes, with the constants that they need."""
    read = {value.name for value in outputs}.union(*map(reads, made))
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    graph = helper.make_graph(
        made,
        model.graph.name,
        [value for value in inputs if value.name in read or value.name not in constants],
        outputs,
        [tensor for name, tensor in constants.items() if name in read],
    )
    graph.sparse_initializer.extend(t for t in model.graph.sparse_initializer if t.values.name in read)
    return helper.make_model(graph, ir_version=model.ir_version, opset_imports=list(model.opset_import))


def varying(model: onnx.ModelProto, constant: Collection[str] = ()) -> set[str]:
    """Return the values of the main graph that depend on inputs.

    Results of the operators `constant` count as independent.
    """
    fixed = {tensor.name for tensor in model.graph.initializer}
    found = {value.name for value in model.graph.input} - fixed
    for node in model.graph.node:
        reads = {name for inner in nodes([node]) for name in inner.input}
        if node.op_type not in constant and reads & found:
            found.update(name for name in node.output if name)
    return found


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the small constants of the main graph by name: initializers, and tensors of Constant nodes."""
    found = {t.name: t for t in model.graph.initializer}
    for node in model.graph.node:
        held = [a.t for a in node.attribute if a.name == "value"] if node.op_type == "Constant" else []
        if held:
            found[node.output[0]] = held[0]
    return {
        name: numpy_helper.to_array(tensor)
        for name, tensor in found.items()
        if np.prod(tensor.dims, dtype=np.int64) <= _MAX_CONSTANT and not tensor.external_data
    }


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return an integer attribute, or its default."""
    return next((a.i for a in node.attribute if a.name == name), default)


def label(node: onnx.NodeProto) -> str:
    """Return a label for a node: its name, or where it has none, the first value it makes."""
    return node.name or next((o for o in node.output if o), "") or node.op_type


def numpy_name(element: int) -> str | None:
    """Return NumPy's name of an ONNX element type; None where honed does not carry it."""
    try:
        name = helper.tensor_dtype_to_np_dtype(element).name
    except KeyError:
        return None
    return name if is_carried(name) else None


def is_carried(name: str) -> bool:
    """Return whether honed carries the element type NumPy calls `name`."""
    return any(d.name == name for d in DTYPES)


def _require_typed(info: onnx.ValueInfoProto) -> TypedValue:
    value = of_info(info)
    if value is not None:
        return value
    if not info.type.HasField("tensor_type") or numpy_name(info.type.tensor_type.elem_type) is None:
        raise InvalidArgument(f"input {info.name!r} is not a tensor of a type honed carries; export it anew")
    raise InvalidArgument(f"input {info.name!r} has no static shape; give one with --shape {info.name}=...")


def of_info(info: onnx.ValueInfoProto) -> TypedValue | None:
    """Return the declared type and shape.

    Returns None where the shape is not static or honed does not carry the type.
    """
    tensor = info.type.tensor_type
    name = numpy_name(tensor.elem_type)
    if name is None or not tensor.HasField("shape"):
        return None
    dims = tensor.shape.dim
    if not all(d.HasField("dim_value") and d.dim_value >= 0 for d in dims):
        return None
    return TypedValue(name=info.name, dtype=name, shape=tuple(d.dim_value for d in dims))


def info(value: TypedValue, name: str) -> onnx.ValueInfoProto:
    """Return the declaration of a value under a name, as ONNX writes it."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    return helper.make_tensor_value_info(name, element, value.shape)


def of_tensor(tensor: onnx.TensorProto) -> TypedValue | None:
    """Return the type and shape of a constant; None for a type honed does not carry."""
    name = numpy_name(tensor.data_type)
    return None if name is None else TypedValue(name=tensor.name, dtype=name, shape=tuple(tensor.dims))


_ROUNDS = 16
_MOST_FLOATS = 64  # Floats that shapes may be computed with: scales of a Resize, not weights
# Operators that shapes are computed with; none makes more elements than it is given.
_FOLDED = {
    "Add", "Cast", "Concat", "Div", "Gather", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Sub",
    "Unsqueeze",
}  # fmt: skip


def infer(model: onnx.ModelProto) -> dict[str, TypedValue]:
    """Return every value of the main graph whose type and static shape can be inferred, by name.

    Raises ModelRefused where the shapes the model states contradict each other.
    """
    for _ in range(_ROUNDS):
        known = _infer_types(model)
        if all(name in known for n in model.graph.node for name in n.output if name):
            break
        learnt = _compute_values(model, known)
        if not learnt:
            break
        model = _with_constants(model, learnt)
    return known


def _infer_types(model: onnx.ModelProto) -> dict[str, TypedValue]:
    try:
        graph = shape_inference.infer_shapes(with_stand_ins(model), data_prop=True).graph
    except (shape_inference.InferenceError, ValueError) as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
        raise ModelRefused(f"shapes cannot be inferred ({reason}); check the model") from error
    known = {t.name: of_tensor(t) for t in graph.initializer}
    for info in (*graph.input, *graph.value_info, *graph.output):
        value = of_info(info)
        if value is not None:
            known[info.name] = value
    return {name: value for name, value in known.items() if value is not None}


def _compute_values(model: onnx.ModelProto, types: Mapping[str, TypedValue]) -> dict[str, np.ndarray]:
    """Return the values of Shape nodes, of integers computed from them, and of scales, by name."""
    fixed = constants(model)
    learnt: dict[str, np.ndarray] = {}
    for node in model.graph.node:
        inputs = [name for name in node.input if name]
        if node.op_type == "Shape" and node.input[0] in types:
            shape = types[node.input[0]].shape
            part = shape[slice(attribute(node, "start", 0), attribute(node, "end", len(shape)))]
            learnt[node.output[0]] = np.array(part, np.int64)
        elif node.op_type in _FOLDED and inputs and all(n in fixed or n in learnt for n in inputs):
            value = _fold(node, {n: learnt.get(n, fixed.get(n)) for n in inputs}, model)
            if value is not None:
                learnt[node.output[0]] = value
    return learnt


def _fold(
    node: onnx.NodeProto, inputs: Mapping[str, np.ndarray | None], model: onnx.ModelProto
) -> np.ndarray | None:
    """Return the value of one node; None where it decides no shapes, or cannot be computed."""
    values = {name: value for name, value in inputs.items() if value is not None}
    if not all(map(_decides_shapes, values.values())):
        return None
    value = evaluate_node(node, values, model.opset_import)
    return value if isinstance(value, np.ndarray) and _decides_shapes(value) else None


def evaluate_node(
    node: onnx.NodeProto, values: Mapping[str, np.ndarray], opsets: Iterable[onnx.OperatorSetIdProto]
) -> Any:
    """Return the value of a node of one output by ONNX's evaluator; None where that cannot compute it."""
    from onnx.reference import ReferenceEvaluator  # Slow to import, and children do not need it

    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in values.items()
    ]
    graph = helper.make_graph([node], "node", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    try:
        evaluator = ReferenceEvaluator(helper.make_model(graph, opset_imports=list(opsets)))
        (value,) = evaluator.run(None, dict(values))
    except Exception:  # noqa: BLE001  the node is untrusted, and nothing is lost by not knowing its value
        return None
    return value


def _decides_shapes(value: np.ndarray) -> bool:
    return value.dtype.kind in "iu" or (value.dtype.kind == "f" and value.size <= _MOST_FLOATS)


def _with_constants(model: onnx.ModelProto, learnt: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Return a copy with constants in place of the nodes whose values are known."""
    copy = copy_model(model)
    kept = [node for node in copy.graph.node if learnt.keys().isdisjoint(node.output)]
    del copy.graph.node[:]
    copy.graph.node.extend(kept)
    copy.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in learnt.items())
    return copy


class SourceGraph:
    """A model as given, without functions of its own, and facts about it, each computed once."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = inline_functions(model)

    @cached_property
    def nodes(self) -> list[onnx.NodeProto]:
        """Every node, as `nodes` yields them."""
        return list(nodes(self.model.graph.node))

    @cached_property
    def constants(self) -> dict[str, np.ndarray]:
        """The small constants of the main graph by name."""
        return constants(self.model)

    @cached_property
    def known(self) -> dict[str, TypedValue]:
        """The values of the main graph with an inferred static shape, by name; raises as `infer`."""
        return infer(self.model)

    @cached_property
    def varying(self) -> set[str]:
        """The values of the main graph that depend on inputs."""
        return varying(self.model)

    @cached_property
    def consumers(self) -> dict[str, list[tuple[onnx.NodeProto, int]]]:
        """The nodes that read a value, subgraphs' too, each with the position of the value."""
        found: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in self.nodes:
            for position, name in enumerate(node.input):
                found.setdefault(name, []).append((node, position))
        return found

    @cached_property
    def ends(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest element of each value that depends on no input, by name."""
        found = {
            name: (float(value.min()), float(value.max()))
            for name, value in self.constants.items()
            if value.size and value.dtype.kind in "iufb"
        }
        for node in self.nodes:
            if node.op_type in _SPREADING and node.input[0] in found:
                found[node.output[0]] = found[node.input[0]]
            elif node.op_type == "Range" and (made := self.known.get(node.output[0])) and made.shape[0]:
                first = found.get(node.input[0], (0.0, 0.0))[0]
                found[node.output[0]] = (first, first + made.shape[0] - 1)
        return found

    @cached_property
    def shares(self) -> set[str]:
        """The values that a function into 0..1 made, moved or not."""
        found: set[str] = set()
        for node in self.nodes:
            moved = node.op_type in MOVING and node.input[0] in found
            if moved or node.op_type in ("Sigmoid", "Softmax", "HardSigmoid"):
                found.update(node.output)
        return found
