"""Reads an untrusted file into a consistent ONNX model that can be visited in limited time.

The model is first rewritten to one form for all readers, by ONNX's rules, of which ONNX Runtime enforces
fewer than ONNX's checker, inference and evaluator. That changes no result of a model and refuses none: the
checker refuses a model that cannot be repaired.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import checker

from honed.onnxfile.contrib_schemas import NEWEST_OPSET, RUNTIMES_OWN
from honed.onnxfile.reading import clean, nodes, protobuf_memory, read, reads
from honed.protocol.errors import ModelRefused

from .builder import schema

MAX_OPSET = max(NEWEST_OPSET, onnx.defs.onnx_opset_version())
_MAX_VERSION = 2**31 - 1  # Largest version of operators
_UNCHECKED = "honed.unchecked"
_Key = tuple[str, str]  # A function's domain and name
_LEAST_IR = 4  # Earlier versions require initialisers to be inputs as well
_MLS = "ai.onnx.ml"


def load(path: str | Path) -> onnx.ModelProto:
    """Read an ONNX file with its external data, write it in one form (`canonise`) and check it.

    Raises InvalidArgument where there is no such file, ModelRefused for anything that is not a valid
    ONNX model within the limits of `read`, MissingFiles where data files are not beside it.
    """
    file = Path(path)
    model, external = read(file)
    canonise(model)
    _check_operators(file, model)
    _check(file, model, file.stat().st_size + external)
    drop_unneeded(model.graph)
    return model


def _check_operators(file: Path, model: onnx.ModelProto) -> None:
    """Raise a refusal that names every operator ONNX does not define; ONNX's checker stops at the first."""
    opsets = {o.domain: o.version for o in model.opset_import}
    opset = opsets.get("", 1)
    for domain, version in opsets.items():
        if not 0 <= version <= _MAX_VERSION:
            named = clean(domain or "ai.onnx", 80)
            raise ModelRefused(f"{file.name} uses {named} opset {version}, which cannot be; export it again")
    if opset > MAX_OPSET:
        raise ModelRefused(f"{file.name} uses ONNX opset {opset}; export it with opset {MAX_OPSET} or older")
    local = {(f.domain, f.name) for f in model.functions}
    unknown: dict[tuple[str, str], list[str]] = {}  # Nodes by operator and error
    for node in model.graph.node:
        if node.domain or (node.domain, node.op_type) in local or node.op_type in RUNTIMES_OWN:
            continue
        found = schema(node.op_type, opset)
        if found is None or found.deprecated:
            name = node.name or (node.output[0] if node.output else "")
            why = "no such operator" if found is None else "deprecated; export it with a newer opset"
            unknown.setdefault((clean(node.op_type, 80), why), []).append(clean(name, 80))
    if unknown:
        missing = ", ".join(op for op, why in unknown if why == "no such operator")
        old = ", ".join(op for op, why in unknown if why != "no such operator")
        texts = [f"does not define: {missing}"] * bool(missing) + [f"deprecates: {old}"] * bool(old)
        raise ModelRefused(
            f"{file.name} uses operators that ONNX opset {opset} {' and '.join(texts)}",
            tuple(
                f"{op} (ai.onnx, opset {opset}; {len(names)} nodes: {', '.join(names[:3])}): {why}"
                for (op, why), names in unknown.items()
            ),
        )


def _check(file: Path, model: onnx.ModelProto, nbytes: int) -> None:
    moved, had = _separate_foreign_nodes(model), stand_in_types(model.graph)
    try:
        with protobuf_memory(nbytes):
            checker.check_model(model)
    except checker.ValidationError as error:
        text = clean(str(error).split("\n\n==>", maxsplit=1)[0])
        raise ModelRefused(f"{file.name} is not a valid ONNX model: {text}") from error
    except (ValueError, EncodeError) as error:
        raise ModelRefused(f"{file.name} is too large to be checked: {error}") from error
    finally:
        put_back(had)
        for node in moved:
            node.ClearField("domain")
        if moved:
            del model.opset_import[-1]


def _separate_foreign_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Move nodes that only ONNX Runtime knows from ONNX's domain to an unchecked one, and return them."""
    opset = next((o.version for o in model.opset_import if not o.domain), 1)
    moved = [
        node
        for node in model.graph.node
        if not node.domain and node.op_type in RUNTIMES_OWN and not schema(node.op_type, opset)
    ]
    for node in moved:
        node.domain = _UNCHECKED
    if moved:
        model.opset_import.append(onnx.helper.make_opsetid(_UNCHECKED, 1))
    return moved


@dataclass(frozen=True, slots=True)
class _Body:
    nodes: int
    calls: Counter[_Key]


def check_expansion(model: onnx.ModelProto, limit: int) -> None:
    """Raise ModelRefused where more than `limit` nodes would be visited, or a function contains itself.

    The count does not expand functions: those that call functions can stand for more nodes than can be
    visited in time. Thirty of them, each of which calls the one before twice, stand for a billion.
    """
    known = {(f.domain, f.name) for f in model.functions}
    bodies = {(f.domain, f.name): _body(f.node, known) for f in model.functions}
    whole = _body(model.graph.node, known)
    sizes: dict[_Key, int] = {}
    for key in whole.calls:
        _measure(key, bodies, sizes)
    if _size(whole, sizes) > limit:
        raise ModelRefused(
            f"the model grows beyond {limit} nodes when its functions are expanded; export it without them"
        )


def _measure(key: _Key, bodies: dict[_Key, _Body], sizes: dict[_Key, int]) -> None:
    """Compute the size of a function and of all that it calls.

    Avoid recursion, which a model could exhaust.
    """
    open_calls: list[tuple[_Key, Iterator[_Key]]] = [(key, iter(bodies[key].calls))]
    within = {key}
    while open_calls:
        current, callees = open_calls[-1]
        callee = next((each for each in callees if each not in sizes), None)
        if callee is None:
            sizes[current] = _size(bodies[current], sizes)
            within.discard(current)
            open_calls.pop()
        elif callee in within:
            text = f"function {callee[1][:80]!r} of the model is nested within itself"
            raise ModelRefused(f"the model cannot be compiled: {text}; export it without", (text,))
        else:
            within.add(callee)
            open_calls.append((callee, iter(bodies[callee].calls)))


def _size(body: _Body, sizes: dict[_Key, int]) -> int:
    return body.nodes + sum(count * sizes[key] for key, count in body.calls.items())


def _body(outer: Iterable[onnx.NodeProto], keys: set[_Key]) -> _Body:
    """Return how many nodes a graph or function has and how often it calls which function.

    Nodes of its subgraphs count, too.
    """
    found = [(node.domain, node.op_type) for node in nodes(outer)]
    return _Body(len(found), Counter(key for key in found if key in keys))


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


def _spell_domains(model: onnx.ModelProto) -> None:
    for outer in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes(outer):
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
    used = {node.domain for node in nodes(model.graph.node)} & {_MLS, "com.microsoft"}
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
