"""Which nodes of a graph cannot be compiled, and why, and what is known of each value's type and shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import onnx
from onnx import helper, numpy_helper, shape_inference

from .builder import SHAPE_DATA_LIMIT, static_shape
from .canonical import reads
from .load import FrontendLimits
from .reasons import Reasons
from .signature import TensorSpec
from .values import Array, NodeRefused, Unknown, Value, numpy_dtype
from .walk import Scope, Walker, begin

BEHIND = "what follows on those has a shape that depends on the data"


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedNode:
    """A node of the main graph by its place there. `why` it cannot be compiled, or "".

    `reads` has everything that it takes from the main graph, in its subgraphs, too; `folded`: all that it
    makes is constant.
    """

    index: int
    node: onnx.NodeProto
    reads: tuple[str, ...]
    why: str
    folded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSurvey:
    """A model with static inputs. `types` are of values of known type; -1 is a size that depends on data."""

    inputs: tuple[TensorSpec, ...]
    nodes: tuple[SurveyedNode, ...]
    types: Mapping[str, TensorSpec]
    constants: Mapping[str, Array]
    notes: tuple[str, ...]


def survey(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    learnt: Mapping[str, TensorSpec] = MappingProxyType({}),
    assumed: int | None = None,
) -> NodeSurvey | None:
    """Judge every node of a checked model; None where its inputs are refused already.

    `learnt` are types of values that ONNX does not know. Sizes that depend on the data are taken to be
    `assumed`, which tells what could be compiled if they were known.

    Raises ModelRefused where it grows beyond all bounds, InvalidArgument where `shapes` contradicts it.
    """
    limits, found = FrontendLimits(), Reasons()
    start = begin(model, shapes, limits, found)
    if start.refused or found.general:
        return None
    surveyor, scope = _Surveyor(start, found, limits.fold_bytes), start.scope
    surveyor.model, surveyor.learnt, surveyor.assumed = model, learnt, assumed
    surveyor.initial = {tensor.name: tensor for tensor in model.graph.initializer}
    surveyor.graph(model.graph, scope, start.opsets)
    constants = {n: v.data for n, v in scope.items() if isinstance(v, Value) and v.data is not None}
    return NodeSurvey(
        inputs=start.inputs,
        nodes=tuple(surveyor.found),
        types=_types(scope, surveyor.open),
        constants=constants,
        notes=start.notes,
    )


class _Surveyor(Walker):
    """Goes on where a node of the main graph is refused."""

    model: onnx.ModelProto
    initial: Mapping[str, onnx.TensorProto]
    learnt: Mapping[str, TensorSpec]
    assumed: int | None

    def _nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        scope: Scope,
        opsets: Mapping[str, int],
        attributes: Mapping[str, onnx.AttributeProto],
    ) -> None:
        if self._depth:
            super()._nodes(nodes, scope, opsets, attributes)
            return
        self.found: list[SurveyedNode] = []
        self.open: dict[str, onnx.TypeProto | None] = {}  # types of values that are not static, if known
        for index, node in enumerate(nodes):
            given = tuple(dict.fromkeys(reads(node)))
            why = self._judged(node, given, scope, opsets)
            made = [scope.get(name) for name in node.output if name]
            folded = all(isinstance(item, Value) and item.data is not None for item in made)
            self.found.append(
                SurveyedNode(index=index, node=node, reads=given, why=why, folded=folded and not why)
            )

    def _judged(
        self, node: onnx.NodeProto, given: Sequence[str], scope: Scope, opsets: Mapping[str, int]
    ) -> str:
        """Why a node cannot be compiled, or ""; its outputs are in the scope then, or among those open."""
        why = BEHIND if any(name in self.open for name in given) else self._emitted(node, scope, opsets)
        if not why:
            return ""
        for name, kind in zip(node.output, self._inferred(node, given, scope), strict=True):
            if not name:
                continue
            if name in self.learnt and not _typed(kind):
                kind = self.learnt[name].type_proto()
            if self.assumed is not None and _typed(kind):
                kind = _sized(kind, self.assumed)
            shape = static_shape(kind)
            scope[name] = Unknown()
            if shape is None or kind is None:
                self.open[name] = kind
                continue
            try:
                dtype = numpy_dtype(kind.tensor_type.elem_type)
            except NodeRefused:
                self.open[name] = kind
                continue
            value = Value(self._builder.unique(f"{name}/surveyed"), dtype, shape)
            self._builder.values[value.name] = value
            scope[name] = value
        return why

    def _emitted(self, node: onnx.NodeProto, scope: Scope, opsets: Mapping[str, int]) -> str:
        """Emit a node; where it cannot be, why, and nothing is emitted."""
        kept = len(self._builder.nodes)
        reasons, self._reasons = self._reasons, Reasons()
        try:
            super()._nodes([node], scope, opsets, {})
            if self._reasons.count():
                why = self._reasons.whys()[0]
            elif any(isinstance(scope[name], Unknown) for name in node.output if name):
                why = f"{node.op_type}: it works on what honed does not carry"
            else:
                return ""
        finally:
            self._reasons = reasons
        del self._builder.nodes[kept:]
        return why

    def _inferred(
        self, node: onnx.NodeProto, given: Sequence[str], scope: Scope
    ) -> list[onnx.TypeProto | None]:
        """ONNX's types of the outputs, by a model of this node alone."""
        graph = helper.make_graph([node], "node", [], [onnx.ValueInfoProto(name=n) for n in node.output if n])
        for name in given:
            item = scope.get(name)
            if isinstance(item, Value) and item.data is not None and item.size <= SHAPE_DATA_LIMIT:
                graph.initializer.append(numpy_helper.from_array(item.data, name))
            elif isinstance(item, Value):
                graph.input.append(onnx.ValueInfoProto(name=name, type=item.type_proto()))
            elif (kind := self.open.get(name)) is not None:
                graph.input.append(onnx.ValueInfoProto(name=name, type=kind))
            elif name in self.initial:
                graph.initializer.append(self.initial[name])
            else:
                return [None] * len(node.output)
        model = helper.make_model(
            graph,
            opset_imports=self.model.opset_import,
            functions=self.model.functions,
            ir_version=self.model.ir_version,
        )
        try:
            inferred = shape_inference.infer_shapes(model, data_prop=True)
        except Exception:  # noqa: BLE001 - a C++ exception without a Python class of its own
            return [None] * len(node.output)
        known = {v.name: v.type for v in inferred.graph.output if v.type.WhichOneof("value")}
        return [known.get(name) for name in node.output]


