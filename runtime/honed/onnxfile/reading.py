"""Reads an untrusted ONNX file, and tensor data in files beside it, to a checked model.

Sizes, paths and texts are checked.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

import onnx
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError, EncodeError, Message  # type: ignore[import-untyped]
from onnx import TensorProto, helper

from honed.process.limits import data_left
from honed.protocol.errors import InvalidArgument, MissingFiles, ModelRefused

PROTOBUF_LIMIT = (1 << 31) - 1  # Bytes of one message
_PROTOBUF_COPIES: Final = 4  # Copies of a model in memory at most while it is read or written
# Bits per element of types whose raw data is packed.
_PACKED_BITS = {
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
    TensorProto.FLOAT4E2M1: 4,
    **{t: 2 for t in (getattr(TensorProto, n, None) for n in ("INT2", "UINT2")) if t is not None},
}
_MOST_DIMENSIONS = 32  # NumPy's limit before version 2
M = TypeVar("M", bound=Message)


def clean(text: str, limit: int = 400) -> str:
    """Return text from an untrusted file on one line, without control characters, cut at `limit`."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    plain = " ".join(plain.split())
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."


def _messages(message: Message, kind: type[M]) -> Iterator[M]:
    """Yield every message of a kind in a model or a part of it, not those within one of the kind."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for item in value if field.is_repeated else (value,):
                if isinstance(item, kind):
                    yield item
                else:
                    yield from _messages(item, kind)


def expected_bytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes of raw data that a tensor's type and shape require.

    Raises ModelRefused for a type that ONNX does not know, and for impossible dimensions.
    """
    if len(tensor.dims) > _MOST_DIMENSIONS:
        raise ModelRefused(
            f"the model is damaged: tensor {clean(tensor.name)!r} has {len(tensor.dims)} dimensions, and "
            f"more than {_MOST_DIMENSIONS} cannot be computed with; export it again"
        )
    count: int = math.prod(tensor.dims)
    if any(d < 0 for d in tensor.dims):
        raise ModelRefused(
            f"the model is damaged: tensor {clean(tensor.name)!r} has a negative dimension; export it again"
        )
    if tensor.data_type in _PACKED_BITS:
        return -(-count * int(_PACKED_BITS[tensor.data_type]) // 8)
    try:
        return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError:
        raise ModelRefused(
            f"the model is damaged: tensor {clean(tensor.name)!r} has unknown element type "
            f"{tensor.data_type}; export it again"
        ) from None


def check_data(tensor: onnx.TensorProto) -> None:
    """Raise ModelRefused if a tensor holds more or less data than its shape requires."""
    if tensor.data_type == TensorProto.STRING:
        return
    expected = expected_bytes(tensor)
    if tensor.HasField("raw_data"):
        held, right = len(tensor.raw_data), expected
    else:
        held = _count_elements(tensor)
        right = math.prod(tensor.dims)
        if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
            right *= 2
        if tensor.data_type in _PACKED_BITS:
            right = expected
    if held != right:
        raise ModelRefused(
            f"the model is damaged: tensor {clean(tensor.name)!r} of shape {list(tensor.dims)} holds {held} "
            f"where {right} are needed; export it again"
        )


def _count_elements(tensor: onnx.TensorProto) -> int:
    fields = (tensor.float_data, tensor.int32_data, tensor.int64_data, tensor.double_data, tensor.uint64_data)
    return max(len(field) for field in fields)


def load_external(tensors: Iterable[onnx.TensorProto], folder: Path, limit_bytes: int) -> int:
    """Read all external data into the tensors of a model; return the bytes read.

    Only regular files inside `folder` are read, within their size. Raises MissingFiles if files are missing,
    and ModelRefused for paths that lead elsewhere or ranges outside a file.
    """
    waiting = [t for t in tensors if t.data_location == TensorProto.EXTERNAL]
    places = [(t, _entries(t)) for t in waiting]
    paths = {e["location"]: _inside(folder, e["location"]) for _, e in places}
    missing = tuple(name for name, path in paths.items() if not os.path.lexists(path))
    if missing:
        listed = ", ".join(clean(name, 200) for name in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise MissingFiles(
            f"the model's data files are missing beside it: {listed}; put them in the same folder",
            tuple(f"external data file {clean(name, 200)} is missing" for name in missing),
            missing,
        )
    total = 0
    for tensor, entries in places:
        expected = expected_bytes(tensor)
        total += expected
        if total > limit_bytes:
            raise ModelRefused(
                f"the model's data files hold more than the limit of {limit_bytes >> 20} MiB; raise the limit"
            )
        tensor.raw_data = _read(paths[entries["location"]], entries, expected, tensor.name)
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]
    return total


def _entries(tensor: onnx.TensorProto) -> dict[str, str]:
    entries = {e.key: e.value for e in tensor.external_data}
    if "location" not in entries or not entries["location"]:
        raise ModelRefused(
            f"tensor {clean(tensor.name)!r} names no external data file; export the model again"
        )
    return entries


def _inside(folder: Path, location: str) -> Path:
    posix = PurePosixPath(location)
    if posix.is_absolute() or ".." in posix.parts or "\\" in location or "\0" in location:
        raise ModelRefused(
            f"external data location {location[:200]!r} leads outside the model's folder; "
            "name a file beside the model"
        )
    path = folder / location
    if os.path.lexists(path):
        root, real = folder.resolve(), path.resolve()
        if not real.is_relative_to(root):
            raise ModelRefused(
                f"external data file {location[:200]!r} is a link out of the model's folder; "
                "put the file itself beside the model"
            )
        if not stat.S_ISREG(os.stat(real).st_mode if real.exists() else 0):
            raise ModelRefused(f"external data file {location[:200]!r} is not a regular file; replace it")
    return path


def _read(path: Path, entries: dict[str, str], expected: int, name: str) -> bytes:
    try:
        offset = int(entries.get("offset") or 0)
        length = int(entries.get("length") or expected)
    except ValueError:
        raise ModelRefused(f"external data of tensor {name!r} has no numeric offset or length") from None
    size = path.stat().st_size
    if offset < 0 or length != expected or offset + length > size:
        raise ModelRefused(
            f"external data of tensor {name!r} (offset {offset}, length {length}, needed {expected}) "
            f"does not fit its file of {size} bytes; fetch the file again"
        )
    with path.open("rb") as stream:
        stream.seek(offset)
        data = stream.read(length)
    if len(data) != length:
        raise ModelRefused(f"external data file {path.name} changed while it was read; try again")
    return data


def read(
    path: str | Path, *, file_bytes: int = PROTOBUF_LIMIT, external_bytes: int = PROTOBUF_LIMIT
) -> tuple[onnx.ModelProto, int]:
    """Return the model and the bytes of its external data.

    Every tensor's data is in the model and as long as its shape requires.

    Raises InvalidArgument if there is no such file, ModelRefused for a file that is no ONNX model or larger
    than the limits, MissingFiles if data files are missing.
    """
    file = Path(path)
    model = _parse(file, file_bytes)
    if not _readable(model):
        raise ModelRefused(f"{file.name} is damaged: it holds names that are not UTF-8; export it again")
    tensors = list(_messages(model, TensorProto))
    external = load_external(tensors, file.resolve().parent, external_bytes)
    for tensor in tensors:
        check_data(tensor)
    return model, external


@contextmanager
def protobuf_memory(nbytes: int) -> Iterator[None]:
    """Raise MemoryError if protobuf fails on a model of `nbytes` and memory may be the reason.

    Protobuf does not say why it fails, and only a process with a memory limit (`limits.limit_data`) can tell.
    """
    try:
        yield
    except (DecodeError, EncodeError) as error:
        if data_left() < _PROTOBUF_COPIES * nbytes:
            raise MemoryError(f"a model of {nbytes >> 20} MiB does not fit in the memory allowed") from error
        raise


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
        with protobuf_memory(len(data)):
            model.ParseFromString(data)
    except DecodeError:
        raise ModelRefused(
            f"{file.name} is not an ONNX model, or it is damaged or cut off; export or fetch it again"
        ) from None
    if not model.HasField("graph") or model.ir_version <= 0 or not (model.graph.node or model.graph.output):
        raise ModelRefused(f"{file.name} is not an ONNX model: it holds no graph; give an ONNX file")
    return model


def _readable(message: Message) -> bool:
    """Return whether every text in the message is UTF-8; protobuf returns bytes for others."""
    for field, value in message.ListFields():
        if field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE):
            continue
        for item in value if field.is_repeated else (value,):
            if isinstance(item, bytes) or (isinstance(item, Message) and not _readable(item)):
                return False
    return True


