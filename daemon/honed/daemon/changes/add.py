"""Adds, replaces and removes models: receives files, has an engine serve them, and compiles them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from honed.daemon.aio import cancel_all, in_thread
from honed.daemon.core.messages import Added, LoadReport, ManifestChanged
from honed.daemon.core.model import ServedModel
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.selection import compare, cpu_serves, is_unfinished
from honed.daemon.settings import places
from honed.daemon.settings.places import users_cache
from honed.daemon.settings.schema import ENGINES, USABLE
from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import CompiledFileInfo
from honed.daemon.store.files import StoredFile
from honed.daemon.store.names import is_own
from honed.daemon.store.store import EngineDecision, Manifest, begin, new_version
from honed.daemon.store.versions import NO_HISTORY, VersionHistory, succeed, with_time
from honed.protocol import strict
from honed.protocol.errors import (
    HonedError,
    InvalidArgument,
    MissingFiles,
    ModelRefused,
    NotFound,
    Unavailable,
)
from honed.protocol.methods import check_name
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.results import ModelAdded, ModelSettings
from honed.protocol.values import ENGINE_NAMES, PRECISIONS

from .change import BUILT, RECEIVED, Built, Change, Changes, Notify, Staged, copies, stage

# Why a model whose state grows has no compiled file.
_GROWS: Final = (
    "its state grows with each token, so no single size serves its requests; steps of sequences get compiled "
    "forms of their own, which 'hone show' lists"
)
# Fields of a manifest that describe engines, which are known only once the model is served.
_ENGINE_FIELDS: Final = (
    "interface", "decision", "by_hand", "optimisation", "compared_devices",
)  # fmt: skip


def as_given(name: str, staged: Staged, wanted: str, replaced: ServedModel | None) -> Manifest:
    """Return the manifest of an ONNX file that the CPU engine is to serve, without a compiled file."""
    before = replaced.manifest if replaced is not None and staged.device is None else None
    manifest = strict.copy_fields(
        Manifest,
        staged,
        *_ENGINE_FIELDS,
        name=name,
        added=time.time(),
        compiled=None,
        history=NO_HISTORY,
        sources=tuple(source for source, _ in staged.sources),
        device=before.device if before is not None else "",
        placement_reason=before.placement_reason if before is not None else "",
        decision=EngineDecision(requested=wanted),
        settings=replaced.manifest.settings if replaced is not None else ModelSettings(),
    )
    if replaced is not None and replaced.manifest.source_key == manifest.source_key:
        manifest = dataclasses.replace(manifest, optimisation=replaced.manifest.optimisation)
    return manifest


def manifest_of(
    name: str, build: Built, staged: Staged, replaced: ServedModel | None, restored: Manifest | None
) -> Manifest:
    """Return the manifest of a model just built; `restored` is the one whose compiled file was damaged."""
    now, why = time.time(), "added" if restored is None else "compiled again: its file was damaged"
    before = restored or (replaced.manifest if replaced is not None else None)
    if staged.device is not None:
        device, placed = build.server.name, build.measured or "asked for"
    elif before is not None:
        device, placed = before.device, before.placement_reason
    else:
        device, placed = "", ""
    manifest = strict.copy_fields(
        Manifest,
        staged,
        *_ENGINE_FIELDS,
        name=name,
        added=now if restored is None else restored.added,
        compiled=build.file,
        history=_history(build.file, build.model.schedules, why, now, replaced),
        sources=tuple(source for source, _ in staged.sources),
        device=device,
        placement_reason=placed,
        settings=before.settings if before is not None else ModelSettings(),
    )
    if not staged.sources and replaced is not None and same_but_schedules(build.model, replaced):
        kept = replaced.manifest
        same = dataclasses.replace(
            manifest, sources=kept.sources, shapes=kept.shapes, precision=kept.precision
        )
        return _same_engines(same, kept)
    return manifest if restored is None else _same_engines(manifest, restored)


def _same_engines(manifest: Manifest, before: Manifest) -> Manifest:
    """Return `manifest` with the engine fields of `before`.

    They depend on the source alone, so they are valid for another compiled file of it.
    """
    return dataclasses.replace(
        manifest,
        interface=before.interface,
        decision=dataclasses.replace(before.decision, times=None, awaits_compiler=False),
        state=before.state,
        optimisation=before.optimisation,
    )


def _history(
    file: StoredFile, schedules: str, why: str, now: float, replaced: ServedModel | None
) -> VersionHistory:
    """Return the history of an added model; it keeps no earlier versions, as their outputs may differ."""
    if replaced is None or not replaced.manifest.history.versions:
        return begin(file, schedules=schedules, why=why, now=now)
    before = replaced.manifest.history
    version = new_version(file, before.next_number, schedules=schedules, why=why, now=now, settled=True)
    return succeed(before, version, now, keep=False)


def same_but_schedules(model: CompiledFileInfo, replaced: ServedModel) -> bool:
    """Return whether a file compiled elsewhere differs from the served one in schedules alone.

    It does if it was compiled from the stored source in the shapes and precision that the user requested.
    """
    manifest, before = replaced.manifest, replaced.compiled
    if not manifest.sources or manifest.sources[0].sha256 != model.source.sha256:
        return False
    shapes = {tensor.name: tensor.shape for tensor in model.inputs}
    return all(shapes.get(name) == shape for name, shape in manifest.shapes.items()) and (
        before is None or before.source.precision == model.source.precision
    )


# ---- Checks of the parameters of RepositoryModelLoad ----
#
# No I/O.

MAX_SHAPES, MAX_RANK, MAX_INPUT_NAME = 256, 32, 1024
MAX_VARIANTS = 64  # Limit of variants added with a model


def check(params: LoadParams, descriptors: Sequence[int], options: LoadOptions) -> None:
    """Raise InvalidArgument for invalid parameters of an addition."""
    check_name(params.model_name)
    if is_own(params.model_name):
        raise InvalidArgument(
            f"{params.model_name!r} could only be a model that an app has brought; choose another name"
        )
    check_files(params.files, descriptors, options.precision, options.shapes or {})
    _check_calibration(params.files, options)
    if options.engine not in (None, *ENGINES):
        raise InvalidArgument(f"engine is {options.engine!r}; {USABLE}")
    if len(options.state or {}) > MAX_SHAPES:
        raise InvalidArgument(f"state names more than {MAX_SHAPES} outputs; name those that are state")
    if options.variants and options.engine == "cpu":
        raise InvalidArgument("the CPU engine takes every shape, and nothing is compiled; leave variants out")
    if len(options.variants or ()) > MAX_VARIANTS:
        raise InvalidArgument(f"more than {MAX_VARIANTS} variants are given; give those that matter most")
    for shapes in options.variants or ():
        _check_shapes(shapes)


def check_files(
    files: Sequence[str],
    descriptors: Sequence[int],
    precision: str | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Check the files and options of a request that adds a model; raise InvalidArgument for wrong ones."""
    if not files or len(files) != len(descriptors):
        raise InvalidArgument(
            f"{len(descriptors)} descriptors came with {len(files)} names in files; send the model "
            "file's descriptor first and one for each name"
        )
    if len(set(files)) != len(files):
        raise InvalidArgument("files names one file twice; give each once")
    if precision not in (None, *PRECISIONS):
        raise InvalidArgument(f"precision is {precision!r}; use one of {', '.join(PRECISIONS)}")
    _check_shapes(shapes)


