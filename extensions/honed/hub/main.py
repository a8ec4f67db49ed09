"""Runs the program `honed-hub`, which pulls and pushes by itself."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from honed.protocol import methods
from honed.protocol.errors import HonedError, Unavailable
from honed.runtime import HONED_VERSION
from honed.runtime.client import Client

from . import machine
from .machine import HubConfig, HubPlace
from .memory import HubState
from .minisign import SecretKey
from .pushing import LASTS

_NIGHT: Final = 20 * 3600.0  # Minimum time between two pushes
_PATIENCE: Final = 4  # Intervals between pulls after which a busy machine pulls, too
_RETRY, _RETRY_MOST = 300.0, 6 * 3600.0  # Wait after a failure, doubled each time, and its maximum
_SPREAD: Final = 0.2  # Share of the interval by which machines differ, so that they do not pull at once
_TOGETHER: Final = 1800.0  # Time over which machines pull that were switched on at the same moment


class HubAction(StrEnum):
    """An action of the program with the hub."""

    PULL = "pull"
    PUSH = "push"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """The state of the service; `trials` are all of tuning's. The program has run for `running_s`."""

    models: frozenset[str]
    trials: int
    idle: bool
    tuning: bool
    running_s: float


def due(
    settings: HubConfig, memory: HubState, view: ServiceView, now: float, chance: float
) -> HubAction | None:
    """Return the action due now; `chance` is a number from 0 to 1, fixed for each machine."""
    if not settings.url or now < memory.retry_s <= now + _RETRY_MOST:  # Beyond: the clock was set back
        return None
    if settings.pull and _pull_due(settings, memory, view, now, chance):
        return HubAction.PULL
    if settings.push and _push_due(memory, view, now):
        return HubAction.PUSH
    return None


def interval(hours: float, chance: float) -> float:
    """Return the seconds between two pulls of this machine."""
    return hours * 3600.0 * (1 + _SPREAD * (chance - 0.5))


def start_delay(hours: float, chance: float) -> float:
    """Return this machine's delay in seconds of a pull due at its start; machines started together differ."""
    return chance * min(_TOGETHER, hours * 3600.0)


def record_failure(memory: HubState, problem: str, now: float, chance: float) -> None:
    """Record a failure, and suspend work with the hub: longer each time, up to six hours.

    The wait is half to all of that, so that machines that lost the hub together return one by one.
    """
    wait = min(_RETRY * 2.0 ** min(memory.failures, 20), _RETRY_MOST) * (1 + chance) / 2
    memory.failures, memory.retry_s, memory.problem = memory.failures + 1, now + wait, problem


def record_success(memory: HubState) -> None:
    """Record that the work with the hub succeeded."""
    memory.failures, memory.retry_s, memory.problem = 0, 0.0, ""


def _pull_due(settings: HubConfig, memory: HubState, view: ServiceView, now: float, chance: float) -> bool:
    if memory.pulled_s is None or now < memory.pulled_s or view.models - set(memory.models):
        return True
    waited, hours = now - memory.pulled_s, interval(settings.hours, chance)
    if waited < hours or view.running_s < start_delay(settings.hours, chance):
        return False
    return view.idle or waited >= _PATIENCE * hours


def _push_due(memory: HubState, view: ServiceView, now: float) -> bool:
    if view.tuning:
        return False  # There is more to push once tuning has ended
    waited = float("inf") if memory.pushed_s is None or now < memory.pushed_s else now - memory.pushed_s
    if view.trials != memory.trials and waited >= _NIGHT:
        return True
    return memory.pushed_s is not None and waited > LASTS / 2  # Else others would find the index expired


LOOK_SECONDS: Final = 60.0  # Time between two looks at the service
_log = logging.getLogger("honed.hub")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until a signal; return the exit status: 0 stopped by a signal, 1 failed, 2 misused."""
    options = parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        stream=sys.stderr,
        format="honed-hub: %(message)s",
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    place = HubPlace(options.folder) if options.folder else machine.place(os.environ, os.getuid())
    try:
        chance = int.from_bytes(key_of(place).id, "big") / 2**64  # Fixed for each machine, by its key
        begun = time.monotonic()
        while True:
            try:
                look(options.socket, place, chance, time.monotonic() - begun)
            except Unavailable as error:  # The service is away; failures of the hub are stored
                _log.info("waiting: %s", error)
            time.sleep(options.every)
    except HonedError as error:
        print(f"honed-hub: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's options."""
    made = argparse.ArgumentParser(
        prog="honed-hub", description="Share what tuning has learned with other machines, by a hub of files."
    )
    made.add_argument("--socket", metavar="PATH", help="the service's socket (or HONED_SOCKET)")
    made.add_argument(
        "--folder", type=Path, metavar="DIR", help=f"where the key is kept (default {machine.SYSTEM})"
    )
    made.add_argument(
        "--every",
        type=float,
        default=LOOK_SECONDS,
        metavar="SECONDS",
        help="between two looks at the service (default %(default)g)",
    )
    made.add_argument("--verbose", action="store_true", help="log more")
    made.add_argument("--version", action="version", version=f"honed-hub {HONED_VERSION}")
    return made


def key_of(place: HubPlace) -> SecretKey:
    """Return the key of this machine; create it if there is none."""
    if not place.key.exists():
        place.prepare()
        made = SecretKey.make()
        made.save(place.key)
        _log.info("made the key %s, %s", made.public.name, made.public)
    return SecretKey.load(place.key)


def look(socket: str | None, place: HubPlace, chance: float, running_s: float) -> HubAction | None:
    """Do the action due, and log its result. Raises Unavailable if there is no service.

    The program has run for `running_s` seconds. A failure of the hub is stored, and the hub left alone for a
    while.
    """
    with Client(socket) as client:
        settings = HubConfig.of(client.ask(methods.CONFIG_SHOW))
        deed = due(settings, place.read_state(), _view(client, running_s), time.time(), chance)
        if deed is None:
            return None
        with place.changing() as memory:
            try:
                sentence = _do(deed, client, settings, place, memory)
            except HonedError as error:
                record_failure(memory, f"{deed}: {error}", time.time(), chance)
                wait = memory.retry_s - time.time()
                _log.warning("%s failed, and is tried again in %.0f s: %s", deed, wait, error)
            else:
                record_success(memory)
                _log.info("%s", sentence)
    return deed


def _do(deed: HubAction, client: Client, settings: HubConfig, place: HubPlace, memory: HubState) -> str:
    key = key_of(place)
    if deed is HubAction.PUSH:
        pushed = machine.push(client, key, memory, settings.push_url)
        return f"pushed {pushed.records} records" if pushed.changed else "the hub has all that is here"
    with place.index_cache(settings.url) as shelf:
        pulled = machine.pull(client, settings, memory, shelf, key.public)
    for source in pulled.sources:
        if source.problem:
            _log.warning("nothing is taken of %s: %s", source.name, source.problem)
    return f"pulled {pulled.added} records, {pulled.held} are held back, {len(pulled.refused)} cannot be used"


def _view(client: Client, running_s: float) -> ServiceView:
    status = client.ask(methods.SERVER_STATUS)
    return ServiceView(
        models=machine.models(client),
        trials=machine.trials(client),
        idle=status.idle.idle,
        tuning=status.lease.holder is not None,
        running_s=running_s,
    )


if __name__ == "__main__":
    sys.exit(main())
