"""Several devices at once: requests side by side, models placed, a device that is lost and comes back."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from honed.runtime import Client
from honed.runtime.compiled.model import Probe, Proof
from honed.runtime.errors import HonedError, InvalidArgument, NotFound, Unavailable
from honed.tool.main import main
from tests.daemon.conftest import SIZE
from tests.daemon.running import DEADLINE, Service, has_ended, wait_for
from tests.pocl import ALL, ONE
from tests.runtime.builder import Builder, add_constant, chain

from .vendors import Vendors

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]
X = np.arange(SIZE, dtype=np.float32)
Y = 2 * X + 1
BOTH = f'[service]\ndevices = ["{ALL}", "{ONE}"]\nfallback = "{ALL}"\n'


@pytest.fixture
def vendors(tmp_path: Path) -> Vendors:
    made = Vendors(tmp_path / "opencl")
    made.have("pthread", "basic")
    return made


@pytest.fixture
def service(start_service: Starter, vendors: Vendors, proven: Path) -> Service:
    running = start_service(config=BOTH, environment=vendors.environment)
    with running.client() as client:
        client.add(proven, name="here")
        client.add(proven, name="there", device=ONE)
    return running


@pytest.fixture
def proven(tmp_path: Path) -> Path:
    builder = add_constant(SIZE)
    given, wanted = builder.constant(X), builder.constant(Y)
    probe = Probe(inputs=(given,), outputs=(wanted,), tolerance=(1e-5,))
    builder.proof = Proof(reference="by hand", probes=(probe,), device=None, error=())
    return builder.write(tmp_path / "proven.honed")


def opencl(client: Client) -> list[dict[str, Any]]:
    """The devices, without the CPU engine."""
    return [each for each in client.status()["devices"] if each["engine"] == "gpu"]


def lane(client: Client, name: str) -> dict[str, Any]:
    (found,) = [each for each in client.status()["devices"] if each["name"] == name]
    return dict(found)


def worker(client: Client, name: str) -> psutil.Process:
    return psutil.Process(lane(client, name)["worker"]["pid"])


def placement(client: Client, model: str) -> dict[str, str]:
    return dict(client.show(model)["placement"])


class Asking:
    """Requests of as many threads; `outcomes` are arrays and errors."""

    def __init__(self, service: Service, model: str, count: int) -> None:
        self.outcomes: list[object] = []
        self._service = service
        self._threads = [threading.Thread(target=self._ask, args=(model,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def join(self) -> list[object]:
        for thread in self._threads:
            thread.join(DEADLINE)
        return self.outcomes

    def _ask(self, model: str) -> None:
        with self._service.client() as client:
            try:
                self.outcomes.append(client.infer(model, {"x": X})["y"])
            except HonedError as error:
                self.outcomes.append(error)


def assert_right(outcomes: list[object], count: int) -> None:
    assert len(outcomes) == count
    for outcome in outcomes:
        assert isinstance(outcome, np.ndarray), outcome
        np.testing.assert_array_equal(outcome, Y)


def test_each_device_has_a_worker_and_its_models(service: Service) -> None:
    with service.client() as client:
        devices = opencl(client)
        assert [each["name"] for each in devices] == [ALL, ONE]
        assert [each["default"] for each in devices] == [True, False]
        assert [each["models"] for each in devices] == [["here"], ["there"]]
        assert all(each["name"] in each["spec"] for each in devices)
        assert len({each["worker"]["pid"] for each in devices}) == 2
        for model, device in (("here", ALL), ("there", ONE)):
            np.testing.assert_array_equal(client.infer(model, {"x": X})["y"], Y)
            assert device in client.show(model)["checked"]["device"]
            assert device in client.profile(model, runs=1)["device"]["name"]
        assert placement(client, "there")["why"] == "asked for"
        told = client.openmetrics()
        assert f'honed_device_ready{{device="{ONE}"}} 1' in told
        assert 'honed_model_away{model="there"} 0' in told


@pytest.mark.slow
def test_one_device_does_not_wait_for_another(service: Service) -> None:
    with service.client() as client:
        held = worker(client, ONE)
        held.suspend()
        asking = Asking(service, "there", 3)
        wait_for(lambda: lane(client, ONE)["queue"] == {"waiting": 2, "running": 1}, "the requests")
        assert client.status()["queue"] == {"waiting": 2, "running": 1}
        for _ in range(5):
            np.testing.assert_array_equal(client.infer("here", {"x": X})["y"], Y)
        with pytest.raises(HonedError, match="before its turn came"):
            client.infer("there", {"x": X}, timeout=0.05)
        held.resume()
        assert_right(asking.join(), 3)
        wait_for(lambda: client.status()["queue"] == {"waiting": 0, "running": 0}, "the queues to empty")


@pytest.mark.slow
def test_a_region_serves_all_devices_and_leaves_nothing(service: Service) -> None:
    with service.client() as client:
        workers = [worker(client, name) for name in (ALL, ONE)]

        def mapped() -> list[int]:
            return [sum("memfd:honed" in m.path for m in w.memory_maps(grouped=False)) for w in workers]

        with client.region(1 << 16) as region:
            x, y = region.array("float32", (SIZE,)), region.array("float32", (SIZE,))
            x[:] = X
            for model in ("here", "there"):
                y[:] = 0
                client.infer(model, {"x": x}, outputs={"y": y})
                np.testing.assert_array_equal(y, Y)
            assert mapped() == [1, 1]
        wait_for(lambda: mapped() == [0, 0], "the mappings to go")


@pytest.mark.slow
def test_draining_covers_all_devices(service: Service) -> None:
    with service.client() as client:
        workers = [worker(client, name) for name in (ALL, ONE)]
        for process in workers:
            process.suspend()
        asking = [Asking(service, model, 2) for model in ("here", "there")]
        wait_for(lambda: client.status()["queue"] == {"waiting": 2, "running": 2}, "the requests")
        service.process.terminate()
        wait_for(lambda: "stopping" in service.log, "the daemon to hear of it")
        for process in workers:
            process.resume()
        for each in asking:
            assert_right(each.join(), 2)
    assert service.process.wait(DEADLINE) == 0


@pytest.mark.slow
def test_where_models_go(start_service: Starter, vendors: Vendors, proven: Path, tmp_path: Path) -> None:
    placed = BOTH + 'placement = {there = "BASIC"}\n'
    service = start_service(config=placed, environment=vendors.environment)
    with service.client() as client:
        client.add(proven, name="there")
        client.add(proven, name="asked", device=f"{ONE}-")  # part of its full name
        client.add(proven, name="moved", device=ONE)
        assert lane(client, ONE)["models"] == ["asked", "moved", "there"]
        assert placement(client, "there")["why"] == "placed by the configuration"
        with pytest.raises(InvalidArgument, match=r"places there on BASIC"):
            client.add(proven, name="there", replace=True, device=ALL)
        with pytest.raises(
            NotFound, match=r"'mali' is none of the devices of this service; use one of: .*" + ALL
        ):
            client.add(proven, name="other", device="mali")
        with pytest.raises(NotFound, match="fits several"):
            client.add(proven, name="other", device="portable")
        client.add(proven, name="asked", replace=True)
        assert "asked" in lane(client, ONE)["models"], "it stays where it was"
        client.add(proven, name="moved", replace=True, device=ALL)
        np.testing.assert_array_equal(client.infer("moved", {"x": X})["y"], Y)
    service.stop()
    service = start_service(service.state, config=BOTH, environment=vendors.environment)
    with service.client() as client:
        assert lane(client, ONE)["models"] == ["asked"]
        assert lane(client, ALL)["models"] == ["moved", "there"]
    service.stop()
    service = start_service(
        service.state, config=f'[service]\ndevice = "{ALL}"', environment=vendors.environment
    )
    with service.client() as client:
        assert "not configured any more" in placement(client, "asked")["why"]
        np.testing.assert_array_equal(client.infer("asked", {"x": X})["y"], Y)


@pytest.mark.slow
def test_replacing_on_another_device_takes_its_requests_along(service: Service, proven: Path) -> None:
    with service.client() as client:
        held = worker(client, ONE)
        held.suspend()
        asking = Asking(service, "there", 3)
        wait_for(lambda: lane(client, ONE)["queue"] == {"waiting": 2, "running": 1}, "the requests")
        client.add(proven, name="there", replace=True, device=ALL)
        wait_for(lambda: len(asking.outcomes) == 2, "those that waited to be answered")
        held.resume()
        assert_right(asking.join(), 3)


@pytest.mark.slow
def test_the_fastest_device(service: Service, proven: Path, tmp_path: Path) -> None:
    stages: list[float] = []
    with service.client() as client:
        client.add(
            chain(30, SIZE).write(tmp_path / "chain.honed"),
            name="m",
            device="fastest",
            progress=lambda news: stages.append(news["fraction"]),
        )
        told = placement(client, "m")
        devices = {each["spec"]: each["models"] for each in opencl(client)}
        assert "m" in devices[told["device"]]
        assert told["why"].startswith("measured when it was added: ")
        assert all(f" ms on {spec}" in told["why"] for spec in devices)
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], X + 30)
    assert stages == sorted(stages)
    assert stages[-1] == 1.0


@pytest.mark.slow
def test_a_lost_device_is_stood_in_for_and_comes_back(
    service: Service, vendors: Vendors, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(service.socket))
    with service.client() as client:
        held = worker(client, ONE)
        held.suspend()
        asking = Asking(service, "there", 4)
        wait_for(lambda: lane(client, ONE)["queue"] == {"waiting": 3, "running": 1}, "the requests")
        vendors.have("pthread")
        held.kill()
        assert_right(asking.join(), 4)
        assert lane(client, "basic")["worker"]["state"] == "failed"
        assert "fits no device" in lane(client, "basic")["worker"]["reason"]
        assert lane(client, ALL)["models"] == ["here", "there"]
        assert lane(client, ONE)["away"] == ["there"]
        told = placement(client, "there")
        assert ONE in told["device"]
        assert ALL in told["served_by"]
        assert "stands in for" in told["away"]
        state = next(m for m in client.models() if m["name"] == "there")
        assert state["state"] == "READY"
        assert state["reason"] == told["away"]
        assert "is lost" in service.log
        assert 'honed_model_away{model="there"} 1' in client.openmetrics()
        with pytest.raises(Unavailable, match="own device only"):
            client.rollback("there", 1)
        monkeypatch.setenv("COLUMNS", "400")  # no sentence is folded
        assert main(["status"]) == 0
        assert "there (elsewhere until it is back)" in capsys.readouterr().out
        assert main(["list"]) == 0
        assert "stands in for" in capsys.readouterr().out
        assert main(["show", "there"]) == 0
        assert "stands in for" in capsys.readouterr().out
        vendors.have("pthread", "basic")
        wait_for(lambda: lane(client, ONE)["models"] == ["there"], "the model to go back", service)
        assert placement(client, "there")["away"] == ""
        assert client.ready("there")
        np.testing.assert_array_equal(client.infer("there", {"x": X})["y"], Y)
        assert ONE in client.show("there")["checked"]["device"]
        assert main(["list", "--json"]) == 0
        devices = {m["name"]: m["device"] for m in json.loads(capsys.readouterr().out)["models"]}
        assert ONE in devices["there"]
        assert client.history("there")["versions"][0]["quarantine"] == ""


@pytest.mark.slow
def test_a_stand_in_runs_only_while_it_is_needed(
    start_service: Starter, vendors: Vendors, proven: Path
) -> None:
    alone = f'[service]\ndevice = "{ONE}"\nfallback = "{ALL}"\n'
    service = start_service(config=alone, environment=vendors.environment)
    with service.client() as client:
        client.add(proven, name="m")
        assert len(opencl(client)) == 1
        vendors.have("pthread")
        worker(client, ONE).kill()
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], Y)
        stand_in = lane(client, ALL)
        assert (stand_in["stand_in"], stand_in["models"]) == (True, ["m"])
        process = worker(client, ALL)
        service.kill()
        wait_for(lambda: has_ended(process), "its end")
    service = start_service(service.state, config=alone, environment=vendors.environment)  # still lost
    with service.client() as client:
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], Y)
        process = worker(client, ALL)
        vendors.have("pthread", "basic")
        wait_for(lambda: lane(client, ONE)["models"] == ["m"], "the model to go back", service)
        wait_for(lambda: lane(client, "pthread")["worker"]["state"] == "resting", "the stand-in to end")
        wait_for(lambda: has_ended(process), "its process to end", service)
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], Y)
        assert client.ready()


def for_one_device(folder: Path, name: str, elsewhere: str) -> Path:
    """y = x + 1, and another source where STAND_IN is defined."""
    builder = Builder()
    x, y = builder.input("x", "float32", (SIZE,)), builder.output("y", "float32", (SIZE,))
    source = f"""
