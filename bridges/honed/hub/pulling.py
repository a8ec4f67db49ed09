"""Takes in what others learned: checked, bounded, and as hints, which are measured before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from honed.jobs.events import Imported
from honed.protocol.device import DeviceIdentity
from honed.protocol.errors import InvalidArgument, NotFound, Unavailable

from . import index as indexes
from . import objects
from .index import Entry, Index, Keyring, Withdrawn
from .memory import Memory, Source
from .minisign import MAX_SIGNATURE_BYTES, BadSignature, PublicKey
from .remote import Store

MAX_RECORDS: Final = 200_000  # of one pull; what is left comes with the next
MAX_FILES: Final = 500  # likewise, of one source
MAX_PROBLEM: Final = 300  # letters
MAX_REFUSED: Final = 20  # sentences about lines
SEVERAL: Final = 2  # boards that must have taken a schedule back, for others to leave it
_log = logging.getLogger("honed.hub")
TakeIn = Callable[[str, Iterator[bytes]], Imported]  # of a device's spec, and lines


@dataclass(slots=True, kw_only=True)
class Pulled:
    """What one pull brought: records that are new, that were here, that two boards took back, and sentences
    about those that were refused. `held` are there, and were not taken.
    """

    added: int = 0
    merged: int = 0
    withdrawn: int = 0
    held: int = 0
    refused: list[str] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


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
    here: Mapping[DeviceIdentity, str],
    take_in: TakeIn,
    memory: Memory,
    now: float,
    *,
    owner: PublicKey | None = None,
    own: PublicKey | None = None,
    hold: bool = False,
    names: frozenset[str] | None = None,
) -> Pulled:
    """Take in what trusted keys have signed for the devices `here`, by identity their specs.

    The `owner` may have signed a keyring, whose keys are trusted, too; `own` is this machine's key, whose
    records are here. With `hold` it looks only; `names` are the keys to take of, None: all. A source's
    trouble is its own, and told of it. Raises Unavailable where the hub cannot be reached at all, and what
    `take_in` raises. `memory` is changed, and the caller's to keep.
    """
    done = Pulled()
    found = [each for each in _sources(store, trusted, owner, memory, now) if each.key != own]
    withdrawn = indexes.withdrawn_by_several([f.index for f in found if f.index is not None], SEVERAL)
    for source in found:
        if names is not None and source.name not in names:
            continue
        done.sources.append(_taken(store, source, here, withdrawn, take_in, memory, done, hold=hold))
    memory.pulled_s, memory.sources = now, tuple(done.sources)
    return done


def signed(store: Store, name: str, key: PublicKey) -> bytes:
    """A file that the key has signed. Raises NotFound, Unavailable, or BadSignature."""
    data = store.read(name, indexes.MAX_INDEX_BYTES)
    try:
        signature = store.read(name + indexes.SIGNATURE, MAX_SIGNATURE_BYTES)
    except NotFound:
        raise BadSignature(f"{name} has no signature") from None
    if key.check(data, signature) != name:
        raise BadSignature(f"{name} is signed, but as another file")
    return data


def _sources(
    store: Store, trusted: Mapping[str, PublicKey], owner: PublicKey | None, memory: Memory, now: float
) -> list[_Found]:
    if not trusted and owner is None:
        raise InvalidArgument("no key is trusted; name the owner's, or boards' keys, in [hub]")
    keyring, why = (None, "") if owner is None else _keyring(store, owner, memory, now)
    keys = indexes.believed(trusted, [keyring] if keyring else [], memory.revoked)
    found = [_source(store, name, key, memory, now) for name, key in keys.items()]
    if owner is not None and why:
        found.append(_Found(indexes.HUB, owner, None, why))
    return found


def _keyring(store: Store, owner: PublicKey, memory: Memory, now: float) -> tuple[Keyring | None, str]:
    """The keyring, where there is one; and what is wrong with it. What was revoked once stays so."""
    seen = memory.seen.get(indexes.HUB)
    try:
        keyring = indexes.read_keyring(signed(store, indexes.HUB, owner), now)
        indexes.newer(keyring.serial, seen)
    except NotFound:
        return None, "there is none" if seen is None else "it was there before, and is gone"
    except InvalidArgument as error:
        return None, str(error)[:MAX_PROBLEM]
    memory.seen[indexes.HUB] = keyring.serial
    memory.revoked = tuple(sorted({*memory.revoked, *keyring.revoked}))
    return keyring, ""


def _source(store: Store, name: str, key: PublicKey, memory: Memory, now: float) -> _Found:
    seen = memory.seen.get(key.name)
    try:
        index = indexes.read_index(signed(store, indexes.index_file(key), key), now)
        indexes.newer(index.serial, seen)
    except NotFound:  # it has put nothing there yet, or it was taken away
        return _Found(name, key, None, "" if seen is None else "what it had there is gone")
    except InvalidArgument as error:
        return _Found(name, key, None, str(error)[:MAX_PROBLEM])
    memory.seen[key.name] = index.serial
    return _Found(name, key, index, "")


def _taken(
    store: Store,
    source: _Found,
    here: Mapping[DeviceIdentity, str],
    withdrawn: Collection[Withdrawn],
    take_in: TakeIn,
    memory: Memory,
    done: Pulled,
    *,
    hold: bool,
) -> Source:
    """Take in the files of a source that were not taken before, as far as one pull goes."""
    told = Source(name=source.name, key_id=source.key.name, records=0, problem=source.problem)
    for entry, device in _wanted(source.index, here, memory.taken):
        room = MAX_RECORDS - done.added - done.merged
        if entry.records > room:
            _log.info("%s has more than one pull takes; the rest comes with the next", source.name)
            break
        if hold:
            done.held += entry.records
            continue
        try:
            data = store.read(indexes.object_file(source.key, entry.sha256), objects.MAX_OBJECT_BYTES)
            objects.check(data, entry.sha256)
        except (InvalidArgument, NotFound) as error:
            told = replace(told, problem=_problem(entry, error))
            continue
        except Unavailable as error:  # of this file: the index could be read
            told = replace(told, problem=_problem(entry, error))
            break
        try:
            records = _take(data, source.name, device, withdrawn, take_in, done)
            told = replace(told, records=told.records + records)
        except InvalidArgument as error:
            told = replace(told, problem=_problem(entry, error))
        memory.taken += (entry.sha256,)  # whatever is in it, it will not change
    return told


def _wanted(
    index: Index | None, here: Mapping[DeviceIdentity, str], taken: Collection[str]
) -> list[tuple[Entry, str]]:
    known = set(taken)
    wanted = {
        entry: spec
        for device, spec in here.items()
        for entry in (indexes.matching(index, device.key, device.driver_version) if index else ())
        if entry.sha256 not in known
    }
    return list(wanted.items())[:MAX_FILES]


def _problem(entry: Entry, error: Exception) -> str:
    return f"{entry.sha256[:12]}: {error}"[:MAX_PROBLEM]


def _take(
    data: bytes,
    source: str,
    device: str,
    withdrawn: Collection[Withdrawn],
    take_in: TakeIn,
    done: Pulled,
) -> int:
    """How many records the file had. Raises InvalidArgument where it is none, and what `take_in` raises."""
    kept = []
    for line in objects.unpacked(data):
        if line.strip():
            hint, schedule = objects.hint(line, source)
            if schedule in withdrawn:
                done.withdrawn += 1
            else:
                kept.append(hint)
    if not kept:
        return 0
    told = take_in(device, iter(kept))
    done.added += told.count
    done.merged += told.merged
    room = MAX_REFUSED - len(done.refused)
    done.refused += [f"{source}: {reason}"[:MAX_PROBLEM] for reason in told.refused[: max(0, room)]]
    return len(kept)
