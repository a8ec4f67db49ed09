"""Finds the records of tuning, checks that this user may use them, and runs jobs in a service that has them.

The client is imported here alone: `compiler.py` runs without msgpack, too.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from honed.daemon.settings.places import places, records_in
from honed.daemon.transport.access import user_name
from honed.jobs.commands import Job
from honed.jobs.events import News, NoEvent, R, from_map
from honed.protocol.errors import HonedError, Internal, PermissionDenied, Unavailable
from honed.protocol.methods import SERVER_STATUS, TUNER_RUN
from honed.protocol.params import TunerRunParams
from honed.protocol.service import Status, TunerRan
from honed.protocol.strict import Map
from honed.protocol.wire import close_all
from honed.runtime.client import Client

from .compiler import CompilerDied

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


class ServiceJob(Generic[R]):
    """A `RunningJob` in the service; `descriptors` are the files that the service sent with the result."""

    def __init__(
        self, client: Client, job: type[Job[R]], params: TunerRunParams, descriptors: Sequence[int]
    ) -> None:
        self.descriptors: list[int] = []
        self._answered: TunerRan | None = None
        self._client, self._result = client, job.result()
        self._params, self._sent = params, descriptors

    def result(self, heard: Callable[[News], None]) -> R:
        """Run the job and return its result; raise the service's errors, and CompilerDied."""

        def on_news(news: Map) -> None:
            event = _event(news["event"], self._result)
            if isinstance(event, News):
                heard(event)

        try:
            plain, self.descriptors = self._client.run_tuner(
                self._params, descriptors=self._sent, progress=on_news
            )
            self._answered = TUNER_RUN.result_of(plain)
        except Internal as error:
            raise CompilerDied(str(error)) from error
        last = _event(self._answered.event, self._result)
        if isinstance(last, self._result):
            return last
        raise CompilerDied(f"the service answered with {type(last).__name__.lower()}; compare versions")

    @property
    def answered(self) -> TunerRan:
        """The service's answer; available once there is a result."""
        assert self._answered is not None
        return self._answered

    def interrupt(self) -> None:
        """Ask the service to stop the job soon; does not wait."""
        threading.Thread(target=self._stop, daemon=True).start()

    def _stop(self) -> None:
        with suppress(HonedError), Client(self._client.socket) as client:
            client.stop_tuner(self._params.model or "")


def _event(plain: object, result: type[R]) -> News | R | HonedError:
    try:
        return from_map(plain, result)
    except NoEvent as error:
        raise CompilerDied(f"the service told what is no event: {error}; compare versions") from error


@contextmanager
def running_in_service(
    socket: str | None, job: type[Job[R]], descriptors: Sequence[int] = (), **options: Any
) -> Iterator[ServiceJob[R]]:
    """Prepare a job of this kind (TunerRun) for the service at `socket`; close its descriptors at the end."""
    given = {key: value for key, value in options.items() if value not in (None, "", False)}
    with Client(socket) as client:
        remote = ServiceJob(client, job, TunerRunParams(command=job.command[-1], **given), descriptors)
        try:
            yield remote
        finally:
            close_all(remote.descriptors)
