"""How ONNX Runtime runs a model best on this machine: its threads, its memory, and whether in fp16.

Every model begins with one thread for each big core, threads that spin, and a memory arena. In idle time the
service loads the model in other sessions, runs them in turns with that one, and keeps the fastest; of two
that take equally long the one that leaves more of the machine to apps. Where the processors have fp16
arithmetic, the compiler makes the model's fp16 form, which takes part as well. Answers are compared with the
reference before they serve, as those of an optimisation are (`optimisations`), with which the settings are
kept: they are looked for again with another ONNX Runtime, and on other processors.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from honed.daemon.aio import cleared_in_thread, in_thread
from honed.daemon.background import Pauses
from honed.daemon.core.model import ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.feature import Feature, Work
from honed.daemon.idle.leasing import Leasing
from honed.daemon.serving.loader import Loader, made_up
from honed.daemon.serving.selection import BusyWatch
from honed.daemon.store.store import Manifest, Store
from honed.daemon.worker.calls import GivenInput
from honed.machine.processors import ThreadPlacement
from honed.protocol.results import SessionAsked, SessionSettings
from honed.runtime.comparison import Comparison

from .change import Changes

# Times as long as the best so far, what takes more of the processors, or is less exact, has to take at most.
# So has what runs without an arena: whether the heap returns memory after each run depends on what else it
# holds, and where it does, SqueezeNet takes 1.4 times as long.
_FASTER = 0.97
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
    """Chooses settings for one model after the other, of those that the CPU engine serves.

    `placed` is what models run with at first, and `everywhere` how many processors there are. With `half`
    these have fp16 arithmetic.
    """

    changes: Changes
    registry: Registry
    leasing: Leasing
    store: Store
    placed: ThreadPlacement
    everywhere: int
    half: bool = False
    _pauses: Pauses = field(init=False, default_factory=Pauses)

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._pauses.forget(model)

    def background(self, *, idle: bool) -> Work | None:
        """Choose the settings of one model."""
        if not idle or not self.placed.threads:
            return None
        for entry in self.registry.models():
            if self._due(entry):
                return Work(f"choosing how ONNX Runtime runs {entry.name}", partial(self._choose, entry))
        return None

    def _due(self, entry: ServedModel) -> bool:
        known = entry.manifest.optimisation
        if known is None or not known.checked or entry.manifest.owner is not None or not entry.on_cpu:
            return False
        chosen = known.session
        fits = chosen is not None and chosen.first == str(self.placed) and (self.half or not chosen.half)
        if chosen is not None and fits and chosen.others_percent is None:
            return False
        return self._pauses.over(entry.name) and _timed(entry.manifest)

    async def _choose(self, entry: ServedModel) -> None:
        with self.leasing.adding(0, "how ONNX Runtime runs a model is being chosen"):
            async with self.changes.begin(entry.name):
                self._pauses.begin(entry.name)
                manifest = entry.manifest
                async with cleared_in_thread(self.store.staging()) as folder:
                    kept = await self._settled(manifest, folder / "fp16.onnx")
        if kept is not None:
            _log.info("model %s: ONNX Runtime takes %s", entry.name, kept)

    async def _settled(self, manifest: Manifest, form: Path) -> SessionSettings | None:
        """Have a model run in its fastest session, and return the settings that it has then, if any."""
        found = await self._fastest(manifest, form)
        kept = await self.changes.checks.settle(manifest, found)
        if kept is not None and kept.half is not None:
            await in_thread(self.store.keep, form)  # the store may have been swept meanwhile
        return kept

    async def _fastest(self, manifest: Manifest, form: Path) -> SessionSettings:
        """Return the fastest session, which may be of the fp16 `form`; that is made here.

        Raises a HonedError where a session cannot be loaded or run.
        """
        assert manifest.optimisation is not None
        loader = self.changes.pool.needed_cpu(None).loader
        watch = await BusyWatch.begin(loader.pid)
        sessions = _Sessions(loader, manifest, await in_thread(self._path, manifest), str(form))
        first = best = SessionAsked(manifest.optimisation.level, self.placed.threads)
        try:
            for (threads, spins), allowance in candidates(self.placed, self.everywhere):
                tried = best._replace(threads=threads, spinning=spins)
                best = await sessions.better(best, tried, allowance)
            best = await sessions.better(best, best._replace(arena=False), _FASTER)
            halved = self.changes.checks.halved
            if self.half and _closed(manifest) and await halved(manifest, best.threads, form):
                tried = best._replace(half=await in_thread(self.store.keep, form))
                best = await sessions.better(best, tried, _FASTER)
            if best != first:
                best = await sessions.better(first, best, 1.0)
        finally:
            await sessions.close()
        before, now = (round(1e6 * seconds, 2) for seconds in sessions.latest.times)
        changed = best != first
        return SessionSettings(
            threads=best.threads if changed else 0,
            spinning=best.spinning,
            us=now if changed else before,
            first_us=before,
            first=str(self.placed),
            others_percent=await watch.percent(),
            arena=None if best.arena else False,
            half=best.half or None,
        )

    def _path(self, manifest: Manifest) -> tuple[Path, Path | None]:
        """Return the model's file, and its compiled form, whose probes it runs on."""
        compiled = self.store.object(manifest.compiled) if manifest.compiled is not None else None
        return self.store.form(manifest, manifest.source_key), compiled


