"""Adding and removing models: receive, compile, prove on the device, commit, serve."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime import modelfile, profilefile
from honed.runtime.errors import (
    AlreadyExists,
    DeviceError,
    HonedError,
    InvalidArgument,
    ModelRefused,
    ResourceExhausted,
)
from honed.runtime.files import replacing
from honed.runtime.model import CompiledModel, Launch
from honed.runtime.protocol import LoadOptions, LoadParams, check_name

from . import compiler
from .blocking import in_thread, to_its_end
from .dispatch import Dispatcher, Loaded, removed
from .limits import Limits
from .models import Entry, Registry
from .store import Manifest, Store, StoredFile, begin, describe, new_version, receive
from .supervisor import Supervisor, WorkerLost
from .versions import History, fingerprint, succeed

PRECISIONS = ("auto", "fp32", "fp16")
# Shares of a whole addition, for the progress shown.
_RECEIVED, _COMPILED = 0.02, 0.9
_log = logging.getLogger(__name__)
Notify = Callable[[dict[str, Any]], None]


@dataclass(slots=True, kw_only=True)
class Job:
    """A model being added, as ServerStatus shows it."""

    name: str
    notify: Notify
    stage: str = ""
    fraction: float = 0.0
    text: str = ""

    def report(self, stage: str, fraction: float, text: str = "") -> None:
        """Note and pass on how far it is."""
        self.stage, self.fraction, self.text = stage, fraction, text
        self.notify(self.plain())

    def plain(self) -> dict[str, Any]:
        """The fields of a Progress notification, without the request's number."""
        return {"model_name": self.name, "stage": self.stage, "fraction": self.fraction, "text": self.text}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    """Files in a staging folder, and how they are to be compiled."""

    folder: Path
    sources: tuple[tuple[StoredFile, Path], ...]  # empty where a compiled file was given
    given: Path  # the model file
    shapes: dict[str, tuple[int, ...]]
    precision: str


