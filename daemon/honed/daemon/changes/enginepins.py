"""Engines that are pinned by hand: the one that serves a model, whichever is faster."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from honed.daemon.blocking import in_thread
from honed.daemon.core.messages import EngineChosen, LoadedProof
from honed.daemon.core.model import ServedModel
from honed.daemon.serving.commits import Commits
from honed.daemon.serving.engine_server import DeviceServer
from honed.daemon.serving.pool import Pool
from honed.daemon.serving.selection import choose
from honed.daemon.settings.schema import Limits
from honed.daemon.store.store import Manifest, Store
from honed.protocol.errors import InvalidArgument, Unavailable

from .build import load
from .jobs import Jobs

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class EnginePins:
    """Pins engines; `policy` is the setting serve.engine."""

    limits: Limits
    store: Store
    pool: Pool
    jobs: Jobs
    commits: Commits
    policy: str

    async def pin(self, entry: ServedModel, engine: str) -> None:
        """Have "gpu", the compiled form, or "cpu" serve a model; "" lets the service choose again.

        It is loaded there before. Raises Unavailable where there is no such form or engine, and ModelRefused
        where the engine cannot run the model.
        """
        if engine not in ("", "gpu", "cpu"):
            raise InvalidArgument(f"there is no engine {engine[:20]!r} to pin; use 'gpu' or 'cpu'")
        with self.jobs.job(entry.name, True, lambda _: None):
            event = self._let_go(entry) if not engine else await self._pinned(entry, engine)
            self.pool.handle(event)
            await self.commits.rewrite(entry)
            self.jobs.checks.begin(entry.manifest)
        _log.info("model %s: engine %s", entry.name, f"{engine} is pinned" if engine else "is not pinned")

    async def _pinned(self, entry: ServedModel, engine: str) -> EngineChosen:
        why = f"the engine {engine} was pinned"
        if engine == "gpu":
            if entry.compiled is None:
                reason = entry.manifest.why or entry.reason or "it is being compiled"
                raise Unavailable(f"model {entry.name!r} has no compiled form that could be pinned: {reason}")
            await self._loaded(self.pool.device_of(entry), entry.manifest, entry.key)
            return EngineChosen(model=entry.number, engine="gpu", why=why, pinned=engine)
        cpu = self.pool.needed_cpu(entry.manifest.owner)
        if not entry.manifest.sources:
            raise Unavailable(f"{entry.name} was added compiled, so the CPU engine has no file to run")
        proof = await self._loaded(cpu, entry.manifest, entry.manifest.source_key)
        return EngineChosen(
            model=entry.number, engine="cpu", why=why, pinned=engine, interface=proof.interface
        )

    async def _loaded(self, server: DeviceServer, manifest: Manifest, key: str) -> LoadedProof:
        with self.pool.keeping(server, key):
            path = await in_thread(self.store.form, manifest, key)
            return await load(server, key, path, self.limits)

    def _let_go(self, entry: ServedModel) -> EngineChosen:
        """By the times that are known, else as it is: where there is a choice, both are compared anew."""
        manifest = entry.manifest
        wanted = manifest.wanted or self.policy
        if wanted == "fastest" and manifest.times is not None and entry.compiled is not None:
            choice = choose(manifest.times, manifest.owner)
            return EngineChosen(model=entry.number, engine=choice.engine, why=choice.why, pinned="")
        if wanted == "fastest":
            engine, why = ("cpu" if entry.on_cpu else "gpu"), manifest.why
        else:
            engine, why = wanted, f"the engine {wanted} was asked for"
        if engine == "gpu" and entry.compiled is None:
            engine, why = "cpu", manifest.why
        return EngineChosen(model=entry.number, engine=engine, why=why, pinned="")
