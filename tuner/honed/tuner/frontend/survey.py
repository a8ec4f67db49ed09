"""Finds the nodes of a graph that cannot be compiled, with reasons, and the types and shapes of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

import onnx
from onnx import helper, numpy_helper, shape_inference

from honed.onnxfile.contrib_schemas import with_stand_ins
from honed.onnxfile.reading import reads

from .builder import SHAPE_DATA_LIMIT, static_shape
from .signature import StaticTensorSpec
from .values import Array, Item, NodeRefused, Reasons, Unknown, Value, numpy_dtype
from .walk import Scope, Walker

# Substitutes for a size that depends on the data; odd ones, which no model is likely to have
_SIZES = 97, 131
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


@dataclass(frozen=True, slots=True)
class Learnt:
    """A value's properties in ONNX Runtime: NumPy dtype, inferred shape, and the shape in one run."""

    dtype: str
    shape: tuple[int, ...] | None  # -1 is a dynamic size; None: not even the rank is known
    observed: tuple[int, ...] | None  # Shape in one run; None: the model did not run

    def corrects(self, kind: onnx.TypeProto | None) -> onnx.TypeProto | None:
        """Return the type by ONNX's inference, where it is possible.

        Sizes that a run did not have are dynamic.
        """
        if kind is not None and not kind.HasField("tensor_type"):
            return kind
        tensor = kind.tensor_type if kind is not None and _has_known_rank(kind) else None
        shape = self.shape if tensor is None else _sizes(tensor)
        if self.observed is not None and (shape is None or len(shape) != len(self.observed)):
            shape = (-1,) * len(self.observed)
        if shape is None:
            return kind
        if self.observed is not None:
            shape = tuple(
                size if size == observed else -1 for size, observed in zip(shape, self.observed, strict=True)
            )
        return StaticTensorSpec(name="", dtype=self.dtype, shape=shape).type_proto()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSurvey:
    """A model with static inputs. `types` are of values of known type; -1 is a size that depends on data.

    `observed` are the types with such sizes as 1 where a run had 1, as of batches: to estimate work with.
    """

    inputs: tuple[StaticTensorSpec, ...]
    nodes: tuple[SurveyedNode, ...]
    types: Mapping[str, StaticTensorSpec]
    observed: Mapping[str, StaticTensorSpec]
    constants: Mapping[str, Array]


def survey(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    learnt: Mapping[str, Learnt] = MappingProxyType({}),
    assumed: int | None = None,
    *,
    as_observed: bool = False,
    unbuilt: Mapping[str, str] = MappingProxyType({}),
) -> NodeSurvey | None:
    """Judge every node of a checked model; None where its inputs are refused already.

    `learnt` are ONNX Runtime's types of values that are not compiled. With `assumed`, sizes that depend on
    the data are replaced by that number, or by those of its run with `as_observed`, which shows what could be
    compiled if they were known. `unbuilt` maps values of the normalised graph to the reason why no kernel for
    them can be built.

    Raises ModelRefused where it grows beyond all bounds, InvalidArgument where `shapes` contradicts it.
    """
    found = Reasons()
    surveyor = _Surveyor(model, shapes, found)
    if found.general:
        return None
    surveyor.learnt, surveyor.assumed, surveyor.as_observed = learnt, assumed, as_observed
    surveyor.unbuilt = unbuilt
    surveyor.nodes, surveyor.open = [], {}
    surveyor.initial = {tensor.name: tensor for tensor in model.graph.initializer}
    surveyor.walk()
    values = {name: item for name, item in surveyor.scope.items() if isinstance(item, Value)}
    constants = {name: value.data for name, value in values.items() if value.data is not None}
    types = _types(values, surveyor.open)
    return NodeSurvey(
        inputs=surveyor.inputs,
        nodes=tuple(surveyor.nodes),
        types=types,
        observed={name: _as_observed(spec, learnt.get(name)) for name, spec in types.items()},
        constants=constants,
    )


