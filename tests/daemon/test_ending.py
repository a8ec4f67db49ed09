"""An end that one task waits for: it goes on at once, later where another task ends it or it is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from honed.daemon.aio import Ending


async def waits(ending: Ending, seen: list[str]) -> str:
    try:
        await ending
    except ValueError:
        seen.append("error")
    except asyncio.CancelledError:
        seen.append("cancelled")
        raise
    else:
        seen.append("end")
    return "done"


def test_its_task_goes_on_within_a_callback_that_ends_it() -> None:
    async def main() -> None:
        loop, seen = asyncio.get_running_loop(), list[str]()
        for error in (None, ValueError()):
            ending = Ending(asyncio.get_running_loop())
            task = asyncio.ensure_future(waits(ending, seen))
            await asyncio.sleep(0)

            def end(ending: Ending = ending, error: Exception | None = error) -> None:
                before = len(seen)
                ending.end(error)
                assert len(seen) == before + 1
                ending.end(ValueError("the second does not count"))

            loop.call_soon(end)
            assert await task == "done"
        assert seen == ["end", "error"]

    asyncio.run(main())


def test_a_task_that_ends_it_is_not_interrupted() -> None:
    async def main() -> None:
        ending, seen = Ending(asyncio.get_running_loop()), list[str]()
        task = asyncio.ensure_future(waits(ending, seen))
        await asyncio.sleep(0)
        ending.end()
        assert not seen
        assert await task == "done"
        await ending  # what has ended is not waited for

    asyncio.run(main())


def test_a_task_that_is_cancelled_goes_on_in_the_next_turn() -> None:
    async def main() -> None:
        ending, seen = Ending(asyncio.get_running_loop()), list[str]()
        task = asyncio.ensure_future(waits(ending, seen))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert seen == ["cancelled"]
        ending.end()

    asyncio.run(main())
