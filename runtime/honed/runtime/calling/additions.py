"""Adding a model: its files are opened here and sent along."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from honed.protocol import methods
from honed.protocol.errors import InvalidArgument, MissingFiles, NotFound
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.strict import Map

from . import calibration
from .endpoint import Progress
from .steps import Ask, Steps

Shapes = Mapping[str, Sequence[int]]


def steps(
    file: Path,
    name: str | None,
    options: LoadOptions,
    sets_in: str | os.PathLike[str] | None,
    progress: Progress | None,
) -> Steps[Map]:
    """Send the file, and once more with its external data where the service misses that."""
    model = name if name is not None else model_name_for(file)
    opened: dict[str, int] = {}
    sets: dict[str, int] = {}

    def load() -> Ask:
        params = LoadParams(
            model_name=model,
            files=(*opened, *sets),
            parameters=replace(options, calibration=len(sets) or None),
        )
        sent = [*opened.values(), *sets.values()]
        return Ask(methods.REPOSITORY_MODEL_LOAD, params, None, sent, progress)

    try:
        opened[file.name] = open_model(file)
        sets |= open_calibration(sets_in)
        try:
            return (yield load()).result
        except MissingFiles as missing:
            opened |= open_beside(file, missing)
            return (yield load()).result
    finally:
        _close({**opened, **sets})


def model_name_for(path: Path) -> str:
    """The name a model gets from its file: the stem with what names may not hold replaced by '-'."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem)
    return kept.lstrip("._-")[:64] or "model"


def open_model(path: Path) -> int:
    """A descriptor of the model file; raises NotFound or InvalidArgument."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{path} does not exist; check the path") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read ({error.strerror}); check who may read it") from error


def open_calibration(folder: str | os.PathLike[str] | None) -> dict[str, int]:
    """Descriptors of the sets of inputs in a folder, by name; raises NotFound or InvalidArgument."""
    opened: dict[str, int] = {}
    try:
        for path in calibration.files_in(Path(folder)) if folder is not None else ():
            opened[path.name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _close(opened)
        raise InvalidArgument(
            f"{error.filename} cannot be read ({error.strerror}); check who may read it"
        ) from error
    return opened


def open_beside(path: Path, missing: MissingFiles) -> dict[str, int]:
    """Descriptors of the external data files of the model at `path`, by name; the caller closes them.

    Raises `missing` itself where one is not there or lies outside the model's folder.
    """
    folders = (path.parent.resolve(), path.resolve().parent)
    opened: dict[str, int] = {}
    try:
        for name in missing.files:
            found = (path.parent / name).resolve()
            pure = PurePosixPath(name)
            inside = any(found.is_relative_to(folder) for folder in folders)
            if pure.is_absolute() or ".." in pure.parts or not inside:
                raise missing
            opened[name] = os.open(found, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        _close(opened)
        raise missing from error
    except MissingFiles:
        _close(opened)
        raise
    return opened


def _close(opened: Mapping[str, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def shapes_of(given: Shapes) -> dict[str, tuple[int, ...]]:
    """As they travel."""
    return {name: tuple(shape) for name, shape in given.items()}
