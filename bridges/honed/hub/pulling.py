"""Takes in what others learned: checked, bounded, and as hints, which are measured before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from honed.jobs.events import Imported
from honed.protocol.device import DeviceIdentity
from honed.protocol.errors import InvalidArgument, NotFound

from . import index as indexes
from . import objects
from .index import Entry, Index, Keyring, Withdrawn
from .memory import Memory, Source
from .minisign import MAX_SIGNATURE_BYTES, PublicKey
from .remote import Store

MAX_RECORDS: Final = 200_000  # of one pull; what is left comes with the next
SEVERAL: Final = 2  # boards that must have taken a schedule back, for others to leave it
_log = logging.getLogger("honed.hub")
TakeIn = Callable[[Iterator[bytes]], Imported]


@dataclass(slots=True, kw_only=True)
class Pulled:
    """What one pull brought."""

    added: int = 0
    merged: int = 0
    refused: list[str] = field(default_factory=list)
    withdrawn: int = 0
    sources: list[Source] = field(default_factory=list)
    held: int = 0  # records that are there, and were not taken


@dataclass(frozen=True, slots=True)
class _Found:
    """What one key has signed."""

    name: str
    key: PublicKey
    index: Index | None
    problem: str


def pull(
    store: Store,
    trusted: Mapping[str, PublicKey],
    here: Sequence[DeviceIdentity],
    take_in: TakeIn,
    memory: Memory,
    now: float,
    *,
    hold: bool = False,
) -> Pulled:
    """Take in what trusted keys have signed for the devices `here`; with `hold` only look.

    A source's trouble is its own, and told of it. Raises Unavailable where the hub cannot be reached at all,
    and what `take_in` raises. `memory` is changed, and the caller's to keep.
    """
    done = Pulled()
    found = _sources(store, trusted, memory, now)
    withdrawn = indexes.withdrawn_by_several([f.index for f in found if f.index is not None], SEVERAL)
    room = MAX_RECORDS
    for source in found:
        problem, records = source.problem, 0
        for entry in _wanted(source.index, here, memory.taken):
            if entry.records > room:
                _log.info("%s has more than one pull takes; the rest comes with the next", source.name)
                break
            if hold:
                done.held += entry.records
                continue
            try:
                taken = _take(store, source, entry, withdrawn, take_in, memory, done)
            except (InvalidArgument, NotFound) as error:
                problem = f"{entry.sha256[:12]}: {error}"
            else:
                records, room = records + taken, room - taken
        told = Source(name=source.name, key_id=source.key.name, records=records, problem=problem)
        done.sources.append(told)
    memory.pulled_s, memory.sources = now, tuple(done.sources)
    return done


def signed(store: Store, name: str, keys: Collection[PublicKey]) -> bytes:
    """A file that one of the keys has signed. Raises NotFound, Unavailable, or BadSignature."""
    data = store.read(name, indexes.MAX_INDEX_BYTES)
    try:
        signature = store.read(name + indexes.SIGNATURE, MAX_SIGNATURE_BYTES)
    except NotFound:
        raise InvalidArgument(f"{name} has no signature") from None
    errors = []
    for key in keys:
        try:
            key.check(data, signature)
        except InvalidArgument as error:
            errors.append(error)
        else:
            return data
    raise InvalidArgument("; ".join(dict.fromkeys(map(str, errors))))


def _sources(store: Store, trusted: Mapping[str, PublicKey], memory: Memory, now: float) -> list[_Found]:
    if not trusted:
        raise InvalidArgument("no key is trusted; name one under [hub.keys] in the configuration")
    keyring, why = _keyring(store, trusted, memory, now)
    keys = indexes.believed(trusted, [keyring] if keyring else [])
    found = [_source(store, name, key, memory, now) for name, key in keys.items()]
    if why:
        found.append(_Found(indexes.HUB, next(iter(trusted.values())), None, why))
    return found


def _keyring(
    store: Store, trusted: Mapping[str, PublicKey], memory: Memory, now: float
) -> tuple[Keyring | None, str]:
    """The keyring, where there is one; and what is wrong with it."""
    try:
        keyring = indexes.read_keyring(signed(store, indexes.HUB, trusted.values()), now)
        indexes.newer(keyring.serial, memory.seen.get(indexes.HUB))
    except NotFound:
        return None, ""
    except InvalidArgument as error:
        return None, str(error)
    memory.seen[indexes.HUB] = keyring.serial
    return keyring, ""


def _source(store: Store, name: str, key: PublicKey, memory: Memory, now: float) -> _Found:
    try:
        index = indexes.read_index(signed(store, indexes.index_file(key), [key]), now)
        indexes.newer(index.serial, memory.seen.get(key.name))
    except NotFound:
        return _Found(name, key, None, "")  # it has put nothing there yet
    except InvalidArgument as error:
        return _Found(name, key, None, str(error))
    memory.seen[key.name] = index.serial
    return _Found(name, key, index, "")


def _wanted(index: Index | None, here: Sequence[DeviceIdentity], taken: Collection[str]) -> list[Entry]:
    known = set(taken)
    wanted = [
        entry
        for device in here
        for entry in (indexes.matching(index, device.key, device.driver_version) if index else ())
    ]
    return [entry for entry in dict.fromkeys(wanted) if entry.sha256 not in known]


def _take(
    store: Store,
    source: _Found,
    entry: Entry,
    withdrawn: Collection[Withdrawn],
    take_in: TakeIn,
    memory: Memory,
    done: Pulled,
) -> int:
    """How many records the file had. Raises InvalidArgument, NotFound, Unavailable."""
    data = store.read(indexes.object_file(source.key, entry.sha256), objects.MAX_OBJECT_BYTES)
    objects.check(data, entry.sha256)
    memory.taken += (entry.sha256,)  # whatever is in it, it will not change
    kept = []
    for line in objects.unpacked(data):
        if line.strip():
            hint, schedule = objects.hint(line, source.name)
            if schedule in withdrawn:
                done.withdrawn += 1
            else:
                kept.append(hint)
    told = take_in(iter(kept))
    done.added += told.count
    done.merged += told.merged
    done.refused += [f"{source.name}, {entry.sha256[:12]}: {reason}" for reason in told.refused]
    return len(kept)
