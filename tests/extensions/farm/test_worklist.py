"""The work list: whatever boards do, no candidate is lost, and none is settled twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from honed.farm.worklist import (
    Action,
    AssignCandidate,
    BoardBlame,
    BoardNotice,
    Clocks,
    LoadBoardTask,
    Settle,
    WorkList,
)

BOARDS = ("a", "b", "c", "d")


class Farm(RuleBasedStateMachine):
    """Boards that come, go, die, are busy, slow, and answer late, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.list = WorkList()
        self.now = 0.0
        self.count = 0
        self.wanted: set[str] = set()  # of the present task, and not dropped
        self.ended: Counter[str] = Counter()
        self.depths: dict[str, int] = {}
        self.handed: dict[int, AssignCandidate] = {}  # every ticket ever
        self.open: list[int] = []  # that a board has, or had when it left
        self.loading: list[LoadBoardTask] = []
        self.ready: dict[str, str | None] = {}
        self.away: dict[str, float] = {}
        self.suspects: set[str] = set()  # boards died of them
        self.feed(self.list.take("t0", self.now))

    def feed(self, actions: list[Action]) -> None:
        for action in actions:
            self.see(action)

    def see(self, action: Action) -> None:
        match action:
            case LoadBoardTask(board=board, task=task):
                assert task == self.list.task
                assert board in self.depths
                self.loading.append(action)
            case AssignCandidate(ticket=ticket, board=board, candidate=candidate):
                assert ticket not in self.handed
                assert candidate in self.wanted
                assert not self.ended[candidate]
                assert self.ready[board] == self.list.task
                assert self.away.get(board, 0.0) <= self.now
                self.handed[ticket] = action
                self.open.append(ticket)
                has = [
                    self.handed[number].candidate
                    for number in self.list.boards[board].tickets
                    if number <= ticket
                ]
                assert len(has) <= self.depths[board]
                assert len(has) == 1 or not self.suspects & set(has), "the next death is its own doing"
            case Settle(ticket=ticket, candidate=candidate, board=board):
                assert (self.handed[ticket].board, self.handed[ticket].candidate) == (board, candidate)
                self.ended[candidate] += 1
            case BoardBlame(candidate=candidate):
                self.ended[candidate] += 1
            case BoardNotice():
                pass

    @rule(number=st.integers(1, 5))
    def want(self, number: int) -> None:
        for _ in range(number):
            self.count += 1
            self.wanted.add(f"c{self.count}")
            self.feed(self.list.want(f"c{self.count}", self.now))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def want_again(self, data: st.DataObject) -> None:
        self.feed(self.list.want(data.draw(st.sampled_from(sorted(self.wanted))), self.now))

    @rule()
    def drop(self) -> None:
        self.wanted = {c for c in self.wanted if c in self.list.out or self.ended[c]}
        self.feed(self.list.drop(self.now))

    @rule()
    def next_task(self) -> None:
        self.count += 1
        self.wanted = set()
        self.ended.clear()
        self.suspects.clear()
        self.feed(self.list.take(f"t{self.count}", self.now))

    @rule(board=st.sampled_from(BOARDS), depth=st.integers(1, 3))
    def join(self, board: str, depth: int) -> None:
        if board not in self.depths:
            self.depths[board] = depth
            self.ready[board] = None
            self.away.pop(board, None)
            self.feed(self.list.join(board, depth, self.now))

    @precondition(lambda self: self.depths)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        board = data.draw(st.sampled_from(sorted(self.depths)))
        del self.depths[board]
        self.suspects |= {self.handed[number].candidate for number in self.list.boards[board].tickets[:1]}
        self.loading = [load for load in self.loading if load.board != board]
        self.feed(self.list.leave(board, self.now))

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), works=st.booleans())
    def load(self, data: st.DataObject, works: bool) -> None:
        load = data.draw(st.sampled_from(self.loading))
        self.loading.remove(load)
        if works:
            self.ready[load.board] = load.task
            self.feed(self.list.record_load(load.board, load.task, self.now))
        else:
            self.away[load.board] = max(self.away.get(load.board, 0.0), self.now + 5.0)
            self.feed(self.list.record_load(load.board, None, self.now, away=5.0))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), yardstick=st.sampled_from([None, 1.0, 1.05, 1.3, 3.0]), again=st.booleans())
    def judge(self, data: st.DataObject, yardstick: float | None, again: bool) -> None:
        """A board answers; where it had left, or answers twice, that counts for nothing."""
        ticket = data.draw(st.sampled_from(self.open))
        for _ in range(1 + again):
            self.feed(self.list.accept_verdict(ticket, yardstick, self.now))
        self.open.remove(ticket)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 10.0]), reload=st.booleans())
    def give_back(self, data: st.DataObject, seconds: float, reload: bool) -> None:
        ticket = data.draw(st.sampled_from(self.open))
        self.open.remove(ticket)
        board = self.handed[ticket].board
        if ticket in self.list.tickets:
            self.away[board] = max(self.away.get(board, 0.0), self.now + seconds)
        self.feed(self.list.give_back(ticket, self.now, away=seconds, reload=reload))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.open))
        self.open.remove(ticket)
        known = self.list.tickets.get(ticket)
        if known is not None and known.candidate is not None:
            self.ended[known.candidate] += 1
        self.feed(self.list.refuse(ticket, self.now))

    @rule(seconds=st.sampled_from([1.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(self.list.tick(self.now))

    @invariant()
    def nothing_is_lost_or_counts_twice(self) -> None:
        assert all(count <= 1 for count in self.ended.values())
        waiting, out = Counter(self.list.waiting), Counter(self.list.out)
        together = waiting + out + self.ended
        assert set(together.values()) <= {1}
        assert set(together) == self.wanted | {c for c in self.ended if self.ended[c]}

    @invariant()
    def tickets_are_of_boards_that_are_there(self) -> None:
        assert set(self.list.boards) == set(self.depths)
        by_board = [n for board in self.list.boards.values() for n in board.tickets]
        assert sorted(by_board) == sorted(self.list.tickets)

    def teardown(self) -> None:
        """With a healthy board that stays, all ends."""
        for board in sorted(self.depths):
            self.feed(self.list.leave(board, self.now))
        self.depths = {"last": 2}
        self.ready["last"] = None
        self.loading.clear()
        self.open.clear()
        self.feed(self.list.join("last", 2, self.now))
        while self.list.waiting or self.list.out:
            for load in self.loading:
                self.ready[load.board] = load.task
                self.feed(self.list.record_load(load.board, load.task, self.now))
            self.loading.clear()
            assert self.open
            self.feed(self.list.accept_verdict(self.open.pop(0), 1.0, self.now))
        self.nothing_is_lost_or_counts_twice()


TestFarm = Farm.TestCase
TestFarm.settings = settings(stateful_step_count=40)


class Listed:
    """A work list with boards that are ready, and what it said last."""

    def __init__(self, *boards: str, depth: int = 2) -> None:
        self.list = WorkList()
        self.list.take("t", 0.0)
        for board in boards:
            self.list.join(board, depth, 0.0)
            self.list.record_load(board, "t", 0.0)


def handed(actions: list[Action]) -> list[AssignCandidate]:
    return [action for action in actions if isinstance(action, AssignCandidate)]


def test_a_candidate_goes_to_the_board_that_has_least() -> None:
    listed = Listed("a", "b")
    boards = [h.board for n in range(6) for h in handed(listed.list.want(f"c{n}", 0.0))]
    assert boards == ["a", "b", "a", "b"]
    assert list(listed.list.waiting) == ["c4", "c5"]


def test_what_a_board_had_is_given_to_others_first() -> None:
    listed = Listed("a")
    for n in range(3):
        listed.list.want(f"c{n}", 0.0)
    listed.list.leave("a", 0.0)
    assert list(listed.list.waiting) == ["c0", "c1", "c2"]


def test_one_of_which_a_board_died_is_judged_alone_and_blamed_for_the_second() -> None:
    listed = Listed("a")
    for n in range(2):
        listed.list.want(f"c{n}", 0.0)
    listed.list.leave("a", 0.0)  # c0 was being judged
    listed.list.join("b", 2, 0.0)
    (alone,) = handed(listed.list.record_load("b", "t", 0.0))
    assert alone.candidate == "c0"
    actions = listed.list.leave("b", 0.0)
    assert BoardBlame("c0", 2) in actions
    assert list(listed.list.waiting) == ["c1"]


def test_a_busy_board_is_left_alone_for_its_time() -> None:
    listed = Listed("a")
    (given,) = handed(listed.list.want("c", 0.0))
    assert not handed(listed.list.give_back(given.ticket, 0.0, away=10.0))
    assert not handed(listed.list.tick(9.0))
    assert [h.candidate for h in handed(listed.list.tick(10.0))] == ["c"]


def test_a_board_that_lost_its_task_loads_it_again() -> None:
    listed = Listed("a")
    (given,) = handed(listed.list.want("c", 0.0))
    assert listed.list.give_back(given.ticket, 0.0, away=0.0, reload=True) == [LoadBoardTask("a", "t")]


def judged(listed: Listed, board: str, yardstick: float, now: float = 0.0) -> list[Action]:
    """What comes of the next candidate that a board judges."""
    ticket = listed.list.boards[board].tickets[0]
    return listed.list.accept_verdict(ticket, yardstick, now)


def test_a_board_that_is_throttled_is_set_aside_and_comes_back() -> None:
    listed = Listed("a", "b", "c", depth=1)
    for n in range(40):
        listed.list.want(f"c{n}", 0.0)
    for _ in range(5):
        for board in "abc":
            assert any(isinstance(a, Settle) for a in judged(listed, board, 1.0))
    slow: list[Action] = []
    while listed.list.boards["c"].tickets:
        had = listed.list.tickets[listed.list.boards["c"].tickets[0]].candidate
        slow = judged(listed, "c", 2.0)
    assert [a.text.split(";")[0] for a in slow if isinstance(a, BoardNotice)]
    assert not any(isinstance(a, Settle) for a in slow)
    assert had in [*listed.list.waiting, *listed.list.out]  # others measure it
    (probe,) = [h for h in handed(listed.list.tick(61.0)) if h.board == "c"]
    assert not any(isinstance(a, Settle) for a in judged(listed, "c", 1.9, 62.0))
    (probe,) = [h for h in handed(listed.list.tick(130.0)) if h.board == "c"]
    assert Settle(probe.ticket, probe.candidate, "c", 1.0) in judged(listed, "c", 1.0, 131.0)


def test_a_board_with_another_clock_is_scaled_and_told_of_once() -> None:
    listed = Listed("a", "b", depth=1)
    for n in range(40):
        listed.list.want(f"c{n}", 0.0)
    said: list[Action] = []
    for _ in range(8):
        said += judged(listed, "a", 1.0)
        said += judged(listed, "b", 1.3)
    ratios = {a.board: a.ratio for a in said if isinstance(a, Settle)}
    assert ratios == {"a": 1.0, "b": pytest.approx(1.3)}
    assert [a.board for a in said if isinstance(a, BoardNotice)] == ["b"]


def test_a_farm_that_is_slowed_as_a_whole_sets_nobody_aside() -> None:
    clocks = Clocks()
    for yardstick in (1.0, 3.0):
        for _ in range(9):
            standings = [clocks.note(board, yardstick) for board in "abc"]
    assert not any(standing.aside for standing in standings)
    assert {standing.ratio for standing in standings} == {3.0}


@pytest.mark.parametrize("order", [("fast", "slow"), ("slow", "fast")])
def test_of_two_that_disagree_the_slower_is_set_aside(order: tuple[str, str]) -> None:
    clocks, speeds = Clocks(), {"fast": 1.0, "slow": 2.0}
    for _ in range(5):
        aside = {board: clocks.note(board, speeds[board]).aside for board in order}
    assert aside == {"fast": False, "slow": True}
    clocks.forget("fast")
    assert not clocks.note("slow", 2.0).aside  # there is nobody to tell
