"""Checks how far ONNX Runtime may optimise each model, and has the CPU engine run it so.

The CPU engine runs a model without optimisation until a job of the compiler's package has compared ONNX
Runtime's optimised answers with its unoptimised ones: in a child that serves nobody, at a low priority, one
model at a time and once for each file and version of ONNX Runtime. Then it loads the model anew at the
highest level that is right; the session before answers until that is loaded. What cannot be checked stays
as it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path

from honed.daemon.aio import cleared_in_thread, in_thread
from honed.daemon.core.messages import OptimisationChecked
from honed.daemon.core.model import is_cpu
from honed.daemon.core.state import Registry
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.pool import EngineManager
from honed.daemon.settings import places
from honed.daemon.settings.schema import OPTIMISED_MIB, Limits
from honed.daemon.store.store import Manifest, Store
from honed.process.children import JobCrashed, ResourceLimits
from honed.protocol.errors import HonedError, ModelRefused, Unavailable
from honed.protocol.results import OptimisationCheck, SessionSettings
from honed.runtime.engines import HIGHEST, LOWEST

_NICENESS = 15
_SECONDS = 600.0  # That a check may take
NO_COMPILER = "honed-tuner, which makes the inputs, is not installed"
_log = logging.getLogger(__name__)


class OptimisationChecks:
    """The checks of one service."""

    def __init__(self, limits: Limits, store: Store, registry: Registry, pool: EngineManager) -> None:
        self._limits = limits
        self._store = store
        self._registry = registry
        self._pool = pool
        self._turn = asyncio.Lock()
        self._under_way: dict[str, asyncio.Task[None]] = {}  # By the key of the source
        self._restoring: asyncio.Task[None] | None = None

    def begin(self, manifest: Manifest) -> None:
        """Have a model checked that its CPU engine runs; what is known of its file already is taken over."""
        key, cpu = manifest.source_key, self._pool.cpu_for(manifest.owner)
        if manifest.interface is None or cpu is None or key in self._under_way:
            return
        known = self._registry.optimisation(key)
        if known is None or _outdated(known):
            task = asyncio.ensure_future(self._check(manifest, key, cpu))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        elif manifest.optimisation != known:
            self._pool.handle(OptimisationChecked(key, known))

    async def done(self, manifest: Manifest) -> OptimisationCheck | None:
        """Return the result of the check of a model's file, or None if it was not checked.

        A check that is under way is waited for.
        """
        task = self._under_way.get(manifest.source_key)
        if task is not None:
            await asyncio.wait([task])
        return self._registry.optimisation(manifest.source_key)

    def restored(self) -> None:
        """Start to check the models whose check is missing or outdated, unless that is under way.

        Call it when the models are restored, and when a compiler is installed.
        """
        if self._restoring is None or self._restoring.done():
            self._restoring = asyncio.ensure_future(self._restore())

    def sweep(self) -> None:
        """End the checks of files that no model has any more."""
        keys = {manifest.source_key for manifest in self._registry.manifests()}
        for key, task in self._under_way.items():
            if key not in keys:
                task.cancel()

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._under_way.values(), *([self._restoring] if self._restoring is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _restore(self) -> None:
        """Check the models that are outdated as each CPU engine's process comes up.

        Nothing is served by an ONNX Runtime before its process runs, which reports its version.
        """
        owners = {entry.manifest.owner for entry in self._registry.models() if entry.can_run_on_cpu}

        async def come(owner: int | None) -> None:
            server = self._pool.cpu_for(owner)
            if server is not None:
                await server.wait_ready_unbounded()
                for entry in self._registry.models():
                    if entry.manifest.owner == owner and self._registry.serves(entry):
                        self.begin(entry.manifest)
                        await self.done(entry.manifest)  # What is added meanwhile comes before the rest

        await asyncio.gather(*map(come, owners))

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        del self._under_way[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("how far ONNX Runtime may optimise a model was not checked", exc_info=error)

    async def _check(self, manifest: Manifest, key: str, cpu: EngineServer) -> None:
        async with self._turn:
            self.sweep()  # It may have waited long
            found = dataclasses.replace(await self._found(manifest), runtime=cpu.engine.fingerprint)
            await self._adopt(manifest, key, found)
            _tell(manifest.name, found)

    async def _adopt(self, manifest: Manifest, key: str, found: OptimisationCheck) -> None:
        """Have the CPU engines run a file as `found` says from now on, and remember that."""
        lost: list[EngineServer] = []
        if found.asked != self._registry.asked(key):
            self._registry.rechecked[key] = found  # Of whatever loads it from now on
            lost = [server for server in self._holders(key) if not await self._reloaded(server, key)]
        self._pool.handle(OptimisationChecked(key, found))
        self._registry.rechecked.pop(key, None)
        for server in lost:  # The next process loads it so
            server.supervisor.kill(f"it could not load model {manifest.name} at another level")

    async def settle(self, manifest: Manifest, session: SessionSettings) -> SessionSettings | None:
        """Have a model run in this session, and return the settings that it has then.

        Returns None, and changes nothing, where the file was checked anew meanwhile.
        """
        key, known = manifest.source_key, manifest.optimisation
        async with self._turn:
            if known is None or self._registry.optimisation(key) != known:
                return None
            await self._adopt(manifest, key, dataclasses.replace(known, session=session))
            return session

    async def halved(self, manifest: Manifest, threads: int, form: Path) -> bool:
        """Have the fp16 form of a model written to `form`; return whether it is right on so many threads."""
        async with self._turn:
            found = await self._found(manifest, threads, form)
        known = manifest.optimisation
        right = found.checked and known is not None and found.level == known.level
        if not right:
            why = found.why or "its answers differ"
            _log.info("model %s: ONNX Runtime does not run it in fp16: %s", manifest.name, why)
        return right

    async def _found(
        self, manifest: Manifest, threads: int = 0, half: Path | None = None
    ) -> OptimisationCheck:
        try:
            from honed.jobs.commands import CheckOptimisations

            from . import compilation

            async with cleared_in_thread(self._store.staging()) as folder:
                job = CheckOptimisations(
                    file=await in_thread(self._store.linked, manifest, folder),
                    shapes=manifest.shapes,
                    memory_mib=min(OPTIMISED_MIB, self._limits.compile_memory_mib),
                    threads=threads,
                    half=half,
                )
                bounds = ResourceLimits(memory_mib=job.memory_mib, niceness=_NICENESS)
                return await compilation.do(job, lambda _: None, bounds, seconds=_SECONDS)
        except TimeoutError:
            why = f"it takes longer than {_SECONDS:g} s"
        except JobCrashed as died:
            why = f"the process that checks it ended: {died}"
        except HonedError as error:
            why = str(error) if places.compiler() else NO_COMPILER
        return OptimisationCheck(level=LOWEST, checked=False, error=None, why=why, seconds=0.0)

    def _holders(self, key: str) -> Iterable[EngineServer]:
        """Yield the CPU engines that have loaded a file, or are loading it."""
        for server in list(self._pool.servers.values()):
            models = [m for m in self._registry.all() if m.manifest.source_key == key]
            running = not server.engine.is_inactive and is_cpu(server.name)
            if running and any(server.name in model.deployments for model in models):
                yield server

    async def _reloaded(self, server: EngineServer, key: str) -> bool:
        """Have a process load a file at its level now; whether it could."""
        manifest = next((m for m in self._registry.manifests() if m.source_key == key), None)
        if manifest is None:
            return True
        with self._pool.keeping(server, key):
            try:
                await server.load(key, await in_thread(self._store.form, manifest, key))
            except (ModelRefused, Unavailable) as error:
                _log.warning("model %s: it is loaded anew by another process: %s", manifest.name, error)
                return False
        return True


def _outdated(known: OptimisationCheck) -> bool:
    """Return whether a check can be made that could not be, or not as well, before."""
    earlier = known.level != LOWEST  # Of an earlier version, which served what it could not check
    return not known.checked and (earlier or (known.why == NO_COMPILER and places.compiler()))


def _tell(name: str, found: OptimisationCheck) -> None:
    if not found.checked:
        _log.warning(
            "model %s: the CPU engine runs it without ONNX Runtime's optimisations, which are not checked, "
            "because %s",
            name,
            found.why,
        )
    elif found.level == HIGHEST:
        _log.info("model %s: ONNX Runtime's optimised answers are right (%.1f s)", name, found.seconds)
    else:
        _log.warning(
            "model %s: ONNX Runtime's optimisations change its answers, so the CPU engine runs it at level "
            "%s: %s",
            name,
            found.level,
            found.why,
        )
