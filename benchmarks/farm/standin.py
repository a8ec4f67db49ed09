"""A stand-in for a board: `python -m benchmarks.farm.standin RECORDING CERTIFICATES URL`.

It measures nothing: it waits as long as a real board took for that candidate, and returns that board's
ruling. The yardstick is the same in all its answers, as if boards had one speed.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from honed.farm import rows
from honed.farm.board import DEPTH, FarmBoard, serve
from honed.valhall.bench import bench_profile

from .recorded import Recording, kept, steady


class StandIn:
    """A `FarmBoard` with recorded times."""

    threads = 1

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._yardstick = steady(recording.rulings.values())

    def greet(self) -> rows.Greeting:
        """Describe a device, the same for all stand-ins."""
        profile = bench_profile("mali-g610").to_dict()
        return rows.Greeting(
            version=rows.VERSION, honed="", host="stand-in", bench="", depth=DEPTH, profile=profile
        )

    def load(self, memory: rows.BoardMemory) -> rows.Answer:
        """Take as long as the board did."""
        time.sleep(self._recording.loading[memory.workload["task"]])
        return rows.BoardReady(rate=0.0)

    def judge(self, trial: rows.FarmTrial) -> rows.Answer:
        """Return the recorded ruling, after the recorded time."""
        ruling = rows.answer(self._recording.rulings[trial.candidate["id"]])
        assert isinstance(ruling, rows.BoardVerdict)
        time.sleep(ruling.verdict["seconds"])
        return replace(ruling, verdict=ruling.verdict | {"yardstick_s": self._yardstick}, faults=())

    def settle(self) -> rows.Answer:
        """Report no faults, as nothing runs."""
        return rows.BoardVerdict(verdict={}, phases={}, faults=())

    def rest(self) -> None:
        """Do nothing: there is no device to leave."""

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


def main(recording: str, certificates: str, url: str) -> None:
    """Serve until the process is ended."""
    board = cast("FarmBoard", StandIn(kept(Path(recording))))
    serve(url, Path(certificates), board, lambda text: print(text, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
