"""Children of an event loop: none outlives the task that wanted it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from honed.process.aio import HEALTHY_SECONDS, RestartPolicy, restart_delay, spawn
from tests.processes import running_children

_WRITES_LATER = "import time; time.sleep(60); print('late')"


def _children() -> set[int]:
    return {child.pid for child in running_children()}


def test_a_child_ends_when_who_starts_it_is_cancelled_while_its_output_is_connected() -> None:
    async def cancelled_meanwhile() -> set[int]:
        before, loop = _children(), asyncio.get_running_loop()
        connecting = asyncio.Event()

        async def never_connects(*given: Any) -> None:
            connecting.set()
            await asyncio.Event().wait()

        loop.connect_read_pipe = never_connects  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(spawn([sys.executable, "-c", _WRITES_LATER], stdout=True))
        await connecting.wait()
        assert _children() - before
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return _children() - before

    assert asyncio.run(cancelled_meanwhile()) == set()


def test_a_worker_that_a_model_ended_is_replaced_at_once() -> None:
    restarts = RestartPolicy()
    delays = [restarts.delay_after(ready=True, at_work=True, lived=1.0) for _ in range(20)]
    assert set(delays) == {0.0}
    assert not restarts.failing


def test_a_worker_that_ends_for_nothing_is_replaced_more_and_more_slowly() -> None:
    restarts = RestartPolicy()
    delays = [restarts.delay_after(ready=False, at_work=False, lived=0.1) for _ in range(5)]
    assert delays == [restart_delay(n) for n in range(1, 6)]
    assert restarts.failing
    restarts.delay_after(ready=True, at_work=False, lived=3600.0)
    assert not restarts.failing


def test_only_two_starts_in_a_row_without_success_are_failing() -> None:
    restarts = RestartPolicy()
    restarts.delay_after(ready=True, lived=1.0)
    restarts.delay_after(ready=False, lived=0.1)
    assert not restarts.failing, "killed once, and once more while it started again"
    restarts.delay_after(ready=False, lived=0.1)
    assert restarts.failing


def test_delays_before_a_restart() -> None:
    assert [restart_delay(n) for n in (0, 1, 2, 3, 4)] == [0.0, 0.0, 0.5, 1.0, 2.0]
    assert restart_delay(100) == 30.0


def test_a_child_that_lived_long_starts_the_count_of_failures_anew() -> None:
    restarts = RestartPolicy(least=1.0)
    assert [restarts.delay_after(lived=0.1) for _ in range(5)] == [1.0, 1.0, 1.0, 2.0, 4.0]
    assert restarts.delay_after(lived=HEALTHY_SECONDS + 1) == 1.0
    assert [restarts.delay_after(lived=0.1) for _ in range(3)] == [1.0, 1.0, 2.0]
    assert not restarts.failing, "it was ready each time"
