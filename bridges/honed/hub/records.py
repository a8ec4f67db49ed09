"""The records of the service's tuning, over its socket: out as lines, and in."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from typing import Any

from honed.jobs.events import Imported
from honed.protocol import methods, strict
from honed.protocol.device import DeviceIdentity
from honed.protocol.errors import Unavailable
from honed.runtime.client import Client


def devices(client: Client) -> dict[DeviceIdentity, str]:
    """The GPUs, and what else it tunes for, with their specs. Raises Unavailable while there is none."""
    found = client.ask(methods.SERVER_STATUS).devices
    here = {each.device: each.spec for each in found if each.engine == "gpu" and each.device is not None}
    if not here:
        raise Unavailable("the service has no device yet; try again")
    return here


def measured(client: Client) -> list[dict[str, Any]]:
    """What others can use of what was measured here: the fastest of each task, and what is in quarantine."""
    with client.export_hints() as file:
        return [json.loads(line) for line in file]


def spread(client: Client) -> list[dict[str, Any]]:
    """What others can learn from: fast, slow and refused schedules of each task."""
    with client.export_hints(spread=True) as file:
        return [json.loads(line) for line in file]


def take_in(client: Client, device: str, given: Iterable[bytes]) -> Imported:
    """Have the service take in such hints of a device, by its spec; raises what it answers."""
    with tempfile.TemporaryFile(prefix="honed-hub-") as file:
        file.writelines(given)
        file.flush()
        file.seek(0)
        return strict.like(Imported, client.import_hints(file.fileno(), device=device))
