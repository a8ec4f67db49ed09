"""Grants the idle lease: reads the machine's signals, notifies tuners, and serves requests first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from honed.daemon.aio import in_thread
from honed.daemon.core.lease import Action, Grant, Lease, Overdue, Revoke
from honed.daemon.transport.connection import Connection
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.service import (
    IdleStatus,
    LeaseAsked,
    LeaseFigures,
    LeaseHeld,
    LeaseStatus,
    ReleaseFigures,
    SignalReading,
)

from .decision import MAX_GAP, Context, Decision, IdleSettings, decide, judge
from .signals import MachineSignals, OwnLoad, Sample, Signals

LOOK_SECONDS = 1.0  # Interval of readings while a tuner has the lease or waits for it
REST_SECONDS = 5.0  # Interval of readings without a tuner
_SOONEST_SECONDS = 0.2  # Minimum interval of looking for background work
_log = logging.getLogger(__name__)


class Activity:
    """A counter of requests and additions; times are in monotonic seconds."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._last: dict[str, float] = {}  # Time of the last request by model
        self._latest = started
        self._under_way = 0
        self._adding = 0

    def begin(self, model: str, now: float) -> None:
        """Count a request for a model that arrived."""
        self._under_way += 1
        self._last[model] = self._latest = now

    def end(self, model: str, now: float) -> None:
        """Count a request for a model as answered."""
        self._under_way -= 1
        self._latest = now
        if model in self._last:  # The model may have been removed
            self._last[model] = now

    def adding(self, change: int) -> None:
        """Count the begin (1) or end (-1) of an addition, or of tuning by a user."""
        self._adding += change

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._last.pop(model, None)

    def since(self, now: float) -> dict[str, float]:
        """Return the seconds since the last request, by model."""
        return {model: max(0.0, now - last) for model, last in sorted(self._last.items())}

    def samples(self, now: float) -> list[Sample]:
        """Return the seconds since the last request, and counts of requests and additions in progress."""
        if self._latest > self._started and self._last:
            text = f"since the last request, for {max(self._last, key=self._last.__getitem__)}"
        else:
            text = "since the service started; no request yet"
        return [
            Sample(signal="requests", value=max(0.0, now - self._latest), unit="s", text=text),
            Sample(signal="queue", value=float(self._under_way), unit="", text="requests not answered yet"),
            Sample(signal="adding", value=float(self._adding), unit="", text="models added or tuned by hand"),
        ]


