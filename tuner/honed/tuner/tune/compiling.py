"""Compiles a model in a child, as untrusted models always are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from honed.runtime.errors import DeviceError, ModelRefused

from .apart import run_apart

_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What to compile, and with whose best schedules, None: the default ones.

    `device` is a spec; None: for the machine of the file `profile`, and the answers are not checked. With
    both, `profile` has the device's peaks.
    """

    source: Path
    output: Path
    device: str | None
    precision: str
    shapes: Mapping[str, tuple[int, ...]]
    records: Path | None
    profile: Path | None = None
    calibration: Path | None = None  # as `like`, see `honed.tuner.compile.Request`
    like: Path | None = None


def compile_apart(wanted: Compilation) -> None:
    """Compile; raises ModelRefused with the compiler's reasons, DeviceError where it fails.

    A file that fell back to default rules is refused, too: these schedules were what was wanted.
    """
    command = [sys.executable, "-P", "-m", "honed.tuner", "compile", str(wanted.source)]
    command += ["-o", str(wanted.output), "--precision", wanted.precision]
    command += ["--device", wanted.device] if wanted.device is not None else []
    command += ["--profile", str(wanted.profile)] if wanted.profile is not None else []
    command += ["--calibration", str(wanted.calibration)] if wanted.calibration is not None else []
    command += ["--like", str(wanted.like)] if wanted.like is not None else []
    command += [f"--shape={name}={','.join(map(str, shape))}" for name, shape in wanted.shapes.items()]
    if wanted.records is not None:
        command += ["--records", str(wanted.records)]
    try:
        done = run_apart(command, _SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"compiling took more than {_SECONDS:g} s") from error
    lines = done.stdout.splitlines()
    event = json.loads(lines[-1]) if lines else {}
    if event.get("event") == "done":
        if event["fell_back"]:
            raise ModelRefused(event["fell_back"])
        return
    if event.get("event") == "refused":
        raise ModelRefused(str(event["message"]), tuple(event["reasons"]))
    last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    raise DeviceError(event.get("message") or f"compiling with the best schedules failed: {last}")
