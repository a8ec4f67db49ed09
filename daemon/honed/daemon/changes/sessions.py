"""How ONNX Runtime runs a model best on this machine: on how many threads, and whether these spin.

Every model begins with one thread for each big core, and threads that spin. In idle time the service loads
the model in other sessions, runs them in turns with that one, and keeps the fastest; of two that take
equally long the one that leaves more of the processors to apps. Its answers are compared with the reference
before it serves, as those of an optimisation are (`optimisations`), with which it is kept: it is looked for
again with another ONNX Runtime, and on other processors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import field
from functools import partial
from itertools import count
from pathlib import Path

from honed.daemon.aio import in_thread
from honed.daemon.background import Pauses
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, Work
from honed.daemon.idle.leasing import Leasing
from honed.daemon.serving.loader import Loader, made_up
from honed.daemon.serving.selection import BusyWatch
from honed.daemon.store.store import Manifest, Store
from honed.daemon.worker.calls import GivenInput, UnloadModel
from honed.machine.processors import ThreadPlacement
from honed.protocol.dataclass import dataclass
from honed.protocol.results import SessionSettings
from honed.runtime.comparison import Comparison

from .change import Changes

_FASTER = 0.97  # times as long as the best so far, what takes more of the processors has to take at most
_WARM = 3  # runs of a session before its first that counts
_log = logging.getLogger(__name__)
Threads = tuple[int, bool]  # how many, and whether they spin


def candidates(placed: ThreadPlacement, everywhere: int) -> Iterator[tuple[Threads, float]]:
    """Yield what is tried beside `placed`, and how long it may take beside the best so far to be taken.

    `everywhere` is how many processors there are in all.
    """
    if placed.threads > 1:
        yield (placed.threads, False), 1.0
        yield (1, True), 1.0
    if placed.processors and everywhere > placed.threads:
        yield (everywhere, True), _FASTER


@dataclass(slots=True, kw_only=True, eq=False)
class SessionTuning(Feature):
    """Chooses threads for one model after the other, of those that the CPU engine serves.

    `placed` is what models run with at first, and `everywhere` how many processors there are.
    """

    changes: Changes
    registry: Registry
    leasing: Leasing
    store: Store
    placed: ThreadPlacement
    everywhere: int
    _pauses: Pauses = field(init=False, default_factory=Pauses)

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._pauses.forget(model)

    def background(self, *, idle: bool) -> Work | None:
        """Choose the threads of one model."""
        if not idle or not any(candidates(self.placed, self.everywhere)):
            return None
        for entry in self.registry.models():
            if self._due(entry):
                return Work(f"choosing the threads of {entry.name}", partial(self._choose, entry))
        return None

    def _due(self, entry: ServedModel) -> bool:
        known = entry.manifest.optimisation
        if known is None or not known.checked or entry.manifest.owner is not None or not entry.on_cpu:
            return False
        chosen = known.session
        if chosen is not None and chosen.first == str(self.placed) and chosen.others_percent is None:
            return False
        return self._pauses.over(entry.name) and _timed(entry.manifest)

    async def _choose(self, entry: ServedModel) -> None:
        with self.leasing.adding(0, "the threads of a model are being chosen"):
            async with self.changes.begin(entry.name):
                self._pauses.begin(entry.name)
                manifest = entry.manifest
                kept = await self.changes.checks.settle(manifest, await self._fastest(manifest))
        if kept is not None:
            _log.info("model %s: ONNX Runtime takes %s", entry.name, kept)

    async def _fastest(self, manifest: Manifest) -> SessionSettings:
        """Return the fastest session; raise a HonedError where one cannot be loaded or run."""
        loader = self.changes.pool.needed_cpu(None).loader
        watch = await BusyWatch.begin(loader.pid)
        sessions = _Sessions(loader, manifest, await in_thread(self._path, manifest))
        first = best = self.placed.threads, True
        try:
            for tried, allowance in candidates(self.placed, self.everywhere):
                runs = await sessions.compared(best, tried, allowance)
                best = tried if runs.holds else best
            if best != first:
                runs = await sessions.compared(first, best, 1.0)
                best = best if runs.holds else first
        finally:
            await sessions.close()
        before, now = (round(1e6 * seconds, 2) for seconds in runs.times)
        changed = best != first
        return SessionSettings(
            threads=best[0] if changed else 0,
            spinning=best[1],
            us=now if changed else before,
            first_us=before,
            first=str(self.placed),
            others_percent=await watch.percent(),
        )

    def _path(self, manifest: Manifest) -> tuple[Path, Path | None]:
        """Return the model's file, and its compiled form, whose probes it runs on."""
        compiled = self.store.object(manifest.compiled) if manifest.compiled is not None else None
        return self.store.form(manifest, manifest.source_key), compiled


class _Sessions:
    """Sessions of one model beside the one that serves it, as they are needed."""

    def __init__(self, loader: Loader, manifest: Manifest, files: tuple[Path, Path | None]) -> None:
        self._loader = loader
        self._manifest = manifest
        self._path, self._compiled = files
        self._loaded: set[str] = set()

    async def compared(self, first: Threads, second: Threads, allowance: float) -> Comparison:
        """Run both in turns, between requests."""
        assert self._manifest.optimisation is not None
        level, runs, turn = self._manifest.optimisation.level, Comparison(allowance), count()
        keys = []
        for threads, spinning in (first, second):
            keys.append(f"{self._manifest.source_key} on {threads}{' spinning' * spinning}")
            if keys[-1] not in self._loaded:
                self._loaded.add(keys[-1])
                await self._loader.try_session(keys[-1], str(self._path), (level, threads, spinning))
                for _ in range(_WARM):
                    await self._run(keys[-1], next(turn))
        async with self._loader.comparing:
            while not runs.done:
                number, ns = next(turn), [0, 0]
                for which in runs.order:
                    ns[which] = await self._run(keys[which], number)
                runs.add(ns[0] / 1e9, ns[1] / 1e9)
        return runs

    async def _run(self, key: str, turn: int) -> int:
        if self._compiled is not None:
            return await self._loader.turn(key, self._compiled, turn)
        return await self._loader.turn_on_zeros(key, _zeros(self._manifest))

    async def close(self) -> None:
        """Unload them."""
        for key in self._loaded:
            await self._loader.tell(UnloadModel(key=key))


def _zeros(manifest: Manifest) -> tuple[GivenInput, ...]:
    assert manifest.interface is not None
    return made_up(manifest.interface.inputs, manifest.shapes | manifest.settings.warm_up_shapes)


def _timed(manifest: Manifest) -> bool:
    """Return whether times say something: on probes, or in sizes of which none but the first is made up."""
    if manifest.interface is None or manifest.compiled is not None:
        return manifest.interface is not None
    shapes = manifest.shapes | manifest.settings.warm_up_shapes
    return all(
        each.name in shapes or (each.shape is not None and min(each.shape[1:], default=0) >= 0)
        for each in manifest.interface.inputs
    )
