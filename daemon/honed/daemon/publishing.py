"""Successors of a served model: compared in the worker, swapped in between requests, watched, rolled back.

The version before stays loaded until its successor has served cleanly (`versions.trial_over`). What a
successor does wrong meanwhile puts the one before back at once, in memory first and then in the store.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime.errors import AlreadyExists, HonedError, InvalidArgument, ModelRefused, NotFound
from honed.runtime.protocol import HistoryParams, PinParams, PublishParams, RollbackParams

from .blocking import cleared_in_thread, in_thread, to_its_end
from .compiled import Compiled
from .fleet import Fleet
from .jobs import Jobs, failure, same_but_schedules
from .latencies import Latencies
from .limits import Limits
from .making import load
from .models import Entry, Registry, State
from .store import Manifest, Store, StoredFile, new_version, receive
from .supervisor import WorkerLost
from .versions import History, Version, check_new, go_back, settle, succeed, trial_over

_DUEL_ROUNDS = 7  # runs of each version side by side
_STRIKES = 2
_RETRY_SECONDS = 30.0  # after which what could not be stored is stored again
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Trial:
    """A successor's first time in service. `before` is the version it replaced, still loaded."""

    before: Entry
    since: float  # monotonic seconds
    served: int = 0
    judging: bool = False
    strikes: int = 0  # workers that ended while it was judged


