"""Whichever reader of the kernel log this process may use."""

from __future__ import annotations

from typing import Final, Protocol

from honed.protocol.errors import HonedError, PermissionDenied, Unavailable

from .kmsg import KmsgReader
from .record import Record

SETTLE_S: Final = 0.1
"""How long to wait after a kernel finished before "no fault" may be said: kbase reports page faults from a
work queue (measured by others; facts on faults). On newer kbase even then an absent record proves nothing."""


class Reader(Protocol):
    """New records of the kernel log, for an event loop: `read` when `fileno` is readable."""

    lost: int  # records overwritten before they could be read

    def fileno(self) -> int:
        """Descriptor to poll for reading."""

    def read(self) -> list[Record]:
        """Records since the last call, oldest first; never waits."""

    def close(self) -> None:
        """Give its descriptors back."""


def open_reader(*, from_start: bool = False) -> Reader:
    """The journal where it can be read, else /dev/kmsg.

    Raises PermissionDenied where permission is what is missing, otherwise Unavailable, with both reasons.
    """
    reasons: list[HonedError] = []
    try:
        from .journal import JournalReader

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
