"""Changes the version and the engine that serve a model, by comparison or by request of a user."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.core.messages import (
    Added,
    EngineChosen,
    LoadReport,
    ManifestChanged,
    SuccessorReady,
    VersionChosen,
)
from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.observe.latencies import Latencies
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.pool import EngineManager
from honed.daemon.serving.selection import EngineChoice, choose, compare
from honed.daemon.serving.trial import PairedTrialResult
from honed.daemon.store.compiled import CompiledFileInfo
from honed.daemon.store.files import StoredFile, receive
from honed.daemon.store.names import is_variant
from honed.daemon.store.store import new_version, version_file
from honed.daemon.store.versions import GAIN, LOSS, check_new, go_back, settle, succeed
from honed.daemon.worker.supervisor import WorkerDied
from honed.protocol import results, strict
from honed.protocol.errors import AlreadyExists, InvalidArgument, ModelRefused, NotFound, Unavailable
from honed.protocol.params import HistoryParams, PinParams, PublishParams, RollbackParams
from honed.protocol.results import ModelHistory, ModelPublished, ModelVersion, RolledBack
from honed.protocol.values import ENGINE_NAMES
from honed.runtime.compiled.model import ScheduleProvenance

from .add import failure, same_but_schedules
from .change import Built, Change, Changes, Entered

_log = logging.getLogger(__name__)


class _Must(Enum):
    """The requirement that a version must meet, compared with the served one, to replace it."""

    BE_FASTER = auto()
    BE_NO_SLOWER = auto()
    BE_RIGHT = auto()


@dataclass(frozen=True, slots=True)
class _Successor:
    """A file that may replace the present version, with the reason it was compiled and its requirement."""

    file: StoredFile
    path: Path
    model: CompiledFileInfo
    why: str
    must: _Must


@dataclass(slots=True, kw_only=True, eq=False)
class Publisher:
    """A publisher of versions and a switch of engines; `policy` is the setting serve.engine."""

    changes: Changes
    registry: Registry
    pool: EngineManager
    latencies: Latencies
    policy: str

    def history(self, params: HistoryParams) -> ModelHistory:
        """Return the result of ModelHistory; raise NotFound if there is no such model."""
        entry = self.registry.entry(params.name)
        history = entry.manifest.history
        return strict.copy_fields(
            ModelHistory,
            history,
            name=entry.name,
            version=history.number,
            on_trial=entry.canary is not None,
            latency=self.latencies.of(entry.name),
            engine_name=ENGINE_NAMES[entry.kind],
            device=self.pool.of(entry).label,
            session=entry.manifest.optimisation.session if entry.manifest.optimisation else None,
        )

    async def publish(self, params: PublishParams, descriptors: Sequence[int]) -> ModelPublished:
        """Serve a new version of a model if it is faster, and return the result of ModelPublish.

        Raises AlreadyExists if another version was served meanwhile, ModelRefused if it is another model or
        its outputs are wrong. A version that is slower or in quarantine is not an error.
        """
        self.pool.wake(params.name)
        entry, before = self.registry.require_compiled(params.name)
        self.pool.check_at_home(entry)
        if len(descriptors) != 1:
            raise InvalidArgument(f"{len(descriptors)} descriptors came; send one, of the compiled model")
        if entry.key != params.expected:
            raise AlreadyExists(
                f"{entry.name} was replaced since its successor was made; tune it again, "
                "what was measured is kept"
            )
        async with self.changes.begin(entry.name) as change:
            folder, most = await change.folder(), self.changes.limits.max_model_bytes
            file, path = await in_thread(receive, descriptors[0], f"{entry.name}.honed", folder, most)
            model = await self.changes.inspector.inspect(path)
            if not same_but_schedules(model, entry) and entry.manifest.sources:
                raise ModelRefused("it is not compiled from the source of the model served; add it instead")
            _check_interface(before, model)
            successor = _Successor(file, path, model, params.why, _Must.BE_FASTER)
            return await self._offer(change, entry, successor)

    async def publish_resized(
        self, change: Change, entry: ServedModel, build: Built, why: str, *, keep_slower: bool
    ) -> ModelPublished:
        """Serve a version with other size specialisations, each already timed, if it is no slower.

        With `keep_slower`, because compiled files were requested, it may be slower. Raises as `publish` does.
        """
        _, before = self.registry.require_compiled(entry.name)
        _check_interface(before, build.model)
        must = _Must.BE_RIGHT if keep_slower else _Must.BE_NO_SLOWER
        return await self._offer(change, entry, _Successor(build.file, build.path, build.model, why, must))

    async def _offer(self, change: Change, entry: ServedModel, successor: _Successor) -> ModelPublished:
        try:
            check_new(entry.manifest.history, successor.model.schedules)
            return await self._compare(change, entry, successor)
        except AlreadyExists as kept:
            return _keep_current(self.registry.find(entry.name) or entry, str(kept))

    async def _compare(self, change: Change, entry: ServedModel, successor: _Successor) -> ModelPublished:
        """Load the successor beside the present version, and serve it if it meets its requirement.

        One with other size specialisations need only be no slower, as the inputs may not have these sizes.
        """
        server, key = self.pool.device_of(entry), successor.file.sha256
        version = new_version(
            successor.file,
            entry.manifest.history.next_number,
            schedules=successor.model.schedules,
            why=successor.why,
            now=time.time(),
            settled=False,
            brought=_new_schedules(successor.model, entry.compiled),
        )
        change.keep(server, key)
        await server.wait_ready(self.changes.limits.load_seconds)  # The engine may have been stopped
        try:
            if entry.on_cpu or entry.state is not State.READY:
                change.keep(server, entry.key)
                path = self.changes.store.form(entry.manifest, entry.key)
                await server.loader.load(entry.key, str(path))
            proof = await server.loader.load(key, str(successor.path), foreground=False)
            allowance = 1 / GAIN if successor.must is _Must.BE_FASTER else LOSS
            compare = self.pool.version_comparer(entry) or type(server.loader).compare
            compared = await compare(server.loader, entry.key, key, allowance)
        except WorkerDied as error:
            return await _reject(change, entry, version, f"the worker ended when it ran it: {error}")
        except ModelRefused as error:
            return await _reject(change, entry, version, failure(error))
        version = dataclasses.replace(version, old_us=compared.first_us, new_us=compared.second_us)
        objection = compared.objection
        if objection and (compared.wrong or successor.must is not _Must.BE_RIGHT):
            return await _reject(change, entry, version, objection if compared.wrong else "", objection)
        choice = await self._choose_engine(entry, server, key, successor.path) if entry.on_cpu else None
        entering = partial(self._succession, entry, successor, version, proof, choice)
        await change.commit(entering, [(successor.file, successor.path)])
        return _accept(entry, version, choice, compared)

    async def _choose_engine(
        self, entry: ServedModel, server: EngineServer, key: str, path: Path
    ) -> EngineChoice:
        """Return the engine that is to serve a new version of a model that the CPU engine serves."""
        manifest = entry.manifest
        cpu = self.pool.cpu_for(manifest.owner)
        apart = self.pool.version_comparer(entry) is not None
        if cpu is None or apart or "cpu" in (manifest.decision.pinned_engine, manifest.decision.requested):
            return EngineChoice("cpu", manifest.decision.reason)
        return await compare(server.loader, key, path, cpu.loader, manifest.source_key, manifest.owner)

    def _succession(
        self,
        entry: ServedModel,
        successor: _Successor,
        version: ModelVersion,
        proof: LoadReport,
        choice: EngineChoice | None,
    ) -> Entered:
        """Return the event that makes a new version the model's successor.

        Raises AlreadyExists if the version it was compared with is not served any more: a rollback meanwhile
        must not be undone.
        """
        if not self.registry.serves(entry):
            raise AlreadyExists("the version it was compared with is not served any more; publish it again")
        history = succeed(entry.manifest.history, version, time.time(), keep=True)
        manifest = dataclasses.replace(entry.manifest, compiled=successor.file, history=history)
        model = successor.model
        if choice is None:
            return SuccessorReady(model=entry.number, manifest=manifest, compiled=model, proof=proof)
        # The comparison covered both engines, so a canary would show nothing more.
        manifest = dataclasses.replace(manifest, history=settle(history)).with_decision(
            chosen=choice.engine, reason=choice.why, times=choice.times
        )
        by_cpu = choice.engine == "cpu"
        return Added(
            manifest=manifest, compiled=model, preferred_engine=entry.device, proof=proof, cpu=by_cpu
        )

    async def rollback(self, params: RollbackParams) -> RolledBack:
        """Serve an earlier version again, and quarantine the present one. Raises NotFound."""
        self.pool.wake(params.name)
        entry = self.registry.get(params.name)
        target = self._target(entry, params.version)
        story = f"set aside by hand for version {target.number}"
        await self._serve_again(entry, target, story, quarantine=story, pinned=None)
        return RolledBack(version=target.number)

    async def pin(self, params: PinParams) -> results.VersionPinned:
        """Pin a version, serving it first if necessary, or an engine; version 0 unpins the version."""
        self.pool.wake(params.name)
        entry = self.registry.entry(params.name)
        if params.engine is not None:
            await self._pin_engine(entry, params.engine)
        history = entry.manifest.history
        if params.engine is None or params.version is not None:
            if params.version not in (0, None, history.number):
                target = self._target(entry, params.version)
                story = f"version {target.number} was pinned"
                await self._serve_again(entry, target, story, quarantine="", pinned=True)
            else:
                if params.version != 0 and not history.number:
                    raise NotFound(f"{entry.name} has no compiled version that could be pinned")
                async with self.changes.begin(entry.name) as change:
                    pinned = dataclasses.replace(entry.manifest.history, pinned=params.version != 0)
                    manifest = dataclasses.replace(entry.manifest, history=pinned)
                    await change.alter(entry, ManifestChanged(entry.number, manifest))
        entry = self.registry.get(params.name)
        history = entry.manifest.history
        engine = entry.manifest.decision.pinned_engine
        return results.VersionPinned(
            version=history.number,
            pinned=history.pinned,
            engine=engine,
        )

    def _target(self, entry: ServedModel, number: int | None) -> ModelVersion:
        self.pool.check_at_home(entry)
        history = entry.manifest.history
        if number is None:
            earlier = history.earlier()
            if earlier is None:
                raise NotFound(f"{entry.name} has no earlier version to go back to")
            return earlier
        version = history.get(number)
        if number == history.current.number:
            raise AlreadyExists(f"version {number} is the one served")
        if not version.kept:
            raise NotFound(
                f"the file of version {number} is not kept any more; 'hone history' shows which are"
            )
        return version

    async def _serve_again(
        self, entry: ServedModel, target: ModelVersion, reason: str, *, quarantine: str, pinned: bool | None
    ) -> None:
        """Load an earlier version and serve it."""
        file = version_file(entry.manifest, target)
        async with self.changes.begin(entry.name) as change:
            path = self.changes.store.object(file)
            model = await self.changes.inspector.inspect(path)
            proof = await change.load(self.pool.device_of(entry), file.sha256, path)
            history = go_back(entry.manifest.history, target.number, reason, quarantine, time.time())
            if pinned is not None:
                history = dataclasses.replace(history, pinned=pinned)
            manifest = dataclasses.replace(entry.manifest, compiled=file, history=settle(history))
            if is_variant(entry.name):  # A variant that was suspended for being slower serves again
                manifest = manifest.with_decision(chosen="gpu", reason=reason)
            chosen = VersionChosen(manifest=manifest, compiled=model, proof=proof)
            await change.commit(lambda: chosen)
        _log.info("model %s: version %d is served again: %s", entry.name, target.number, reason)

    async def _pin_engine(self, entry: ServedModel, engine: str) -> None:
        """Pin "gpu" (the compiled file) or "cpu" as a model's engine; "" lets the service choose again.

        The engine loads the model first. Raises Unavailable if there is no compiled file or no such engine,
        and ModelRefused if the engine cannot run the model.
        """
        if engine not in ("", "gpu", "cpu"):
            raise InvalidArgument(f"there is no engine {engine[:20]!r} to pin; use 'opencl' or 'onnxruntime'")
        async with self.changes.begin(entry.name) as change:
            event = await self._engine_pinned(change, entry, engine) if engine else self._engine_let_go(entry)
            await change.alter(entry, event)
            self.changes.checks.begin(entry.manifest)
        done = f"{ENGINE_NAMES[engine]} is pinned" if engine else "is not pinned"
        _log.info("model %s: engine %s", entry.name, done)

    async def _engine_pinned(self, change: Change, entry: ServedModel, engine: str) -> EngineChosen:
        why, manifest = f"the engine {ENGINE_NAMES[engine]} was pinned", entry.manifest
        if engine == "gpu":
            if entry.compiled is None and self.registry.variants(entry.name):  # The device then serves them
                why = manifest.decision.reason
                return EngineChosen(model=entry.number, engine="cpu", why=why, pinned=engine)
            if entry.compiled is None:
                reason = manifest.decision.reason or entry.reason or "it is being compiled"
                raise Unavailable(f"model {entry.name!r} has no compiled form that could be pinned: {reason}")
            await change.load_stored(self.pool.device_of(entry), manifest, entry.key)
            return EngineChosen(model=entry.number, engine="gpu", why=why, pinned=engine)
        cpu = self.pool.require_cpu(manifest.owner)
        if not manifest.sources:
            raise Unavailable(f"{entry.name} was added compiled, so the CPU engine has no file to run")
        proof = await change.load_stored(cpu, manifest, manifest.source_key)
        return EngineChosen(
            model=entry.number, engine="cpu", why=why, pinned=engine, interface=proof.interface
        )

    def _engine_let_go(self, entry: ServedModel) -> EngineChosen:
        """Return the choice of engine for a model that is unpinned.

        It follows the known times. Without them the engine stays, and the core compares both if possible.
        """
        manifest = entry.manifest
        wanted = manifest.decision.requested or self.policy
        if wanted == "fastest" and manifest.decision.times is not None and entry.compiled is not None:
            choice = choose(manifest.decision.times, manifest.owner)
            return EngineChosen(model=entry.number, engine=choice.engine, why=choice.why, pinned="")
        if wanted == "fastest":
            engine, why = ("cpu" if entry.on_cpu else "gpu"), manifest.decision.reason
        else:
            engine, why = wanted, f"the engine {ENGINE_NAMES[wanted]} was asked for"
        if engine == "gpu" and entry.compiled is None:
            engine, why = "cpu", manifest.decision.reason
        return EngineChosen(model=entry.number, engine=engine, why=why, pinned="")


async def _reject(
    change: Change, entry: ServedModel, version: ModelVersion, quarantine: str, reason: str = ""
) -> ModelPublished:
    """Record a rejected successor without its file, quarantined if `quarantine` says why."""
    reason = reason or quarantine
    _log.warning("model %s: a successor is not served: %s", entry.name, reason)
    if quarantine:
        listed = dataclasses.replace(version, kept=False, quarantine=quarantine)
        history = entry.manifest.history
        history = dataclasses.replace(history, versions=(*history.versions, listed))
        manifest = dataclasses.replace(entry.manifest, history=history)
        await change.alter(entry, ManifestChanged(entry.number, manifest))
    return _keep_current(entry, reason, version.old_us, version.new_us)


def _check_interface(before: CompiledFileInfo, model: CompiledFileInfo) -> None:
    for what, old, new in (
        ("inputs", before.inputs, model.inputs),
        ("outputs", before.outputs, model.outputs),
        ("parts", before.handed, model.handed),
    ):
        if [(t.name, t.dtype, t.shape) for t in old] != [(t.name, t.dtype, t.shape) for t in new]:
            raise ModelRefused(f"its {what} are not those of the model served; add it under another name")


def _accept(
    entry: ServedModel, version: ModelVersion, choice: EngineChoice | None, compared: PairedTrialResult
) -> ModelPublished:
    """Return the result for a successor that was accepted, and log it."""
    ratio = compared.first_us / compared.second_us
    sentence = f"version {version.number} is served, {ratio:.2f} times as fast"
    if choice is not None and choice.engine == "cpu":
        sentence = f"version {version.number} is kept, {ratio:.2f} times as fast; {choice.why}"
    _log.info("model %s: %s", entry.name, sentence)
    return ModelPublished(
        published=True,
        version=version.number,
        sentence=sentence,
        old_us=compared.first_us,
        new_us=compared.second_us,
    )


def _keep_current(
    entry: ServedModel, reason: str, old_us: float | None = None, new_us: float | None = None
) -> ModelPublished:
    number = entry.manifest.history.current.number
    sentence = f"version {number} is served as before: {reason}"
    return ModelPublished(published=False, version=number, sentence=sentence, old_us=old_us, new_us=new_us)


def _new_schedules(model: CompiledFileInfo, before: CompiledFileInfo | None) -> tuple[str, ...]:
    """Return the measured schedules that a version adds to the previous one (`ModelVersion.brought`)."""
    measured, known = (
        {
            f"{kernel.task} {origin.name}": None
            for kernel in (version.kernels if version is not None else ())
            if (origin := ScheduleProvenance.parse(kernel.schedule)).tried
        }
        for version in (model, before)
    )
    return tuple(each for each in measured if each not in known)
