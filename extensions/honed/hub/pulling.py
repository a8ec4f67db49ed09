"""Imports what others learned: checked, bounded, and as hints, which are measured before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from honed.jobs.events import Imported
from honed.protocol.errors import InvalidArgument, NotFound, Unavailable
from honed.protocol.values import DeviceIdentity

from . import layout, looking
from .layout import IndexedFile, Withdrawn
from .looking import FoundIndex
from .memory import MAX_PROBLEM, HubState, IndexCache, KeyStanding
from .minisign import PublicKey
from .remote import HubStore

MAX_RECORDS: Final = 200_000  # Maximum records of one pull; the next one continues
MAX_SOURCE_RECORDS: Final = 50_000  # Maximum records of a source in one pull, which leaves room for others
MAX_SOURCE_BYTES: Final = 64 << 20  # Maximum bytes of one source in a pull, as stored
MAX_FILES: Final = 500  # Maximum files of one source in a pull
MAX_REFUSED: Final = 20  # Maximum sentences about refused lines
SEVERAL: Final = 2  # Number of boards that must have withdrawn a schedule for others to skip it
_TOO_LARGE: Final = "it has more records or bytes than a file may, and was left"
_log = logging.getLogger("honed.hub")
TakeIn = Callable[[str, Iterator[bytes]], Imported]  # Imports lines for the device of a spec


@dataclass(slots=True, kw_only=True)
class Pulled:
    """The result of a pull: records that are new, that were here, and that two boards withdrew.

    `refused` are sentences about refused records. `held` records are there, and were not pulled; `lines` were
    read.
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
    """Import what trusted keys have signed for the devices `here`, which maps identities to specs.

    The `owner` may have signed a keyring, whose keys are trusted, too; `own` is this machine's key, whose
    records are here. With `hold` nothing is imported; `names` are the keys to pull from, None for all. A
    problem of one source is reported in its standing and stops no other. Raises Unavailable if the hub cannot
    be reached at all, and what `take_in` raises. `memory` and `shelf` are changed; the caller stores them.
    """
    found = looking.look(store, trusted, owner, memory, shelf, now, own=own, names=names or ())
    withdrawn = layout.several_withdrawals([f.index for f in found if f.index is not None], SEVERAL)
    known, work = set(memory.taken), _Pull(store, take_in, memory, withdrawn, hold)
    for source in found:
        if names is None or source.name in names:
            work.done.sources.append(work.import_files(source, _files_to_pull(source, here, known)))
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

    def import_files(self, source: FoundIndex, wanted: Sequence[tuple[IndexedFile, str]]) -> KeyStanding:
        """Import the `wanted` files, for the devices of their specs, up to the limits of one pull."""
        standing = KeyStanding(name=source.name, key_id=source.key.name, records=0, problem=source.problem)
        # The source may use what remains of the limits.
        records, size = min(MAX_SOURCE_RECORDS, MAX_RECORDS - self.done.lines), MAX_SOURCE_BYTES
        for entry, device in wanted:
            if entry.records > layout.MAX_RECORDS or entry.bytes > layout.MAX_OBJECT_BYTES:
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
                data = self.store.read(layout.object_file(source.key, entry.sha256), entry.bytes)
                layout.check_hash(data, entry.sha256)
            except (InvalidArgument, NotFound) as error:
                standing = replace(standing, problem=_problem(entry, error))
                continue
            except Unavailable as error:  # Could not read the file, though the index could be read
                standing = replace(standing, problem=_problem(entry, error))
                break
            hints = _Hints(data, entry.records, source.name, self.withdrawn, self.done)
            try:
                standing = replace(standing, records=standing.records + _take(hints, device, self.take_in))
            except InvalidArgument as error:
                standing = replace(standing, problem=_problem(entry, error))
                if not hints.wrong:  # The service refused, not the file's content
                    continue
            self.memory.taken += (_file_key(source, entry),)  # A file never changes, whatever is in it
        return standing


def _files_to_pull(
    source: FoundIndex, here: Mapping[DeviceIdentity, str], pulled: Collection[str]
) -> list[tuple[IndexedFile, str]]:
    """Return the files for a device here that were not pulled before."""
    index = source.index
    wanted = {
        entry: spec
        for device, spec in here.items()
        for entry in (layout.matching(index, device.key, device.driver_version) if index else ())
        if _file_key(source, entry) not in pulled
    }
    return list(wanted.items())[:MAX_FILES]


def _file_key(source: FoundIndex, entry: IndexedFile) -> str:
    """Return the name under which a pulled file is stored.

    It has the key's id, since another key may name the same file with wrong properties.
    """
    return f"{source.key.name} {entry.sha256[:32]}"


def _problem(entry: IndexedFile, error: object) -> str:
    return f"{entry.sha256[:12]}: {error}"[:MAX_PROBLEM]


def _take(hints: _Hints, device: str, take_in: TakeIn) -> int:
    """Import records, and return how many lines were passed on.

    Raises InvalidArgument if the data is no file of records, and what `take_in` raises.
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
    """The lines of a file, at most `most`, one at a time as they are imported; `count` were yielded.

    Iterating raises InvalidArgument if the data is no such file, and then sets `wrong`.
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
        for line in layout.unpack_records(self.data):
            if not line.strip():
                continue
            read += 1
            if read > self.most:
                raise InvalidArgument("it holds more records than the index says")
            hint, schedule = layout.hint_of(line, self.source)
            self.done.lines += 1
            if schedule in self.withdrawn:
                self.done.withdrawn += 1
            else:
                self.count += 1
                yield hint
