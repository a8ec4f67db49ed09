"""Walks a source graph node by node: folds, rewrites, expands functions and branches, collects refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from honed.protocol.errors import ModelRefused

from .builder import FOLDED_BYTES, Builder, evaluate, infer, schema, static_shape, swells, worth_folding
from .flow import FLOW, MAX_BODIES, flow, graph_of
from .load import check_expansion
from .rules import RULES
from .signature import StaticTensorSpec, bind_inputs
from .values import (
    UNSUPPORTED,
    Array,
    Item,
    Listing,
    NodeCall,
    NodeRefused,
    Reasons,
    Unknown,
    Value,
    numpy_dtype,
)

Scope = dict[str, Item]
# A node of PART_DOMAIN in the source graph represents a partition of the model that the CPU engine runs, with
# its number as attribute `part`; a file's own nodes of this name are refused, like any unknown ones. The
# normalised graph, whose nodes have one output each, has a node of PART_OP for each output.
PART_DOMAIN, PART_OP = "honed.cpu_part", "CpuPart"
Parts = Mapping[int, Sequence[StaticTensorSpec]]  # The outputs of each part
MAX_DEPTH = 32  # Functions within functions, and branches within branches
MAX_NODES = 200_000  # Nodes in the normalised graph
MAX_STEPS = 300_000  # Source nodes visited, those in functions once for each call
# Operators whose output shape only evaluation can tell, but is bounded by their inputs' size.
_SHAPED_BY_VALUES = frozenset({"NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit"})
_SEQUENCES = frozenset(
    {"SequenceConstruct", "SequenceEmpty", "SequenceAt", "SequenceErase", "SequenceInsert", "SequenceLength"}
    | {"SplitToSequence", "ConcatFromSequence", "SequenceMap", "Optional", "OptionalGetElement"}
    | {"OptionalHasElement", "If", "Loop", "Scan"}
)

# Operators whose rules read constants of types that are not compiled.
_OF_FEW_BITS = frozenset({("com.microsoft", "GatherBlockQuantized")})
# Errors of a rule's arithmetic on nodes that pass ONNX's checker and yet make no sense.
_RULE_ERRORS = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError)


class Walker:
    """Rebuilds a model in one form (`canonise`) in a Builder, at its opset.

    `inputs` have static shapes, `scope` its values.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        shapes: Mapping[str, tuple[int, ...]],
        reasons: Reasons,
        parts: Parts | None = None,
    ) -> None:
        """Bind the inputs.

        `parts` are the partitions of the CPU engine, which nodes of PART_DOMAIN represent.

        Raises ModelRefused where the model grows beyond all bounds, and as `bind_inputs`.
        """
        check_expansion(model, MAX_STEPS)
        self.inputs, self.notes, refused = bind_inputs(model, shapes, reasons)
        self.builder = Builder([v.name for v in (*model.graph.input, *model.graph.output)])
        self.scope: Scope = {name: Unknown() for name in refused}
        for spec in self.inputs:
            self.scope[spec.name] = self.builder.input(spec.name, spec.numpy, spec.shape)
        self.opsets = {o.domain: o.version for o in model.opset_import} or {"": 1}
        self.model = model
        self._functions = {(f.domain, f.name): f for f in model.functions}
        self._parts = parts
        self._reasons = reasons
        self._depth = 0
        self._steps = 0
        self._bodies = 0

    def walk(self) -> list[Item]:
        """Add the nodes of the model and return its outputs."""
        return self.graph(self.model.graph, self.scope, self.opsets)

    def graph(self, graph: onnx.GraphProto, scope: Scope, opsets: Mapping[str, int]) -> list[Item]:
        """Add a graph's nodes and return its outputs; `scope` holds the values it reads from outside."""
        for tensor in graph.initializer:
            scope[tensor.name] = self._initialiser(tensor.name, tensor, numpy_helper.to_array)
        for sparse in graph.sparse_initializer:
            scope[sparse.values.name] = self._initialiser(sparse.values.name, sparse, _dense)
        self._nodes(graph.node, scope, opsets, {})
        return [scope.get(output.name, Unknown()) for output in graph.output]

    def _initialiser(self, name: str, proto: Any, read: Callable[[Any], Array]) -> Item:
        try:
            return self.builder.constant(read(proto), hint=name)
        except (NodeRefused, *_RULE_ERRORS) as error:
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
            self._visit(_bind_attributes(node, attributes), scope, opsets)

    def _visit(self, node: onnx.NodeProto, scope: Scope, opsets: Mapping[str, int]) -> None:
        """Put a node's outputs into the scope, or record why it is refused."""
        self.builder.scope = node.name or next((o for o in node.output if o), node.op_type)
        items: Sequence[Item] = []
        try:
            items = self._node(node, opsets, scope)
        except NodeRefused as refusal:
            self._reasons.add(node, opsets, str(refusal))
        except _RULE_ERRORS as error:
            text = f"its attributes and inputs do not fit together ({type(error).__name__}: {error})"
            self._reasons.add(node, opsets, " ".join(text.split())[:300])
        for index, name in enumerate(node.output):
            if name:
                scope[name] = items[index] if index < len(items) else Unknown()

    def _node(self, node: onnx.NodeProto, opsets: Mapping[str, int], scope: Scope) -> Sequence[Item]:
        self._steps += 1
        if len(self.builder.nodes) > MAX_NODES or self._steps > MAX_STEPS:
            raise ModelRefused(f"the model grows beyond {MAX_NODES} nodes when it is expanded; split it")
        inputs = tuple(scope.get(name, Unknown()) if name else None for name in node.input)
        if node.domain == PART_DOMAIN and self._parts:
            return _part_values(self.builder, node, inputs, self._parts)
        if any(isinstance(item, Unknown) for item in inputs):
            self._judge_by_name(node, opsets)
            return []
        call = NodeCall(
            op=node.op_type,
            domain=node.domain,
            opset=opsets.get(node.domain, 1),
            node=node,
            inputs=inputs,
            attrs={a.name: _plain(a) for a in node.attribute},
        )
        folded = self._fold(call)
        if folded is not None:
            return folded
        _refuse_foreign_types(call)
        if call.op in FLOW and not call.domain:
            return self._flow(call, opsets, scope)
        known = RULES.get((call.domain, call.op))
        if known is not None:
            result = known(self.builder, call)
            return list(result) if isinstance(result, Sequence) else [result]
        return self._expand(call)

    def _fold(self, call: NodeCall) -> list[Item] | None:
        values = [v for v in call.inputs if v is not None]
        tensors = [v for v in values if isinstance(v, Value)]
        arrays = [v.data for v in tensors if v.data is not None]
        if call.domain or call.op in _SEQUENCES or not values or len(arrays) < len(values):
            return None
        if not worth_folding(call.op, arrays):
            return None
        node = _rename_inputs(call)
        try:
            types = infer(node, call.opset, tensors)
            shapes = [static_shape(t) for t in types]
            if call.op not in _SHAPED_BY_VALUES:
                known = [s for s in shapes if s is not None]
                made = sum(math.prod(s) for s in known) * 8  # The widest element type
                used = sum(a.nbytes for a in arrays)
                other = ("", call.op) in RULES and swells(made, used)
                large = sum(map(_nbytes, types)) > max(FOLDED_BYTES, used)
                if len(known) < len(shapes) or large or other:
                    return None
            outputs = evaluate(node, call.opset, dict(zip((v.name for v in tensors), arrays, strict=True)))
        except NodeRefused:
            return None  # The rule for the operator decides
        return [
            Unknown() if array is None else self.builder.constant(np.asarray(array), hint=name)
            for array, name in zip(outputs, node.output, strict=True)
        ]

    def _expand(self, call: NodeCall) -> Sequence[Item]:
        function = self._functions.get((call.domain, call.op))
        if function is None:
            function = _schema_function(call)
        if function is None:
            raise NodeRefused(UNSUPPORTED)
        if self._depth >= MAX_DEPTH:
            raise NodeRefused(f"functions are nested more than {MAX_DEPTH} deep")
        scope: Scope = {name: item for name, item in zip(function.input, call.inputs, strict=False) if item}
        missing = {name: "" for name in function.input if name not in scope}
        opsets = {o.domain: o.version for o in function.opset_import}
        attributes = {a.name: a for a in (*function.attribute_proto, *call.node.attribute)}
        outer = self.builder.scope
        inner = [_prefix_names(n, outer, missing) for n in function.node]
        self._depth += 1
        try:
            self._nodes(inner, scope, opsets, attributes)
        finally:
            self._depth -= 1
            self.builder.scope = outer
        return [scope.get(name, Unknown()) for name in function.output]

    def _flow(self, call: NodeCall, opsets: Mapping[str, int], scope: Scope) -> Sequence[Item]:
        if self._depth >= MAX_DEPTH:
            raise NodeRefused(f"graphs are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        try:
            if call.op == "If" and (condition := call.x(0)).data is not None:
                chosen = "then_branch" if bool(condition.data.reshape(-1)[0]) else "else_branch"
                return self.graph(graph_of(call, chosen), dict(scope), opsets)
            return flow(self.builder, call, lambda g, inner: self._body(g, {**scope, **inner}, opsets))
        finally:
            self._depth -= 1

    def _body(self, graph: onnx.GraphProto, scope: Scope, opsets: Mapping[str, int]) -> list[Item]:
        """Return the outputs of a graph that is of use only as a whole.

        Raises NodeRefused for the node that holds the graph, with the first reason found within it.
        """
        self._bodies += 1
        if self._bodies > MAX_BODIES:
            raise NodeRefused(f"loops and branches of the model become more than {MAX_BODIES} graphs")
        kept, outer = self._reasons, self.builder.scope
        self._reasons = Reasons()
        try:
            items = self.graph(graph, scope, opsets)
            texts = self._reasons.texts()
        finally:
            self._reasons, self.builder.scope = kept, outer
        if texts:
            raise NodeRefused(f"a graph within it cannot be compiled: {texts[0]}")
        return items

    def _judge_by_name(self, node: onnx.NodeProto, opsets: Mapping[str, int]) -> None:
        """Refuse operators that are unsupported whatever their inputs are."""
        for attribute in node.attribute:
            for graph in [attribute.g, *attribute.graphs] if attribute.type in (5, 10) else []:
                for inner in graph.node:
                    self._judge_by_name(inner, opsets)
        domain, op = node.domain, node.op_type
        if (domain, op) in RULES or (domain, op) in self._functions or (op in FLOW and not domain):
            return
        definition = schema(op, opsets.get(domain, 1), domain)
        if definition is None or not (definition.has_function or definition.has_context_dependent_function):
            self._reasons.add(node, opsets, UNSUPPORTED)


def _rename_inputs(call: NodeCall) -> onnx.NodeProto:
    """Return the node with its inputs under their names in the normalised graph."""
    node = deepcopy(call.node)
    node.input[:] = [v.name if isinstance(v, Value) else "" for v in call.inputs]
    return node


def _nbytes(kind: onnx.TypeProto | None) -> int:
    """Return the bytes of a tensor of a known shape, 0 for other types."""
    shape = static_shape(kind)
    if kind is None or shape is None:
        return 0
    return math.prod(shape) * numpy_dtype(kind.tensor_type.elem_type).itemsize


def _refuse_foreign_types(call: NodeCall) -> None:
    if (call.domain, call.op) in _OF_FEW_BITS:
        return
    for item in call.inputs:
        tensors = item.items if isinstance(item, Listing) else (item,)
        for value in tensors:
            if isinstance(value, Value) and value.dtype.kind not in "biuf":
                raise NodeRefused(f"it works on {value.dtype.name} elements, which are not compiled")


def _schema_function(call: NodeCall) -> onnx.FunctionProto | None:
    """Return the body ONNX itself defines for the operator, at the opset nearest below the model's."""
    definition = schema(call.op, call.opset, call.domain)
    if definition is None:
        return None
    body: bytes | None = None
    if definition.has_function:
        versions = [v for v in definition.function_opset_versions if v <= call.opset]
        if versions:
            body = definition.get_function_with_opset_version(max(versions))
    elif definition.has_context_dependent_function:
        versions = [v for v in definition.context_dependent_function_opset_versions if v <= call.opset]
        types = [v.type_proto().SerializeToString() if isinstance(v, Value) else b"" for v in call.inputs]
        if versions:
            body = definition.get_context_dependent_function_with_opset_version(
                max(versions), _rename_inputs(call).SerializeToString(), types
            )
    return onnx.FunctionProto.FromString(body) if body else None


def _bind_attributes(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """Return the node with references to a function's attributes replaced by their values."""
    if not any(a.ref_attr_name for a in node.attribute):
        return node
    bound = deepcopy(node)
    del bound.attribute[:]
    for attribute in node.attribute:
        value = attributes.get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if value is not None:
            bound.attribute.append(value)
            bound.attribute[-1].name = attribute.name
    return bound


def _prefix_names(node: onnx.NodeProto, prefix: str, missing: Mapping[str, str]) -> onnx.NodeProto:
    copy = deepcopy(node)
    copy.name = f"{prefix}/{node.name or node.op_type}"
    copy.input[:] = [missing.get(name, name) for name in node.input]
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


def _part_values(
    builder: Builder, node: onnx.NodeProto, inputs: Sequence[Item | None], parts: Parts
) -> list[Item]:
    """Add one node for each output of a partition, and return these outputs."""
    given = [item for item in inputs if isinstance(item, Value)]
    if len(given) != len(inputs):
        raise NodeRefused("what it is given is not compiled")
    number = next(int(a.i) for a in node.attribute if a.name == "part")
    found: list[Item] = []
    for index, (name, spec) in enumerate(zip(node.output, parts[number], strict=True)):
        made = helper.make_node(
            PART_OP,
            [value.name for value in given],
            [builder.unique(f"{name}/part")],
            name=name,
            part=number,
            output=index,
            **({"shape": list(spec.shape)} if spec.shape else {}),
        )
        found.append(builder.opaque(made, spec.numpy, spec.shape))
    return found
