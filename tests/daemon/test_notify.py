"""What the service makes of the variables that systemd sets, and that others inherit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from honed.daemon.systemd import Systemd
from honed.protocol.errors import Unavailable

UNIT = {"INVOCATION_ID": "0" * 32}


def stream() -> str:
    """Standard error, as the journal would call it."""
    found = os.fstat(sys.stderr.fileno())
    return f"{found.st_dev}:{found.st_ino}"


@pytest.fixture(autouse=True)
def _real_stderr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", (tmp_path / "stderr").open("w"))


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """systemd-python is not installed."""
    monkeypatch.setitem(sys.modules, "systemd", None)
    monkeypatch.setitem(sys.modules, "systemd.daemon", None)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("journal", ["", "8:12345", "nonsense"])
def test_a_terminal_of_a_desktop_session_needs_no_systemd(journal: str) -> None:
    """It has what the unit that it was started by was given."""
    systemd = Systemd({**UNIT, "JOURNAL_STREAM": journal})
    assert not systemd.journals
    assert systemd.socket() is None
    systemd.tell("READY=1")


@pytest.mark.usefixtures("without")
def test_a_unit_that_only_starts_it_needs_no_systemd_either() -> None:
    assert not Systemd({**UNIT, "JOURNAL_STREAM": stream()}).journals


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("variable", ["NOTIFY_SOCKET", "LISTEN_PID"])
def test_one_that_is_to_be_notified_or_passes_a_socket_does(variable: str) -> None:
    value = str(os.getpid()) if variable == "LISTEN_PID" else "/run/notify"
    with pytest.raises(Unavailable, match="install python3-systemd"):
        Systemd({**UNIT, variable: value})


def test_it_logs_to_the_journal_where_standard_error_is_that() -> None:
    pytest.importorskip("systemd.daemon")
    environment = {**UNIT, "NOTIFY_SOCKET": "/run/notify"}
    assert Systemd({**environment, "JOURNAL_STREAM": stream()}).journals
    assert not Systemd({**environment, "JOURNAL_STREAM": "8:12345"}).journals
