"""The queue's decisions, with times made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.daemon.core.queue import ClientId, Queue, Ticket
from honed.runtime.errors import ResourceExhausted


def anything(_: str) -> bool:
    return True


def ticket(
    number: int,
    client: int = 1,
    priority: int = 2,
    deadline: float = 100.0,
    model: str = "m",
    *,
    user: int = 0,
) -> Ticket:
    return Ticket(
        number=number,
        client=ClientId(user, client),
        model=model,
        priority=priority,
        arrived=0.0,
        deadline=deadline,
    )


def drained(queue: Queue, now: float = 0.0, servable: Callable[[str], bool] = anything) -> list[int]:
    taken = []
    while (chosen := queue.take(now, servable)) is not None:
        taken.append(chosen.number)
    return taken


def filled(*tickets: Ticket) -> Queue:
    queue = Queue(100)
    for each in tickets:
        queue.submit(each)
    return queue


def test_one_client_is_served_in_order() -> None:
    assert drained(filled(ticket(1), ticket(2), ticket(3))) == [1, 2, 3]


def test_priorities_come_first() -> None:
    assert drained(filled(ticket(1, priority=3), ticket(2, priority=2), ticket(3, priority=1))) == [3, 2, 1]


def test_clients_take_turns() -> None:
    queue = filled(*(ticket(i, client=1) for i in range(4)), ticket(10, client=2), ticket(11, client=2))
    assert drained(queue) == [0, 10, 1, 11, 2, 3]


def test_a_new_client_does_not_wait_for_a_busy_one() -> None:
    queue = filled(*(ticket(i, client=1) for i in range(50)))
    for _ in range(10):
        queue.take(0.0, anything)
    queue.submit(ticket(99, client=2))
    chosen = queue.take(0.0, anything)
    assert chosen is not None
    assert chosen.number == 99


def test_what_is_late_is_not_run() -> None:
    assert drained(filled(ticket(1, deadline=5.0), ticket(2, deadline=6.0)), now=5.0) == [2]


def test_models_that_cannot_be_served_yet_wait() -> None:
    queue = filled(ticket(1, model="loading"), ticket(2, model="ready"))
    assert drained(queue, servable=lambda model: model == "ready") == [2]
    assert queue.models() == {"loading"}
    assert drained(queue) == [1]


def test_a_failed_request_is_run_once_more_and_first() -> None:
    queue = filled(ticket(1), ticket(2, priority=1))
    first = queue.take(0.0, lambda _: True)
    assert first is not None
    assert first.number == 2
    failed = queue.take(0.0, anything)
    assert failed is not None
    queue.retry(failed)
    queue.submit(ticket(3, priority=1))
    again = queue.take(0.0, anything)
    assert again is failed
    assert drained(queue) == [3]


def test_a_full_queue_says_so() -> None:
    queue = Queue(2)
    queue.submit(ticket(1))
    queue.submit(ticket(2))
    with pytest.raises(ResourceExhausted):
        queue.submit(ticket(3))
    assert queue.cancel(1)
    assert not queue.cancel(1)
    queue.submit(ticket(3))


def test_dropping() -> None:
    queue = filled(ticket(1, model="a"), ticket(2, model="b"), ticket(3, model="a"))
    assert [t.number for t in queue.drop_model("a")] == [1, 3]
    assert [t.number for t in queue.drop_all()] == [2]
    assert len(queue) == 0


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from("ab"), st.floats(0, 10)), max_size=40
    ),
    st.lists(st.integers(0, 40), max_size=10),
    st.floats(0, 10),
)
def test_every_ticket_ends_exactly_once(
    specs: list[tuple[int, int, str, float]], cancelled: list[int], now: float
) -> None:
    queue = Queue(100)
    for number, (client, priority, model, deadline) in enumerate(specs):
        queue.submit(ticket(number, client, priority, deadline, model))
    ended = [number for number in set(cancelled) if queue.cancel(number)]
    ended += drained(queue, now)
    ended += [t.number for t in queue.drop_all()]
    assert sorted(ended) == list(range(len(specs)))
