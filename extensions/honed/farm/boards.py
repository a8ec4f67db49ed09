"""Connects the machine that searches to the boards of a farm: who is present, calls, and answers."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dask
from distributed import Client, Future

from honed.machine.profile import DeviceIdentity, DeviceProfile, higher_peaks
from honed.protocol.errors import DeviceError, HonedError, Unavailable

from . import board, rows
from .scheduler import SETTINGS, check_address, quiet, security

_CONNECT_SECONDS = 15.0
_ANSWER_SECONDS = 20.0  # Time for fetching an answer: Dask would wait for ever if the board is gone
_SEND_SECONDS = 60.0  # Time for sending a task to a board: Dask would wait for one that does not answer
_WAIT_SECONDS = 30.0  # Time to wait for the first board
_LATER_SECONDS = 2.0  # Time to wait for others, once one has answered


@dataclass(frozen=True, slots=True)
class BoardAnswer:
    """The answer of a board to the call of `number`; `data` is None if the call failed because of `why`."""

    number: int
    data: bytes | None
    why: str = ""


class DaskBoards:
    """The workers of a Dask scheduler, by their addresses; not for several threads.

    Each call goes to one of them, and to no other if that one is gone. It returns the number of its answer.
    """

    def __init__(self, url: str, certificates: Path | None) -> None:
        """Connect to the scheduler at `url`.

        Raises InvalidArgument, NotFound (see `security`), and Unavailable if no scheduler answers.
        """
        quiet()
        url = check_address(url)
        self._settings = dask.config.set(SETTINGS)
        try:
            self._client: Any = Client(
                url, security=security(url, certificates), timeout=_CONNECT_SECONDS, set_as_default=False
            )
        except (OSError, TimeoutError) as error:
            raise Unavailable(
                f"no farm answers at {url} ({error}); start `hone farm scheduler`, and see that the "
                "certificates are of the same authority"
            ) from error
        self._url = url
        self._calls: dict[int, list[Future]] = {}
        self._arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._count = 0

    def present(self) -> frozenset[str]:
        """Return the addresses of all boards; raise Unavailable if the scheduler is gone."""
        try:
            return frozenset(self._client.nthreads())
        except (OSError, TimeoutError, RuntimeError, ValueError, CancelledError) as error:
            raise Unavailable(
                f"the farm's scheduler at {self._url} is gone ({error}); start it again"
            ) from error

    def greet(self, address: str) -> int:
        """Call `board.greet`; return the number of its answer."""
        return self._call(address, board.greet)

    def load(self, address: str, memory: bytes) -> int:
        """Call `board.load`; return the number of its answer.

        The data is sent to the board alone, not with the call.
        """
        sending = self._client.scatter([memory], workers=[address], hash=False, asynchronous=True)
        sent = asyncio.run_coroutine_threadsafe(sending, self._client.loop.asyncio_loop)
        try:
            data = sent.result(_SEND_SECONDS)[0]
        except (OSError, TimeoutError, KeyError, RuntimeError, ValueError, CancelledError):
            sent.cancel()
            return self._call(address, board.load, b"")  # The board is leaving: its answer says so
        number = self._call(address, board.load, data)
        self._calls[number].append(data)
        return number

    def judge(self, address: str, trial: bytes) -> int:
        """Call `board.judge` with a packed trial; return the number of its answer."""
        return self._call(address, board.judge, trial)

    def settle(self, address: str) -> int:
        """Call `board.settle`; return the number of its answer."""
        return self._call(address, board.settle)

    def next_answer(self, seconds: float) -> BoardAnswer | None:
        """Return the next answer of any board; None if none arrives within `seconds`."""
        while True:
            try:
                number = self._arrived.get(timeout=seconds)
            except queue.Empty:
                return None
            kept = self._calls.pop(number, None)
            if kept is not None:
                return self._answer(number, kept[0])

    def give_up(self, number: int) -> None:
        """Stop waiting for the answer of that number."""
        for future in self._calls.pop(number, ()):
            future.cancel()

    def close(self) -> None:
        """Leave the farm; its boards stay."""
        self._calls.clear()
        self._client.close()

    def _call(self, address: str, function: Callable[..., bytes], *arguments: Any) -> int:
        self._count += 1
        number = self._count
        future = self._client.submit(
            function, *arguments, workers=[address], allow_other_workers=False, pure=False, retries=0
        )
        self._calls[number] = [future]
        future.add_done_callback(lambda _: self._arrived.put(number))
        return number

    @staticmethod
    def _answer(number: int, future: Future) -> BoardAnswer:
        if future.status != "finished":
            why = str(future.exception()) if future.status == "error" else str(future.status)
            return BoardAnswer(number, None, why)
        try:
            data = future.result(_ANSWER_SECONDS)
        except (OSError, TimeoutError, CancelledError) as error:
            future.cancel()
            return BoardAnswer(number, None, f"its answer was lost ({error or 'it is gone'})")
        if not isinstance(data, bytes):
            return BoardAnswer(number, None, "it answered something that is no row")
        return BoardAnswer(number, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmChoice:
    """A farm by its scheduler's address, and the boards of it to use.

    `bench` is the device to predict for, "" for boards that measure; `device` is a part of the device's name,
    for a farm that has boards of several.
    """

    url: str
    certificates: Path | None = None
    bench: str = ""
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFarm:
    """A connected farm: its boards, the chosen device's profile, and the candidates accepted at once."""

    boards: DaskBoards
    profile: DeviceProfile
    depth: int


