"""Stores traces of schedules as JSON text, plays them again, and provides their context."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from operator import attrgetter
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.s_tir.schedule import Trace
from tvm.target import Target

from honed.tuner.lower.opencl import LoweringFailed, last_line
from honed.tuner.lower.schedule import fresh


def to_text(trace: Trace) -> str:
    """Return the trace as compact JSON."""
    return json.dumps(trace.as_json(), separators=(",", ":"), default=attrgetter("value"))


def identity(text: str) -> str:
    """Return the SHA-256 of a trace's text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def steps(trace: Trace) -> str:
    """Return the steps of a trace as text, without the numbers drawn in it; JSON takes 15 times as long."""
    return str(Trace(trace.insts, {}))


def apply(trace: str | Trace, func: tirx.PrimFunc) -> Schedule:
    """Apply a trace, or its text, and return the schedule; raise LoweringFailed where it does not fit."""
    schedule = new_schedule(as_module(func))
    try:
        if isinstance(trace, Trace):
            trace.apply_to_schedule(schedule, remove_postproc=False)
        else:
            Trace.apply_json_to_schedule(json.loads(trace), schedule)
    except (ValueError, RuntimeError, TypeError, KeyError) as error:
        raise LoweringFailed(f"the recorded schedule does not fit: {last_line(error)}") from error
    return schedule


@lru_cache(maxsize=1)  # Consecutive requests for one function all begin with its copy
def as_module(func: tirx.PrimFunc) -> IRModule:
    """Return a module of a copy of the function, for its schedules and searches, which do not change it."""
    return IRModule({"main": fresh(func).with_attr("global_symbol", "main")})


def new_schedule(module: IRModule) -> Schedule:
    """Return a schedule of a module that the caller keeps: shared parts are never changed in place.

    Samples taken in it are the same every time. Errors are not rendered, as that prints the whole function.
    """
    return again(_begin(module))


@lru_cache(maxsize=1)  # Making one takes thirty times as long as copying it
def _begin(module: IRModule) -> Schedule:
    return Schedule(module, seed=1, debug_mask="none", error_render_level="none")


def again(schedule: Schedule) -> Schedule:
    """Return a copy of a schedule that takes the samples of `new_schedule`."""
    made = schedule.copy()
    made.seed(1)
    return made


_log = logging.getLogger(__name__)


def tune_context(
    module: IRModule,
    target: Target,
    generator: ms.SpaceGenerator,
    strategy: ms.SearchStrategy,
    *,
    seed: int,
    threads: int,
) -> ms.TuneContext:
    """Return what `ms.TuneContext(...)` returns, without its slow constructor.

    That constructor first imports every tensor intrinsic of TVM: 500 functions for other devices, parsed one
    by one, which takes 14 s on two cores of a Xeon. None of the rules here uses any of them.
    """
    made: Any = ms.TuneContext.__new__(ms.TuneContext)
    made.__init_handle_by_constructor__(
        _ffi_api.TuneContext,
        module,
        target,
        generator,
        strategy,
        "main",
        threads,
        seed,
        get_logging_func(_log),
    )
    _ffi_api.TuneContextInitialize(made)
    return made
