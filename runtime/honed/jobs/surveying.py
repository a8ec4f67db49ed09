"""Examines a device in a process of its own, as drivers keep memory that they once took, crash and hang.

python -m honed.jobs.surveying SPEC CACHE_DIR [again]

It prints JSON maps on its original stdout, each on a line: the device without its peaks, then with them. What
drivers print goes to its stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from honed.machine import peaks
from honed.machine.devices import Device, select
from honed.machine.profile import DeviceProfile
from honed.process.children import answering, python, run
from honed.protocol.errors import DeviceError, HonedError, error_from_map, error_to_map
from honed.protocol.strict import Map

SECONDS = 120.0  # Seconds for finding the device and measuring its peaks


@dataclass(frozen=True, slots=True)
class Survey:
    """The device that was found. Its profile has no peaks if they cannot be measured; `no_peaks` is why."""

    spec: str
    profile: DeviceProfile
    no_peaks: str

    def require_peaks(self) -> DeviceProfile:
        """Return the profile with its peaks; raise DeviceError if it has none."""
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
    """Return the device that `spec` names (see `devices.select`), with its peaks.

    The peaks are measured once and kept in `cache_dir`. With `again` they are measured now, and the best of
    both measurements is kept: a peak measured on a busy machine is too low. If the survey takes more than
    `seconds` (None: no limit), a device found by then has no peaks. Raises what `select` raises, and
    DeviceError if the driver ends the process that queries it or shows no device in time.
    """
    program = python(__name__, spec or "", os.fspath(cache_dir), *(("again",) if again else ()))
    answers, death = run(program, seconds=seconds)
    if death.late:
        if not answers:
            raise DeviceError(f"the OpenCL driver did not answer within {seconds:g} s; see `hone doctor`")
        late = f"the device's peaks were not measured within {seconds:g} s: it is too slow, or too busy"
        return replace(_survey(answers[0]), no_peaks=late)
    if death.status != 0 or not answers:
        raise DeviceError(f"the process that looked at the OpenCL device failed ({death}); see `hone doctor`")
    return _survey(answers[-1])


def _survey(answer: Map) -> Survey:
    """Return the survey that the process reported; raise the error that it reported instead."""
    if "error" in answer:
        raise error_from_map(answer["error"])
    return Survey(answer["spec"], DeviceProfile.from_dict(answer["profile"]), answer["no_peaks"])


def main(spec: str, cache_dir: str, *again: str) -> int:
    """Write the device without and then with its peaks, or the error, to the standard output."""
    with answering() as say:
        try:
            for answer in _answers(select(spec or None), cache_dir, again=bool(again)):
                say(answer)
        except HonedError as error:
            say({"error": error_to_map(error)})
    return 0


def _answers(device: Device, cache_dir: str, *, again: bool) -> Iterator[dict[str, object]]:
    profile, no_peaks = device.profile, ""
    yield {"spec": device.spec, "profile": profile.to_dict(), "no_peaks": no_peaks}
    try:
        profile = peaks.load_or_measure(device, cache_dir, again=again)
    except DeviceError as error:
        no_peaks = f"the device's peaks cannot be measured: {error}"
    yield {"spec": device.spec, "profile": profile.to_dict(), "no_peaks": no_peaks}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
