"""Defines a hub's files, without I/O: its keyring, the index of each board, and its files of records.

hub.json                          the keyring, signed by the hub's owner
boards/<key id>/index.json        what one board put there, signed by its key
boards/<key id>/<sha256>.jsonl.gz records, identified by their hash, which the index names
boards.json                       the overview: each index by its hash; nobody signs it

Each board writes in its own folder only, so that pushes need no server and never conflict; a reader merges
what the keys that it trusts have signed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from honed.protocol import strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.methods import check_name
from honed.protocol.params import marks

from .minisign import PublicKey

FORMAT: Final = 1
HUB: Final = "hub.json"
OVERVIEW: Final = "boards.json"
SIGNATURE: Final = ".minisig"  # Suffix of a signature's file
MAX_INDEX_BYTES: Final = 4 << 20
MAX_OVERVIEW_BYTES: Final = 2 << 20
MAX_ENTRIES: Final = 10_000
MAX_BOARDS: Final = 10_000
MAX_WITHDRAWN: Final = 10_000
MAX_OBJECT_BYTES: Final = 16 << 20  # Maximum size of a stored file, compressed
MAX_RAW_BYTES: Final = 128 << 20
MAX_RECORDS: Final = 50_000
MAX_LINE_BYTES: Final = 1 << 20
_HEX: Final = frozenset("0123456789abcdef")
_CLOCKS_DIFFER: Final = 24 * 3600.0  # Seconds that a board's clock may be ahead of ours
_CHUNK: Final = 1 << 16
_DAY: Final = 86400.0
# Fields of a line of `hone records export` that are shared. Names of tasks and hosts, reasons and stories of
# the kernel log stay private, and times are rounded to days.
_SHARED: Final = (
    "honed_records", "device", "compiler", "workload", "flops", "bytes", "trace", "state", "outcome",
    "timing", "source_sha256", "created_s", "finished_s",
)  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedFile:
    """A file of records of one device, driver and compiler."""

    sha256: str  # Hash of the compressed file
    bytes: int
    records: int
    device_key: str  # Hash of the device's identity without its driver
    device: str  # The device's name, for people
    driver: str
    compiler: str


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A schedule that was withdrawn from service on a board."""

    workload: str
    digest: str  # The first 12 digits of its trace's SHA-256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signed:
    """The head of each signed file. `serial` grows with each; times are seconds since 1970."""

    honed_hub: int  # FORMAT
    serial: int
    created_s: float
    expires_s: float

    def check(self, now: float | None) -> None:
        """Raise InvalidArgument if a value is impossible, or it has expired; with `now` None it may have."""
        if self.honed_hub != FORMAT:
            raise InvalidArgument(
                f"it is of format {self.honed_hub} and this honed knows {FORMAT}; update one of them"
            )
        if self.serial < 0 or not (math.isfinite(self.created_s) and math.isfinite(self.expires_s)):
            raise InvalidArgument("its number or its times cannot be")
        if now is None:
            return
        if self.created_s > now + _CLOCKS_DIFFER:
            raise InvalidArgument("it is from the future; set the clock")
        if self.expires_s < now:
            raise InvalidArgument(f"it expired {(now - self.expires_s) / 86400:.1f} days ago; push again")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardIndex(_Signed):
    """The index of what one board has put in the hub.

    Others tune by `entries`, and learn priors from `spread`.
    """

    entries: tuple[IndexedFile, ...]
    withdrawn: tuple[Withdrawn, ...] = ()
    spread: tuple[IndexedFile, ...] = ()

    @property
    def files(self) -> tuple[IndexedFile, ...]:
        """Files to tune by, then those to learn from."""
        return (*self.entries, *self.spread)


@dataclass(frozen=True, slots=True)
class NamedKey:
    """A key that the keyring names."""

    name: str
    key: str  # The key as minisign prints it


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring(_Signed):
    """The keys that the owner of the hub trusts; `revoked` are ids of keys that are no longer trusted."""

    boards: tuple[NamedKey, ...] = ()
    revoked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The SHA-256 of each board's index, by key id.

    It is a hint: all who may write to the hub can change it.
    """

    honed_hub: int
    indexes: dict[str, str]


def folder(key: PublicKey) -> str:
    """Return the folder that a board writes to, below the hub's address."""
    return f"boards/{key.name}"


