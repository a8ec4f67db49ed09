"""Who gets a place in a full queue, whose turn it is among users, and when a worker is started again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.core.queue import ClientId, Queue, Ticket
from honed.daemon.transport.fairness import RoundRobin, Usage
from honed.runtime.errors import ResourceExhausted

LIMIT = 12


def ticket(number: int, user: int = 0, connection: int = 1, priority: int = 2) -> Ticket:
    return Ticket(
        number=number,
        client=ClientId(user, connection),
        model="m",
        priority=priority,
        arrived=0.0,
        deadline=100.0,
    )


def take(queue: Queue) -> Ticket:
    chosen = queue.take(0.0, lambda _: True)
    assert chosen is not None
    return chosen


def test_one_connection_cannot_fill_the_queue() -> None:
    queue = Queue(LIMIT)
    for number in range(LIMIT):
        queue.submit(ticket(number))
    victim = queue.submit(ticket(99, connection=2))
    assert victim is not None
    assert victim.number == LIMIT - 1  # the last of who has most


def test_six_connections_of_one_user_cannot_lock_out_another_user() -> None:
    queue = Queue(LIMIT)
    for number in range(LIMIT):
        queue.submit(ticket(number, user=1, connection=number % 6))
    for number in range(100, 100 + LIMIT // 2):
        assert queue.submit(ticket(number, user=2, priority=1)) is not None
    with pytest.raises(ResourceExhausted):  # now both have their half
        queue.submit(ticket(200, user=2))


def test_users_take_turns_whatever_their_priorities() -> None:
    queue = Queue(100)
    for number in range(4):
        queue.submit(ticket(number, user=1, priority=1))
    queue.submit(ticket(10, user=2, priority=3))
    assert 10 in {take(queue).number for _ in range(2)}


def test_what_goes_on_lets_others_in_between() -> None:
    queue = Queue(100)
    queue.submit(ticket(1))
    queue.submit(ticket(2, connection=2))
    long = take(queue)
    long.attempts = 0
    queue.retry(long)
    assert [take(queue).number, take(queue).number] == [2, 1]


def test_what_is_run_again_is_not_turned_away() -> None:
    queue = Queue(2)
    queue.submit(ticket(1))
    failed = take(queue)
    queue.retry(failed)
    queue.submit(ticket(2))
    victim = queue.submit(ticket(3, connection=2))
    assert victim is not None
    assert victim.number == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3)), max_size=80))
def test_nobody_has_more_than_a_share_when_somebody_is_refused(asked: list[tuple[int, int, int]]) -> None:
    queue, waiting = Queue(LIMIT), dict[int, Ticket]()
    for number, (user, connection, priority) in enumerate(asked):
        new = ticket(number, user, connection, priority)
        users = Counter(t.client.user for t in waiting.values())
        connections = Counter(t.client for t in waiting.values() if t.client.user == user)
        try:
            victim = queue.submit(new)
        except ResourceExhausted:
            assert max(users.values()) <= users[user] + 1
            assert max(connections.values()) <= connections[new.client] + 1
            continue
        waiting[number] = new
        if victim is not None:
            del waiting[victim.number]
        assert len(queue) == len(waiting) <= LIMIT


class Loop:
    """Calls what was asked for in the next iteration, by hand."""

    def __init__(self) -> None:
        self.soon: list[object] = []

    def call_soon(self, callback: object) -> None:
        self.soon.append(callback)

    def iterate(self) -> None:
        callbacks, self.soon = self.soon, []
        for callback in callbacks:
            callback()  # type: ignore[operator]


def test_owners_take_turns_and_an_iteration_has_an_end() -> None:
    loop, now, done = Loop(), [0.0], list[str]()
    turns = RoundRobin(loop, budget=1.0, clock=lambda: now[0])  # type: ignore[arg-type]

    def work(name: str) -> None:
        done.append(name)
        now[0] += 0.6

    for name in ("a1", "a2", "a3", "a4"):
        turns.ask("a", lambda name=name: work(name))  # type: ignore[misc]
    turns.ask("b", lambda: work("b1"))
    assert done == ["a1", "a2"]
    loop.iterate()
    assert done == ["a1", "a2", "a3", "b1"]
    loop.iterate()
    assert done[-1] == "a4"


def test_what_asks_for_itself_again_waits_for_the_others() -> None:
    loop, now, done = Loop(), [0.0], list[str]()
    turns = RoundRobin(loop, budget=1.0, clock=lambda: now[0])  # type: ignore[arg-type]

    def again() -> None:
        done.append("again")
        now[0] += 0.4
        if len(done) < 4:
            turns.ask("a", again)

    turns.ask("a", again)
    turns.ask("b", lambda: done.append("b"))
    assert done == ["again"] * 3
    loop.iterate()
    assert done == ["again"] * 3 + ["again", "b"] or done == ["again"] * 3 + ["b", "again"]


def test_all_users_together_are_bounded() -> None:
    usage = Usage(100, in_all=150)
    assert usage.change(1, 90)
    assert usage.change(2, 60)
    assert not usage.overfull
    usage.change(3, 1)
    assert usage.overfull
    assert usage.largest == 1
    usage.change(1, -90)
    assert not usage.overfull
