"""Decides which runs of an app's session go to honed: docs/onnxruntime.md, "How a run is routed".

It has no clock, no lock and no I/O: callers pass times in nanoseconds and serialise the calls of a route.
libhoned/ort/policy.c is the same state machine in C; tests/ort/policy.json tests both.
"""

from __future__ import annotations

ROW = 20  # Number of runs in a median
TRY_ROW = 10  # Number of own runs, then of routed runs, that are compared
CHECK_ROW = 5  # Number of own runs between routed ones
_MS, _SECOND = 1_000_000, 1_000_000_000
_OVERHEAD = _MS // 5  # Time of a request beyond the run, until it is measured
_DEADLINE_LEAST = 10 * _MS  # A shorter deadline would measure the scheduler
_DEADLINE_MEDIANS = 3
_FIRST_PAUSE, _LONGEST_PAUSE = _SECOND, 300 * _SECOND
_LONGEST_WAIT = 10 * _SECOND  # Longest pause after an answer that there is no form, which is no failure
_FIRST_LOOK, _LONGEST_LOOK = 60 * _SECOND, 600 * _SECOND
_REPORT_EVERY = 60 * _SECOND
_BUDGET_DIVISOR = 50

OWN, TRYING, ROUTED, CHECKING = "own", "trying", "routed", "checking"
NOTHING, ASK, REPORT = "nothing", "ask", "report"
LEARNING = "too few runs so far"
SHORT = "a request takes longer than a run of the app's own"
SERVICE = "the service has no verified compiled form for these sizes"
PROMISE = "the compiled form would take longer"
LOST = "routed runs took longer"
FAILED = "a routed run failed"
BUDGET = "switching has cost 2 % of the app's time"


class SwitchingCost:
    """The time that one process has lost by switching since it `begun`, in all its routes."""

    def __init__(self, now: int) -> None:
        self.begun, self.excess = now, 0