class Jobs:
    """Changes to the models, one compilation and one commit at a time."""

    def __init__(
        self,
        limits: Limits,
        store: Store,
        registry: Registry,
        supervisor: Supervisor,
        dispatcher: Dispatcher,
        cache_dir: Path,
        records: Path,
    ) -> None:
        """`records` is what tuning has recorded; where there is any, models are compiled with the best."""
        self._limits = limits
        self._store = store
        self._registry = registry
        self._supervisor = supervisor
        self._dispatcher = dispatcher
        self._profile = cache_dir / "device.toml"
        self._records = records
        self._compiling = asyncio.Lock()
        self.committing = asyncio.Lock()
        self.active: dict[str, Job] = {}
        self.on_changed: Callable[[str], None] = lambda _: None  # a model was removed, or replaced by hand

    async def add(self, params: LoadParams, descriptors: Sequence[int], notify: Notify) -> dict[str, Any]:
        """Serve a model under a new name; the result of RepositoryModelLoad.

        The descriptors stay the caller's. Cancelling, or any error, leaves the models as they were.
        """
        begun = time.monotonic()
        options = params.parameters or LoadOptions(shapes=None, precision=None, replace=None)
        _check(params, descriptors, options)
        with (
            self.job(params.model_name, bool(options.replace), notify) as job,
            self._store.staging() as folder,
        ):
            job.report("receive", 0.0)
            staged = await self._receive(params, descriptors, options, folder)
            job.report("receive", _RECEIVED)
            entry = await self._make(job, staged)
        model = entry.compiled
        assert model is not None
        return {
            "model_name": entry.name,
            "sha256": entry.key,
            "seconds": time.monotonic() - begun,
            "notes": list(model.source.notes),
            "kernels": len(model.kernels),
            "launches": sum(isinstance(step, Launch) for step in model.steps),
        }

    async def restore(self, manifest: Manifest) -> None:
        """Compile a stored model again whose compiled file was found damaged; raises what went wrong."""
        with self.job(manifest.name, True, lambda _: None) as job, self._store.staging() as folder:
            staged = await in_thread(self._stage_again, manifest, folder)
            await self._make(job, staged, added=manifest.added)

    def export(self, name: str) -> tuple[Manifest, tuple[int, ...]]:
        """What a name stands for, and read-only descriptors of its compiled file and sources; the caller's.

        Does not leave the event loop, so that no change to the models comes in between. Raises NotFound,
        and Unavailable for a model whose file was damaged.
        """
        entry, _ = self._registry.compiled(name)
        return entry.manifest, self._store.open_files(entry.manifest)

    async def remove(self, name: str) -> None:
        """Stop serving a model and delete its files; raises NotFound."""
        self._check_idle(self._registry.get(name).name)
        entry = self._registry.pop(name)
        self._dispatcher.drop_model(name, removed(name))
        self._dispatcher.unload(entry.key)
        self.on_changed(name)
        await to_its_end(self._delete(name))
        _log.info("removed model %s", name)

    async def _delete(self, name: str) -> None:
        async with self.committing:
            await in_thread(self._store.remove, name, self.manifests())

    @contextmanager
    def job(self, name: str, replace: bool, notify: Notify) -> Iterator[Job]:
        """One change to a model at a time; raises AlreadyExists or ResourceExhausted."""
        self._check_idle(name)
        if self._registry.find(name) is not None and not replace:
            raise AlreadyExists(
                f"there is a model {name!r} already; choose another name, remove it first, or replace it"
            )
        if len(self.active) >= self._limits.max_jobs:
            raise ResourceExhausted(
                f"{len(self.active)} models are being added already; wait for one of them"
            )
        if len(self._registry.all()) + len(self.active) >= self._limits.max_models:
            raise ResourceExhausted(f"the store holds its {self._limits.max_models} models; remove one first")
        job = self.active[name] = Job(name=name, notify=notify)
        try:
            yield job
        finally:
            del self.active[name]

    def _check_idle(self, name: str) -> None:
        if name in self.active:
            raise AlreadyExists(f"model {name!r} is being added right now; wait for it or cancel it")

    async def _receive(
        self, params: LoadParams, descriptors: Sequence[int], options: LoadOptions, folder: Path
    ) -> _Staged:
        left = self._limits.max_model_bytes
        given = folder / "given"
        files = []
        for name, descriptor in zip(params.files, descriptors, strict=True):
            file, path = await in_thread(receive, descriptor, name, given, left)
            left -= file.nbytes
            files.append((file, path))
        is_compiled = await in_thread(_is_compiled, files[0][1])
        if is_compiled and (len(files) > 1 or options.shapes or options.precision not in (None, "auto")):
            raise InvalidArgument(
                f"{params.files[0]} is compiled already; shapes, precision and external data cannot be given"
            )
        return _Staged(
            folder=folder,
            sources=() if is_compiled else tuple(files),
            given=files[0][1],
            shapes=dict(options.shapes or {}),
            precision=options.precision or "auto",
        )

    def _stage_again(self, manifest: Manifest, folder: Path) -> _Staged:
        files = []
        for file in manifest.sources:
            descriptor = os.open(self._store.object(file), os.O_RDONLY | os.O_CLOEXEC)
            try:
                copied, path = receive(descriptor, file.name, folder / "given", self._limits.max_model_bytes)
            finally:
                os.close(descriptor)
            if copied.sha256 != file.sha256:
                raise ModelRefused(f"the stored {file.name} is damaged too; add the model again")
            files.append((copied, path))
        if not files:
            raise ModelRefused("it was added compiled, so it cannot be compiled again; add it again")
        return _Staged(
            folder=folder,
            sources=tuple(files),
            given=files[0][1],
            shapes=manifest.shapes,
            precision=manifest.precision,
        )

    async def _make(self, job: Job, staged: _Staged, added: float | None = None) -> Entry:
        """From staged files to a served model."""
        compiled = staged.given
        if staged.sources:
            compiled = staged.folder / "compiled.honed"
            await self._compile(job, staged, compiled)
        model = await in_thread(read, compiled)
        file = await in_thread(describe, compiled, f"{job.name}.honed")
        now, why = time.time(), "added" if added is None else "compiled again: its file was damaged"
        replaced = self._registry.find(job.name)
        manifest = Manifest(
            name=job.name,
            added=now if added is None else added,
            compiled=file,
            history=_history(file, fingerprint(model), why, now, replaced),
            sources=tuple(source for source, _ in staged.sources),
            shapes=staged.shapes,
            precision=staged.precision,
        )
        if not staged.sources and replaced is not None and same_but_schedules(model, replaced):
            manifest = dataclasses.replace(
                replaced.manifest, added=manifest.added, compiled=file, history=manifest.history
            )
        entry = Entry(manifest=manifest, compiled=model)
        job.report("load", _COMPILED, "building kernels and checking the answers on the device")
        with self._dispatcher.keeping(entry.key):
            loaded = await self.load(entry.key, compiled)
            await to_its_end(self._commit(entry, [(file, compiled), *staged.sources], loaded))
        job.report("load", 1.0)
        _log.info("serving model %s (%s)", job.name, file.sha256[:12])
        return entry

    async def _compile(self, job: Job, staged: _Staged, output: Path) -> None:
        def report(stage: compiler.Stage) -> None:
            job.report(stage.stage, _RECEIVED + (_COMPILED - _RECEIVED) * stage.fraction, stage.text)

        if self._compiling.locked():
            job.report("check", _RECEIVED, "waiting for another compilation")
        async with self._compiling:
            await self._supervisor.wait_ready(self._limits.load_seconds)
            assert self._supervisor.profile is not None
            with replacing(self._profile) as file:
                file.write(profilefile.dumps(self._supervisor.profile).encode())
            task = compiler.Task(
                model=staged.given,
                output=output,
                shown_name=staged.sources[0][0].name,
                shapes=staged.shapes,
                precision=staged.precision,
                profile=self._profile,
                device=self._supervisor.spec,
                seconds=self._limits.compile_seconds,
                memory_mib=self._limits.compile_memory_mib,
                records=self._records if self._records.exists() else None,
            )
            await compiler.compile_model(task, report)

    async def load(self, key: str, path: Path) -> Loaded:
        """Load and check in the worker; a model of which two workers die is refused."""
        for last in (False, True):
            await self._supervisor.wait_ready(self._limits.load_seconds)
            try:
                return await self._dispatcher.load(key, str(path))
            except DeviceError as error:
                raise ModelRefused("this device cannot run the model", (str(error),)) from error
            except WorkerLost as error:
                if last:
                    raise ModelRefused(
                        "the device's driver failed twice while it loaded the model; try another precision, "
                        "or update the driver",
                        (str(error),),
                    ) from error
        raise AssertionError("the loop above returns or raises")

    async def _commit(self, entry: Entry, staged: list[tuple[StoredFile, Path]], loaded: Loaded) -> None:
        async with self.committing:
            try:
                await in_thread(self._store.commit, entry.manifest, staged)
            except HonedError:
                await in_thread(self._store.sweep, self.manifests())
                raise
            replaced = self._registry.put(entry)
            self._dispatcher.admit(entry, loaded)
            self.on_changed(entry.name)
            if replaced is not None:
                self._dispatcher.unload(replaced.key)
                await in_thread(self._store.sweep, self.manifests())

    def manifests(self) -> list[Manifest]:
        """Of every model, for the store to know what is used."""
        return [entry.manifest for entry in self._registry.all()]


