"""Calls in a process that runs models, without a process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from honed.daemon.worker import turns
from honed.daemon.worker.turns import CallUnderWay, Turns
from honed.protocol.peer import RequestReceived
from tests.daemon.running import DEADLINE, wait_for


class Process:
    """Reads what is put, and runs calls until they are let go. Those called `timed` run alone."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []  # calls and their threads
        self.done: list[int] = []
        self.refused: list[int] = []
        self._sent: queue.Queue[RequestReceived | int | None] = queue.Queue()
        self._gates: dict[int, threading.Event] = {}
        self._turns = Turns(self._read, self._answer, self._refuse, self._beside)
        self._thread = threading.Thread(target=self._turns.serve)
        self._thread.start()

    def call(self, number: int, method: str = "run", *, held: bool = False) -> None:
        self._gates[number] = threading.Event()
        if not held:
            self._gates[number].set()
        self._sent.put(RequestReceived(number, method, {}, []))

    def let_go(self, number: int) -> None:
        self._gates[number].set()

    def give_up(self, number: int) -> None:
        self._sent.put(number)

    def end(self) -> None:
        self._sent.put(None)
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()

    def wait(self, *done: int) -> None:
        wait_for(lambda: self.done == list(done), f"{done} to be done, not {self.done}")

    def wait_begun(self, number: int) -> int:
        """The thread that runs a call."""
        return wait_for(lambda: dict(self.begun).get(number), f"{number} to begin")

    def _read(self) -> RequestReceived | None:
        while isinstance(sent := self._sent.get(), int):
            self._turns.end(sent)
        return sent

    def _answer(self, call: CallUnderWay) -> None:
        number = call.request.msgid
        call.ends_by(self._gates[number].set)
        self.begun.append((number, threading.get_ident()))
        assert self._turns.present is call
        self._gates[number].wait(DEADLINE)
        self.done.append(number)

    def _refuse(self, request: RequestReceived) -> None:
        self.refused.append(request.msgid)

    def _beside(self, call: RequestReceived, other: RequestReceived) -> bool:
        return other.method != "timed"


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.end()


def test_calls_run_in_their_order_in_the_thread_that_reads(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_LONG_SECONDS", DEADLINE)  # a busy machine makes any call long
    for number in range(20):
        process.call(number)
    process.wait(*range(20))
    assert len({thread for _, thread in process.begun}) == 1


def test_others_run_beside_a_call_that_takes_long(process: Process) -> None:
    process.call(1, held=True)
    process.call(2)
    process.call(3, held=True)
    process.call(4)
    process.wait(2, 4)
    assert process.wait_begun(1) != process.wait_begun(3)
    process.let_go(3)
    process.wait(2, 4, 3)
    process.let_go(1)
    process.wait(2, 4, 3, 1)
    process.call(5)
    process.wait(2, 4, 3, 1, 5)


def test_what_may_not_run_beside_waits_in_its_order(process: Process) -> None:
    process.call(1, "timed", held=True)
    process.wait_begun(1)
    for number in (2, 3, 4):
        process.call(number)
    process.give_up(3)
    wait_for(lambda: process.refused == [3], "one that waits to be refused")
    assert process.done == []
    process.let_go(1)
    process.wait(1, 2, 4)


def test_a_call_is_told_that_nobody_waits_for_it(process: Process) -> None:
    process.call(1, held=True)
    process.wait_begun(1)
    process.give_up(1)
    process.wait(1)
    process.give_up(1)  # it has ended
    process.call(2)
    process.wait(1, 2)


def test_threads_end_with_the_calls_that_took_long(process: Process) -> None:
    before = threading.active_count()
    for number in range(1, 5):
        process.call(number, held=True)
        process.wait_begun(number)
    for number in range(1, 5):
        process.let_go(number)
    wait_for(lambda: len(process.done) == 4, "all to be done")
    # The one that has begun to read, and the first, which waits for the end.
    wait_for(lambda: threading.active_count() <= before + 1, "threads to end")
