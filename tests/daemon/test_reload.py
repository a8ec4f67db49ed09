"""Configuration read again by a running daemon: what changes, what waits, and that nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from honed.daemon.config import settings
from honed.runtime import Client
from honed.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable

from .conftest import SIZE, Hone
from .running import COMPILED_ONLY, NO_TUNER, Service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]
X = np.linspace(-3, 4, SIZE, dtype=np.float32)
Y = X + np.arange(SIZE, dtype=np.float32) + 1
RELOADS = 10


def configure(service: Service, text: str) -> Path:
    file = service.log_file.with_name("honed.toml")
    file.write_text(text + NO_TUNER + COMPILED_ONLY)
    return file


@pytest.fixture
def service(empty_service: Service) -> Service:
    """With nothing configured but that there is no tuner."""
    empty_service.configure(NO_TUNER)
    return empty_service


def in_force(client: Client) -> dict[str, object]:
    return {each["name"]: each["value"] for each in client.config()["settings"]}


def test_a_reload_under_load_loses_nothing(service: Service, small_model: Path) -> None:
    """Two clients at work, ten reloads by method and signal: no error, no wrong answer, no reconnect."""
    stop = threading.Event()
    served = [0, 0]
    failed: list[BaseException] = []

    def load(number: int) -> None:
        try:
            with service.client() as busy:
                assert busy.live()
                link = busy._link
                while not stop.is_set():
                    np.testing.assert_array_equal(busy.infer("small", {"x": X})["y"], Y)
                    served[number] += 1
                assert busy._link is link, "the connection is the one it was"
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failed.append(error)

    with service.client() as client:
        client.add(small_model, name="small")
        threads = [threading.Thread(target=load, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: min(served) > 10 or failed, "both clients at work", service)
            for turn in range(RELOADS):
                configure(
                    service,
                    f"[limits]\nmax_queue = {2 + turn}\nmax_unanswered = {1 + turn % 3}\n"
                    f"max_user_connections = {3 + turn}\nrun_seconds = {20 + turn}\n"
                    f"message_seconds = {5 + turn}\n",
                )
                if turn % 2:
                    service.process.send_signal(signal.SIGHUP)
                    wait_for(
                        lambda wanted=2 + turn: in_force(client)["limits.max_queue"] == wanted,
                        "the signal's reload",
                        service,
                    )
                else:
                    names = {each["name"] for each in client.reload_config()["applied"]}
                    assert "limits.run_seconds" in names
                before = list(served)
                wait_for(
                    lambda b=before: failed or all(now > old for now, old in zip(served, b, strict=True)),
                    "both to go on",
                    service,
                )
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failed
        whole = client.metrics()["whole"]
        client.remove("small")
        assert whole["served"] == sum(served)
        assert not whole["failures"]


def test_new_limits_hold(service: Service) -> None:
    with service.client() as client, service.client() as second:
        assert second.live()
        file = configure(service, "[limits]\nmax_user_connections = 2\nmax_message_bytes = 4096\n")
        result = client.reload_config()
        assert result == {
            "applied": [
                {
                    "name": "limits.max_user_connections",
                    "value": 128,
                    "configured": 2,
                    "effect": "at once",
                },
                {
                    "name": "limits.max_message_bytes",
                    "value": 64 << 20,
                    "configured": 4096,
                    "effect": "new connections",
                },
            ],
            "restart": [],
            "files": [str(file)],
        }
        assert client.metadata()["limits"]["max_user_connections"] == 2
        assert second.live(), "who is connected stays"
        with pytest.raises((ResourceExhausted, Unavailable)), service.client() as third:
            third.live()
        large = {"x": np.zeros(4096, np.float32)}
        assert "there is no model" in str(_error(client, large)), "an old connection takes it"
        second.close()
        wait_for(lambda: client.status()["connections"] == 1, "the second to be gone", service)
        with service.client() as new, pytest.raises(ResourceExhausted):
            new.infer("none", large)
        configure(service, "")
        client.reload_config()
        with service.client() as new:
            assert "there is no model" in str(_error(new, large))


def _error(client: Client, inputs: dict[str, np.ndarray]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
        client.infer("none", inputs)
    return caught.value


def test_a_wrong_file_changes_nothing(service: Service) -> None:
    service.configure("[limits]\nmax_queue = 7\n" + NO_TUNER)
    said = service.log.count("stays as it was")
    with service.client() as client:
        file = configure(service, "[limits]\nmax_queue = 9\nmax_jobs = 0\n")
        with pytest.raises(InvalidArgument) as caught:
            client.reload_config()
        assert f"{file}:3: [limits] max_jobs is 0; give a number of at least 1" in str(caught.value)
        assert in_force(client)["limits.max_queue"] == 7
        shown = client.config()
        assert str(file) in shown["problem"]
        assert shown["pending"] == []
        service.process.send_signal(signal.SIGHUP)
        wait_for(lambda: service.log.count("stays as it was") == said + 2, "the log to say so", service)
        configure(service, "[limits]\nmax_queue = 9\n")
        service.process.send_signal(signal.SIGHUP)
        wait_for(lambda: in_force(client)["limits.max_queue"] == 9, "the mended file", service)
        assert "limits.max_queue is 9 now, was 7" in service.log


def test_what_needs_a_restart_is_named(service: Service) -> None:
    with service.client() as client:
        before = in_force(client)
        file = configure(service, '[service]\ndevice = "another"\n[usage]\nhalf_life_days = 9.0\n')
        pending = client.config()["pending"]
        assert [each["name"] for each in pending] == ["service.device", "usage.half_life_days"]
        assert in_force(client) == before, "looking changes nothing"
        result = client.reload_config()
        assert [each["name"] for each in result["applied"]] == ["usage.half_life_days"]
        (waits,) = result["restart"]
        assert waits == {
            "name": "service.device",
            "value": "",
            "configured": "another",
            "effect": "restart",
        }
        assert in_force(client) == before | {"usage.half_life_days": 9.0}
        assert "service.device stays  until a restart; then it is another" in service.log
        shown = client.config()
        origins = {each["name"]: each["origin"] for each in shown["settings"]}
        assert origins["usage.half_life_days"] == f"{file}:4"
        assert origins["service.device"] == "default"
        assert [each["name"] for each in shown["pending"]] == ["service.device"]
        assert list(origins) == list(settings())


def test_what_the_lease_is_decided_by_changes_too(service: Service) -> None:
    with service.client() as client:
        configure(service, "[idle]\nenabled = false\n")
        client.reload_config()
        assert "[idle] enabled" in client.status()["idle"]["why"]


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_command(service: Service, typed: Hone) -> None:
    there = f"--socket={service.socket}"
    status, out, _ = typed("config", there)
    assert status == 0
    assert "limits.max_message_bytes 67108864 bytes default" in words(out)
    assert "option --socket" in words(out)
    configure(service, '[limits]\nmax_queue = 3\n[service]\ndevice = "x"\n')
    _, out, _ = typed("config", there)
    assert 'service.device "" "x" after a restart limits.max_queue 256 3' in words(out)
    assert "hone config --reload" in out
    _, out, _ = typed("config", "--reload", there)
    assert "limits.max_queue 256 3" in words(out)
    assert 'service.device "" "x" after a restart' in words(out)
    _, out, _ = typed("config", there)
    assert "systemctl restart honed" in out
    configure(service, "[limits]\nmax_queue = 3\n")
    _, out, _ = typed("config", "--reload", there)
    assert out == "The files say what is in force already.\n"
    configure(service, "[limits]\nmax_quue = 3\n")
    _, out, _ = typed("config", there)
    assert "did you mean max_queue?" in words(out)
    status, out, error = typed("config", "--reload", there)
    assert (status, out) == (1, "")
    assert "did you mean max_queue?" in error
    document = json.loads(typed("config", "--json", there)[1])
    assert document["running"]
    assert "max_queue" in document["problem"]


def test_checking_a_file_needs_no_service(
    tmp_path: Path, typed: Hone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HONED_SOCKET", str(tmp_path / "none"))
    file = tmp_path / "honed.toml"
    file.write_text("[limits]\nmax_queue = 4\n")
    drop_in = tmp_path / "honed.toml.d" / "1.toml"
    drop_in.parent.mkdir()
    drop_in.write_text("[limits]\nmax_queue = 5\nmax_jobs = 2\n")
    status, out, _ = typed("config", "--check", str(file))
    assert (status, "it gives 2 of" in words(out)) == (0, True)
    document = json.loads(typed("config", "--check", str(file), "--json")[1])
    assert document["files"] == [str(file), str(drop_in)]
    assert document["settings"] == [
        {"name": "limits.max_jobs", "origin": f"{drop_in}:3"},
        {"name": "limits.max_queue", "origin": f"{drop_in}:2"},
    ]
    drop_in.write_text("[limits]\nmax_queue = 'many'\n")
    status, out, error = typed("config", "--check", str(file))
    assert (status, out) == (1, "")
    assert error == f"hone: {drop_in}:2: [limits] max_queue is 'many'; give a whole number\n"
    assert typed("config", "--check", str(file), "--reload")[0] == 2


@pytest.mark.parametrize("user", [0, 1000])
def test_without_a_service_the_command_says_what_one_would_use(
    tmp_path: Path, typed: Hone, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    """As root, and as a user who has no place for a socket but names one."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    status, out, _ = typed("config", f"--socket={tmp_path / 'none'}")
    assert status == 0
    assert "No service runs" in out
    assert "limits.max_queue 256 default" in words(out)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The receiving end of sd_notify(3)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(tmp_path / "notify"))
        receiving.settimeout(60)
        yield receiving


def test_systemd_is_told(start_service: Starter, manager: socket.socket) -> None:
    pytest.importorskip("systemd.daemon")
    service = start_service(environment={"NOTIFY_SOCKET": manager.getsockname()})

    def next_with(word: str) -> list[str]:
        while True:
            lines = manager.recv(4096).decode().splitlines()
            if any(line.startswith(word) for line in lines):
                return lines

    next_with("READY=1")
    for text in ("[limits]\nmax_queue = 3\n", "wrong"):
        configure(service, text)
        service.process.send_signal(signal.SIGHUP)
        began = next_with("RELOADING=1")
        (stamp,) = [line for line in began if line.startswith("MONOTONIC_USEC=")]
        assert int(stamp.partition("=")[2]) > 0
        assert next_with("READY=1") == ["READY=1"]
    with service.client() as client:
        assert in_force(client)["limits.max_queue"] == 3
