"""Puts what this board has learned into a hub: in its own folder, signed by its own key."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from honed.protocol import strict
from honed.protocol.errors import HonedError, InvalidArgument, NotFound
from honed.protocol.values import DeviceIdentity

from . import layout
from .layout import BoardIndex, IndexedFile, Keyring, NamedKey, Withdrawn
from .looking import read_signed
from .memory import HubState
from .minisign import PublicKey, SecretKey
from .remote import FolderMissing, HubStore

LASTS: Final = 30 * 86400.0  # Seconds that an index is valid; it is pushed again after half of it
_QUARANTINED: Final = 2000  # Maximum records in quarantine, the latest ones
_SETUPS: Final = 3  # Drivers and compilers of a device, the latest used
_log = logging.getLogger("honed.hub")


@dataclass(frozen=True, slots=True)
class Pushed:
    """The result of a push; `changed` is False if the hub had it all."""

    records: int
    files: int
    changed: bool


def push(
    store: HubStore,
    key: SecretKey,
    best: Iterable[Mapping[str, Any]],
    quarantined: Iterable[Mapping[str, Any]],
    spread: Iterable[Mapping[str, Any]],
    withdrawn: Iterable[Withdrawn],
    memory: HubState,
    now: float,
) -> Pushed:
    """Put records, as `hone records export` has them, in place of those that this board had there.

    `spread` are to learn from. Withdrawn schedules are left out of the others. Raises Unavailable or
    InvalidArgument if the hub cannot be read or written. `memory` is changed; the caller stores it.
    """
    withdrawn = tuple(dict.fromkeys(withdrawn))[-layout.MAX_WITHDRAWN :]
    used = _files([*best, *list(quarantined)[-_QUARANTINED:]], withdrawn)
    learned = _files(spread)
    entries, known = tuple(map(_entry, used)), tuple(map(_entry, learned))
    before, data = _before(store, key, memory, now)
    fresh = before is not None and before.expires_s - now > LASTS / 2
    records = sum(entry.records for entry in entries)
    there = before and (before.entries, before.spread, before.withdrawn)
    if fresh and there == (entries, known, withdrawn):
        memory.index = layout.digest(data)
        note(store, key.public, memory.index)
        return Pushed(records, len(entries), changed=False)
    memory.serial = _serial(max(memory.serial, before.serial if before else 0), now)
    index = BoardIndex(
        honed_hub=layout.FORMAT,
        serial=memory.serial,
        created_s=now,
        expires_s=now + LASTS,
        entries=entries,
        withdrawn=withdrawn,
        spread=known,
    )
    memory.index = _put(store, key, index, [*used, *learned], before, all_anew=not fresh)
    memory.pushed_s = now
    return Pushed(records, len(entries), changed=True)


def _put(
    store: HubStore,
    key: SecretKey,
    index: BoardIndex,
    files: Iterable[_RecordsFile],
    before: BoardIndex | None,
    *,
    all_anew: bool,
) -> str:
    """Write an index with its files, and remove those that only the one before named; return its hash.

    With `all_anew` files that were there are written again, which restores lost ones now and then.
    """
    for file, entry in zip(files, index.files, strict=True):
        if before is None or all_anew or entry not in before.files:
            store.write(layout.object_file(key.public, entry.sha256), file.packed)
    data = layout.file_bytes(index)
    write_signed(store, layout.index_file(key.public), data, key)
    note(store, key.public, layout.digest(data))
    kept = {entry.sha256 for entry in index.files}
    for old in before.files if before else ():
        if old.sha256 not in kept:
            store.remove(layout.object_file(key.public, old.sha256))
    return layout.digest(data)


def make(
    store: HubStore, key: SecretKey, boards: tuple[NamedKey, ...], revoked: tuple[str, ...], now: float
) -> Keyring:
    """Write a keyring, or replace the present one, signed by the key of the hub's owner."""
    try:
        before = layout.read_keyring(read_signed(store, layout.HUB, key.public), now).serial
    except HonedError:
        before = 0
    made = Keyring(
        honed_hub=layout.FORMAT,
        serial=_serial(before, now),
        created_s=now,
        expires_s=now + 12 * LASTS,
        boards=boards,
        revoked=revoked,
    )
    write_signed(store, layout.HUB, layout.file_bytes(made), key)
    return made


