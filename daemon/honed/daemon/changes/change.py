"""Provides the transaction that every change to a model runs in.

    async with changes.begin(name) as change:
        staged = await change.sources(manifest)
        made = await building.build(change, staged, [server])
        await change.commit(entering, [(made.file, made.path)])

A change owns its staging folder, with files received from a client or copied from the store, and pins the
files that it has workers load. Both are released when the change ends, so that nothing remains of an
uncommitted change. `StoreWriter` writes manifests one at a time, those that the core asks for as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from honed.daemon.aio import clearing_in_thread, in_thread, to_its_end
from honed.daemon.core.messages import Added, Event, LoadReport, Removed, SuccessorReady, VersionChosen
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.pool import EngineManager
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import CompiledFileInfo
from honed.daemon.store.files import StoredFile, receive
from honed.daemon.store.inspector import Inspector
from honed.daemon.store.store import Manifest, Store
from honed.daemon.worker.builder import Progress
from honed.protocol import strict
from honed.protocol.errors import (
    AlreadyExists,
    HonedError,
    InvalidArgument,
    ModelRefused,
    ResourceExhausted,
    Unavailable,
)
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.service import JobStatus
from honed.protocol.strict import Map
from honed.protocol.values import ObservedSizes

from .optimisations import OptimisationChecks

# Progress of an addition, from 0 to 1, at the end of each stage.
RECEIVED, COMPILED, BUILT = 0.02, 0.8, 0.98
_RETRY_SECONDS = 30.0  # Pause before a failed write is retried
_log = logging.getLogger(__name__)
Notify = Callable[[Map], None]
Entered = Added | SuccessorReady | VersionChosen  # Events by which a manifest is served


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A compiled model loaded in the worker of `server`; `measured` describes a comparison of devices."""

    server: EngineServer
    path: Path
    file: StoredFile
    model: CompiledFileInfo
    proof: LoadReport
    measured: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Change:
    """A change in progress to the model `name`; there is at most one for each model."""

    changes: Changes
    name: str
    owner: int | None  # The user of an own model
    adds: bool  # An administrator's model is added or compiled
    notify: Notify
    held: AsyncExitStack  # Resources released at the end of the change
    stage: str = ""
    fraction: float = 0.0
    text: str = ""
    unserved: str = ""  # Reason why the CPU engine does not serve the model first

    def report(self, stage: str, fraction: float, text: str = "") -> None:
        """Record the progress, and pass it on to the client."""
        self.stage, self.fraction, self.text = stage, fraction, text
        self.notify(strict.to_plain(self.status()))

    def status(self) -> JobStatus:
        """Return the status of the job as ServerStatus shows it.

        A Progress notification has the same fields and the number of the request.
        """
        return JobStatus(model_name=self.name, stage=self.stage, fraction=self.fraction, text=self.text)

    async def folder(self) -> Path:
        """Create a staging folder, which is removed when the change ends."""
        return await self.held.enter_async_context(clearing_in_thread(self.changes.store.staging()))

    async def sources(self, manifest: Manifest) -> Staged:
        """Stage the stored sources of a model; raise ModelRefused if they are damaged or missing."""
        folder, most = await self.folder(), self.changes.limits.max_model_bytes
        return await in_thread(stage_again, self.changes.store, manifest, folder, most)

    def keep(self, server: EngineServer, key: str) -> None:
        """Pin a file in a worker until the change ends."""
        self.held.enter_context(self.changes.pool.keeping(server, key))

    async def load(
        self,
        server: EngineServer,
        key: str,
        path: Path,
        progress: Progress = lambda _, __: None,
        *,
        foreground: bool = True,
    ) -> LoadReport:
        """Pin, load and verify a file in a worker; raise as `EngineServer.load`."""
        self.keep(server, key)
        return await server.load(key, path, progress, foreground=foreground)

    async def load_stored(self, server: EngineServer, manifest: Manifest, key: str) -> LoadReport:
        """Load a stored model's file by key; raise as `load`, and Unavailable if its files cannot be used."""
        return await self.load(server, key, await in_thread(self.changes.store.form, manifest, key))

    async def alter(self, model: ServedModel, event: Event) -> None:
        """Have an event change the manifest of a model, and store that."""
        self.changes.pool.handle(event)
        await to_its_end(self.changes.commits.rewrite(model))

    async def commit(
        self, entering: Callable[[], Entered], files: Sequence[tuple[StoredFile, Path]] = ()
    ) -> None:
        """Store a manifest with its new files, and serve the model by it.

        `entering` returns the event with the manifest. It is called while no other commit runs, and raises if
        another change has made this one obsolete. An error leaves the models unchanged. A cancelled caller
        still waits for the end. Variants of another source and unused files are removed.
        """
        changes = self.changes

        async def commit() -> None:
            event = entering()
            manifest = event.manifest
            await changes.commits.commit(manifest, files)
            changes.pool.handle(event)
            variants = changes.registry.variants(manifest.name)
            await changes.drop([each.name for each in variants if not same_source(each.manifest, manifest)])
            await changes.commits.sweep()

        await changes.in_turn(commit())


