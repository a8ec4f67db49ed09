"""Publications that meet something else in the middle. A real store; pool and worker are stand-ins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon.changes.change import Changes, StoreWriter
from honed.daemon.changes.publish import Publisher
from honed.daemon.core.machine import Machine
from honed.daemon.core.messages import Added, CanaryCompared, Event, LoadReport, Persist, WorkerReady
from honed.daemon.core.model import Canary, ServedModel
from honed.daemon.core.state import Registry
from honed.daemon.observe.latencies import Latencies
from honed.daemon.serving.trial import PairedTrialResult
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import CompiledFileInfo, summarise
from honed.daemon.store.files import StoredFile, describe
from honed.daemon.store.inspector import Inspector
from honed.daemon.store.store import Manifest, Store, new_version
from honed.daemon.store.versions import first, succeed
from honed.protocol.params import PublishParams
from honed.protocol.results import ModelChecked, ModelPublished
from honed.runtime.compiled import modelfile
from honed.runtime.engines import PairedTiming
from tests.daemon import spin
from tests.daemon.running import DEADLINE


class Interrupted(Store):
    """Something happens in the loop while a manifest is written."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def commit(self, manifest: Manifest, staged: Iterable[tuple[StoredFile, Path]]) -> None:
        self.meanwhile()
        super().commit(manifest, staged)


class Loader:
    """Whatever is loaded is twice as fast."""

    async def load(self, key: str, path: str, **_: object) -> LoadReport:
        return LoadReport(engine="", worker=1, checked=ModelChecked(device="", outputs=()))

    async def compare(self, old: str, new: str, allowance: float) -> PairedTrialResult:
        return PairedTrialResult(runs=PairedTiming(allowance, pairs=[(2e-7, 1e-7)] * 7), wrong="")


async def _at_once(seconds: float) -> None:
    """It is ready."""


class Pool:
    """The machine with one worker, which is ready; of what it wants done only the store sees anything."""

    def __init__(self, models: Registry, commits: StoreWriter) -> None:
        self.machine = Machine(models, ("",), "", 1)
        self.persisting: list[asyncio.Task[None]] = []
        self._commits = commits
        self._server = SimpleNamespace(loader=Loader(), name="", wait_ready=_at_once)
        self.handle(WorkerReady(engine="", worker=1, spec="d", family="cpu"))

    def handle(self, event: Event) -> None:
        for action in self.machine.handle(event, 0.0, 0.0):
            if isinstance(action, Persist):
                self.persisting.append(asyncio.ensure_future(self._commits.persist(action.model)))

    def version_comparer(self, _: ServedModel) -> None:
        """Return nothing: plain runs will do."""

    def device_of(self, _: ServedModel) -> SimpleNamespace:
        return self._server

    def check_at_home(self, _: ServedModel) -> None:
        """It is."""

    def wake(self, _: str) -> None:
        """There are no variants."""

    @contextmanager
    def keeping(self, *_: object) -> Iterator[None]:
        yield


def read(path: Path) -> CompiledFileInfo:
    with modelfile.read(path) as file:
        return summarise(file.model)


def stored(store: Store, folder: Path) -> tuple[Manifest, Manifest]:
    """Model m at version 2, and as it was at version 1; no source, so anything of its shape succeeds it."""
    manifest: Manifest | None = None
    before: Manifest | None = None
    for number, turns in ((1, 400), (2, 200)):
        file = describe(spin.write(folder / f"v{number}.honed", turns), "m.honed")
        path = folder / f"v{number}.honed"
        schedules = read(path).schedules
        version = new_version(file, number, schedules=schedules, why="", now=number, settled=number == 1)
        before = manifest
        history = succeed(manifest.history, version, 2, keep=True) if manifest else first(version, 1)
        manifest = Manifest(
            name="m",
            added=1,
            compiled=file,
            history=history,
            sources=(),
            shapes={},
            precision="fp32",
        )
        store.commit(manifest, [(file, path)])
    assert manifest is not None
    assert before is not None
    return before, manifest


@pytest.mark.parametrize("at", ["before it is stored", "while it is stored"])
def test_a_rollback_meanwhile_is_not_undone(tmp_path: Path, at: str) -> None:
    store = Interrupted(tmp_path / "state")
    store.open()
    before, present = stored(store, tmp_path)
    offered = spin.write(tmp_path / "v3.honed", 100)

    async def go() -> ModelPublished:
        loop, models, inspector = asyncio.get_running_loop(), Registry(), Inspector()
        commits = StoreWriter(store, models)
        pool = Pool(models, commits)
        for manifest in (before, present):
            compiled = read(store.object(manifest.compiled))
            pool.handle(Added(manifest=manifest, compiled=compiled, preferred_engine="", proof=None))
            if manifest is before:
                earlier = models.get("m")
        model = models.get("m")
        model.canary = Canary(before=earlier, since=0.0)
        changes = Changes(Limits(), store, models, cast(Any, pool), commits, inspector, tmp_path)
        publisher = Publisher(
            changes=changes, registry=models, pool=cast(Any, pool), latencies=Latencies(), policy="fastest"
        )

        def crashes() -> None:
            store.meanwhile = lambda: None
            done = asyncio.run_coroutine_threadsafe(crash(), loop)
            done.result(DEADLINE)

        async def crash() -> None:
            pool.handle(CanaryCompared(model.number, "it crashed"))

        if at == "while it is stored":
            store.meanwhile = crashes
        else:
            await commits.turn.acquire()
        descriptor = os.open(offered, os.O_RDONLY)
        try:
            params = PublishParams(name="m", expected=model.key, why="tuned")
            publishing = asyncio.ensure_future(publisher.publish(params, [descriptor]))
            if at == "before it is stored":
                while not (commits.turn._waiters or publishing.done()):  # type: ignore[attr-defined]
                    await asyncio.sleep(0.01)
                await crash()
                commits.turn.release()
            told = await publishing
        finally:
            os.close(descriptor)
        await asyncio.gather(*pool.persisting)
        assert models.get("m").key == before.compiled.sha256
        return told

    told = asyncio.run(go())
    assert not told.published
    assert told.version == 1
    history = store.open()[0]["m"].history
    assert history.current.number == 1
    assert "it crashed" in history.get(2).quarantine
