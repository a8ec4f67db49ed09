"""What an ONNX file says of itself: inputs, outputs, metadata. Read where it stands, without protobuf.

An app that is pointed at honed need not have ONNX installed, and its inputs' names for open sizes, and the
file's own metadata, are in no answer of the service. Field numbers are those of onnx.proto (ONNX 1.20).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

from honed.protocol.dataclass import dataclass
from honed.protocol.results import InferredTensor
from honed.runtime.dtypes import CARRIED, from_datatype
from honed.runtime.encodings import MAP_KEYS, maps_names

from .errors import Fail, InvalidArgument, InvalidProtobuf, NoSuchFile, said

Data = bytes | memoryview | mmap.mmap
Dimension = int | str | None
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_BYTES = 10  # of a varint
_OVERRIDABLE = 4  # the IR version from which values in the file may be given anew
_TEXTS = {2: "producer_name", 4: "domain", 6: "description"}  # of a model, by number
_OF_ONE = {4: "seq", 9: "optional"}  # types made of another
# Element types by number, as ONNX Runtime calls them; some honed does not carry.
TYPES = {each.number: each.onnx for each in CARRIED} | {14: "complex64", 15: "complex128", 23: "float4e2m1"}


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output: `type` as in "tensor(float)", `shape` with None or a name for sizes left open."""

    name: str
    type: str
    shape: list[Dimension]


@dataclass(slots=True)
class ModelMetadata:
    """What the file says of itself."""

    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = (1 << 63) - 1  # as ONNX Runtime has it where the file says nothing
    custom_metadata_map: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Described:
    """A model file's inputs, without those that have values in the file, its outputs, and its metadata."""

    inputs: list[NodeArg] = field(default_factory=list)
    overridable: list[NodeArg] = field(default_factory=list)
    outputs: list[NodeArg] = field(default_factory=list)
    metadata: ModelMetadata = field(default_factory=ModelMetadata)
    ir_version: int = 0

    def with_sizes(self, sizes: Mapping[str, int]) -> Described:
        """Return the description with sizes in the place of names for what the file leaves open."""
        return replace(self, inputs=_sized(self.inputs, sizes), outputs=_sized(self.outputs, sizes))

    def complete(self, inferred: Iterable[InferredTensor]) -> None:
        """Set the outputs to the types and shapes that ONNX Runtime infers, where these are known.

        A dimension that only the file names keeps its name.
        """
        known = {each.name: each for each in inferred}
        self.outputs = [_completed(each, known) for each in self.outputs]


def _completed(end: NodeArg, known: Mapping[str, InferredTensor]) -> NodeArg:
    found = known.get(end.name)
    if found is None:
        keys = known.get(maps_names(end.name)[0])  # a list of maps, which travels as two tensors
        if end.type or keys is None:
            return end
        kind = from_datatype(keys.datatype).name
        return NodeArg(end.name, next(each for each, of in MAP_KEYS.items() if of == kind), [])
    if found.shape is None:
        shape = list[Dimension]()
    else:
        named = end.shape if len(end.shape) == len(found.shape) else [None] * len(found.shape)
        sizes = zip(found.shape, found.symbols or ("",) * len(found.shape), named, strict=True)
        shape = [
            size if size >= 0 else symbol or (name if isinstance(name, str) else None)
            for size, symbol, name in sizes
        ]
    return NodeArg(end.name, f"tensor({from_datatype(found.datatype).onnx})", shape)


def _sized(ends: Iterable[NodeArg], sizes: Mapping[str, int]) -> list[NodeArg]:
    return [
        replace(end, shape=[sizes.get(size, size) if isinstance(size, str) else size for size in end.shape])
        for end in ends
    ]


def read_file(given: str | os.PathLike[str] | bytes) -> Described:
    """Return the description of a model file, given by its path or its contents.

    Raises what ONNX Runtime raises where there is no model, and TypeError for an empty path.
    """
    if isinstance(given, bytes):
        return describe(given)
    if not os.fspath(given):
        raise TypeError("the path of the model is empty; give the path of an ONNX file")
    path = Path(given)
    if not path.exists():
        raise said(NoSuchFile, f"Load model from {path} failed:Load model {path} failed. File doesn't exist")
    try:
        with path.open("rb") as file:
            # Unmapped with the last view of it.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except IsADirectoryError as error:
        raise said(InvalidProtobuf, f"Load model from {path} failed: it is a folder; give a file") from error
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise said(Fail, f"Load model from {path} failed: {error}") from error
    return describe(mapped)


