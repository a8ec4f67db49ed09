"""When requests are run together, against an own account of who waits since when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from honed.daemon.features.batching import BatchMember, BatchQueue

MOST, DELAY = 8, 1.0


def member(
    number: int, *, user: int = 0, rows: int = 1, arrived: float = 0.0, deadline: float = 60.0
) -> BatchMember:
    return BatchMember(number=number, user=user, rows=rows, arrived=arrived, deadline=deadline)


def gathered(*members: BatchMember, most: int = MOST, delay: float = DELAY) -> BatchQueue:
    found = BatchQueue(most, delay)
    for each in members:
        found.add(each)
    return found


def numbers(batches: list[tuple[BatchMember, ...]]) -> list[list[int]]:
    return [[each.number for each in batch] for batch in batches]


def test_it_waits_for_the_delay_or_until_it_is_full() -> None:
    found = gathered(member(1), member(2, arrived=0.5))
    assert found.next_time() == DELAY
    assert found.due(0.9) == []
    assert numbers(found.due(1.0)) == [[1, 2]]
    full = gathered(*(member(n) for n in range(MOST)))
    assert numbers(full.due(0.0)) == [list(range(MOST))]


def test_while_one_runs_the_next_gathers() -> None:
    found = gathered(member(1))
    found.due(1.0)
    found.add(member(2, arrived=1.0))
    assert found.due(50.0) == []
    found.record_end(0.1)
    assert numbers(found.due(50.0)) == [[2]]
    assert not found.idle
    found.record_end(0.1)
    assert found.idle


def test_a_deadline_is_not_waited_out() -> None:
    found = gathered(member(1))
    found.due(1.0)
    found.record_end(0.2)
    found.add(member(2, arrived=10.0, deadline=10.5))
    assert found.next_time() == pytest.approx(10.1)
    assert numbers(found.due(10.1)) == [[2]]
    found.add(member(3, arrived=11.0, deadline=11.3))  # while one runs, too
    assert numbers(found.due(11.0)) == [[3]]


def test_a_flood_leaves_room_for_others() -> None:
    flood = [member(n, user=1) for n in range(20)]
    batch = gathered(*flood, member(99, user=2)).due(0.0)[0]
    assert 99 in [each.number for each in batch]
    assert len(batch) == MOST


def test_a_large_one_is_run_whatever_its_size() -> None:
    assert numbers(gathered(member(1, rows=50), member(2)).due(0.0)) == [[1]]


class Life(RuleBasedStateMachine):
    """Requests come, leave, and batches end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.gathering = BatchQueue(MOST, DELAY)
        self.waiting: dict[int, BatchMember] = {}
        self.taken: set[int] = set()
        self.running = 0
        self.count = 0

    def look(self) -> None:
        for batch in self.gathering.due(self.now):
            self.running += 1
            assert len(batch) == 1 or sum(each.rows for each in batch) <= MOST
            for each in batch:
                assert each.number not in self.taken
                assert self.waiting.pop(each.number) == each
                self.taken.add(each.number)

    @rule(user=st.integers(0, 3), rows=st.integers(1, 12), patience=st.floats(0.01, 20))
    def arrive(self, user: int, rows: int, patience: float) -> None:
        self.count += 1
        new = member(self.count, user=user, rows=rows, arrived=self.now, deadline=self.now + patience)
        self.waiting[new.number] = new
        self.gathering.add(new)
        self.look()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[number]
        self.gathering.withdraw(number)
        self.look()

    @precondition(lambda self: self.running)
    @rule(seconds=st.floats(0.001, 2))
    def end(self, seconds: float) -> None:
        self.running -= 1
        self.gathering.record_end(seconds)
        self.look()

    @rule(seconds=st.floats(0, 3))
    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.gathering.next_time()) is not None and due <= end:
            self.now = max(self.now, due)
            self.look()
        self.now = end

    @invariant()
    def nobody_waits_too_long(self) -> None:
        for each in self.waiting.values():
            assert self.running or self.now < each.arrived + DELAY or self.now == each.arrived + DELAY
            assert self.now <= each.deadline
        assert self.gathering.idle == (not self.waiting and not self.running)

    def teardown(self) -> None:
        while self.running:
            self.end(0.1)
        self.pass_time(1e6)
        assert not self.waiting


TestLife = Life.TestCase


@given(st.lists(st.integers(0, 3), min_size=1, max_size=7))
def test_nobody_is_second_before_all_are_first(users: list[int]) -> None:
    found = gathered(*(member(n, user=user) for n, user in enumerate(users)), most=len(users) + 1)
    [batch] = found.due(DELAY)
    order = [each.user for each in batch]
    assert set(order[: len(set(users))]) == set(users)
