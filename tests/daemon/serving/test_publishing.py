"""Better kernels under running apps: swapped in when right and faster, rolled back when not. Real worker."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from honed.hub import machine
from honed.hub.layout import Withdrawn
from honed.runtime import Client
from honed.runtime.errors import AlreadyExists, ModelRefused, NotFound
from tests.daemon import spin
from tests.daemon.running import DEADLINE, Service, wait_for
from tests.daemon.spin import X
from tests.runtime.builder import Builder

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]
SLOW, FAST = 120_000, 12_000  # turns of a loop that cannot be left out


def model(folder: Path, name: str, turns: int, extra: str = "") -> Path:
    return spin.write(folder / f"{name}.honed", turns, extra)


@pytest.fixture
def service(empty_service: Service, tmp_path: Path) -> Service:
    """With a slow model, freshly added."""
    _freshly_added(empty_service, tmp_path)
    return empty_service


@pytest.fixture
def alone(start_service: Starter, tmp_path: Path) -> Iterator[tuple[Service, Client]]:
    """A service of its own with a client, for a test that ends it."""
    running: Service = start_service()
    _freshly_added(running, tmp_path)
    with running.client() as connected:
        yield running, connected


def _freshly_added(service: Service, folder: Path) -> None:
    with service.client() as client:
        if client.models():
            client.remove("m")
        client.add(model(folder, "slow", SLOW), name="m")


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as connected:  # one left open would be waited for when the service stops
        yield connected


def publish(client: Client, path: Path) -> dict[str, object]:
    return client.publish("m", path, expected=client.show("m")["sha256"], why="tuned: a test")


def served(client: Client, count: int) -> None:
    for _ in range(count):
        np.testing.assert_allclose(client.infer("m", {"x": X})["y"], X + 1)


def test_a_faster_version_takes_over_and_settles(client: Client, tmp_path: Path) -> None:
    served(client, 1)
    told = publish(client, model(tmp_path, "fast", FAST))
    assert told["published"], told
    assert "times as fast" in str(told["sentence"])
    history = client.history("m")
    assert (history["version"], history["on_trial"]) == (2, True)
    served(client, 20)
    wait_for(lambda: not client.history("m")["on_trial"], "the version to settle")
    history = client.history("m")
    assert [v["settled"] for v in history["versions"]] == [True, True]
    assert history["versions"][1]["new_us"] < history["versions"][1]["old_us"]
    assert [s["end"] for s in history["stints"]] == ["version 2 followed", ""]


def test_a_slower_one_is_not_taken(client: Client, tmp_path: Path) -> None:
    before = client.show("m")["sha256"]
    told = publish(client, model(tmp_path, "slower", 2 * SLOW))
    assert not told["published"]
    assert "not faster" in str(told["sentence"])
    assert client.show("m")["sha256"] == before


def test_one_that_is_wrong_for_what_clients_send_is_not_taken(client: Client, tmp_path: Path) -> None:
    """Its own probe does not show it: only what was recorded of a client does."""
    client.infer("m", {"x": X + 5})
    bad = model(tmp_path, "bad", FAST, "if (x[0] > 4.0f) y[i] += 0.1f;")
    told = publish(client, bad)
    assert not told["published"]
    assert "differ" in str(told["sentence"])
    again = publish(client, bad)
    assert "quarantine" in str(again["sentence"])


def test_one_whose_probe_is_wrong_is_not_taken(client: Client, tmp_path: Path) -> None:
    told = publish(client, model(tmp_path, "bad", FAST, "y[i] += 0.1f;"))
    assert not told["published"]
    assert "wrong answers" in str(told["sentence"])
    served(client, 1)


def test_one_that_turns_out_wrong_in_service_is_rolled_back(
    service: Service, client: Client, tmp_path: Path
) -> None:
    told = publish(client, model(tmp_path, "bad", FAST, "if (x[0] > 4.0f) y[i] += 0.1f;"))
    assert told["published"]
    for _ in range(20):
        client.infer("m", {"x": X + 5})
    wait_for(lambda: client.history("m")["version"] == 1, "the rollback", service)
    np.testing.assert_allclose(client.infer("m", {"x": X + 5})["y"], X + 6)
    history = client.history("m")
    assert "differ" in history["versions"][1]["quarantine"]
    assert "rolled back" in service.log


def test_one_that_kills_the_worker_costs_one_retry(
    alone: tuple[Service, Client], tmp_path: Path, start_service: Starter
) -> None:
    service, client = alone
    crash = "if (x[0] > 90.0f) y[1 << 29] = 1.0f;"
    assert publish(client, model(tmp_path, "bad", FAST, crash))["published"]
    np.testing.assert_allclose(client.infer("m", {"x": X + 99})["y"], X + 100)
    history = client.history("m")
    assert history["version"] == 1
    assert "worker ended" in history["versions"][1]["quarantine"]
    wait_for(lambda: (service.state / "models" / "m.json").read_text().count("worker ended") > 0, "the store")
    service.kill()
    restarted = start_service(service.state)
    with restarted.client() as again:
        kept = again.history("m")
        assert [kept[key] for key in ("version", "versions", "stints")] == [
            history[key] for key in ("version", "versions", "stints")
        ]
        served(again, 1)


@pytest.mark.slow
def test_a_worker_killed_by_somebody_else_is_not_blamed_on_the_version(
    service: Service, client: Client, tmp_path: Path
) -> None:
    assert publish(client, model(tmp_path, "fast", FAST))["published"]
    worker = service.worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    served(client, 20)
    wait_for(lambda: not client.history("m")["on_trial"], "the version to settle", service)
    assert client.history("m")["version"] == 2


@pytest.mark.slow
def test_a_trial_cut_short_by_a_restart_goes_on_serving(
    alone: tuple[Service, Client], tmp_path: Path, start_service: Starter
) -> None:
    service, client = alone
    assert publish(client, model(tmp_path, "fast", FAST))["published"]
    service.kill()
    with start_service(service.state).client() as again:
        served(again, 1)
        wait_for(lambda: again.history("m")["versions"][1]["settled"], "the version to settle")
        assert again.history("m")["version"] == 2


@pytest.mark.slow
def test_rollback_and_pin_by_hand(client: Client, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no earlier version"):
        client.rollback("m")
    assert publish(client, model(tmp_path, "fast", FAST))["published"]
    served(client, 20)
    wait_for(lambda: not client.history("m")["on_trial"], "the version to settle")
    assert client.rollback("m") == {"version": 1}
    assert "by hand" in client.history("m")["versions"][1]["quarantine"]
    assert not publish(client, model(tmp_path, "fast", FAST))["published"]
    assert client.pin("m") == {"version": 1, "pinned": True, "engine": ""}
    told = publish(client, model(tmp_path, "faster", FAST // 2))
    assert "pinned" in str(told["sentence"])
    client.pin("m", 0)
    assert publish(client, model(tmp_path, "faster", FAST // 2))["published"]


def test_schedules_of_a_version_that_is_taken_back_are_named_for_a_hub(
    client: Client, tmp_path: Path
) -> None:
    def measured(builder: Builder) -> None:
        (kernel,) = builder.kernels
        builder.kernels[:] = [dataclasses.replace(kernel, task="k1", schedule="measured:again:0123456789ab")]

    fast = spin.write(tmp_path / "fast.honed", FAST, also=measured)
    assert publish(client, fast)["published"]
    assert client.history("m")["versions"][1]["brought"] == ["k1 0123456789ab"]
    assert machine.find_withdrawn(client) == []
    client.rollback("m")
    assert machine.find_withdrawn(client) == [Withdrawn("k1", "0123456789ab")]


def test_what_is_not_its_successor_is_refused(client: Client, tmp_path: Path) -> None:
    builder = Builder()
    x, y = builder.input("x", "float32", (8,)), builder.output("y", "float32", (8,))
    builder.copy(x, y)
    with pytest.raises(ModelRefused, match="inputs are not those"):
        publish(client, builder.write(tmp_path / "other.honed"))
    with pytest.raises(AlreadyExists, match="replaced since"):
        client.publish("m", model(tmp_path, "fast", FAST), expected="0" * 64, why="late")


@pytest.mark.slow
def test_removing_a_model_on_trial_leaves_nothing(service: Service, client: Client, tmp_path: Path) -> None:
    assert publish(client, model(tmp_path, "fast", FAST))["published"]
    client.remove("m")
    assert list((service.state / "objects").iterdir()) == []


@pytest.mark.slow
def test_swaps_under_load_lose_and_spoil_nothing(service: Service, client: Client, tmp_path: Path) -> None:
    failures: list[object] = []
    stop = threading.Event()

    def ask() -> None:
        with service.client() as mine:
            while not stop.is_set():
                try:
                    np.testing.assert_allclose(mine.infer("m", {"x": X})["y"], X + 1)
                except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
                    failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for n in range(3):
            told = publish(client, model(tmp_path, f"v{n}", SLOW >> (n + 1)))
            assert told["published"], told
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
    assert failures == []
    assert client.history("m")["version"] == 4, service.log