def describe(data: Data) -> Described:
    """Return the description of the model in the bytes of an ONNX file.

    Raises InvalidProtobuf where they are no ONNX file, InvalidArgument where there is no graph.
    """
    found = Described()
    graph = None
    whole = memoryview(data)
    for number, value in _fields(whole):
        if number == 7:
            graph = _bytes(value)
        elif number == 14:
            entry = {n: _text(v) for n, v in _fields(_bytes(value)) if n in (1, 2)}
            found.metadata.custom_metadata_map[entry.get(1, "")] = entry.get(2, "")
        elif number in _TEXTS:
            setattr(found.metadata, _TEXTS[number], _text(value))
        elif number == 5 and isinstance(value, int):
            found.metadata.version = value
        elif number == 1 and isinstance(value, int):
            found.ir_version = value
    if graph is None:
        raise said(InvalidArgument, "No graph was found in the protobuf. Check what was given")
    _read_graph(graph, found)
    if found.ir_version < _OVERRIDABLE:
        found.overridable.clear()
    return found


def _read_graph(graph: memoryview, found: Described) -> None:
    given: list[NodeArg] = []
    initialised: set[str] = set()
    for number, value in _fields(graph):
        if number == 11:
            given.append(_value(_bytes(value)))
        elif number == 12:
            found.outputs.append(_value(_bytes(value)))
        elif number == 5:
            # The name stands behind the dimensions, in front of the data where that is raw.
            initialised.update(_text(v) for n, v in _fields(_bytes(value)) if n == 8)
        elif number == 15:  # a sparse one: its values have the name
            values = (_bytes(v) for n, v in _fields(_bytes(value)) if n == 1)
            initialised.update(_text(v) for each in values for n, v in _fields(each) if n == 8)
        elif number == 2:
            found.metadata.graph_name = _text(value)
        elif number == 10:
            found.metadata.graph_description = _text(value)
    found.inputs = [one for one in given if one.name not in initialised]
    found.overridable = [one for one in given if one.name in initialised]


def _value(info: memoryview) -> NodeArg:
    name, kind, shape = "", "", list[Dimension]()
    for number, value in _fields(info):
        if number == 1:
            name = _text(value)
        elif number == 2:
            kind, shape = _type(_bytes(value))
    return NodeArg(name, kind, shape)


def _type(proto: memoryview) -> tuple[str, list[Dimension]]:
    """Return the type and shape in a TypeProto; for anything but a tensor, its name and an empty shape."""
    for number, value in _fields(proto):
        if number == 1:
            element, shape = 0, list[Dimension]()
            for n, v in _fields(_bytes(value)):
                if n == 1 and isinstance(v, int):
                    element = v
                elif n == 2:
                    shape = [_dimension(_bytes(each)) for m, each in _fields(_bytes(v)) if m == 1]
            return f"tensor({TYPES.get(element, 'undefined')})", shape
        if number in _OF_ONE:
            inner = next((_type(_bytes(v))[0] for n, v in _fields(_bytes(value)) if n == 1), "")
            return f"{_OF_ONE[number]}({inner})", []
        if number == 5:
            entry = dict(_fields(_bytes(value)))
            inner = _type(_bytes(entry[2]))[0] if 2 in entry else ""
            return f"map({TYPES.get(_integer(entry.get(1, 0)), 'undefined')},{inner})", []
    return "", []


def _dimension(proto: memoryview) -> Dimension:
    for number, value in _fields(proto):
        if number == 1 and isinstance(value, int):
            return value if value >= 0 else None
        if number == 2:
            return _text(value) or None
    return None


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield fields by number: integers, and the bytes of all others; raise InvalidProtobuf."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value - (1 << 64) if value >> 63 else value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise _broken()
        if number == 0 or at + size > end:
            raise _broken()
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for step in range(_MOST_BYTES):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * step)
        if byte < 0x80:
            return value & ((1 << 64) - 1), at
    raise _broken()


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise _broken()
    return value


def _integer(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise _broken()
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_bytes(value)).decode(errors="replace")


def _broken() -> Exception:
    return said(InvalidProtobuf, "protobuf parsing failed: the file is no ONNX model, or damaged")
