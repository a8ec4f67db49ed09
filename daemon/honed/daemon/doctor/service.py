"""Asks the service how it is, the way any client would."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal

from honed.runtime.client import Client
from honed.runtime.errors import HonedError, PermissionDenied

from .readings import Daemon

_TIMEOUT = 5.0  # seconds; the service answers such questions at once, whatever it is working on
State = Literal["answers", "absent", "refused", "forbidden", "silent"]


def read_daemon(path: str) -> tuple[Daemon, dict[str, Any]]:
    """What a client sees at the socket `path`, and the service's status, {} where it does not tell it."""
    state, error = _connect(path)
    if state != "answers":
        return _reading(path, state, error), {}
    with Client(path, timeout=_TIMEOUT) as client:
        try:
            version = str(client.metadata()["version"])
            status = client.status()
        except PermissionDenied as denied:
            return _reading(path, "answers", str(denied), version=version), {}
        except HonedError as failure:
            return _reading(path, "silent", str(failure)), {}
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


def _reading(
    path: str, state: State, error: str, *, version: str = "", status: dict[str, Any] | None = None
) -> Daemon:
    worker = status["worker"] if status else {}
    device = (status or {}).get("device") or {}
    return Daemon(
        socket=path,
        state=state,
        error=error,
        version=version,
        may_infer=status is not None,
        worker=str(worker.get("state", "")),
        worker_reason=str(worker.get("reason", "")),
        device=f"{device['name']} ({device['platform']})" if device else "",
        lost=tuple(
            f"{each['spec'] or each['name']} ({each['worker']['reason']})"
            for each in (status["devices"][1:] if status else ())
            if each["worker"]["state"] == "failed"
        ),
    )
