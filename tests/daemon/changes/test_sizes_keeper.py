"""What the keeper of sizes does, with a compiler that is made up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon.background import Background
from honed.daemon.changes import building
from honed.daemon.core.model import State
from honed.daemon.features import sizes as module
from honed.daemon.features.sizes import SizeSpecialiser
from honed.daemon.observe.usage import UsageLog, UsageSettings
from honed.daemon.settings.schema import VariantSettings
from honed.daemon.store.store import Manifest
from honed.protocol.errors import ModelRefused, Unavailable
from honed.protocol.results import ModelPublished
from honed.protocol.values import ObservedSizes, PartitionInfo, SpecialisationInfo
from tests.daemon.core.serving_world import manifest, stored

CHOOSING = PartitionInfo(engine="cpu", nodes=2, flops=9)
DENSE = PartitionInfo(engine="cpu", nodes=9, flops=9_000_000, last=True, sized=True, by_rows=True)


class Place:
    """A service with one model, "m", with a part that is compiled for sizes; what that comes to is given."""

    def __init__(self, folder: Path, comes_to: list[Exception | bool]) -> None:
        self.comes_to = comes_to
        self.made: list[tuple[ObservedSizes, ...]] = []
        self.idle = True
        self.path = folder / "u.json"
        self.ledger = self.read()
        change = SimpleNamespace(sources=self.sources, build=self.build)
        self.changes = SimpleNamespace(
            active={},
            store=SimpleNamespace(object=lambda file: file.sha256),
            begin=lambda _name, owner: contextlib.nullcontext(change),
        )
        server = SimpleNamespace(ready=True)
        self.entry = SimpleNamespace(
            name="m",
            key="1",
            manifest=with_source(manifest("m", "1")),
            compiled=SimpleNamespace(parts=(PartitionInfo(engine="gpu", nodes=1, flops=1), CHOOSING, DENSE)),
            on_preferred_engine=True,
            canary=None,
            state=State.READY,
        )
        registry = SimpleNamespace(
            models=lambda: [self.entry], variants=list, is_suspended=lambda _: False, serves=lambda _: True
        )
        leasing: Any = SimpleNamespace(
            idle=lambda: SimpleNamespace(idle=self.idle), adding=lambda _peer, _why: contextlib.nullcontext()
        )
        self.keeper = SizeSpecialiser(
            changes=cast(Any, self.changes),
            registry=cast(Any, registry),
            pool=cast(Any, SimpleNamespace(device_of=lambda _: server)),
            publisher=cast(Any, SimpleNamespace(publish_resized=self.resized)),
            usage_log=self.ledger,
            leasing=leasing,
            policy="fastest",
            settings=lambda: VariantSettings(requests=4, sizes=2),
            may_compile=lambda _: True,
            compiled=lambda *_: None,
        )
        self.background = Background(leasing=leasing, jobs=self.changes.active, sources=(self.keeper,))

    def read(self) -> UsageLog:
        """What a service that starts knows of requests."""
        return UsageLog(self.path, UsageSettings(), clock=time.monotonic, wall=time.time)

    async def sources(self, _manifest: Any) -> Any:
        return Staged()

    async def build(self, staged: Any, _servers: Any) -> Any:
        assert staged.existing_build == "1"
        assert not staged.keep_slower
        self.made.append(staged.sizes)
        if isinstance(self.comes_to[0], Exception):
            raise self.comes_to.pop(0)
        return SimpleNamespace()

    async def resized(
        self, _change: Any, _entry: Any, _made: Any, why: str, *, keep_slower: bool
    ) -> ModelPublished:
        assert why.startswith("compiled for sizes that its parts meet: ")
        return ModelPublished(
            published=bool(self.comes_to.pop(0)), version=2, sentence="so it is", old_us=None, new_us=None
        )

    def meet(self, rows: int, times: int) -> None:
        for _ in range(times):
            self.keeper.observe(cast(Any, self.entry), [ObservedSizes(part=1, sizes=(rows,))])

    def look(self) -> None:
        asyncio.run(self.background.look())

    def serve(self, *forms: SpecialisationInfo) -> None:
        """Another file of the model, with these forms."""
        parts = (*self.entry.compiled.parts[:2], dataclasses.replace(DENSE, forms=forms))
        self.entry.compiled = SimpleNamespace(parts=parts)
        self.entry.key += "'"
        self.entry.manifest = dataclasses.replace(self.entry.manifest, compiled=stored("1"))


@dataclasses.dataclass
class Staged:
    existing_build: Any = None
    sizes: tuple[ObservedSizes, ...] = ()
    keep_slower: bool = False
    foreground: bool = True


def with_source(given: Manifest) -> Manifest:
    return dataclasses.replace(given, sources=(stored("source"),))


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "build", lambda change, staged, servers: change.build(staged, servers))
    monkeypatch.setattr(module.places, "compiler", lambda: True)


def test_it_compiles_for_what_was_met_once_it_was_met_often(tmp_path: Path) -> None:
    place = Place(tmp_path, [True])
    place.meet(0, 9)
    place.meet(30, 3)
    place.look()
    assert not place.made
    place.meet(31, 3)
    place.look()
    [sizes] = place.made
    assert {met.sizes for met in sizes} == {(30,), (31,)}
    place.serve(SpecialisationInfo(sizes=(30,)), SpecialisationInfo(sizes=(31,)))
    place.look()
    assert len(place.made) == 1


def test_what_it_was_met_in_outlives_the_service(tmp_path: Path) -> None:
    place = Place(tmp_path, [True])
    place.meet(30, 5)
    asyncio.run(place.ledger.save())
    counts = place.read().size_counts("m")
    assert counts == {ObservedSizes(part=1, sizes=(30,)): pytest.approx(5, abs=0.01)}


def test_what_is_not_faster_is_not_tried_again(tmp_path: Path) -> None:
    place = Place(tmp_path, [True])
    place.meet(30, 9)
    place.look()
    place.serve(SpecialisationInfo(sizes=(30,), why="the CPU engine is faster"))
    place.meet(31, 9)
    place.look()
    assert len(place.made) == 1


@pytest.mark.parametrize("outcome", [ModelRefused("it has no kernel"), False])
def test_what_cannot_be_served_is_not_tried_again_until_the_model_is_another(
    tmp_path: Path, outcome: Exception | bool
) -> None:
    place = Place(tmp_path, [outcome, True])
    place.meet(30, 9)
    place.look()
    place.look()
    assert len(place.made) == 1
    place.serve()
    place.look()
    assert len(place.made) == 2


def test_a_failure_that_says_nothing_of_the_model_is_tried_again_later(tmp_path: Path) -> None:
    place = Place(tmp_path, [Unavailable("the worker does not start"), True])
    place.meet(30, 9)
    place.look()
    place.look()
    assert len(place.made) == 1
    place.background.not_before.clear()
    place.look()
    assert len(place.made) == 2


def test_nothing_is_compiled_while_the_machine_is_busy_or_the_model_is_not_to_change(tmp_path: Path) -> None:
    places = [Place(tmp_path, []) for _ in range(5)]
    busy, adding, pinned, away, bare = places
    busy.idle = False
    adding.changes.active["other"] = object()
    history = dataclasses.replace(pinned.entry.manifest.history, pinned=True)
    pinned.entry.manifest = dataclasses.replace(pinned.entry.manifest, history=history)
    away.entry.on_preferred_engine = False
    bare.entry.manifest = manifest("m", "1")  # it was added compiled
    for place in places:
        place.meet(30, 9)
        place.look()
        assert not place.made
