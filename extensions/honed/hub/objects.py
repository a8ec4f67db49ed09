"""Reads and writes a hub's files of records: lines of an export without private fields, compressed."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from honed.protocol.errors import InvalidArgument
from honed.protocol.params import marks

from .index import Withdrawn

MAX_OBJECT_BYTES: Final = 16 << 20  # Maximum size of a stored file, compressed
MAX_RAW_BYTES: Final = 128 << 20
MAX_RECORDS: Final = 50_000
MAX_LINE_BYTES: Final = 1 << 20
_CHUNK: Final = 1 << 16
_DAY: Final = 86400.0
# Fields of a line of `hone records export` that are shared. Names of tasks and hosts, reasons and stories of
# the kernel log stay private, and times are rounded to days.
_SHARED: Final = (
    "honed_records", "device", "compiler", "workload", "flops", "bytes", "trace", "state", "outcome",
    "timing", "source_sha256", "created_s", "finished_s",
)  # fmt: skip


def shareable_part(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what others may know of one line of an export."""
    kept = {name: record[name] for name in _SHARED}
    kept |= {name: record[name] // _DAY * _DAY for name in ("created_s", "finished_s")}
    return kept | {"name": None, "reason": "", "story": None, "measured_by": ""}


def schedule(record: Mapping[str, Any]) -> Withdrawn:
    """Return the identity of a record's schedule."""
    return Withdrawn(str(record["workload"]), sha256(record["trace"].encode())[:12])


def pack(records: Iterable[dict[str, Any]]) -> bytes:
    """Return the file of these records; equal records give equal bytes."""
    lines = [json.dumps(record, sort_keys=True, allow_nan=False).encode() + b"\n" for record in records]
    return gzip.compress(b"".join(lines), mtime=0)


def sha256(data: bytes) -> str:
    """Return the digest that identifies a file."""
    return hashlib.sha256(data).hexdigest()


def check(data: bytes, expected: str) -> None:
    """Raise InvalidArgument unless the data has this hash."""
    if sha256(data) != expected:
        raise InvalidArgument("it is not the file that the index names: it was changed or cut off")


def unpack(data: bytes) -> Iterator[bytes]:
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


def hint(line: bytes, source: str) -> tuple[bytes, Withdrawn]:
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
        return json.dumps(plain, allow_nan=False).encode() + b"\n", schedule(plain)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"it holds what is no record ({type(error).__name__})") from error
