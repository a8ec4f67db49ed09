"""The records of the service's tuning, over its socket: out as lines, and in."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from honed.jobs.events import Imported, from_map
from honed.protocol import methods
from honed.protocol.arrivals import close_all
from honed.protocol.device import DeviceIdentity
from honed.protocol.errors import HonedError, Internal, Unavailable
from honed.protocol.params import TunerRunParams
from honed.runtime.client import Client


def devices(client: Client) -> dict[DeviceIdentity, str]:
    """The GPUs, and what else it tunes for, with their specs. Raises Unavailable while there is none."""
    found = client.ask(methods.SERVER_STATUS).devices
    here = {each.device: each.spec for each in found if each.engine == "gpu" and each.device is not None}
    if not here:
        raise Unavailable("the service has no device yet; try again")
    return here


def lines(client: Client, *, best: bool) -> Iterator[dict[str, Any]]:
    """All records with a verdict, or with `best` the fastest of each task."""
    _, descriptors = client.run_tuner(TunerRunParams(command="export", best=best or None))
    try:
        if len(descriptors) != 1:
            raise Internal("the service sent no records; compare versions")
        with open(descriptors.pop(), "rb") as file:
            for line in file:
                yield json.loads(line)
    finally:
        close_all(descriptors)


def take_in(client: Client, device: str, given: Iterable[bytes]) -> Imported:
    """Have the service take in such lines of a device, by its spec; raises what it answers."""
    with tempfile.TemporaryFile(prefix="honed-hub-") as file:
        file.writelines(given)
        file.flush()
        file.seek(0)
        told, _ = client.run_tuner(
            TunerRunParams(command="import", device=device), descriptors=[os.dup(file.fileno())]
        )
    event = from_map(methods.TUNER_RUN.result_of(told).event, Imported)
    if isinstance(event, Imported):
        return event
    if isinstance(event, HonedError):
        raise event
    raise Internal(f"the service answered with {type(event).__name__.lower()}; compare versions")
