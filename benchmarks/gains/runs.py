"""One tuning run, watched from outside: what the model's total was after how many seconds and trials."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_SHARE = 0.9  # of the gain


class Kind(StrEnum):
    """What a task is made of, by its name."""

    PRODUCT = "product"
    CONVOLUTION = "convolution"
    OTHER = "other"

    @classmethod
    def of(cls, name: str) -> Kind:
        """The kind of a task as TVM names it."""
        if "conv2d" in name:
            return cls.CONVOLUTION
        return cls.PRODUCT if "matmul" in name or "dense" in name else cls.OTHER


@dataclass(frozen=True, slots=True)
class Moment:
    """The estimated time of one inference (us) after so many seconds of the command and so many trials."""

    seconds: float
    trials: int
    total_us: float


@dataclass(slots=True)
class Spent:
    """Trials of the tasks of a kind, and the seconds of their rounds."""

    trials: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """A run as it was watched. The first moment is that of default schedules, when all were timed."""

    moments: list[Moment] = field(default_factory=list)
    spent: dict[Kind, Spent] = field(default_factory=lambda: {kind: Spent() for kind in Kind})

    @property
    def last(self) -> Moment:
        """Where it ended."""
        return self.moments[-1]

    @property
    def near(self) -> Moment:
        """The first moment with 90 % of the run's own gain."""
        before = self.moments[0].total_us
        return self.below(before - _SHARE * (before - self.last.total_us)) or self.last

    def below(self, total_us: float) -> Moment | None:
        """The first moment whose total is not above `total_us`; None where there is none."""
        return next((one for one in self.moments if one.total_us <= total_us * (1 + 1e-9)), None)

    def rate(self, kind: Kind) -> float | None:
        """Candidates a second in rounds of tasks of a kind; None where there was no such round."""
        spent = self.spent[kind]
        return spent.trials / spent.seconds if spent.seconds else None


def within(runs: Iterable[Run]) -> float:
    """The total with 90 % of what the best of the runs gained over the slowest beginning."""
    all_of_them = list(runs)
    before = max(run.moments[0].total_us for run in all_of_them)
    return before - _SHARE * (before - min(run.last.total_us for run in all_of_them))


def tune(model: Path, state: Path, seconds: float, *, tuner: Path | None, device: str | None) -> Run:
    """Tune for `seconds`, with the records and caches of `state`; `tuner` is another installation's folder.

    Raises RuntimeError where the command fails.
    """
    command = [sys.executable, "-m", "honed.tuner", "tune", str(model), "--seconds", str(seconds)]
    command += ["--records", str(state / "records.sqlite"), "--cache-dir", str(state / "cache")]
    command += ["--device", device] if device else []
    path = os.pathsep.join(filter(None, [str(tuner or ""), os.environ.get("PYTHONPATH", "")]))
    begun, watch = time.monotonic(), Watch()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as process:
        assert process.stdout is not None
        event: dict[str, Any] = {}
        for line in process.stdout:
            event = json.loads(line)
            watch.heard(event, time.monotonic() - begun)
    if event.get("event") != "done":
        raise RuntimeError(f"tuning {model.name} failed: {event}")
    return watch.run


class Watch:
    """Makes a run of the events of `honed.tuner tune`."""

    def __init__(self) -> None:
        self.run = Run()
        self._weights: dict[str, int] = {}
        self._kinds: dict[str, Kind] = {}
        self._best: dict[str, float] = {}  # us, by task
        self._trials = 0
        self._round_trials, self._round_at = 0, 0.0

    def heard(self, event: Mapping[str, Any], seconds: float) -> None:
        """An event, so many seconds after the command began."""
        match event["event"]:
            case "tasks":
                self._take(event["tasks"])
                self._round_at = seconds
                self._note(seconds)
            case "trial":
                self._trials += 1
                if event["best_us"] is not None:
                    self._best[event["task"]] = event["best_us"]
                self._note(seconds)
            case "round":
                self._take(event["tasks"])
                spent = self.run.spent[self._kinds[event["task"]]]
                spent.trials += self._trials - self._round_trials
                spent.seconds += seconds - self._round_at
                self._round_trials, self._round_at = self._trials, seconds
                self._note(seconds)

    def _take(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self._weights[row["task"]] = row["weight"]
            self._kinds[row["task"]] = Kind.of(row["name"])
            self._best[row["task"]] = row["best_us"] or 0.0

    def _note(self, seconds: float) -> None:
        total = sum(weight * self._best[task] for task, weight in self._weights.items())
        self.run.moments.append(Moment(seconds, self._trials, total))
