"""From the files of a machine to a tuner's connection: granted when they are quiet, revoked when not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.idle.decision import IdleSettings
from honed.daemon.idle.leasing import Leasing
from honed.daemon.idle.signals import Signals
from honed.daemon.settings.schema import Limits
from honed.daemon.transport.access import identify
from honed.daemon.transport.connection import Connection
from honed.daemon.transport.fairness import RoundRobin, Usage
from honed.protocol import wire
from honed.protocol.decoder import FrameDecoder
from honed.protocol.peer import RequestReceived
from honed.protocol.service import LeaseAsked
from honed.protocol.values import Empty

from . import idle_trees as trees

SETTINGS = IdleSettings(quiet_seconds=0.0, settle_seconds=0.0)
SECONDS = 60.0  # for anything to happen


class Service:
    """What stands behind a connection: the lease's two methods and nothing else."""

    def __init__(self, leasing: Leasing) -> None:
        self._leasing = leasing

    def answer(self, connection: Connection, request: RequestReceived) -> Coroutine[Any, Any, Any]:
        async def ask() -> LeaseAsked | Empty:
            if request.method == "LeaseAsk":
                return self._leasing.ask(connection, request.params["candidate_seconds"])
            self._leasing.release(connection, request.params["lease"])
            return Empty()

        return ask()

    def connection_closed(self, connection: Connection) -> None:
        pass


class Tuner:
    """The other end of a connection of its own."""

    def __init__(self, leasing: Leasing) -> None:
        ours, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._decoder = FrameDecoder()
        turns = RoundRobin(asyncio.get_running_loop())
        Connection(1, ours, identify(ours), Limits(), Usage(1 << 20), turns, Service(leasing))

    async def send(self, method: str, **params: Any) -> wire.Message:
        data = wire.encode(wire.Request(msgid=1, method=method, params=params))
        await asyncio.get_running_loop().sock_sendall(self._socket, data)
        return await self.hear()

    async def hear(self) -> wire.Message:
        async with asyncio.timeout(SECONDS):
            while (message := self._decoder.next_message()) is None:
                self._decoder.feed(await asyncio.get_running_loop().sock_recv(self._socket, 4096))
        return message

    def close(self) -> None:
        self._socket.close()


async def with_the_lease(leasing: Leasing) -> Tuner:
    """A tuner to which it was granted."""
    tuner = Tuner(leasing)
    await tuner.send("LeaseAsk", candidate_seconds=1.0)
    while leasing.lease().state != "granted":
        assert await tuner.hear() == GRANTED
    return tuner


async def watched(leasing: Leasing, story: Coroutine[Any, Any, None]) -> None:
    looking = asyncio.ensure_future(leasing.run())
    try:
        await story
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking


GRANTED = wire.Notification(method="LeaseGranted", params={"lease": 1})


@pytest.mark.parametrize(
    ("quiet", "busy", "signal"),
    [
        (
            trees.zone(5, "gpu-thermal", 60000, {}),
            trees.zone(5, "gpu-thermal", 90000, {}),
            "temperature gpu-",
        ),
        ({"proc/pressure/io": trees.pressure(0)}, {"proc/pressure/io": trees.pressure(55)}, "io pressure"),
        ({}, {"proc/loadavg": "9.00 1 1 1/400 5"}, "load 1.125 per core"),
        (
            {"sys/class/power_supply/b/type": "Battery", "sys/class/power_supply/b/status": "Full"},
            {"sys/class/power_supply/b/status": "Discharging"},
            "power",
        ),
    ],
    ids=["temperature", "pressure", "load", "battery"],
)
def test_a_signal_that_turns_busy_ends_the_lease(
    tmp_path: Path, quiet: dict[str, str], busy: dict[str, str], signal: str
) -> None:
    trees.rk3588_kbase(tmp_path)
    trees.write(tmp_path, quiet)

    async def story() -> None:
        leasing = Leasing(SETTINGS, lambda: "ready", Signals(tmp_path))

        async def tuning() -> None:
            tuner = await with_the_lease(leasing)
            # The tuner's own use of the GPU is no reason to leave.
            gpu = "sys/devices/platform/fb000000.gpu/devfreq/fb000000.gpu/load"
            trees.write(tmp_path, {gpu: "99@1000000000Hz"})
            trees.write(tmp_path, busy)
            revoked = await tuner.hear()
            assert isinstance(revoked, wire.Notification)
            assert (revoked.method, revoked.params["lease"]) == ("LeaseRevoked", 1)
            assert revoked.params["why"].startswith(signal)
            trees.write(tmp_path, {gpu: "0@300000000Hz"})
            await tuner.send("LeaseRelease", lease=1)
            assert leasing.lease().release.count == 0, "no request was kept waiting"
            tuner.close()

        await watched(leasing, tuning())

    asyncio.run(story())


