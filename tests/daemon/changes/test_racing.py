"""Models that move between a device and the processor's cores: by made-up times, and in a real service."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from honed.daemon.changes.add import as_given, made_manifest
from honed.daemon.changes.change import Built
from honed.daemon.changes.compilation import Staged
from honed.daemon.changes.racing import DeviceRace
from honed.daemon.core.machine import Machine
from honed.daemon.core.messages import (
    Added,
    EngineChosen,
    Event,
    Kept,
    LetGo,
    Load,
    Loaded,
    LoadedProof,
    NotCompared,
    ServerStopped,
    StartServer,
    StopServer,
    WorkerReady,
)
from honed.daemon.core.model import CPU_ENGINE, Engine, Phase, ServedModel, State, kind_of
from honed.daemon.core.state import Registry
from honed.daemon.restoring import without_lost_devices
from honed.daemon.serving.pool import Placement
from honed.daemon.serving.selection import BusyWatch, unfinished
from honed.daemon.store.store import EngineTimes, Manifest
from honed.protocol.errors import ModelRefused
from honed.runtime import Client
from honed.runtime.compiled import modelfile
from tests.daemon.core.serving_world import CHECKED, COMPILED, given, manifest, stored
from tests.daemon.running import IDLE, Service, wait_for
from tests.pocl import ALL, ONE, two_drivers

from .test_sessions import product


class Device:
    """An engine whose runs take `ms`, as server and as loader."""

    def __init__(self, house: House, name: str, spec: str, ms: float) -> None:
        self.name = name
        self.shown = spec
        self.ms = ms
        self.driver = 1
        self.comparing = asyncio.Lock()
        self.pid = 0
        self._house = house

    @property
    def loader(self) -> Device:
        return self

    @property
    def engine(self) -> Engine:
        return self._house.machine.engines[self.name]

    def starts(self) -> None:
        fingerprint = f"{self.shown} {self.driver}"
        family = "cpu" if self.name == "cores" else "mali" if self.name == "" else ""
        self._house.tell(
            WorkerReady(engine=self.name, worker=1, spec=self.shown, family=family, fingerprint=fingerprint)
        )

    async def wait_ready(self, _: float) -> None:
        assert self.engine.phase is Phase.READY, "nothing has woken it"

    async def alone(self, key: str, turn: int) -> int:
        return round(1e6 * self.ms)

    async def turn(self, source: str, compiled: Path, turn: int) -> int:
        return round(1e6 * self.ms)


class House:
    """A service with the model m on a Mali, beside PoCL, whose runs take so many milliseconds.

    It is its own `Changes` and `Change`. Engines start and stop at once, and have what they are to load.
    """

    limits = SimpleNamespace(load_seconds=1.0)

    def __init__(self, mali: float, cores: float, ort: float, *, spec: str = "PoCL", **changed: Any) -> None:
        self.machine = Machine(Registry(), ("",), "cores", 8, cpu=True, sleeping="cores")
        self.refused = False
        self.compiled = 0
        self.default = Device(self, "", "Mali", mali)
        self.cores, self.ort = Device(self, "cores", spec, cores), Device(self, CPU_ENGINE, "CPU", ort)
        self.servers = {each.name: each for each in (self.default, self.cores, self.ort)}
        self.placement = Placement("", (), {"placed": ""}, "cores")
        self.default.starts()
        chosen = "gpu" if mali <= 1.2 * ort else "cpu"
        times = EngineTimes(gpu_ms=mali, cpu_ms=ort, device="Mali 1", runtime="CPU 1")
        known = {"chosen": chosen, "times": times, "interface": given("m").interface} | changed
        kept = dataclasses.replace(manifest("m", "for Mali"), **known)
        self.tell(self.added(kept, self.default))
        self.race = DeviceRace(
            changes=cast(Any, self),
            registry=self.machine.models,
            leasing=cast(Any, SimpleNamespace(adding=lambda *_: contextlib.nullcontext())),
            sleeping=cast(Any, self.cores),
        )

    def added(self, kept: Manifest, device: Device) -> Added:
        proof = LoadedProof(engine=device.name, worker=1, checked=CHECKED)
        by_cpu = kept.chosen == "cpu"
        return Added(manifest=kept, compiled=COMPILED, home=device.name, proof=proof, cpu=by_cpu)

    def tell(self, event: Event) -> None:
        for action in self.machine.handle(event, 100.0, 0.0):
            match action:
                case StartServer(engine):
                    self.servers[engine].starts()
                case StopServer(engine):
                    self.tell(ServerStopped(engine))
                case Load(_, deployment, model, _):
                    engine = action.engine
                    key, proof = model.key_on(engine), LoadedProof(engine=engine, worker=1, checked=CHECKED)
                    self.tell(Loaded(deployment, key, proof))

    @property
    def pool(self) -> House:
        return self

    @property
    def cpu(self) -> Device:
        return self.ort

    @property
    def model(self) -> ServedModel:
        return self.machine.models.get("m")

    def comparable(self, model: ServedModel) -> bool:
        return self.machine.comparable(model)

    def needed_cpu(self, _: int | None) -> Device:
        return self.ort

    def device_of(self, model: ServedModel) -> Device:
        return self.servers[model.device]

    @contextlib.asynccontextmanager
    async def begin(self, name: str) -> AsyncIterator[House]:
        self.kept: list[tuple[str, str]] = []
        yield self
        for kept in self.kept:
            self.tell(LetGo(*kept))

    def keep(self, server: Device, key: str) -> None:
        self.kept.append((server.name, key))
        self.tell(Kept(server.name, key))

    async def sources(self, _: Manifest) -> Staged:
        return Staged(folder=Path(), sources=(), given=Path(), shapes={}, precision="auto", device=None)

    async def build(self, staged: Staged, servers: list[Device]) -> Built:
        assert not staged.foreground
        self.compiled += 1
        (server,) = servers
        if self.refused:
            raise ModelRefused("the driver does not build it")
        self.keep(server, f"for {server.shown}")
        await server.wait_ready(1.0)
        proof = LoadedProof(engine=server.name, worker=1, checked=CHECKED)
        model = cast(Any, SimpleNamespace(schedules=server.shown))
        file = stored(f"for {server.shown}")
        return Built(server=cast(Any, server), path=Path(), file=file, model=model, proof=proof)

    async def load_stored(self, server: Device, _: Manifest, key: str) -> None:
        self.keep(server, key)

    async def alter(self, _: ServedModel, event: Event) -> None:
        self.tell(event)

    async def commit(self, entering: Callable[[], Event], files: list[Any]) -> None:
        self.tell(entering())

    def look(self) -> bool:
        """Do what the service does in idle time; whether that was anything."""
        work = self.race.background(idle=True)
        if work is not None:
            asyncio.run(cast(Any, work.run()))
        self.race.forget("m")  # no pause
        return work is not None


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """What other programs take of the processors, percent; None: so little that it does not matter."""
    found: list[float | None] = [None]

    async def percent(_: BusyWatch) -> float | None:
        return found[0]

    monkeypatch.setattr(BusyWatch, "percent", percent)
    return found


@pytest.mark.parametrize(
    ("mali", "cores", "ort", "home", "kind"),
    [
        (5.0, 3.0, 8.0, "cores", "gpu"),
        (5.0, 4.5, 8.0, "", "gpu"),  # it leaves the cores to apps
        (5.0, 9.0, 8.0, "", "gpu"),
        (9.0, 3.0, 4.0, "cores", "gpu"),  # ONNX Runtime served it
        (9.0, 5.0, 4.0, "", "cpu"),
    ],
)
def test_the_fastest_serves_and_what_loses_is_dropped(
    mali: float, cores: float, ort: float, home: str, kind: str
) -> None:
    house = House(mali, cores, ort)
    assert house.race.background(idle=False) is None
    assert house.cores.engine.phase is Phase.RESTING
    assert house.look()
    model = house.model
    assert (model.device, kind_of(model.engine), model.state) == (home, kind, State.READY)
    assert (house.cores.engine.phase is Phase.READY) == (home == "cores"), "its worker is there if needed"
    assert model.manifest.device == home
    assert [v.sha256 for v in model.manifest.history.versions if v.kept] == [model.key]
    assert (model.key == "for PoCL") == (home == "cores")
    assert not house.look(), "that is done once"
    house.default.driver = 2
    house.default.starts()
    house.tell(NotCompared(model.number))  # which a new driver makes the service do anyway
    assert house.look()
    assert house.compiled == 2
    assert not house.look()


def test_what_was_measured_beside_busy_programs_or_not_at_all(others: list[float | None]) -> None:
    house = House(5.0, 9.0, 8.0)
    others[0] = 50.0
    assert house.look()
    assert house.look(), "it lost while other programs were busy"
    others[0] = None
    house.refused = True
    assert house.look()
    assert (house.model.device, house.model.state) == ("", State.READY)
    assert not house.look(), "that the cores' driver does not build it stays true"
    assert house.cores.engine.phase is Phase.RESTING


def test_what_onnx_runtime_serves_by_now_leaves_the_cores() -> None:
    house = House(5.0, 3.0, 8.0)
    house.look()
    assert house.model.device == "cores"
    times = EngineTimes(gpu_ms=3.0, cpu_ms=2.0, device="PoCL 1", runtime="CPU 1")
    house.ort.ms = 2.0
    house.tell(EngineChosen(model=house.model.number, engine="cpu", why="", times=times))
    assert house.model.on_cpu
    assert house.look()
    assert (house.model.device, house.model.manifest.device, house.model.key) == ("", "", "for Mali")
    assert house.model.on_cpu
    assert house.cores.engine.phase is Phase.RESTING
    assert not house.look()


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "placed"},
        {"device": "cores"},
        {"owner": 7},
        {"wanted": "gpu"},
        {"pinned_engine": "gpu"},
        {"history": dataclasses.replace(manifest("m", "for Mali").history, pinned=True)},
    ],
)
def test_what_is_not_the_service_s_to_choose(changed: dict[str, Any]) -> None:
    house = House(5.0, 3.0, 8.0, **changed)
    assert not house.look()


def test_one_device_by_two_names_is_seen_once() -> None:
    house = House(5.0, 3.0, 8.0, spec="Mali")
    assert house.look()
    assert house.cores.engine.phase is Phase.RESTING
    assert not house.look()
    assert house.compiled == 0


def test_a_choice_is_no_wish_and_is_undone_with_the_driver_that_it_needs() -> None:
    house = House(5.0, 3.0, 8.0)
    house.look()
    moved = house.model.manifest
    staged = asyncio.run(house.sources(moved))
    assert as_given("m", staged, "", house.model).device == "", "another file begins on the service's device"
    made = asyncio.run(house.build(dataclasses.replace(staged, foreground=False), [house.default]))
    assert made_manifest("m", made, staged, house.model, None).device == ""
    again = made_manifest("m", made, staged, house.model, moved)
    assert (again.device, again.raced) == ("cores", moved.raced), "a damaged file is made again where it was"
    models = {"m": moved}
    assert without_lost_devices(cast(Any, house), models) == models
    house.placement = Placement("", (), {})
    left = without_lost_devices(cast(Any, house), models)["m"]
    assert (left.compiled, left.device, left.raced, unfinished(left, "fastest")) == (None, "", None, True)


CONFIG = f'[serve]\nengine = "fastest"\n[service]\ndevice = "{ONE}"\nfallback = "{ALL}"\n' + IDLE
X = np.arange(128, dtype=np.float32).reshape(2, 64)
# Times are real, and what is concluded from them is given: whether the form for the cores is the fastest.
DECIDED = """
from honed.runtime import comparison, engines