def index_file(key: PublicKey) -> str:
    """Return the name of a board's index, below the hub's address."""
    return f"{folder(key)}/index.json"


def object_file(key: PublicKey, sha256: str) -> str:
    """Return the name of a board's file of records, below the hub's address."""
    return f"{folder(key)}/{sha256}.jsonl.gz"


def file_bytes(file: BoardIndex | Keyring | Overview) -> bytes:
    """Return the bytes of the file, which are those to be signed."""
    plain = strict.to_plain(file, omit_defaults=True)
    return json.dumps(plain, sort_keys=True, allow_nan=False, indent=1).encode() + b"\n"


def read_index(data: bytes, now: float | None) -> BoardIndex:
    """Return an index whose signature was checked.

    Raises InvalidArgument if it is no index, or has expired. With `now` None it may have expired, because it
    is to be signed again.
    """
    index = _read(BoardIndex, data)
    if len(index.files) > MAX_ENTRIES or len(index.withdrawn) > MAX_WITHDRAWN:
        raise InvalidArgument(f"it names more than {MAX_ENTRIES} files, or withdraws more")
    for entry in index.files:
        if not all(len(h) == 64 and set(h) <= _HEX for h in (entry.sha256, entry.device_key)):
            raise InvalidArgument("it names a file by what is no hash")
        if entry.bytes < 0 or entry.records < 0:
            raise InvalidArgument("it names a file of less than nothing")
    index.check(now)
    return index


def read_keyring(data: bytes, now: float | None) -> Keyring:
    """Return a keyring whose signature was checked.

    Raises InvalidArgument if it is no keyring, or has expired. With `now` None it may have expired, because
    it is to be signed again.
    """
    keyring = _read(Keyring, data)
    if len(keyring.boards) > MAX_BOARDS or len(keyring.revoked) > MAX_BOARDS:
        raise InvalidArgument(f"it names more than {MAX_BOARDS} boards")
    for board in keyring.boards:
        check_name(board.name, "board")
        PublicKey.parse(board.key)
    keyring.check(now)
    return keyring


def read_overview(data: bytes) -> Overview:
    """Return an overview; raise InvalidArgument if the data is none."""
    overview = _read(Overview, data)
    if overview.honed_hub != FORMAT or len(overview.indexes) > MAX_BOARDS:
        raise InvalidArgument(f"it is of another format, or names more than {MAX_BOARDS} boards")
    return overview


def with_board_index(overview: Overview | None, key: PublicKey, sha256: str) -> Overview:
    """Return the overview with a board's present index.

    It has that index alone if there is no overview yet, or the overview is full.
    """
    before = overview.indexes if overview is not None else {}
    if len(before) >= MAX_BOARDS and key.name not in before:
        before = {}
    return Overview(honed_hub=FORMAT, indexes=before | {key.name: sha256})


def trusted_keys(
    trusted: Mapping[str, PublicKey], keyrings: Iterable[Keyring], before: Iterable[str] = ()
) -> dict[str, PublicKey]:
    """Return the trusted keys by name, those of the configuration before those of keyrings; none revoked.

    The keyrings' signer is trusted; `before` are key ids that a keyring revoked earlier. If two keys have one
    name, the second also has its id in its name. Boards choose their key ids; of two keys with one id the
    first counts, since the other would corrupt its folder and its serials.
    """
    rings = list(keyrings)
    revoked = {key_id.upper() for key_id in (*before, *(each for ring in rings for each in ring.revoked))}
    found: dict[str, PublicKey] = {}
    ids: set[str] = set()
    named = [*trusted.items()]
    named += sorted((board.name, PublicKey.parse(board.key)) for ring in rings for board in ring.boards)
    for name, key in named:
        if key.name in revoked or key.name in ids:
            continue
        ids.add(key.name)
        found[name if name not in found else f"{name} {key.name}"] = key
    return found


def serial_name(key: PublicKey, *, keyring: bool = False) -> str:
    """Return the name under which the last serial of a key's index, or keyring, is stored."""
    return f"{HUB} {key.name}" if keyring else key.name


def newer(serial: int, seen: int | None) -> None:
    """Raise InvalidArgument if a file is older than one seen before, which indicates a replay."""
    if seen is not None and serial < seen:
        raise InvalidArgument(f"it is number {serial}, and number {seen} was seen before: an old one again")


