"""Asks the service how it is, the way any client would."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Literal

from honed.protocol.errors import HonedError, PermissionDenied
from honed.protocol.methods import SERVER_METADATA, SERVER_STATUS
from honed.protocol.service import Status
from honed.runtime.client import Client

from .readings import Daemon

_TIMEOUT = 5.0  # seconds; the service answers such questions at once, whatever it is working on
_UNIT = "honed.service"
State = Literal["answers", "absent", "refused", "forbidden", "silent"]


def read_daemon(path: str, *, system: bool = False) -> tuple[Daemon, Status | None]:
    """What a client sees at the socket `path`, and the service's status, None where it does not tell it.

    With `system` the one expected there is the system's, and systemd is asked where that does not answer.
    """
    state, error = _connect(path)
    if state != "answers":
        return _reading(path, state, error, unit=_failed_unit() if system else ""), None
    with Client(path, timeout=_TIMEOUT) as client:
        try:
            version = client.ask(SERVER_METADATA).version
            status = client.ask(SERVER_STATUS)
        except PermissionDenied as denied:
            return _reading(path, "answers", str(denied), version=version), None
        except HonedError as failure:
            return _reading(path, "silent", str(failure), unit=_failed_unit() if system else ""), None
    return _reading(path, "answers", "", version=version, status=status), status


def _connect(path: str) -> tuple[State, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT)
        try:
            connection.connect(path)
        except PermissionError as error:
            return "forbidden", str(error.strerror)
        except FileNotFoundError:
            return "absent", "the socket is not there" if Path(
                path
            ).parent.is_dir() else "its folder is not there"
        except OSError as error:  # refused, timed out, a path too long for a socket
            return "refused", str(error.strerror or error)
    return "answers", ""


def _failed_unit() -> str:
    """Why systemd has no service running, in the service's own words; "" where it has, or cannot be asked."""
    command = ["systemctl", "show", "--property=ActiveState,SubState,Result,StatusText", _UNIT]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return explain(dict(each.partition("=")[::2] for each in told.splitlines()))


def explain(unit: dict[str, str]) -> str:
    """The same from the properties of its unit."""
    if unit.get("ActiveState") != "failed" and unit.get("SubState") != "auto-restart":
        return ""
    said = unit.get("StatusText", "")
    return f"{_UNIT} has failed ({unit.get('Result', 'unknown')}){f': {said}' if said else ''}"


def _reading(
    path: str,
    state: State,
    error: str,
    *,
    version: str = "",
    status: Status | None = None,
    unit: str = "",
) -> Daemon:
    device = status.device if status else None
    return Daemon(
        socket=path,
        state=state,
        error=error,
        version=version,
        may_infer=status is not None,
        worker=status.worker.state if status else "",
        worker_reason=status.worker.reason if status else "",
        device=f"{device.name} ({device.platform})" if device else "",
        lost=tuple(
            f"{each.spec or each.name} ({each.worker.reason})"
            for each in (status.devices[1:] if status else ())
            if each.worker.state == "failed"
        ),
        cpu_engine=status is None or any(each.engine == "cpu" for each in status.devices),
        unit=unit,
    )