class Changes:
    """The changes of the service: one at a time for each model, and one compilation and commit at a time.

    Each function in `forget` is called with the name of each removed model or variant.
    """

    def __init__(
        self,
        limits: Limits,
        store: Store,
        registry: Registry,
        pool: EngineManager,
        commits: StoreWriter,
        inspector: Inspector,
        records: Path,
    ) -> None:
        """Initialise; models are compiled with the best schedules in the tuning records `records`, if any."""
        self.limits = limits
        self.store = store
        self.registry = registry
        self.pool = pool
        self.commits = commits
        self.inspector = inspector
        self.records = records
        self.checks = OptimisationChecks(limits, store, registry, pool)
        self.active: dict[str, Change] = {}
        self.forget: Sequence[Callable[[str], None]] = ()
        self.compiling = asyncio.Lock()
        self.checking = asyncio.Lock()  # Held by a check whether a model compiles, beside `compiling`

    @asynccontextmanager
    async def begin(
        self,
        name: str,
        notify: Notify = lambda _: None,
        *,
        replace: bool = True,
        owner: int | None = None,
        adds: bool = False,
    ) -> AsyncIterator[Change]:
        """Begin a change to a model, or with `replace` False to a new one.

        The owner of what is stored under the name is known; `owner` is that of a new model or variant. With
        `adds` it adds or compiles an administrator's model, which limits count; users' own have quotas.
        Raises AlreadyExists, and where limits count ResourceExhausted.
        """
        self.check_idle(name)
        stored = self.registry.find(name)
        if stored is not None and not replace:
            raise AlreadyExists(
                f"there is a model {name!r} already; choose another name, remove it first, or replace it"
            )
        if adds:
            self._check_room(name)
        stored = stored or self.registry.variant(name)
        owner = owner if stored is None else stored.manifest.owner
        async with AsyncExitStack() as held:
            change = Change(changes=self, name=name, owner=owner, adds=adds, notify=notify, held=held)
            held.callback(self.active.pop, name)
            self.active[name] = change
            yield change

    def check_idle(self, name: str) -> None:
        """Raise AlreadyExists if a change to the model is in progress."""
        if name in self.active:
            raise AlreadyExists(f"model {name!r} is being added right now; wait for it or cancel it")

    @property
    def adding(self) -> int:
        """The number of administrators' models being added or compiled."""
        return sum(change.adds for change in self.active.values())

    def _check_room(self, name: str) -> None:
        if self.adding >= self.limits.max_jobs:
            raise ResourceExhausted(f"{self.adding} models are being added already; wait for one of them")
        names = {entry.name for entry in self.registry.models() if entry.manifest.owner is None}
        names |= {change.name for change in self.active.values() if change.adds}
        if len(names - {name}) >= self.limits.max_models:
            raise ResourceExhausted(f"the store holds its {self.limits.max_models} models; remove one first")

    async def remove(self, name: str) -> None:
        """Remove a model with its variants; raises NotFound."""

        async def remove() -> None:
            self.registry.get(name)
            await self.drop([*(each.name for each in self.registry.variants(name)), name])

        await self.in_turn(remove())

    async def remove_variants(self, names: Sequence[str]) -> None:
        """Remove those of the named variants that exist."""

        async def remove() -> None:
            await self.drop([name for name in names if self.registry.variant(name) is not None])

        await self.in_turn(remove())

    async def drop(self, names: Sequence[str]) -> None:
        """Remove models one by one, from the store before service; an error of the store keeps one served."""
        for name in names:
            remaining = [manifest for manifest in self.registry.manifests() if manifest.name != name]
            await in_thread(self.store.remove, name, remaining)
            self.pool.handle(Removed(name))
            for forget in self.forget:
                forget(name)

    async def in_turn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which changes store and models, to its end, while no other commit runs."""

        async def turn() -> None:
            async with self.commits.turn:
                await work
            self.checks.sweep()

        await to_its_end(turn())


class StoreWriter:
    """A writer of manifests; callers hold `turn` from a change of the store until `models` agrees."""

    def __init__(self, store: Store, models: Registry) -> None:
        self._store = store
        self._models = models
        self.turn = asyncio.Lock()

    async def commit(self, manifest: Manifest, staged: Sequence[tuple[StoredFile, Path]] = ()) -> None:
        """Store a manifest and its new files, or neither if that raises. The caller holds `turn`."""
        try:
            await in_thread(self._store.commit, manifest, staged)
        except HonedError:
            await self.sweep()
            raise

    async def sweep(self) -> None:
        """Delete the files that no model needs."""
        await in_thread(self._store.sweep, self._models.manifests())

    async def rewrite(self, model: ServedModel) -> None:
        """Store the present manifest of a model, if that is served or suspended."""
        async with self.turn:
            if self._models.keeps(model):
                await self.commit(model.manifest)
                await self.sweep()

    async def persist(self, model: ServedModel) -> None:
        """Store the manifest of a model, and retry until that succeeds.

        Otherwise a restart of the service could serve a quarantined version again.
        """
        while self._models.keeps(model):
            try:
                await self.rewrite(model)
            except HonedError as error:
                _log.error("model %s: its versions are not stored yet: %s", model.name, error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return


def same_source(variant: Manifest, model: Manifest) -> bool:
    """Return whether a variant has the source, precision and device that its model has now."""

    def of(manifest: Manifest) -> tuple[str, str, str, bool]:
        return manifest.source_key, manifest.precision, manifest.device, manifest.interface is None

    return of(variant) == of(model)


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