def _serial(before: int, now: float) -> int:
    """Return a serial above `before`: seconds since 1970 or more, so that it grows if `before` was lost."""
    return max(before + 1, int(now))


def write_signed(store: HubStore, name: str, data: bytes, key: SecretKey) -> None:
    """Write the signature first, then the file.

    A reader between the two accepts neither, and tries again.
    """
    store.write(name + layout.SIGNATURE, key.sign(data, name))
    store.write(name, data)


def make_overview(store: HubStore) -> None:
    """Write an empty overview, into which those who push write themselves."""
    empty = layout.Overview(honed_hub=layout.FORMAT, indexes={})
    store.write(layout.OVERVIEW, layout.file_bytes(empty))


def note(store: HubStore, key: PublicKey, sha256: str) -> None:
    """Write the hash of the board's index into the overview, if the hub has one.

    If two boards write at once, one may lose its entry. It sees that when it pulls, and writes it again;
    meanwhile the others find the index when they ask for it in its turn, as they do if a board may not write
    there.
    """
    try:
        before = _overview(store)
        if before is None or before.indexes.get(key.name) != sha256:
            store.write(layout.OVERVIEW, layout.file_bytes(layout.with_board_index(before, key, sha256)))
    except NotFound:
        return
    except HonedError as error:
        _log.warning("others will find what was pushed later, as it cannot be noted: %s", error)


def _overview(store: HubStore) -> layout.Overview | None:
    """Return the overview, None if it is damaged; raise NotFound if there is none, and Unavailable."""
    try:
        return layout.read_overview(store.read(layout.OVERVIEW, layout.MAX_OVERVIEW_BYTES))
    except InvalidArgument as error:
        _log.warning("%s of the hub is damaged, and is begun anew: %s", layout.OVERVIEW, error)
        return None


def _before(store: HubStore, key: SecretKey, memory: HubState, now: float) -> tuple[BoardIndex | None, bytes]:
    """Return the index that this board has in the hub now, expired or not, and its file; None if it has none.

    Raises Unavailable, and InvalidArgument for a file that is not an index of this board: a push in its place
    would lose track of the files that it names.
    """
    name = layout.index_file(key.public)
    try:
        data = store.read(name, layout.MAX_INDEX_BYTES)
        if layout.digest(data) != memory.index:  # A push that was interrupted wrote a signature alone
            data = read_signed(store, name, key.public)
        return layout.read_index(data, None), data
    except (NotFound, FolderMissing):
        return None, b""
    except InvalidArgument as error:
        raise InvalidArgument(
            f"nothing was pushed, as {name} of the hub cannot be read: {error}; restore it, or remove it"
            " to push everything again"
        ) from error


class _RecordsFile(NamedTuple):
    """A file of records of one device, driver and compiler."""

    packed: bytes
    records: list[dict[str, Any]]


def _files(records: Iterable[Mapping[str, Any]], withdrawn: Collection[Withdrawn] = ()) -> list[_RecordsFile]:
    """Return a file for each device, driver and compiler, in the order of the records.

    Old drivers and compilers are left out.
    """
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if layout.schedule_of(record) in withdrawn:
            continue
        kept = layout.shareable_part(record)
        group = grouped.setdefault((repr(sorted(kept["device"].items())), kept["compiler"]), [])
        if len(group) < layout.MAX_RECORDS:
            group.append(kept)
    by_device: dict[str, list[list[dict[str, Any]]]] = {}
    for group in grouped.values():
        by_device.setdefault(_device(group).key, []).append(group)
    kept_groups = [group for groups in by_device.values() for group in groups[-_SETUPS:]]
    return [_RecordsFile(layout.pack_records(group), group) for group in kept_groups]


def _device(records: list[dict[str, Any]]) -> DeviceIdentity:
    return strict.from_plain(DeviceIdentity, records[0]["device"], where="device")


def _entry(file: _RecordsFile) -> IndexedFile:
    device = _device(file.records)
    return IndexedFile(
        sha256=layout.digest(file.packed),
        bytes=len(file.packed),
        records=len(file.records),
        device_key=device.key,
        device=device.name,
        driver=device.driver_version,
        compiler=file.records[0]["compiler"],
    )
