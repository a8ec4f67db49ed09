"""Models that this device has answered rightly for serve after one probe when the service starts again."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, cast

import pytest

from honed.daemon.core.machine import Machine
from honed.daemon.core.messages import Added, Event, Load, Log, Unload, VerifyProbe, WorkerReady
from honed.daemon.core.model import ServedModel, State
from honed.daemon.core.state import Registry
from honed.daemon.serving.loader import Loader, ProofCache
from honed.daemon.settings.schema import Limits
from honed.daemon.store.files import StoredFile
from honed.daemon.store.store import Manifest, Store, begin
from honed.daemon.worker.builder import BuilderLost
from honed.daemon.worker.calls import BuiltModel, CheckedProbe, CheckProbe, UnloadModel, WorkerCall
from honed.daemon.worker.supervisor import Supervisor, WorkerDied
from honed.machine.profile import DeviceIdentity
from honed.protocol.results import ModelChecked
from honed.protocol.values import ComparedOutput
from honed.runtime.errors import HonedError, ModelRefused
from tests.runtime.builder import PROFILE

PROBES = 3
IDENTITY = PROFILE.identity
KEY = "a" * 64


def worst(probe: int) -> ComparedOutput:
    return ComparedOutput(name="y", tolerance=1.0, error=0.1 * probe)


class Worker:
    """In the place of a supervisor: a worker that has `PROBES` for each model, and what it was asked."""

    state, starts, identity, profile = "ready", 1, IDENTITY, PROFILE

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failing: dict[int, HonedError] = {}  # by probe
        self.states: list[State] = []
        self.model: ServedModel | None = None

    async def call(self, call: WorkerCall[Any], *, seconds: float) -> BuiltModel | CheckedProbe:
        probe = call.probe if isinstance(call, CheckProbe) else None
        self.asked.append(call.method if probe is None else f"{call.method} {probe}")
        if self.model is not None:
            self.states.append(self.model.state)
        if probe is None:
            return BuiltModel(device="d", probes=PROBES)
        if probe in self.failing:
            raise self.failing[probe]
        return CheckedProbe(outputs=(worst(probe),))

    async def open(self) -> None:
        """The driver of a device that is not there is loaded."""

    def kill(self, reason: str) -> None:
        raise AssertionError(reason)


def manifest() -> Manifest:
    file = StoredFile(name="m.honed", sha256=KEY, nbytes=1)
    return Manifest(
        name="m",
        added=0.0,
        compiled=file,
        history=begin(file, schedules="", why="added", now=0.0),
        sources=(),
        shapes={},
        precision="auto",
    )


class Builder:
    """In the place of the process that builds: what it proved, and with what it fails."""

    def __init__(self, failing: HonedError | None = None) -> None:
        self.proved: list[str] = []
        self._failing = failing

    async def prove(self, key: str, path: str, **_: object) -> None:
        self.proved.append(key)
        if self._failing is not None:
            raise self._failing


def start(cache: Path, worker: Worker, builder: Builder | None = None) -> tuple[ServedModel, list[str]]:
    """A service's start with one model, to the end of all its work; why it was given up."""
    given_up: list[str] = []
    machine = Machine(Registry(), ("",), "", 1)
    machine.handle(
        Added(manifest=manifest(), compiled=cast(Any, None), preferred_engine="", proof=None), 0.0, 0.0
    )
    worker.model = model = machine.models.get("m")

    async def go() -> None:
        loader = Loader(
            machine.engines[""],
            Limits(),
            cast(Supervisor, worker),
            machine.models,
            Store(cache / "state"),
            cache,
        )
        loader.builder = cast(Any, builder or Builder())
        news: list[Event | None] = [WorkerReady(engine="", worker=1, spec="d", family="cpu")]
        while news:
            event = news.pop(0)
            for action in machine.handle(event, 0.0, 0.0) if event is not None else []:
                match action:
                    case Load():
                        news.append(await loader.restore(action))
                    case VerifyProbe():
                        news.append(await loader.prove(action))
                    case Unload():
                        await loader.tell(UnloadModel(key=action.key))
                    case Log(sentence):
                        given_up.append(sentence.partition(" is not served any more: ")[2])

    asyncio.run(go())
    return model, given_up


