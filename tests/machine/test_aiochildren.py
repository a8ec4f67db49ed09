"""Children of an event loop: none outlives the task that wanted it."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import psutil
import pytest

from honed.machine.aiochildren import spawn

_WRITES_LATER = "import time; time.sleep(60); print('late')"


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


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