def matching(index: BoardIndex, device_key: str, driver: str) -> list[IndexedFile]:
    """Return the files of this device: those of this driver first, else in the order of the index."""
    of_device = [entry for entry in index.entries if entry.device_key == device_key]
    return sorted(of_device, key=lambda entry: entry.driver != driver)


def several_withdrawals(indexes: Iterable[BoardIndex], several: int) -> frozenset[Withdrawn]:
    """Return the schedules that at least `several` boards withdrew."""
    count: dict[Withdrawn, int] = {}
    for index in indexes:
        for one in set(index.withdrawn):
            count[one] = count.get(one, 0) + 1
    return frozenset(one for one, boards in count.items() if boards >= several)


def shareable_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what others may know of one line of an export."""
    kept = {name: record[name] for name in _SHARED}
    kept |= {name: record[name] // _DAY * _DAY for name in ("created_s", "finished_s")}
    return kept | {"name": None, "reason": "", "story": None, "measured_by": ""}


def schedule_of(record: Mapping[str, Any]) -> Withdrawn:
    """Return the identity of a record's schedule."""
    return Withdrawn(str(record["workload"]), digest(record["trace"].encode())[:12])


def pack_records(records: Iterable[dict[str, Any]]) -> bytes:
    """Return the file of these records; equal records give equal bytes."""
    lines = [json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n" for record in records]
    return gzip.compress(b"".join(lines), mtime=0)


def digest(data: bytes) -> str:
    """Return the digest that identifies a file."""
    return hashlib.sha256(data).hexdigest()


def check_hash(data: bytes, expected: str) -> None:
    """Raise InvalidArgument unless the data has this hash."""
    if digest(data) != expected:
        raise InvalidArgument("it is not the file that the index names: it was changed or cut off")


def unpack_records(data: bytes) -> Iterator[bytes]:
    """Yield the lines of a file, which is never in memory as a whole.

    Raises InvalidArgument if it is damaged or exceeds the limits.
    """
    inflate = zlib.decompressobj(wbits=31)  # Magic of gzip
    size = count = 0
    rest, given = b"", data
    while not inflate.eof:
        try:
            made = inflate.decompress(given, _CHUNK)
        except zlib.error as error:
            raise InvalidArgument(f"it is damaged ({error})") from error
        given = inflate.unconsumed_tail
        if not made and not given and not inflate.eof:
            raise InvalidArgument("it is cut off")
        size += len(made)
        *lines, rest = (rest + made).split(b"\n")
        count += len(lines)
        if size > MAX_RAW_BYTES or count > MAX_RECORDS:
            raise InvalidArgument(f"it holds more than {MAX_RAW_BYTES >> 20} MiB or {MAX_RECORDS} records")
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidArgument(f"it holds a record of more than {MAX_LINE_BYTES >> 20} MiB")
        yield from lines
    if rest:
        yield rest


def hint_of(line: bytes, source: str) -> tuple[bytes, Withdrawn]:
    """Return a line as it is imported, and its schedule.

    Its compiler is marked as one that is not here, so that the schedule is measured first. `source` is the
    name of the key that signed it. Raises InvalidArgument if the line is no record.
    """
    try:
        plain = json.loads(line)
        plain = {name: plain[name] for name in _SHARED}
        of, banned = marks(source), plain["state"] == "quarantined"
        plain["compiler"] = f"{plain['compiler']}{of.compiler}"
        plain |= {"name": None, "reason": of.reason if banned else "", "story": None}
        plain["measured_by"] = of.measured_by
        return json.dumps(plain, allow_nan=False).encode() + b"\n", schedule_of(plain)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"it holds what is no record ({type(error).__name__})") from error


def _read(kind: type[T], data: bytes) -> T:
    if len(data) > MAX_INDEX_BYTES:
        raise InvalidArgument(f"it is larger than {MAX_INDEX_BYTES >> 20} MiB")
    try:
        plain: Any = json.loads(data.decode(), parse_constant=_no_constant)
        return strict.from_plain(kind, plain, where="it")
    except (ValueError, RecursionError) as error:  # SchemaError is a ValueError
        raise InvalidArgument(f"it is not what a hub holds: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
