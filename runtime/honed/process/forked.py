"""Work shared out to forked processes, which inherit what cannot be sent: functions and tools of TVM."""

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

OWN_MIB = 512  # Memory that each may take beside what it inherits
_inherited: list[Any] = []  # Of a forked process: what its work is done with


class ForkPool(Generic[With]):
    """So many processes with the same tools; with none, this one does the work. A context manager.

    They are forked here and now: nothing may have run before that does not live through it. OpenMP does not,
    so that xgboost hangs in them where it was used in this process. Each may take OWN_MIB of memory. They end
    with the thread that made this object; where one ends before, all are of no use, and what waits raises
    BrokenProcessPool.
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
        """Call a function of a module with the tools and what is given, beside what follows.

        What is given and returned must be picklable. With no processes, it is called at once and what it
        raises is raised here.
        """
        if self._pool is not None:
            return self._pool.submit(_do, do, *args, **named)
        done: Future[Result] = Future()
        done.set_result(do(self._tools, *args, **named))
        return done


def _inherit(parent: int, tools: object) -> None:
    gc.freeze()  # What is inherited stays: to look through it would copy it, too
    die_with(parent)
    limit_data(data_bytes() + (OWN_MIB << 20))
    _inherited.append(tools)


def _do(do: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return do(_inherited[-1], *args, **named)
