"""Calls to boards over a real Dask farm: what a board does that does not answer."""

from __future__ import annotations

import os
import signal

import pytest

from honed.farm import boards
from honed.farm.boards import DaskBoards
from tests.daemon.running import wait_for

from .running import RunningFarm

pytestmark = pytest.mark.opencl


def test_an_answer_that_is_lost_with_its_board_holds_nobody_up(
    farm: RunningFarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The board has answered, and is gone before the answer was fetched: Dask waits for it to come back."""
    killed = farm.board("--alone")
    called = DaskBoards(farm.url, farm.certificates / "pc")
    [address] = called.present()
    number = called.greet(address)
    [future] = called._calls[number]
    wait_for(lambda: future.status == "finished", "an answer")
    killed.kill()
    monkeypatch.setattr(boards, "_ANSWER_SECONDS", 0.5)
    came = called.next_answer(60.0)
    assert came is not None
    assert (came.number, came.data) == (number, None)
    assert "lost" in came.why
    called.close()


def test_a_board_that_takes_nothing_holds_nobody_up(
    farm: RunningFarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dask itself waits for half a minute, or longer, by its version."""
    stuck = farm.board("--alone")
    called = DaskBoards(farm.url, farm.certificates / "pc")
    [address] = called.present()
    monkeypatch.setattr(boards, "_SEND_SECONDS", 0.5)
    os.kill(stuck.process.pid, signal.SIGSTOP)
    try:
        number = called.load(address, b"a task's memory")
        assert called.next_answer(0.2) is None
    finally:
        os.kill(stuck.process.pid, signal.SIGCONT)
    came = called.next_answer(60.0)
    assert came is not None
    assert came.number == number
    called.close()
