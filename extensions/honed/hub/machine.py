"""Pulls and pushes for this machine, and stores its key and state in its own folder."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from honed.jobs.events import Imported
from honed.protocol import methods, strict
from honed.protocol.errors import InvalidArgument, NotFound, PermissionDenied, Unavailable, Unimplemented
from honed.protocol.methods import check_name
from honed.protocol.params import HintFigures, HistoryParams
from honed.protocol.service import ConfigShown
from honed.protocol.values import DeviceIdentity
from honed.runtime.client import Client

from . import pulling, pushing, remote
from .layout import Withdrawn
from .memory import HubState, IndexCache, KeyStanding
from .minisign import PublicKey, SecretKey
from .pulling import Pulled
from .pushing import Pushed

_TABLE: Final = "hub."


@dataclass(frozen=True, slots=True, kw_only=True)
class HubConfig:
    """The settings of [hub] (docs/configuration.md), with keys parsed."""

    url: str
    push_url: str
    owner: PublicKey | None
    keys: dict[str, PublicKey]
    pull: bool
    push: bool
    hold: bool
    hours: float

    @classmethod
    def of(cls, config: ConfigShown) -> HubConfig:
        """Return the settings in force; raise InvalidArgument for a malformed key."""
        table: dict[str, Any] = {
            each.name.removeprefix(_TABLE): each.value
            for each in config.settings
            if each.name.startswith(_TABLE)
        }
        if not table:
            raise Unimplemented("the service knows of no hub; update it")
        return cls(
            url=table["url"],
            push_url=table["push_url"] or table["url"],
            owner=_key("owner", table["owner"]) if table["owner"] else None,
            keys={check_name(name, "key"): _key(name, text) for name, text in table["keys"].items()},
            pull=table["pull"],
            push=table["push"],
            hold=table["hold"],
            hours=table["hours"],
        )


def _key(name: str, text: str) -> PublicKey:
    try:
        return PublicKey.parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"[hub] key {name}: {error}") from error


SYSTEM: Final = Path("/var/lib/honed-hub")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """The folder of this machine's key and state."""

    folder: Path

    @property
    def key(self) -> Path:
        """The path of the secret key, as `minisign -G -W` makes one."""
        return self.folder / "key"

    @property
    def memory(self) -> Path:
        """The path of the stored `HubState`."""
        return self.folder / "memory.json"

    @property
    def shelf(self) -> Path:
        """The path of the cached signed files."""
        return self.folder / "shelf.json"

    def own(self) -> PublicKey | None:
        """Return the public key of this machine; None if it has none."""
        try:
            return SecretKey.load(self.key).public
        except NotFound:
            return None

    @contextmanager
    def index_cache(self, url: str) -> Iterator[IndexCache]:
        """Yield the cache of that hub, and store it, even if the work fails.

        The caller has the lock of `changing`.
        """
        shelf = IndexCache.load(self.shelf, url)
        try:
            yield shelf
        finally:
            shelf.save(self.shelf)

    @contextmanager
    def changing(self) -> Iterator[HubState]:
        """Yield the state under a lock against other processes, and store it, even if the work fails.

        Raises Unavailable if another process has the lock, PermissionDenied if the folder is another user's.
        """
        self.prepare()
        try:
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except PermissionError:
            raise PermissionDenied(self._whose()) from None
        with ExitStack() as held:
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Unavailable("another command is at work with the hub; wait for it to end") from None
            memory = self.read_state()
            held.callback(memory.save, self.memory)
            yield memory

    def prepare(self) -> None:
        """Create the folder.

        Raises PermissionDenied for another user's, in which root's files would do harm.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mine = self.folder.stat().st_uid == os.getuid()
        except PermissionError:
            mine = False
        if not mine:
            raise PermissionDenied(self._whose())

    def read_state(self) -> HubState:
        """Return the state, for reading only. Raises PermissionDenied if it is another user's."""
        try:
            return HubState.load(self.memory)
        except PermissionError:
            raise PermissionDenied(self._whose()) from None

    def _whose(self) -> str:
        return f"{self.folder} is of another user; run it as that one: 'sudo -u honed-hub hone hub ...'"


def place(environ: Mapping[str, str], uid: int) -> HubPlace:
    """Return the usual folder: of systemd's unit, of the system, or of an ordinary user."""
    if given := environ.get("STATE_DIRECTORY"):
        return HubPlace(Path(given))
    home = Path(environ.get("XDG_STATE_HOME") or Path(environ.get("HOME", "/")) / ".local/state")
    if uid == 0 or os.access(SYSTEM, os.W_OK):
        return HubPlace(SYSTEM)
    return HubPlace(home / "honed" / "hub")


