"""Walking a source graph node by node: fold, rewrite, expand functions and branches, collect refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from honed.protocol.errors import ModelRefused

from . import (
    reasons,
    rules,  # noqa: F401 - importing them registers them
)
from .builder import Builder, evaluate, infer, schema, static_shape, swells, worth_folding
from .call import RULES, Call
from .flow import FLOW, MAX_BODIES, flow, graph_of
from .load import FrontendLimits, check_expansion
from .partnodes import NO_PARTS, PART_DOMAIN, Parts, part_values
from .signature import TensorSpec, bind_inputs
from .values import Array, Item, Listing, NodeRefused, Unknown, Value

Scope = dict[str, Item]
MAX_DEPTH = 32  # functions within functions, and branches within branches
MAX_NODES = 200_000  # in the normalised graph
MAX_STEPS = 300_000  # source nodes visited, those in functions once for each call
# Operators whose output shape only evaluation can tell, but is bounded by their inputs' size.
_SHAPED_BY_VALUES = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit"})
_SEQUENCES = frozenset(
    {"SequenceConstruct", "SequenceEmpty", "SequenceAt", "SequenceErase", "SequenceInsert", "SequenceLength"}
    | {"SplitToSequence", "ConcatFromSequence", "SequenceMap", "Optional", "OptionalGetElement"}
    | {"OptionalHasElement", "If", "Loop", "Scan"}
)


# What a rule's arithmetic raises on nodes that pass ONNX's checker and yet make no sense.
_MISFITS = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, MemoryError, RecursionError)


@dataclass(frozen=True, slots=True)
class Start:
    """A model as its walk begins: a builder that has its inputs, with static shapes."""

    inputs: tuple[TensorSpec, ...]
    notes: tuple[str, ...]
    refused: frozenset[str]  # inputs
    builder: Builder
    scope: Scope
    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str], onnx.FunctionProto]


def begin(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    limits: FrontendLimits,
    found: reasons.Reasons,
) -> Start:
    """Bind the inputs; raises ModelRefused where the model grows beyond all bounds, and as `bind_inputs`."""
    check_expansion(model, MAX_STEPS)
    specs, notes, refused = bind_inputs(model, shapes, found)
    builder = Builder(
        [v.name for v in (*model.graph.input, *model.graph.output)],
        fold_limit_bytes=limits.fold_bytes,
        tensor_limit_bytes=limits.tensor_bytes,
        constant_limit_bytes=limits.constant_bytes,
    )
    scope: Scope = {name: Unknown() for name in refused}
    for spec in specs:
        if spec.name not in refused:
            scope[spec.name] = builder.input(spec.name, spec.numpy, spec.shape)
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import} or {"": 1}
    functions = {(f.domain, f.name): f for f in model.functions}
    return Start(specs, notes, refused, builder, scope, opsets, functions)


class Walker:
    """Rebuilds source graphs in a Builder, at its opset."""

    def __init__(
        self,
        start: Start,
        found: reasons.Reasons,
        fold_limit_bytes: int,
        parts: Parts = NO_PARTS,
    ) -> None:
        """`parts` are what the CPU engine runs, as nodes of PART_DOMAIN have it."""
        self._parts = parts
        self._builder = start.builder
        self._functions = start.functions
        self._reasons = found
        self._fold_limit = fold_limit_bytes
        self._depth = 0
        self._steps = 0
        self._bodies = 0

    def graph(self, graph: onnx.GraphProto, scope: Scope, opsets: Mapping[str, int]) -> list[Item]:
        """Add a graph's nodes; `scope` holds what it sees from outside. Returns its outputs."""
        for tensor in graph.initializer:
            scope[tensor.name] = self._initialiser(tensor.name, tensor, numpy_helper.to_array)
        for sparse in graph.sparse_initializer:
            scope[sparse.values.name] = self._initialiser(sparse.values.name, sparse, _dense)
        self._nodes(graph.node, scope, opsets, {})
        return [scope.get(output.name, Unknown()) for output in graph.output]

    def _initialiser(self, name: str, proto: Any, read: Callable[[Any], Array]) -> Item:
        try:
            return self._builder.constant(read(proto), hint=name)
        except (NodeRefused, *_MISFITS) as error:
            self._reasons.general.append(f"initialiser {name!r}: {' '.join(str(error).split())}")
            return Unknown()

    def _nodes(
        self,
        nodes: Sequence[onnx.NodeProto],
        scope: Scope,
        opsets: Mapping[str, int],
        attributes: Mapping[str, onnx.AttributeProto],
    ) -> None:
        for node in nodes:
            bound = _bind_attributes(node, attributes)
            domain = "" if bound.domain == "ai.onnx" else bound.domain
            self._builder.scope = bound.name or next((o for o in bound.output if o), bound.op_type)
            try:
                items = self._node(bound, domain, opsets, scope)
            except NodeRefused as refusal:
                self._reasons.add(bound, domain, opsets.get(domain, 0), str(refusal))
                items = []
            except _MISFITS as error:
                text = f"its attributes and inputs do not fit together ({type(error).__name__}: {error})"
                self._reasons.add(bound, domain, opsets.get(domain, 0), " ".join(text.split())[:300])
                items = []
            for index, name in enumerate(node.output):
                if name:
                    scope[name] = items[index] if index < len(items) else Unknown()

    def _node(
        self, node: onnx.NodeProto, domain: str, opsets: Mapping[str, int], scope: Scope
    ) -> Sequence[Item]:
        self._steps += 1
        if len(self._builder.nodes) > MAX_NODES or self._steps > MAX_STEPS:
            raise ModelRefused(f"the model grows beyond {MAX_NODES} nodes when it is expanded; split it")
        opset = opsets.get(domain, 1)
        inputs = tuple(scope.get(name, Unknown()) if name else None for name in node.input)
        if domain == PART_DOMAIN and self._parts:
            return part_values(self._builder, node, inputs, self._parts)
        if any(isinstance(item, Unknown) for item in inputs):
            self._judge_by_name(node, domain, opsets)
            return []
        call = Call(
            op=node.op_type,
            domain=domain,
            opset=opset,
            node=node,
            inputs=inputs,
            attrs={a.name: _plain(a) for a in node.attribute},
            builder=self._builder,
        )
        folded = self._fold(call)
        if folded is not None:
            return folded
        _refuse_foreign_types(call)
        if call.op in FLOW and not domain:
            return self._flow(call, opsets, scope)
        known = RULES.get((domain, call.op))
        if known is not None:
            result = known(self._builder, call)
            return list(result) if isinstance(result, Sequence) else [result]
        return self._expand(call)

    def _fold(self, call: Call) -> list[Item] | None:
        values = [v for v in call.inputs if v is not None]
        if call.domain or call.op in _SEQUENCES or not values:
            return None
        if any(not isinstance(v, Value) or v.data is None for v in values):
            return None
        tensors = [v for v in values if isinstance(v, Value)]
        arrays = [v.data for v in tensors]
        if not worth_folding(call.op, arrays, self._fold_limit):
            return None
        try:
            shapes = [static_shape(t) for t in infer(_renamed(call), call.opset, tensors)]
        except NodeRefused:
            return None  # the rule for the operator decides
        if call.op not in _SHAPED_BY_VALUES:
            known = [s for s in shapes if s is not None]
            made = sum(math.prod(s) for s in known) * 8  # the widest element type
            used = sum(a.nbytes for a in arrays if a is not None)
            other = ("", call.op) in RULES and swells(made, used)
            if len(known) < len(shapes) or made > self._fold_limit or other:
                return None
        node = _renamed(call)
        try:
            outputs = evaluate(node, call.opset, {v.name: v.data for v in tensors if v.data is not None})
        except NodeRefused:
            return None
        return [
            Unknown() if array is None else self._builder.constant(np.asarray(array), hint=name)
            for array, name in zip(outputs, node.output, strict=True)
        ]

    def _expand(self, call: Call) -> Sequence[Item]:
        function = self._functions.get((call.domain, call.op))
        if function is None:
            function = _schema_function(call)
        if function is None:
            raise NodeRefused(reasons.UNSUPPORTED)
        if self._depth >= MAX_DEPTH:
            raise NodeRefused(f"functions are nested more than {MAX_DEPTH} deep")
        scope: Scope = {name: item for name, item in zip(function.input, call.inputs, strict=False) if item}
        missing = {name: "" for name in function.input if name not in scope}
        opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in function.opset_import}
        attributes = {a.name: a for a in function.attribute_proto}
        attributes.update({a.name: a for a in call.node.attribute})
        outer = self._builder.scope
        inner = [_prefixed(n, outer, missing) for n in function.node]
        self._depth += 1
        try:
            self._nodes(inner, scope, opsets, attributes)
        finally:
            self._depth -= 1
            self._builder.scope = outer
        return [scope.get(name, Unknown()) for name in function.output]

    def _flow(self, call: Call, opsets: Mapping[str, int], scope: Scope) -> Sequence[Item]:
        if self._depth >= MAX_DEPTH:
            raise NodeRefused(f"graphs are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            if call.op == "If" and (condition := call.x(0)).data is not None:
                chosen = "then_branch" if bool(condition.data.reshape(-1)[0]) else "else_branch"
                return self.graph(graph_of(call, chosen), dict(scope), opsets)
            return flow(self._builder, call, lambda g, inner: self._body(g, {**scope, **inner}, opsets))
        finally:
            self._depth -= 1

    def _body(self, graph: onnx.GraphProto, scope: Scope, opsets: Mapping[str, int]) -> list[Item]:
        """A graph that is of use only as a whole: what it refuses is a reason of the node that it is in."""
        self._bodies += 1
        if self._bodies > MAX_BODIES:
            raise NodeRefused(f"loops and branches of the model become more than {MAX_BODIES} graphs")
        kept, outer = self._reasons, self._builder.scope
        self._reasons = reasons.Reasons()
        try:
            items = self.graph(graph, scope, opsets)
            texts = self._reasons.texts()
        finally:
            self._reasons, self._builder.scope = kept, outer
        if texts:
            raise NodeRefused(f"a graph within it cannot be compiled: {texts[0]}")
        return items

    def _judge_by_name(self, node: onnx.NodeProto, domain: str, opsets: Mapping[str, int]) -> None:
        """Refuse what is unsupported whatever its inputs are."""
        for attribute in node.attribute:
            for graph in [attribute.g, *attribute.graphs] if attribute.type in (5, 10) else []:
                self._judge_graph(graph, opsets)
        op = node.op_type
        if (domain, op) in RULES or (domain, op) in self._functions or (op in FLOW and not domain):
            return
        definition = schema(op, opsets.get(domain, 1), domain)
        if definition is None or not (definition.has_function or definition.has_context_dependent_function):
            self._reasons.add(node, domain, opsets.get(domain, 0), reasons.UNSUPPORTED)

    def _judge_graph(self, graph: onnx.GraphProto, opsets: Mapping[str, int]) -> None:
        for node in graph.node:
            self._judge_by_name(node, "" if node.domain == "ai.onnx" else node.domain, opsets)


def _renamed(call: Call) -> onnx.NodeProto:
    """The node with its inputs under their names in the normalised graph."""
    node = onnx.NodeProto()
    node.CopyFrom(call.node)
    del node.input[:]
    node.input.extend(v.name if isinstance(v, Value) else "" for v in call.inputs)
    return node


def _refuse_foreign_types(call: Call) -> None:
    for item in call.inputs:
        tensors = item.items if isinstance(item, Listing) else (item,)
        for value in tensors:
            if isinstance(value, Value) and value.dtype.kind not in "biuf":
                raise NodeRefused(f"it works on {value.dtype.name} elements, which are not compiled")


def _schema_function(call: Call) -> onnx.FunctionProto | None:
    """The body ONNX itself defines for the operator, at the opset nearest below the model's."""
    definition = schema(call.op, call.opset, call.domain)
    if definition is None:
        return None
    function = onnx.FunctionProto()
    if definition.has_function:
        versions = [v for v in definition.function_opset_versions if v <= call.opset]
        body = definition.get_function_with_opset_version(max(versions)) if versions else None
    elif definition.has_context_dependent_function:
        versions = [v for v in definition.context_dependent_function_opset_versions if v <= call.opset]
        types = [v.type_proto().SerializeToString() if isinstance(v, Value) else b"" for v in call.inputs]
        renamed = _renamed(call).SerializeToString()
        body = (
            definition.get_context_dependent_function_with_opset_version(max(versions), renamed, types)
            if versions
            else None
        )
    else:
        return None
    if not body:
        return None
    function.ParseFromString(body)
    return function


def _bind_attributes(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """The node with references to a function's attributes replaced by the values given."""
    if not any(a.ref_attr_name for a in node.attribute):
        return node
    bound = onnx.NodeProto()
    bound.CopyFrom(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            bound.attribute.append(attribute)
        elif attribute.ref_attr_name in attributes:
            value = onnx.AttributeProto()
            value.CopyFrom(attributes[attribute.ref_attr_name])
            value.name = attribute.name
            bound.attribute.append(value)
    return bound


def _prefixed(node: onnx.NodeProto, prefix: str, missing: Mapping[str, str]) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = f"{prefix}/{node.name or node.op_type}"
    del copy.input[:]
    copy.input.extend(missing.get(name, name) for name in node.input)
    return copy


def _dense(sparse: onnx.SparseTensorProto) -> Array:
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    positions = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), dense.shape)
    dense.reshape(-1)[positions] = values
    return dense


def _plain(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