def test_settings_that_do_not_allow_it_end_the_lease_at_once(tmp_path: Path) -> None:
    """Before the machine is read again: whoever asks just then gets none."""
    trees.rk3588_kbase(tmp_path)

    async def story() -> None:
        leasing = Leasing(SETTINGS, lambda: "ready", Signals(tmp_path))

        async def tuning() -> None:
            tuner = await with_the_lease(leasing)
            leasing.change(IdleSettings(enabled=False))
            assert leasing.lease().state == "revoking"
            revoked = await tuner.hear()
            assert isinstance(revoked, wire.Notification)
            assert revoked.method == "LeaseRevoked"
            await tuner.send("LeaseRelease", lease=1)
            answer = await tuner.send("LeaseAsk", candidate_seconds=1.0)
            assert isinstance(answer, wire.Response)
            assert (answer.result["granted"], answer.result["why"]) == (
                False,
                "tuning is switched off ([idle] enabled)",
            )
            tuner.close()

        await watched(leasing, tuning())

    asyncio.run(story())


def test_a_driver_that_hangs_ends_the_lease(tmp_path: Path) -> None:
    trees.rk3588_kbase(tmp_path)

    async def story() -> None:
        leasing = Leasing(SETTINGS, lambda: "ready", Signals(tmp_path), patience=0.2)

        async def tuning() -> None:
            tuner = await with_the_lease(leasing)
            hanging = tmp_path / "proc/pressure/io"
            hanging.unlink()
            os.mkfifo(hanging)  # opening it waits for a writer
            revoked = await tuner.hear()
            assert isinstance(revoked, wire.Notification)
            assert "could not be read for 0.2 s" in revoked.params["why"]
            os.close(os.open(hanging, os.O_RDWR))  # the driver comes back; this does not wait for a reader
            hanging.unlink()
            tuner.close()

        await watched(leasing, tuning())

    asyncio.run(story())


def test_a_worker_that_is_not_ready_grants_nothing(tmp_path: Path) -> None:
    trees.rk3588_kbase(tmp_path)

    async def story() -> None:
        state = "starting"
        leasing = Leasing(SETTINGS, lambda: state, Signals(tmp_path))

        async def tuning() -> None:
            nonlocal state
            tuner = Tuner(leasing)
            await tuner.send("LeaseAsk", candidate_seconds=1.0)
            answer = await tuner.send("LeaseAsk", candidate_seconds=1.0)
            assert isinstance(answer, wire.Response)
            assert answer.result["granted"] is False
            state = "ready"
            assert await tuner.hear() == GRANTED
            tuner.close()

        await watched(leasing, tuning())

    asyncio.run(story())


@pytest.mark.parametrize(("quiet", "seconds"), [(0.0, 0.2), (0.5, 0.5), (30.0, 5.0)])
def test_looks_are_as_often_as_the_machine_becomes_idle(quiet: float, seconds: float) -> None:
    leasing = Leasing(IdleSettings(quiet_seconds=quiet), lambda: "ready")
    assert leasing.look_seconds() == seconds
    leasing.change(IdleSettings(quiet_seconds=5.0))
    assert leasing.look_seconds() == 5.0
