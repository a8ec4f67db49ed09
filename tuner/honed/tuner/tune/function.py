"""Tuning one function from Python: `honed.tuner.tune_function`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx

from honed.jobs import events
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import DeviceError
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import Lowered, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search import traces

from .children import Adopt
from .extract import adopt
from .session import SearchBudget, SessionResources, on_device
from .task import TaskProgress


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TunedFunction:
    """The result of tuning one function.

    Times are seconds by the device's clock. `scheduled` and `trace` are None where no schedule was found
    faster than the default one; `lowered` has the OpenCL C of the better of both, with its launches.
    """

    default_s: float
    best_s: float
    roofline_s: float  # Seconds by the device's measured peaks
    trials: int
    failures: dict[str, int]  # Counts by outcome
    trace: str | None
    scheduled: tirx.PrimFunc | None
    lowered: Lowered


def tune_function(
    func: tirx.PrimFunc,
    *,
    outputs: int = 1,
    name: str = "main",
    device: str | None = None,
    trials: int | None = 64,
    seconds: float | None = None,
    records: Path | None = None,
    cache_dir: Path | None = None,
    seed: int = 0,
    emit: Callable[[dict[str, Any]], None] = lambda event: None,
) -> TunedFunction:
    """Search the fastest schedule of `func` on an OpenCL device, as `hone tune` does for a model's tasks.

    Its last `outputs` parameters are written, the others read. `device` is a spec as of `$HONED_DEVICE`;
    None: the best there is. The search ends after `trials` measured candidates or `seconds`, or when nothing
    more is worth it. With `records` and `cache_dir` another call goes on from there. `emit` gets the events
    that `hone tune` shows. The device is used in child processes only.

    Raises InvalidArgument for a function that is no task, DeviceError where the device cannot be used or the
    default schedule is not right on it.
    """
    adopt(func, name, outputs)
    call = Adopt(func=tvm.ir.save_json(func), name=name, outputs=outputs)
    with (
        tempfile.TemporaryDirectory(prefix="honed-tune-") as own,
        SessionResources(
            name,
            partial(on_device, device, cache_dir or Path(own)),
            records=records or Path(own) / "records.sqlite",
            cache_dir=cache_dir or Path(own),
            seed=seed,
            emit=lambda event: emit(events.to_map(event)),
        ) as run,
    ):
        budget = SearchBudget(trials=trials, seconds=seconds)
        run.session.run(lambda: run.search.find_tasks(call), budget)
        (progress,) = run.session.tasks
    return _result_of(func, name, progress, run.profile)


def _result_of(
    func: tirx.PrimFunc, name: str, progress: TaskProgress, profile: DeviceProfile
) -> TunedFunction:
    if progress.default is None or progress.best is None:
        raise DeviceError(f"{name} cannot be tuned: {progress.reason}")
    target, trace = target_for(profile), progress.best_trace
    if trace is None:
        scheduled, lowered = None, untuned_kernels(func, name, target, profile)[1]
    else:
        scheduled = traces.apply(trace, narrow_indices(func)).mod["main"]
        lowered = lower_function(scheduled, name, target, profile)
    return TunedFunction(
        default_s=progress.default,
        best_s=progress.best,
        roofline_s=progress.roofline,
        trials=progress.trials,
        failures=dict(progress.failures),
        trace=trace,
        scheduled=scheduled,
        lowered=lowered,
    )
