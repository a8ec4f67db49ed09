"""The daemon as systemd starts it: notifications, watchdog, a passed socket. systemd itself is not needed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .running import DEADLINE, Service, wait_for

pytest.importorskip("systemd.daemon")
pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]


class Manager:
    """The receiving end of sd_notify(3)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._socket.settimeout(0.05)
        self.lines: list[tuple[float, str]] = []

    def heard(self, wanted: str) -> bool:
        try:
            while True:
                message = self._socket.recv(4096).decode()
                self.lines += [(time.monotonic(), line) for line in message.splitlines()]
        except TimeoutError:
            return any(line.startswith(wanted) for _, line in self.lines)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    opened = Manager(tmp_path)
    yield opened
    opened.close()


def test_readiness_watchdog_and_stopping(start_service: Starter, manager: Manager) -> None:
    service = start_service(
        environment={"NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "200000"}, wait=False
    )
    wait_for(lambda: manager.heard("READY=1"), "READY=1", service)
    with service.client() as client:
        assert client.live()
    beats = 5
    wait_for(
        lambda: (
            manager.heard("WATCHDOG=1") and sum(line == "WATCHDOG=1" for _, line in manager.lines) >= beats
        ),
        "the watchdog's signs of life",
        service,
    )
    times = [moment for moment, line in manager.lines if line == "WATCHDOG=1"]
    assert times[beats - 1] - times[0] < 60
    service.process.send_signal(signal.SIGTERM)
    wait_for(lambda: manager.heard("STOPPING=1"), "STOPPING=1", service)
    assert service.process.wait(DEADLINE) == 0
    assert any(line.startswith("STATUS=Serving") for _, line in manager.lines)


ACTIVATE = """
import os, socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen(5)
os.dup2(listening.fileno(), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_socket_activation(start_service: Starter, tmp_path: Path) -> None:
    """The passed socket is served, and left in place for systemd at the end."""
    path = tmp_path / "s"
    service = start_service(socket=path, wait=False, prefix=(sys.executable, "-c", ACTIVATE, str(path)))
    service.wait_listening()
    with service.client() as client:
        assert client.live()
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(DEADLINE) == 0
    assert path.exists()


def test_logs_are_plain_without_a_journal(start_service: Starter) -> None:
    service = start_service()
    assert "honed: listening at" in service.log
    assert os.path.realpath(f"/proc/{service.process.pid}/fd/2") == str(service.log_file)