def _check(params: LoadParams, descriptors: Sequence[int], options: LoadOptions) -> None:
    check_name(params.model_name)
    if not params.files or len(params.files) != len(descriptors):
        raise InvalidArgument(
            f"{len(descriptors)} descriptors came with {len(params.files)} names in files; send the model "
            "file's descriptor first and one for each name"
        )
    if len(set(params.files)) != len(params.files):
        raise InvalidArgument("files names one file twice; give each once")
    if options.precision not in (None, *PRECISIONS):
        raise InvalidArgument(f"precision is {options.precision!r}; use one of {', '.join(PRECISIONS)}")
    for name, shape in (options.shapes or {}).items():
        if not shape or min(shape) < 1:
            raise InvalidArgument(
                f"the shape of {name[:80]!r} is {list(shape)[:9]}; give sizes of at least 1"
            )


def _history(file: StoredFile, schedules: str, why: str, now: float, replaced: Entry | None) -> History:
    """Of a model given by a user: earlier versions may answer otherwise, so they are not kept."""
    if replaced is None:
        return begin(file, schedules=schedules, why=why, now=now)
    before = replaced.manifest.history
    version = new_version(file, before.next_number, schedules=schedules, why=why, now=now, settled=True)
    return succeed(before, version, now, keep=False)


def same_but_schedules(model: CompiledModel, replaced: Entry) -> bool:
    """Whether a model made elsewhere is what the stored source compiles to as it was asked for."""
    manifest, before = replaced.manifest, replaced.compiled
    if not manifest.sources or manifest.sources[0].sha256 != model.source.sha256:
        return False
    shapes = {tensor.name: tensor.shape for tensor in model.inputs}
    return all(shapes.get(name) == shape for name, shape in manifest.shapes.items()) and (
        before is None or before.source.precision == model.source.precision
    )


def _is_compiled(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(modelfile.MAGIC)) == modelfile.MAGIC


def read(path: Path) -> CompiledModel:
    """What a compiled file says, every byte of it checked; raises ModelFileError."""
    file = modelfile.read(path)
    file.close()
    return file.model


def failure(error: HonedError) -> str:
    """An error with its reasons, for the log."""
    reasons = error.reasons if isinstance(error, ModelRefused) else ()
    message = str(error)
    return "; ".join((message, *(reason for reason in reasons if reason not in message)))
