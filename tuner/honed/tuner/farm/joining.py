"""Finding out who is in a farm, and which of its boards are of the device to tune for."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from honed.machine import bounds, profilefile
from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.protocol.errors import DeviceError, HonedError

from . import rows
from .boards import DaskBoards

_WAIT_SECONDS = 30.0  # for the first board
_LATER_SECONDS = 2.0  # for others, once one has answered


@dataclass(frozen=True, slots=True, kw_only=True)
class FarmChoice:
    """A farm by its scheduler's address, and what of it is used.

    `bench` is the device to predict for, "" for boards that measure; `device` is a part of the device's name,
    for a farm that has boards of several.
    """

    url: str
    certificates: Path | None = None
    bench: str = ""
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFarm:
    """Its boards, the profile of the device chosen, and how many candidates its boards take at once."""

    boards: DaskBoards
    profile: DeviceProfile
    depth: int


def join(choice: FarmChoice) -> JoinedFarm:
    """Connect, and wait for a board.

    Raises DeviceError where there is none of the device, or several devices to choose from, and what
    `DaskBoards` raises.
    """
    boards = DaskBoards(choice.url, choice.certificates)
    try:
        profile, depth = chosen(_greetings(boards), choice)
    except HonedError:
        boards.close()
        raise
    return JoinedFarm(boards=boards, profile=profile, depth=depth)


def chosen(greetings: list[rows.Greeting], choice: FarmChoice) -> tuple[DeviceProfile, int]:
    """The profile of the one device that fits, with the best peaks of its boards, and what they take at once.

    Raises DeviceError.
    """
    fitting = [g for g in greetings if g.version == rows.VERSION and g.bench == choice.bench]
    profiles = [(profilefile.from_dict(g.profile), g.depth) for g in fitting]
    wanted = (choice.device or "").casefold()
    profiles = [(p, depth) for p, depth in profiles if wanted in p.identity.name.casefold()]
    devices: dict[DeviceIdentity, DeviceProfile] = {}
    for profile, _ in profiles:
        devices[profile.identity] = _better(devices.get(profile.identity), profile)
    if not devices:
        there = ", ".join(sorted({_named(g) for g in greetings})) or "nobody"
        raise DeviceError(f"no board of the farm fits; there is {there}: start `hone farm worker` on one")
    if len(devices) > 1:
        names = ", ".join(sorted(f"{i.name} (driver {i.driver_version})" for i in devices))
        raise DeviceError(f"the farm has boards of several devices ({names}); say which with --device")
    (profile,) = devices.values()
    return profile, sum(depth for _, depth in profiles)


def _better(known: DeviceProfile | None, found: DeviceProfile) -> DeviceProfile:
    if known is None or known.peaks is None or found.peaks is None:
        return known if known is not None and known.peaks is not None else found
    return replace(known, peaks=bounds.higher(known.peaks, found.peaks))


def _named(greeting: rows.Greeting) -> str:
    what = f"the bench of {greeting.bench}" if greeting.bench else "a board"
    return f"{what} on {greeting.host} (honed {greeting.honed})"


def _greetings(boards: DaskBoards) -> list[rows.Greeting]:
    """Of all who are there, and of those who come within a moment."""
    until = time.monotonic() + _WAIT_SECONDS
    asked: set[str] = set()
    calls: set[int] = set()
    found: list[rows.Greeting] = []
    while time.monotonic() < until:
        present = boards.present()
        calls |= {boards.greet(address) for address in present - asked}
        asked |= present
        came = boards.came(0.5)
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