comparison.Comparison.holds = property(lambda self: not {faster})
engines.compiled_serves = lambda *_, **__: True
"""


def lane(client: Client, device: str) -> dict[str, Any]:
    (found,) = [each for each in client.status()["devices"] if device in (each["name"], each["spec"])]
    return dict(found)


def drivers(process: psutil.Process) -> set[str]:
    """The drivers that a process has loaded, by the files of `two_drivers`."""
    return {Path(m.path).name for m in process.memory_maps(grouped=False) if "vendors" in m.path}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
@pytest.mark.parametrize("faster", [True, False])
def test_a_model_on_the_cores_of_a_machine_with_two_drivers(
    start_service: Callable[..., Service], tmp_path: Path, faster: bool
) -> None:
    """These drivers end a process that loads both."""
    (tmp_path / "vendors").mkdir()
    environment = two_drivers(tmp_path / "vendors")
    service = start_service(config=CONFIG, environment=environment, patch=DECIDED.format(faster=faster))
    with service.client() as client:
        assert lane(client, ALL)["worker"]["state"] == "resting"
        client.add(product(tmp_path / "m.onnx", 2, 2.0))
        said = " from now on: " if faster else "m stays compiled for "
        wait_for(lambda: said in service.log, "a decision", service, seconds=300)
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], 2 * X)
        wait_for(lambda: len(compiled(service)) == 1, "the form that lost to be dropped", service)
        if not faster:
            wait_for(lambda: lane(client, ALL)["worker"]["state"] == "resting", "its worker's end", service)
            assert lane(client, ONE)["models"] == ["m"]
            return
        assert lane(client, ALL)["models"] == ["m"]
        assert "measured in turns" in client.show("m")["placement"]["why"]
        loaded = {name: drivers(psutil.Process(lane(client, name)["worker"]["pid"])) for name in (ALL, ONE)}
        assert loaded[ALL] == {"libpocl-one.so"}
        assert loaded[ONE] <= {"libRusticlOpenCL.so.1"}
    service.kill()
    service.restart()
    service.wait_listening()
    service.wait_ready()
    with service.client() as client:
        assert lane(client, ALL)["models"] == ["m"]
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], 2 * X)
    service.kill()
    (tmp_path / "vendors" / "pthread.icd").unlink()
    service.restart()
    service.wait_listening()
    service.wait_ready()
    with service.client() as client:
        told = "it to be compiled for the device that is left"
        wait_for(lambda: client.show("m")["kernels"], told, service, seconds=300)
        assert ONE in client.show("m")["placement"]["device"]
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], 2 * X)


def compiled(service: Service) -> list[Path]:
    """The compiled files in the store."""
    objects = (service.state / "objects").iterdir()
    return [path for path in objects if path.read_bytes().startswith(modelfile.MAGIC)]
