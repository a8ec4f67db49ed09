"""Measures a device's peaks once and stores them; measures again if the stored ones are unreliable.

docs/devices.md says how they are measured and when again. `survey` examines a device in a process of its own,
as drivers keep memory that they once took, crash and hang:

python -m honed.machine.peaks SPEC CACHE_DIR [again]

prints JSON maps on its original stdout, each on a line: the device without its peaks, then with them. What
drivers print goes to its stderr.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from honed.process.children import answering, python, run
from honed.protocol.errors import (
    DeviceError,
    HonedError,
    NotFound,
    ProfileError,
    error_from_map,
    error_to_map,
)
from honed.protocol.strict import Map, to_plain

from . import microbench
from .devices import Device, select
from .files import replacing
from .profile import DevicePeaks, DeviceProfile, higher_peaks, measured_while_busy

# Seconds between measurements on a machine that is always busy, so that not every start of a worker measures.
AGAIN_SECONDS = 600.0
SECONDS = 120.0  # Seconds for finding the device and measuring its peaks
_log = logging.getLogger(__name__)


def load_or_measure(
    device: Device, cache_dir: str | os.PathLike[str], *, again: bool = False
) -> DeviceProfile:
    """Return the device's profile with its peaks, from a file below `cache_dir` or else measured.

    Measuring takes a few seconds, and stores the peaks in that file, named by device and driver version.
    Measures again if the file is damaged or `why_outdated`, or with `again` in any case, and keeps the best
    of both. Raises DeviceError if a kernel fails or its figures are impossible.
    """
    path = _path(device.profile, cache_dir)
    kept = _load_stored(path, device.profile)
    if kept is not None and not again:
        why = why_outdated(kept, _age(path))
        if not why:
            return replace(device.profile, peaks=kept)
        _log.info("the peaks of %s are measured again: %s", device.spec, why)
    found = measure(device)
    profile = replace(device.profile, peaks=higher_peaks(kept, found) if kept else found)
    keep(profile, cache_dir)
    return profile


def has_stored(device: Device, cache_dir: str | os.PathLike[str]) -> bool:
    """Return whether stored peaks exist that `load_or_measure` returns without measuring."""
    path = _path(device.profile, cache_dir)
    kept = _load_stored(path, device.profile)
    return kept is not None and not why_outdated(kept, _age(path))


def why_outdated(kept: DevicePeaks, age: float) -> str:
    """Return why peaks stored `age` seconds ago must be measured again; "" if they need not be."""
    if measured_while_busy(kept) and age >= AGAIN_SECONDS:
        return f"others took {100 * (kept.busy or 0):.0f} % of the CPUs while they were measured"
    return ""


def keep(profile: DeviceProfile, cache_dir: str | os.PathLike[str]) -> None:
    """Store a profile's peaks below `cache_dir` for `load_or_measure`; log a warning if that fails."""
    path = _path(profile, cache_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(profile.dumps().encode())
    except (OSError, HonedError) as error:
        _log.warning("the measured peaks were not kept: %s", error)


def keep_higher(profile: DeviceProfile, cache_dir: str | os.PathLike[str]) -> None:
    """Store those of a profile's peaks that are above the stored ones."""
    if profile.peaks is None:
        return
    kept = _load_stored(_path(profile, cache_dir), profile)
    both = higher_peaks(kept, profile.peaks) if kept else profile.peaks
    if both != kept:
        keep(replace(profile, peaks=both), cache_dir)


def measure(device: Device) -> DevicePeaks:
    """Measure the peaks of `device` now."""
    return microbench.measure(device)


def _path(profile: DeviceProfile, cache_dir: str | os.PathLike[str]) -> Path:
    name = hashlib.sha256(repr(sorted(to_plain(profile.identity).items())).encode()).hexdigest()[:32]
    return Path(cache_dir) / "peaks" / f"{name}.toml"


def _age(path: Path) -> float:
    """Return the seconds since a file was written; 0 if it is gone."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return 0.0


def _load_stored(path: Path, profile: DeviceProfile) -> DevicePeaks | None:
    try:
        kept = DeviceProfile.load(path)
    except NotFound:
        return None
    except ProfileError as error:
        _log.warning("the kept peaks are measured again: %s", error)
        return None
    return kept.peaks if kept.identity == profile.identity else None


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
        profile = load_or_measure(device, cache_dir, again=again)
    except DeviceError as error:
        no_peaks = f"the device's peaks cannot be measured: {error}"
    yield {"spec": device.spec, "profile": profile.to_dict(), "no_peaks": no_peaks}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
