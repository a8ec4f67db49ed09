"""Notifies systemd, and configures logging; without systemd, it logs to standard error only."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from honed.protocol.errors import InvalidArgument, Unavailable

_log = logging.getLogger(__name__)


class Systemd:
    """The service manager that started this process, if one did (sd_notify(3), sd_listen_fds(3))."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Connect to systemd; raise Unavailable if it started this process and systemd-python is missing."""
        self._notifies = bool(environment.get("NOTIFY_SOCKET"))
        self._activated = environment.get("LISTEN_PID") == str(os.getpid())
        self._daemon: Any = None
        if self._notifies or self._activated:
            self._daemon = _systemd_python()
        # Without notifications and a passed socket systemd-python is not needed: the journal also reads
        # standard error.
        self.journals = self._daemon is not None and _in_journal(environment)
        pid = environment.get("WATCHDOG_PID", str(os.getpid()))
        period = environment.get("WATCHDOG_USEC", "")
        known = self._notifies and pid == str(os.getpid()) and period.isdigit()
        self.watchdog_seconds = int(period) / 1e6 if known else 0.0

    def tell(self, *lines: str) -> None:
        """Send states such as READY=1 or STATUS=...; do nothing without systemd."""
        if self._notifies:
            self._daemon.daemon.notify("\n".join(lines))

    def reloading(self) -> None:
        """Tell systemd that the configuration is being read again; say READY=1 afterwards (sd_notify(3))."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def socket(self) -> socket.socket | None:
        """Return the listening socket that systemd passed, if any.

        Raises InvalidArgument if it is not the service's.
        """
        if not self._activated:
            return None
        passed = self._daemon.daemon.listen_fds()
        if not passed:
            return None
        if len(passed) > 1 or not self._daemon.daemon.is_socket_unix(passed[0], socket.SOCK_STREAM, 1):
            raise InvalidArgument(
                "systemd passed something else than one listening Unix stream socket; correct honed.socket"
            )
        listening = socket.socket(fileno=passed[0])
        os.set_inheritable(listening.fileno(), False)
        listening.setblocking(False)
        return listening

    def set_up_logging(self, verbose: bool) -> None:
        """Log to the journal if standard error leads there, else to standard error."""
        handler: logging.Handler
        if self.journals:
            handler = self._daemon.journal.JournalHandler(SYSLOG_IDENTIFIER="honed")
        else:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("honed: %(message)s"))
        logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])


def _in_journal(environment: Mapping[str, str]) -> bool:
    """Return whether standard error leads to the journal, as systemd.exec(5) tells.

    The variable alone is not enough, because terminals inherit it.
    """
    try:
        stream = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # Standard error was closed
        return False
    return environment.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


def _systemd_python() -> Any:
    try:
        import systemd.daemon
        import systemd.journal
    except ImportError as error:
        raise Unavailable(
            "honed was started by systemd but cannot talk to it; install python3-systemd (systemd-python)"
        ) from error
    return systemd
