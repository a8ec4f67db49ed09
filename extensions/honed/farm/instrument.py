"""The boards of a farm in the place of a device, for a session of tuning."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from honed.jobs import commands
from honed.tuner.tune.children import BATCH
from honed.tuner.tune.opening import Instrument, Sharing
from honed.valhall.bench import AHEAD, YARDSTICK

from .boards import FarmChoice, join
from .measurer import FarmMeasurer

# Candidates of a batch for each that a farm's boards take at once: fewer leave boards idle at its end, more
# are proposed without knowing what came of the others.
_PER_PLACE = 4


def instrument(job: commands.Search[Any], tell: Callable[[str], None]) -> Instrument:
    """The boards of a farm that are of one device, with the best peaks that any of them has seen.

    `tell` gets sentences on boards that come, go or are slow. Raises what `boards.join` raises.
    """
    assert job.farm is not None
    farm = FarmChoice(url=job.farm, certificates=job.certificates, bench=job.bench or "", device=job.device)
    joined = join(farm)
    profile = joined.profile
    return Instrument(
        spec=None,
        answers=not farm.bench,
        profile=profile,
        measurer=lambda begin: FarmMeasurer(joined.boards, profile, farm.bench, begin, tell, ahead=AHEAD),
        peaks_again=lambda: profile,
        keep_peaks=lambda _: None,
        sharing=Sharing(ahead=True, threads=len(os.sched_getaffinity(0)), builders=0),
        yardstick=YARDSTICK if farm.bench else None,
        batch=AHEAD if farm.bench else min(AHEAD, max(BATCH, _PER_PLACE * joined.depth)),
    )
