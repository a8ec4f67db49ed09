"""Identifies peers, and decides what they may do. The decision is pure; `identify` reads the socket."""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import socket
import struct
from collections.abc import Sequence
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


_ALL = frozenset(Permission)
_OUTSIDER = frozenset({Permission.ANYONE})
_INFERRING = frozenset({Permission.INFER, Permission.OWN})
_SHARING = frozenset({Permission.HINTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The policy of permissions; a group that does not exist on this machine is None."""

    own_uid: int
    infer_gid: int | None
    change_gid: int | None
    hints_gid: int | None

    def rights(self, peer: Credentials) -> frozenset[Permission]:
        """Return the rights of a peer: the kinds of methods that it may call."""
        if peer.uid in (0, self.own_uid) or self.change_gid in peer.gids:
            return _ALL
        rights = _OUTSIDER
        if self.infer_gid in peer.gids:
            rights |= _INFERRING
        if self.hints_gid in peer.gids:
            rights |= _SHARING
        return rights

    def viewer(self, peer: Credentials) -> Viewer:
        """Return the peer as a viewer, which decides which models it sees."""
        return Viewer(user=peer.uid, all=peer.uid in (0, self.own_uid))

    def check(self, peer: Credentials, right: Permission, what: str) -> None:
        """Raise PermissionDenied, with a remedy, unless the peer has the right."""
        if right in self.rights(peer):
            return
        group, gid = self._group(right)
        user = user_name(peer.uid)
        if gid is None:
            remedy = f"there is no group {group} here: run as root or as the user of the service"
        else:
            remedy = f"run 'sudo usermod -aG {group} {user}' and log in again"
        raise PermissionDenied(
            f"user {user} may not call {what} because it is not in group {group}; {remedy}"
        )

    def _group(self, right: Permission) -> tuple[str, int | None]:
        match right:
            case Permission.CHANGE:
                return CHANGE_GROUP, self.change_gid
            case Permission.HINTS:
                return HINTS_GROUP, self.hints_gid
            case _:
                return INFER_GROUP, self.infer_gid


def current_policy(own_uid: int) -> Policy:
    """Return the policy with the groups of this machine."""
    return Policy(
        own_uid=own_uid,
        infer_gid=_gid(INFER_GROUP),
        change_gid=_gid(CHANGE_GROUP),
        hints_gid=_gid(HINTS_GROUP),
    )


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
