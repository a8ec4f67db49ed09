"""MetaSchedule's context of a search, made without what takes long and is never used."""

from __future__ import annotations

import logging
from typing import Any

from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.target import Target

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
    """What `ms.TuneContext(...)` gives.

    Its own constructor imports every tensor intrinsic of TVM first: 500 functions for other devices that are
    parsed one by one, for 14 s on two cores of a Xeon. None of the rules here uses any.
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