def _check_shapes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    if len(shapes) > MAX_SHAPES:
        raise InvalidArgument(f"shapes are given for more than {MAX_SHAPES} inputs; give those that are open")
    for name, shape in shapes.items():
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
    for name in files[-count:]:
        if "/" in name or not name.endswith(".npz"):
            raise InvalidArgument(f"{name[:80]!r} cannot hold calibration inputs; name it as NAME.npz")


# ---- Adding and removing models: receive, compile, verify on the device, commit, serve ----

_log = logging.getLogger(__name__)


class AddRequest:
    """An addition in progress; `served` is set once the CPU engine serves the model."""

    def __init__(self, *, name: str, notify: Notify) -> None:
        self.notify = notify
        self.served: asyncio.Future[ModelAdded] = asyncio.get_running_loop().create_future()
        self._name = name
        self._begun = time.monotonic()

    def result(self, manifest: Manifest) -> ModelAdded:
        """Return the result for a model that the CPU engine serves without a compiled file."""
        return ModelAdded(
            model_name=self._name,
            sha256=manifest.source_key,
            seconds=time.monotonic() - self._begun,
            notes=(),
            kernels=0,
            launches=0,
            engine="cpu",
            engine_name=ENGINE_NAMES["cpu"],
            engine_why=manifest.decision.reason or "it is being compiled",
        )

    def result_of(self, model: CompiledFileInfo, sha256: str, manifest: Manifest | None = None) -> ModelAdded:
        """Return the result for a model that has a compiled file."""
        engine = "cpu" if manifest is not None and manifest.decision.chosen == "cpu" else model.engine
        return ModelAdded(
            model_name=self._name,
            sha256=sha256,
            seconds=time.monotonic() - self._begun,
            notes=tuple(model.source.notes),
            kernels=sum(kernel.launches > 0 for kernel in model.kernels),
            launches=model.launches,
            engine=engine,
            engine_name=ENGINE_NAMES[engine],
            engine_why=manifest.decision.reason if manifest is not None else "",
        )


