"""Where the service is reached, and the errors where nobody answers there. No NumPy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from .errors import HonedError, PermissionDenied, Unavailable

SYSTEM_SOCKET = "/run/honed/honed.sock"
Progress = Callable[[dict[str, Any]], None]


def default_socket(environment: Mapping[str, str]) -> str:
    """Where the service listens: $HONED_SOCKET, the system's place if it is there or for root, the user's."""
    if environment.get("HONED_SOCKET"):
        return environment["HONED_SOCKET"]
    runtime_dir = environment.get("XDG_RUNTIME_DIR")
    if os.path.exists(SYSTEM_SOCKET) or not runtime_dir or os.geteuid() == 0:
        return SYSTEM_SOCKET
    return str(PurePosixPath(runtime_dir) / "honed" / "honed.sock")


def cannot_connect(path: str, error: OSError) -> HonedError:
    """The error for a socket nobody answers at."""
    if isinstance(error, PermissionError):
        return PermissionDenied(
            f"{path} may not be opened by this user; run 'sudo usermod -aG honed USER' and log in again, "
            "with -aG honed,honed-admin for one who adds and removes models"
        )
    return Unavailable(
        f"no service answers at {path} ({error.strerror}); start it with 'systemctl start honed', "
        "or 'honed' as an ordinary user"
    )


def connection_lost() -> Unavailable:
    """The error for requests whose connection went away before they were answered."""
    return Unavailable("the service closed the connection before it answered; call again, its log says why")