def test_all_probes_are_proven_apart_once_and_one_before_serving(tmp_path: Path) -> None:
    first, builder = Worker(), Builder()
    start(tmp_path, first, builder)
    assert builder.proved == [KEY]
    assert first.asked == ["BuildModel", "CheckProbe 0"]
    assert set(first.states) == {State.LOADING}
    again, builder = Worker(), Builder()
    model, _ = start(tmp_path, again, builder)
    assert builder.proved == []
    assert again.asked == ["BuildModel", "CheckProbe 0", "CheckProbe 1", "CheckProbe 2"]
    assert again.states == [State.LOADING] * 2 + [State.READY] * 2
    assert model.checked == ModelChecked(device="d", outputs=(worst(2),))


def test_a_wrong_answer_that_shows_late_ends_serving_and_is_remembered(tmp_path: Path) -> None:
    start(tmp_path, Worker())
    wrong = Worker()
    wrong.failing = {2: ModelRefused("it is wrong", ())}
    model, given_up = start(tmp_path, wrong)
    assert (model.state, given_up) == (State.UNAVAILABLE, ["it is wrong"])
    assert wrong.asked[-1] == "UnloadModel"
    next_time, builder = Worker(), Builder(ModelRefused("it is wrong", ()))
    model, given_up = start(tmp_path, next_time, builder)
    assert builder.proved == [KEY]
    assert (model.state, given_up) == (State.UNAVAILABLE, ["it is wrong"])
    assert set(next_time.asked) <= {"UnloadModel"}  # it was refused before the worker saw it


def test_a_model_that_ends_the_process_that_builds_is_given_up_and_no_worker_sees_it(tmp_path: Path) -> None:
    worker, builder = Worker(), Builder(BuilderLost("it died"))
    model, given_up = start(tmp_path, worker, builder)
    assert builder.proved == [KEY, KEY]
    assert (model.state, worker.asked) == (State.UNAVAILABLE, [])
    assert "it died" in given_up[0]


def test_a_worker_lost_meanwhile_means_proving_all_before_serving(tmp_path: Path) -> None:
    start(tmp_path, Worker())
    dying = Worker()
    dying.failing = {1: WorkerDied("it died")}
    model, given_up = start(tmp_path, dying)
    assert (model.state, given_up) == (State.READY, [])  # the next worker's turn
    fresh, builder = Worker(), Builder()
    start(tmp_path, fresh, builder)
    assert builder.proved == [KEY]


def test_another_driver_is_another_device(tmp_path: Path) -> None:
    ProofCache(tmp_path, IDENTITY).note(KEY)
    plain = {name: getattr(IDENTITY, name) for name in ("platform", "vendor", "name", "kernel_driver")}
    other = DeviceIdentity(**plain, driver_version=IDENTITY.driver_version + ".1")
    assert ProofCache(tmp_path, IDENTITY).knows(KEY)
    assert not ProofCache(tmp_path, other).knows(KEY)
    assert not ProofCache(tmp_path, IDENTITY).knows("b" * 64)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("honed.daemon.serving.loader.REMEMBERED", 3)
    proven = ProofCache(tmp_path, IDENTITY)
    for n in range(4):
        proven.note(str(n))
        for marker in (tmp_path / "proven").iterdir():
            if marker.stat().st_mtime > 4:  # of just now: clocks of file systems are coarse
                os.utime(marker, (n, n))
    assert [proven.knows(str(n)) for n in range(4)] == [False, True, True, True]


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "proven").write_text("a file in the way")
    worker = Worker()
    model, _ = start(tmp_path, worker)
    assert model.state is State.READY
