"""On which of two OpenCL devices a model is compiled: the one of the service, or the processor.

Where PoCL is installed beside another driver, the processor's cores are one more device, which sleeps
(`serving.pool.sleeping_device`). In idle time, once a model is compiled for the service's device, it is
compiled for the cores as well. Where that form is faster than what serves, it takes its place; else it is
dropped. The service remembers in the manifest which devices and drivers it compared, and compares again once
these change.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from dataclasses import field
from functools import partial

from honed.daemon.background import Pauses
from honed.daemon.core.messages import Added, Raced
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, Work
from honed.daemon.idle.leasing import Leasing
from honed.daemon.serving.engine_server import DeviceServer
from honed.daemon.serving.selection import BusyWatch, EngineChoice, choose, in_turns, measure
from honed.daemon.store.store import new_version
from honed.daemon.store.versions import succeed
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import AlreadyExists, ModelRefused, ResourceExhausted
from honed.runtime.engines import allowance

from .add import failure
from .change import Built, Change, Changes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """Which form serves from now on: with `moves` the one of the other device, `choice` being its engine.

    `busy`: other programs may have slowed one of them more than the other.
    """

    moves: bool
    why: str
    choice: EngineChoice
    busy: bool


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceRace(Feature):
    """Compares the devices for one model after the other; `sleeping` is the one of the cores."""

    changes: Changes
    registry: Registry
    leasing: Leasing
    sleeping: DeviceServer
    _pauses: Pauses = field(init=False, default_factory=Pauses)

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._pauses.forget(model)

    def background(self, *, idle: bool) -> Work | None:
        """Compare the devices for one model."""
        if not idle or not self._pauses.over(""):
            return None
        for entry in self.registry.models():
            if self._pauses.over(entry.name) and self._due(entry):
                return Work(f"comparing devices for {entry.name}", partial(self._race, entry))
        return None

    def _due(self, entry: ServedModel) -> bool:
        """Return whether a model's device is the service's to choose, and it has not chosen yet.

        Before the cores and the CPU engine were seen, that is not known of a model whose device was chosen.
        """
        pool, manifest = self.changes.pool, entry.manifest
        placed = pool.placement.home(entry.name, manifest.asked_device, "asked for").why
        ours = entry.device in (pool.default.name, self.sleeping.name) and not placed
        if not ours or manifest.owner is not None or manifest.history.pinned or not pool.comparable(entry):
            return False
        if self.sleeping.engine.spec == pool.default.engine.spec:
            return False  # it is one device by two names
        return manifest.raced != self._devices() or self._left(entry)

    def _left(self, entry: ServedModel) -> bool:
        """Return whether the cores were chosen, and ONNX Runtime serves the model there by now."""
        return entry.device == self.sleeping.name and entry.on_cpu

    def _devices(self) -> str:
        pool = self.changes.pool
        servers = (pool.default, self.sleeping, pool.needed_cpu(None))
        return "; ".join(server.engine.fingerprint for server in servers)

    async def _race(self, entry: ServedModel) -> None:
        self._pauses.begin(entry.name)
        with self.leasing.adding(0, "devices are being compared for a model"):
            async with self.changes.begin(entry.name) as change:
                self._pauses.begin("")  # of all models, until both workers have started
                for server in (self.sleeping, self.changes.pool.needed_cpu(None)):
                    change.keep(server, entry.key_on(server.name))
                    await server.wait_ready(self.changes.limits.load_seconds)
                self._pauses.forget("")
                if self._due(entry):
                    await self._raced(change, entry)

    async def _raced(self, change: Change, entry: ServedModel) -> None:
        """Compile a model for the other device, and have the faster form serve."""
        default, here = self.changes.pool.default, self.changes.pool.device_of(entry)
        other = default if here is self.sleeping else self.sleeping
        devices = self._devices()
        try:
            staged = dataclasses.replace(await change.sources(entry.manifest), foreground=False)
            made = await change.build(staged, [other])
        except (ModelRefused, ResourceExhausted) as error:
            _log.info("model %s is not compiled for %s: %s", entry.name, other.shown, failure(error))
            await change.alter(entry, Raced(entry.number, devices))
            return
        result = await self._compared(change, entry, made)
        if result.moves:
            moved = partial(self._moved, entry, made, result, devices)
            await change.commit(moved, [(made.file, made.path)])
            _log.info("model %s is compiled for %s from now on: %s", entry.name, other.shown, result.why)
            return
        _log.info("model %s stays compiled for %s: %s", entry.name, here.shown, result.why)
        if not result.busy:
            await change.alter(entry, Raced(entry.number, devices))

    async def _compared(self, change: Change, entry: ServedModel, made: Built) -> _Result:
        """Run the other device's form in turns with ONNX Runtime, and with the present form if it serves."""
        pool, manifest, other = self.changes.pool, entry.manifest, made.server
        cpu, here = pool.needed_cpu(None), pool.device_of(entry)
        await change.load_stored(cpu, manifest, manifest.source_key)
        times = await measure(other.loader, made.file.sha256, made.path, cpu.loader, manifest.source_key)
        choice, busy = choose(times), times.others_percent is not None
        if self._left(entry):
            return _Result(moves=True, why=choice.why, choice=choice, busy=busy)
        if choice.engine == "cpu" or entry.on_cpu:
            return _Result(moves=choice.engine == "gpu", why=choice.why, choice=choice, busy=busy)
        # The service's device leaves the cores to apps, and may take longer for that.
        allowed = allowance(same_cores=pool.default.engine.on_processor)
        watch = await BusyWatch.begin(here.loader.pid, other.loader.pid)
        async with here.loader.comparing, other.loader.comparing:
            runs = await in_turns(
                partial(other.loader.alone, made.file.sha256),
                partial(here.loader.alone, entry.key),
                allowed if other is self.sleeping else 1 / allowed,
            )
        busy = busy or await watch.percent() is not None
        there_ms, here_ms = (f"{1e3 * seconds:.3g} ms" for seconds in runs.times)
        why = f"{other.shown} {there_ms}, {here.shown} {here_ms}, measured in turns"
        return _Result(moves=not runs.holds, why=why, choice=choice, busy=busy)

    def _moved(self, entry: ServedModel, made: Built, result: _Result, devices: str) -> Added:
        """Return the event by which the other device's form serves; earlier versions do not run there.

        Raises AlreadyExists where the form that it was compared with is not served any more.
        """
        if not self.registry.serves(entry):
            raise AlreadyExists("the version it was compared with is not served any more")
        manifest, now, choice = entry.manifest, time.time(), result.choice
        version = new_version(
            made.file,
            manifest.history.next_number,
            schedules=made.model.schedules,
            why=f"compiled for another device: {result.why}",
            now=now,
            settled=True,
        )
        manifest = dataclasses.replace(
            manifest,
            compiled=made.file,
            history=succeed(manifest.history, version, now, keep=False),
            device=self.sleeping.name if made.server is self.sleeping else "",
            chosen=choice.engine,
            why=choice.why if choice.why == result.why else f"{choice.why}; {result.why}",
            times=choice.times,
            raced=devices,
        )
        by_cpu = choice.engine == "cpu"
        return Added(
            manifest=manifest, compiled=made.model, home=made.server.name, proof=made.proof, cpu=by_cpu
        )
