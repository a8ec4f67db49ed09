"""A device's profile with measured peaks, measured in a child: `python -m honed.tuner.tune.profiling`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from honed.runtime import devices, peaks, profilefile
from honed.runtime.devices import Device
from honed.runtime.errors import DeviceError, HonedError
from honed.runtime.profile import DeviceProfile
from honed.tuner.measure.checks import higher

from .apart import run_apart

_SECONDS = 120.0


def measured_profile(spec: str | None, cache_dir: Path, *, again: bool = False) -> tuple[str, DeviceProfile]:
    """The spec and profile of the device that `spec` names, its peaks measured once and kept.

    With `again` they are measured now, and the best of both is kept: a peak that was measured while the
    machine was busy is too low. Raises DeviceError where there is no such device or it fails.
    """
    command = [sys.executable, "-P", "-m", "honed.tuner.tune.profiling", "--cache-dir", str(cache_dir)]
    if spec:
        command += ["--device", spec]
    if again:
        command.append("--again")
    try:
        done = run_apart(command, _SECONDS)
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"measuring the device took more than {_SECONDS:g} s; see `hone doctor`") from error
    lines = done.stdout.splitlines()
    answer = json.loads(lines[-1]) if lines else {}
    if "profile" in answer:
        return str(answer["spec"]), profilefile.from_dict(answer["profile"])
    last = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
    raise DeviceError(answer.get("failed") or f"measuring the device failed: {last}; see `hone doctor`")


def main() -> int:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(prog="honed.tuner.tune.profiling")
    parser.add_argument("--device")
    parser.add_argument("--cache-dir", required=True)
    parser.add_argument("--again", action="store_true", help="measure even where peaks are kept")
    options = parser.parse_args()
    try:
        device = devices.select(options.device)
        profile = (_again if options.again else peaks.measured)(device, options.cache_dir)
    except HonedError as error:
        print(json.dumps({"failed": str(error)}))
        return 1
    print(json.dumps({"spec": device.spec, "profile": profilefile.to_dict(profile)}))
    return 0


def _again(device: Device, cache_dir: str) -> DeviceProfile:
    now, before = peaks.measure(device), peaks.measured(device, cache_dir)
    assert before.peaks is not None
    profile = replace(before, peaks=higher(before.peaks, now))
    peaks.keep(profile, cache_dir)
    return profile


if __name__ == "__main__":
    sys.exit(main())
