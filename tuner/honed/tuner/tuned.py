"""Recorded schedules and their times, for compiling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tvm import tirx

from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.runtime.origin import Origin, ScheduleSource

from .lower.module import Choose
from .lower.schedule import narrow_indices
from .records import Records, TuningRecord
from .search import traces
from .setup import for_defaults, setup_for
from .valhall.benches import PLATFORM as BENCH


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the records say of a device, driver and compiler: which schedules are best, seconds by task."""

    schedules: Choose
    times: Mapping[str, float]


NOTHING = Recorded(lambda _task, _func: None, MappingProxyType({}))


def recorded(path: Path, profile: DeviceProfile) -> Recorded:
    """All that compiling takes from a file of records."""
    return Recorded(best_schedules(path, profile), _best_times(path, profile))


def best_schedules(path: Path, profile: DeviceProfile) -> Choose:
    """Chooses the fastest right schedule recorded for a task on this device, driver and compiler.

    Where the default schedule was measured to be faster, that one is left in place.
    """
    identity = profile.identity
    setup = setup_for(identity)
    with Records.open(path) as records:
        known = records.defaults(for_defaults(setup, profile.rules.family))
        defaults = {workload: default.seconds for workload, default in known.items()}
        host = records.measured_by
        best = {
            c.workload: c
            for c in records.distil(setup)
            if c.timing is not None and c.timing.fair_s < defaults.get(c.workload, math.inf)
        }

    def choose(task: str, func: tirx.PrimFunc) -> tuple[str, tirx.PrimFunc] | None:
        found = best.get(task)
        if found is None:
            return None
        schedule = traces.apply(found.trace, narrow_indices(func))
        return str(_origin(found, identity, host)), schedule.mod["main"]

    return choose


def _best_times(path: Path, profile: DeviceProfile) -> Mapping[str, float]:
    """What tasks take with the schedules of `best_schedules`, in seconds; none of what was never timed."""
    setup = setup_for(profile.identity)
    with Records.open(path) as records:
        known = records.defaults(for_defaults(setup, profile.rules.family))
        times = {workload: default.seconds for workload, default in known.items()}
        for one in records.distil(setup):
            if one.timing is not None:
                times[one.workload] = min(one.timing.fair_s, times.get(one.workload, math.inf))
    return times


def _origin(found: TuningRecord, identity: DeviceIdentity, host: str) -> Origin:
    name = found.trace_sha256[:12]
    if identity.platform == BENCH:
        return Origin(ScheduleSource.PREDICTED, name, found.way)
    if found.measured_by != host:
        return Origin(ScheduleSource.RECORD, name)
    return Origin(ScheduleSource.MEASURED, name, found.way)
