"""Identifies peers, and decides what they may do. The decision is pure; `identify` reads the socket."""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from honed.daemon.store.names import Viewer
from honed.protocol.errors import PermissionDenied
from honed.protocol.methods import Permission

INFER_GROUP = "honed"
CHANGE_GROUP = "honed-admin"
HINTS_GROUP = "honed-hints"
_UCRED = struct.Struct("iII")  # Fields pid, uid, gid: unix(7)
_SO_PEERGROUPS = 59  # From asm-generic/socket.h; Python does not name it
_MAX_OPTION = 1024  # Bytes Python's getsockopt can take: 256 groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The identity of a peer's process when it connected."""

    pid: int
    uid: int
    gids: frozenset[int]


# Groups by the right that they give; the one for changes gives all.
_GROUPS = {
    Permission.INFER: INFER_GROUP,
    Permission.OWN: INFER_GROUP,
    Permission.HINTS: HINTS_GROUP,
    Permission.CHANGE: CHANGE_GROUP,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy of permissions; the `gids` of groups that do not exist on this machine are None."""

    own_uid: int
    gids: Mapping[str, int | None]

    def allows(self, peer: Credentials, right: Permission) -> bool:
        """Return whether a peer has a right: whether it may call methods of that kind."""
        if right is Permission.ANYONE or peer.uid in (0, self.own_uid):
            return True
        return self.gids[_GROUPS[right]] in peer.gids or self.gids[CHANGE_GROUP] in peer.gids

    def viewer(self, peer: Credentials) -> Viewer:
        """Return the peer as a viewer, which decides which models it sees."""
        return Viewer(user=peer.uid, all=peer.uid in (0, self.own_uid))

    def check(self, peer: Credentials, right: Permission, what: str) -> None:
        """Raise PermissionDenied, with a remedy, unless the peer has the right."""
        if self.allows(peer, right):
            return
        group, user = _GROUPS[right], user_name(peer.uid)
        if self.gids[group] is None:
            remedy = f"there is no group {group} here: run as root or as the user of the service"
        else:
            remedy = f"run 'sudo usermod -aG {group} {user}' and log in again"
        raise PermissionDenied(
            f"user {user} may not call {what} because it is not in group {group}; {remedy}"
        )


def current_policy(own_uid: int) -> Policy:
    """Return the policy with the groups of this machine."""
    return Policy(own_uid=own_uid, gids={group: _gid(group) for group in _GROUPS.values()})


def identify(connected: socket.socket) -> Credentials:
    """Return the peer of a Unix socket, from SO_PEERCRED and SO_PEERGROUPS; raise OSError."""
    pid, uid, gid = _UCRED.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Credentials(pid=pid, uid=uid, gids=frozenset((gid, *_groups(connected, uid, gid))))


def _groups(connected: socket.socket, uid: int, gid: int) -> Sequence[int]:
    """Return the peer's groups; those of its user if they are more than Python can read."""
    try:
        packed = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_OPTION)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        return os.getgrouplist(user_name(uid), gid)
    return struct.unpack(f"{len(packed) // 4}I", packed)


def _gid(group: str) -> int | None:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


@functools.lru_cache(maxsize=1024)  # A look-up may query a directory service, and blocks the event loop
def user_name(uid: int) -> str:
    """Return the name of a user, or the uid as text if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
