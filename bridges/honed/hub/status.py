"""What is to be said of the hub: what waits there, whose records are taken, and what became of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from honed.protocol import methods
from honed.protocol.errors import InvalidArgument, Unavailable
from honed.protocol.params import HintFigures
from honed.runtime.client import Client

from . import machine
from .machine import HubPlace
from .memory import KeyStanding
from .settings import HubConfig
from .shelf import Shelf


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStatus:
    """`waiting` records are in the hub and were not taken; `problem` is why it cannot be looked at, or "".

    `last_problem` and `retry_seconds` are of honed-hub's last try; `hints` are records taken, by their key.
    """

    url: str
    key: str
    pulled_s: float | None
    pushed_s: float | None
    last_problem: str
    retry_seconds: float
    problem: str
    waiting: int
    sources: tuple[KeyStanding, ...]
    hints: dict[str, HintFigures]


def look(client: Client, settings: HubConfig, place: HubPlace, url: str) -> HubStatus:
    """Look at the hub at `url`, "": at none. Nothing is changed, here or there."""
    memory, own = place.remembered(), place.own()
    told = HubStatus(
        url=url,
        key=str(own) if own else "",
        pulled_s=memory.pulled_s,
        pushed_s=memory.pushed_s,
        last_problem=memory.problem,
        retry_seconds=max(0.0, memory.retry_s - time.time()),
        problem="" if url else "no hub is configured; set hub.url",
        waiting=0,
        sources=memory.sources,
        hints=client.ask(methods.SERVER_STATUS).hints,
    )
    if not url:
        return told
    try:
        shelf = Shelf.load(place.shelf, url)
        looked = machine.pull(client, replace(settings, hold=True), memory, shelf, own)
    except (Unavailable, InvalidArgument) as error:
        return replace(told, problem=str(error))
    return replace(told, waiting=looked.held, sources=tuple(looked.sources))
