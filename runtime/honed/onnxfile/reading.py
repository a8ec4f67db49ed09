"""Parsing an untrusted file, its external data included."""

from __future__ import annotations

import stat
from pathlib import Path

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]

from honed.protocol.errors import InvalidArgument, ModelRefused

from .external import check_data, load_external, tensors

PROTOBUF_LIMIT = (1 << 31) - 1  # bytes of one message


def read(
    path: str | Path, *, file_bytes: int = PROTOBUF_LIMIT, external_bytes: int = PROTOBUF_LIMIT
) -> tuple[onnx.ModelProto, int]:
    """The model, every tensor inside and as long as its shape says, and the bytes of its external data.

    Raises InvalidArgument where there is no such file, ModelRefused for one that is no ONNX model or larger
    than the limits, MissingExternalData where data files are not beside it.
    """
    file = Path(path)
    model = _parse(file, file_bytes)
    if not _readable(model):
        raise ModelRefused(f"{file.name} is damaged: it holds names that are not UTF-8; export it again")
    external = load_external(model, file.resolve().parent, external_bytes)
    for tensor in tensors(model):
        check_data(tensor)
    return model, external


def _parse(file: Path, limit: int) -> onnx.ModelProto:
    try:
        status = file.stat()
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}; check the path") from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{file} is not a regular file; give the path of an ONNX file")
    if status.st_size > limit:
        raise ModelRefused(
            f"{file.name} has {status.st_size} bytes, above the limit of {limit}; "
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
