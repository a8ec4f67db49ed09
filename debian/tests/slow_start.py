"""Has honed begin with a slow product, so that tuning finds a faster one on any machine: slow_start.py FILE.

One work-item a row is recorded as the best schedule of the model's product. For the user honed, before the
model is added.
"""

from __future__ import annotations

import sys
from pathlib import Path

from honed.machine.devices import select
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.records import NewCandidate, Records
from honed.tuner.records.verdict import Outcome, Timing, Verdict
from honed.tuner.search import traces
from honed.tuner.setup import setup_for
from honed.tuner.tune.extract import extract


def main(model: str) -> None:
    """Record it for every function of the model that has one block."""
    profile = select(None).profile
    with Records.open(Path("/var/lib/honed/records.sqlite")) as records:
        for found in extract(Path(model), {}, "fp32", profile).tasks:
            schedule = traces.unscheduled(traces.as_module(narrow_indices(found.func)))
            block, *others = schedule.get_child_blocks(schedule.get_sblock("root"))
            if others:
                continue
            rows, *_ = schedule.get_loops(block)
            groups, items = schedule.split(rows, [1, None])
            schedule.bind(groups, "blockIdx.x")
            schedule.bind(items, "threadIdx.x")
            trace = traces.to_text(schedule.trace)
            new = NewCandidate(workload=found.task.key, setup=setup_for(profile.identity), trace=trace)
            timing = Timing(median_s=1.0, low_s=1.0, high_s=1.0, repeats=9)
            records.finish(records.begin(new), Verdict(outcome=Outcome.RIGHT, timing=timing))
            print(f"{found.task.key}: one work-item a row")


if __name__ == "__main__":
    main(sys.argv[1])