class _Sessions:
    """Sessions of one model beside the one that serves it, as they are needed."""

    def __init__(
        self, loader: Loader, manifest: Manifest, files: tuple[Path, Path | None], half: str
    ) -> None:
        self._loader = loader
        self._manifest = manifest
        self._path, self._compiled = files
        self._half = half
        self._loaded: set[str] = set()
        self.latest = Comparison(1.0)

    async def better(self, first: SessionAsked, second: SessionAsked, allowance: float) -> SessionAsked:
        """Run both in turns, between requests; return the second if it takes so many times as long at most.

        The other one is unloaded.
        """
        self.latest = runs = Comparison(allowance)
        turn = count()
        keys = []
        for asked in (first, second):
            keys.append(f"{self._manifest.source_key} as {asked}")
            if keys[-1] not in self._loaded:
                self._loaded.add(keys[-1])
                path = self._half if asked.half else str(self._path)
                await self._loader.try_session(keys[-1], path, asked)
                for _ in range(_WARM):
                    await self._run(keys[-1], next(turn))
        async with self._loader.comparing:
            while not runs.done:
                number, ns = next(turn), [0, 0]
                for which in runs.order:
                    ns[which] = await self._run(keys[which], number)
                runs.add(ns[0] / 1e9, ns[1] / 1e9)
        await self._unload(keys[not runs.holds])
        return second if runs.holds else first

    async def _run(self, key: str, turn: int) -> int:
        if self._compiled is not None:
            return await self._loader.turn(key, self._compiled, turn)
        return await self._loader.turn_on_zeros(key, _zeros(self._manifest))

    async def close(self) -> None:
        """Unload them."""
        for key in list(self._loaded):
            await self._unload(key)

    async def _unload(self, key: str) -> None:
        self._loaded.remove(key)
        await self._loader.unload(key)


def _zeros(manifest: Manifest) -> tuple[GivenInput, ...]:
    assert manifest.interface is not None
    return made_up(manifest.interface.inputs, manifest.shapes | manifest.settings.warm_up_shapes)


def _closed(manifest: Manifest) -> bool:
    """Return whether all sizes of a model's inputs are known, as those of a form are."""
    assert manifest.interface is not None
    shapes = [each.shape for each in manifest.interface.inputs]
    return all(shape is not None and min(shape, default=0) >= 0 for shape in shapes)


def _timed(manifest: Manifest) -> bool:
    """Return whether times say something: on probes, or in sizes of which none but the first is made up."""
    if manifest.interface is None or manifest.compiled is not None:
        return manifest.interface is not None
    shapes = manifest.shapes | manifest.settings.warm_up_shapes
    return all(
        each.name in shapes or (each.shape is not None and min(each.shape[1:], default=0) >= 0)
        for each in manifest.interface.inputs
    )
