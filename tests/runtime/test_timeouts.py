"""Timeouts wherever one is given: what no limit is, and what is none."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.protocol import methods
from honed.protocol.errors import DeadlineExceeded, InvalidArgument, Unavailable
from honed.runtime import AsyncClient, Client
from honed.runtime.calling.calls import Asking, InferenceBase, infer_call
from honed.runtime.calling.leaseclient import LeaseHolder
from honed.runtime.calling.rpc import limit_of
from honed.runtime.client import SocketLink
from honed.tool.parser import patience
from tests.processes import crowded

NO_LIMIT = [None, math.inf, 1e9, 1e300, 86_400, 10**400, np.float64("inf")]
NO_TIMEOUT = [math.nan, -1, -1.0, -1e-9, -math.inf, -(10**400), "10", b"10", [], np.float32("nan")]
X = {"x": np.zeros(3, np.float32)}


@pytest.mark.parametrize("timeout", NO_LIMIT)
def test_infinity_and_a_day_or_more_are_no_limit(timeout: Any, tmp_path: Path) -> None:
    assert limit_of(timeout) is None
    client, socket = Client(tmp_path / "none", timeout=timeout), tmp_path / "none"
    # Nobody answers: all that is asked is whether the number can be used at all.
    for use in (client.live, lambda: client.infer("m", X, timeout=timeout)):
        with pytest.raises(Unavailable):
            use()
    with pytest.raises(Unavailable):
        client.profile("m", timeout=timeout)

    async def asked() -> None:
        asynchronous = AsyncClient(socket, timeout=timeout)
        with pytest.raises(Unavailable):
            await asynchronous.infer("m", X, timeout=timeout)
        with pytest.raises(Unavailable):
            await asynchronous.ask(methods.SERVER_LIVE, timeout=timeout)

    asyncio.run(asked())
    assert LeaseHolder(1.0, socket=socket, timeout=timeout).timeout == math.inf


@pytest.mark.parametrize("timeout", NO_TIMEOUT)
def test_what_is_no_time_is_said(timeout: Any, tmp_path: Path) -> None:
    client = Client(tmp_path / "none")
    uses: list[Callable[[], object]] = [
        lambda: Client(timeout=timeout),
        lambda: AsyncClient(timeout=timeout),
        lambda: LeaseHolder(1.0, timeout=timeout),
        lambda: LeaseHolder(1.0).wait_until_granted(timeout),
        lambda: client.infer("m", X, timeout=timeout),
        lambda: asyncio.run(AsyncClient(tmp_path / "none").infer("m", X, timeout=timeout)),
    ]
    for use in uses:
        with pytest.raises(InvalidArgument, match=r"timeout is .*; give seconds, 0 or more, or infinity"):
            use()


@pytest.mark.parametrize(
    ("timeout", "travels"),
    [(None, methods.MAX_TIMEOUT_US), (0.0, 1), (1e-9, 1), (1.5, 1_500_000)],
)
def test_the_service_is_told_of_a_limit_that_it_takes(timeout: float | None, travels: int) -> None:
    client, call = InferenceBase("/none"), infer_call("m", X, None, {}, Asking())
    whole = next(client._send("like", call, [], timeout))
    assert whole.params.parameters.timeout == travels
    client._known["like"], call.number = call, 1
    assert next(client._send("like", call, [], timeout)).plain()["timeout"] == travels


@pytest.mark.parametrize("text", ["nan", "-1", "0", "-inf", "soon", ""])
def test_the_command_line_says_what_is_no_time(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="positive number of seconds"):
        patience(text)


def test_the_command_line_takes_infinity() -> None:
    assert [limit_of(patience(text)) for text in ("inf", "1e9", "30")] == [None, None, 30]


def test_a_write_to_a_service_that_reads_nothing_ends(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)
        link = SocketLink(path, 0.05)
        with pytest.raises(Unavailable):
            link.send("ModelInfer", {"raw_input_contents": [bytes(8 << 20)]}, ())
        assert not link.usable()


def test_a_client_waits_while_as_many_connect_as_may_wait(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def go() -> bytes:
        with crowded(path) as server:
            async with AsyncClient(path, timeout=0.1) as client:
                with pytest.raises(DeadlineExceeded):
                    await client.live()
            asking = asyncio.ensure_future(AsyncClient(path).live())
            await asyncio.sleep(0.05)
            while not (heard := await asyncio.to_thread(_first_bytes, server)):
                pass
            asking.cancel()
            return heard

    assert b"ServerLive" in asyncio.run(go())


def _first_bytes(server: socket.socket) -> bytes:
    """What the next one to connect sends within a while."""
    with server.accept()[0] as connected:
        connected.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            return connected.recv(1000)
        return b""
