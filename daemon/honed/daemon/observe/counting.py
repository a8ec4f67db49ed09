"""Requests, counted as they come and fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from honed.daemon.core.statistics import Statistics
from honed.protocol.errors import HonedError


@contextmanager
def counted(statistics: Statistics) -> Iterator[None]:
    """Around the work for one request: counts it, and its failure if it raises."""
    statistics.arrived()
    begun = time.monotonic_ns()
    try:
        yield
    except BaseException as error:
        statistics.failed(_code(error), time.monotonic_ns() - begun)
        raise


def _code(error: BaseException) -> str:
    match error:
        case HonedError():
            return error.code
        case asyncio.CancelledError():
            return "CANCELLED"
        case _:
            return "INTERNAL"
