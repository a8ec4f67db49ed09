"""Adding and removing models: receive, compile, prove on the device, commit, serve."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from honed.protocol.errors import (
    AlreadyExists,
    HonedError,
    InvalidArgument,
    ModelRefused,
    ResourceExhausted,
    Unavailable,
)
from honed.protocol.methods import check_name
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.results import ModelAdded
from honed.runtime import modelfile

from .blocking import cleared_in_thread, in_thread, to_its_end
from .build import RECEIVED, AddJob, Built, ModelBuilder, Notify, Staged
from .commits import Commits
from .compiled import Compiled
from .deviceserver import DeviceServer
from .inspection import Inspector
from .latencies import Latencies
from .limits import Limits
from .pool import Pool
from .received import StoredFile, receive
from .serving.events import Added, Removed
from .serving.registry import Registry
from .serving.states import ServedModel
from .store import Manifest, Store, begin, new_version
from .versions import VersionHistory, succeed

PRECISIONS = ("auto", "fp32", "fp16")
MAX_SHAPES, MAX_RANK, MAX_INPUT_NAME = 256, 32, 1024
_log = logging.getLogger(__name__)


class Jobs:
    """Changes to the models, one compilation and one commit at a time."""

    def __init__(
        self,
        limits: Limits,
        store: Store,
        registry: Registry,
        pool: Pool,
        commits: Commits,
        inspector: Inspector,
        latencies: Latencies,
        records: Path,
    ) -> None:
        """`records` is what tuning has recorded; where there is any, models are compiled with the best."""
        self._limits = limits
        self._store = store
        self._registry = registry
        self._pool = pool
        self._commits = commits
        self._latencies = latencies
        self._builder = ModelBuilder(limits, pool, inspector, records)
        self.active: dict[str, AddJob] = {}

    async def add(self, params: LoadParams, descriptors: Sequence[int], notify: Notify) -> ModelAdded:
        """Serve a model under a new name; the result of RepositoryModelLoad.

        The descriptors stay the caller's. Cancelling, or any error, leaves the models as they were.
        """
        begun = time.monotonic()
        options = params.parameters or LoadOptions()
        _check(params, descriptors, options)
        servers = self._servers(params.model_name, options)
        with self.job(params.model_name, bool(options.replace), notify) as job:
            async with cleared_in_thread(self._store.staging()) as folder:
                job.report("receive", 0.0)
                staged = await self._receive(params, descriptors, options, folder)
                job.report("receive", RECEIVED)
                made = await self._make(job, staged, servers)
        model = made.model
        return ModelAdded(
            model_name=params.model_name,
            sha256=made.file.sha256,
            seconds=time.monotonic() - begun,
            notes=tuple(model.source.notes),
            kernels=sum(kernel.launches > 0 for kernel in model.kernels),
            launches=model.launches,
        )

    async def restore(self, manifest: Manifest) -> None:
        """Compile a stored model again whose compiled file was found damaged; raises what went wrong."""
        with self.job(manifest.name, True, lambda _: None) as job:
            async with cleared_in_thread(self._store.staging()) as folder:
                staged = await in_thread(self.stage_again, manifest, folder)
                server = self._pool.home(manifest.name, manifest.device)
                await self._make(job, staged, [server], restored=manifest)

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
        await to_its_end(self._remove(name))
        _log.info("removed model %s", name)

    async def _remove(self, name: str) -> None:
        """From the store first: where that fails the model is served as before."""
        async with self._commits.turn:
            self._registry.get(name)
            remaining = [manifest for manifest in self._registry.manifests() if manifest.name != name]
            await in_thread(self._store.remove, name, remaining)
            self._pool.handle(Removed(name))
        self._latencies.forget(name)

    @contextmanager
    def job(self, name: str, replace: bool, notify: Notify) -> Iterator[AddJob]:
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
        job = self.active[name] = AddJob(name=name, notify=notify)
        try:
            yield job
        finally:
            del self.active[name]

    def _check_idle(self, name: str) -> None:
        if name in self.active:
            raise AlreadyExists(f"model {name!r} is being added right now; wait for it or cancel it")

    async def _receive(
        self, params: LoadParams, descriptors: Sequence[int], options: LoadOptions, folder: Path
    ) -> Staged:
        left = self._limits.max_model_bytes
        given, calibration = folder / "given", folder / "calibration"
        sources = len(params.files) - (options.calibration or 0)
        files = []
        for number, (name, descriptor) in enumerate(zip(params.files, descriptors, strict=True)):
            place = given if number < sources else calibration
            file, path = await in_thread(receive, descriptor, name, place, left)
            left -= file.nbytes
            files.append((file, path))
        is_compiled = await in_thread(_is_compiled, files[0][1])
        if is_compiled and (len(files) > 1 or options.shapes or options.precision not in (None, "auto")):
            raise InvalidArgument(
                f"{params.files[0]} is compiled already; shapes, precision, calibration inputs and external "
                "data cannot be given"
            )
        return Staged(
            folder=folder,
            sources=() if is_compiled else tuple(files[:sources]),
            given=files[0][1],
            shapes=dict(options.shapes or {}),
            precision=options.precision or "auto",
            device=options.device or None,
            calibration=calibration if options.calibration else None,
        )

    def stage_again(self, manifest: Manifest, folder: Path) -> Staged:
        """The stored sources of a model, copied to `folder` under their names; blocking.

        Raises ModelRefused where they are damaged, or there are none.
        """
        files = []
        for file in manifest.sources:
            try:
                descriptor = self._store.open_file(file)
            except Unavailable as error:
                raise ModelRefused(str(error)) from error
            try:
                copied, path = receive(descriptor, file.name, folder / "given", self._limits.max_model_bytes)
            finally:
                os.close(descriptor)
            if copied.sha256 != file.sha256:
                raise ModelRefused(f"the stored {file.name} is damaged too; add the model again")
            files.append((copied, path))
        if not files:
            raise ModelRefused("it was added compiled, so it cannot be compiled again; add it again")
        return Staged(
            folder=folder,
            sources=tuple(files),
            given=files[0][1],
            shapes=manifest.shapes,
            precision=manifest.precision,
            device=None,
        )

    def _servers(self, name: str, options: LoadOptions) -> list[DeviceServer]:
        """Where a model may go: where the user wants it, else where it was, else where it belongs."""
        if options.device:
            return self._pool.asked(name, options.device)
        replaced = self._registry.find(name)
        return [self._pool.home(name, replaced.manifest.device if replaced else "")]

    async def _make(
        self, job: AddJob, staged: Staged, servers: Sequence[DeviceServer], restored: Manifest | None = None
    ) -> Built:
        """From staged files to a served model."""
        async with AsyncExitStack() as held:
            made = await self._builder.build(job, staged, servers, held)
            manifest = _manifest(job.name, made, staged, self._registry.find(job.name), restored)
            await to_its_end(self._commit(manifest, made, [(made.file, made.path), *staged.sources]))
        job.report("load", 1.0)
        _log.info("serving model %s (%s) on %s", job.name, made.file.sha256[:12], made.server.shown)
        return made

    async def _commit(self, manifest: Manifest, made: Built, staged: list[tuple[StoredFile, Path]]) -> None:
        async with self._commits.turn:
            await self._commits.commit(manifest, staged)
            replaced = self._registry.find(manifest.name)
            home = self._pool.home(manifest.name, manifest.device, manifest.placed).name
            self._pool.handle(Added(manifest=manifest, compiled=made.model, home=home, proof=made.proof))
            if replaced is not None:
                await self._commits.sweep()


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
    _check_calibration(params.files, options)
    if len(options.shapes or {}) > MAX_SHAPES:
        raise InvalidArgument(f"shapes are given for more than {MAX_SHAPES} inputs; give those that are open")
    for name, shape in (options.shapes or {}).items():
        if not shape or min(shape) < 1 or len(shape) > MAX_RANK:
            raise InvalidArgument(
                f"the shape of {name[:80]!r} is {list(shape)[:9]}; give 1 to {MAX_RANK} sizes of at least 1"
            )
        if not name or "\0" in name or len(name) > MAX_INPUT_NAME:
            raise InvalidArgument(f"shapes names an input {name[:80]!r}, which no model has; check its name")


def _check_calibration(files: Sequence[str], options: LoadOptions) -> None:
    count = options.calibration
    if count is None:
        return
    if not 0 < count < len(files):
        raise InvalidArgument(f"calibration is {count} of {len(files)} files; it counts the last of them")
    if options.precision not in (None, "auto"):
        raise InvalidArgument(
            f"calibration inputs decide precision auto, and it is {options.precision}; leave one out"
        )
    for name in files[-count:]:
        if "/" in name or not name.endswith(".npz"):
            raise InvalidArgument(f"{name[:80]!r} cannot hold calibration inputs; name it as NAME.npz")


def _manifest(
    name: str, made: Built, staged: Staged, replaced: ServedModel | None, restored: Manifest | None
) -> Manifest:
    """The manifest of a model just built; `restored` is the one whose file was found damaged."""
    now, why = time.time(), "added" if restored is None else "compiled again: its file was damaged"
    before = restored or (replaced.manifest if replaced is not None else None)
    if staged.device is not None:
        device, placed = made.server.name, made.measured or "asked for"
    else:
        device, placed = (before.device, before.placed) if before is not None else ("", "")
    manifest = Manifest(
        name=name,
        added=now if restored is None else restored.added,
        compiled=made.file,
        history=_history(made.file, made.model.schedules, why, now, replaced),
        sources=tuple(source for source, _ in staged.sources),
        shapes=staged.shapes,
        precision=staged.precision,
        device=device,
        placed=placed,
    )
    if not staged.sources and replaced is not None and same_but_schedules(made.model, replaced):
        kept = replaced.manifest
        return dataclasses.replace(
            manifest, sources=kept.sources, shapes=kept.shapes, precision=kept.precision
        )
    return manifest


def _history(
    file: StoredFile, schedules: str, why: str, now: float, replaced: ServedModel | None
) -> VersionHistory:
    """The history of a model given by a user: earlier versions may answer otherwise, so they are not kept."""
    if replaced is None:
        return begin(file, schedules=schedules, why=why, now=now)
    before = replaced.manifest.history
    version = new_version(file, before.next_number, schedules=schedules, why=why, now=now, settled=True)
    return succeed(before, version, now, keep=False)


def same_but_schedules(model: Compiled, replaced: ServedModel) -> bool:
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


def failure(error: HonedError) -> str:
    """An error with its reasons, for the log."""
    reasons = error.reasons if isinstance(error, ModelRefused) else ()
    message = str(error)
    return "; ".join((message, *(reason for reason in reasons if reason not in message)))