class _Surveyor(Walker):
    """A walker that continues where a node of the main graph is refused."""

    initial: Mapping[str, onnx.TensorProto]
    learnt: Mapping[str, Learnt]
    assumed: int | None
    as_observed: bool
    unbuilt: Mapping[str, str]
    nodes: list[SurveyedNode]
    open: dict[str, onnx.TypeProto | None]  # Types of values that are not static, if known

    def _visit(self, node: onnx.NodeProto, scope: Scope, opsets: Mapping[str, int]) -> None:
        if self._depth:
            super()._visit(node, scope, opsets)
            return
        given = tuple(dict.fromkeys(reads(node)))
        why = self._judge(node, given, scope, opsets)
        folded = not why and all(_constant(scope.get(name)) for name in node.output if name)
        self.nodes.append(SurveyedNode(index=len(self.nodes), node=node, reads=given, why=why, folded=folded))

    def _judge(
        self, node: onnx.NodeProto, reads: Sequence[str], scope: Scope, opsets: Mapping[str, int]
    ) -> str:
        """Return why a node cannot be compiled, or "".

        If it can be, its outputs are in the scope or among the open ones. Outputs without elements are
        constants, and a node that makes no others need not be compiled.
        """
        why = BEHIND if any(name in self.open for name in reads) else self._try_emit(node, scope, opsets)
        if not why:
            return ""
        for name, kind in zip(node.output, self._infer_outputs(node, reads, scope), strict=True):
            if not name:
                continue
            known = self.learnt.get(name)
            if known is not None:
                kind = known.corrects(kind)
            if self.assumed is not None and _has_known_rank(kind):
                observed = known.observed if known is not None and self.as_observed else None
                kind = _with_sizes(kind, self.assumed, observed)
            shape = static_shape(kind)
            scope[name] = Unknown()
            if shape is None or kind is None:
                self.open[name] = kind
                continue
            try:
                dtype = numpy_dtype(kind.tensor_type.elem_type)
                scope[name] = self.builder.input(self.builder.unique(f"{name}/surveyed"), dtype, shape)
            except NodeRefused:
                self.open[name] = kind
        return "" if all(_constant(scope[name]) for name in node.output if name) else why

    def _try_emit(self, node: onnx.NodeProto, scope: Scope, opsets: Mapping[str, int]) -> str:
        """Emit a node; where that is impossible, emit nothing and return why."""
        kept = len(self.builder.nodes)
        reasons, self._reasons = self._reasons, Reasons()
        try:
            super()._visit(node, scope, opsets)
            if whys := self._reasons.whys():
                why = whys[0]
            elif any(isinstance(scope[name], Unknown) for name in node.output if name):
                why = f"{node.op_type}: it works on what honed does not carry"
            else:
                made = (*node.output, *(name for one in self.builder.nodes[kept:] for name in one.output))
                unbuilt = next((self.unbuilt[name] for name in made if name in self.unbuilt), "")
                if not unbuilt:
                    return ""
                why = f"{node.op_type}: {unbuilt}"
        finally:
            self._reasons = reasons
        del self.builder.nodes[kept:]
        return why

    def _infer_outputs(
        self, node: onnx.NodeProto, reads: Sequence[str], scope: Scope
    ) -> list[onnx.TypeProto | None]:
        """Return the types that ONNX infers for the outputs.

        Where it infers none for dynamic sizes, return the common part of its answers for two other sizes.
        """
        known = self._infer_with_size(node, reads, scope, None)
        if all(map(_has_known_rank, known)) or not any(self.open.get(name) for name in reads):
            return known
        once, again = (self._infer_with_size(node, reads, scope, size) for size in _SIZES)
        common = map(_common, once, again)
        return [kind if _has_known_rank(kind) else both for kind, both in zip(known, common, strict=True)]

    def _infer_with_size(
        self, node: onnx.NodeProto, reads: Sequence[str], scope: Scope, size: int | None
    ) -> list[onnx.TypeProto | None]:
        """Return the types that ONNX infers for a model of this node alone, with `size` for unknown sizes."""
        graph = helper.make_graph([node], "node", [], [onnx.ValueInfoProto(name=n) for n in node.output if n])
        for name in reads:
            item = scope.get(name)
            if isinstance(item, Value) and item.data is not None and item.size <= SHAPE_DATA_LIMIT:
                graph.initializer.append(numpy_helper.from_array(item.data, name))
            elif isinstance(item, Value):
                graph.input.append(onnx.ValueInfoProto(name=name, type=item.type_proto()))
            elif (kind := self.open.get(name)) is not None:
                kind = kind if size is None else _with_sizes(kind, size)
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
            inferred = shape_inference.infer_shapes(with_stand_ins(model), data_prop=True)
        except Exception:  # noqa: BLE001 - a C++ exception without a Python class of its own
            return [None] * len(node.output)
        known = {v.name: v.type for v in inferred.graph.output if v.type.WhichOneof("value")}
        return [known.get(name) for name in node.output]


