"""Processes that die at the worst moment: requests are run again, models are kept, nothing is left over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest

from honed.runtime import Client
from honed.runtime.errors import HonedError, NotFound, Unavailable
from tests.daemon.conftest import SIZE
from tests.daemon.running import DEADLINE, NO_TUNER, Service, has_ended, wait_for
from tests.runtime.builder import Builder, add_constant, add_prepared, chain

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]
X = np.arange(SIZE, dtype=np.float32)


def crashing_model(folder: Path) -> Path:
    """Its kernel writes through a wild pointer, which on PoCL ends the process; by x[0] > 0."""
    builder = Builder()
    x, y = builder.input("x", "float32", (SIZE,)), builder.output("y", "float32", (SIZE,))
    source = """__kernel void crash(__global const float* a, __global float* b) {
      int i = get_global_id(0);
      b[i + (a[0] > 0.0f ? 1 << 29 : 0)] = a[i]; }"""
    builder.launch(builder.kernel(source, "crash", "rw", 4 * SIZE, groups=SIZE, block=1), x, y)
    return builder.write(folder / "crash.honed")


class Asking:
    """Requests from several threads; `outcomes` are arrays and errors."""

    def __init__(self, client: Client, model: str, count: int) -> None:
        self.outcomes: list[object] = []
        self._threads = [threading.Thread(target=self._ask, args=(client, model)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: _queued(client) == (count - 1, 1), "the requests to arrive")

    def join(self) -> list[object]:
        for thread in self._threads:
            thread.join(DEADLINE)
        return self.outcomes

    def _ask(self, client: Client, model: str) -> None:
        try:
            self.outcomes.append(client.infer(model, {"x": X})["y"])
        except HonedError as error:
            self.outcomes.append(error)


def _queued(client: Client) -> tuple[int, int]:
    queue = client.status()["queue"]
    return queue["waiting"], queue["running"]


def hold(service: Service) -> psutil.Process:
    """Stop the worker's process, so that what is asked of it waits."""
    worker = service.worker
    assert worker is not None
    worker.suspend()
    return worker


def restarts(client: Client) -> int:
    count: int = client.status()["worker"]["restarts"]
    return count


def test_the_worker_is_killed_while_requests_run(service: Service, client: Client) -> None:
    before = restarts(client)
    worker = hold(service)
    asking = Asking(client, "small", 6)
    worker.kill()
    outcomes = asking.join()
    assert len(outcomes) == 6
    for y in outcomes:
        np.testing.assert_array_equal(y, 2 * X + 1)
    assert restarts(client) == before + 1
    assert service.worker is not None
    assert service.worker.pid != worker.pid


def test_another_worker_prepares_a_model_anew(service: Service, client: Client, tmp_path: Path) -> None:
    client.add(add_prepared(SIZE).write(tmp_path / "prepared.honed"))
    c = np.arange(SIZE, dtype=np.float32)
    for kills in (1, 0):
        for k in range(3):
            y = client.infer("prepared", {"x": X + k})["y"]
            np.testing.assert_array_equal(y, X + k + 2 * (c + 1))
        if kills:
            service.worker.kill()
    client.remove("prepared")


def test_shared_memory_survives_the_worker(service: Service, client: Client) -> None:
    with client.region(4096) as region:
        x, y = region.array("float32", (SIZE,)), region.array("float32", (SIZE,))
        x[:] = X
        client.infer("small", {"x": x}, outputs={"y": y})
        assert service.worker is not None
        service.worker.kill()
        y[:] = 0
        client.infer("small", {"x": x}, outputs={"y": y})
        np.testing.assert_array_equal(y, 2 * X + 1)


def test_a_request_that_kills_every_worker_is_given_up(client: Client, tmp_path: Path) -> None:
    client.add(crashing_model(tmp_path), name="crash")
    np.testing.assert_array_equal(client.infer("crash", {"x": -X})["y"], -X)
    with pytest.raises(Unavailable, match="2 workers"):
        client.infer("crash", {"x": X + 1})
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], 2 * X + 1)
    with pytest.raises(Unavailable):
        client.infer("crash", {"x": X + 1})
    np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], 2 * X + 1)
    # Four workers in a row: the model is not run any more, and says why.
    state = next(m for m in client.models() if m["name"] == "crash")
    assert state["state"] == "UNAVAILABLE"
    assert "4 workers" in state["reason"]
    client.remove("crash")
    assert [m["name"] for m in client.models()] == ["small"]