class ModelInstaller:
    """An installer that adds, replaces and removes models, and compiles those that still await that."""

    def __init__(self, changes: Changes, policy: str, cache_dir: Path) -> None:
        """Initialise; `policy` is the setting serve.engine."""
        self._changes = changes
        self._store = changes.store
        self._registry = changes.registry
        self._pool = changes.pool
        self._checks = changes.checks
        self._policy = policy
        self._cache_dir = cache_dir
        self._adding: dict[str, asyncio.Future[ModelAdded]] = {}  # Additions by model
        self._resuming: asyncio.Future[None] | None = None
        self._awaiting: asyncio.Future[None] | None = None  # Waits for a device to compile for
        self.leaving: set[str] = set()  # Models that are being removed

    async def add(
        self,
        params: LoadParams,
        descriptors: Sequence[int],
        notify: Notify,
        meanwhile: AbstractContextManager[None],
    ) -> ModelAdded:
        """Add a model, and return the result of RepositoryModelLoad.

        `meanwhile` is left once the model is compiled, even if the client does not wait. The caller keeps the
        descriptors. Cancellation or an error leaves the models unchanged; but a model that the CPU engine
        serves already stays, and is compiled.
        """
        options = params.parameters or LoadOptions()
        check(params, descriptors, options)
        if options.replace:
            await self.stop_compiling(params.model_name)
        job = AddRequest(name=params.model_name, notify=notify)
        work = self._begin(params.model_name, self._add(job, params, descriptors, options, meanwhile))
        try:
            if options.wait is False:
                await asyncio.wait([work, job.served], return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else job.served.result()
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if not job.served.done():
                await cancel_all(work)
            raise
        finally:
            job.notify = lambda _: None

    def _begin(self, name: str, adding: Coroutine[Any, Any, ModelAdded]) -> asyncio.Future[ModelAdded]:
        def added(work: asyncio.Future[ModelAdded]) -> None:
            if self._adding.get(name) is work:
                del self._adding[name]
            if not work.cancelled() and (error := work.exception()) is not None:
                _log.debug("model %s was not added: %s", name, error)

        work = self._adding[name] = asyncio.ensure_future(adding)
        work.add_done_callback(added)
        return work

    async def _add(
        self,
        job: AddRequest,
        params: LoadParams,
        descriptors: Sequence[int],
        options: LoadOptions,
        meanwhile: AbstractContextManager[None],
    ) -> ModelAdded:
        servers = self._servers(params.model_name, options)
        with meanwhile:
            replace = bool(options.replace)
            # `add` replaces `notify` once its client does not wait any more.
            async with self._changes.begin(
                params.model_name, lambda news: job.notify(news), replace=replace, adds=True
            ) as change:
                change.report("receive", 0.0)
                most = self._changes.limits.max_model_bytes
                staged = await stage(params, descriptors, options, await change.folder(), most)
                change.report("receive", RECEIVED)
                given = await self.serve_as_given(change, staged, options.engine or "")
                if given is None:
                    return await self._compile_alone(job, change, staged, servers)
                job.served.set_result(job.result(given))
                change.report("check", RECEIVED, "served by the CPU engine; waiting for the compiler")
                return await self._compile_on(job, change, staged, servers, given)

    async def serve_as_given(self, change: Change, staged: Staged, wanted: str) -> Manifest | None:
        """Have the CPU engine serve the file, and return its manifest; None if only compiling is left.

        The CPU engine is required if it was requested, and for a user's own file. Raises ModelRefused if it
        is required and cannot run the model, and MissingFiles if data files are missing.
        """
        policy = wanted or self._policy
        if policy == "gpu" or not staged.sources:
            return None
        must = policy == "cpu" or staged.owner is not None
        cpu = self._pool.require_cpu(staged.owner) if must else self._pool.cpu_for(staged.owner)
        if cpu is None:
            return None
        manifest = as_given(change.name, staged, wanted, self._registry.find(change.name))
        change.report("load", RECEIVED, "loading it into the CPU engine")
        try:
            cpu.check_fits(sum(file.nbytes for file, _ in staged.sources))
            proof = await change.load(cpu, manifest.source_key, staged.model_file)
            manifest = dataclasses.replace(manifest, interface=proof.interface)
            if policy == "cpu":
                manifest = manifest.with_decision(chosen="cpu", reason="the CPU engine was asked for")
            elif not staged.shapes and state_pairs.grows(proof.interface, staged.state):
                manifest = manifest.with_decision(reason=_GROWS)
            # Compiling needs the staged files, so the store receives links.
            await self._enter(change, manifest, None, proof, await in_thread(copies, staged))
        except MissingFiles:
            raise
        except (ModelRefused, Unavailable) as error:
            if must:
                raise
            change.unserved = failure(error)
            _log.info("model %s is not served by the CPU engine: %s", change.name, change.unserved)
            return None
        _log.info("serving model %s by %s", change.name, cpu.label)
        self._checks.begin(manifest)
        return manifest

    async def keep_for_app(self, change: Change, staged: Staged) -> None:
        """Store a file that its app runs by itself, to be compiled later; no engine loads it now.

        The CPU engine loads it if a request names the model. Raises MissingFiles if data files are missing,
        and ModelRefused or ModelFileError if it is not an ONNX file.
        """
        found = await self._changes.inspector.inspect_source(staged.model_file)
        names = {file.name for file, _ in staged.sources}
        missing = tuple(name for name in found.external if name not in names)
        if missing:
            listed = ", ".join(name[:200] for name in missing[:5])
            raise MissingFiles(f"the model's data files are missing: {listed}; send them along", (), missing)
        self._pool.require_cpu(staged.owner)
        manifest = as_given(change.name, staged, "gpu", self._registry.find(change.name))
        manifest = dataclasses.replace(manifest, interface=found.interface)
        await self._enter(change, manifest, None, None, await in_thread(copies, staged))

    async def _compile_alone(
        self, job: AddRequest, change: Change, staged: Staged, servers: Sequence[EngineServer]
    ) -> ModelAdded:
        """Compile a model that the CPU engine does not serve, even if that engine would be faster.

        An error contains the reasons of both.
        """
        try:
            made = await self._make(change, dataclasses.replace(staged, keep_slower=True), servers)
        except ModelRefused as error:
            if not change.unserved or isinstance(error, MissingFiles):
                raise
            reasons = (*error.reasons, f"the CPU engine does not run it: {change.unserved}")
            raise ModelRefused(str(error), reasons) from error
        return job.result_of(made.model, made.file.sha256)

    async def _compile_on(
        self,
        job: AddRequest,
        change: Change,
        staged: Staged,
        servers: Sequence[EngineServer],
        present: Manifest,
    ) -> ModelAdded:
        """Compile a model that the CPU engine serves; if that fails, record why and leave it there."""
        if present.decision.reason and not present.decision.awaits_compiler:
            return job.result(present)
        # The CPU engine answers apps meanwhile; compiling must not take the cores from it.
        staged = dataclasses.replace(staged, foreground=False)
        try:
            made = await self._make(change, staged, servers, present=present)
        except HonedError as error:
            why = f"it is not compiled: {failure(error)}"
            _log.warning("model %s stays with the CPU engine: %s", present.name, why)
            waits = not places.compiler() or isinstance(error, Unavailable)
            present = present.with_decision(reason=why, awaits_compiler=waits)
            served = self._registry.find(present.name)
            if served is not None and served.key == present.source_key:
                manifest = served.manifest.with_decision(reason=why, awaits_compiler=waits)
                await change.alter(served, ManifestChanged(served.number, manifest))
            if isinstance(error, Unavailable) and self._awaiting is None:
                self._awaiting = asyncio.ensure_future(self._await_device(servers))
            return job.result(present)
        served = self._registry.find(present.name)
        described = served.manifest if served is not None else present
        return job.result_of(made.model, made.file.sha256, described)

    async def resume(self, manifest: Manifest, seconds: float | None = None) -> None:
        """Continue to compile a stored model that the CPU engine serves, for at most `seconds`."""
        job = AddRequest(name=manifest.name, notify=lambda _: None)

        async def again() -> ModelAdded:
            async with self._changes.begin(manifest.name, adds=manifest.owner is None) as change:
                staged = await change.sources(manifest)
                if manifest.owner is not None:
                    staged = dataclasses.replace(staged, seconds=seconds)
                server = self._pool.home(manifest.name, manifest.device, manifest.placement_reason)
                return await self._compile_on(job, change, staged, [server], manifest)

        await asyncio.wait([self._begin(manifest.name, again())])

    async def _await_device(self, servers: Sequence[EngineServer]) -> None:
        """Compile the waiting models once one of `servers` has a worker."""
        coming = [asyncio.ensure_future(server.wait_ready_unbounded()) for server in servers]
        try:
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in coming:
                each.cancel()
        self._awaiting = None
        self.compiler_came()

    def compiler_came(self) -> None:
        """Compile the models that waited for a compiler or a device, one after the other.

        Call it when a compiler or a device has become available.
        """
        self._checks.start_restoring()
        waiting = [
            manifest
            for manifest in self._registry.manifests()
            if manifest.decision.awaits_compiler
            and manifest.owner is None
            and is_unfinished(manifest, self._policy)
        ]
        if waiting and self._resuming is None:
            self._resuming = asyncio.ensure_future(self._resume_all(waiting))

    async def _resume_all(self, waiting: Sequence[Manifest]) -> None:
        for manifest in waiting:
            entry = self._registry.find(manifest.name)
            if entry is not None and entry.manifest is manifest and manifest.name not in self._adding:
                await self.resume(manifest)
        self._resuming = None

    async def stop_compiling(self, name: str) -> None:
        """End the compilation of a model that is served already, and of no other."""
        work = self._adding.get(name)
        if work is not None and self._registry.find(name) is not None:
            await cancel_all(work)

    async def close(self) -> None:
        """Cancel additions and checks in progress."""
        others = (work for work in (self._resuming, self._awaiting) if work is not None)
        await cancel_all(*self._adding.values(), *others)
        await self._checks.close()

    async def restore(self, manifest: Manifest) -> None:
        """Compile a stored model again whose compiled file is damaged; raise the error of compilation."""
        async with self._changes.begin(manifest.name, adds=manifest.owner is None) as change:
            server = self._pool.home(manifest.name, manifest.device)
            staged = dataclasses.replace(await change.sources(manifest), keep_slower=True)
            await self._make(change, staged, [server], restored=manifest)

    def export(self, name: str) -> tuple[Manifest, tuple[int, ...]]:
        """Return a model's manifest, and read-only descriptors of its compiled file and its sources.

        The caller owns the descriptors. This does not await, so the models cannot change between manifest and
        files. Raises NotFound, and Unavailable for a model whose file is damaged.
        """
        entry, _ = self._registry.require_compiled(name)
        return entry.manifest, self._store.open_files(entry.manifest)

    async def remove(self, name: str) -> None:
        """Stop serving a model and delete its files; raises NotFound.

        With the last of a user's own models, the user's cache is deleted.
        """
        owner = self._registry.model(name).manifest.owner
        self.leaving.add(name)  # Prevents a new compilation
        try:
            await self.stop_compiling(name)
            self._changes.check_idle(name)
            await self._changes.remove(name)
        finally:
            self.leaving.discard(name)
        _log.info("removed model %s", name)
        if owner is not None and not any(e.manifest.owner == owner for e in self._registry.models()):
            await in_thread(shutil.rmtree, users_cache(self._cache_dir, owner), ignore_errors=True)

    def _servers(self, name: str, options: LoadOptions) -> list[EngineServer]:
        """Return the candidate engines: the requested ones, else the previous one, else the default."""
        if options.device:
            return self._pool.engines_for(name, options.device)
        replaced = self._registry.find(name)
        return [self._pool.home(name, replaced.manifest.device if replaced else "")]

    async def _make(
        self,
        change: Change,
        staged: Staged,
        servers: Sequence[EngineServer],
        *,
        restored: Manifest | None = None,
        present: Manifest | None = None,
    ) -> Built:
        """Build and serve a model from staged files; `present` is the manifest that the CPU engine serves."""
        from .building import build

        made = await build(change, staged, servers)
        manifest = manifest_of(change.name, made, staged, self._registry.find(change.name), restored)
        if present is not None:
            manifest = await self._with_choice(change, manifest, made, present)
            if self._registry.find(change.name) is None:
                raise NotFound(f"model {change.name!r} was removed while it was compiled")
        files = [(made.file, made.path), *staged.sources]
        await self._enter(change, manifest, made.model, made.proof, files)
        change.report("load", 1.0)
        key, on = made.file.sha256[:12], made.server.label
        _log.info("model %s (%s) is compiled for %s. %s", change.name, key, on, manifest.decision.reason)
        return made

    async def _with_choice(
        self, change: Change, manifest: Manifest, build: Built, present: Manifest
    ) -> Manifest:
        """Return the manifest with the engine that is to serve, chosen by comparison."""
        if present.for_app:  # The app compares both by itself
            us = await build.server.loader.own_us(build.file.sha256)
            decision = EngineDecision(
                requested=present.decision.requested,
                chosen="gpu",
                pinned_engine=present.decision.pinned_engine,
            )
            history = with_time(manifest.history, us)
            return dataclasses.replace(
                manifest, interface=present.interface, decision=decision, history=history
            )
        cpu = self._pool.cpu_for(present.owner)
        assert cpu is not None
        change.report("load", BUILT, "comparing engines")
        manifest = dataclasses.replace(
            manifest,
            interface=present.interface,
            optimisation=await self._checks.wait_for_result(present),  # The level affects the times
        )
        key = present.source_key
        if present.owner is not None:  # A user's CPU engine may have stopped
            await change.load_stored(cpu, present, key)
        else:
            change.keep(cpu, key)
        choice = await compare(
            build.server.loader, build.file.sha256, build.path, cpu.loader, key, present.owner
        )
        return manifest.with_decision(
            requested=present.decision.requested,
            pinned_engine=present.decision.pinned_engine,
            chosen=choice.engine,
            reason=choice.why,
            times=choice.times,
        )

    async def _enter(
        self,
        change: Change,
        manifest: Manifest,
        compiled: CompiledFileInfo | None,
        proof: LoadReport | None,
        files: Sequence[tuple[StoredFile, Path]],
    ) -> None:
        interface = manifest.interface
        if interface is None and compiled is not None:
            interface = compiled.interface
        if interface is not None and manifest.state:
            state_pairs.check_pairs(interface, manifest.state)
        home = self._pool.home(manifest.name, manifest.device, manifest.placement_reason).name
        cpu = cpu_serves(manifest, self._policy)
        added = Added(manifest=manifest, compiled=compiled, preferred_engine=home, proof=proof, cpu=cpu)
        await change.commit(lambda: added, files)


def failure(error: HonedError) -> str:
    """Return an error's message with its reasons, for the log."""
    reasons = error.reasons if isinstance(error, ModelRefused) else ()
    message = str(error)
    return "; ".join((message, *(reason for reason in reasons if reason not in message)))