class Leasing:
    """A granter of the lease while the machine is idle, who revokes it for a request or a busy machine."""

    def __init__(
        self,
        settings: IdleSettings,
        worker_state: Callable[[], str],
        signals: Signals | None = None,
        patience: float = MAX_GAP,
    ) -> None:
        """Initialise; the machine is idle only while `worker_state` of the default engine is "ready".

        `patience`: seconds that one look at the machine may take before it counts as busy.
        """
        self._settings = settings
        self._worker_state = worker_state
        self._signals = signals or Signals()
        self._patience = patience
        self._lease = Lease()
        self._activity = Activity(time.monotonic())
        self._machine = MachineSignals(samples=(), own=OwnLoad())
        self._decision: Decision | None = None
        self._tuners: dict[int, Connection] = {}  # Tuners that asked for the lease, by connection number
        self._wake = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def change(self, settings: IdleSettings) -> None:
        """Apply other settings from now on; a lease that they do not allow ends at once."""
        self._settings = settings
        decision = self._decide(now := time.monotonic())[1]
        if not decision.idle:
            self._perform(self._lease.readings(False, decision.why, now))
        self._wake.set()

    async def run(self) -> None:
        """Read the machine's signals, and grant or revoke the lease, until cancelled."""
        while True:
            self._wake.clear()
            # The load of tuners, and of this service with its children, is subtracted.
            own = {os.getpid(), *(tuner.peer.pid for tuner in self._tuners.values())}
            looking = asyncio.ensure_future(in_thread(self._signals.read, time.monotonic(), own))
            await asyncio.wait([looking], timeout=self._patience)
            if not looking.done():  # A driver may hang
                why = f"the machine's signals could not be read for {self._patience:g} s"
                self._perform(self._lease.readings(False, why, time.monotonic()))
            self._machine = await looking
            now = time.monotonic()
            self._decision = self._decide(now)[1]
            self._perform(self._lease.readings(self._decision.idle, self._decision.why, now))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS if self._tuners else REST_SECONDS):
                    await self._wake.wait()

    def ask(self, connection: Connection, seconds: float) -> LeaseAsked:
        """Ask for the lease and return the result of LeaseAsk.

        Raises InvalidArgument for a bound that is not allowed.
        """
        most = self._settings.max_candidate_seconds
        if not 0 < seconds <= most:
            raise InvalidArgument(f"candidate_seconds is {seconds:g}; give more than 0 and at most {most:g}")
        if connection.closed:  # The client left before its request's turn
            return LeaseAsked(granted=False, lease=0, why="the connection is closed")
        if connection.number not in self._tuners:
            self._tuners[connection.number] = connection
            connection.when_closed(lambda: self._forget(connection.number))
        why = self._lease.why
        actions = self._lease.enqueue(connection.number, seconds, time.monotonic())
        # The result tells a tuner of its grant, so no notification is sent.
        own_grants = [
            each for each in actions if isinstance(each, Grant) and each.holder == connection.number
        ]
        self._perform([each for each in actions if each not in own_grants])
        held = self._lease.held
        if held is not None and held.holder == connection.number:
            return LeaseAsked(granted=True, lease=held.number, why="")
        self._wake.set()  # Read the signals now: the machine may be idle again
        return LeaseAsked(granted=False, lease=0, why=why or "another tuner asked before")

    def release(self, connection: Connection, lease: int) -> None:
        """Release the lease of a tuner that left the device, or no longer wants it."""
        self._lease.withdraw(connection.number)
        self._perform(self._lease.release(connection.number, lease, time.monotonic()))

    @contextmanager
    def serving(self, model: str, peer: int) -> Iterator[None]:
        """Count a request of process `peer` as in progress while it is served.

        Unless the process is a tuner, the request ends the lease at once.
        """
        counted = self.request_started(model, peer)
        try:
            yield
        finally:
            if counted:
                self.request_finished(model)

    def request_started(self, model: str, peer: int) -> bool:
        """Count a request of process `peer`, as `serving` does; return whether it counts."""
        if self._is_tuner(peer):
            return False
        now = time.monotonic()
        self._activity.begin(model, now)
        if actions := self._lease.request(f"a request for {model} came", now):
            self._perform(actions)
        return True

    def request_finished(self, model: str) -> None:
        """End a request that was counted and is not served any more."""
        self._activity.end(model, time.monotonic())

    @contextmanager
    def adding(self, peer: int, why: str = "a model is being added") -> Iterator[None]:
        """Revoke and withhold the lease while a model is added, or tuned by a user, for process `peer`.

        Additions by tuners themselves do not count.
        """
        if self._is_tuner(peer):
            yield
            return
        self._activity.adding(1)
        self._perform(self._lease.readings(False, why, time.monotonic()))
        try:
            yield
        finally:
            self._activity.adding(-1)

    def forget(self, model: str) -> None:
        """Forget a model that was removed."""
        self._activity.forget(model)

    def idle(self) -> IdleStatus:
        """Return the field `idle` of ServerStatus."""
        now = time.monotonic()
        readings, decision = self._decide(now)
        return IdleStatus(
            idle=decision.idle,
            why=decision.why,
            readings=readings,
            models=self._activity.since(now),
        )

    def look_seconds(self) -> float:
        """Return the interval in seconds of looking for background work, shorter if `quiet_seconds` is."""
        return max(_SOONEST_SECONDS, min(REST_SECONDS, self._settings.quiet_seconds))

    def lease(self) -> LeaseStatus:
        """Return the field `lease` of ServerStatus."""
        now, lease = time.monotonic(), self._lease
        return strict.copy_fields(
            LeaseStatus,
            lease.counts,
            state=lease.phase.value,
            holder=self._holder(now),
            waiting=len(lease.waiting),
            seconds=lease.seconds(now),
            release=lease.releases.summary(),
        )

    def metrics(self) -> LeaseFigures:
        """Return the field `lease` of Metrics."""
        status = self.lease()
        return strict.copy_fields(
            LeaseFigures,
            status,
            held=self._lease.held is not None,
            grants=status.granted,
            release=strict.copy_fields(ReleaseFigures, status.release),
        )

    def _holder(self, now: float) -> LeaseHeld | None:
        held = self._lease.held
        if held is None:
            return None
        peer = self._tuners[held.holder].peer
        return LeaseHeld(
            pid=peer.pid,
            uid=peer.uid,
            lease=held.number,
            candidate_seconds=held.bound,
            since_seconds=now - held.since,
            revoked_seconds=now - held.revoked if held.revoked is not None else None,
            why=held.why,
        )

    def _decide(self, now: float) -> tuple[tuple[SignalReading, ...], Decision]:
        state = self._worker_state()
        worker = Sample(
            signal="worker", value=float(state != "ready"), unit="", text=f"the serving worker is {state}"
        )
        local = time.localtime()
        context = Context(
            own=self._machine.own,
            leased=self._lease.held is not None,
            was_idle=self._decision is not None and self._decision.idle,
            minute=local.tm_hour * 60 + local.tm_min,
        )
        samples = (*self._activity.samples(now), worker, *self._machine.samples)
        readings = judge(samples, self._settings, context)
        return readings, decide(readings, self._settings, now, self._decision)

    def _is_tuner(self, peer: int) -> bool:
        for tuner in self._tuners.values():
            if tuner.peer.pid == peer:
                return peer > 0
        return False

    def _forget(self, number: int) -> None:
        actions = self._lease.forget(number, time.monotonic())
        del self._tuners[number]
        self._perform(actions)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Grant():
                    self._tuners[action.holder].notify("LeaseGranted", {"lease": action.number})
                case Revoke():
                    params = {"lease": action.number, "why": action.why}
                    self._tuners[action.holder].notify("LeaseRevoked", params)
                case Overdue():
                    _log.warning(
                        "the tuner, process %d, still has the device %g s after its lease %d was revoked",
                        self._tuners[action.holder].peer.pid,
                        action.bound,
                        action.number,
                    )
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        due = self._lease.due()  # Time at which the holder becomes overdue
        if due is not None:
            delay = max(0.0, due - time.monotonic()) + 0.001
            self._deadline = asyncio.get_running_loop().call_later(delay, self._due)

    def _due(self) -> None:
        self._deadline = None
        self._perform(self._lease.tick(time.monotonic()))
