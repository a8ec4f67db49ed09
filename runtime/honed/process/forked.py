"""Distributes work to forked processes, which inherit what cannot be sent: functions and tools of TVM."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from honed.process.limits import data_bytes, die_with, limit_data

With = TypeVar("With")
Given = ParamSpec("Given")
Result = TypeVar("Result")

OWN_MIB = 512  # MiB of memory that each may use beyond what it inherits
_inherited: list[Any] = []  # Tools of a forked process


class ForkPool(Generic[With]):
    """A pool of forked processes with the same tools, and a context manager.

    With 0 processes, this one does the work. The processes are forked at once: no library may have been used
    before that does not survive it. OpenMP does not, so xgboost hangs in them if it was used in this process.
    Each may use OWN_MIB of memory. They end with the thread that created this object; if one ends earlier,
    the pool is broken, and waiting calls raise BrokenProcessPool.
    """

    def __init__(self, processes: int, tools: With) -> None:
        self._tools = tools
        self._pool: ProcessPoolExecutor | None = None
        if processes:
            self._pool = ProcessPoolExecutor(processes, get_context("fork"), _inherit, (os.getpid(), tools))
            self._pool.submit(os.getpid).result()  # Forks them all

    def __enter__(self) -> ForkPool[With]:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def begin(
        self, do: Callable[Concatenate[With, Given], Result], *args: Given.args, **named: Given.kwargs
    ) -> Future[Result]:
        """Call a module's function with the tools and these arguments, concurrently with the caller.

        Arguments and result must be picklable. With no processes, the function is called at once and its
        errors are raised here.
        """
        if self._pool is not None:
            return self._pool.submit(_do, do, *args, **named)
        done: Future[Result] = Future()
        done.set_result(do(self._tools, *args, **named))
        return done


def _inherit(parent: int, tools: object) -> None:
    gc.freeze()  # Inherited objects live on, and scanning them would copy their memory
    die_with(parent)
    limit_data(data_bytes() + (OWN_MIB << 20))
    _inherited.append(tools)


def _do(do: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return do(_inherited[-1], *args, **named)
