"""Stores models on disk: content-addressed objects, and a small checksummed manifest for each name.

    objects/<sha256>      compiled files, and the sources they came from
    models/<name>.json    the manifest of a model, which exists once this file is renamed to its place, or of
                          a variant, whose name contains the sizes: <name>@<sizes>
    staging/<random>/     work in progress; emptied at start
    damaged/              damaged files, set aside for people

Manifests contain their format, so that an older honed does not change them. Each file is written beside its
place, synced, renamed and its folder synced, so that a crash leaves every model in its old or new state. One
process at a time uses the store (see `lock`). I/O blocks: call it from a thread.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from honed.machine.files import open_regular, put_aside, read_regular, replacing, sync_folder
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument, Unavailable
from honed.protocol.results import ModelSettings, ModelVersion
from honed.protocol.values import OptimisationCheck
from honed.protocol.wire import close_all

from .compiled import Interface
from .files import StoredFile, describe, explain_errors, relative
from .names import STORED
from .versions import VersionHistory, first

# The format of manifests: 1 is not written in them, from 3 on the compiled file is optional, 4 added variants
# and states, and 5 owners.
FORMAT = 5
_NO_FILE = {errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENOENT, errno.ENXIO, errno.EFBIG}  # Permanent
_MAX_MANIFEST = 16 << 20  # Bytes
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """The times in ms of a run by the compiled file and by the CPU engine, from their last comparison.

    `device` and `runtime` are the fingerprints of the device and of ONNX Runtime then. With `same_cores` the
    device is the processor that the CPU engine uses. `others_percent` is the share of the processors that
    other programs took, if that may have distorted the times; otherwise it is None, and not written, so that
    earlier versions of honed can read the manifest.
    """

    gpu_ms: float
    cpu_ms: float
    device: str = ""
    runtime: str = ""
    same_cores: bool = False
    others_percent: float | None = field(default=None, metadata=strict.ABSENT)


@dataclass(frozen=True, kw_only=True)
class EngineDecision:
    """The decision which engine serves a model.

    `requested` is the engine that the user requested, "" for the configured one. `chosen` is the result of a
    comparison, and `reason` explains it, or why there is no compiled file; both are "" while the model is
    being compiled. `times` are those of the comparison. `pinned_engine` overrides the others, "" if none is
    pinned. `awaits_compiler`: there is no compiled file for lack of a compiler or a device.
    """

    requested: str = field(default="", metadata={"wire": "wanted"})
    chosen: str = ""
    reason: str = field(default="", metadata={"wire": "why"})
    times: EngineTimes | None = None
    pinned_engine: str = ""
    awaits_compiler: bool = False


class NewerFormat(InvalidArgument):
    """Raised when a newer honed wrote a manifest."""


@dataclass(frozen=True, kw_only=True)  # Cached properties need a __dict__, so there are no slots
class Manifest:
    """The manifest of a stored model; `compiled` is the file of `history.current`, None if there is none.

    `device` is the configured name of the device that it was added for, "" for the default;
    `placement_reason` says why. `interface` is that of the source, None if the CPU engine does not run it.
    `by_hand` marks a variant that a user requested. `state` maps outputs to the inputs that receive them in
    the next request of a sequence, as the user declared. `owner` is the uid of the user of an own model, None
    for administrators' models. `settings` apply to all engines and versions. `optimisation` is the check how
    far ONNX Runtime may optimise the source, None before it. `compared_devices` is in manifests of honed 0.1
    that chose `device` by comparison; None: the user requested it.
    """

    name: str
    added: float  # Seconds since 1970
    compiled: StoredFile | None
    history: VersionHistory
    sources: tuple[StoredFile, ...]  # The model file first; enough to compile it again
    shapes: dict[str, tuple[int, ...]]
    precision: str
    device: str = ""
    placement_reason: str = field(default="", metadata={"wire": "placed"})
    interface: Interface | None = None
    decision: EngineDecision = EngineDecision()  # Stored flat, as if its fields were the manifest's
    by_hand: bool = False
    state: dict[str, str] = field(default_factory=dict)
    owner: int | None = None
    settings: ModelSettings = field(default_factory=ModelSettings)
    optimisation: OptimisationCheck | None = None
    compared_devices: str | None = field(default=None, metadata=strict.ABSENT | {"wire": "raced"})

    def with_decision(self, **changes: Any) -> Manifest:
        """Return the manifest with changes to its decision."""
        return replace(self, decision=replace(self.decision, **changes))

    def engine_wanted(self, configured: str) -> str:
        """Return the pinned engine, else the requested one, else `configured`: fastest, gpu or cpu."""
        return self.decision.pinned_engine or self.decision.requested or configured

    @property
    def for_app(self) -> bool:
        """Return whether an app runs the model by itself, and requests only its compiled file."""
        return self.owner is not None and self.decision.requested == "gpu"

    @cached_property
    def key(self) -> str:
        """The SHA-256 of the compiled file, or of the source if there is none."""
        return self.compiled.sha256 if self.compiled is not None else self.source_key

    @cached_property
    def source_key(self) -> str:
        """The source's key in the CPU engine: its SHA-256, or one over all of its files."""
        if len(self.sources) == 1:
            return self.sources[0].sha256
        files = "\n".join(f"{file.sha256} {file.name}" for file in self.sources)
        return hashlib.sha256(files.encode()).hexdigest()

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The files of the model, the compiled one first."""
        return (*((self.compiled,) if self.compiled is not None else ()), *self.sources)


class Store:
    """The models under one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._objects = state_dir / "objects"
        self._models = state_dir / "models"
        self._staging = state_dir / "staging"
        self._damaged = state_dir / "damaged"
        self._unread = False  # A manifest could not be read, so its files are not known

    def open(self) -> tuple[dict[str, Manifest], list[str]]:
        """Create the folders, remove remains of a crash, and read every manifest.

        Returns the models by name, and a sentence for each damaged one. Raises PermissionDenied or
        ResourceExhausted if the folder cannot be used, and NewerFormat, without a change, if a newer honed
        wrote to it.
        """
        with explain_errors(self._objects.parent):
            for folder in (self._staging, self._damaged):
                if os.path.lexists(folder) and not folder.is_dir():
                    put_aside(folder)
            for folder in (self._objects, self._models, self._staging, self._damaged):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            models, damaged = self._read_all()
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir(mode=0o700, exist_ok=True)
            self._collect(models.values())
            return models, damaged

    def object(self, file: StoredFile) -> Path:
        """Return the path of a stored file."""
        return self._objects / file.sha256

    def form(self, manifest: Manifest, key: str) -> Path:
        """Return the file that an engine loads: the compiled one, or the source with its data beside it.

        Raises Unavailable if the data cannot be linked beside the source.
        """
        if manifest.compiled is not None and manifest.compiled.sha256 == key:
            return self.object(manifest.compiled)
        if len(manifest.sources) == 1:
            return self.object(manifest.sources[0])
        return self.link_source(manifest, self._staging / f"source-{key}")

    def run_as(self, path: str, half: str) -> str:
        """Return the file that ONNX Runtime loads for the source at `path`: its fp16 form `half`, if any."""
        form = self._objects / half
        return str(form) if half and form.is_file() else path

    def keep(self, form: Path) -> str:
        """Link an fp16 file into the objects, and return its SHA-256."""
        file = describe(form, form.name)
        with explain_errors(self._objects), suppress(FileExistsError):
            os.link(form, self.object(file))
        return file.sha256

    def link_source(self, manifest: Manifest, folder: Path) -> Path:
        """Link the source of a model and its data into a folder of the store, and return the source's path.

        The folder is created if needed. Raises Unavailable if a file cannot be linked.
        """
        try:
            for file in manifest.sources:
                place = folder / relative(file.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    os.link(self.object(file), place)
        except OSError as error:
            raise Unavailable(
                f"the stored files of {manifest.name} cannot be used ({error.strerror}); add the model again"
            ) from error
        return folder / relative(manifest.sources[0].name)

    def open_files(self, manifest: Manifest) -> tuple[int, ...]:
        """Return read-only descriptors of the model's compiled file and its sources, in this order.

        The caller owns them. Raises Unavailable if one cannot be opened.
        """
        opened: list[int] = []
        try:
            opened.extend(self.open_file(file) for file in manifest.files)
        except BaseException:
            close_all(opened)
            raise
        return tuple(opened)

    def open_file(self, file: StoredFile) -> int:
        """Return a read-only descriptor of a stored file.

        The caller owns the descriptor. Raises Unavailable if there is no such file.
        """
        try:
            with open_regular(self.object(file)) as opened:
                return os.dup(opened.fileno())
        except OSError as error:
            raise Unavailable(
                f"the stored {file.name[:80]!r} cannot be read ({error.strerror}); add the model again"
            ) from error

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """Create a folder for work in progress, and remove it afterwards."""
        with explain_errors(self._staging):
            folder = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, manifest: Manifest, staged: Iterable[tuple[StoredFile, Path]]) -> None:
        """Store a model: move its staged files to the objects, then write its manifest.

        The files must be synced. Replaces a model of the same name. Raises ResourceExhausted if the disk is
        full; the models are then unchanged, and `sweep` removes files that were moved.
        """
        with explain_errors(self._objects):
            for file, path in staged:
                if self.object(file).is_dir():
                    self._put_aside(self.object(file))
                os.rename(path, self.object(file))
            sync_folder(self._objects)
        with replacing(self._manifest(manifest.name)) as target:
            target.write(_dumps(manifest))

    def remove(self, name: str, remaining: Iterable[Manifest]) -> None:
        """Delete the manifest of `name`, and the objects that none of the `remaining` models uses."""
        with explain_errors(self._models):
            with suppress(FileNotFoundError):
                self._manifest(name).unlink()
            sync_folder(self._models)
            self._collect(remaining)

    def sweep(self, models: Iterable[Manifest]) -> None:
        """Delete the objects that none of `models`, which must be all models, uses."""
        with explain_errors(self._objects):
            self._collect(models)

    def set_aside(self, manifest: Manifest) -> None:
        """Move a damaged compiled file to damaged/; its manifest and sources stay."""
        if manifest.compiled is not None and os.path.lexists(self.object(manifest.compiled)):
            self._put_aside(self.object(manifest.compiled))

    def _manifest(self, name: str) -> Path:
        return self._models / f"{name}.json"

    def _read_all(self) -> tuple[dict[str, Manifest], list[str]]:
        models: dict[str, Manifest] = {}
        broken: list[tuple[Path, Exception]] = []
        unfinished = []
        for path in sorted(self._models.iterdir()):
            if path.name.startswith("."):
                unfinished.append(path)  # A manifest that was being written
                continue
            try:
                manifest = _loads(path.name.removesuffix(".json"), read_regular(path, _MAX_MANIFEST))
            except (ValueError, RecursionError, OSError) as error:
                broken.append((path, error))
            else:
                models[manifest.name] = manifest
        for path in unfinished:
            self._discard(path)
        return models, [self._set_aside(path, error) for path, error in broken]

    def _set_aside(self, path: Path, error: Exception) -> str:
        """Put aside a manifest that cannot be used, and return the message about it.

        A manifest that cannot be read now, for an error of the disk or of rights, stays in place, as do the
        files that it may name.
        """
        name = os.fsencode(path.name).decode(errors="replace")
        if isinstance(error, OSError) and error.errno not in _NO_FILE:
            self._unread = True
            return f"{name}: it cannot be read ({error.strerror}); mend that and start the service again"
        reason = error.strerror if isinstance(error, OSError) else error
        if self._put_aside(path):
            return f"{name}: {reason}; it was moved to {self._damaged}, add the model again"
        return f"{name}: {reason}; remove it and add the model again"

    def _put_aside(self, path: Path) -> bool:
        """Move a file to a new place in damaged/; return whether that succeeded."""
        try:
            folder = self._damaged
            if os.path.lexists(folder / path.name):
                folder = Path(tempfile.mkdtemp(prefix=f"{path.name[:80]}-", dir=folder))
            os.rename(path, folder / path.name)
            sync_folder(path.parent)
        except OSError as error:
            _log.error("%s is not usable and cannot be moved away: %s", path, error)
            return False
        return True

    def _discard(self, path: Path) -> None:
        """Delete an unneeded file; ignore a folder, or a failure."""
        try:
            path.unlink()
        except IsADirectoryError:
            self._put_aside(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s cannot be deleted: %s", path, error)

    def _collect(self, models: Iterable[Manifest]) -> None:
        if self._unread:
            return
        models = list(models)
        used = {file.sha256 for manifest in models for file in manifest.files}
        used |= {v.sha256 for manifest in models for v in manifest.history.versions if v.kept}
        used |= {manifest.optimisation.session_config.half for manifest in models if manifest.optimisation}
        for path in self._objects.iterdir():
            if path.name not in used:
                self._discard(path)


def version_file(manifest: Manifest, version: ModelVersion) -> StoredFile:
    """Return the stored file of a version of the model."""
    return StoredFile(name=f"{manifest.name}.honed", sha256=version.sha256, nbytes=version.nbytes)


def to_plain(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as a map to store, without its format."""
    plain = strict.to_plain(manifest)
    return {**plain.pop("decision"), **plain}


def from_plain(plain: Any, where: str) -> Manifest:
    """Return a manifest from a stored map; raise SchemaError, in which `where` names it."""
    if isinstance(plain, dict):
        names = {each.wire for each in strict.fields_of(EngineDecision)}
        decision = {name: value for name, value in plain.items() if name in names}
        plain = {name: value for name, value in plain.items() if name not in names} | {"decision": decision}
    return strict.from_plain(Manifest, plain, where=where)


def _dumps(manifest: Manifest) -> bytes:
    body = json.dumps({"format": FORMAT, **to_plain(manifest)}, sort_keys=True)
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n".encode()


def _loads(name: str, data: bytes) -> Manifest:
    """Parse a stored manifest; raise ValueError with a reason, or NewerFormat."""
    digest, _, body = data.decode(errors="replace").removesuffix("\n").partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise ValueError("it does not match its checksum")
    plain: Any = json.loads(body)
    if isinstance(plain, dict):
        written = plain.pop("format", 1)
        if not isinstance(written, int) or written < 1:
            raise ValueError(f"its format is {written!r:.40}")
        if written > FORMAT:
            raise NewerFormat(
                f"model {name} was stored by a newer honed, in format {written}, and this one knows formats "
                f"up to {FORMAT}; install the newer honed again, nothing was changed"
            )
    manifest = from_plain(plain, name)
    if manifest.name != name or not STORED.fullmatch(name):
        raise ValueError(f"it speaks of model {manifest.name!r}")
    return manifest


def begin(file: StoredFile, *, schedules: str, why: str, now: float) -> VersionHistory:
    """Return the history of a model that is new with this compiled file."""
    return first(new_version(file, 1, schedules=schedules, why=why, now=now, settled=True), now)


def new_version(
    file: StoredFile,
    number: int,
    *,
    schedules: str,
    why: str,
    now: float,
    settled: bool,
    brought: tuple[str, ...] = (),
) -> ModelVersion:
    """Return a version whose file is about to be stored."""
    return ModelVersion(
        number=number,
        sha256=file.sha256,
        nbytes=file.nbytes,
        schedules=schedules,
        made=now,
        why=why,
        old_us=None,
        new_us=None,
        settled=settled,
        kept=True,
        quarantine="",
        brought=brought,
    )
