"""All records of a hub that trusted keys have signed, of whatever device: to learn from, not to serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from honed.protocol.errors import InvalidArgument, NotFound, Unavailable

from . import index as indexes
from . import objects
from .index import BoardIndex
from .looking import signed
from .memory import HubMemory
from .minisign import PublicKey
from .remote import HubStore

_MOST: Final = 512 << 20  # bytes of one key's records, unpacked


@dataclass(slots=True)
class Gathered:
    """What was found: so many records of so many keys, and what is wrong with others."""

    keys: int = 0
    records: int = 0
    problems: list[str] = field(default_factory=list)


def gather(
    store: HubStore,
    trusted: Mapping[str, PublicKey],
    owner: PublicKey | None,
    memory: HubMemory,
    folder: Path,
    now: float,
) -> Gathered:
    """Write them to a folder, as `hone records export` would, a file for each that is in the hub.

    Keys are trusted as by `pulling.pull`; `memory` tells old files, and is not changed. Raises
    InvalidArgument where no key is trusted or the list is not the owner's, Unavailable where there is no hub.
    """
    done = Gathered()
    rings = [_ring(store, owner, memory, now)] if owner is not None else []
    keys = indexes.believed(trusted, rings, memory.revoked)
    if not keys:
        raise InvalidArgument("no key is trusted; name the owner's, whose list names others")
    for name, key in keys.items():
        try:
            index = indexes.read_index(signed(store, indexes.index_file(key), key), now)
            indexes.newer(index.serial, memory.seen.get(indexes.numbered(key)))
            _written(store, key, index, folder, done)
            done.keys += 1
        except NotFound:
            continue  # it has put nothing there
        except (InvalidArgument, Unavailable) as error:
            done.problems.append(f"{name}: {error}")
    return done


def _ring(store: HubStore, owner: PublicKey, memory: HubMemory, now: float) -> indexes.Keyring:
    ring = indexes.read_keyring(signed(store, indexes.HUB, owner), now)
    indexes.newer(ring.serial, memory.seen.get(indexes.numbered(owner, keyring=True)))
    return ring


def _written(store: HubStore, key: PublicKey, index: BoardIndex, folder: Path, done: Gathered) -> None:
    room = _MOST
    for entry in index.files:
        data = store.read(indexes.object_file(key, entry.sha256), objects.MAX_OBJECT_BYTES)
        objects.check(data, entry.sha256)
        with (folder / f"{key.name}-{entry.sha256}.jsonl").open("wb") as file:
            for line in objects.unpacked(data):
                room -= len(line) + 1
                if room < 0:
                    raise InvalidArgument(f"it has more than {_MOST >> 20} MiB of records; the rest was left")
                file.write(line + b"\n")
                done.records += 1
