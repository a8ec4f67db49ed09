"""Reading an untrusted file into an ONNX model that holds what it says."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import checker

from honed.protocol.errors import InvalidArgument, ModelRefused

from .builder import schema
from .external import check_data, load_external, tensors
from .reasons import shown

MAX_OPSET = onnx.defs.onnx_opset_version()
_MAX_VERSION = 2**31 - 1  # of operators
_PROTOBUF_LIMIT = (1 << 31) - 1  # bytes of one message


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendLimits:
    """What a file may demand before it is refused."""

    file_bytes: int = _PROTOBUF_LIMIT  # of the model file
    external_bytes: int = _PROTOBUF_LIMIT  # of all its external data
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
    model = _parse(file, limits)
    if not _readable(model):
        raise ModelRefused(f"{file.name} is damaged: it holds names that are not UTF-8; export it again")
    load_external(model, file.resolve().parent, limits.external_bytes)
    for tensor in tensors(model):
        check_data(tensor)
    _check_operators(file, model)
    _check(file, model)
    return model


def _parse(file: Path, limits: FrontendLimits) -> onnx.ModelProto:
    try:
        status = file.stat()
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}; check the path") from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{file} is not a regular file; give the path of an ONNX file")
    if status.st_size > limits.file_bytes:
        raise ModelRefused(
            f"{file.name} has {status.st_size} bytes, above the limit of {limits.file_bytes}; "
            "keep its weights in external data files"
        )
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}; check its permissions") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ModelRefused(
            f"{file.name} is not an ONNX model, or it is damaged or cut off; export or fetch it again"
        ) from None
    if not model.HasField("graph") or model.ir_version <= 0 or not (model.graph.node or model.graph.output):
        raise ModelRefused(f"{file.name} is not an ONNX model: it holds no graph; give an ONNX file")
    return model


def _readable(message: Message) -> bool:
    """Whether every text in the message is UTF-8; protobuf gives bytes where it is not."""
    for field, value in message.ListFields():
        if field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE):
            continue
        for item in value if field.is_repeated else (value,):
            if isinstance(item, bytes) or (isinstance(item, Message) and not _readable(item)):
                return False
    return True


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
    try:
        checker.check_model(model)
    except checker.ValidationError as error:
        text = shown(str(error).split("\n\n==>", maxsplit=1)[0])
        raise ModelRefused(f"{file.name} is not a valid ONNX model: {text}") from error
    except ValueError as error:
        raise ModelRefused(f"{file.name} is too large to be checked: {error}") from error
