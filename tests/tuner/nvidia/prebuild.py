"""Builds kernels in many processes at once, so that the measuring child finds them in the driver's cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

_SECONDS = 30.0  # for a whole batch
_context: Any = None


def pool(spec: str) -> ProcessPoolExecutor:
    """Processes that build for one device, as many as there are cores but for two."""
    return ProcessPoolExecutor(
        max(1, (os.cpu_count() or 1) - 2),
        mp_context=get_context("spawn"),
        initializer=_open,
        initargs=(spec,),
    )


def build_all(workers: ProcessPoolExecutor, sources: Sequence[str]) -> None:
    """Build them; those that fail or take too long are left to the measuring child."""
    futures = [workers.submit(_build, source) for source in sources]
    with suppress(TimeoutError):
        for _ in as_completed(futures, timeout=_SECONDS):
            pass


def _open(spec: str) -> None:
    global _context
    from honed.machine import devices
    from honed.machine.opencl import context

    _context = context(devices.select(spec).cl)


def _build(source: str) -> bool:
    import pyopencl as cl

    from honed.tuner.measure.timing import build

    try:
        build(_context, source)
    except cl.Error:
        return False
    return True
