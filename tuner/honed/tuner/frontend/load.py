"""Reads an untrusted file into a consistent ONNX model that can be visited in limited time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import checker

from honed.onnxfile.contrib_schemas import NEWEST_OPSET, RUNTIMES_OWN
from honed.onnxfile.reading import PROTOBUF_LIMIT, clean, protobuf_memory, read
from honed.protocol.errors import ModelRefused

from .builder import schema
from .canonical import all_nodes, canonise, drop_unneeded, put_back, stand_in_types

MAX_OPSET = max(NEWEST_OPSET, onnx.defs.onnx_opset_version())
_MAX_VERSION = 2**31 - 1  # Largest version of operators
_UNCHECKED = "honed.unchecked"
_Key = tuple[str, str]  # A function's domain and name


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLimits:
    """The limits beyond which a file is refused."""

    file_bytes: int = PROTOBUF_LIMIT  # Bytes of the model file
    external_bytes: int = PROTOBUF_LIMIT  # Bytes of all its external data
    tensor_bytes: int = 1 << 32  # Bytes of one intermediate tensor
    fold_bytes: int = 1 << 26  # Bytes of one constant computed while compiling that is larger than its inputs
    constant_bytes: int = 1 << 32  # Bytes of all constants, read and computed


def load(path: str | Path, *, limits: FrontendLimits | None = None) -> onnx.ModelProto:
    """Read an ONNX file with its external data, write it in one form (`canonical`) and check it.

    Raises InvalidArgument where there is no such file, ModelRefused for anything that is not a valid
    ONNX model within the limits, MissingExternalData where data files are not beside it.
    """
    limits = limits or FrontendLimits()
    file = Path(path)
    model, external = read(file, file_bytes=limits.file_bytes, external_bytes=limits.external_bytes)
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


def _body(nodes: Iterable[onnx.NodeProto], keys: set[_Key]) -> _Body:
    """Return how many nodes a graph or function has and how often it calls which function.

    Nodes of its subgraphs count, too.
    """
    found = [(node.domain, node.op_type) for node in all_nodes(nodes)]
    return _Body(len(found), Counter(key for key in found if key in keys))
