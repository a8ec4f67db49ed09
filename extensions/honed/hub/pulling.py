"""Takes in what others learned: checked, bounded, and as hints, which are measured before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from honed.jobs.events import Imported
from honed.protocol.errors import InvalidArgument, NotFound, Unavailable
from honed.protocol.results import DeviceIdentity

from . import index as indexes
from . import looking, objects
from .index import IndexedFile, Withdrawn
from .looking import FoundIndex
from .memory import MAX_PROBLEM, HubState, IndexCache, KeyStanding
from .minisign import PublicKey
from .remote import HubStore

MAX_RECORDS: Final = 200_000  # Of one pull; what is left comes with the next
MAX_SOURCE_RECORDS: Final = 50_000  # Of one pull and one source, so that each leaves room for others
MAX_SOURCE_BYTES: Final = 64 << 20  # Of one pull and one source, of files as they are stored
MAX_FILES: Final = 500  # Of one pull and one source
MAX_REFUSED: Final = 20  # Sentences about lines
SEVERAL: Final = 2  # Boards that must have taken a schedule back, for others to leave it
_TOO_LARGE: Final = "it has more records or bytes than a file may, and was left"
_log = logging.getLogger("honed.hub")
TakeIn = Callable[[str, Iterator[bytes]], Imported]  # Of a device's spec, and lines


@dataclass(slots=True, kw_only=True)
class Pulled:
    """What one pull brought: records that are new, that were here, and that two boards took back.

    It also has sentences about records that were refused. `held` are there, and were not taken; `lines` were
    looked at.
    """

    added: int = 0
    merged: int = 0
    withdrawn: int = 0
    held: int = 0
    lines: int = 0
    refused: list[str] = field(default_factory=list)
    sources: list[KeyStanding] = field(default_factory=list)


def pull(
    store: HubStore,
    trusted: Mapping[str, PublicKey],
    here: Mapping[DeviceIdentity, str],
    take_in: TakeIn,
    memory: HubState,
    shelf: IndexCache,
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
    `take_in` raises. `memory` and `shelf` are changed, and the caller's to keep.
    """
    found = looking.look(store, trusted, owner, memory, shelf, now, own=own, names=names or ())
    withdrawn = indexes.withdrawn_by_several([f.index for f in found if f.index is not None], SEVERAL)
    known, work = set(memory.taken), _Pull(store, take_in, memory, withdrawn, hold)
    for source in found:
        if names is None or source.name in names:
            work.done.sources.append(work.taken(source, _wanted(source, here, known)))
    memory.pulled_s, memory.sources = now, tuple(work.done.sources)
    return work.done


@dataclass(slots=True)
class _Pull:
    store: HubStore
    take_in: TakeIn
    memory: HubState
    withdrawn: Collection[Withdrawn]
    hold: bool
    done: Pulled = field(default_factory=Pulled)

    def taken(self, source: FoundIndex, wanted: Sequence[tuple[IndexedFile, str]]) -> KeyStanding:
        """Take in the `wanted` files, with the specs of their devices, as far as one pull goes."""
        standing = KeyStanding(name=source.name, key_id=source.key.name, records=0, problem=source.problem)
        # What may still come.
        records, size = min(MAX_SOURCE_RECORDS, MAX_RECORDS - self.done.lines), MAX_SOURCE_BYTES
        for entry, device in wanted:
            if entry.records > objects.MAX_RECORDS or entry.bytes > objects.MAX_OBJECT_BYTES:
                standing = replace(standing, problem=_problem(entry, _TOO_LARGE))
                continue
            if self.hold:
                self.done.held += entry.records
                continue
            records, size = records - entry.records, size - entry.bytes
            if min(records, size) < 0:
                _log.info("%s has more than one pull takes; the rest comes with the next", source.name)
                break
            try:
                data = self.store.read(indexes.object_file(source.key, entry.sha256), entry.bytes)
                objects.check(data, entry.sha256)
            except (InvalidArgument, NotFound) as error:
                standing = replace(standing, problem=_problem(entry, error))
                continue
            except Unavailable as error:  # Of this file: the index could be read
                standing = replace(standing, problem=_problem(entry, error))
                break
            hints = _Hints(data, entry.records, source.name, self.withdrawn, self.done)
            try:
                standing = replace(standing, records=standing.records + _take(hints, device, self.take_in))
            except InvalidArgument as error:
                standing = replace(standing, problem=_problem(entry, error))
                if not hints.wrong:  # It is the service that refuses now
                    continue
            self.memory.taken += (_known(source, entry),)  # Whatever is in it, it will not change
        return standing


def _wanted(
    source: FoundIndex, here: Mapping[DeviceIdentity, str], known: Collection[str]
) -> list[tuple[IndexedFile, str]]:
    """Files that are for a device here and were not taken before."""
    index = source.index
    wanted = {
        entry: spec
        for device, spec in here.items()
        for entry in (indexes.matching(index, device.key, device.driver_version) if index else ())
        if _known(source, entry) not in known
    }
    return list(wanted.items())[:MAX_FILES]


def _known(source: FoundIndex, entry: IndexedFile) -> str:
    """Return the name by which a file is remembered.

    Another key may name the same file, and say something wrong of it.
    """
    return f"{source.key.name} {entry.sha256[:32]}"


def _problem(entry: IndexedFile, error: object) -> str:
    return f"{entry.sha256[:12]}: {error}"[:MAX_PROBLEM]


def _take(hints: _Hints, device: str, take_in: TakeIn) -> int:
    """Take records in, and return how many were taken.

    Raises InvalidArgument where it is no file of records, and what `take_in` raises.

    Raises InvalidArgument where it is no such file, and what `take_in` raises.
    """
    lines = iter(hints)
    first = next(lines, None)
    if first is None:
        return 0
    counted, done = take_in(device, chain([first], lines)), hints.done
    done.added += counted.count
    done.merged += counted.merged
    room = MAX_REFUSED - len(done.refused)
    done.refused += [f"{hints.source}: {reason}"[:MAX_PROBLEM] for reason in counted.refused[: max(0, room)]]
    return hints.count


@dataclass(slots=True)
class _Hints:
    """The at most so many lines of a file as they are imported, one at a time, of which `count` were given.

    Raises InvalidArgument where it is no such file, and is `wrong` then.
    """

    data: bytes
    most: int
    source: str
    withdrawn: Collection[Withdrawn]
    done: Pulled
    count: int = 0
    wrong: bool = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._lines()
        except InvalidArgument:
            self.wrong = True
            raise

    def _lines(self) -> Iterator[bytes]:
        read = 0
        for line in objects.unpacked(self.data):
            if not line.strip():
                continue
            read += 1
            if read > self.most:
                raise InvalidArgument("it holds more records than the index says")
            hint, schedule = objects.hint(line, self.source)
            self.done.lines += 1
            if schedule in self.withdrawn:
                self.done.withdrawn += 1
            else:
                self.count += 1
                yield hint
