"""Publications that meet something else in the middle. A real store; fleet and worker are stand-ins."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon.compiled import Compiled, summarise
from honed.daemon.inspection import Inspector
from honed.daemon.latencies import Latencies
from honed.daemon.limits import Limits
from honed.daemon.models import Entry, Registry
from honed.daemon.publishing import Publisher, Trial
from honed.daemon.store import Manifest, Store, StoredFile, describe, new_version
from honed.daemon.versions import Duel, first, succeed
from honed.runtime import modelfile
from honed.runtime.protocol import PublishParams

from . import spin


class Interrupted(Store):
    """Something happens in the loop while a manifest is written."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def commit(self, manifest: Manifest, staged: Iterable[tuple[StoredFile, Path]]) -> None:
        self.meanwhile()
        super().commit(manifest, staged)


class Loader:
    """Whatever is loaded is twice as fast."""

    async def load(self, key: str, path: str, **_: object) -> object:
        return object()

    async def duel(self, old: str, new: str, rounds: int) -> Duel:
        return Duel(old=(200,) * rounds, new=(100,) * rounds, wrong="")

    @contextmanager
    def keeping(self, key: str) -> Iterator[None]:
        yield

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Jobs:
    """One change at a time."""

    def __init__(self, registry: Registry) -> None:
        self.committing = asyncio.Lock()
        self.inspector = Inspector()
        self._registry = registry

    @contextmanager
    def job(self, *_: object) -> Iterator[None]:
        yield

    def manifests(self) -> list[Manifest]:
        return [entry.manifest for entry in self._registry.all()]


def read(path: Path) -> Compiled:
    with modelfile.read(path) as file:
        return summarise(file.model)


def stored(store: Store, folder: Path) -> tuple[Entry, Entry]:
    """Model m at version 2, and as it was at version 1; no source, so anything of its shape succeeds it."""
    manifest: Manifest | None = None
    before: Entry | None = None
    for number, turns in ((1, 400), (2, 200)):
        file = describe(spin.write(folder / f"v{number}.honed", turns), "m.honed")
        path = folder / f"v{number}.honed"
        schedules = read(path).schedules
        version = new_version(file, number, schedules=schedules, why="", now=number, settled=number == 1)
        if manifest is not None:
            before = Entry(manifest=manifest, compiled=read(store.object(manifest.compiled)))
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
    return before, Entry(manifest=manifest, compiled=read(store.object(manifest.compiled)))


@pytest.mark.parametrize("at", ["before it is stored", "while it is stored"])
def test_a_rollback_meanwhile_is_not_undone(tmp_path: Path, at: str) -> None:
    store = Interrupted(tmp_path / "state")
    store.open()
    before, entry = stored(store, tmp_path)
    offered = spin.write(tmp_path / "v3.honed", 100)

    async def go() -> dict[str, Any]:
        loop, registry, loader = asyncio.get_running_loop(), Registry(), Loader()
        registry.put(entry)
        jobs = Jobs(registry)
        fleet = SimpleNamespace(loader=lambda _: loader, check_at_home=lambda _: None)
        fleet.admit = fleet.unload = lambda *_: None
        publisher = Publisher(Limits(), store, registry, cast(Any, fleet), cast(Any, jobs), Latencies())
        publisher._trials["m"] = Trial(before=before, since=0.0)

        def crashes() -> None:
            store.meanwhile = lambda: None
            done = asyncio.run_coroutine_threadsafe(crash(), loop)
            done.result(30)

        async def crash() -> None:
            publisher._faulted(entry, "it crashed")

        if at == "while it is stored":
            store.meanwhile = crashes
        else:
            await jobs.committing.acquire()
        descriptor = os.open(offered, os.O_RDONLY)
        try:
            params = PublishParams(name="m", expected=entry.key, why="tuned")
            publishing = asyncio.ensure_future(publisher.publish(params, [descriptor]))
            if at == "before it is stored":
                while not jobs.committing._waiters:  # type: ignore[attr-defined]
                    await asyncio.sleep(0.01)
                await crash()
                jobs.committing.release()
            told = await publishing
        finally:
            os.close(descriptor)
        while publisher._tasks:
            await asyncio.wait(publisher._tasks)
        assert registry.get("m").key == before.key
        return told

    told = asyncio.run(go())
    assert not told["published"]
    assert told["version"] == 1
    history = store.open()[0]["m"].history
    assert history.current.number == 1
    assert "it crashed" in history.get(2).quarantine