def test_a_worker_that_hangs_is_replaced(service: Service, client: Client) -> None:
    service.configure("[limits]\nrun_seconds = 10\n" + NO_TUNER)
    try:
        before, worker = restarts(client), hold(service)
        np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], 2 * X + 1)
        assert restarts(client) == before + 1
        assert not worker.is_running()
    finally:
        service.configure(NO_TUNER)


@pytest.mark.slow
def test_kill_9_of_the_daemon_while_models_are_added(
    start_service: Starter, small_model: Path, tmp_path: Path
) -> None:
    """At moments spread over an addition: the models there stay, the new one is whole or absent."""
    state = tmp_path / "state"
    other = add_constant(64).write(tmp_path / "other.honed")
    service = start_service(state)
    with service.client() as client:
        client.add(small_model, name="kept")
    for round_number in range(6):
        client = service.client()
        adding = threading.Thread(target=_quietly, args=(partial(client.add, other, name="new"),))
        adding.start()
        time.sleep(0.003 * round_number)
        worker = service.worker
        service.kill()
        adding.join(DEADLINE)
        client.close()
        if worker is not None:
            wait_for(partial(has_ended, worker), "the worker to die")
        service = start_service(state)
        with service.client() as client:
            np.testing.assert_array_equal(client.infer("kept", {"x": X})["y"], 2 * X + 1)
            names = {m["name"]: m["state"] for m in client.models()}
            assert names in ({"kept": "READY"}, {"kept": "READY", "new": "READY"})
            if "new" in names:
                y = client.infer("new", {"x": np.zeros(64, np.float32)})["y"]
                np.testing.assert_array_equal(y, np.arange(64) + 1)
                client.remove("new")
            assert client.status()["damaged"] == []
        assert os.listdir(state / "staging") == []
        assert len(os.listdir(state / "objects")) == 1


def _quietly(call: Callable[[], object]) -> None:
    with contextlib.suppress(HonedError):  # the daemon died: that is the point
        call()


@pytest.mark.slow
def test_clients_reconnect_after_a_restart(start_service: Starter, small_model: Path, tmp_path: Path) -> None:
    service = start_service()
    with service.client() as client, client.region(4096) as region:
        x = region.array("float32", (SIZE,))
        x[:] = X
        client.add(small_model, name="small")
        client.infer("small", {"x": x})
        service.process.send_signal(signal.SIGTERM)
        service.process.wait(DEADLINE)
        with pytest.raises(Unavailable, match="no service answers"):
            client.infer("small", {"x": x})
        again = start_service(service.state, socket=service.socket)
        np.testing.assert_array_equal(client.infer("small", {"x": x})["y"], 2 * X + 1)
        again.process.kill()
        again.process.wait()
        start_service(service.state, socket=service.socket)
        np.testing.assert_array_equal(client.infer("small", {"x": x})["y"], 2 * X + 1)


def test_stopping_answers_what_is_queued_and_leaves_nothing(
    start_service: Starter, small_model: Path, tmp_path: Path
) -> None:
    service = start_service()
    with service.client() as client:
        client.add(small_model, name="small")
        children = psutil.Process(service.process.pid).children(recursive=True)
        worker = hold(service)
        asking = Asking(client, "small", 5)
        service.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in service.log, "the daemon to hear of it")
        worker.resume()
        outcomes = asking.join()
    assert service.process.wait(DEADLINE) == 0
    for outcome in outcomes:
        assert isinstance(outcome, np.ndarray), outcome
        np.testing.assert_array_equal(outcome, 2 * X + 1)
    assert not service.socket.exists()
    assert all(map(has_ended, children))


