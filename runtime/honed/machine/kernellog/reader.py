"""Reads the kernel log from the journal or from /dev/kmsg (Documentation/ABI/testing/dev-kmsg of Linux)."""

from __future__ import annotations

import errno
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from honed.protocol.errors import HonedError, PermissionDenied, Unavailable

from .parse import parse
from .story import DatedFault

SETTLE_S: Final = 0.1
"""Seconds to wait after a kernel finished before reporting "no fault": kbase reports page faults from a
work queue (measured by others). On newer kbase even then a missing record proves nothing."""
CLOCK_SPAN_S: Final = 600.0  # Seconds until the clocks' offset is measured again
PATH: Final = "/dev/kmsg"
RECORD_BYTES: Final = 8192  # CONSOLE_EXT_LOG_MAX: with a smaller buffer read() fails
RECORDS_A_READ: Final = 1000

_HEADER: Final = re.compile(rb"(\d{1,10}),(\d{1,20}),(\d{1,20}),[^;\n]*;", re.ASCII)
_ESCAPE: Final = re.compile(rb"\\x([0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record with all its lines, unescaped."""

    message: str
    monotonic_s: float  # Time of writing, in CLOCK_MONOTONIC of that boot
    realtime_s: float  # Time of writing, in seconds since 1970
    priority: int  # From 0, emergency, to 7, debug
    facility: int  # With 0 for the kernel itself
    device: str | None  # Name of the device in the record's own field, "fb000000.gpu"
    boot_id: str  # 32 hexadecimal digits; CLOCK_MONOTONIC is only comparable within one boot

    @property
    def genuine(self) -> bool:
        """Return whether the kernel wrote it. A program that writes to /dev/kmsg cannot have facility 0."""
        return self.facility == 0


def find_fault(record: Record, *, forged: bool = False) -> DatedFault | None:
    """Return the fault in `record` with its time; None for other records.

    Ignores records that a program wrote unless `forged` admits them.
    """
    if not (record.genuine or forged):
        return None
    fault = parse(record.message, device=record.device)
    return None if fault is None else DatedFault(fault=fault, monotonic_s=record.monotonic_s)


def device_name(field: str | None) -> str | None:
    """Return the device name in a DEVICE field: the part after the subsystem in `+platform:fb000000.gpu`.

    Returns None for the other forms (`b8:0`, `c10:58`, `n3`: device numbers), which are no names.
    """
    if field is None or not field.startswith("+"):
        return None
    return field.partition(":")[2] or None


class LogClock:
    """A converter of the kernel log's own time stamps to CLOCK_MONOTONIC.

    The two clocks drift apart: NTP does not correct the log's, which differs by minutes after a virtual
    machine was stopped. A record arrives a moment after it is stamped, so the smallest recent difference is
    the offset.
    """

    def __init__(self) -> None:
        self._offset_s = float("inf")
        self._since_s = 0.0

    def note(self, stamp_s: float, received_s: float) -> None:
        """Record that a message of stamp `stamp_s` in the log arrived at `received_s`, CLOCK_MONOTONIC."""
        offset = received_s - stamp_s
        if offset <= self._offset_s or received_s - self._since_s > CLOCK_SPAN_S:
            self._offset_s, self._since_s = offset, received_s

    def monotonic(self, stamp_s: float) -> float:
        """Return CLOCK_MONOTONIC of a record stamped `stamp_s`; call `note` at least once before."""
        return stamp_s + self._offset_s


class Reader(Protocol):
    """A reader of new records of the kernel log, for an event loop: `read` when `fileno` is readable."""

    lost: int  # Records overwritten before they could be read

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""

    def read(self) -> list[Record]:
        """Return records since the last call, oldest first; never wait."""

    def close(self) -> None:
        """Close the reader's descriptors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A record as in /dev/kmsg, unescaped."""

    priority: int
    facility: int
    sequence: int
    stamp_us: int  # Microseconds of the log's own clock
    message: str
    fields: dict[str, str]  # SUBSYSTEM, DEVICE


def parse_raw(data: bytes) -> Raw | None:
    """Return the record in the bytes of one read() of /dev/kmsg; None if they do not have the form below.

    The form is `priority,sequence,microseconds,flags;text` and ` KEY=value` lines.
    """
    header = _HEADER.match(data)
    if header is None:
        return None
    text, *rest = data[header.end() :].split(b"\n")
    fields: dict[str, str] = {}
    for line in rest:
        key, separator, value = line.partition(b"=")
        if separator and key.startswith(b" "):
            fields[_unescape(key[1:])] = _unescape(value)
    number = int(header[1])
    return Raw(
        priority=number & 7,
        facility=number >> 3,
        sequence=int(header[2]),
        stamp_us=int(header[3]),
        message=_unescape(text),
        fields=fields,
    )


class KmsgReader:
    """A reader of /dev/kmsg from its end, or with `from_start` from the oldest record still there.

    `lost` counts records that the kernel overwrote before they were read. Times of records older than the
    reader are only right after a new one was read (see LogClock). Raises PermissionDenied or Unavailable if
    it cannot be opened.
    """

    def __init__(self, path: str = PATH, *, from_start: bool = False) -> None:
        self.lost = 0
        self._clock = LogClock()
        self._boot_id = boot_id()
        self._next: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise _cannot_open(path, error) from error
        try:
            os.lseek(self._fd, 0, os.SEEK_SET if from_start else os.SEEK_END)
        except OSError as error:
            os.close(self._fd)
            raise Unavailable(f"{path} is not a kernel log ({error.strerror}); give /dev/kmsg") from error

    def fileno(self) -> int:
        """Return the descriptor that is readable while there are records to read."""
        return self._fd

    def read(self) -> list[Record]:
        """Return records since the last call, oldest first, at most RECORDS_A_READ; never wait.

        Raises Unavailable if /dev/kmsg cannot be read.
        """
        raws: list[Raw] = []
        while len(raws) < RECORDS_A_READ:
            try:
                data = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise Unavailable(f"/dev/kmsg cannot be read ({error.strerror}); open it anew") from error
                continue  # Overwritten: the next read returns the oldest record left
            raw = parse_raw(data)
            if raw is not None:
                self._clock.note(raw.stamp_us * 1e-6, time.monotonic())
                raws.append(raw)
        return [self._record(raw) for raw in raws]

    def close(self) -> None:
        """Close the descriptor; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _record(self, raw: Raw) -> Record:
        if self._next is not None and raw.sequence > self._next:
            self.lost += raw.sequence - self._next
        self._next = raw.sequence + 1
        monotonic_s = self._clock.monotonic(raw.stamp_us * 1e-6)
        return Record(
            message=raw.message,
            monotonic_s=monotonic_s,
            realtime_s=time.time() - (time.monotonic() - monotonic_s),
            priority=raw.priority,
            facility=raw.facility,
            device=device_name(raw.fields.get("DEVICE")),
            boot_id=self._boot_id,
        )


def boot_id() -> str:
    """Return the identity of this boot: 32 hexadecimal digits."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def _unescape(data: bytes) -> str:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), data).decode(errors="replace")


def _cannot_open(path: str, error: OSError) -> HonedError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return PermissionDenied(
            f"{path} cannot be read ({error.strerror}); run with CAP_SYSLOG, or join group systemd-journal "
            "to read the journal instead"
        )
    return Unavailable(f"{path} cannot be read ({error.strerror}); give the service access to the kernel log")