UNNAMED: Final = "?"  # Name that Paddle's exporter writes for each unnamed dimension
# ONNX Runtime's message if sizes of one name differ, as it lets their tensors share memory.
MISLED: Final = "Shape mismatch attempting to re-use buffer"


def forget_names(model: onnx.ModelProto, name: str = "") -> bool:
    """Remove a name, or "" all names, from dimensions; return whether there was any.

    ONNX Runtime assumes that dimensions of one name have one size.
    """
    found = False
    for info in _messages(model.graph, onnx.ValueInfoProto):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param and name in ("", dim.dim_param):
                dim.ClearField("dim_param")
                found = True
    return found


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that a node holds (If, Loop, Scan)."""
    for attribute in node.attribute:
        yield from (attribute.g, *attribute.graphs)


def nodes(outer: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes in order, those of subgraphs after the node that holds them."""
    for node in outer:
        yield node
        for graph in subgraphs(node):
            yield from nodes(graph.node)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads from the graph around it, in its subgraphs as well."""
    yield from (name for name in node.input if name)
    for graph in subgraphs(node):
        made = {v.name for v in (*graph.input, *graph.initializer)}
        made |= {sparse.values.name for sparse in graph.sparse_initializer}
        for inner in graph.node:
            yield from (name for name in reads(inner) if name not in made)
            made.update(inner.output)
        yield from (v.name for v in graph.output if v.name not in made)