def test_stopping_waits_for_nobody(start_service: Starter, small_model: Path) -> None:
    """Neither for a client that never reads nor for what does not finish, which is answered."""
    service = start_service(config="[limits]\nstop_seconds = 0.5\n")
    idle = socket.socket(socket.AF_UNIX)
    idle.connect(str(service.socket))
    with service.client() as client:
        client.add(small_model, name="small")
        hold(service)
        asking = Asking(client, "small", 4)
        begun = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - begun < DEADLINE
        outcomes = asking.join()
    assert len(outcomes) == 4
    assert all(isinstance(o, Unavailable) and "stopping" in str(o) for o in outcomes), outcomes
    assert idle.recv(1) == b""
    idle.close()


def test_a_second_daemon_is_refused(service: Service, start_service: Starter, tmp_path: Path) -> None:
    same_state = start_service(service.state, wait=False)
    assert same_state.process.wait(DEADLINE) == 1
    assert f"another honed (process {service.process.pid}) uses state folder" in same_state.log
    same_socket = start_service(tmp_path / "other", socket=service.socket, wait=False)
    assert same_socket.process.wait(DEADLINE) == 1
    assert f"another honed (process {service.process.pid}) uses socket" in same_socket.log
    with service.client() as client:
        assert client.live()


@pytest.mark.slow
def test_a_stale_socket_is_replaced_and_a_file_is_not(start_service: Starter, tmp_path: Path) -> None:
    first = start_service(wait=False)
    first.wait_listening()
    first.kill()
    assert first.socket.exists()
    again = start_service(first.state, socket=first.socket, wait=False)
    again.wait_listening()
    with again.client() as client:
        assert client.live()
    precious = tmp_path / "precious"
    precious.write_text("data")
    refused = start_service(tmp_path / "other", socket=precious, wait=False)
    assert refused.process.wait(DEADLINE) == 1
    assert "is no socket" in refused.log
    assert precious.read_text() == "data"


def test_the_worker_cannot_start(start_service: Starter, tmp_path: Path) -> None:
    service = start_service(environment={"HONED_DEVICE": "no such device"}, wait=False)
    service.wait_listening()
    with service.client() as client:
        wait_for(lambda: client.status()["worker"]["state"] == "failed", "the worker to fail")
        assert "no such device" in client.status()["worker"]["reason"]
        assert not client.ready()
        add = add_constant(SIZE).write(tmp_path / "m.honed")
        with pytest.raises(Unavailable, match="no such device"):
            client.add(add, name="m")
        assert client.models() == []


def test_a_damaged_model_is_set_aside_and_the_others_served(
    start_service: Starter, small_model: Path, tmp_path: Path
) -> None:
    service = start_service()
    other = add_constant(64).write(tmp_path / "other.honed")
    with service.client() as client:
        client.add(small_model, name="kept")
        client.add(other, name="broken")
        sha256 = client.show("broken")["sha256"]
    service.stop()
    path = service.state / "objects" / sha256
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    service = start_service(service.state)
    with service.client() as client:
        states = {m["name"]: m for m in client.models()}
        assert states["kept"]["state"] == "READY"
        assert states["broken"]["state"] == "UNAVAILABLE"
        assert "damaged" in states["broken"]["reason"]
        assert any("broken" in sentence for sentence in client.status()["damaged"])
        with pytest.raises(Unavailable, match="damaged"):
            client.infer("broken", {"x": X})
        client.add(other, name="broken", replace=True)
        assert client.ready("broken")
    assert os.listdir(service.state / "damaged") == [sha256]


def mount_small_tmpfs(folder: Path, size: str) -> None:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


def _add_to_full_disk(client: Client, model: Path, filler: Path) -> None:
    """More than once, where a file that the service was just replacing has left its room."""
    for _ in range(20):
        with pytest.raises(OSError, match="No space"):
            fill(filler)
        np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], 2 * X + 1)
        client.add(model, name="chain")
        client.remove("chain")


