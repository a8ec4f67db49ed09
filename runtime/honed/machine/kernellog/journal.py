"""Reads the kernel log from systemd's journal, which members of group systemd-journal may read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from systemd import journal

from honed.protocol.errors import PermissionDenied, Unavailable

from .reader import RECORDS_A_READ, LogClock, Record, boot_id, device_name

FOLDERS: Final = (Path("/var/log/journal"), Path("/run/log/journal"))
# File that journald creates when it reads /dev/kmsg: absent in a container whose journal has no kernel
# records.
KERNEL_SEQUENCE: Final = Path("/run/systemd/journal/kernel-seqnum")
FIELD_BYTES: Final = 64 << 10

# Converters that skip systemd-python's dates, so that a record is read in a fraction of the time.
_NUMBERS: Final = ("PRIORITY", "SYSLOG_FACILITY", "_SOURCE_MONOTONIC_TIMESTAMP")
_CONVERTERS: Final[Mapping[str, Any]] = {
    **dict.fromkeys(_NUMBERS, int),
    "_BOOT_ID": bytes.decode,
    "__REALTIME_TIMESTAMP": lambda microseconds: microseconds,
    "__MONOTONIC_TIMESTAMP": lambda stamp: stamp,
    "_SOURCE_REALTIME_TIMESTAMP": bytes.decode,
}


class JournalReader:
    """A reader of the kernel's records in the journal, from its end or with `from_start` from the oldest.

    `path` is a journal file or a folder of them; without it, the machine's journal of this boot. Raises
    PermissionDenied or Unavailable if no kernel record can ever appear there.
    """

    lost = 0  # The journal keeps what it has read

    def __init__(self, path: str | os.PathLike[str] | None = None, *, from_start: bool = False) -> None:
        self._clocks: dict[str, LogClock] = {}
        try:
            self._reader = _open_journal(path)
        except OSError as error:
            raise Unavailable(
                f"{path or 'the journal'} cannot be opened as a journal ({error.strerror or error}); check it"
            ) from error
        try:
            self._reader.add_match(_TRANSPORT="kernel")
            if path is None:
                self._reader.add_match(_BOOT_ID=boot_id())
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
        microseconds, boot = entry["__MONOTONIC_TIMESTAMP"]
        received_s, boot_hex = microseconds * 1e-6, bytes(boot).hex()
        stamp = _one(entry.get("_SOURCE_MONOTONIC_TIMESTAMP"))
        monotonic_s = received_s
        if isinstance(stamp, int):
            clock = self._clocks.setdefault(boot_hex, LogClock())
            clock.note(stamp * 1e-6, received_s)
            monotonic_s = clock.monotonic(stamp * 1e-6)
        return Record(
            message=_text(entry.get("MESSAGE")) or "",
            monotonic_s=monotonic_s,
            realtime_s=entry["__REALTIME_TIMESTAMP"] * 1e-6 - (received_s - monotonic_s),
            priority=_number(entry.get("PRIORITY"), 6),
            facility=_number(entry.get("SYSLOG_FACILITY"), 1),  # Records without it are not journald's
            device=device_name(_text(entry.get("_KERNEL_DEVICE"))),
            boot_id=boot_hex,
        )


def _open_journal(path: str | os.PathLike[str] | None) -> Any:
    if path is None:
        reader = journal.Reader(converters=_CONVERTERS)
    elif Path(path).is_dir():
        reader = journal.Reader(path=os.fspath(path), converters=_CONVERTERS)
    else:
        reader = journal.Reader(files=[os.fspath(path)], converters=_CONVERTERS)
    reader.data_threshold = FIELD_BYTES
    return reader


def _check_visible(reader: Any) -> None:
    """Raise if the kernel's records are hidden: the journal itself would only stay empty."""
    reader.seek_tail()
    if reader.get_previous():
        return
    files, hidden = _system_files()
    if any(os.access(file, os.R_OK) for file in files):
        if KERNEL_SEQUENCE.exists():
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
    for folder in FOLDERS:
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


def _number(value: Any, otherwise: int) -> int:
    value = _one(value)
    return value if isinstance(value, int) else otherwise