class LatestTimes:
    """The latest times; `count` counts all that were added since it was cleared."""

    def __init__(self) -> None:
        self.count = 0
        self._times = [0] * ROW

    def add(self, took: int) -> None:
        """Add the time of a run."""
        self._times[self.count % ROW] = took
        self.count += 1

    def median(self) -> int:
        """Return the lower median, 0 without times."""
        times = sorted(self._times[: min(self.count, ROW)])
        return times[(len(times) - 1) // 2] if times else 0


class Route:
    """The route of one kind of runs of a session: equal types and shapes of inputs, equal outputs.

    A model in fp16 may answer if `half` is set.
    """

    def __init__(self, account: SwitchingCost, allowance: float, *, half: bool, now: int) -> None:
        self.account, self.allowance, self.half = account, allowance, half
        self.state, self.why = OWN, LEARNING
        self.own, self.routed = LatestTimes(), LatestTimes()
        self.own_median = self.routed_median = 0  # Medians of the last comparison
        self.form_time, self.overhead = 0, _OVERHEAD  # Nanoseconds of the model, and beyond it
        self.asking = False  # A question to the service is unanswered
        self.ask_at, self.pause = 0, _FIRST_PAUSE
        self.look_at, self.look_pause = 0, _FIRST_LOOK
        self.reported = now - _REPORT_EVERY
        self.in_flight = self.slow = 0  # Routed runs in flight; slow ones of those compared
        self.own_runs = self.routed_runs = 0

    def begin(self, now: int) -> int:
        """Return the nanoseconds that the service has for a run that begins; 0: the app runs it."""
        if self.state == TRYING:
            if self.own.count < TRY_ROW:
                return 0
            if not self._affords(now, (self.in_flight + 1) * self._deadline()):
                self.why = BUDGET
                return 0
        elif self.state != ROUTED:
            return 0
        elif now >= self.look_at and self._affords(
            now, CHECK_ROW * max(0, self.own_median - self.routed_median)
        ):
            self.state = CHECKING
            self.own.count = 0
            return 0
        self.in_flight += 1
        return self._deadline()

    def record_own_run(self, now: int, took: int) -> None:
        """Record an own run that did not follow a failed routed one."""
        self.own_runs += 1
        self.own.add(took)
        if (
            self.state == OWN
            and self.own.count >= ROW
            and self.why in (LEARNING, SHORT)
            and now >= self.ask_at
        ):
            self.own_median = self.own.median()
            if self._limit() > self.overhead:
                self.why = SERVICE
            else:
                self._fall_back(now, SHORT)
        elif self.state == TRYING and self.own.count >= TRY_ROW:
            self.own_median = self.own.median()
            if not self._promises() and not self.routed.count and not self.in_flight:
                self._fall_back(now, PROMISE)
        elif self.state == CHECKING:
            self.account.excess += max(0, took - self.routed_median)
            if self.own.count < CHECK_ROW:
                return
            self.own_median = self.own.median()
            if self.routed_median <= self._limit():
                self._settle(now)
            else:
                self._fall_back(now, LOST)

    def record_routed_run(self, now: int, took: int) -> None:
        """Record a run that the service answered."""
        self.in_flight -= 1
        self.routed_runs += 1
        self.routed.add(took)
        if self.state == TRYING:
            self._judge(now, took)
        elif self.state == ROUTED and self.routed.count % ROW == 0:
            self.routed_median = self.routed.median()
            self.pause = _FIRST_PAUSE
            if self.routed_median > self._limit():
                self.account.excess += ROW * (self.routed_median - self._limit())
                self.look_at = now

    def record_failure(self, now: int, took: int) -> None:
        """Record a routed run that failed in any way; the app's own session then runs it."""
        self.in_flight -= 1
        self.own_runs += 1
        self.account.excess += took
        if self.state != OWN:
            self._fall_back(now, FAILED)

    def ask(self, now: int) -> str:
        """Return ASK or REPORT if the service is to be asked now, with a report every minute, else NOTHING.

        The caller passes the answer to `accept_time` or `accept_absence`.
        """
        settled = self.state == ROUTED or (self.state == OWN and self.why not in (LEARNING, SHORT))
        if not settled or self.asking or now < self.ask_at:
            return NOTHING
        self.asking = True
        if now - self.reported < _REPORT_EVERY:
            return ASK
        self.reported = now
        return REPORT

    def accept_time(self, now: int, form_time: int, *, half: bool) -> None:
        """Process the time of a verified compiled model."""
        if half and not self.half:
            self.accept_absence(now)
            return
        self.asking, self.form_time = False, form_time
        if self.state == ROUTED:
            self.ask_at = now + _REPORT_EVERY
        elif self.state == OWN and now >= self.ask_at:  # Earlier: it was asked before a failure
            self.own_median = self.own.median()
            if not self._promises():
                self._fall_back(now, PROMISE)
                self.overhead -= max(0, self.overhead - _OVERHEAD) // 2  # A lost comparison fades
                return
            self.state, self.why = TRYING, ""
            self.own.count = self.routed.count = self.slow = 0

    def accept_absence(self, now: int) -> None:
        """Process the answer that there is no verified model for these sizes, or no service."""
        self.asking = False
        self._fall_back(now, SERVICE, _LONGEST_WAIT)

    def rests_until(self, now: int) -> int:
        """Return until when own runs are not needed, so that callers need not look up their route."""
        if self.state != OWN or self.own.count < ROW:
            return 0
        return 1 << 62 if self.asking else self.ask_at

    def _judge(self, now: int, took: int) -> None:
        """Decide by the majority of the compared runs, as soon as there is one."""
        limit = self._limit()
        self.account.excess += max(0, took - limit)
        self.slow += took > limit
        if 2 * self.slow < TRY_ROW and 2 * (self.routed.count - self.slow) <= TRY_ROW:
            return
        self.routed_median = self.routed.median()
        self.overhead = max(0, self.routed_median - self.form_time)
        if 2 * self.slow < TRY_ROW:
            self._settle(now)
        else:
            self._fall_back(now, LOST)

    def _limit(self) -> int:
        """Return the longest acceptable time of a routed run."""
        return int(self.own_median * self.allowance)

    def _deadline(self) -> int:
        return max(_DEADLINE_MEDIANS * max(self._limit(), self.own_median), _DEADLINE_LEAST)

    def _affords(self, now: int, more: int) -> bool:
        return self.account.excess + more <= (now - self.account.begun) // _BUDGET_DIVISOR

    def _promises(self) -> bool:
        return self.form_time + self.overhead <= self._limit()

    def _fall_back(self, now: int, why: str, longest: int = _LONGEST_PAUSE) -> None:
        self.state, self.why = OWN, why
        self.ask_at = now + min(self.pause, longest)
        self.pause = max(self.pause, min(2 * self.pause, longest))
        self.look_pause = _FIRST_LOOK

    def _settle(self, now: int) -> None:
        self.state, self.why = ROUTED, ""
        self.routed.count = 0
        self.look_at = now + self.look_pause
        self.look_pause = min(2 * self.look_pause, _LONGEST_LOOK)
        self.ask_at = now + _REPORT_EVERY
