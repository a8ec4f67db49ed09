"""Steps of several sequences as one: who is waited for, by an own clock, and what becomes of failures."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon.features.batching import BatchMember
from honed.daemon.features.decoding import Form, Piece, joint_forms
from honed.daemon.features.joint_steps import JointSteps, Planned, Ran, StepGathering, Turn
from honed.daemon.worker.calls import RunSteps
from honed.protocol.errors import HonedError, ResourceExhausted, SequenceLost

RUN = 10.0  # what each takes, of one or of several


@dataclass
class Client:
    """One sequence, which comes again `pause` after each answer."""

    number: int
    pause: float
    user: int = 0
    joins: bool = True
    steps: int = 0
    waits: list[float] = field(default_factory=list)  # from each step's arrival to its run


class World:
    """A device that runs one thing at a time, clients, and their clock."""

    def __init__(self, *clients: Client, most: int = 2) -> None:
        self.now, self.runs, self.most, self.free = 0.0, 0, most, 0.0
        self.gathering = StepGathering()
        self.gathering.run_together(most)
        self.clients = {each.number: each for each in clients}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for n, each in enumerate(clients):
            self._at(0.1 * n, lambda each=each: self._come(each))

    def live(self, end: float) -> None:
        """Let time pass until `end`."""
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
            self._look()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _come(self, client: Client) -> None:
        self.gathering.begin(client.number, self.now)
        self.gathering.joins(client.number, client.joins)
        if not client.joins or self.gathering.company(self.now) < 2:
            self._run([(client, self.now)], lambda: self.gathering.alone(RUN))
            return
        self.gathering.arrived(
            BatchMember(
                number=client.number, user=client.user, rows=1, arrived=self.now, deadline=self.now + 1e6
            )
        )

    def _look(self) -> None:
        for batch in self.gathering.due(self.now):
            assert len(batch) <= self.most
            members = [(self.clients[each.number], each.arrived) for each in batch]
            self._run(members, lambda: self.gathering.ended(RUN))
        if (when := self.gathering.next_time()) is not None and when > self.now:
            self._at(when, lambda: None)

    def _run(self, members: Sequence[tuple[Client, float]], note: Callable[[], None]) -> None:
        begin = max(self.now, self.free)
        self.free, self.runs = begin + RUN, self.runs + 1
        for client, arrived in members:
            client.waits.append(begin - arrived)

        def end() -> None:
            note()
            for client, _ in members:
                client.steps += 1
                self.gathering.end(client.number, self.now)
                self._at(self.now + client.pause, lambda client=client: self._come(client))

        self._at(self.free, end)


def test_sequences_that_come_again_at_once_share_their_runs() -> None:
    for count in (2, 4):
        world = World(*(Client(n, pause=1.0) for n in range(count)), most=count)
        world.live(100 * RUN)
        steps = [each.steps for each in world.clients.values()]
        assert min(steps) > 85
        assert sum(steps) > 0.95 * count * world.runs


def test_a_sequence_alone_waits_for_nobody() -> None:
    world = World(Client(1, pause=1.0))
    world.live(100 * RUN)
    assert world.clients[1].steps == world.runs == 91
    assert set(world.clients[1].waits) == {0.0}


def test_one_that_takes_long_to_come_again_is_not_waited_for() -> None:
    world = World(Client(1, pause=1.0), Client(2, pause=2.5 * RUN))
    world.live(200 * RUN)
    fast, slow = world.clients.values()
    assert fast.steps > 140  # alone they are 181: it waits for runs of the other
    assert max(fast.waits[3:]) <= RUN
    assert slow.steps > 45


def test_one_that_cannot_join_is_not_waited_for() -> None:
    world = World(Client(1, pause=1.0), Client(2, pause=1.0, joins=False))
    world.live(100 * RUN)
    assert world.runs == pytest.approx(100, abs=2)  # the device never rests
    assert world.clients[1].steps == pytest.approx(world.clients[2].steps, abs=2)


@pytest.mark.parametrize("most", [2, 4])
def test_a_user_with_many_sequences_leaves_the_other_its_turn(most: int) -> None:
    many = [Client(n, pause=1.0, user=1) for n in range(9)]
    world = World(*many, Client(9, pause=1.0, user=2), most=most)
    world.live(200 * RUN)
    other = world.clients[9]
    assert other.steps >= 0.98 * max(each.steps for each in many)
    assert max(other.waits[3:]) <= RUN
    assert min(each.steps for each in many) > 0.6 * max(each.steps for each in many)


def test_a_deadline_is_not_waited_out_and_who_left_is_forgotten() -> None:
    gathering = StepGathering()
    gathering.run_together(2)
    for number in (1, 2):
        gathering.begin(number, 0.0)
        gathering.alone(RUN)
    gathering.arrived(BatchMember(number=2, user=0, rows=1, arrived=0.0, deadline=35.0))
    assert gathering.due(0.0) == []  # 1 runs
    assert gathering.next_time() == 15.0
    gathering.left(2)
    gathering.end(2, 5.0)
    gathering.end(1, 10.0)
    assert gathering.company(10.0) == 2
    gathering.begin(3, 500.0)
    assert gathering.company(500.0) == 1
    gathering.end(3, 501.0)
    assert gathering.begin(1, 502.0) == 1


CAPACITY = {1: 256, 2: 256, 3: 512}


class Service:
    """What runs steps: the device is asked, and answers at once, or fails as it is told."""

    def __init__(self) -> None:
        self.asked: list[RunSteps] = []
        self.alone: list[int] = []
        self.fails: HonedError | None = None
        self.errors: dict[int, HonedError] = {}
        self.hold = asyncio.Event()  # of steps alone
        self.began: asyncio.Event = asyncio.Event()
        self.wishes: list[int] = []
        self.joined = 0
        self.spent: list[tuple[str, float]] = []
        pool = SimpleNamespace(asking=SimpleNamespace(ask_for=self.ask_for), release=lambda region: None)
        ledger = SimpleNamespace(ran=lambda name, seconds: self.spent.append((name, seconds)))
        self.entry = SimpleNamespace(
            name="m", number=1, statistics=SimpleNamespace(ran_joined=self.ran_joined)
        )
        self.steps = JointSteps(pool=cast(Any, pool), ledger=cast(Any, ledger))

    def ran_joined(self, count: int) -> None:
        self.joined += count

    async def ask_for(self, client: object, runner: Any, call: Any, **given: Any) -> tuple[Any, str]:
        self.asked.append(call(runner.name))
        if self.fails is not None:
            raise self.fails
        members = [self.answer(f"{runner.name}: {each}") for each in self.asked[-1].members]
        return SimpleNamespace(members=members), "work"

    def answer(self, what: str) -> Any:
        return SimpleNamespace(result=SimpleNamespace(infer_ns=1), what=what)

    def turn(self, number: int) -> Coroutine[Any, Any, Ran]:
        loop = asyncio.get_running_loop()
        checked = SimpleNamespace(plan=SimpleNamespace(priority=2), regions=[])

        def planned(capacity: int) -> Planned:
            call = cast(Any, lambda key: f"{number} for {capacity}")
            return Planned(Piece(Form(1, capacity), 3, 0, 1), cast(Any, checked), call)

        def form(capacity: int, sequences: int) -> Any:
            count = joint_forms(capacity, sequences)[0].sequences
            return count, SimpleNamespace(name=f"m@{count}x{capacity}", away=False)

        async def alone() -> Ran:
            self.alone.append(number)
            self.began.set()
            await self.hold.wait()
            if number in self.errors:
                raise self.errors[number]
            return cast(Any, "work"), self.answer(f"{number} alone"), cast(Any, None)

        connection = SimpleNamespace(client=SimpleNamespace(user=0))
        call = SimpleNamespace(
            entry=self.entry, connection=connection, params=SimpleNamespace(parameters=None)
        )
        return self.steps.run(
            Turn(
                call=cast(Any, call),
                number=number,
                arrived=loop.time(),
                deadline=loop.time() + 60.0,
                capacity=CAPACITY[number],
                on_device=True,
                planned=planned,
                form=form,
                wish=self.wishes.append,
                alone=alone,
            )
        )

    async def begun(self, *numbers: int) -> list[asyncio.Task[Ran]]:
        """Steps of several sequences, of which the first runs and the others wait for it."""
        tasks = [asyncio.ensure_future(self.turn(numbers[0]))]
        await self.began.wait()
        tasks += [asyncio.ensure_future(self.turn(number)) for number in numbers[1:]]
        await asyncio.sleep(0)
        return tasks


def what(ran: Ran) -> str:
    return cast(Any, ran[1]).what


def test_what_waits_while_one_runs_is_run_as_one_for_the_largest_capacity() -> None:
    async def life() -> None:
        service = Service()
        tasks = await service.begun(1, 2, 3)
        assert (service.alone, service.asked, service.wishes) == ([1], [], [2, 3])
        service.hold.set()
        answers = [what(each) for each in await asyncio.gather(*tasks)]
        assert answers == ["1 alone", "m@2x512: 2 for 512", "m@2x512: 3 for 512"]
        assert service.joined == 2
        assert service.spent == [("m@2x512", 1e-9)]

    asyncio.run(life())


def test_one_that_fails_does_not_disturb_the_others() -> None:
    async def life() -> None:
        service = Service()
        tasks = await service.begun(1, 2, 3)
        service.fails = SequenceLost("gone")
        service.errors[3] = ResourceExhausted("too large")
        service.hold.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [what(each) for each in cast(Any, found[:2])] == ["1 alone", "2 alone"]
        assert isinstance(found[2], ResourceExhausted)
        assert service.joined == 0

    asyncio.run(life())


def test_one_that_leaves_is_not_run() -> None:
    async def life() -> None:
        service = Service()
        tasks = await service.begun(1, 2, 3)
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        service.hold.set()
        assert what(await tasks[2]) == "3 alone"  # as nobody else is there any more
        assert (service.asked, service.alone) == ([], [1, 3])

    asyncio.run(life())
