"""Reads the interface that an ONNX file declares, without its weights and without protobuf.

Field numbers are those of onnx.proto (ONNX 1.20). The file is untrusted; the inspector's process reads it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from honed.protocol.errors import ModelRefused
from honed.runtime.dtypes import CARRIED

from . import state_pairs
from .compiled import Interface, TensorSpec

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_BYTES = 10  # Maximum length of a varint
_TYPES = {each.number: each.name for each in CARRIED}
_LETTERS = 80  # Limit of names in messages, and of the producer's
_DEPTH = 32  # Maximum depth of nested graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """An ONNX file's interface, and the files beside it that hold its data."""

    interface: Interface
    external: tuple[str, ...]


def read_declared(path: Path) -> Declared:
    """Return the interface and data files of an ONNX file.

    Raises ModelRefused if it is not an ONNX file or has an input or output that is no tensor, and OSError.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise _damage_error()
        # The file is unmapped with the last view of it.
        return _model(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def _model(data: memoryview) -> Declared:
    graph, opset, producer, state = None, 0, ["", ""], ""
    for number, value in _fields(data):
        if number == 7:
            graph = _bytes(value)
        elif number in (2, 3):
            producer[number - 2] = _text(value)
        elif number == 8:
            entry = dict(_fields(_bytes(value)))
            version = entry.get(2, 0)
            if isinstance(version, int) and _text(entry.get(1, b"")) in ("", "ai.onnx"):
                opset = version
        elif number == 14:
            entry = dict(_fields(_bytes(value)))
            if _text(entry.get(1, b"")) == state_pairs.METADATA:
                state = _text(entry.get(2, b""))
    if graph is None:
        raise _damage_error()
    inputs, outputs = _ends(graph)
    made_by = " ".join(filter(None, producer))[:_LETTERS]
    interface = Interface(inputs=inputs, outputs=outputs, opset=opset, producer=made_by)
    interface = state_pairs.add_declared_state(interface, state)
    return Declared(interface=interface, external=tuple(dict.fromkeys(_external(graph, _DEPTH))))


def _external(graph: memoryview, depth: int) -> Iterator[str]:
    """Yield the names of the files that hold data of tensors in a graph, its nodes and their graphs."""
    if not depth:
        raise _damage_error()
    for number, value in _fields(graph):
        if number == 5:
            yield from _location(_bytes(value))
        elif number == 1:
            attributes = (_bytes(v) for n, v in _fields(_bytes(value)) if n == 5)
            for n, v in (field for attribute in attributes for field in _fields(attribute)):
                if n in (5, 10):
                    yield from _location(_bytes(v))
                elif n in (6, 11):
                    yield from _external(_bytes(v), depth - 1)


def _location(tensor: memoryview) -> Iterator[str]:
    for number, value in _fields(tensor):
        if number == 13:
            entry = dict(_fields(_bytes(value)))
            if _text(entry.get(1, b"")) == "location":
                yield _text(entry.get(2, b""))


def _ends(graph: memoryview) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs of a graph, without those that have values in the file, and its outputs."""
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    initialised: set[str] = set()
    for number, value in _fields(graph):
        if number == 11:
            inputs.append(_tensor(_bytes(value)))
        elif number == 12:
            outputs.append(_tensor(_bytes(value)))
        elif number == 5:
            # The name follows the dimensions, and precedes the data if that is raw.
            initialised.update(_text(v) for n, v in _fields(_bytes(value)) if n == 8)
        elif number == 15:  # A sparse tensor, whose values have the name
            values = (_bytes(v) for n, v in _fields(_bytes(value)) if n == 1)
            initialised.update(_text(v) for each in values for n, v in _fields(each) if n == 8)
    return tuple(each for each in inputs if each.name not in initialised), tuple(outputs)


def _tensor(info: memoryview) -> TensorSpec:
    name, kind = "", None
    for number, value in _fields(info):
        if number == 1:
            name = _text(value)
        elif number == 2:
            kind = next((_bytes(v) for n, v in _fields(_bytes(value)) if n == 1), None)
    element, sizes, symbols = 0, list[int](), list[str]()
    known = False
    for number, value in _fields(kind) if kind is not None else ():
        if number == 1 and isinstance(value, int):
            element = value
        elif number == 2:
            known = True
            for n, v in _fields(_bytes(value)):
                if n == 1:
                    size, symbol = _dimension(_bytes(v))
                    sizes.append(size)
                    symbols.append(symbol)
    if element not in _TYPES:
        raise ModelRefused(f"{name[:_LETTERS]!r} is no tensor of a type that honed carries")
    shape = tuple(sizes) if known else None
    return TensorSpec(name=name, dtype=_TYPES[element], shape=shape, symbols=tuple(symbols))


def _dimension(proto: memoryview) -> tuple[int, str]:
    size, symbol = -1, ""
    for number, value in _fields(proto):
        if number == 1 and isinstance(value, int):
            size = max(value, -1)
        elif number == 2:
            symbol = _text(value)
    return size, symbol


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield fields by number: integers, and the bytes of all others; raise ModelRefused."""
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
            raise _damage_error()
        if number == 0 or at + size > end:
            raise _damage_error()
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
    raise _damage_error()


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise _damage_error()
    return value


def _text(value: int | memoryview | bytes) -> str:
    if isinstance(value, int):
        raise _damage_error()
    return bytes(value).decode(errors="replace")


def _damage_error() -> ModelRefused:
    return ModelRefused("the file is no ONNX model, or damaged; check what was given")