def _constant(item: Item | None) -> bool:
    return isinstance(item, Value) and item.data is not None


def _has_known_rank(kind: onnx.TypeProto | None) -> bool:
    """Return whether a type is a tensor's, of known element type and rank, or of no tensor at all."""
    if kind is None or not kind.HasField("tensor_type"):
        return kind is not None
    return bool(kind.tensor_type.elem_type) and bool(kind.tensor_type.HasField("shape"))


def _common(one: onnx.TypeProto | None, other: onnx.TypeProto | None) -> onnx.TypeProto | None:
    """Return a tensor type with the sizes that agree, others dynamic.

    Returns None where the two are not tensors of one rank and element type.
    """
    if one is None or other is None or not (_has_known_rank(one) and _has_known_rank(other)):
        return None
    sizes, others = _sizes(one.tensor_type), _sizes(other.tensor_type)
    if one.tensor_type.elem_type != other.tensor_type.elem_type or len(sizes) != len(others):
        return None
    same = [a if a == b and a >= 0 else None for a, b in zip(sizes, others, strict=True)]
    return helper.make_tensor_type_proto(one.tensor_type.elem_type, same)


def _with_sizes(
    kind: onnx.TypeProto | None, size: int, observed: Sequence[int] | None = None
) -> onnx.TypeProto | None:
    """Return the type with sizes in place of unknown ones: those of `observed`, else `size`."""
    if kind is None or not _has_known_rank(kind) or not kind.HasField("tensor_type"):
        return kind
    tensor = kind.tensor_type
    sizes = _sizes(tensor)
    filled = [
        given if given >= 0 else instead
        for given, instead in zip(sizes, observed or [size] * len(sizes), strict=True)
    ]
    return helper.make_tensor_type_proto(tensor.elem_type, filled)


def _sizes(tensor: onnx.TypeProto.Tensor) -> tuple[int, ...]:
    return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim)


def _as_observed(spec: StaticTensorSpec, learnt: Learnt | None) -> StaticTensorSpec:
    observed = learnt.observed if learnt is not None else None
    if observed is None or len(observed) != len(spec.shape):
        return spec
    return replace(spec, shape=tuple(1 if m == 1 else n for n, m in zip(spec.shape, observed, strict=True)))


def _types(
    values: Mapping[str, Value], open_: Mapping[str, onnx.TypeProto | None]
) -> dict[str, StaticTensorSpec]:
    found = {
        n: StaticTensorSpec(name=n, dtype=value.dtype.name, shape=value.shape) for n, value in values.items()
    }
    for name, kind in open_.items():
        tensor = kind.tensor_type if kind is not None and kind.HasField("tensor_type") else None
        if tensor is not None and tensor.HasField("shape"):
            with suppress(NodeRefused):
                dtype = numpy_dtype(tensor.elem_type)
                found[name] = StaticTensorSpec(name=name, dtype=dtype.name, shape=_sizes(tensor))
    return found
