"""Reads the kernel log from the journal or from /dev/kmsg (Documentation/ABI/testing/dev-kmsg of Linux)."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from honed.protocol.errors import HonedError, PermissionDenied, Unavailable

from .parse import parse
from .story import DatedFault

SETTLE_S: Final = 0.1
"""Seconds to wait after a kernel finished before reporting "no fault": kbase reports page faults from a
work queue (measured by others). On newer kbase even then a missing record proves nothing."""
CLOCK_SPAN_S: Final = 600.0  # Seconds until the clocks' offset is measured again
_KMSG: Final = "/dev/kmsg"
_RECORD_BYTES: Final = 8192  # CONSOLE_EXT_LOG_MAX: with a smaller buffer read() fails
RECORDS_A_READ: Final = 1000
JOURNALS: Final = (Path("/var/log/journal"), Path("/run/log/journal"))
# File that journald creates when it reads /dev/kmsg: absent in a container whose journal has no kernel
# records.
_KERNEL_SEQUENCE: Final = Path("/run/systemd/journal/kernel-seqnum")
_FIELD_BYTES: Final = 64 << 10

# Converters that skip systemd-python's dates, so that a record is read in a fraction of the time.
_NUMBERS: Final = ("SYSLOG_FACILITY", "_SOURCE_MONOTONIC_TIMESTAMP")
_CONVERTERS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(_NUMBERS, int),
    "_BOOT_ID": bytes.decode,
    "__REALTIME_TIMESTAMP": lambda microseconds: microseconds,
    "__MONOTONIC_TIMESTAMP": lambda stamp: stamp,
    "_SOURCE_REALTIME_TIMESTAMP": bytes.decode,
}

_HEADER: Final = re.compile(rb"(\d{1,10}),\d{1,20},(\d{1,20}),[^;\n]*;", re.ASCII)
_DEVICE: Final = b" DEVICE="
_ESCAPE: Final = re.compile(rb"\\x([0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record with all its lines, unescaped."""

    message: str
    monotonic_s: float  # Time of writing, in CLOCK_MONOTONIC of that boot
    realtime_s: float  # Time of writing, in seconds since 1970
    genuine: bool  # The kernel wrote it, with facility 0, which no program that writes to /dev/kmsg can have
    device: str | None  # Name of the device in the record's own field, "fb000000.gpu"


def find_fault(record: Record) -> DatedFault | None:
    """Return the fault in `record` with its time; None for other records, and those that a program wrote."""
    fault = parse(record.message, device=record.device) if record.genuine else None
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

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""

    def read(self) -> list[Record]:
        """Return records since the last call, oldest first; never wait."""

    def close(self) -> None:
        """Close the reader's descriptors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A record as in /dev/kmsg, unescaped."""

    facility: int
    stamp_us: int  # Microseconds of the log's own clock
    message: str
    device: str | None


def parse_raw(data: bytes) -> Raw | None:
    """Return the record in the bytes of one read() of /dev/kmsg; None if they do not have the form below.

    The form is `priority,sequence,microseconds,flags;text` and ` KEY=value` lines.
    """
    header = _HEADER.match(data)
    if header is None:
        return None
    text, *fields = data[header.end() :].split(b"\n")
    devices = (_unescape(line.removeprefix(_DEVICE)) for line in fields if line.startswith(_DEVICE))
    return Raw(
        facility=int(header[1]) >> 3,
        stamp_us=int(header[2]),
        message=_unescape(text),
        device=device_name(next(devices, None)),
    )


class KmsgReader:
    """A reader of /dev/kmsg from its end, or with `from_start` from the oldest record still there.

    Records that the kernel overwrote before they were read are lost. Times of records older than the reader
    are only right after a new one was read (see LogClock). Raises PermissionDenied or Unavailable if it
    cannot be opened.
    """

    def __init__(self, path: str = _KMSG, *, from_start: bool = False) -> None:
        self._clock = LogClock()
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
                data = os.read(self._fd, _RECORD_BYTES)
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
        monotonic_s = self._clock.monotonic(raw.stamp_us * 1e-6)
        return Record(
            message=raw.message,
            monotonic_s=monotonic_s,
            realtime_s=time.time() - (time.monotonic() - monotonic_s),
            genuine=raw.facility == 0,
            device=raw.device,
        )


