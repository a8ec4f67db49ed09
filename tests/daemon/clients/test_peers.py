"""Who may do what."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from honed.daemon.transport.access import Credentials, Policy, current_policy, identify
from honed.protocol.errors import PermissionDenied
from honed.protocol.methods import METHODS, Permission
from tests.daemon.running import Service

POLICY = Policy(own_uid=990, infer_gid=500, change_gid=501, hints_gid=502)
NONE = {Permission.ANYONE}
INFER = {Permission.ANYONE, Permission.INFER, Permission.OWN}
HINTS = {Permission.ANYONE, Permission.HINTS}
ALL = set(Permission)


def peer(uid: int, *gids: int) -> Credentials:
    return Credentials(pid=1, uid=uid, gids=frozenset(gids))


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
    assert POLICY.rights(who) == rights


def test_without_the_groups_only_the_service_and_root_may() -> None:
    policy = Policy(own_uid=1000, infer_gid=None, change_gid=None, hints_gid=None)
    assert policy.rights(peer(1000)) == ALL
    assert policy.rights(peer(0)) == ALL
    assert policy.rights(peer(1001, 0, 500)) == NONE


def test_refusals_say_what_would_help() -> None:
    POLICY.check(peer(1000, 500), Permission.INFER, "ModelInfer")
    with pytest.raises(PermissionDenied, match=r"sudo usermod -aG honed-admin 54321'"):
        POLICY.check(peer(54321, 500), Permission.CHANGE, "RepositoryModelLoad")
    with pytest.raises(PermissionDenied, match=r"sudo usermod -aG honed 54321'"):
        POLICY.check(peer(54321), Permission.INFER, "ModelInfer")
    with pytest.raises(PermissionDenied, match=r"sudo usermod -aG honed-hints 54321'"):
        POLICY.check(peer(54321, 500), Permission.HINTS, "HintsImport")
    lonely = Policy(own_uid=1000, infer_gid=None, change_gid=None, hints_gid=None)
    with pytest.raises(PermissionDenied, match="there is no group honed here"):
        lonely.check(peer(54321), Permission.INFER, "ModelInfer")


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
    assert current_policy(os.getuid()).rights(found) == ALL


STRANGER = """
import sys
from honed.runtime import Client
from honed.protocol.errors import PermissionDenied
client = Client(sys.argv[1])
assert client.live()
assert client.metadata()["name"] == "honed"
for call in (client.status, client.models, lambda: client.remove("small"), lambda: client.infer("small", {})):
    try:
        call()
    except PermissionDenied as error:
        print(error)
"""


@pytest.mark.service
@pytest.mark.opencl
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_stranger_is_refused_with_a_reason(service: Service) -> None:
    service.socket.parent.chmod(0o755)
    code = f"import os; os.setgroups([]); os.setgid(54321); os.setuid(54321)\n{STRANGER}"
    # The interpreter's own folders may be closed to others, so everything is imported before becoming one.
    preload = "import honed.runtime.client, honed.runtime.aio, msgpack, numpy\n"
    done = subprocess.run(
        [sys.executable, "-c", preload + code, str(service.socket)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path("/"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("user 54321 may not call" in line for line in lines)
