"""Files that the service gave away: open, and in the caller's hands."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from honed.protocol.errors import Internal
from honed.protocol.methods import MODEL_EXPORT
from honed.protocol.strict import Map
from honed.protocol.wire import close_all


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFiles:
    """Open files, read-only, whose positions nobody shares; close it, or use it as a context manager.

    sha256: of the compiled file.
    sources: what it was compiled from, by the names it was added under, the model file first; empty for a
        model that was added compiled.
    shapes, precision: as they were asked for.
    """

    compiled: BinaryIO
    sources: Mapping[str, BinaryIO]
    sha256: str
    shapes: Mapping[str, tuple[int, ...]]
    precision: str

    def save_sources(self, folder: Path) -> Path:
        """Copy the sources into `folder` under their names and give the model file's path.

        Raises Internal for a name that leads out of the folder, and OSError.
        """
        for name, source in self.sources.items():
            path = folder / _inside(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            source.seek(0)
            with path.open("xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        return folder / next(iter(self.sources))

    def save_compiled(self, path: Path) -> Path:
        """Copy the compiled file to `path` and give that; raises OSError."""
        self.compiled.seek(0)
        with path.open("xb") as target:
            shutil.copyfileobj(self.compiled, target, 1 << 20)
        return path

    def close(self) -> None:
        """Close every file; may be called again."""
        for file in (self.compiled, *self.sources.values()):
            file.close()

    def __enter__(self) -> ExportedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def exported(result: Map, descriptors: Sequence[int]) -> ExportedFiles:
    """The result of ModelExport with its descriptors; for nonsense closes them and raises Internal."""
    try:
        told = MODEL_EXPORT.result_of(result)
        names = told.files
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
        sha256=told.sha256,
        shapes=told.shapes,
        precision=told.precision,
    )


def exported_file(descriptors: Sequence[int]) -> BinaryIO:
    """The one file that came with an answer, open for reading; raises Internal where it is not one."""
    if len(descriptors) != 1:
        close_all(descriptors)
        raise Internal(f"{len(descriptors)} descriptors came with the answer; compare versions")
    return os.fdopen(descriptors[0], "rb")


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise Internal(f"the service names a file {name[:80]!r} that leads elsewhere; compare versions")
    return path
