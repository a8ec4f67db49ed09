"""A connection in this process: what it keeps of a request once that is answered."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from honed.daemon.core.queue import service_stops
from honed.daemon.settings.schema import Limits
from honed.daemon.transport.access import Credentials
from honed.daemon.transport.connection import Connection
from honed.daemon.transport.fairness import RoundRobin, Usage
from honed.protocol.errors import InvalidArgument
from honed.protocol.peer import RequestReceived
from tests.daemon.raw import packed

LATE, LATE_BY_FUTURE, ANSWERED, UNDER_WAY = "late", "late by a future", "answered", "under way"
_LARGE = 8 << 20  # bytes: more than a socket takes


class Answering:
    """A handler whose work holds a payload."""

    def __init__(self) -> None:
        self.payloads: list[weakref.ref[Any]] = []

    def answer(self, connection: Connection, asked: RequestReceived) -> Coroutine[Any, Any, Any]:
        return self._work(asked.method)

    async def _work(self, how: str) -> dict[str, Any]:
        payload = np.zeros(_LARGE, np.uint8)
        self.payloads.append(weakref.ref(payload))
        await asyncio.sleep(0)
        if how == LATE:
            raise InvalidArgument("the data is too short")
        if how == LATE_BY_FUTURE:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.set_exception(InvalidArgument("the worker refuses it"))
            await done
        if how == UNDER_WAY:
            await asyncio.Event().wait()
        return {"raw_output_contents": [memoryview(payload)]}

    def overfull(self) -> None:
        raise AssertionError

    def connection_closed(self, connection: Connection) -> None:
        pass


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def _connected(handler: Answering, method: str) -> tuple[Connection, socket.socket]:
    """A connection that was sent one request; the client's end does not block."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    limits, loop = Limits(), asyncio.get_running_loop()
    usage = Usage(limits.max_user_bytes, limits.max_all_bytes)
    peer = Credentials(pid=1, uid=1, gids=frozenset())
    connection = Connection(1, ours, peer, limits, usage, RoundRobin(loop), handler)
    await loop.sock_sendall(theirs, packed(1, method, {}))
    return connection, theirs


@pytest.mark.usefixtures("_no_collector")
@pytest.mark.parametrize("how", [LATE, LATE_BY_FUTURE])
def test_a_refused_request_is_let_go_of_at_once(how: str) -> None:
    """What waits for the collector is in no account: a user could hold many times as much."""
    handler = Answering()

    async def refused() -> list[Any]:
        connection, theirs = await _connected(handler, how)
        with theirs:
            await asyncio.get_running_loop().sock_recv(theirs, 1)
            left = [payload() for payload in handler.payloads]
            connection.close()
            return left

    assert asyncio.run(refused()) == [None]


@pytest.mark.usefixtures("_no_collector")
def test_an_answer_that_nobody_takes_is_gone_with_its_connection() -> None:
    handler = Answering()

    async def closed() -> tuple[bool, list[Any]]:
        connection, theirs = await _connected(handler, ANSWERED)
        with theirs:
            await asyncio.get_running_loop().sock_recv(theirs, 1)
            waits = connection.held >= _LARGE // 2
            connection.close()
            return waits, [payload() for payload in handler.payloads]

    assert asyncio.run(closed()) == (True, [None])


def test_what_is_under_way_when_the_service_stops_is_told_so() -> None:
    """Nobody cancelled it; an app calls again after UNAVAILABLE."""

    async def refused() -> bytes:
        connection, theirs = await _connected(Answering(), UNDER_WAY)
        with theirs:
            while not connection.unanswered:
                await asyncio.sleep(0)
            connection.refuse_all(service_stops())  # before its task has begun
            answer = await asyncio.get_running_loop().sock_recv(theirs, 1000)
            connection.close()
            return answer

    assert b"UNAVAILABLE" in asyncio.run(refused())
