"""The bench in the place of a device, for a session of tuning."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from honed.jobs import commands
from honed.tuner.tune.opening import Instrument, Sharing

from .benches import predicted
from .compiler import ROOT, OfflineCompiler
from .measurer import AHEAD, YARDSTICK, BenchMeasurer


def instrument(job: commands.Search[Any], _tell: Callable[[str], None]) -> Instrument:
    """A bench, whose peaks are its profile's. Raises DeviceError where its compiler cannot be used."""
    assert job.bench is not None
    compiler, profile = OfflineCompiler(job.bench_root or ROOT), predicted(job.bench)
    return Instrument(
        spec=None,
        answers=False,
        profile=profile,
        measurer=lambda begin: BenchMeasurer(compiler, profile, begin),
        peaks_again=lambda: profile,
        keep_peaks=lambda _: None,
        sharing=Sharing(ahead=True, threads=len(os.sched_getaffinity(0)), builders=0),
        yardstick=YARDSTICK,
        batch=AHEAD,
    )