#ifdef STAND_IN
{elsewhere}
#else
__kernel void inc(__global const float* x, __global float* y) {{
  y[get_global_id(0)] = x[get_global_id(0)] + 1;
}}
#endif"""
    builder.launch(builder.kernel(source, "inc", "rw", 4 * SIZE, groups=1, block=SIZE), x, y)
    given, wanted = builder.constant(X), builder.constant(X + 1)
    probe = Probe(inputs=(given,), outputs=(wanted,), tolerance=(1e-5,))
    builder.proof = Proof(reference="by hand", probes=(probe,), device=None, error=())
    return builder.write(folder / f"{name}.honed")


@pytest.mark.slow
def test_a_model_that_the_stand_in_cannot_serve_waits_for_its_device(
    start_service: Starter, vendors: Vendors, proven: Path, tmp_path: Path
) -> None:
    wrong = "__kernel void inc(__global const float* x, __global float* y) { y[get_global_id(0)] = 7; }"
    config = f'[service]\ndevice = "{ONE}"\nfallback = "{ALL}"\n'
    service = start_service(config=config, environment=vendors.environment)
    with service.client() as client:
        client.add(proven, name="fits")
        client.add(for_one_device(tmp_path, "unfit", "#error not here"), name="unfit")
        client.add(for_one_device(tmp_path, "wrong", wrong), name="wrong")
        vendors.have("pthread", define="STAND_IN")
        held = worker(client, ONE)
        held.suspend()
        asking = Asking(service, "unfit", 2)
        wait_for(lambda: lane(client, ONE)["queue"] == {"waiting": 1, "running": 1}, "the requests")
        held.kill()
        np.testing.assert_array_equal(client.infer("fits", {"x": X})["y"], Y)
        for outcome in asking.join():
            assert isinstance(outcome, Unavailable)
            assert "is lost" in str(outcome)
        wait_for(lambda: client.status()["models"]["LOADING"] == 0, "the models to be tried", service)
        states = {m["name"]: (m["state"], m["reason"]) for m in client.models()}
        assert states["fits"][0] == "READY"
        for name, why in (("unfit", "cannot compile a kernel"), ("wrong", "wrong answers")):
            assert states[name][0] == "UNAVAILABLE"
            assert "is lost" in states[name][1]
            assert why in states[name][1]
            with pytest.raises(Unavailable, match="is lost"):
                client.infer(name, {"x": X})
            assert client.history(name)["versions"][0]["quarantine"] == ""
        vendors.have("pthread", "basic")
        wait_for(lambda: len(lane(client, ONE)["models"]) == 3, "the models to go back", service)
        for name in ("unfit", "wrong"):
            np.testing.assert_array_equal(client.infer(name, {"x": X})["y"], X + 1)
        assert client.ready()


