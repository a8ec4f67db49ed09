"""Opens the files that clients send with a model, and the files that the service returns."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from honed.protocol import methods
from honed.protocol.errors import Internal, InvalidArgument, MissingFiles, NotFound
from honed.protocol.methods import MODEL_EXPORT
from honed.protocol.params import LoadOptions, LoadParams, UploadOptions, UploadParams
from honed.protocol.peer import Progress
from honed.protocol.results import UploadResult
from honed.protocol.strict import Map
from honed.protocol.wire import Closing, close_all

from .rpc import Reply, RpcRequest, RpcSteps

Shapes = Mapping[str, Sequence[int]]
Given = str | os.PathLike[str] | bytes | bytearray | memoryview  # A path, or the contents of a file
_UNNAMED = "model.onnx"  # Name of a model that is added as bytes


def add(
    file: Path,
    name: str | None,
    options: LoadOptions,
    sets_in: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> RpcSteps[Map]:
    """Add an administrator's model; `sets_in` is a folder of calibration inputs."""
    model = name if name is not None else model_name_for(file)
    opened: dict[str, int] = {}
    sets: dict[str, int] = {}

    def load() -> RpcRequest:
        params = LoadParams(
            model_name=model,
            files=(*opened, *sets),
            parameters=replace(options, calibration=len(sets) or None),
        )
        sent = [*opened.values(), *sets.values()]
        return RpcRequest(methods.REPOSITORY_MODEL_LOAD, params, None, sent, progress)

    try:
        opened[file.name] = open_model(file)
        sets |= open_calibration(sets_in)
        return (yield from _send_files(file, opened, load)).result
    finally:
        close_all((*opened.values(), *sets.values()))


def upload(
    model: Given,
    external: Mapping[str, Given],
    options: UploadOptions,
    progress: Progress | None,
    folder: str | os.PathLike[str] | None = None,
    unchanged_since: int | None = None,
) -> RpcSteps[UploadResult]:
    """Upload an app's own model, from a path or from bytes.

    External data of a model in bytes is read from `folder`, if given. Raises InvalidArgument for files that
    changed after `unchanged_since`, in nanoseconds since 1970.
    """
    path = None if isinstance(model, bytes | bytearray | memoryview) else Path(model)
    beside = path if path is not None else Path(folder) / _UNNAMED if folder is not None else None
    out_of_memory = {_UNNAMED} if path is None else set()
    opened: dict[str, int] = {}  # Descriptors by name, the model's first
    digests: dict[str, str] = {}

    def load() -> RpcRequest:
        for name, descriptor in opened.items():
            if name not in digests:
                since = None if name in out_of_memory else unchanged_since
                if since is not None and os.fstat(descriptor).st_ctime_ns > since:
                    raise InvalidArgument(f"{name} has changed since the app opened it; open it again")
                digests[name] = _digest(name, descriptor)
        sha256 = tuple(digests[name] for name in opened)
        params = UploadParams(files=tuple(opened), sha256=sha256, parameters=options)
        return RpcRequest(methods.MODEL_BRING, params, None, list(opened.values()), progress)

    try:
        opened[path.name if path is not None else _UNNAMED] = _open(model)
        for name, given in external.items():
            opened[name] = _open(given)
        return methods.MODEL_BRING.result_of((yield from _send_files(beside, opened, load)).result)
    finally:
        close_all(opened.values())


def _send_files(file: Path | None, opened: dict[str, int], load: Callable[[], RpcRequest]) -> RpcSteps[Reply]:
    """Return the answer to a call that sends a model's files; repeat the call with missing external data.

    The external data is read from the folder of `file`; without a file, raises MissingFiles.
    """
    try:
        return (yield load())
    except MissingFiles as missing:
        if file is None:
            raise
        opened |= open_beside(file, missing)
        return (yield load())


def model_name_for(path: Path) -> str:
    """Return a model's name from its file: the stem, with '-' for each character that names may not hold."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem)
    return kept.lstrip("._-")[:64] or "model"


def open_model(path: Path) -> int:
    """Return a descriptor of the model file; raise NotFound or InvalidArgument."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read ({error.strerror}); check who may read it") from error


