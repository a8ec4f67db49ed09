"""The program: `honed-hub`, which pulls and pushes by itself."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final

from honed.protocol import methods
from honed.protocol.errors import HonedError, Unavailable
from honed.runtime import HONED_VERSION
from honed.runtime.client import Client

from . import machine, schedule
from .machine import HubPlace
from .memory import HubMemory
from .minisign import SecretKey
from .schedule import Deed, ServiceView
from .settings import HubConfig

LOOK_SECONDS: Final = 60.0  # between two looks at the service
_log = logging.getLogger("honed.hub")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to stop; gives the exit status: 0 stopped when told to, 1 failed, 2 misused."""
    options = parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        stream=sys.stderr,
        format="honed-hub: %(message)s",
    )
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    place = HubPlace(options.folder) if options.folder else machine.place(os.environ, os.getuid())
    try:
        chance, begun = _chance(key_of(place)), time.monotonic()
        while True:
            try:
                look(options.socket, place, chance, time.monotonic() - begun)
            except Unavailable as error:  # of the service: what befalls the hub is remembered
                _log.info("waiting: %s", error)
            time.sleep(options.every)
    except HonedError as error:
        print(f"honed-hub: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The program's options."""
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
    """The key of this machine, made where it has none."""
    if not place.key.exists():
        place.prepare()
        made = SecretKey.make()
        made.save(place.key)
        _log.info("made the key %s, %s", made.public.name, made.public)
    return SecretKey.load(place.key)


def look(socket: str | None, place: HubPlace, chance: float, running_s: float) -> Deed | None:
    """Do what is due, and tell what was done. Raises Unavailable where there is no service.

    It has looked for `running_s` seconds. What goes wrong with the hub is remembered, and it is left alone
    for a while.
    """
    with Client(socket) as client:
        settings = HubConfig.of(client.ask(methods.CONFIG_SHOW))
        deed = schedule.due(settings, place.remembered(), _view(client, running_s), time.time(), chance)
        if deed is None:
            return None
        with place.changing() as memory:
            try:
                told = _do(deed, client, settings, place, memory)
            except HonedError as error:
                schedule.failed(memory, f"{deed}: {error}", time.time(), chance)
                wait = memory.retry_s - time.time()
                _log.warning("%s failed, and is tried again in %.0f s: %s", deed, wait, error)
            else:
                schedule.done(memory)
                _log.info("%s", told)
    return deed


def _do(deed: Deed, client: Client, settings: HubConfig, place: HubPlace, memory: HubMemory) -> str:
    key = key_of(place)
    if deed is Deed.PUSH:
        pushed = machine.push(client, key, memory, settings.push_url)
        return f"pushed {pushed.records} records" if pushed.changed else "the hub has all that is here"
    with place.shelved(settings.url) as shelf:
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


def _chance(key: SecretKey) -> float:
    """A number from 0 to 1 that each machine has for itself."""
    return int.from_bytes(key.id, "big") / 2**64


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
