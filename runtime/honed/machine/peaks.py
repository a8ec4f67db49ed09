"""Measures a device's peaks once and stores them; measures again if the stored ones are unreliable.

docs/devices.md says how they are measured and when again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

from honed.protocol.errors import HonedError, NotFound, ProfileError
from honed.protocol.strict import to_plain

from . import microbench, roofline
from .devices import Device
from .files import replacing
from .profile import DevicePeaks, DeviceProfile

# Seconds between measurements on a machine that is always busy, so that not every start of a worker measures.
AGAIN_SECONDS = 600.0
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
    profile = replace(device.profile, peaks=roofline.higher(kept, found) if kept else found)
    keep(profile, cache_dir)
    return profile


def has_stored(device: Device, cache_dir: str | os.PathLike[str]) -> bool:
    """Return whether stored peaks exist that `load_or_measure` returns without measuring."""
    path = _path(device.profile, cache_dir)
    kept = _load_stored(path, device.profile)
    return kept is not None and not why_outdated(kept, _age(path))


def why_outdated(kept: DevicePeaks, age: float) -> str:
    """Return why peaks stored `age` seconds ago must be measured again; "" if they need not be."""
    if roofline.busy(kept) and age >= AGAIN_SECONDS:
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
    both = roofline.higher(kept, profile.peaks) if kept else profile.peaks
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