def open_calibration(folder: str | os.PathLike[str] | None) -> dict[str, int]:
    """Return descriptors of the sets of inputs in a folder, by name; raise NotFound or InvalidArgument."""
    opened: dict[str, int] = {}
    try:
        for path in calibration_files(Path(folder)) if folder is not None else ():
            opened[path.name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        close_all(opened.values())
        raise InvalidArgument(
            f"{error.filename} cannot be read ({error.strerror}); check who may read it"
        ) from error
    return opened


def open_beside(path: Path, missing: MissingFiles) -> dict[str, int]:
    """Return descriptors of the external data files of the model at `path`, by name; the caller closes them.

    Raises MissingFiles, which says why the first file that cannot be sent cannot: it is missing, unreadable,
    or outside the model's folder.
    """
    folders = (path.parent.resolve(), path.resolve().parent)
    opened: dict[str, int] = {}
    try:
        for name in missing.files:
            opened[name] = _open_beside(path.parent, name, folders)
    except OSError as error:
        close_all(opened.values())
        raise _unsendable(path, missing, error) from error
    except MissingFiles:
        close_all(opened.values())
        raise
    return opened


def _open_beside(folder: Path, name: str, folders: Sequence[Path]) -> int:
    """Return a descriptor of a data file; raise OSError, or MissingFiles for a file outside of `folders`."""
    pure, found = PurePosixPath(name), Path(os.path.realpath(folder / name))  # Ends in a loop of links, too
    if pure.is_absolute() or ".." in pure.parts:
        raise _unsendable_file(
            name, "it has a path that leads out of the model's folder; export the model again"
        )
    if not any(found.is_relative_to(each) for each in folders):
        why = f"it is a link to {str(found)[:300]!r}, out of the model's folder; copy the file there instead"
        raise _unsendable_file(name, why)
    return os.open(found, os.O_RDONLY | os.O_CLOEXEC)


def _unsendable(path: Path, missing: MissingFiles, error: OSError) -> MissingFiles:
    """Return the error that names all missing files, or if none is missing the file that cannot be opened."""
    absent = tuple(name for name in missing.files if not os.path.exists(path.parent / name))
    if absent:
        listed = ", ".join(name[:200] for name in absent[:5]) + (", ..." if len(absent) > 5 else "")
        sentence = f"the model's data files are missing beside it: {listed}; put them in the same folder"
        return MissingFiles(sentence, absent, absent)
    return _unsendable_file(
        str(error.filename), f"it cannot be read ({error.strerror}); check who may read it"
    )


def _unsendable_file(name: str, why: str) -> MissingFiles:
    sentence = f"the model's data file {name[:200]!r} cannot be sent: {why}"
    return MissingFiles(sentence, (sentence,), (name,))


def shapes_of(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes as tuples, as parameters of calls need them."""
    return {name: tuple(shape) for name, shape in shapes.items()}


def _open(model_file: Given) -> int:
    if not isinstance(model_file, bytes | bytearray | memoryview):
        return open_model(Path(model_file))
    descriptor = os.memfd_create("honed-model", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(model_file)
    return descriptor


def _digest(name: str, descriptor: int) -> str:
    try:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InvalidArgument(f"{name} cannot be read ({error.strerror}); give an ordinary file") from error


MAX_INPUT_SETS = 16


def calibration_files(folder: Path) -> list[Path]:
    """Return the files of input sets in a folder, sorted.

    Raises NotFound if there is no such folder, InvalidArgument if it cannot be read, or has no set or more
    than MAX_INPUT_SETS.
    """
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".npz")
    except FileNotFoundError as error:
        raise NotFound(f"there is no folder {folder} of calibration inputs; check --calibration") from error
    except OSError as error:
        raise InvalidArgument(
            f"calibration folder {folder} cannot be read ({error.strerror}); give a folder you may read"
        ) from error
    if not found:
        raise InvalidArgument(
            f"calibration folder {folder} holds no .npz file; write one for each set of inputs, "
            "as numpy.savez('0.npz', INPUT=array) does"
        )
    if len(found) > MAX_INPUT_SETS:
        raise InvalidArgument(
            f"calibration folder {folder} holds {len(found)} sets of inputs; give at most {MAX_INPUT_SETS}"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFiles(Closing):
    """Open files, read-only, whose positions nobody shares; close it, or use it as a context manager.

    sha256: of the compiled file.
    sources: the files it was compiled from, by the names under which they were added, the model file first;
        empty for a model that was added compiled.
    shapes, precision: as requested when the model was added.
    """

    compiled: BinaryIO
    sources: Mapping[str, BinaryIO]
    sha256: str
    shapes: Mapping[str, tuple[int, ...]]
    precision: str

    def save_sources(self, folder: Path) -> Path:
        """Copy the sources into `folder` under their names, and return the path of the model file.

        Raises Internal for a name that leads out of the folder, and OSError.
        """
        for name, source in self.sources.items():
            path = folder / _inside(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            _save(source, path)
        return folder / next(iter(self.sources))

    def save_compiled(self, path: Path) -> Path:
        """Copy the compiled file to `path` and return `path`; raise OSError."""
        _save(self.compiled, path)
        return path

    def close(self) -> None:
        """Close every file; may be called again."""
        for file in (self.compiled, *self.sources.values()):
            file.close()


def open_export(result: Map, descriptors: Sequence[int]) -> ExportedFiles:
    """Return the result of ModelExport with its descriptors.

    Closes the descriptors and raises Internal if the result is invalid.
    """
    try:
        answer = MODEL_EXPORT.result_of(result)
        names = answer.files
        if not names or len(set(names[1:])) != len(names) - 1 or len(names) != len(descriptors):
            raise Internal(
                f"{len(descriptors)} descriptors came for the model's files {names}; compare versions"
            )
    except Internal:
        close_all(descriptors)
        raise
    compiled, *sources = (os.fdopen(descriptor, "rb") for descriptor in descriptors)
    return ExportedFiles(
        compiled=compiled,
        sources=dict(zip(names[1:], sources, strict=True)),
        sha256=answer.sha256,
        shapes=answer.shapes,
        precision=answer.precision,
    )


def open_single_file(descriptors: Sequence[int]) -> BinaryIO:
    """Return the one file of an answer, open for reading; raise Internal unless there is exactly one."""
    if len(descriptors) != 1:
        close_all(descriptors)
        raise Internal(f"{len(descriptors)} descriptors came with the answer; compare versions")
    return os.fdopen(descriptors[0], "rb")


def _save(file: BinaryIO, path: Path) -> None:
    file.seek(0)
    with path.open("xb") as target:
        shutil.copyfileobj(file, target, 1 << 20)


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise Internal(f"the service names a file {name[:80]!r} that leads elsewhere; compare versions")
    return path