@pytest.mark.slow
def test_a_model_can_be_removed_while_its_device_is_lost(
    start_service: Starter, vendors: Vendors, proven: Path
) -> None:
    config = f'[service]\ndevice = "{ONE}"\nfallback = "{ALL}"\n'
    service = start_service(config=config, environment=vendors.environment)
    with service.client() as client:
        client.add(proven, name="m")
        expected = client.show("m")["sha256"]
        vendors.have("pthread")
        worker(client, ONE).kill()
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], Y)
        with pytest.raises(Unavailable, match="own device only"):
            client.publish("m", proven, expected=expected, why="a test")
        with pytest.raises(Unavailable, match="does not start"):
            client.add(proven, name="m", replace=True)
        client.remove("m")
        wait_for(lambda: lane(client, "pthread")["worker"]["state"] == "resting", "the stand-in to end")
        assert client.models() == []
        vendors.have("pthread", "basic")
        wait_for(client.ready, "the device to be back", service)
        client.add(proven, name="m")
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], Y)


@pytest.mark.parametrize("fallback", ["", pytest.param("cpu", marks=pytest.mark.slow)])
def test_without_a_stand_in_requests_are_told(
    start_service: Starter, vendors: Vendors, proven: Path, fallback: str
) -> None:
    """The CPU is no stand-in for a CPU."""
    config = f'[service]\ndevice = "{ONE}"\nfallback = "{fallback}"\n'
    service = start_service(config=config, environment=vendors.environment)
    with service.client() as client:
        client.add(proven, name="m")
        held = worker(client, ONE)
        held.suspend()
        asking = Asking(service, "m", 2)
        wait_for(lambda: lane(client, ONE)["queue"] == {"waiting": 1, "running": 1}, "the requests")
        vendors.have("pthread")
        held.kill()
        outcomes = asking.join()
        assert len(outcomes) == 2
        assert all(isinstance(o, Unavailable) and "does not start" in str(o) for o in outcomes), outcomes
        with pytest.raises(Unavailable, match="fits no device"):
            client.infer("m", {"x": X})
        vendors.have("pthread", "basic")
        wait_for(lambda: client.ready("m"), "the device to be back", service)
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], Y)


@pytest.mark.slow
def test_a_model_that_kills_workers_is_not_taken_for_a_lost_device(service: Service, tmp_path: Path) -> None:
    with service.client() as client:
        os.kill(lane(client, "basic")["worker"]["pid"], 9)
        np.testing.assert_array_equal(client.infer("there", {"x": X})["y"], Y)
        assert placement(client, "there")["away"] == ""
        assert lane(client, "pthread")["worker"]["restarts"] == 0
