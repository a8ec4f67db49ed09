"""Draws what a prior chooses from, as records: a function's schedule by default rules, and others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.valhall.draws import draws
from honed.machine.profile import DeviceIdentity, DeviceProfile
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import by_rule
from honed.tuner.lower.target import target_for
from honed.tuner.records.exchange import FORMAT, Line, encode
from honed.tuner.records.rows import StoredOutcome, Timing
from honed.tuner.search import traces
from honed.tuner.setup import setup_for
from honed.tuner.tune.extract import Extracted

_EACH = 6  # Draws from each sketch


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """A schedule, and its kernels."""

    trace: str
    lowered: Lowered


def schedules(one: Extracted, profile: DeviceProfile, seed: int) -> Iterator[Tried]:
    """Yield each schedule of a task that can be lowered, the rule's first; equal for equal seeds."""
    target = target_for(profile)
    ruled = by_rule(one.func, target, profile)
    if ruled is not None:
        with suppress(LoweringFailed):
            lowered = lower_function(ruled[1].mod["main"], "main", target, profile)
            yield Tried(traces.to_text(ruled[1].trace), lowered)
    for drawn in draws(one.func, profile, _EACH, seed):
        yield Tried(drawn.draw.trace, drawn.lowered)


def record(
    one: Extracted,
    tried: Tried,
    device: DeviceIdentity,
    outcome: StoredOutcome,
    timing: Timing | None,
    *,
    quarantined: bool = False,
) -> bytes:
    """Return the result of a schedule, as a line of `hone records export`."""
    now = time.time()
    return encode(
        Line(
            honed_records=FORMAT,
            device=device,
            compiler=setup_for(device).compiler,
            workload=one.task.key,
            name=one.task.name,
            flops=float(one.task.flops),
            bytes=float(one.task.bytes),
            trace=tried.trace,
            state="quarantined" if quarantined else "done",
            outcome=outcome.value,
            reason="",
            story=None,
            timing=timing,
            source_sha256=None,
            created_s=now,
            finished_s=now,
            measured_by="benchmarks.prior",
        )
    )
