"""Reads what trusted keys have put in a hub, with as few requests as possible.

Each signed file is requested by its tag, so that an unchanged one is not sent. The overview, which nobody
signs, says which indexes changed: the others are not requested. It can lie, and so keep things back.
Therefore some indexes that were not requested in a day are requested with each pull, and an expired one at
once. All that is used is checked by its signature and serial, wherever it comes from.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from honed.protocol.errors import InvalidArgument, NotFound, Unavailable

from . import layout
from .layout import BoardIndex, Keyring
from .memory import MAX_PROBLEM, HubState, IndexCache, KeptFile
from .minisign import MAX_SIGNATURE_BYTES, BadSignature, PublicKey
from .remote import HubStore

LOOKS: Final = 50  # Indexes that a pull requests although the overview says that they did not change
_DAY: Final = 86400.0
_AWAY: Final = 3  # Unreadable files after which the hub counts as away
_log = logging.getLogger("honed.hub")
_MOST: Final = 512 << 20  # Bytes of one key's records, unpacked


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """The index that one key has signed; `problem` is "" if nothing is wrong."""

    name: str
    key: PublicKey
    index: BoardIndex | None
    problem: str


def look(
    store: HubStore,
    trusted: Mapping[str, PublicKey],
    owner: PublicKey | None,
    memory: HubState,
    shelf: IndexCache,
    now: float,
    *,
    own: PublicKey | None = None,
    names: Collection[str] = (),
) -> list[FoundIndex]:
    """Return what each trusted key but this machine's `own` has in the hub; ask for the indexes of `names`.

    The `owner` may have signed a keyring, whose keys are trusted, too. Raises InvalidArgument if no key is
    trusted, Unavailable if the hub cannot be reached. `memory` and `shelf` are changed.
    """
    if not trusted and owner is None:
        raise InvalidArgument("no key is trusted; name the owner's, or boards' keys, in [hub]")
    hub = _Hub(store, memory, shelf, now)
    ring, why = (None, "") if owner is None else hub.keyring(owner)
    keys = layout.trusted_keys(trusted, [ring] if ring else [], memory.revoked)
    keys = {name: key for name, key in keys.items() if key != own}
    files = {layout.index_file(key): key for key in keys.values()}
    listed = hub.overview()
    if own is not None and listed is not None:
        memory.noted = not memory.index or listed.get(own.name) == memory.index
    asked = to_ask({file: key.name for file, key in files.items()}, shelf.files, listed, now)
    asked |= {layout.index_file(keys[name]) for name in names if name in keys}
    found = hub.indexes(keys, asked)
    for file in shelf.files.keys() - files.keys() - {layout.HUB, layout.OVERVIEW}:
        shelf.drop(file)
    if owner is not None and why:
        found.append(FoundIndex(layout.HUB, owner, None, why))
    return found


def to_ask(
    files: Mapping[str, str], kept: Mapping[str, KeptFile], listed: Mapping[str, str] | None, now: float
) -> set[str]:
    """Return which indexes to request, of `files` by key id: all but those cached as `listed` has them.

    If `listed` is None, there is no overview, and all are requested. Of the cached ones, those that were not
    requested in a day are requested, too: at most LOOKS, the oldest first.
    """
    if listed is None:
        return set(files)
    same = {
        file: kept[file].looked_s
        for file, key_id in files.items()
        if file in kept and _sha256(kept[file].text) == listed.get(key_id, "")
    }
    old = [file for file, looked_s in same.items() if not 0 <= now - looked_s < _DAY]
    return (files.keys() - same.keys()) | set(sorted(old, key=lambda file: same[file])[:LOOKS])


def read_signed(store: HubStore, name: str, key: PublicKey) -> bytes:
    """Return a file that the key has signed; raise NotFound, Unavailable, or BadSignature."""
    data = store.read(name, layout.MAX_INDEX_BYTES)
    _check(name, key, data, _signature(store, name))
    return data


@dataclass(slots=True)
class _Hub:
    store: HubStore
    memory: HubState
    shelf: IndexCache
    now: float
    away: int = 0  # Number of files that could not be read

    def keyring(self, owner: PublicKey) -> tuple[Keyring | None, str]:
        """Return the keyring, if there is one, and what is wrong with it.

        Keys that were ever revoked stay revoked.
        """
        number = layout.serial_name(owner, keyring=True)
        seen = self.memory.seen.get(number)
        try:
            data = _right(layout.HUB, owner, self._fetch(layout.HUB))
            ring = layout.read_keyring(data, self.now)
            layout.newer(ring.serial, seen)
        except NotFound:
            return None, "there is none" if seen is None else "it was there before, and is gone"
        except InvalidArgument as error:
            self.shelf.drop(layout.HUB)
            return None, str(error)[:MAX_PROBLEM]
        self.memory.seen[number] = ring.serial
        self.memory.revoked = tuple(sorted({*self.memory.revoked, *ring.revoked}))
        return ring, ""

    def overview(self) -> dict[str, str] | None:
        """Return the hash of each index by key id, from the overview; None if it is of no use."""
        name = layout.OVERVIEW
        kept = self.shelf.files.get(name)
        try:
            looked = self.store.look(name, layout.MAX_OVERVIEW_BYTES, kept.tag if kept else "")
            data = kept.text.encode() if looked.data is None and kept else looked.data or b""
            listed = layout.read_overview(data).indexes
        except NotFound:
            return None
        except InvalidArgument as error:
            _log.warning("%s of the hub is of no use, and all indexes are asked for: %s", name, error)
            return None
        self.shelf.put(name, KeptFile(text=data.decode(), signature="", tag=looked.tag, looked_s=self.now))
        return listed

    def indexes(self, keys: Mapping[str, PublicKey], key_names: Collection[str]) -> list[FoundIndex]:
        """Return the indexes of the keys.

        Raises Unavailable if several cannot be read: others could not be read, either.
        """
        found = []
        for name, key in keys.items():
            try:
                found.append(self._index(name, key, layout.index_file(key) in key_names))
            except Unavailable as error:
                self.away += 1
                if self.away >= min(_AWAY, len(keys)):
                    raise
                found.append(FoundIndex(name, key, None, str(error)[:MAX_PROBLEM]))
        return found

    def _index(self, name: str, key: PublicKey, ask: bool) -> FoundIndex:
        file, seen = layout.index_file(key), self.memory.seen.get(layout.serial_name(key))
        kept = self.shelf.files.get(file)
        if kept is not None and not ask:
            try:
                return FoundIndex(name, key, self._read(file, key, kept), "")
            except InvalidArgument:
                pass  # The index has expired: there may be a newer one
        try:
            index = self._read(file, key, self._fetch(file))
        except NotFound:  # The board has put nothing there yet, or it was removed
            if seen is None:
                self.shelf.put(file, KeptFile(text="", signature="", tag="", looked_s=self.now))
            return FoundIndex(name, key, None, "" if seen is None else "what it had there is gone")
        except InvalidArgument as error:
            self.shelf.drop(file)  # Ask for it again the next time, whatever the overview says
            return FoundIndex(name, key, None, str(error)[:MAX_PROBLEM])
        return FoundIndex(name, key, index, "")

    def _read(self, file: str, key: PublicKey, kept: KeptFile) -> BoardIndex | None:
        """Return the index, None if there is none.

        Raises InvalidArgument if it is damaged, old or expired.
        """
        if not kept.text:
            return None
        index = layout.read_index(_right(file, key, kept), self.now)
        number = layout.serial_name(key)
        layout.newer(index.serial, self.memory.seen.get(number))
        self.memory.seen[number] = index.serial
        return index

    def _fetch(self, name: str) -> KeptFile:
        """Return a file from the hub, or from the cache if unchanged; unchecked.

        Raises NotFound, Unavailable or InvalidArgument.
        """
        kept = self.shelf.files.get(name)
        tag = kept.tag if kept is not None and kept.text else ""
        try:
            looked = self.store.look(name, layout.MAX_INDEX_BYTES, tag)
        except NotFound:
            self.shelf.drop(name)
            raise
        if looked.data is None and kept is not None:
            kept = replace(kept, looked_s=self.now)
        else:
            text, signature = _text(looked.data or b""), _text(_signature(self.store, name))
            kept = KeptFile(text=text, signature=signature, tag=looked.tag, looked_s=self.now)
        self.shelf.put(name, kept)
        return kept


def _signature(store: HubStore, name: str) -> bytes:
    try:
        return store.read(name + layout.SIGNATURE, MAX_SIGNATURE_BYTES)
    except NotFound:
        raise BadSignature(f"{name} has no signature") from None


def _check(name: str, key: PublicKey, data: bytes, signature: bytes) -> None:
    if key.check(data, signature) != name:
        raise BadSignature(f"{name} is signed, but as another file")


def _right(name: str, key: PublicKey, kept: KeptFile) -> bytes:
    """Return the data of a file; raise BadSignature if the key has not signed it."""
    data = kept.text.encode()
    _check(name, key, data, kept.signature.encode())
    return data


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgument("it is no text") from None


def _sha256(text: str) -> str:
    return layout.digest(text.encode()) if text else ""


@dataclass(slots=True)
class Gathered:
    """The result of `gather`: numbers of keys and of their records, and what is wrong with others."""

    keys: int = 0
    records: int = 0
    problems: list[str] = field(default_factory=list)


def gather(
    store: HubStore,
    trusted: Mapping[str, PublicKey],
    owner: PublicKey | None,
    memory: HubState,
    folder: Path,
    now: float,
) -> Gathered:
    """Write all records of trusted keys to a folder, of any device: to learn from, not to serve.

    Each file of the hub becomes one as `hone records export` writes it.

    Keys are trusted as by `pulling.pull`; `memory` identifies old files, and is not changed. Raises
    InvalidArgument if no key is trusted or the list is not the owner's, Unavailable if there is no hub.
    """
    done = Gathered()
    rings: list[Keyring] = []
    if owner is not None:
        rings = [layout.read_keyring(read_signed(store, layout.HUB, owner), now)]
        layout.newer(rings[0].serial, memory.seen.get(layout.serial_name(owner, keyring=True)))
    keys = layout.trusted_keys(trusted, rings, memory.revoked)
    if not keys:
        raise InvalidArgument("no key is trusted; name the owner's, whose list names others")
    for name, key in keys.items():
        try:
            index = layout.read_index(read_signed(store, layout.index_file(key), key), now)
            layout.newer(index.serial, memory.seen.get(layout.serial_name(key)))
            _write_files(store, key, index, folder, done)
            done.keys += 1
        except NotFound:
            continue  # The board has put nothing there
        except (InvalidArgument, Unavailable) as error:
            done.problems.append(f"{name}: {error}")
    return done


def _write_files(store: HubStore, key: PublicKey, index: BoardIndex, folder: Path, done: Gathered) -> None:
    room = _MOST
    for entry in index.files:
        data = store.read(layout.object_file(key, entry.sha256), layout.MAX_OBJECT_BYTES)
        layout.check_hash(data, entry.sha256)
        with (folder / f"{key.name}-{entry.sha256}.jsonl").open("wb") as file:
            for line in layout.unpack_records(data):
                room -= len(line) + 1
                if room < 0:
                    raise InvalidArgument(f"it has more than {_MOST >> 20} MiB of records; the rest was left")
                file.write(line + b"\n")
                done.records += 1
