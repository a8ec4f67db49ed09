"""Puts what this board has learned into a hub: in its own folder, signed by its own key."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from honed.protocol import strict
from honed.protocol.device import DeviceIdentity
from honed.protocol.errors import HonedError

from . import index as indexes
from . import objects
from .index import Board, Entry, Index, Keyring, Withdrawn
from .memory import Memory
from .minisign import SecretKey
from .remote import Store

LASTS: Final = 30 * 86400.0  # seconds that an index is believed; pushed again after half of it
_QUARANTINED: Final = 2000  # a device, the latest ones
_SETUPS: Final = 3  # drivers and compilers of a device, the latest used


@dataclass(frozen=True, slots=True)
class Pushed:
    """What one push put there: `changed` is False where the hub had it all."""

    records: int
    files: int
    changed: bool


def push(
    store: Store,
    key: SecretKey,
    best: Iterable[Mapping[str, Any]],
    quarantined: Iterable[Mapping[str, Any]],
    withdrawn: Iterable[Withdrawn],
    memory: Memory,
    now: float,
) -> Pushed:
    """Put records there, as `hone records export` has them, in place of what this board had there.

    What is withdrawn is left out. Raises Unavailable or InvalidArgument where
    nothing can be written there. `memory` is changed, and the caller's to keep.
    """
    withdrawn = tuple(dict.fromkeys(withdrawn))[-indexes.MAX_WITHDRAWN :]
    files = _files([*best, *list(quarantined)[-_QUARANTINED:]], withdrawn)
    entries = tuple(_entry(data, records) for data, records in files)
    before = _before(store, key, now)
    fresh = before is not None and before.expires_s - now > LASTS / 2
    if before is not None and fresh and (before.entries, before.withdrawn) == (entries, withdrawn):
        return Pushed(sum(e.records for e in entries), len(entries), changed=False)
    memory.serial = _serial(max(memory.serial, before.serial if before else 0), now)
    for (data, _), entry in zip(files, entries, strict=True):
        if before is None or entry not in before.entries:
            store.write(indexes.object_file(key.public, entry.sha256), data)
    index = Index(
        honed_hub=indexes.FORMAT,
        serial=memory.serial,
        created_s=now,
        expires_s=now + LASTS,
        entries=entries,
        withdrawn=withdrawn,
    )
    write_signed(store, indexes.index_file(key.public), indexes.written(index), key)
    for old in before.entries if before else ():
        if old.sha256 not in {entry.sha256 for entry in entries}:
            store.remove(indexes.object_file(key.public, old.sha256))
    memory.pushed_s = now
    return Pushed(sum(e.records for e in entries), len(entries), changed=True)


def make(
    store: Store, key: SecretKey, boards: tuple[Board, ...], revoked: tuple[str, ...], now: float
) -> Keyring:
    """Put a keyring there, or another in its place, signed by the key of who made the hub."""
    before = _keyring(store, key, now)
    made = Keyring(
        honed_hub=indexes.FORMAT,
        serial=_serial(before.serial if before else 0, now),
        created_s=now,
        expires_s=now + 12 * LASTS,
        boards=boards,
        revoked=revoked,
    )
    write_signed(store, indexes.HUB, indexes.written(made), key)
    return made


def _serial(before: int, now: float) -> int:
    """Seconds since 1970, or more: it grows even where it was forgotten what came before."""
    return max(before + 1, int(now))


def write_signed(store: Store, name: str, data: bytes, key: SecretKey) -> None:
    """The signature first: whoever reads between the two takes neither, and comes again."""
    store.write(name + indexes.SIGNATURE, key.sign(data, name))
    store.write(name, data)


def _before(store: Store, key: SecretKey, now: float) -> Index | None:
    """What this board has there now; None where nothing is, or nothing that is right."""
    from .pulling import signed

    try:
        return indexes.read_index(signed(store, indexes.index_file(key.public), key.public), now)
    except HonedError:
        return None


def _keyring(store: Store, key: SecretKey, now: float) -> Keyring | None:
    from .pulling import signed

    try:
        return indexes.read_keyring(signed(store, indexes.HUB, key.public), now)
    except HonedError:
        return None


def _files(
    records: Iterable[Mapping[str, Any]], withdrawn: Collection[Withdrawn] = ()
) -> list[tuple[bytes, list[dict[str, Any]]]]:
    """A file for each device, driver and compiler, in the order given; old drivers and compilers are left."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in records:
        if objects.schedule(record) in withdrawn:
            continue
        kept = objects.shared(record)
        group = grouped.setdefault((repr(sorted(kept["device"].items())), kept["compiler"]), [])
        if len(group) < objects.MAX_RECORDS:
            group.append(kept)
    by_device: dict[str, list[list[dict[str, Any]]]] = {}
    for group in grouped.values():
        by_device.setdefault(_device(group).key, []).append(group)
    kept_groups = [group for groups in by_device.values() for group in groups[-_SETUPS:]]
    return [(objects.packed(group), group) for group in kept_groups]


def _device(records: list[dict[str, Any]]) -> DeviceIdentity:
    return strict.from_plain(DeviceIdentity, records[0]["device"], where="device")


def _entry(data: bytes, records: list[dict[str, Any]]) -> Entry:
    device = _device(records)
    return Entry(
        sha256=objects.sha256(data),
        bytes=len(data),
        records=len(records),
        device_key=device.key,
        device=device.name,
        driver=device.driver_version,
        compiler=records[0]["compiler"],
    )
