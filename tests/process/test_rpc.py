"""Typed calls to a child: they come as they went, in their order, and its death tells its last words."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from honed.process import aio
from honed.process.rpc import ChildCrashed, RpcChild
from honed.protocol import strict
from honed.protocol.errors import NotFound, Unavailable
from tests.daemon.raw import packed

from .answering import PROGRAM, Add, Fail, Hang, Read, Tick


@pytest.fixture
def child(tmp_path: Path) -> Iterator[RpcChild]:
    made = RpcChild(PROGRAM, log=tmp_path / "log")
    yield made
    made.kill()


def test_calls_are_answered_in_their_order_and_what_is_told_is_not(child: RpcChild) -> None:
    child.tell(Add(number=1))
    assert child.call(Add(number=2), seconds=60) == 3
    child.begin(Add(number=3))
    child.begin(Read())
    assert child.answer(Add, 60) == 6
    assert child.answer(Read, 60) is None


def test_descriptors_come_along(child: RpcChild) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(b"some bytes")
        file.seek(0)
        assert child.call(Read(), [file.fileno()], seconds=60) == "some bytes"


def test_an_error_is_answered_and_the_child_goes_on(child: RpcChild, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is none"):
        child.call(Fail(asked=True), seconds=60)
    assert child.call(Add(number=1), seconds=60) == 1
    assert (tmp_path / "log").read_text() == "a driver speaks\n"


def test_a_child_that_dies_tells_its_last_words(child: RpcChild) -> None:
    with pytest.raises(ChildCrashed, match="status 1; it said last: ArithmeticError: not foreseen") as ended:
        child.call(Fail(asked=False), seconds=60)
    assert ended.value.phase == "start"
    assert not psutil.pid_exists(child.pid)


def test_a_child_that_was_killed_is_told_of_when_it_is_asked(child: RpcChild) -> None:
    os.kill(child.pid, signal.SIGKILL)
    child.begin(Add(number=1))
    child.tell(Add(number=1))
    with pytest.raises(ChildCrashed) as ended:
        child.answer(Add, 60)
    assert ended.value.death.killed


def test_a_phase_may_take_its_own_seconds(child: RpcChild) -> None:
    assert child.call(Add(number=0), seconds=60) == 0  # it has started
    phases: list[str] = []
    with pytest.raises(ChildCrashed, match=r"took more than 0\.05 s") as ended:
        child.call(Hang(phases=(60.0, 0.05)), seconds=60, on_phase=phases.append)
    assert phases == ["may take 60 s", "may take 0.05 s"]
    assert ended.value.phase == phases[-1]
    assert ended.value.death.late


def test_a_child_that_says_what_it_should_not_is_ended(child: RpcChild) -> None:
    child.begin(Read())
    with pytest.raises(ChildCrashed):
        child.answer(Add, 60)  # which is a number
    assert not psutil.pid_exists(child.pid)


def test_a_child_that_answers_nobody_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        for msgid, call in enumerate((Add(number=1), Fail(asked=True), Tick())):
            ours.sendall(packed(msgid, call.method, strict.to_plain(call)))
        ours.close()  # the calls stay to be read
        fd = theirs.fileno()
        ended = subprocess.run(
            [*PROGRAM, str(fd)], pass_fds=[fd], capture_output=True, text=True, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, "a driver speaks\n")


def test_a_program_that_is_not_there_is_an_error_and_leaves_no_socket() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ChildCrashed, match=r"status (1|127)$"):
        RpcChild(["/no/such/program"]).call(Add(number=1), seconds=60)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_a_loop_asks_the_same_child() -> None:
    async def go() -> tuple[int, str]:
        lost = Unavailable("it is gone")
        child, link = await aio.spawn_rpc(PROGRAM, lost=lambda: lost)
        try:
            added = Add.decode(await aio.begin(link, Add(number=2)))
            with pytest.raises(Unavailable, match="it is gone"):
                await aio.begin(link, Fail(asked=False))
            return added, str(await child.wait())
        finally:
            link.fail(lost)
            await child.end()

    assert asyncio.run(go()) == (2, "it ended with status 1")
