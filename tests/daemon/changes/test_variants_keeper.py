"""What the keeper of variants does, with a compiler that is made up."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from honed.daemon.background import Background
from honed.daemon.core import messages
from honed.daemon.core.machine import Machine
from honed.daemon.core.state import Registry
from honed.daemon.features.variants import ShapeVariants, VariantCompiler
from honed.daemon.observe.usage import UsageLog, UsageSettings
from honed.daemon.settings.schema import VariantSettings
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.names import Shapes
from honed.daemon.store.store import Manifest
from honed.protocol.errors import ModelRefused, Unavailable
from tests.daemon.core.serving_world import given

ROWS = Interface(
    inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 4)),), outputs=(), opset=17, producer=""
)


class Place:
    """A service with one model, "m", that the CPU engine serves; `fails` is what compiling it raises."""

    def __init__(self, folder: Path, fails: Exception, *, wanted: str = "", why: str = "it is open") -> None:
        self.registry = Registry()
        self.machine = Machine(self.registry, ("gpu",), "", 4, cpu=True)
        self.ledger = UsageLog(folder / "u.json", UsageSettings(), clock=time.monotonic, wall=time.time)
        self.idle = True
        self.tried: list[tuple[str, Shapes]] = []
        self.driver = "1"
        self.fails = fails
        server = SimpleNamespace(ready=True)
        pool = SimpleNamespace(ready=True, handle=self.handle, device_of=lambda _: self.device(server))
        maker = SimpleNamespace(
            pool=pool, changes=SimpleNamespace(active={}), policy="fastest", make=self.make
        )
        maker.under = partial(VariantCompiler.under, maker)
        leasing = SimpleNamespace(
            idle=lambda: SimpleNamespace(idle=self.idle), adding=lambda _peer, _why: contextlib.nullcontext()
        )
        keeper = self.keeper = ShapeVariants(
            maker=cast(Any, maker),
            registry=self.registry,
            usage_log=self.ledger,
            leasing=cast(Any, leasing),
            settings=lambda: VariantSettings(requests=2),
            rewrap=lambda _: None,
            may_compile=lambda _: True,
            compiled=lambda *_: None,
        )
        jobs = maker.changes.active
        self.background = Background(leasing=cast(Any, leasing), jobs=jobs, sources=(keeper,))
        manifest = given_as(wanted, why)
        self.handle(
            messages.Added(manifest=manifest, compiled=None, preferred_engine="gpu", proof=None, cpu=True)
        )

    def device(self, server: SimpleNamespace) -> SimpleNamespace:
        server.identity = SimpleNamespace(name="a device", driver_version=self.driver)
        return server

    def handle(self, event: messages.Event) -> None:
        self.machine.handle(event, 0.0, 0.0)

    async def make(self, model: Any, shapes: Shapes, _notify: Any, *, by_hand: bool) -> tuple[str, str]:
        assert not by_hand
        self.tried.append((model.name, dict(shapes)))
        raise self.fails

    def shown(self) -> Any:
        return self.keeper.show_fields(self.registry.get("m"))["variants"]

    def ask(self, rows: int, times: int) -> None:
        plan = SimpleNamespace(inputs=((TensorSpec(name="x", dtype="float32", shape=(rows, 4)), None),))
        for _ in range(times):
            self.keeper.count_shapes(self.registry.get("m"), cast(Any, plan))

    def look(self) -> None:
        asyncio.run(self.background.look())


def given_as(wanted: str, why: str) -> Manifest:
    return dataclasses.replace(given("m"), interface=ROWS).with_decision(requested=wanted, reason=why)


def test_what_cannot_be_compiled_is_said_and_not_tried_again_until_something_changed(tmp_path: Path) -> None:
    place = Place(tmp_path, ModelRefused("it has no kernel"))
    place.ask(3, 5)
    place.look()
    place.look()
    assert place.tried == [("m", {"x": (3, 4)})]
    [failed] = place.shown()
    assert (failed.state, failed.why, failed.name) == ("FAILED", "it has no kernel", "m@3")
    place.driver = "2"
    assert not place.shown()
    place.look()
    assert len(place.tried) == 2


def test_a_failure_that_says_nothing_of_the_model_is_tried_again_later(tmp_path: Path) -> None:
    place = Place(tmp_path, Unavailable("the worker does not start"))
    place.ask(3, 5)
    place.look()
    place.look()
    assert len(place.tried) == 1
    assert not place.shown()
    place.background.not_before.clear()
    place.look()
    assert len(place.tried) == 2


def test_nothing_is_compiled_while_the_machine_is_busy_or_where_it_shall_not(tmp_path: Path) -> None:
    busy = Place(tmp_path, ModelRefused(""))
    busy.idle = False
    wanted = Place(tmp_path, ModelRefused(""), wanted="cpu")
    unfinished = Place(tmp_path, ModelRefused(""), why="")
    for place in (busy, wanted, unfinished):
        place.ask(3, 5)
        place.look()
        assert not place.tried


def test_the_most_asked_for_shapes_come_first_and_odd_ones_never(tmp_path: Path) -> None:
    place = Place(tmp_path, ModelRefused("no"))
    place.ask(0, 9)  # nothing can be compiled for an empty input
    place.ask(3, 3)
    place.ask(5, 4)
    place.ask(7, 1)
    for _ in range(4):
        place.look()
    assert [shapes["x"] for _, shapes in place.tried] == [(5, 4), (3, 4)]


def test_a_request_of_no_variant_goes_to_the_model(tmp_path: Path) -> None:
    place = Place(tmp_path, ModelRefused("no"))
    entry = place.registry.get("m")
    for shape in ((3, 4), (3,), ()):
        assert place.keeper.runner_of(entry, {"x": shape}) is entry
