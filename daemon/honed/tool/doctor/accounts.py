"""Users and groups of a system, from the passwd and group files beneath its root folder.

Users that only a directory service knows are not in these files; the running user's groups therefore come
from the process itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .readings import Account


@dataclass(frozen=True, slots=True)
class AccountNames:
    """What /etc/passwd and /etc/group say."""

    users: dict[int, tuple[str, int]]  # uid -> name, primary gid
    groups: dict[int, tuple[str, frozenset[str]]]  # gid -> name, members

    def user(self, uid: int) -> str:
        """The name of a user id; the number itself where it has none."""
        return self.users[uid][0] if uid in self.users else str(uid)

    def group(self, gid: int) -> str:
        """The name of a group id; the number itself where it has none."""
        return self.groups[gid][0] if gid in self.groups else str(gid)

    def running(self, uid: int, gids: frozenset[int]) -> Account:
        """The account of a process with these ids."""
        return self._account(self.user(uid), uid, gids)

    def named(self, name: str) -> Account | None:
        """The account of that name as it would log in, None where there is none."""
        for uid, (user, gid) in self.users.items():
            if user == name:
                gids = {gid} | {g for g, (_, members) in self.groups.items() if name in members}
                return self._account(name, uid, frozenset(gids))
        return None

    def has_group(self, name: str) -> bool:
        """Whether the system has a group of that name."""
        return any(group == name for group, _ in self.groups.values())

    def _account(self, name: str, uid: int, gids: frozenset[int]) -> Account:
        groups = {self.group(gid) for gid in gids}
        return Account(name=name, uid=uid, gids=tuple(sorted(gids)), groups=tuple(sorted(groups)))


def read_names(root: Path) -> AccountNames:
    """The users and groups in `root`/etc; malformed lines are passed over, as libc does."""
    users: dict[int, tuple[str, int]] = {}
    for fields in _entries(root / "etc/passwd", 7):
        if fields[2].isdigit() and fields[3].isdigit():
            users.setdefault(int(fields[2]), (fields[0], int(fields[3])))
    groups: dict[int, tuple[str, frozenset[str]]] = {}
    for fields in _entries(root / "etc/group", 4):
        if fields[2].isdigit():
            groups.setdefault(int(fields[2]), (fields[0], frozenset(filter(None, fields[3].split(",")))))
    return AccountNames(users=users, groups=groups)


def _entries(path: Path, width: int) -> list[list[str]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [fields for line in text.splitlines() if len(fields := line.split(":")) == width]
