"""What judges the candidates of a session: an OpenCL device, or the bench of one that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from honed.runtime import peaks
from honed.runtime.kernellog import Reader
from honed.runtime.profile import DeviceProfile
from honed.runtime.surveying import survey
from honed.tuner.measure.limits import Limits
from honed.tuner.measure.measurer import Measurer
from honed.tuner.measure.protocol import Begin, Measures
from honed.tuner.valhall.benches import predicted
from honed.tuner.valhall.compiler import ROOT, OfflineCompiler
from honed.tuner.valhall.measurer import AHEAD, YARDSTICK, BenchMeasurer

from .search_child import BATCH
from .sharing import Sharing, sharing


@dataclass(frozen=True, slots=True)
class BenchChoice:
    """A bench by its name (`valhall.benches.BENCHES`), and the root its compiler is in."""

    name: str
    root: Path = ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """`profile` has peaks; `peaks_again` measures them anew, `keep_peaks` those that rose meanwhile.

    `spec` is the device's; None: nothing runs, times are predicted and answers are not looked at.
    `yardstick` is that of the reference speed in seconds; None: it is to be measured. `batch` is how many
    candidates are proposed at once.
    """

    spec: str | None
    profile: DeviceProfile
    measurer: Callable[[Begin], Measures]
    peaks_again: Callable[[], DeviceProfile]
    keep_peaks: Callable[[DeviceProfile], None]
    sharing: Sharing
    yardstick: float | None = None
    batch: int = BATCH


def on_device(device: str | None, cache_dir: Path, limits: Limits, log: Reader | None) -> Instrument:
    """The device of a spec, None: the best there is. Raises DeviceError without one."""
    found = survey(device, cache_dir)
    profile = found.measured()
    beside = sharing(profile.family, len(os.sched_getaffinity(0)))
    return Instrument(
        spec=found.spec,
        profile=profile,
        measurer=lambda begin: Measurer(
            found.spec, profile, limits, kernel_log=log, begin=begin, builders=beside.builders
        ),
        peaks_again=lambda: survey(found.spec, cache_dir, again=True).measured(),
        keep_peaks=lambda raised: peaks.keep_higher(raised, cache_dir),
        sharing=beside,
    )


def on_bench(bench: BenchChoice) -> Instrument:
    """A bench, whose peaks are its profile's. Raises DeviceError where its compiler cannot be used."""
    compiler, profile = OfflineCompiler(bench.root), predicted(bench.name)
    return Instrument(
        spec=None,
        profile=profile,
        measurer=lambda begin: BenchMeasurer(compiler, profile, begin),
        peaks_again=lambda: profile,
        keep_peaks=lambda _: None,
        sharing=Sharing(ahead=True, threads=len(os.sched_getaffinity(0)), builders=0),
        yardstick=YARDSTICK,
        batch=AHEAD,
    )
