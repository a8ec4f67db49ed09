"""Pulls in a process of their own: `python -m tests.extensions.hub_puller HUB PULLS`.

Prints what they took, and their memory. The service is left out: lines are counted that would go to its file.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from honed.hub import pulling, remote
from honed.hub.memory import HubState, IndexCache
from honed.jobs.events import Imported

from .test_hub_pull import ATTIC, CELLAR, HERE, NOW


def resident() -> int:
    """The most bytes that this process had in memory at once."""
    status = Path("/proc/self/status").read_text()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
    return int(peak) << 10


def main() -> None:
    """Pull so many times from the hub of two boards."""
    store, memory = remote.store(sys.argv[1]), HubState()
    shelf, trusted = IndexCache(store.url), {"attic": ATTIC.public, "cellar": CELLAR.public}

    def take_in(_: str, lines: Iterator[bytes]) -> Imported:
        return Imported(count=sum(1 for _ in lines), merged=0, refused=())

    before, pulls = resident(), []
    for _ in range(int(sys.argv[2])):
        begun = time.monotonic()
        done = pulling.pull(store, trusted, {HERE: "0"}, take_in, memory, shelf, NOW)
        problems = {each.name: each.problem for each in done.sources if each.problem}
        taken = {each.name: each.records for each in done.sources}
        pulls.append({"taken": taken, "problems": problems, "seconds": time.monotonic() - begun})
    print(json.dumps({"pulls": pulls, "before": before, "peak": resident()}))


if __name__ == "__main__":
    main()
