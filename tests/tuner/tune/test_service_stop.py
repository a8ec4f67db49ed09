"""The tuner ends when it is told to, also while the service does not answer."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("honed.tuner")
from tests.daemon.running import DEADLINE


def test_it_does_not_wait_for_a_service_that_is_silent(tmp_path: Path) -> None:
    """As under systemd: the socket is there, and its service starts only once the tuner has ended."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        listening.settimeout(DEADLINE)
        command = [sys.executable, "-m", "honed.tuner.service", "--socket", str(tmp_path / "s")]
        with subprocess.Popen(command) as tuner:
            connection, _ = listening.accept()
            with connection:
                assert connection.recv(1)  # it has asked, and now waits
                tuner.send_signal(signal.SIGTERM)
                assert tuner.wait(DEADLINE) == 0