def pull(
    client: Client,
    settings: HubConfig,
    memory: HubState,
    shelf: IndexCache,
    own: PublicKey | None,
    names: frozenset[str] | None = None,
) -> Pulled:
    """Import what the hub of `shelf` has for this machine's devices; with `settings.hold` only look.

    `names` are the keys to pull from, None for all that are trusted.
    """
    pulled = pulling.pull(
        remote.store(shelf.url),
        settings.keys,
        devices(client),
        lambda device, given: take_in(client, device, given),
        memory,
        shelf,
        time.time(),
        owner=settings.owner,
        own=own,
        hold=settings.hold,
        names=names,
    )
    memory.models = tuple(sorted(models(client)))
    if own is not None and settings.push and not (settings.hold or memory.noted):
        pushing.note(remote.store(settings.push_url), own, memory.index)
    return pulled


def push(client: Client, key: SecretKey, memory: HubState, url: str) -> Pushed:
    """Put what this machine has learned into the hub at `url`."""
    lines = export_measurements(client)
    quarantined = [line for line in lines if line["state"] == "quarantined"]
    best = [line for line in lines if line["state"] != "quarantined"]
    learned = export_measurements(client, spread=True)
    back, now = find_withdrawn(client), time.time()
    pushed = pushing.push(remote.store(url), key, best, quarantined, learned, back, memory, now)
    memory.trials = trials(client)
    return pushed


def devices(client: Client) -> dict[DeviceIdentity, str]:
    """Return the GPUs, and other devices that the service tunes for, with their specs.

    Raises Unavailable while there is none.
    """
    found = client.ask(methods.SERVER_STATUS).devices
    here = {each.device: each.spec for each in found if each.engine == "gpu" and each.device is not None}
    if not here:
        raise Unavailable("the service has no device yet; try again")
    return here


def export_measurements(client: Client, *, spread: bool = False) -> list[dict[str, Any]]:
    """Return the records measured here that others can use.

    They are the fastest of each task, and those in quarantine. With `spread` they are records that others can
    learn from: fast, slow and refused schedules.
    """
    with client.export_hints(spread=spread) as file:
        return [json.loads(line) for line in file]


def take_in(client: Client, device: str, lines: Iterable[bytes]) -> Imported:
    """Have the service import hints for a device, by its spec; raise what it answers."""
    with tempfile.TemporaryFile(prefix="honed-hub-") as file:
        file.writelines(lines)
        file.flush()
        file.seek(0)
        return strict.copy_fields(Imported, client.import_hints(file.fileno(), device=device))


def models(client: Client) -> frozenset[str]:
    """Return the names of the service's models."""
    return frozenset(model.name for model in client.ask(methods.REPOSITORY_INDEX).models)


def trials(client: Client) -> int:
    """Return the number of all trials of tuning, as far as the service knows."""
    tuning = client.ask(methods.METRICS).tuning
    return sum(tuning.trials.values()) if tuning is not None else 0


def find_withdrawn(client: Client) -> list[Withdrawn]:
    """Return the schedules of versions that were withdrawn from service here."""
    found = []
    for model in models(client):
        for version in client.ask(methods.MODEL_HISTORY, HistoryParams(name=model)).versions:
            if version.quarantine:
                found += [_parse_withdrawn(each) for each in version.brought]
    return sorted(set(found), key=lambda each: (each.workload, each.digest))


def _parse_withdrawn(text: str) -> Withdrawn:
    workload, _, digest = text.rpartition(" ")
    if not workload:
        raise InvalidArgument(f"the service tells of a schedule {text[:80]!r}; compare versions")
    return Withdrawn(workload, digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStatus:
    """The state of a hub and this machine's work with it.

    `waiting` records are in the hub and were not pulled; `problem` is why the hub cannot be read, or "".
    `last_problem` and `retry_seconds` are of honed-hub's last try; `hints` are records pulled, by their key.
    """

    url: str
    key: str
    pulled_s: float | None
    pushed_s: float | None
    last_problem: str
    retry_seconds: float
    problem: str
    waiting: int
    sources: tuple[KeyStanding, ...]
    hints: dict[str, HintFigures]


def look(client: Client, settings: HubConfig, place: HubPlace, url: str) -> HubStatus:
    """Return the status of the hub at `url`, or without a hub if "". Nothing is changed, here or there."""
    memory, own = place.read_state(), place.own()
    status = HubStatus(
        url=url,
        key=str(own) if own else "",
        pulled_s=memory.pulled_s,
        pushed_s=memory.pushed_s,
        last_problem=memory.problem,
        retry_seconds=max(0.0, memory.retry_s - time.time()),
        problem="" if url else "no hub is configured; set hub.url",
        waiting=0,
        sources=memory.sources,
        hints=client.ask(methods.SERVER_STATUS).hints,
    )
    if not url:
        return status
    try:
        shelf = IndexCache.load(place.shelf, url)
        looked = pull(client, replace(settings, hold=True), memory, shelf, own)
    except (Unavailable, InvalidArgument) as error:
        return replace(status, problem=str(error))
    return replace(status, waiting=looked.held, sources=tuple(looked.sources))
