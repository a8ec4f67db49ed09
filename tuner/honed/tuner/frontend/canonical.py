"""Rewrites a model to one form for all readers: by ONNX's rules, of which ONNX Runtime enforces fewer.

ONNX's checker, its inference and its evaluator are stricter than ONNX Runtime. This module changes no result
of a model and refuses none: the checker refuses a model that cannot be repaired.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import cache

import onnx

_LEAST_IR = 4  # Earlier versions require initialisers to be inputs as well
_MLS = "ai.onnx.ml"


def canonise(model: onnx.ModelProto) -> None:
    """Rewrite a model in place.

    Afterwards its inputs are what a caller must give, its nodes follow what they read, ONNX's domain is ""
    and every domain is imported once, each initialiser has a name of its own (the last of equal names
    counts), each output is listed once, and the graph has a name. Outputs may still lack a type or a shape,
    and inputs a shape: see `stand_in_types`.
    """
    graph = model.graph
    graph.name = graph.name or "graph"
    _spell_domains(model)
    _import_domains(model)
    _deduplicate(graph)
    model.ir_version = max(model.ir_version, _LEAST_IR)
    _keep(graph, _in_order(graph))


def drop_unneeded(graph: onnx.GraphProto) -> None:
    """Remove nodes on which no output depends; nodes must follow what they read."""
    wanted, kept = {value.name for value in graph.output}, []
    for n in reversed(range(len(graph.node))):
        if not wanted.isdisjoint(graph.node[n].output):
            kept.append(n)
            wanted.update(reads(graph.node[n]))
    _keep(graph, kept[::-1])


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads from the graph around it, in its subgraphs as well."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            made = {v.name for v in (*graph.input, *graph.initializer)}
            made |= {sparse.values.name for sparse in graph.sparse_initializer}
            for inner in graph.node:
                yield from (name for name in reads(inner) if name not in made)
                made.update(inner.output)
            yield from (v.name for v in graph.output if v.name not in made)


def stand_in_types(graph: onnx.GraphProto) -> list[tuple[onnx.ValueInfoProto, onnx.TypeProto]]:
    """Give inputs and outputs without a shape or type one for ONNX's checker; return the old ones."""
    had: list[tuple[onnx.ValueInfoProto, onnx.TypeProto]] = []
    for value, may_lack_type in (*((v, False) for v in graph.input), *((v, True) for v in graph.output)):
        kind = value.type.WhichOneof("value")
        if kind == "tensor_type" and not value.type.tensor_type.HasField("shape"):
            had.append((value, deepcopy(value.type)))
            value.type.tensor_type.shape.SetInParent()
        elif kind is None and may_lack_type:
            had.append((value, onnx.TypeProto()))
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            value.type.tensor_type.shape.SetInParent()
    return had


def put_back(had: Iterable[tuple[onnx.ValueInfoProto, onnx.TypeProto]]) -> None:
    """Restore the types that `stand_in_types` replaced."""
    for value, before in had:
        if before.WhichOneof("value"):
            value.type.CopyFrom(before)
        else:
            value.ClearField("type")


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those in their subgraphs, without recursion, which files could exhaust."""
    waiting = [nodes]
    while waiting:
        for node in waiting.pop():
            yield node
            for attribute in node.attribute:
                waiting += [graph.node for graph in (attribute.g, *attribute.graphs) if graph.node]


def _spell_domains(model: onnx.ModelProto) -> None:
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in all_nodes(nodes):
            if node.domain == "ai.onnx":
                node.domain = ""
    for owner in (model, *model.functions):
        found: dict[str, int] = {}
        for opset in owner.opset_import:
            found.setdefault("" if opset.domain == "ai.onnx" else opset.domain, opset.version)
        if [(o.domain, o.version) for o in owner.opset_import] != list(found.items()):
            del owner.opset_import[:]
            owner.opset_import.extend(onnx.helper.make_opsetid(*each) for each in found.items())


def _import_domains(model: onnx.ModelProto) -> None:
    """Import the domains that ONNX Runtime knows without it, as it does: the newest version of each."""
    known = {opset.domain for opset in model.opset_import}
    used = {node.domain for node in all_nodes(model.graph.node)} & {_MLS, "com.microsoft"}
    for domain in sorted(used - known):
        version = _newest(domain) if domain == _MLS else 1
        model.opset_import.append(onnx.helper.make_opsetid(domain, version))


@cache
def _newest(domain: str) -> int:
    return int(max(each.since_version for each in onnx.defs.get_all_schemas() if each.domain == domain))


def _deduplicate(graph: onnx.GraphProto) -> None:
    """Keep the last initialiser of each name and the first output of each name.

    Inputs that an initialiser fixes are removed.
    """
    last = {tensor.name: n for n, tensor in enumerate(graph.initializer)}
    for n in reversed(range(len(graph.initializer))):
        name = graph.initializer[n].name
        if not name or last[name] != n:
            del graph.initializer[n]
    fixed = last.keys() | {sparse.values.name for sparse in graph.sparse_initializer}
    for n in reversed(range(len(graph.input))):
        if graph.input[n].name and graph.input[n].name in fixed:
            del graph.input[n]
    first: dict[str, int] = {}
    for n, value in enumerate(graph.output):
        first.setdefault(value.name, n)
    for n in reversed(range(len(graph.output))):
        if first[graph.output[n].name] != n:
            del graph.output[n]


def _in_order(graph: onnx.GraphProto) -> list[int]:
    """Return the numbers of the nodes in topological order, which keeps the given order where it can.

    Returns the given order where there is a cycle.
    """
    maker = {name: n for n, node in enumerate(graph.node) for name in node.output if name}
    before = [{maker[name] for name in reads(node) if name in maker} for node in graph.node]
    done: dict[int, None] = {}
    for first in range(len(before)):
        waiting = [first]
        while waiting:
            n = waiting[-1]
            left = [m for m in before[n] if m not in done]
            if not left or n in done:
                done[n] = None
                waiting.pop()
            elif len(waiting) > len(before):
                return list(range(len(before)))
            else:
                waiting.append(min(left))
    return list(done)


def _keep(graph: onnx.GraphProto, order: list[int]) -> None:
    """Keep the nodes of these numbers in a graph, in this order."""
    if order != list(range(len(graph.node))):
        kept = [deepcopy(graph.node[n]) for n in order]
        del graph.node[:]
        graph.node.extend(kept)