class Publisher:
    """Changes which version of a model is served."""

    def __init__(
        self,
        limits: Limits,
        store: Store,
        registry: Registry,
        fleet: Fleet,
        jobs: Jobs,
        latencies: Latencies,
    ) -> None:
        self._limits = limits
        self._store = store
        self._registry = registry
        self._fleet = fleet
        self._jobs = jobs
        self._latencies = latencies
        self._trials: dict[str, Trial] = {}  # by name
        self._tasks: set[asyncio.Task[None]] = set()
        fleet.on_served = self._served
        fleet.on_fault = self._faulted
        fleet.on_broken = self._broken
        jobs.on_changed = self._changed

    def on_trial(self, name: str) -> bool:
        """Whether the model's present version has yet to prove itself."""
        return name in self._trials

    def history(self, params: HistoryParams) -> dict[str, Any]:
        """The result of ModelHistory; raises NotFound."""
        entry = self._registry.get(params.name)
        history = entry.manifest.history
        return {
            "name": entry.name,
            "version": history.current.number,
            "pinned": history.pinned,
            "on_trial": self.on_trial(entry.name),
            "versions": [dataclasses.asdict(version) for version in history.versions],
            "stints": [dataclasses.asdict(stint) for stint in history.stints],
            "latency": self._latencies.of(entry.name),
        }

    async def publish(self, params: PublishParams, descriptors: Sequence[int]) -> dict[str, Any]:
        """Serve a faster form of a model, if it is one; the result of ModelPublish.

        Raises AlreadyExists where another version came meanwhile, ModelRefused where it is another model or
        the device gives wrong answers with it. One that is slower or in quarantine is not an error.
        """
        entry, before = self._registry.compiled(params.name)
        self._fleet.check_at_home(entry)
        if len(descriptors) != 1:
            raise InvalidArgument(f"{len(descriptors)} descriptors came; send one, of the compiled model")
        if entry.key != params.expected:
            raise AlreadyExists(
                f"{entry.name} was replaced since its successor was made; tune it again, "
                "what was measured is kept"
            )
        with self._jobs.job(entry.name, True, lambda _: None):
            async with cleared_in_thread(self._store.staging()) as folder:
                file, path = await in_thread(
                    receive, descriptors[0], f"{entry.name}.honed", folder, self._limits.max_model_bytes
                )
                model = await self._jobs.inspector.inspect(path)
                if not same_but_schedules(model, entry) and entry.manifest.sources:
                    raise ModelRefused(
                        "it is not compiled from the source of the model served; add it instead"
                    )
                _check_interface(before, model)
                schedules = model.schedules
                try:
                    check_new(entry.manifest.history, schedules)
                    return await self._compared(entry, model, file, path, schedules, params.why)
                except AlreadyExists as kept:
                    return _kept(self._registry.find(entry.name) or entry, str(kept))

    async def _compared(
        self, entry: Entry, model: Compiled, file: StoredFile, path: Path, schedules: str, why: str
    ) -> dict[str, Any]:
        """Load the successor beside the present version, and let the better one serve."""
        history, loader = entry.manifest.history, self._fleet.loader(entry)
        version = new_version(
            file, history.next_number, schedules=schedules, why=why, now=time.time(), settled=False
        )
        with loader.keeping(file.sha256):
            try:
                loaded = await loader.load(file.sha256, str(path), hurried=False)
                duel = await loader.duel(entry.key, file.sha256, _DUEL_ROUNDS)
            except WorkerLost as error:
                return await self._turned_away(entry, version, f"the worker ended when it ran it: {error}")
            except ModelRefused as error:
                return await self._turned_away(entry, version, failure(error))
            version = dataclasses.replace(
                version, old_us=duel.old_us, new_us=duel.new_us if duel.new else None
            )
            objection = duel.objection(serving=False)
            if objection:
                return await self._turned_away(entry, version, objection if duel.wrong else "", objection)
            history = succeed(entry.manifest.history, version, time.time(), keep=True)
            successor = _entry(entry, model, file, history)
            async with self._jobs.committing:
                self._check_served(entry)
                await to_its_end(self._commit(successor.manifest, [(file, path)]))
                self._check_served(entry)
                self._settle_trial_of(entry.name)
                loader.keep(entry.key)
                self._trials[entry.name] = Trial(before=entry, since=time.monotonic())
                self._registry.put(successor)
                self._fleet.admit(successor, loaded)
                await in_thread(self._store.sweep, self._jobs.manifests())
        ratio = duel.old_us / duel.new_us
        _log.info("model %s: version %d is served, %.2f times as fast", entry.name, version.number, ratio)
        return {
            "published": True,
            "version": version.number,
            "sentence": f"version {version.number} is served, {ratio:.2f} times as fast",
            "old_us": duel.old_us,
            "new_us": duel.new_us,
        }

    def _check_served(self, entry: Entry) -> None:
        """It may have been rolled back meanwhile, which is then stored, and must not be undone."""
        if self._registry.find(entry.name) is not entry:
            raise AlreadyExists("the version it was compared with is not served any more; publish it again")

    async def _turned_away(
        self, entry: Entry, version: Version, quarantine: str, reason: str = ""
    ) -> dict[str, Any]:
        """Remember a successor that is not taken, its file aside."""
        reason = reason or quarantine
        _log.warning("model %s: a successor is not served: %s", entry.name, reason)
        if quarantine:
            history = entry.manifest.history
            listed = dataclasses.replace(version, kept=False, quarantine=quarantine)
            await self._rewrite(entry, dataclasses.replace(history, versions=(*history.versions, listed)))
        return _kept(entry, reason) | {"old_us": version.old_us, "new_us": version.new_us}

    async def rollback(self, params: RollbackParams) -> dict[str, Any]:
        """Serve an earlier version again; the one left is not published anew. Raises NotFound."""
        entry = self._registry.get(params.name)
        target = self._target(entry, params.version)
        story = f"set aside by hand for version {target.number}"
        await self._serve_again(entry, target, story, quarantine=story, pinned=None)
        return {"version": target.number}

    async def pin(self, params: PinParams) -> dict[str, Any]:
        """Serve a version and let no other take its place, or (version 0) allow that again."""
        entry = self._registry.get(params.name)
        history = entry.manifest.history
        if params.version == 0 or params.version in (None, history.current.number):
            with self._jobs.job(entry.name, True, lambda _: None):
                await self._rewrite(entry, dataclasses.replace(history, pinned=params.version != 0))
            return {"version": history.current.number, "pinned": params.version != 0}
        target = self._target(entry, params.version)
        await self._serve_again(
            entry, target, f"version {target.number} was pinned", quarantine="", pinned=True
        )
        return {"version": target.number, "pinned": True}

    def _target(self, entry: Entry, number: int | None) -> Version:
        self._fleet.check_at_home(entry)
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
        self, entry: Entry, target: Version, reason: str, *, quarantine: str, pinned: bool | None
    ) -> None:
        """Load an earlier version and put it in place, by hand."""
        file = self._store.version_file(entry.manifest, target)
        lane = self._fleet.of(entry)
        with self._jobs.job(entry.name, True, lambda _: None), lane.loader.keeping(file.sha256):
            path = self._store.object(file)
            model = await self._jobs.inspector.inspect(path)
            loaded = await load(lane, file.sha256, path, self._limits)
            history = go_back(entry.manifest.history, target.number, reason, quarantine, time.time())
            if pinned is not None:
                history = dataclasses.replace(history, pinned=pinned)
            earlier = _entry(entry, model, file, settle(history))
            async with self._jobs.committing:
                await to_its_end(self._commit(earlier.manifest, []))
                self._settle_trial_of(entry.name)
                self._registry.put(earlier)
                self._fleet.admit(earlier, loaded)
                self._fleet.unload(entry)
        _log.info("model %s: version %d is served again: %s", entry.name, target.number, reason)

    def _changed(self, name: str) -> None:
        """A model was removed, or replaced by hand."""
        self._settle_trial_of(name)
        if self._registry.find(name) is None:
            self._latencies.forget(name)

    def _served(self, entry: Entry) -> None:
        trial = self._trials.get(entry.name)
        if trial is None and not entry.manifest.history.current.settled:
            # The service was started anew in its trial; its probes were checked again, and it serves.
            self._in_background(self._rewrite(entry, settle(entry.manifest.history)))
        if trial is None or trial.judging:
            return
        trial.served += 1
        if trial_over(trial.served, time.monotonic() - trial.since):
            trial.judging = True
            self._in_background(self._judge(entry, trial))

    async def _judge(self, entry: Entry, trial: Trial) -> None:
        """Compare once more, on what clients sent since: a successor that is slower or differs goes."""
        before, loader = trial.before, self._fleet.loader(entry)
        try:
            # It is there already, unless the worker was started anew.
            await loader.load(before.key, str(self._store.object(before.manifest.compiled)))
            duel = await loader.duel(before.key, entry.key, _DUEL_ROUNDS)
            objection = duel.objection(serving=True)
        except WorkerLost as error:
            trial.served, trial.judging = 0, False
            if entry.at_home:  # else its device is lost, which is not the version's doing
                trial.strikes += 1
            if trial.strikes < _STRIKES:
                return
            objection = f"{trial.strikes} workers ended while it ran; last: {error}"
        except HonedError as error:
            _log.warning("model %s: its new version is not compared again: %s", entry.name, error)
            objection = ""
        if self._registry.find(entry.name) is not entry or self._trials.get(entry.name) is not trial:
            return
        if objection:
            self._fall_back(entry, before, objection)
            return
        self._settle_trial_of(entry.name)
        await self._rewrite(entry, settle(entry.manifest.history))
        _log.info(
            "model %s: version %d has served cleanly", entry.name, entry.manifest.history.current.number
        )

    def _faulted(self, entry: Entry, reason: str) -> None:
        trial = self._trials.get(entry.name)
        if trial is not None and self._registry.find(entry.name) is entry:
            self._fall_back(entry, trial.before, f"the worker ended while it ran: {reason}")

    def _broken(self, entry: Entry, reason: str) -> bool:
        """The present version cannot be served at all: an earlier one may be."""
        trial = self._trials.get(entry.name)
        if self._registry.find(entry.name) is not entry:
            return False
        if trial is not None:
            self._fall_back(entry, trial.before, reason)
            return True
        target = entry.manifest.history.earlier()
        if target is None:
            return False
        file = self._store.version_file(entry.manifest, target)
        earlier = _entry(entry, entry.compiled, file, entry.manifest.history)
        self._in_background(self._look_again(self._fall_back(entry, earlier, reason)))
        return True

    async def _look_again(self, entry: Entry) -> None:
        """Read an earlier version's file, whose place that of another took: they differ in their kernels."""
        try:
            entry.compiled = await self._jobs.inspector.inspect(self._store.object(entry.manifest.compiled))
        except HonedError as error:  # the worker finds so, too, and says it of the model
            _log.error("model %s: its earlier version cannot be read: %s", entry.name, error)

    def _fall_back(self, entry: Entry, before: Entry, story: str) -> Entry:
        """Put `before` in the place of `entry` now; the store follows. Gives what is served."""
        history = entry.manifest.history
        number = next(v.number for v in reversed(history.versions) if v.sha256 == before.key and v.kept)
        changed = settle(go_back(history, number, story, story, time.time()))
        earlier = _entry(entry, before.compiled, before.manifest.compiled, changed)
        _log.error(
            "model %s: version %d is rolled back to %d and not served again: %s",
            entry.name,
            history.current.number,
            number,
            story,
        )
        self._registry.put(earlier)
        self._settle_trial_of(entry.name)
        self._fleet.unload(entry)
        self._fleet.loader(earlier).reload()
        self._in_background(self._store_until_done(earlier))
        return earlier

    async def _store_until_done(self, entry: Entry) -> None:
        """The store must not bring a quarantined version back at the next start."""
        while self._registry.find(entry.name) is entry:
            try:
                async with self._jobs.committing:
                    await to_its_end(self._commit(entry.manifest, []))
                    await in_thread(self._store.sweep, self._jobs.manifests())
            except HonedError as error:
                _log.error("model %s: its rollback is not stored yet: %s", entry.name, error)
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    async def _rewrite(self, entry: Entry, history: History) -> None:
        """Another history of the same version."""
        entry.manifest = dataclasses.replace(entry.manifest, history=history)
        async with self._jobs.committing:
            if self._registry.find(entry.name) is entry:
                await to_its_end(self._commit(entry.manifest, []))

    async def _commit(self, manifest: Manifest, staged: list[tuple[StoredFile, Path]]) -> None:
        try:
            await in_thread(self._store.commit, manifest, staged)
        except HonedError:
            await in_thread(self._store.sweep, self._jobs.manifests())
            raise

    def _settle_trial_of(self, name: str) -> None:
        trial = self._trials.pop(name, None)
        if trial is not None:
            self._fleet.loader(trial.before).let_go(trial.before.key)

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a change of versions was not stored: %s", task.exception())


def _entry(entry: Entry, model: Compiled | None, file: StoredFile, history: History) -> Entry:
    """The same model as another version."""
    manifest = dataclasses.replace(entry.manifest, compiled=file, history=history)
    return dataclasses.replace(
        entry,
        manifest=manifest,
        compiled=model,
        state=State.LOADING,
        reason="",
        checked=None,
        crashes=0,
        load_crashes=0,
        crash_times=(),
    )


def _check_interface(before: Compiled, model: Compiled) -> None:
    for what, old, new in (
        ("inputs", before.inputs, model.inputs),
        ("outputs", before.outputs, model.outputs),
    ):
        if [(t.name, t.dtype, t.shape) for t in old] != [(t.name, t.dtype, t.shape) for t in new]:
            raise ModelRefused(f"its {what} are not those of the model served; add it under another name")


def _kept(entry: Entry, reason: str) -> dict[str, Any]:
    number = entry.manifest.history.current.number
    sentence = f"version {number} is served as before: {reason}"
    return {"published": False, "version": number, "sentence": sentence, "old_us": None, "new_us": None}