def _typed(kind: onnx.TypeProto | None) -> bool:
    """Whether it is a tensor of known type and number of dimensions, or none at all."""
    if kind is None or not kind.HasField("tensor_type"):
        return kind is not None
    return bool(kind.tensor_type.elem_type) and bool(kind.tensor_type.HasField("shape"))


def _sized(kind: onnx.TypeProto | None, size: int) -> onnx.TypeProto | None:
    """A tensor of that size along each dimension whose own is not known."""
    if kind is None or not kind.HasField("tensor_type"):
        return kind
    tensor = kind.tensor_type
    shape = [d.dim_value if d.HasField("dim_value") else size for d in tensor.shape.dim]
    return helper.make_tensor_type_proto(tensor.elem_type, shape)


def _types(scope: Scope, open_: Mapping[str, onnx.TypeProto | None]) -> dict[str, TensorSpec]:
    found: dict[str, TensorSpec] = {}
    for name, item in scope.items():
        if isinstance(item, Value):
            found[name] = TensorSpec(name=name, dtype=item.dtype.name, shape=item.shape)
    for name, kind in open_.items():
        tensor = kind.tensor_type if kind is not None and kind.HasField("tensor_type") else None
        if tensor is None or not tensor.HasField("shape"):
            continue
        try:
            dtype = numpy_dtype(tensor.elem_type)
        except NodeRefused:
            continue
        shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
        found[name] = TensorSpec(name=name, dtype=dtype.name, shape=shape)
    return found
