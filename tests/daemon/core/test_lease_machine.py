"""The state machine of the lease, and the times that tuners take to leave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from honed.daemon.core.lease import (
    BUCKETS,
    RECENT,
    Action,
    Grant,
    Lease,
    LeasePhase,
    Overdue,
    ReleaseTimes,
    Revoke,
)
from honed.runtime.errors import InvalidArgument

TUNERS = st.integers(1, 3)


def phase(lease: Lease) -> LeasePhase:
    return lease.phase


def idle_lease() -> Lease:
    lease = Lease()
    assert lease.readings(True, "", 0.0) == []
    return lease


def test_granted_while_idle_revoked_by_a_request_and_free_again() -> None:
    lease = idle_lease()
    assert lease.enqueue(7, 2.0, 1.0) == [Grant(7, 1)]
    assert phase(lease) is LeasePhase.GRANTED
    assert lease.request("a request came", 5.0) == [Revoke(7, 1, "a request came")]
    assert phase(lease) is LeasePhase.REVOKING
    assert lease.due() == 7.0
    assert lease.request("another", 5.1) == lease.tick(7.0) == []
    assert lease.release(7, 1, 6.5) == []
    assert phase(lease) is LeasePhase.FREE
    assert lease.releases.summary().max_ms == 1500, "from the first request"
    assert lease.seconds(100.0) == 5.5
    assert lease.enqueue(7, 2.0, 8.0) == [], "the request made the machine busy until it is looked at again"
    assert lease.readings(True, "", 40.0) == [Grant(7, 2)]


def test_not_granted_while_busy_and_the_first_to_ask_is_the_first() -> None:
    lease = Lease()
    assert lease.enqueue(1, 1.0, 0.0) == lease.enqueue(2, 1.0, 0.1) == lease.readings(False, "hot", 1.0) == []
    assert lease.why == "hot"
    assert lease.readings(True, "", 2.0) == [Grant(1, 1)]
    assert lease.waiting == (2,)
    assert lease.release(1, 1, 3.0) == [Grant(2, 2)]
    assert lease.forget(2, 4.0) == []
    assert phase(lease) is LeasePhase.FREE


def test_a_busy_machine_revokes_too_but_counts_no_interrupted_request() -> None:
    lease = idle_lease()
    lease.enqueue(1, 1.0, 0.0)
    assert lease.readings(False, "on battery", 1.0) == [Revoke(1, 1, "on battery")]
    assert lease.readings(True, "", 1.1) == lease.readings(False, "hot", 1.2) == []
    assert lease.release(1, 1, 1.5) == []
    assert lease.releases.summary().count == 0
    # A request that comes while the holder is leaving has waited for it all the same.
    lease.readings(True, "", 2.0)
    lease.enqueue(1, 1.0, 2.0)
    lease.readings(False, "hot", 3.0)
    lease.request("r", 3.5)
    lease.release(1, 2, 3.75)
    assert lease.releases.summary().max_ms == 250


def test_overdue_is_said_once_and_ends_with_the_holder() -> None:
    lease = idle_lease()
    lease.enqueue(1, 0.5, 0.0)
    lease.request("r", 10.0)
    assert lease.tick(10.5) == []
    assert lease.tick(10.6) == [Overdue(1, 1, 0.5)]
    assert lease.tick(11.0) == []
    assert phase(lease) is LeasePhase.OVERDUE
    assert lease.readings(True, "", 12.0) == lease.enqueue(2, 1.0, 12.0) == [], (
        "nobody else gets it meanwhile"
    )
    assert lease.forget(1, 13.0) == [Grant(2, 2)]
    assert lease.releases.summary().max_ms == 3000
    assert lease.counts.overdue == 1


def test_who_must_leave_must_say_so_before_asking_again() -> None:
    lease = idle_lease()
    lease.enqueue(1, 0.5, 0.0)
    lease.enqueue(1, 0.7, 0.0)
    lease.request("r", 1.0)
    assert lease.due() == 1.7, "asking again changes the bound"
    with pytest.raises(InvalidArgument, match="lease 1 was revoked; release it"):
        lease.enqueue(1, 0.5, 1.0)


def test_words_about_other_leases_change_nothing() -> None:
    lease = idle_lease()
    lease.enqueue(1, 0.5, 0.0)
    assert lease.release(2, 1, 1.0) == lease.release(1, 7, 1.0) == lease.forget(2, 1.0) == []
    assert phase(lease) is LeasePhase.GRANTED
    lease.enqueue(2, 0.5, 1.0)
    lease.withdraw(2)
    assert lease.release(1, 1, 2.0) == []


class Machine(RuleBasedStateMachine):
    """Any order of events; tuners see what is sent to them, and leave when they like."""

    def __init__(self) -> None:
        super().__init__()
        self.lease = Lease()
        self.now = 0.0
        self.believes: dict[int, int] = {}  # tuner -> the lease it uses the device under
        self.told: dict[int, float] = {}  # tuner -> when it was told to leave
        self.bounds: dict[int, float] = {}
        self.wants: set[int] = set()
        self.overdue: set[int] = set()  # leases
        self.interrupted: float | None = None
        self.times: list[float] = []
        self.held_seconds = 0.0
        self.since = 0.0

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant(holder, number):
                    assert not self.believes, "never two holders"
                    assert holder in self.wants, "nobody gets what it does not want"
                    self.wants.discard(holder)
                    self.believes[holder], self.since = number, self.now
                case Revoke(holder, number, why):
                    assert self.believes[holder] == number
                    assert holder not in self.told, "told once"
                    assert why
                    self.told[holder] = self.now
                case Overdue(holder, number, bound):
                    assert self.now - self.told[holder] > bound
                    assert number not in self.overdue
                    self.overdue.add(number)

    def left(self, tuner: int) -> None:
        self.wants.discard(tuner)
        if self.believes.pop(tuner, None) is not None:
            self.held_seconds += self.now - self.since
            if self.interrupted is not None:
                self.times.append(self.now - self.interrupted)
            self.interrupted = None
            self.told.pop(tuner, None)

    @rule(tuner=TUNERS, bound=st.floats(0.1, 5.0))
    def ask(self, tuner: int, bound: float) -> None:
        if tuner in self.told:
            with pytest.raises(InvalidArgument):
                self.lease.enqueue(tuner, bound, self.now)
            return
        self.bounds[tuner] = bound
        if tuner not in self.believes:
            self.wants.add(tuner)
        self.act(self.lease.enqueue(tuner, bound, self.now))

    @rule(tuner=TUNERS)
    def release(self, tuner: int) -> None:
        number = self.believes.get(tuner, 0)
        self.left(tuner)
        self.lease.withdraw(tuner)
        self.act(self.lease.release(tuner, number, self.now))

    @rule(tuner=TUNERS, number=st.integers(0, 20))
    def say_nonsense(self, tuner: int, number: int) -> None:
        if self.believes.get(tuner) != number:
            assert self.lease.release(tuner, number, self.now) == []

    @rule(tuner=TUNERS)
    def disconnect(self, tuner: int) -> None:
        self.left(tuner)
        self.act(self.lease.forget(tuner, self.now))

    @rule()
    def request(self) -> None:
        if self.believes and self.interrupted is None:
            self.interrupted = self.now
        self.act(self.lease.request("a request", self.now))
        assert set(self.believes) <= set(self.told), "the holder knows at once"

    @rule(idle=st.booleans())
    def look(self, idle: bool) -> None:
        self.act(self.lease.readings(idle, "" if idle else "busy", self.now))
        if not idle:
            assert set(self.believes) <= set(self.told)
        elif not self.believes:
            assert not self.lease.waiting, "an idle machine keeps nobody waiting"

    @rule(seconds=st.floats(0.0, 10.0))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.act(self.lease.tick(self.now))

    @precondition(lambda self: self.told)
    @invariant()
    def told_tuners_leave_or_are_overdue(self) -> None:
        (tuner,) = self.told
        self.act(self.lease.tick(self.now))
        late = self.now - self.told[tuner] > self.bounds[tuner]
        assert late == (phase(self.lease) is LeasePhase.OVERDUE) == (self.believes[tuner] in self.overdue)
        assert late == (self.lease.due() is None)

    @invariant()
    def the_books_agree(self) -> None:
        held = self.lease.held
        assert ({held.holder: held.number} if held else {}) == self.believes
        assert (phase(self.lease) is LeasePhase.FREE) == (not self.believes)
        assert set(self.lease.waiting) == self.wants
        running = self.now - self.since if self.believes else 0.0
        assert self.lease.seconds(self.now) == pytest.approx(self.held_seconds + running)
        assert self.lease.releases.summary().count == len(self.times)
        assert self.lease.releases.summary().max_ms == 1e3 * max(self.times, default=0.0)


TestMachine = Machine.TestCase


@given(st.lists(st.floats(0, 20, allow_nan=False), max_size=50))
def test_times_of_leaving(times: list[float]) -> None:
    kept = ReleaseTimes()
    for seconds in times:
        kept.add(seconds)
    summary = kept.summary()
    assert (summary.count, summary.max_ms) == (len(times), 1e3 * max(times, default=0.0))
    if times:
        assert summary.p50_ms == 1e3 * np.percentile(times, 50, method="inverted_cdf")
        assert summary.p99_ms == 1e3 * np.percentile(times, 99, method="inverted_cdf")
    assert [(each.le_seconds, each.count) for each in summary.buckets] == [
        *((bound, sum(seconds <= bound for seconds in times)) for bound in BUCKETS),
        (None, len(times)),
    ]
    assert summary.sum_seconds == pytest.approx(sum(times))


def test_percentiles_are_of_the_latest_and_the_rest_of_all() -> None:
    kept = ReleaseTimes()
    kept.add(9.0)
    for _ in range(RECENT):
        kept.add(0.5)
    summary = kept.summary()
    assert (summary.count, summary.max_ms, summary.p99_ms) == (RECENT + 1, 9000, 500)
