"""Who may do what."""

from __future__ import annotations

import os
import socket

import pytest

from honed.daemon.transport.access import Credentials, Policy, current_policy, identify
from honed.protocol.errors import PermissionDenied
from honed.protocol.methods import METHODS, Permission

POLICY = Policy(own_uid=990, gids={"honed": 500, "honed-admin": 501, "honed-hints": 502})
LONELY = Policy(own_uid=1000, gids={"honed": None, "honed-admin": None, "honed-hints": None})
NONE = {Permission.ANYONE}
INFER = {Permission.ANYONE, Permission.INFER, Permission.OWN}
HINTS = {Permission.ANYONE, Permission.HINTS}
ALL = set(Permission)


def peer(uid: int, *gids: int) -> Credentials:
    return Credentials(pid=1, uid=uid, gids=frozenset(gids))


def rights_of(policy: Policy, who: Credentials) -> set[Permission]:
    return {right for right in Permission if policy.allows(who, right)}


@pytest.mark.parametrize(
    ("who", "rights"),
    [
        (peer(0), ALL),
        (peer(990), ALL),
        (peer(1000, 501), ALL),
        (peer(1000, 1000, 500, 501), ALL),
        (peer(1000, 1000, 500), INFER),
        (peer(1000, 502), HINTS),
        (peer(1000, 500, 502), INFER | HINTS),
        (peer(1000, 1000), NONE),
        (peer(1000), NONE),
        (peer(65534, 65534), NONE),
    ],
)
def test_rights(who: Credentials, rights: set[Permission]) -> None:
    assert rights_of(POLICY, who) == rights


def test_without_the_groups_only_the_service_and_root_may() -> None:
    assert rights_of(LONELY, peer(1000)) == ALL
    assert rights_of(LONELY, peer(0)) == ALL
    assert rights_of(LONELY, peer(1001, 0, 500)) == NONE


def test_refusals_say_what_would_help() -> None:
    POLICY.check(peer(1000, 500), Permission.INFER, "ModelInfer")
    with pytest.raises(PermissionDenied, match=r"sudo usermod -aG honed-admin 54321'"):
        POLICY.check(peer(54321, 500), Permission.CHANGE, "RepositoryModelLoad")
    with pytest.raises(PermissionDenied, match=r"sudo usermod -aG honed 54321'"):
        POLICY.check(peer(54321), Permission.INFER, "ModelInfer")
    with pytest.raises(PermissionDenied, match=r"sudo usermod -aG honed-hints 54321'"):
        POLICY.check(peer(54321, 500), Permission.HINTS, "HintsImport")
    with pytest.raises(PermissionDenied, match="there is no group honed here"):
        LONELY.check(peer(54321), Permission.INFER, "ModelInfer")


def test_which_methods_need_which_right() -> None:
    free = {name for name, method in METHODS.items() if method.right is Permission.ANYONE}
    assert free == {"ServerLive", "ServerReady", "ServerMetadata"}
    for name in ("ModelExport", "RepositoryModelLoad"):
        assert METHODS[name].right is Permission.CHANGE
    assert METHODS["RepositoryModelUnload"].right is Permission.OWN
    hints = {name for name, method in METHODS.items() if method.right is Permission.HINTS}
    assert hints == {"HintsExport", "HintsImport"}
    for name in ("ModelInfer", "ModelMetadata", "RepositoryIndex", "SystemSharedMemoryRegister"):
        assert METHODS[name].right is Permission.INFER


def test_a_peer_is_known_by_its_socket() -> None:
    one, other = socket.socketpair()
    with one, other:
        found = identify(one)
    assert (found.pid, found.uid) == (os.getpid(), os.getuid())
    assert found.gids == {os.getgid(), *os.getgroups()}
    assert rights_of(current_policy(os.getuid()), found) == ALL
