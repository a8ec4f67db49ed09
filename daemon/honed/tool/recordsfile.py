"""Finds the records of tuning, and checks that this user may use them."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.settings.places import places, records_in
from honed.daemon.transport.access import user_name
from honed.protocol.errors import HonedError, PermissionDenied, Unavailable
from honed.protocol.methods import SERVER_STATUS
from honed.protocol.service import Status
from honed.runtime.client import Client

_SIDE_FILES = ("", ".lock")


def add_state_dir_option(parser: argparse.ArgumentParser) -> None:
    """Add --state-dir for commands on the records."""
    parser.add_argument(
        "--state-dir",
        metavar="D",
        type=Path,
        help="folder of the service whose records to use (default: of the service that answers)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsLocation:
    """The place of records; `by_service` if they belong to a running service, which does all work on them."""

    path: Path
    socket: str | None
    by_service: bool


def find_records(arguments: argparse.Namespace) -> RecordsLocation:
    """Find the records that a command means: of --state-dir, of the running service, or of this user.

    Raises PermissionDenied if this user may not ask the service, or not use the records.
    """
    given: Path | None = arguments.state_dir
    status = _status(arguments.socket) if given is None else None
    if given is not None:
        path = records_in(given.absolute())
    elif status is not None:
        path = records_in(Path(status.places.state_dir))
    else:
        path = places(os.environ, os.geteuid()).records
    by_service = status is not None
    if not by_service:
        check_access(path)
    return RecordsLocation(path=path, socket=arguments.socket, by_service=by_service)


def check_access(path: Path) -> None:
    """Raise PermissionDenied, naming the owner, if this user may not use the records at `path`.

    Reading needs the right to write, too, because all readers share SQLite's write-ahead log.
    """
    folder = path.parent
    try:
        owner = folder.stat().st_uid
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise _not_ours(path, "another user") from error
    for each in (folder, path):
        if each.exists() and not os.access(each, os.R_OK | os.W_OK | (os.X_OK if each is folder else 0)):
            raise _not_ours(path, f"user {user_name(owner)}")


def prepare(path: Path) -> None:
    """Create records as files of the service's user, if root is to make them in the folder of a service."""
    owner = path.parent.stat()
    if os.geteuid() != 0 or owner.st_uid == 0:
        return
    for suffix in _SIDE_FILES:
        descriptor = os.open(f"{path}{suffix}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        finally:
            os.close(descriptor)


def service_device(socket: str | None) -> str | None:
    """Return how the device of the running service is selected; None if no service answers."""
    status = _status(socket)
    return status.device_spec or None if status else None


def _status(socket: str | None) -> Status | None:
    try:
        with Client(socket) as client:
            return client.ask(SERVER_STATUS)
    except Unavailable:
        return None


def _not_ours(path: Path, owner: str) -> HonedError:
    return PermissionDenied(
        f"the records in {path.parent} belong to {owner}; run the same command as that user or with sudo"
    )
