"""Implements `hone records`, which moves what tuning has learned to another board of the same kind.

`hone faults` and `hone history` find the records by it, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from honed.daemon.settings.places import places, records_in
from honed.daemon.transport.access import user_name
from honed.jobs.commands import Export, Import
from honed.jobs.events import Exported, Imported
from honed.machine.files import replacing
from honed.protocol.errors import HonedError, Internal, PermissionDenied, Unavailable
from honed.protocol.methods import SERVER_STATUS
from honed.protocol.service import Status
from honed.runtime.calling.files import open_model
from honed.runtime.client import Client
from honed.tool.compiler import follow, run, running_in_service
from honed.tool.output import Console, Output, line
from honed.tool.parser import Parser, add_action, add_actions

_SIDE_FILES = ("", ".lock")
_SHOWN = 5  # Maximum refused lines shown to people


def define_records(records: Parser) -> None:
    """Define the arguments of `hone records`."""
    actions = add_actions(records)
    export = add_action(
        actions,
        "export",
        _export,
        about="write the records of tuning as JSON lines",
        details=(
            "Another board with the same device can import them. Everything that was measured goes along, "
            "what is in quarantine too; with --best only the fastest schedule of each task."
        ),
        examples="hone records export -o records.jsonl\nhone records export --best -o best.jsonl",
    )
    export.add_argument("-o", "--output", metavar="F", type=Path, required=True, help="the file to write")
    export.add_argument("--best", action="store_true", help="only the best of each task")
    import_ = add_action(
        actions,
        "import",
        _import,
        about="take in records that a board with the same device exported",
        details=(
            "Records of another driver or compiler version are measured again before they are used, and none "
            "is served before it has been checked here."
        ),
        examples="hone records import best.jsonl\nhone tune lightglue --minutes 5",
    )
    import_.add_argument("file", metavar="F", type=Path, help="the file to read")
    import_.add_argument(
        "--device", metavar="SPEC", help="OpenCL device the records are of (default: the service's)"
    )
    for parser in (export, import_):
        add_state_dir_option(parser)


def _export(arguments: argparse.Namespace, output: Output) -> None:
    where = find_records(arguments)
    if where.by_service:
        done = _export_by_service(where, arguments)
    else:
        done = run(Export(records=where.path, output=arguments.output, best=arguments.best), "export")
    document = {"records": str(where.path), "output": str(arguments.output), "count": done.count}
    output.say(document, f"{done.count} records are written to {arguments.output}.")


def _export_by_service(where: RecordsLocation, arguments: argparse.Namespace) -> Exported:
    with replacing(arguments.output) as file:  # Opened first: one that cannot be written fails at once
        with running_in_service(where.socket, Export, best=arguments.best) as child:
            done = follow(child, "export")
            if len(child.descriptors) != 1:
                raise Internal("the service sent no records; compare versions")
            with open(child.descriptors.pop(), "rb") as sent:
                shutil.copyfileobj(sent, file, 1 << 20)
        return done


def _import(arguments: argparse.Namespace, output: Output) -> None:
    where = find_records(arguments)
    if where.by_service:
        descriptor = open_model(arguments.file)
        try:
            with running_in_service(where.socket, Import, [descriptor], device=arguments.device) as child:
                done = follow(child, "import")
        finally:
            os.close(descriptor)
    else:
        where.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_records(where.path)
        device = arguments.device or _service_device(arguments.socket)
        done = run(Import(records=where.path, file=arguments.file, device=device), "import")
    document = {"records": str(where.path), **asdict(done)}
    output.emit(document, lambda console: _print_imported(console, done))


def _print_imported(console: Console, done: Imported) -> None:
    refused = done.refused
    line(
        console,
        f"{done.count} records are new, {done.merged} were here already, {len(refused)} cannot be used.",
    )
    for reason in refused[:_SHOWN]:
        line(console, f"  {reason}")
    if len(refused) > _SHOWN:
        line(console, f"  and {len(refused) - _SHOWN} more; --json shows them all")


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


def create_records(path: Path) -> None:
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


def _service_device(socket: str | None) -> str | None:
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
