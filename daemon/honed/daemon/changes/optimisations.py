"""Finds the highest ONNX Runtime optimisation level that keeps a model's outputs, and serves the model at it.

The CPU engine runs a model without optimisation until a job of the compiler's package has compared ONNX
Runtime's optimised outputs with the unoptimised ones. The job runs in a child at low priority, for one model
at a time, and once for each file and version of ONNX Runtime. Then the CPU engine loads the model again at
that level; the previous session answers until it is loaded. A model that cannot be checked is not optimised.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from pathlib import Path

from honed.daemon.aio import cancel_all, clearing_in_thread, in_thread
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
from honed.protocol.values import OptimisationCheck, SessionSettings
from honed.runtime.engines import HIGHEST, LOWEST

_NICENESS = 15
_SECONDS = 600.0  # Limit of a check
NO_COMPILER = "honed-tuner, which makes the inputs, is not installed"
_log = logging.getLogger(__name__)


class OptimisationChecks:
    """The optimisation checks of the service, one at a time."""

    def __init__(self, limits: Limits, store: Store, registry: Registry, pool: EngineManager) -> None:
        self._limits = limits
        self._store = store
        self._registry = registry
        self._pool = pool
        self._turn = asyncio.Lock()
        self._under_way: dict[str, asyncio.Task[None]] = {}  # Checks by key of the source
        self._restoring: asyncio.Task[None] | None = None

    def begin(self, manifest: Manifest) -> None:
        """Start the check of a model served by the CPU engine, or reuse the result for its file."""
        key, cpu = manifest.source_key, self._pool.cpu_for(manifest.owner)
        if manifest.interface is None or cpu is None or key in self._under_way:
            return
        known = self._registry.optimisation(key)
        again = False
        if known is not None and not known.checked:
            # Earlier versions optimised models that they could not check.
            again = known.level != LOWEST or (known.why == NO_COMPILER and places.compiler())
        if known is None or again:
            task = asyncio.ensure_future(self._check(manifest, key, cpu))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._finish(key, done))
        elif manifest.optimisation != known:
            self._pool.handle(OptimisationChecked(key, known))

    async def wait_for_result(self, manifest: Manifest) -> OptimisationCheck | None:
        """Return the result of the check of a model's file, after one in progress; None if there was none."""
        task = self._under_way.get(manifest.source_key)
        if task is not None:
            await asyncio.wait([task])
        return self._registry.optimisation(manifest.source_key)

    def start_restoring(self) -> None:
        """Start to check all models whose check is missing or outdated, unless that is in progress.

        Call it when the models are restored, and when a compiler is installed.
        """
        if self._restoring is None or self._restoring.done():
            self._restoring = asyncio.ensure_future(self._restore())

    def sweep(self) -> None:
        """Cancel the checks of files that no model has any more."""
        keys = {manifest.source_key for manifest in self._registry.manifests()}
        for key, task in self._under_way.items():
            if key not in keys:
                task.cancel()

    async def close(self) -> None:
        """Cancel all checks in progress."""
        await cancel_all(
            *self._under_way.values(), *([self._restoring] if self._restoring is not None else ())
        )

    async def _restore(self) -> None:
        """Check models with outdated checks as each CPU engine starts, which then reports its version."""
        owners = {entry.manifest.owner for entry in self._registry.models() if entry.can_run_on_cpu}

        async def come(owner: int | None) -> None:
            server = self._pool.cpu_for(owner)
            if server is not None:
                await server.wait_ready_unbounded()
                for entry in self._registry.models():
                    if entry.manifest.owner == owner and self._registry.serves(entry):
                        self.begin(entry.manifest)
                        await self.wait_for_result(entry.manifest)  # Models added meanwhile precede the rest

        await asyncio.gather(*map(come, owners))

    def _finish(self, key: str, task: asyncio.Task[None]) -> None:
        del self._under_way[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("how far ONNX Runtime may optimise a model was not checked", exc_info=error)

    async def _check(self, manifest: Manifest, key: str, cpu: EngineServer) -> None:
        async with self._turn:
            self.sweep()  # The models may have changed while the check waited
            found = dataclasses.replace(await self._run_check(manifest), runtime=cpu.engine.fingerprint)
            await self._adopt(manifest, key, found)
            _tell(manifest.name, found)

    async def _adopt(self, manifest: Manifest, key: str, check: OptimisationCheck) -> None:
        """Reload a file in the CPU engines as `check` says, and store that."""
        lost: list[EngineServer] = []
        if check.session_config != self._registry.session_config(key):
            self._registry.rechecked[key] = check  # Later loads follow it, too
            lost = [server for server in self._holders(key) if not await self._reload(server, key)]
        self._pool.handle(OptimisationChecked(key, check))
        self._registry.rechecked.pop(key, None)
        for server in lost:  # The next process loads the file as found
            server.supervisor.kill(f"it could not load model {manifest.name} at another level")

    async def settle(self, manifest: Manifest, session: SessionSettings) -> SessionSettings | None:
        """Have the CPU engine run a model with these session settings, and return them.

        Returns None, and changes nothing, if the file was checked again meanwhile.
        """
        key, known = manifest.source_key, manifest.optimisation
        async with self._turn:
            if known is None or self._registry.optimisation(key) != known:
                return None
            await self._adopt(manifest, key, dataclasses.replace(known, session=session))
            return session

    async def write_half(self, manifest: Manifest, threads: int, form: Path) -> bool:
        """Write a model in fp16 to `form`; return whether its outputs on `threads` threads are right."""
        async with self._turn:
            found = await self._run_check(manifest, threads, form)
        known = manifest.optimisation
        right = found.checked and known is not None and found.level == known.level
        if not right:
            why = found.why or "its answers differ"
            _log.info("model %s: ONNX Runtime does not run it in fp16: %s", manifest.name, why)
        return right

    async def _run_check(
        self, manifest: Manifest, threads: int = 0, half: Path | None = None
    ) -> OptimisationCheck:
        try:
            from honed.jobs.commands import CheckOptimisations

            from . import compilation

            async with clearing_in_thread(self._store.staging()) as folder:
                job = CheckOptimisations(
                    file=await in_thread(self._store.link_source, manifest, folder),
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

    async def _reload(self, server: EngineServer, key: str) -> bool:
        """Load a file again at its present level; return whether that succeeded."""
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


def _tell(name: str, check: OptimisationCheck) -> None:
    if not check.checked:
        _log.warning(
            "model %s: the CPU engine runs it without ONNX Runtime's optimisations, which are not checked, "
            "because %s",
            name,
            check.why,
        )
    elif check.level == HIGHEST:
        _log.info("model %s: ONNX Runtime's optimised answers are right (%.1f s)", name, check.seconds)
    else:
        _log.warning(
            "model %s: ONNX Runtime's optimisations change its answers, so the CPU engine runs it at level "
            "%s: %s",
            name,
            check.level,
            check.why,
        )