class JournalReader:
    """A reader of the kernel's records in the journal, from its end or with `from_start` from the oldest.

    It is the machine's journal of this boot, or that in `place`, as systemd's own Reader takes it. Raises
    PermissionDenied or Unavailable if no kernel record can ever appear there, ImportError without
    systemd-python.
    """

    def __init__(self, *, from_start: bool = False, **place: Any) -> None:
        from systemd import journal  # Not on every machine

        self._clock = LogClock()
        try:
            self._reader = journal.Reader(converters=_CONVERTERS, **place)
            self._reader.data_threshold = _FIELD_BYTES
        except OSError as error:
            raise Unavailable(
                f"the journal cannot be opened ({error.strerror or error}); check it"
            ) from error
        try:
            self._reader.add_match(_TRANSPORT="kernel")
            if not place:
                boot_id = Path("/proc/sys/kernel/random/boot_id").read_text()
                self._reader.add_match(_BOOT_ID=boot_id.strip().replace("-", ""))
                _check_visible(self._reader)
            self._fd: int = self._reader.fileno()  # New records wake the event loop from here on
            if from_start or not self._at_end():
                self._reader.seek_head()
        except BaseException:
            self._reader.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that is readable when `read` should be called."""
        return self._fd

    def read(self) -> list[Record]:
        """Return records since the last call, oldest first, at most RECORDS_A_READ; never wait.

        Raises Unavailable if the journal cannot be read.
        """
        try:
            self._reader.process()
            entries: list[Mapping[str, Any]] = []
            while len(entries) < RECORDS_A_READ and (entry := self._reader.get_next()):
                entries.append(entry)
        except OSError as error:
            raise Unavailable(
                f"the journal cannot be read ({error.strerror or error}); open it anew"
            ) from error
        return [self._record(entry) for entry in entries]

    def close(self) -> None:
        """Close the journal's files; may be called again."""
        self._reader.close()

    def _at_end(self) -> bool:
        """Seek to the last record; return False if there is none, so that the next record is the first."""
        self._reader.seek_tail()
        return bool(self._reader.get_previous())

    def _record(self, entry: Mapping[str, Any]) -> Record:
        microseconds, _ = entry["__MONOTONIC_TIMESTAMP"]
        monotonic_s = received_s = microseconds * 1e-6
        stamp = _one(entry.get("_SOURCE_MONOTONIC_TIMESTAMP"))
        if isinstance(stamp, int):
            self._clock.note(stamp * 1e-6, received_s)
            monotonic_s = self._clock.monotonic(stamp * 1e-6)
        return Record(
            message=_text(entry.get("MESSAGE")) or "",
            monotonic_s=monotonic_s,
            realtime_s=entry["__REALTIME_TIMESTAMP"] * 1e-6 - (received_s - monotonic_s),
            genuine=_one(entry.get("SYSLOG_FACILITY")) == 0,  # Records without it are not journald's
            device=device_name(_text(entry.get("_KERNEL_DEVICE"))),
        )


def _unescape(data: bytes) -> str:
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), data).decode(errors="replace")


def _cannot_open(path: str, error: OSError) -> HonedError:
    if error.errno in (errno.EPERM, errno.EACCES):
        return PermissionDenied(
            f"{path} cannot be read ({error.strerror}); run with CAP_SYSLOG, or join group systemd-journal "
            "to read the journal instead"
        )
    return Unavailable(f"{path} cannot be read ({error.strerror}); give the service access to the kernel log")


def _check_visible(reader: Any) -> None:
    """Raise if the kernel's records are hidden: the journal itself would only stay empty."""
    reader.seek_tail()
    if reader.get_previous():
        return
    files, hidden = _system_files()
    if any(os.access(file, os.R_OK) for file in files):
        if _KERNEL_SEQUENCE.exists():
            return
        raise Unavailable("the journal holds no kernel record of this boot; give the service /dev/kmsg")
    if files or hidden:
        raise PermissionDenied(
            "the journal is not readable; add the user to group systemd-journal and log in again"
        )
    raise Unavailable("there is no journal on this machine; start systemd-journald or give /dev/kmsg")


def _system_files() -> tuple[list[Path], bool]:
    """Return the machine's journal files, and whether there are folders of journals that may not be read."""
    files: list[Path] = []
    hidden = False
    for folder in JOURNALS:
        try:
            machines = list(folder.iterdir())
            hidden |= any(not os.access(machine, os.R_OK | os.X_OK) for machine in machines)
            files += (file for machine in machines for file in machine.glob("system*.journal"))
        except FileNotFoundError:
            continue
        except PermissionError:
            hidden = True
    return files, hidden


def _one(value: Any) -> Any:
    """Return the last value of a field, which may occur more than once in an entry."""
    return value[-1] if isinstance(value, list) and value else value


def _text(value: Any) -> str | None:
    value = _one(value)
    if isinstance(value, bytes):  # Text that is not UTF-8
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None


def open_reader(*, from_start: bool = False) -> Reader:
    """Return a reader of the journal if it can be read, else of /dev/kmsg.

    If neither can be read, raises PermissionDenied if a permission is missing, otherwise Unavailable, with
    both reasons.
    """
    reasons: list[HonedError] = []
    try:
        return JournalReader(from_start=from_start)
    except ImportError:
        reasons.append(Unavailable("the journal needs systemd-python; install python3-systemd"))
    except (PermissionDenied, Unavailable) as error:
        reasons.append(error)
    try:
        return KmsgReader(from_start=from_start)
    except (PermissionDenied, Unavailable) as error:
        reasons.append(error)
    denied = [reason for reason in reasons if isinstance(reason, PermissionDenied)]
    kind = PermissionDenied if denied else Unavailable
    raise kind("the kernel log cannot be read: " + "; ".join(str(reason) for reason in reasons))
