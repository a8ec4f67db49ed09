"""Requests that end ONNX Runtime's process, or go on when nobody waits, harm no other model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("onnxruntime")
from benchmarks import stress

from honed.daemon.observe import faults
from honed.runtime import AsyncClient, Client
from honed.runtime.errors import DeadlineExceeded, HonedError, InvalidArgument, ModelRefused
from tests.crashers import (
    Integers,
    adding,
    dividend,
    dividing,
    filling,
    looped,
    looping,
    rounds,
    uninferable,
)
from tests.daemon.raw import Raw, packed
from tests.daemon.running import (
    DEADLINE,
    NO_TUNER,
    Service,
    descriptors,
    has_ended,
    memory,
    serving,
    wait_for,
)

pytestmark = [pytest.mark.service]
CPU = '[serve]\nengine = "cpu"\n' + NO_TUNER
INNOCENT = ("one", "two", "three")
GOOD, DEADLY = dividend(np.int64), dividend(np.int64, deadly=True)
ROOM_MIB, TABLE_MIB, TABLES = 300, 24, 9  # more than fit in a process, which takes 120 MiB without a model
LONG = 10_000_000  # rounds, several minutes: longer than a run may take; 20,000 are a second


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for number, name in enumerate(INNOCENT, 1):
        (folder / f"{name}.onnx").write_bytes(adding(number))
    (folder / "divide.onnx").write_bytes(dividing(np.int64))
    (folder / "rest.onnx").write_bytes(dividing(np.int32, "Mod"))
    (folder / "loop.onnx").write_bytes(looping())
    (folder / "loop2.onnx").write_bytes(looping())
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, models: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=CPU) as service:
        add_all(service, models)
        yield service


@pytest.fixture
def client(engine: Service) -> Iterator[Client]:
    with engine.client() as connected:
        yield connected


def add_all(service: Service, models: Path) -> None:
    with service.client() as client:
        for path in sorted(models.glob("*.onnx")):
            client.add(path, name=path.stem)


def check(client: Client, name: str) -> None:
    """An innocent model is right."""
    x = np.arange(5, dtype=np.float32)
    number = INNOCENT.index(name) + 1
    np.testing.assert_array_equal(client.infer(name, {"x": x}, timeout=DEADLINE)["y"], x + number)


def check_loop(client: Client, n: int, name: str = "loop", seed: int = 0) -> None:
    """`looping` is right."""
    inputs = rounds(n, seed)
    y = client.infer(name, inputs, timeout=DEADLINE)["y"]
    np.testing.assert_allclose(y, looped(inputs), atol=1e-5)


def queue(client: Client) -> tuple[int, int]:
    found = client.status()["queue"]
    return found["waiting"], found["running"]


def wait_ended(service: Service, client: Client) -> None:
    """Until no request is left: each was ended, and none by the end of the time that it may take."""
    wait_for(lambda: queue(client) == (0, 0), "the runs to end", service)
    assert "hung" not in service.log


def begin(service: Service, n: int = LONG, name: str = "loop") -> Raw:
    """A connection whose request runs."""
    raw = Raw(service.socket)
    inputs = rounds(n)
    raw.request("ModelInfer", infer_params(name, inputs))
    with service.client() as client:
        wait_for(lambda: queue(client)[1] >= 1, "the run to begin")
    return raw


def infer_params(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    kinds = {"float32": "FP32", "int64": "INT64"}
    return {
        "model_name": name,
        "inputs": [
            {"name": key, "datatype": kinds[value.dtype.name], "shape": list(value.shape)}
            for key, value in inputs.items()
        ],
        "raw_input_contents": [value.tobytes() for value in inputs.values()],
    }


def restarts(client: Client) -> int:
    """How often the process of all models was started anew."""
    devices = client.status()["devices"]
    return next(int(each["worker"]["restarts"]) for each in devices if each["name"] == "ONNX Runtime/CPU")


# ---- Requests that end the process ----


def test_a_request_that_ends_the_process_is_refused_and_its_model_goes_on(
    engine: Service, client: Client
) -> None:
    right = client.infer("divide", GOOD)["y"]
    before = restarts(client)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"ends the process of ONNX Runtime/CPU.*SIGFPE"):
            client.infer("divide", DEADLY, timeout=DEADLINE)
        np.testing.assert_array_equal(client.infer("divide", GOOD, timeout=DEADLINE)["y"], right)
    assert restarts(client) == before + 1, "only the first ended the process of all models"
    shown = next(model for model in client.models() if model["name"] == "divide")
    assert shown["state"] == "READY"
    assert "ended the process of ONNX Runtime/CPU (it was ended by signal SIGFPE)" in shown["reason"]
    service = faults.of_service(str(engine.socket))
    assert service is not None
    assert ("ONNX Runtime/CPU", "it was ended by signal SIGFPE") in {
        (e.engine, e.reason) for e in service.ended
    }
    for name in INNOCENT:
        check(client, name)


def test_others_are_served_while_models_end_processes_and_are_loaded(
    start_service: Callable[..., Service], models: Path
) -> None:
    """The ends fall into loads and runs of innocent models, which all are answered."""
    service = start_service(config=CPU)
    add_all(service, models)
    stop, failed = threading.Event(), list[str]()

    def crash(name: str, kind: Integers) -> None:
        with service.client() as client:
            while not stop.is_set():
                with contextlib.suppress(HonedError):
                    client.infer(name, dividend(kind, deadly=True), timeout=DEADLINE)

    def ask(name: str) -> None:
        with service.client() as client:
            while not stop.is_set():
                try:
                    check(client, name)
                except (HonedError, AssertionError) as error:
                    failed.append(f"{name}: {error}")

    threads = [
        threading.Thread(target=crash, args=each) for each in (("divide", np.int64), ("rest", np.int32))
    ]
    threads += [threading.Thread(target=ask, args=(name,)) for name in INNOCENT]
    for thread in threads:
        thread.start()
    with service.client() as client:
        wait_for(lambda: isolated(client) == {"divide", "rest"}, "both to be isolated", service)
        for turn in range(2):  # what is added anew is loaded beside their ends
            client.add(models / "loop.onnx", name=f"more{turn}")
            check_loop(client, 40, f"more{turn}")
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)
        assert not failed
        states = {model["name"]: model["state"] for model in client.models()}
        assert {states[name] for name in (*INNOCENT, "loop", "more0", "more1")} == {"READY"}


def isolated(client: Client) -> set[str]:
    return {m["name"] for m in client.models() if "ended the process" in m["reason"]}


# ---- Runs that nobody waits for ----


@pytest.mark.parametrize("how", ["closed", "killed", "timed out", "cancelled"])
def test_a_run_that_nobody_waits_for_ends(engine: Service, client: Client, how: str) -> None:
    if how == "closed":
        begin(engine).socket.close()
    elif how == "killed":
        code = f"from {__name__} import ask_for_ever; ask_for_ever({str(engine.socket)!r})"
        other = subprocess.Popen([sys.executable, "-c", code])
        wait_for(lambda: queue(client)[1] == 1, "the run to begin")
        other.kill()
        other.wait()
    elif how == "timed out":
        with pytest.raises(DeadlineExceeded, match="while it ran"):
            client.infer("loop", rounds(LONG), timeout=0.3)
    else:
        asyncio.run(cancel_and_ask(engine))
    wait_ended(engine, client)
    check_loop(client, 1)


def ask_for_ever(place: str) -> None:
    """What a client does that is killed."""
    with Client(place) as client:
        client.infer("loop", rounds(LONG), timeout=DEADLINE)


async def cancel_and_ask(service: Service) -> None:
    """Cancel a request, and send others on the same connection: no answers are mixed up."""
    async with AsyncClient(service.socket) as client:
        for seed in range(3):
            long = asyncio.ensure_future(client.infer("loop", rounds(LONG), timeout=DEADLINE))
            await asyncio.sleep(0.2)
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            inputs = rounds(1, seed)
            y = (await client.infer("loop", inputs, timeout=DEADLINE))["y"]
            np.testing.assert_allclose(y, looped(inputs), atol=1e-5)


def test_other_models_do_not_wait_for_one_that_takes_long(engine: Service, client: Client) -> None:
    long = begin(engine)
    for name in INNOCENT:
        check(client, name)
    check_loop(client, 40, "loop2")
    assert queue(client) == (0, 1), "the long one still runs"
    long.socket.close()
    wait_ended(engine, client)


def test_a_half_closed_connection_gets_its_answer(engine: Service) -> None:
    inputs = rounds(15_000)
    raw = Raw(engine.socket)
    raw.request("ModelInfer", infer_params("loop", inputs))
    raw.socket.shutdown(socket.SHUT_WR)
    raw.socket.settimeout(DEADLINE)
    answer = raw.read()
    assert answer is not None
    assert answer[2] is None, answer
    y = np.frombuffer(answer[3]["raw_output_contents"][0], np.float32).reshape(inputs["x"].shape)
    np.testing.assert_allclose(y, looped(inputs), atol=1e-5)


def test_what_is_queued_vanishes_with_its_clients(engine: Service, client: Client) -> None:
    raws = [begin(engine), *(Raw(engine.socket) for _ in range(20))]
    for number, raw in enumerate(raws[1:]):
        whole = packed(1, "ModelInfer", infer_params("loop", rounds(LONG)))
        raw.send(whole if number % 2 else whole[: len(whole) // 2])
    wait_for(lambda: queue(client)[0] == 10, "the requests to wait")
    for raw in raws:
        raw.socket.close()
    wait_ended(engine, client)
    check_loop(client, 1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_service_ends_in_a_run_and_starts_again(
    start_service: Callable[..., Service], models: Path, how: signal.Signals
) -> None:
    service = start_service(config=CPU + "[limits]\nstop_seconds = 1\n")
    add_all(service, models)
    raw = begin(service)
    children = psutil.Process(service.process.pid).children(recursive=True)
    service.process.send_signal(how)
    service.process.wait(DEADLINE)
    raw.socket.close()
    wait_for(lambda: all(map(has_ended, children)), "all processes to end")
    assert service.socket.exists() is (how is signal.SIGKILL)
    service.restart()
    service.wait_listening()
    service.wait_ready()
    with service.client() as client:
        check_loop(client, 1)


# ---- Files that end the process, and memory that runs out ----


def test_a_file_that_ends_the_process_is_said_to_and_memory_is_not_named(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "m.onnx").write_bytes(uninferable())
    with pytest.raises(ModelRefused, match="ended ONNX Runtime's process twice") as refused:
        client.add(tmp_path / "m.onnx")
    assert "SIGSEGV" in refused.value.reasons[0]
    assert "memory" not in " ".join(refused.value.reasons)
    check(client, "one")


def test_models_that_do_not_fit_together_are_all_served(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    """Some make room for others in a process that goes on, and blame nobody."""
    service = start_service(config=f"{CPU}[cpu]\nmemory_mib = {ROOM_MIB}\n")
    with service.client() as client:
        for number in range(TABLES):
            path = tmp_path / f"m{number}.onnx"
            path.write_bytes(filling(number, TABLE_MIB))
            client.add(path)
        for number in [*range(TABLES), *reversed(range(TABLES))]:
            found = client.infer(f"m{number}", {"i": np.array([0, 5])}, timeout=DEADLINE)["y"]
            np.testing.assert_array_equal(found, np.full(2, number, np.float32))
        assert restarts(client) == 0
        assert not any(model["reason"] for model in client.models())
    assert "memory is short" in service.log


@pytest.mark.slow
def test_thirty_rounds_leave_nothing(start_service: Callable[..., Service], models: Path) -> None:
    """Of clients that close, cancel, or come too late: service and engine hold as much as before."""

    service = start_service(config=CPU)
    add_all(service, models)
    with service.client() as client:

        def held() -> list[tuple[int, int, int]]:
            devices = client.status()["devices"]
            engines = [each["worker"]["pid"] for each in devices if each["name"] == "ONNX Runtime/CPU"]
            return [
                (descriptors(pid), psutil.Process(pid).num_threads(), memory(pid))
                for pid in (service.process.pid, *engines)
            ]

        def come_and_go() -> None:
            begin(service).socket.close()
            with pytest.raises(DeadlineExceeded):
                client.infer("loop", rounds(LONG), timeout=0.15)
            asyncio.run(cancel_and_ask(service))
            wait_ended(service, client)

        for _ in range(5):
            come_and_go()
        before = held()
        for _ in range(30):
            come_and_go()

        def is_back() -> bool:
            """Or holds less: the process that builds ends after a while."""
            now = held()
            return all(now[n][0] <= row[0] and now[n][1] <= row[1] for n, row in enumerate(before))

        wait_for(is_back, "threads to end, and descriptors to be closed")
        for (_, _, first), (_, _, last) in zip(before, held(), strict=True):
            assert last - first < 8 << 20


@pytest.mark.slow
def test_no_innocent_model_fails_beside_those_that_crash_and_hang(tmp_path: Path) -> None:
    found = stress.run(20.0, 0, tmp_path)
    assert found["failures"] == []
    assert all(found["requests"][name]["requests"] for name in stress.innocents())
    assert found["restarts"]["ONNX Runtime/CPU"] > 0
