"""How searching and building share the processor's cores with what is timed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from honed.machine.families import DeviceFamily
from honed.tuner.measure.limits import SPARE_CORES

_MOST_THREADS = 8  # beyond which a batch is too small to gain
MOST_BUILDERS = 6  # each holds a context of the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What may run beside what."""

    ahead: bool  # the next batch is made, and the next candidates are built, while others are timed
    threads: int  # of the search
    builders: int  # children that build ahead


def sharing(family: DeviceFamily, cores: int) -> Sharing:
    """For a family of devices and as many cores as we may run on.

    Beside a GPU the processor is idle but for one core that feeds it. Where the device is the processor,
    what runs ahead takes one thread; with too few cores for that, it runs before and may have them all. Whole
    batches are built before they are timed there, on all cores. Where a driver is not known to keep what
    another process built, nothing builds for it but the measuring child.
    """
    if family.processor:
        ahead = cores >= SPARE_CORES
        return Sharing(ahead=ahead, threads=1 if ahead else cores, builders=min(MOST_BUILDERS, cores))
    threads = max(1, min(_MOST_THREADS, cores - 1))
    builders = max(1, min(MOST_BUILDERS, cores - 2)) if family.keeps_builds else 0
    return Sharing(ahead=True, threads=threads, builders=builders)
