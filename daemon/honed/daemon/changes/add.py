"""Manifests of models that are added: as they were given, and built."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

from honed.daemon.aio import cleared_in_thread, in_thread, to_its_end
from honed.daemon.core.messages import Added, Explained, LoadedProof, Removed
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.observe.latencies import Latencies
from honed.daemon.serving.commits import Commits
from honed.daemon.serving.engine_server import DeviceServer
from honed.daemon.serving.pool import Pool
from honed.daemon.serving.selection import compare, cpu_serves, unfinished
from honed.daemon.settings import places
from honed.daemon.settings.schema import ENGINES, Limits
from honed.daemon.store import state_pairs
from honed.daemon.store.compiled import Compiled
from honed.daemon.store.files import StoredFile
from honed.daemon.store.inspect import Inspector
from honed.daemon.store.names import is_own
from honed.daemon.store.store import Manifest, Store, begin, new_version
from honed.daemon.store.versions import NO_HISTORY, VersionHistory, succeed
from honed.jobs.commands import PRECISIONS
from honed.protocol import strict
from honed.protocol.errors import (
    AlreadyExists,
    HonedError,
    InvalidArgument,
    MissingFiles,
    ModelRefused,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from honed.protocol.methods import check_name
from honed.protocol.params import LoadOptions, LoadParams
from honed.protocol.results import ModelAdded, ModelSettings

from .compilation import (
    BUILT,
    RECEIVED,
    AddProgress,
    AddRequest,
    Built,
    ModelBuilder,
    Notify,
    Staged,
    copies,
    load,
    stage,
    stage_again,
)
from .optimisations import OptimisationChecks


def as_given(name: str, staged: Staged, wanted: str, replaced: ServedModel | None) -> Manifest:
    """Of a file that the CPU engine is to serve."""
    before = replaced.manifest if replaced is not None and staged.device is None else None
    manifest = strict.like(
        Manifest,
        staged,
        name=name,
        added=time.time(),
        compiled=None,
        history=NO_HISTORY,
        sources=tuple(source for source, _ in staged.sources),
        device=before.device if before is not None else "",
        placed=before.placed if before is not None else "",
        wanted=wanted,
        settings=replaced.manifest.settings if replaced is not None else ModelSettings(),
    )
    if replaced is not None and replaced.manifest.source_key == manifest.source_key:
        manifest = dataclasses.replace(manifest, optimisation=replaced.manifest.optimisation)
    return manifest


def made_manifest(
    name: str, made: Built, staged: Staged, replaced: ServedModel | None, restored: Manifest | None
) -> Manifest:
    """The manifest of a model just built; `restored` is the one whose file was found damaged."""
    now, why = time.time(), "added" if restored is None else "compiled again: its file was damaged"
    before = restored or (replaced.manifest if replaced is not None else None)
    if staged.device is not None:
        device, placed = made.server.name, made.measured or "asked for"
    else:
        device, placed = (before.device, before.placed) if before is not None else ("", "")
    manifest = strict.like(
        Manifest,
        staged,
        name=name,
        added=now if restored is None else restored.added,
        compiled=made.file,
        history=_history(made.file, made.model.schedules, why, now, replaced),
        sources=tuple(source for source, _ in staged.sources),
        device=device,
        placed=placed,
        settings=before.settings if before is not None else ModelSettings(),
    )
    if not staged.sources and replaced is not None and same_but_schedules(made.model, replaced):
        kept = replaced.manifest
        same = dataclasses.replace(
            manifest, sources=kept.sources, shapes=kept.shapes, precision=kept.precision
        )
        return _same_engines(same, kept)
    return manifest if restored is None else _same_engines(manifest, restored)


def same_source(variant: Manifest, model: Manifest) -> bool:
    """Whether a variant is of a model as that is now."""

    def of(manifest: Manifest) -> tuple[str, str, str, bool]:
        return manifest.source_key, manifest.precision, manifest.device, manifest.interface is None

    return of(variant) == of(model)


def _same_engines(manifest: Manifest, before: Manifest) -> Manifest:
    """What is known of engines is of the source, and holds for another compiled form of it."""
    return dataclasses.replace(
        manifest,
        interface=before.interface,
        wanted=before.wanted,
        chosen=before.chosen,
        why=before.why,
        pinned_engine=before.pinned_engine,
        state=before.state,
        optimisation=before.optimisation,
    )


def _history(
    file: StoredFile, schedules: str, why: str, now: float, replaced: ServedModel | None
) -> VersionHistory:
    """The history of a model given by a user: earlier versions may answer otherwise, so they are not kept."""
    if replaced is None or not replaced.manifest.history.versions:
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


# ---- What RepositoryModelLoad may be asked for ----
#
# No I/O.

MAX_SHAPES, MAX_RANK, MAX_INPUT_NAME = 256, 32, 1024
MAX_VARIANTS = 64  # of one addition


def check(params: LoadParams, descriptors: Sequence[int], options: LoadOptions) -> None:
    """Raise InvalidArgument for what no addition can be."""
    check_name(params.model_name)
    if is_own(params.model_name):
        raise InvalidArgument(
            f"{params.model_name!r} could only be a model that an app has brought; choose another name"
        )
    check_files(params.files, descriptors, options.precision, options.shapes or {})
    _check_calibration(params.files, options)
    if options.engine not in (None, *ENGINES):
        raise InvalidArgument(f"engine is {options.engine!r}; use one of {', '.join(ENGINES)}")
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
    """The same for what comes with every file that is to be served."""
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


# ---- Models and variants leave the store and the service ----


class Dropping:
    """Removes from the store first: where that fails a model is served as before."""

    def __init__(
        self, store: Store, registry: Registry, pool: Pool, commits: Commits, latencies: Latencies
    ) -> None:
        self._store = store
        self._registry = registry
        self._pool = pool
        self._commits = commits
        self._latencies = latencies

    async def remove(self, name: str) -> None:
        """Remove a model with its variants; raises NotFound."""
        async with self._commits.turn:
            self._registry.get(name)
            await self.drop([*(each.name for each in self._registry.variants(name)), name])

    async def variants(self, names: Sequence[str]) -> None:
        """Delete variants, of those that there are."""
        await to_its_end(self._variants_in_turn(names))

    async def _variants_in_turn(self, names: Sequence[str]) -> None:
        async with self._commits.turn:
            await self.drop([name for name in names if self._registry.variant(name) is not None])

    async def drop(self, names: Sequence[str]) -> None:
        """Delete what is there; the caller has the turn to commit."""
        for name in names:
            remaining = [manifest for manifest in self._registry.manifests() if manifest.name != name]
            await in_thread(self._store.remove, name, remaining)
            self._pool.handle(Removed(name))
            self._latencies.forget(name)


# ---- Adding and removing models: receive, compile, prove on the device, commit, serve ----

_log = logging.getLogger(__name__)


class ModelInstaller:
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
        policy: str,
    ) -> None:
        """`records` is what tuning has recorded; where there is any, models are compiled with the best.

        `policy` is the setting serve.engine.
        """
        self._policy = policy
        self._adding: dict[str, asyncio.Future[ModelAdded]] = {}  # by model
        self.limits = limits
        self._store = store
        self._registry = registry
        self._pool = pool
        self._commits = commits
        self.dropping = Dropping(store, registry, pool, commits, latencies)
        self.builder = ModelBuilder(limits, pool, inspector, records)
        self.checks = OptimisationChecks(limits, store, registry, pool)
        self._resuming: asyncio.Future[None] | None = None
        self._awaiting: asyncio.Future[None] | None = None  # a device to compile for
        self.active: dict[str, AddProgress] = {}
        self.leaving: set[str] = set()  # models that are being removed

    async def add(
        self,
        params: LoadParams,
        descriptors: Sequence[int],
        notify: Notify,
        meanwhile: AbstractContextManager[None],
    ) -> ModelAdded:
        """Serve a model under a new name; the result of RepositoryModelLoad.

        `meanwhile` lasts until it is compiled, though nobody waits. The descriptors stay the caller's.
        Cancelling, or any error, leaves the models as they were; but what the CPU engine serves already goes
        on to be compiled.
        """
        options = params.parameters or LoadOptions()
        check(params, descriptors, options)
        if options.replace:
            await self.stop_compiling(params.model_name)
        job = AddRequest(name=params.model_name, notify=notify)
        work = self._begun(params.model_name, self._add(job, params, descriptors, options, meanwhile))
        try:
            if options.wait is False:
                await asyncio.wait([work, job.served], return_when=asyncio.FIRST_COMPLETED)
                return work.result() if work.done() else job.served.result()
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if not job.served.done():
                work.cancel()
                await asyncio.wait([work])
            raise
        finally:
            job.notify = lambda _: None

    def _begun(self, name: str, adding: Coroutine[Any, Any, ModelAdded]) -> asyncio.Future[ModelAdded]:
        work = self._adding[name] = asyncio.ensure_future(adding)
        work.add_done_callback(lambda done: self._added(name, done))
        return work

    def _added(self, name: str, work: asyncio.Future[ModelAdded]) -> None:
        if self._adding.get(name) is work:
            del self._adding[name]
        if not work.cancelled() and (error := work.exception()) is not None:
            _log.debug("model %s was not added: %s", name, error)

    async def _add(
        self,
        job: AddRequest,
        params: LoadParams,
        descriptors: Sequence[int],
        options: LoadOptions,
        meanwhile: AbstractContextManager[None],
    ) -> ModelAdded:
        servers = self._servers(params.model_name, options)
        with meanwhile, self.job(params.model_name, bool(options.replace), job.report_to) as shown:
            async with cleared_in_thread(self._store.staging()) as folder:
                shown.report("receive", 0.0)
                most = self.limits.max_model_bytes
                staged = await stage(params, descriptors, options, folder, most)
                shown.report("receive", RECEIVED)
                given = await self.serve_as_given(shown, staged, options.engine or "")
                if given is None:
                    return await self._compile_alone(job, shown, staged, servers)
                job.is_served(given)
                shown.report("check", RECEIVED, "served by the CPU engine; waiting for the compiler")
                return await self._compile_on(job, shown, staged, servers, given)

    async def serve_as_given(self, job: AddProgress, staged: Staged, wanted: str) -> Manifest | None:
        """Have the CPU engine serve the file; None where it cannot or shall not, and compiling is next.

        Raises ModelRefused where it must and cannot, MissingFiles where data files are not there. It must
        where it was asked for, and where the file is a user's own.
        """
        policy = wanted or self._policy
        if policy == "gpu" or not staged.sources:
            return None
        must = policy == "cpu" or staged.owner is not None
        cpu = self._pool.needed_cpu(staged.owner) if must else self._pool.cpu_for(staged.owner)
        if cpu is None:
            return None
        manifest = as_given(job.name, staged, wanted, self._registry.find(job.name))
        job.report("load", RECEIVED, "loading it into the CPU engine")
        try:
            with self._pool.keeping(cpu, manifest.source_key):
                proof = await load(cpu, manifest.source_key, staged.given, self.limits)
                manifest = dataclasses.replace(manifest, interface=proof.interface)
                if policy == "cpu":
                    manifest = dataclasses.replace(manifest, chosen="cpu", why="the CPU engine was asked for")
                # Compiling needs the files where they are.
                files = await in_thread(copies, staged)
                await to_its_end(self._commit(manifest, None, proof, files))
        except MissingFiles:
            raise
        except (ModelRefused, Unavailable) as error:
            if must:
                raise
            job.unserved = failure(error)
            _log.info("model %s is not served by the CPU engine: %s", job.name, job.unserved)
            return None
        _log.info("serving model %s by %s", job.name, cpu.shown)
        self.checks.begin(manifest)
        return manifest

    async def _compile_alone(
        self, job: AddRequest, shown: AddProgress, staged: Staged, servers: Sequence[DeviceServer]
    ) -> ModelAdded:
        """Compile what the CPU engine does not serve; where neither can, tell the reasons of both."""
        try:
            made = await self._make(shown, staged, servers)
        except ModelRefused as error:
            if not shown.unserved or isinstance(error, MissingFiles):
                raise
            reasons = (*error.reasons, f"the CPU engine does not run it: {shown.unserved}")
            raise ModelRefused(str(error), reasons) from error
        return job.added(made.model, made.file.sha256)

    async def _compile_on(
        self,
        job: AddRequest,
        shown: AddProgress,
        staged: Staged,
        servers: Sequence[DeviceServer],
        given: Manifest,
    ) -> ModelAdded:
        """Compile what the CPU engine serves; where that is not possible, say why and leave it there."""
        if given.why and not given.awaits_compiler:
            return job.told(given)
        # Apps are answered meanwhile, and compiling shall not take the cores from what answers them.
        staged = dataclasses.replace(staged, hurried=False)
        try:
            made = await self._make(shown, staged, servers, given=given)
        except HonedError as error:
            why = f"it is not compiled: {failure(error)}"
            _log.warning("model %s stays with the CPU engine: %s", given.name, why)
            waits = not places.compiler() or isinstance(error, Unavailable)
            given = dataclasses.replace(given, why=why, awaits_compiler=waits)
            served = self._registry.find(given.name)
            if served is not None and served.key == given.source_key:
                self._pool.handle(Explained(model=served.number, why=why, awaits_compiler=waits))
                await self._commits.rewrite(served)
            if isinstance(error, Unavailable) and self._awaiting is None:
                self._awaiting = asyncio.ensure_future(self._await_device(servers))
            return job.told(given)
        served = self._registry.find(given.name)
        told = served.manifest if served is not None else given
        return job.added(made.model, made.file.sha256, told)

    async def resume(self, manifest: Manifest, seconds: float | None = None) -> None:
        """Go on compiling a stored model that the CPU engine serves, for so long at most."""
        job = AddRequest(name=manifest.name, notify=lambda _: None)

        async def again() -> ModelAdded:
            with self.job(manifest.name, True, job.report_to, manifest.owner) as shown:
                async with cleared_in_thread(self._store.staging()) as folder:
                    staged = await in_thread(self.stage_again, manifest, folder)
                    if manifest.owner is not None:
                        staged = dataclasses.replace(staged, seconds=seconds)
                    server = self._pool.home(manifest.name, manifest.device, manifest.placed)
                    return await self._compile_on(job, shown, staged, [server], manifest)

        await asyncio.wait([self._begun(manifest.name, again())])

    async def _await_device(self, servers: Sequence[DeviceServer]) -> None:
        """Have what waits compiled once one of them has a worker."""
        coming = [asyncio.ensure_future(server.supervisor.came()) for server in servers]
        try:
            await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in coming:
                each.cancel()
        self._awaiting = None
        self.compiler_came()

    def compiler_came(self) -> None:
        """There is a compiler, or a device: compile what waited for one, a model after the other."""
        self.checks.restored()
        waiting = [
            manifest
            for manifest in self._registry.manifests()
            if manifest.awaits_compiler and manifest.owner is None and unfinished(manifest, self._policy)
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
            work.cancel()
            await asyncio.wait([work])

    async def close(self) -> None:
        """End what is under way."""
        works: list[asyncio.Future[Any]] = list(self._adding.values())
        works += [work for work in (self._resuming, self._awaiting) if work is not None]
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works)
        await self.checks.close()

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

    def adds(self, name: str) -> bool:
        """Whether a model of that name is being added."""
        return name in self._adding or name in self.active

    async def remove(self, name: str) -> None:
        """Stop serving a model and delete its files; raises NotFound."""
        self._registry.get(name)
        self.leaving.add(name)  # so that nobody begins to compile it anew
        try:
            await self.stop_compiling(name)
            self._check_idle(name)
            await to_its_end(self.dropping.remove(name))
            self.checks.sweep()
        finally:
            self.leaving.discard(name)
        _log.info("removed model %s", name)

    @contextmanager
    def job(
        self, name: str, replace: bool, notify: Notify, owner: int | None = None
    ) -> Iterator[AddProgress]:
        """One change to a model at a time; raises AlreadyExists or ResourceExhausted.

        The limits are those of administrators' models: users' own have quotas instead.
        """
        self._check_idle(name)
        if self._registry.find(name) is not None and not replace:
            raise AlreadyExists(
                f"there is a model {name!r} already; choose another name, remove it first, or replace it"
            )
        if owner is None:
            self._check_room()
        job = self.active[name] = AddProgress(name=name, notify=notify, owner=owner)
        try:
            yield job
        finally:
            del self.active[name]

    @property
    def adding(self) -> int:
        """How many models of administrators are being added."""
        return sum(job.owner is None for job in self.active.values())

    def _check_room(self) -> None:
        if self.adding >= self.limits.max_jobs:
            raise ResourceExhausted(f"{self.adding} models are being added already; wait for one of them")
        stored = sum(entry.manifest.owner is None for entry in self._registry.models())
        if stored + self.adding >= self.limits.max_models:
            raise ResourceExhausted(f"the store holds its {self.limits.max_models} models; remove one first")

    def _check_idle(self, name: str) -> None:
        if name in self.active:
            raise AlreadyExists(f"model {name!r} is being added right now; wait for it or cancel it")

    def stage_again(self, manifest: Manifest, folder: Path) -> Staged:
        """The stored sources of a model; as `staging.stage_again`."""
        return stage_again(self._store, manifest, folder, self.limits.max_model_bytes)

    def _servers(self, name: str, options: LoadOptions) -> list[DeviceServer]:
        """Where a model may go: where the user wants it, else where it was, else where it belongs."""
        if options.device:
            return self._pool.asked(name, options.device)
        replaced = self._registry.find(name)
        return [self._pool.home(name, replaced.manifest.device if replaced else "")]

    async def _make(
        self,
        job: AddProgress,
        staged: Staged,
        servers: Sequence[DeviceServer],
        *,
        restored: Manifest | None = None,
        given: Manifest | None = None,
    ) -> Built:
        """From staged files to a served model; `given` is what the CPU engine serves of it so far."""
        async with AsyncExitStack() as held:
            made = await self.builder.build(job, staged, servers, held)
            manifest = made_manifest(job.name, made, staged, self._registry.find(job.name), restored)
            if given is not None:
                manifest = await self._with_choice(job, manifest, made, given)
                if self._registry.find(job.name) is None:
                    raise NotFound(f"model {job.name!r} was removed while it was compiled")
            files = [(made.file, made.path), *staged.sources]
            await to_its_end(self._commit(manifest, made.model, made.proof, files))
        job.report("load", 1.0)
        on = made.server.shown
        _log.info("model %s (%s) is compiled for %s. %s", job.name, made.file.sha256[:12], on, manifest.why)
        return made

    async def _with_choice(
        self, job: AddProgress, manifest: Manifest, made: Built, given: Manifest
    ) -> Manifest:
        """Say in the manifest which engine is to serve."""
        cpu = self._pool.cpu_for(given.owner)
        assert cpu is not None
        job.report("load", BUILT, "comparing engines")
        manifest = dataclasses.replace(
            manifest,
            interface=given.interface,
            wanted=given.wanted,
            pinned_engine=given.pinned_engine,
            optimisation=await self.checks.done(given),  # before it is timed
        )
        key = given.source_key
        with self._pool.keeping(cpu, key):
            if given.owner is not None:  # whose CPU engine may rest
                await load(cpu, key, self._store.form(given, key), self.limits)
            choice = await compare(
                made.server.loader, made.file.sha256, made.path, cpu.loader, key, given.owner
            )
        return dataclasses.replace(manifest, chosen=choice.engine, why=choice.why, times=choice.times)

    async def _commit(
        self,
        manifest: Manifest,
        compiled: Compiled | None,
        proof: LoadedProof,
        staged: list[tuple[StoredFile, Path]],
    ) -> None:
        interface = manifest.interface
        if interface is None and compiled is not None:
            interface = compiled.interface
        if interface is not None:
            state_pairs.checked(interface, manifest.state)
        async with self._commits.turn:
            await self._commits.commit(manifest, staged)
            replaced = self._registry.find(manifest.name)
            home = self._pool.home(manifest.name, manifest.device, manifest.placed).name
            cpu = cpu_serves(manifest, self._policy)
            self._pool.handle(Added(manifest=manifest, compiled=compiled, home=home, proof=proof, cpu=cpu))
            others = self._registry.variants(manifest.name)
            gone = [each.name for each in others if not same_source(each.manifest, manifest)]
            await self.dropping.drop(gone)
            if replaced is not None:
                await self._commits.sweep()
                self.checks.sweep()


def failure(error: HonedError) -> str:
    """An error with its reasons, for the log."""
    reasons = error.reasons if isinstance(error, ModelRefused) else ()
    message = str(error)
    return "; ".join((message, *(reason for reason in reasons if reason not in message)))
