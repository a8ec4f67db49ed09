"""DeadlineWatch of many things with one timer."""

from __future__ import annotations

import asyncio
import time

from honed.daemon.aio import DeadlineWatch


def test_what_does_not_end_in_time_is_told_once_and_in_order() -> None:
    async def told() -> list[str]:
        late: list[str] = []
        done = asyncio.get_running_loop().create_future()

        def note(key: str) -> None:
            late.append(key)
            if len(late) == 2:
                done.set_result(None)

        deadlines = DeadlineWatch(note)
        now = time.monotonic()
        deadlines.set("last", now + 0.02)
        deadlines.set("ended", now + 0.01)
        deadlines.set("first", now + 0.001)  # the timer that runs is for later
        deadlines.drop("ended")
        await done
        return late

    assert asyncio.run(told()) == ["first", "last"]


def test_what_ends_as_another_is_late_is_not() -> None:
    async def told() -> list[int]:
        late: list[int] = []

        def end_all(key: int) -> None:
            late.append(key)
            for other in (1, 2):
                deadlines.drop(other)

        deadlines = DeadlineWatch(end_all)
        for key in (1, 2):
            deadlines.set(key, time.monotonic())
        while not late:
            await asyncio.sleep(0)
        return late

    assert asyncio.run(told()) == [1]


def test_what_goes_on_has_its_time_anew() -> None:
    async def told() -> float:
        begun = time.monotonic()
        late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadlines: DeadlineWatch[int] = DeadlineWatch(lambda _: late.set_result(None))
        deadlines.set(1, begun + 0.001)
        deadlines.set(1, begun + 0.03)
        await late
        return time.monotonic() - begun

    assert asyncio.run(told()) >= 0.03


def test_one_that_is_late_may_set_another() -> None:
    async def told() -> list[int]:
        late: list[int] = []
        done = asyncio.get_running_loop().create_future()

        def again(key: int) -> None:
            late.append(key)
            if key == 3:
                done.set_result(None)
            else:
                deadlines.set(key + 1, time.monotonic())

        deadlines = DeadlineWatch(again)
        deadlines.set(1, time.monotonic())
        await done
        return late

    assert asyncio.run(told()) == [1, 2, 3]