@pytest.mark.slow
def test_a_full_disk(start_service: Starter, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    mount_small_tmpfs(disk, "256k")
    try:
        service = start_service(disk / "state")
        small = add_constant(SIZE).write(tmp_path / "small.honed")
        large = add_constant(60_000).write(tmp_path / "large.honed")
        with service.client() as client:
            client.add(small, name="small")
            for _ in range(3):
                with pytest.raises(HonedError, match="no room left") as full:
                    client.add(large, name="large")
                assert full.value.code == "RESOURCE_EXHAUSTED"
            assert [m["name"] for m in client.models()] == ["small"]
            chained = chain(3, SIZE).write(tmp_path / "chain.honed")
            with pytest.raises(HonedError, match="no room left"):
                _add_to_full_disk(client, chained, disk / "filler")
            (disk / "filler").unlink()
            client.add(chained, name="chain")
        service.stop()
        service = start_service(disk / "state")
        with service.client() as client:
            assert [(m["name"], m["state"]) for m in client.models()] == [
                ("chain", "READY"),
                ("small", "READY"),
            ]
        service.stop()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_removing_answers_what_waits(service: Service, client: Client, small_model: Path) -> None:
    client.add(small_model, name="leaving")
    worker = hold(service)
    asking = Asking(client, "leaving", 6)
    client.remove("leaving")
    wait_for(lambda: len(asking.outcomes) == 5, "those that wait to be answered")
    assert all(isinstance(outcome, NotFound) for outcome in asking.outcomes)
    worker.resume()
    np.testing.assert_array_equal(asking.join()[-1], 2 * X + 1)
    assert [m["name"] for m in client.models()] == ["small"]


NOTED = """
import sys

from honed.daemon.serving.in_flight import InFlightRequests

run = InFlightRequests.run


def noted(self, action):
    print("run of request", action.ticket.number, file=sys.stderr, flush=True)
    return run(self, action)


InFlightRequests.run = noted
"""


def test_priorities_and_turns(start_service: Starter, tmp_path: Path) -> None:
    """In the order in which runs begin: clients may hear of two answers in any order."""
    service, names = start_service(patch=NOTED), list[str]()
    with service.client() as first, service.client() as second:
        first.add(add_constant(SIZE).write(tmp_path / "m.honed"), name="m")
        worker = hold(service)

        def ask(client: Client, name: str, priority: int) -> threading.Thread:
            before = sum(_queued(first))
            thread = threading.Thread(target=partial(client.infer, "m", {"x": X}, priority=priority))
            thread.start()
            wait_for(lambda: sum(_queued(first)) == before + 1, "the request to arrive")
            names.append(name)
            return thread

        threads = [ask(first, "running", 2)]
        threads += [ask(first, name, 2) for name in ("a1", "a2", "a3")]
        threads += [ask(first, "last", 3), ask(second, "b1", 2), ask(second, "urgent", 1)]
        deadlined = pytest.raises(HonedError, match="before its turn came")
        with deadlined:
            second.infer("m", {"x": X}, timeout=0.05)
        worker.resume()
        for thread in threads:
            thread.join(DEADLINE)
    numbers = [int(number) for number in re.findall(r"^run of request (\d+)$", service.log, re.M)]
    named = dict(zip(sorted(numbers), names, strict=True))  # they are numbered as they arrive
    order = [named[number] for number in numbers]
    assert order[:2] == ["running", "urgent"]
    assert order[-1] == "last"
    assert set(order[2:4]) == {"a1", "b1"}


def test_adding_is_cancelled_when_the_client_goes(service: Service, tmp_path: Path) -> None:
    """The file arrives through a descriptor whose lock shows that the service let go of it."""
    large = add_constant(2_000_000).write(tmp_path / "large.honed")
    with service.client() as watcher:
        leaving = service.client()
        adding = threading.Thread(target=_quietly, args=(partial(leaving.add, large, name="large"),))
        adding.start()
        wait_for(lambda: watcher.status()["jobs"] or len(watcher.models()) > 1, "the addition to begin")
        leaving.close()
        adding.join(DEADLINE)
        wait_for(lambda: not watcher.status()["jobs"], "the addition to end")
        assert os.listdir(service.state / "staging") == []
        with large.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