def join(choice: FarmChoice) -> JoinedFarm:
    """Connect to a farm, and wait for a board.

    Raises DeviceError if no board has the device, or there are several devices to choose from, and what
    `DaskBoards` raises.
    """
    boards = DaskBoards(choice.url, choice.certificates)
    try:
        profile, depth = choose_device(_greetings(boards), choice)
    except HonedError:
        boards.close()
        raise
    return JoinedFarm(boards=boards, profile=profile, depth=depth)


def choose_device(greetings: list[rows.Greeting], choice: FarmChoice) -> tuple[DeviceProfile, int]:
    """Return the profile of the one device that fits, and how many candidates its boards accept at once.

    The profile has the best peaks of its boards. Raises DeviceError if no device fits, or several.
    """
    fitting = [g for g in greetings if g.version == rows.VERSION and g.bench == choice.bench]
    profiles = [(DeviceProfile.from_dict(g.profile), g.depth) for g in fitting]
    wanted = (choice.device or "").casefold()
    profiles = [(p, depth) for p, depth in profiles if wanted in p.identity.name.casefold()]
    devices: dict[DeviceIdentity, DeviceProfile] = {}
    for profile, _ in profiles:
        devices[profile.identity] = _better(devices.get(profile.identity), profile)
    if not devices:
        there = ", ".join(sorted({_board_name(g) for g in greetings})) or "nobody"
        raise DeviceError(f"no board of the farm fits; there is {there}: start `hone farm worker` on one")
    if len(devices) > 1:
        names = ", ".join(sorted(f"{i.name} (driver {i.driver_version})" for i in devices))
        raise DeviceError(f"the farm has boards of several devices ({names}); say which with --device")
    (profile,) = devices.values()
    return profile, sum(depth for _, depth in profiles)


def _better(present: DeviceProfile | None, candidate: DeviceProfile) -> DeviceProfile:
    if present is None or present.peaks is None or candidate.peaks is None:
        return present if present is not None and present.peaks is not None else candidate
    return replace(present, peaks=higher_peaks(present.peaks, candidate.peaks))


def _board_name(greeting: rows.Greeting) -> str:
    what = f"the bench of {greeting.bench}" if greeting.bench else "a board"
    return f"{what} on {greeting.host} (honed {greeting.honed})"


def _greetings(boards: DaskBoards) -> list[rows.Greeting]:
    """Return the greetings of all boards present, and of those that join shortly after the first."""
    until = time.monotonic() + _WAIT_SECONDS
    asked: set[str] = set()
    calls: set[int] = set()
    found: list[rows.Greeting] = []
    while time.monotonic() < until:
        present = boards.present()
        calls |= {boards.greet(address) for address in present - asked}
        asked |= present
        came = boards.next_answer(0.5)
        if came is None or came.number not in calls:
            continue
        calls.discard(came.number)
        if came.data:
            if not found:
                until = min(until, time.monotonic() + _LATER_SECONDS)
            found.append(rows.unpack(rows.Greeting, came.data))
            if not calls:
                break
    for number in calls:
        boards.give_up(number)
    return found
