"""Blocking work of the service: done to its end, whoever waits for it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from honed.daemon.aio import clearing_in_thread, in_thread


def test_work_whose_caller_is_gone_ends_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    def fail() -> None:
        go.wait()
        raise BlockingIOError

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(fail))
        await asyncio.sleep(0)
        task.cancel()
        asyncio.get_running_loop().call_soon(go.set)
        with suppress(asyncio.CancelledError):
            await task

    asyncio.run(main())
    gc.collect()
    assert caplog.records == []


def test_a_folder_is_cleared_in_a_thread_also_after_a_failure() -> None:
    cleared: list[threading.Thread] = []

    @contextmanager
    def folder() -> Iterator[str]:
        yield "a folder"
        cleared.append(threading.current_thread())

    async def main() -> None:
        async with clearing_in_thread(folder()) as entered:
            assert entered == "a folder"
            raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(main())
    assert len(cleared) == 1
    assert cleared[0] is not threading.main_thread()
