"""Looks at a device in a process of its own: drivers keep the memory they once took, crash and hang.

python -m honed.runtime.surveying PARENT_PID SPEC CACHE_DIR [again]

It prints one JSON map on the stdout it was given; what drivers print goes to its stderr.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

from . import peaks, profilefile
from .devices import Device, select
from .errors import DeviceError, HonedError
from .offspring import die_with
from .profile import DeviceProfile
from .protocol import error_from_map, error_to_map

SECONDS = 120.0  # for finding the device and measuring its peaks
_MOST_SHOWN = 300  # characters of a driver's last words


@dataclass(frozen=True, slots=True)
class Survey:
    """The device that was found. Its profile has no peaks where they cannot be had; `no_peaks` is why."""

    spec: str
    profile: DeviceProfile
    no_peaks: str

    def measured(self) -> DeviceProfile:
        """The profile with its peaks; raises DeviceError without."""
        if self.profile.peaks is None:
            raise DeviceError(self.no_peaks)
        return self.profile


def survey(
    spec: str | None,
    cache_dir: str | os.PathLike[str],
    *,
    again: bool = False,
    seconds: float | None = SECONDS,
) -> Survey:
    """The device that `spec` names (see `devices.select`), its peaks measured once and kept in `cache_dir`.

    With `again` they are measured now, and the best of both is kept: a peak that was measured while the
    machine was busy is too low. Raises what `select` raises, and DeviceError where the driver ends the
    process that asks it or takes more than `seconds`, if there is such a bound.
    """
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), spec or "", os.fspath(cache_dir)]
    try:
        done = subprocess.run(
            [*command, "again"] if again else command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
            start_new_session=True,  # a Ctrl-C is meant for the parent
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"the OpenCL driver did not answer within {seconds:g} s; see `hone doctor`"
        ) from error
    if done.returncode != 0:
        raise DeviceError(
            f"the process that looked at the OpenCL device {_end(done.returncode)}"
            f"{_last_words(done.stderr)}; see `hone doctor`"
        )
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise error_from_map(answer["error"])
    return Survey(answer["spec"], profilefile.from_dict(answer["profile"]), answer["no_peaks"])


def _end(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _last_words(noise: bytes) -> str:
    lines = [line.strip() for line in noise.decode(errors="replace").splitlines() if line.strip()]
    return f" (it printed: {lines[-1][:_MOST_SHOWN]})" if lines else ""


def main(parent: str, spec: str, cache_dir: str, *again: str) -> int:
    """Answer on stdout."""
    die_with(int(parent))
    with os.fdopen(os.dup(1), "w") as answer_to:
        os.dup2(2, 1)
        try:
            device = select(spec or None)
            json.dump(_answer(device, cache_dir, again=bool(again)), answer_to)
        except HonedError as error:
            json.dump({"error": error_to_map(error)}, answer_to)
    return 0


def _answer(device: Device, cache_dir: str, *, again: bool) -> dict[str, object]:
    profile, no_peaks = device.profile, ""
    try:
        profile = (peaks.measured_again if again else peaks.measured)(device, cache_dir)
    except DeviceError as error:
        no_peaks = f"the device's peaks cannot be measured: {error}"
    return {"spec": device.spec, "profile": profilefile.to_dict(profile), "no_peaks": no_peaks}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
