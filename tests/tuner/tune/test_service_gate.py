"""The gate between a session and the idle lease. The lease is a stand-in; tests/daemon has the real one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from honed.runtime.calling.leaseclient import LeaseHolder
from honed.runtime.errors import PermissionDenied
from honed.tuner.measure.gate import LeaseGate
from tests.daemon.running import DEADLINE


class StandInLease(LeaseHolder):
    """Granted when `open`; `released` is set when a revoked lease is given up."""

    def __init__(self) -> None:
        super().__init__(1.0, socket="/nowhere")
        self.open = True
        self.refuses = False
        self.released = threading.Event()
        self.holds = False

    def may_run(self) -> bool:
        return self.holds and self.open

    def wait_until_granted(self, timeout: float) -> bool:
        if self.refuses:
            raise PermissionDenied("only admins tune")
        if self.holds and not self.open:
            self.holds = False
            self.released.set()
        self.holds = self.open
        return self.open


@pytest.fixture
def lease() -> StandInLease:
    return StandInLease()


@pytest.fixture
def gate(lease: StandInLease) -> Iterator[LeaseGate]:
    with LeaseGate(lease, seconds=1000.0, patience=0.05) as opened:
        yield opened


def test_it_opens_with_the_lease(gate: LeaseGate) -> None:
    assert gate.enter()


def test_patience_ends(gate: LeaseGate, lease: StandInLease) -> None:
    lease.open = False
    assert not gate.enter()


def test_between_candidates_a_revoked_lease_is_given_up_at_once(gate: LeaseGate, lease: StandInLease) -> None:
    assert gate.enter()
    gate.leave()
    lease.open = False
    assert lease.released.wait(DEADLINE)


def test_a_candidate_is_finished_first(gate: LeaseGate, lease: StandInLease) -> None:
    assert gate.enter()
    lease.open = False
    assert not lease.released.wait(0.3)
    gate.leave()
    assert lease.released.wait(DEADLINE)


def test_closing_stops_a_session_that_waits(lease: StandInLease) -> None:
    lease.open = False
    with LeaseGate(lease, seconds=1000.0, patience=1000.0) as gate:
        threading.Timer(0.1, gate.close).start()
        assert not gate.enter()


def test_a_refusal_reaches_the_session(lease: StandInLease) -> None:
    with LeaseGate(lease, seconds=1000.0, patience=1000.0) as gate:
        lease.open, lease.refuses = False, True
        with pytest.raises(PermissionDenied, match="only admins"):
            gate.enter()


def test_only_time_with_the_lease_counts(lease: StandInLease) -> None:
    now = 0.0
    with LeaseGate(lease, seconds=10.0, patience=1000.0, clock=lambda: now) as gate:
        assert gate.enter()
        now = 4.0
        gate.leave()
        lease.open = False
        assert lease.released.wait(DEADLINE)
        now = 104.0
        lease.open = True
        assert gate.enter()
        assert gate.held == 4.0
        now = 111.0
        gate.leave()
        assert not gate.enter()


def test_the_watcher_ends_with_the_gate(lease: StandInLease) -> None:
    before = {*threading.enumerate()}  # of which some may end meanwhile
    with LeaseGate(lease, seconds=1.0, patience=1.0):
        [watcher] = [each for each in threading.enumerate() if each not in before and each.name == "lease"]
    watcher.join(DEADLINE)
    assert not watcher.is_alive()


def test_closing_takes_no_lock(gate: LeaseGate) -> None:
    """A signal handler closes it, and may have interrupted whoever holds one."""
    closing = threading.Thread(target=gate.close, daemon=True)
    with gate._lock, gate._closed._cond:  # type: ignore[attr-defined]
        closing.start()
        closing.join(DEADLINE)
        assert not closing.is_alive()
    assert not gate.enter()
