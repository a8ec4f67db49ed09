"""Reads and writes `.honed` files: a preamble, a msgpack header and the constants, which are memory-mapped.

docs/dev/format.md is the specification. Every byte of a file is checked: the preamble by its own rules, the
header and the constant section by SHA-256, and the padding between them must be zero.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgpack

from honed.machine.files import open_regular, replacing
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument, ModelFileError, NotFound, OtherFormat
from honed.protocol.wire import Closing
from honed.runtime.dtypes import dtype

from . import validate
from .model import CONSTANT_ALIGN, FORMAT_VERSION, CompiledModel, Probe

if TYPE_CHECKING:  # The service reads files without NumPy
    from numpy.typing import NDArray

MAGIC = b"HONED\r\n\x1a"
MAX_HEADER_BYTES = 32 << 20
MAX_HEADER_VALUES = 1 << 20  # Values in all maps and lists of a header together, as files are untrusted
_MAX_ITEMS = 1 << 18  # Items of one map or list, for which msgpack reserves memory first
_PREAMBLE = struct.Struct("<8sIIQ32s32s")


class _Preamble(NamedTuple):
    """The fields of the first 88 bytes of a file."""

    header_bytes: int
    constant_bytes: int
    header_sha256: bytes
    constant_sha256: bytes

    @property
    def constants_at(self) -> int:
        """The offset of the constant section in bytes: the first page after the header."""
        return -(-(_PREAMBLE.size + self.header_bytes) // CONSTANT_ALIGN) * CONSTANT_ALIGN

    @property
    def file_bytes(self) -> int:
        return self.constants_at + self.constant_bytes


class ModelFile(Closing):
    """An open `.honed` file: its model, and its constants as read-only views of the mapped file."""

    def __init__(self, path: Path, model: CompiledModel, mapped: mmap.mmap, constants_at: int) -> None:
        self.path = path
        self.model = model
        self._mapped: mmap.mmap | None = mapped
        self._constants_at = constants_at

    def constant(self, index: int) -> NDArray[Any]:
        """Return the value of buffer `index`, read-only, in the buffer's dtype and shape, without copying it.

        Raises InvalidArgument if that buffer is no constant or the file is closed.
        """
        import numpy as np

        buffers = self.model.buffers
        if not 0 <= index < len(buffers) or buffers[index].place != "constant":
            raise InvalidArgument(f"buffer {index} of {self.path} is not a constant")
        if self._mapped is None:
            raise InvalidArgument(f"{self.path} is closed; read it again")
        buffer = buffers[index]
        offset = self._constants_at + buffer.offset
        return np.ndarray(buffer.shape, dtype(buffer.dtype).numpy, self._mapped, offset)

    def inputs(self, probe: Probe) -> dict[str, NDArray[Any]]:
        """Return the inputs of a probe of the model, by name; raise as `constant` does."""
        tensors = zip(self.model.inputs, probe.inputs, strict=True)
        return {tensor.name: self.constant(index) for tensor, index in tensors}

    def form(self, number: int) -> ModelFile:
        """Return size specialisation `number` as a file for the caller to close; raise InvalidArgument."""
        if self._mapped is None:
            raise InvalidArgument(f"{self.path} is closed; read it again")
        return ModelFile(self.path, self.model.forms[number].model, self._mapped, self._constants_at)

    def close(self) -> None:
        """Release the file; arrays from `constant` keep it mapped as long as they exist."""
        self._mapped = None


def write(
    path: str | os.PathLike[str],
    model: CompiledModel,
    constants: Mapping[int, NDArray[Any]],
    forms: Sequence[Mapping[int, NDArray[Any]]] = (),
) -> None:
    """Write `model` with the value of each of its constant buffers, by buffer index, durably to `path`.

    `forms` are the constants of each of its size specialisations; of several values at one offset, the
    model's own or else the first is written.

    `path` is replaced at once or not at all. Raises ModelFileError if the model breaks a rule of `validate`
    or a value does not fit its buffer, and ResourceExhausted if the disk is full.
    """
    validate.check(model)
    values = _check_constants(model, constants)
    for form, own in zip(model.forms, forms, strict=True):
        values |= _check_constants(form.model, own) | values
    header = msgpack.packb(strict.to_plain(model), use_bin_type=True)
    if len(header) > MAX_HEADER_BYTES:
        raise ModelFileError(
            f"the model's header would take {len(header)} bytes and {MAX_HEADER_BYTES} are allowed; "
            "compile a smaller model"
        )
    draft = _Preamble(len(header), model.constant_bytes, hashlib.sha256(header).digest(), bytes(32))
    with replacing(Path(path)) as file:
        file.write(_pack(draft))
        file.write(header)
        file.write(bytes(draft.constants_at - _PREAMBLE.size - len(header)))
        digest = _write_constants(file, model, sorted(values.items()))
        file.seek(0)
        file.write(_pack(draft._replace(constant_sha256=digest)))


def read(path: str | os.PathLike[str], verify: bool = True) -> ModelFile:
    """Open a `.honed` file and check all of it; `verify=False` does not hash the constants.

    Raises NotFound if there is no such file, and ModelFileError if anything is wrong with it.
    """
    path = Path(path)
    mapped = _map(path)
    preamble = _preamble(path, mapped)
    header = mapped[_PREAMBLE.size : _PREAMBLE.size + preamble.header_bytes]
    if hashlib.sha256(header).digest() != preamble.header_sha256:
        raise ModelFileError(
            f"{path} is damaged: its header does not match its checksum; compile the model again"
        )
    if any(mapped[_PREAMBLE.size + preamble.header_bytes : preamble.constants_at]):
        raise ModelFileError(
            f"{path} is damaged: the padding after its header is not zero; compile the model again"
        )
    model = _model(path, header)
    if model.constant_bytes != preamble.constant_bytes:
        raise ModelFileError(
            f"{path} contradicts itself: its header says {model.constant_bytes} bytes of constants and its "
            f"preamble {preamble.constant_bytes}; compile the model again"
        )
    with memoryview(mapped)[preamble.constants_at :] as constants:
        if verify and hashlib.sha256(constants).digest() != preamble.constant_sha256:
            raise ModelFileError(
                f"{path} is damaged: its constants do not match their checksum; compile the model again"
            )
    return ModelFile(path, model, mapped, preamble.constants_at)


def _check_constants(model: CompiledModel, constants: Mapping[int, NDArray[Any]]) -> dict[int, NDArray[Any]]:
    """Return the values of constant buffers that are not empty, by offset; raise ModelFileError."""
    wanted = {i for i, buffer in enumerate(model.buffers) if buffer.place == "constant"}
    for index in sorted(wanted.symmetric_difference(constants)):
        problem = "has no value" if index in wanted else "has a value but is not a constant"
        raise ModelFileError(f"buffer {index} {problem}; give one array for each constant buffer")
    values = {}
    for index in wanted:
        buffer, value = model.buffers[index], constants[index]
        if value.dtype != dtype(buffer.dtype).numpy or value.shape != buffer.shape:
            raise ModelFileError(
                f"the value of buffer {index} is {value.dtype}{list(value.shape)} and the buffer is "
                f"{buffer.dtype}{list(buffer.shape)}; give an array of the buffer's type and shape"
            )
        if value.size:
            values[buffer.offset] = value
    return values


def _write_constants(file: BinaryIO, model: CompiledModel, values: list[tuple[int, NDArray[Any]]]) -> bytes:
    """Write the constant section and return its SHA-256."""
    import numpy as np

    digest, at = hashlib.sha256(), 0
    for offset, value in values:
        gap, data = bytes(offset - at), np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        for part in (gap, data):
            file.write(part)
            digest.update(part)
        at = offset + value.nbytes
    tail = bytes(model.constant_bytes - at)
    file.write(tail)
    digest.update(tail)
    return digest.digest()


def _pack(preamble: _Preamble) -> bytes:
    return _PREAMBLE.pack(MAGIC, FORMAT_VERSION, *preamble)


def _map(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < _PREAMBLE.size:
                raise ModelFileError(
                    f"{path} is not a whole .honed file: it has {size} bytes; compile the model again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}; give the path of a .honed file") from error
    except OSError as error:
        raise ModelFileError(
            f"{path} cannot be read ({error.strerror}); give a .honed file you may read"
        ) from error


def _preamble(path: Path, mapped: mmap.mmap) -> _Preamble:
    magic, version, *figures = _PREAMBLE.unpack(mapped[: _PREAMBLE.size])
    preamble = _Preamble(*figures)
    if magic != MAGIC:
        raise ModelFileError(f"{path} is not a .honed file; give a file that `hone compile` wrote")
    if version != FORMAT_VERSION:
        raise OtherFormat(
            f"{path} is of format version {version} and this honed reads {FORMAT_VERSION}; "
            "compile the model again"
        )
    if preamble.header_bytes > MAX_HEADER_BYTES:
        raise ModelFileError(
            f"{path} announces a header of {preamble.header_bytes} bytes; compile the model again"
        )
    if preamble.file_bytes != len(mapped):
        raise ModelFileError(
            f"{path} has {len(mapped)} bytes instead of {preamble.file_bytes}: it was cut or something was "
            "added; compile the model again"
        )
    return preamble


def _model(path: Path, header: bytes) -> CompiledModel:
    values = _Values()
    try:
        plain = msgpack.unpackb(
            header,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=values.map,
            list_hook=values.list,
            max_bin_len=0,
            max_ext_len=0,
            max_str_len=len(header),
            max_array_len=_MAX_ITEMS,
            max_map_len=_MAX_ITEMS,
        )
        model = strict.from_plain(CompiledModel, plain, where="model")
    except (ValueError, RecursionError) as error:  # Errors of msgpack are ValueErrors, and so is SchemaError
        raise ModelFileError(
            f"the header of {path} is malformed ({error}); compile the model again"
        ) from error
    validate.check(model)
    return model


class _Values:
    """A counter of a header's values during parsing, so that a few bytes cannot expand to much memory."""

    def __init__(self) -> None:
        self._left = MAX_HEADER_VALUES

    def map(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        """Return the map of these pairs; raise ValueError for a repeated key."""
        self._count(2 * len(pairs))
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a map has the same key twice")
        return found

    def list(self, items: list[object]) -> list[object]:
        """Count the items of a list and return it."""
        self._count(len(items))
        return items

    def _count(self, values: int) -> None:
        self._left -= 1 + values
        if self._left < 0:
            raise ValueError(f"it holds more than {MAX_HEADER_VALUES} values")
