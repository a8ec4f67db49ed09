"""Has honed begin with a slow product, so that tuning finds a faster one on any machine: slow_start.py FILE.

For the user honed, before the model is added.
"""

from __future__ import annotations

import sys
from pathlib import Path

from honed.machine.devices import select
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.records.rows import NewCandidate, Outcome, Timing, Verdict
from honed.tuner.records.store import Records
from honed.tuner.search import traces
from honed.tuner.setup import setup_for
from honed.tuner.tune.extract import extract


def record(database: Path, model: Path, profile: DeviceProfile) -> list[str]:
    """Record one work-item as the best way to compute each function that is a product alone.

    Return the identities of the traces.
    """
    made = []
    with Records.open(database) as records:
        for found in extract(model, {}, "fp32", profile).tasks:
            schedule = traces.new_schedule(traces.as_module(narrow_indices(found.func)))
            block, *others = schedule.get_child_blocks(schedule.get_sblock("root"))
            if others:
                continue
            rows, *_ = schedule.get_loops(block)
            groups, items, _ = schedule.split(rows, [1, 1, None])
            schedule.bind(groups, "blockIdx.x")
            schedule.bind(items, "threadIdx.x")
            trace = traces.to_text(schedule.trace)
            new = NewCandidate(workload=found.task.key, setup=setup_for(profile.identity), trace=trace)
            timing = Timing(median_s=1.0, low_s=1.0, high_s=1.0, repeats=9)
            records.finish(records.begin(new), Verdict(outcome=Outcome.RIGHT, timing=timing))
            made.append(traces.identity(trace))
    return made


if __name__ == "__main__":
    print(*record(Path("/var/lib/honed/records.sqlite"), Path(sys.argv[1]), select(None).profile))
