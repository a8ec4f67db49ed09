"""Stages the files of a model to be compiled: received from a client, or copied from the store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.store.files import StoredFile, receive
from honed.daemon.store.store import Manifest, Store
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument, ModelRefused, Unavailable
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.values import ObservedSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """The files in a staging folder, and how to compile them; `device` is the one the user requested.

    `calibration` is a folder of the user's inputs, None if there are none. `existing_build` is a compiled
    file of the model for other shapes, whose precision is reused. Without `foreground` no client waits.
    """

    folder: Path
    sources: tuple[tuple[StoredFile, Path], ...]  # Source files; empty for a compiled file
    model_file: Path  # The ONNX file, or the compiled file
    shapes: dict[str, tuple[int, ...]]
    precision: str
    device: str | None
    calibration: Path | None = None
    existing_build: Path | None = None
    foreground: bool = True
    state: dict[str, str] = field(default_factory=dict)  # State that the user declared: inputs by output
    owner: int | None = None  # Owner, as in the manifest
    sizes: tuple[ObservedSizes, ...] = ()  # Sizes to specialise partitions for
    keep_slower: bool = False  # Keep specialisations even if the CPU engine is faster
    seconds: float | None = None  # Limit of compile time, below the configured one


async def stage(
    params: LoadParams, descriptors: Sequence[int], options: LoadOptions, folder: Path, most: int
) -> Staged:
    """Receive the files that a client sent, of at most `most` bytes in all.

    Raises InvalidArgument if a compiled file comes with other files or options.
    """
    given, calibration = folder / "given", folder / "calibration"
    sources = len(params.files) - (options.calibration or 0)
    files = []
    for number, (name, descriptor) in enumerate(zip(params.files, descriptors, strict=True)):
        place = given if number < sources else calibration
        file, path = await in_thread(receive, descriptor, name, place, most)
        most -= file.nbytes
        files.append((file, path))
    compiled = await in_thread(is_compiled, files[0][1])
    if compiled and (len(files) > 1 or options.shapes or options.precision not in (None, "auto")):
        raise InvalidArgument(
            f"{params.files[0]} is compiled already; shapes, precision, calibration inputs and external "
            "data cannot be given"
        )
    return Staged(
        folder=folder,
        sources=() if compiled else tuple(files[:sources]),
        model_file=files[0][1],
        shapes=dict(options.shapes or {}),
        precision=options.precision or "auto",
        device=options.device or None,
        calibration=calibration if options.calibration else None,
        state=dict(options.state or {}),
    )


def stage_again(store: Store, manifest: Manifest, folder: Path, most: int) -> Staged:
    """Copy the stored sources of a model to `folder` under their names (blocking).

    Raises ModelRefused if they are damaged, or there are none.
    """
    files = []
    for file in manifest.sources:
        try:
            descriptor = store.open_file(file)
        except Unavailable as error:
            raise ModelRefused(str(error)) from error
        try:
            copied, path = receive(descriptor, file.name, folder / "given", most)
        finally:
            os.close(descriptor)
        if copied.sha256 != file.sha256:
            raise ModelRefused(f"the stored {file.name} is damaged too; add the model again")
        files.append((copied, path))
    if not files:
        raise ModelRefused("it was added compiled, so it cannot be compiled again; add it again")
    given = files[0][1]
    left_out = ("calibration", "existing_build", "sizes", "keep_slower", "seconds", "foreground")
    return strict.copy_fields(
        Staged, manifest, *left_out, folder=folder, sources=tuple(files), model_file=given, device=None
    )


def copies(staged: Staged) -> list[tuple[StoredFile, Path]]:
    """Return hard links to the sources, which can be moved to the store (blocking)."""
    copies = []
    for number, (file, path) in enumerate(staged.sources):
        copy = staged.folder / f"source-{number}"
        os.link(path, copy)
        copies.append((file, copy))
    return copies


def is_compiled(path: Path) -> bool:
    """Return whether a file is a compiled file, by its first bytes."""
    from honed.runtime.compiled import modelfile

    with path.open("rb") as file:
        return file.read(len(modelfile.MAGIC)) == modelfile.MAGIC
