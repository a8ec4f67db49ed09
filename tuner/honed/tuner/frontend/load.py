"""Reading an untrusted file into an ONNX model that holds what it says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import checker

from honed.onnxfile.reading import PROTOBUF_LIMIT, read, shown
from honed.protocol.errors import ModelRefused
from honed.tuner.standins import RUNTIMES_OWN

from .builder import schema

MAX_OPSET = onnx.defs.onnx_opset_version()
_MAX_VERSION = 2**31 - 1  # of operators
_UNCHECKED = "honed.unchecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLimits:
    """What a file may demand before it is refused."""

    file_bytes: int = PROTOBUF_LIMIT  # of the model file
    external_bytes: int = PROTOBUF_LIMIT  # of all its external data
    tensor_bytes: int = 1 << 32  # of one intermediate tensor
    fold_bytes: int = 1 << 28  # of one constant computed while compiling
    constant_bytes: int = 1 << 32  # of all constants, read and computed


def load(path: str | Path, *, limits: FrontendLimits | None = None) -> onnx.ModelProto:
    """Read, complete with external data and check an ONNX file.

    Raises InvalidArgument where there is no such file, ModelRefused for anything that is not a valid
    ONNX model within the limits, MissingExternalData where data files are not beside it.
    """
    limits = limits or FrontendLimits()
    file = Path(path)
    model, _ = read(file, file_bytes=limits.file_bytes, external_bytes=limits.external_bytes)
    _check_operators(file, model)
    _check(file, model)
    return model


def _check_operators(file: Path, model: onnx.ModelProto) -> None:
    """Name every operator ONNX does not define; its own checker stops at the first."""
    opsets = {("" if o.domain == "ai.onnx" else o.domain): o.version for o in model.opset_import}
    opset = opsets.get("", 1)
    for domain, version in opsets.items():
        if not 0 <= version <= _MAX_VERSION:
            named = shown(domain or "ai.onnx", 80)
            raise ModelRefused(f"{file.name} uses {named} opset {version}, which cannot be; export it again")
    if opset > MAX_OPSET:
        raise ModelRefused(f"{file.name} uses ONNX opset {opset}; export it with opset {MAX_OPSET} or older")
    local = {(f.domain, f.name) for f in model.functions}
    unknown: dict[str, list[str]] = {}
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or (node.domain, node.op_type) in local:
            continue
        found = schema(node.op_type, opset)
        if node.op_type in RUNTIMES_OWN:
            continue
        if found is None or found.deprecated:
            name = node.name or (node.output[0] if node.output else "")
            unknown.setdefault(shown(node.op_type, 80), []).append(shown(name, 80))
    if unknown:
        raise ModelRefused(
            f"{file.name} uses operators that ONNX opset {opset} does not define: {', '.join(unknown)}",
            tuple(
                f"{op} (ai.onnx, opset {opset}; {len(names)} nodes: {', '.join(names[:3])}): no such operator"
                for op, names in unknown.items()
            ),
        )


def _check(file: Path, model: onnx.ModelProto) -> None:
    moved = _moved_apart(model)
    try:
        checker.check_model(model)
    except checker.ValidationError as error:
        text = shown(str(error).split("\n\n==>", maxsplit=1)[0])
        raise ModelRefused(f"{file.name} is not a valid ONNX model: {text}") from error
    except ValueError as error:
        raise ModelRefused(f"{file.name} is too large to be checked: {error}") from error
    finally:
        for node in moved:
            node.ClearField("domain")
        if moved:
            del model.opset_import[-1]


def _moved_apart(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Nodes that only ONNX Runtime knows in ONNX's domain, now in one that is not checked."""
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    moved = [
        node
        for node in model.graph.node
        if node.domain in ("", "ai.onnx") and node.op_type in RUNTIMES_OWN and not schema(node.op_type, opset)
    ]
    for node in moved:
        node.domain = _UNCHECKED
    if moved:
        model.opset_import.append(onnx.helper.make_opsetid(_UNCHECKED, 1))
    return moved
