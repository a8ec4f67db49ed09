"""Several users in one process: a socket's peer is who its process is at the moment of `connect`."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from honed.runtime import Client
from honed.runtime.client import SocketLink
from tests.daemon.raw import Raw

GROUP = 60_999  # called "honed" in the daemon's own /etc/group
ADMINS = 60_998
HINTS = 60_997
ROOT, HONEST, METER, GREEDY, OTHER = 0, 60_001, 60_002, 60_003, 60_004
HUB = 60_005  # who is in honed-hints, too
GROUP_FILE = f"root:x:0:\nhoned:x:{GROUP}:\nhoned-admin:x:{ADMINS}:\nhoned-hints:x:{HINTS}:\n"
_lock = threading.Lock()


def with_groups(folder: Path) -> tuple[str, ...]:
    """What runs a daemon in a mount namespace whose /etc/group has honed's groups; () where it cannot."""
    group = folder / "group"
    group.write_text(GROUP_FILE)
    script = f'mount --bind {group} /etc/group && exec "$@"'
    command = ("unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh")
    tried = subprocess.run([*command, "true"], check=False, capture_output=True)
    return () if tried.returncode else command


@contextmanager
def acting(uid: int) -> Iterator[None]:
    """Be this user, of the group that may infer, where this process may choose."""
    if os.getuid() != 0 or uid == ROOT:
        yield
        return
    with _lock:
        group, others = os.getegid(), os.getgroups()
        os.setgroups([HINTS] if uid == HUB else [])
        os.setegid(GROUP)
        os.seteuid(uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(group)
            os.setgroups(others)


class UserClient(Client):
    """A client whose connections are a given user's."""

    def __init__(self, path: Path | str, uid: int, *, timeout: float = 60.0) -> None:
        super().__init__(path, timeout=timeout)
        self._uid = uid

    def _ensure_link(self) -> SocketLink:
        with acting(self._uid):
            return super()._ensure_link()


def raw(path: Path, uid: int = ROOT) -> Raw:
    """A connection without manners."""
    with acting(uid):
        return Raw(path)


def peer_pid(connected: socket.socket) -> int:
    """Who listens at the other end."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid: int = struct.unpack("iII", credentials)[0]
    return pid
