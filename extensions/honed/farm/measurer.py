"""Candidates judged by the boards of a farm, in the place of one device that measures them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from uuid import uuid4

from honed.machine import bounds, profilefile
from honed.machine.kernellog import FaultStory
from honed.machine.profile import DevicePeaks, DeviceProfile
from honed.protocol.errors import HonedError, InvalidArgument, Unavailable
from honed.tuner.measure.candidate import Begin, Candidate, Workload
from honed.tuner.records.rows import check_verdict
from honed.tuner.records.verdict import Outcome, Verdict

from . import rows
from .boards import Came, DaskBoards
from .worklist import (
    Action,
    BoardBlame,
    BoardLeft,
    CandidateJudged,
    CandidateWanted,
    Event,
    GivenBack,
    HandOut,
    Joined,
    LoadTask,
    NotLoaded,
    Refused,
    Settle,
    TaskLoaded,
    Tell,
    Tick,
    Took,
    Unwanted,
    WorkList,
)

_LOOK_SECONDS = 1.0  # between two looks at who is there
_PATIENCE_SECONDS = 1800.0  # without any answer, after which a search ends
_BROKEN_SECONDS = 10.0  # that a board is left alone whose call failed
_SETTLE_SECONDS = 10.0


@dataclass(slots=True)
class _Asked:
    """A candidate under the name it is asked for by; its verdict when it has one."""

    candidate: Candidate
    noted: bool = False
    verdict: Verdict | None = None
    phases: Mapping[str, float] | None = None
    refused: HonedError | None = None


@dataclass(frozen=True, slots=True)
class _Ruled:
    """What a board made of a candidate."""

    verdict: Verdict
    phases: Mapping[str, float]


class FarmMeasurer:
    """`Measures` by boards. All that boards judge of a batch is asked of them as soon as it is known.

    A candidate is noted (`begin`) when it is first given to a board, not before. Verdicts have the board's
    speed beside the farm's as their timings' `yardstick_ratio`, and the yardstick brought to the farm's.
    """

    def __init__(
        self,
        boards: DaskBoards,
        profile: DeviceProfile,
        bench: str,
        begin: Begin,
        tell: Callable[[str], None],
        *,
        ahead: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over `boards`, of which those with a device as `profile` has it are used.

        `bench` is the device that is predicted, "" for one that measures. `tell` gets sentences on boards.
        Raises InvalidArgument where `profile` has no peaks.
        """
        if profile.peaks is None:
            raise InvalidArgument("the farm's boards have no peaks; see `hone doctor` on them")
        self.ahead = ahead
        self.rate = 0.0
        self.peaks: DevicePeaks = profile.peaks  # the best that any board has seen
        self.spent: dict[str, float] = {}
        self.counts: dict[str, int] = {}  # verdicts taken, by board
        self._boards = boards
        self._profile = profile
        self._bench = bench
        self._begin = begin
        self._tell = tell
        self._clock = clock
        self._search = uuid4().hex
        self._list = WorkList()
        self._workload: Workload | None = None
        self._memory = b""
        self._best: float | None = None
        self._asked: dict[str, _Asked] = {}  # by name in the work list
        self._names: dict[str, str] = {}  # the latest name of a candidate, by its id
        self._count = 0
        self._greeted: dict[int, str] = {}  # boards by call
        self._loads: dict[int, tuple[str, str]] = {}  # boards and tasks by call
        self._tickets: dict[int, int] = {}  # tickets by call
        self._settling: set[int] = set()
        self._present: frozenset[str] = frozenset()
        self._hosts: dict[str, str] = {}
        self._complained: dict[str, str] = {}
        self._rulings: dict[int, _Ruled] = {}  # by ticket
        self._faults: list[tuple[str, FaultStory]] = []
        self._looked = float("-inf")
        self._heard = clock()

    def close(self) -> None:
        """Leave the farm."""
        self._boards.close()

    @property
    def joined(self) -> int:
        """How many boards candidates are given to."""
        return len(self._list.boards)

    # -- what a session asks for

    def load(self, workload: Workload) -> None:
        """Have boards judge candidates of `workload` from now on; waits until one of them is ready."""
        self._workload = workload
        self._memory = rows.pack(rows.memory_of(workload, self._search))
        self._best = None
        self._asked.clear()
        self._names.clear()
        self._heard = self._clock()
        self._feed(Took(workload.task))
        while not any(board.ready == workload.task for board in self._list.boards.values()):
            self._pump()

    def prepare(self, candidate: Candidate) -> None:
        """Have a candidate judged as soon as a board is free."""
        if candidate.id not in self._names:
            self._want(candidate)

    def build(self, candidates: object) -> None:
        """Nothing: boards build what they are given."""

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """The verdict of whichever board judged it, or judges it now; raises what `begin` raised for it."""
        if self._workload is None:
            raise InvalidArgument("no workload is loaded; load one before judging candidates")
        began = self._clock()
        self._best = best
        self._heard = began
        name = self._names.get(candidate.id) or self._want(candidate)
        asked = self._asked[name]
        while asked.verdict is None and asked.refused is None:
            self._pump()
        del self._asked[name], self._names[candidate.id]
        waited = self._clock() - began
        phases = asked.phases or {}
        whole = sum(phases.values())
        self.spent = {phase: seconds / whole * waited for phase, seconds in phases.items() if whole}
        if asked.refused is not None:
            raise asked.refused
        assert asked.verdict is not None
        return replace(asked.verdict, seconds=waited)

    def forget(self) -> dict[str, Verdict]:
        """Drop what no board has; gives the verdicts that nobody asked for, once boards have ended theirs."""
        self._feed(Unwanted())
        self._heard = self._clock()
        while self._list.out:
            self._pump()
            self._feed(Unwanted())  # what came back meanwhile
        left = {
            asked.candidate.id: asked.verdict for asked in self._asked.values() if asked.verdict is not None
        }
        self._asked.clear()
        self._names.clear()
        return left

    def settle(self) -> None:
        """Wait until boards have looked into their kernel logs."""
        self._settling = {self._boards.settle(board) for board in self._list.boards}
        until = self._clock() + _SETTLE_SECONDS
        while self._settling and self._clock() < until:
            self._pump()

    def take_faults(self) -> list[tuple[str, FaultStory]]:
        """Faults that boards found since the last call, with the ids of their candidates."""
        found, self._faults = self._faults, []
        return found

    def _want(self, candidate: Candidate) -> str:
        self._count += 1
        name = f"{self._count} {candidate.id}"
        self._asked[name] = _Asked(candidate)
        self._names[candidate.id] = name
        self._feed(CandidateWanted(name))
        return name

    # -- between the work list and the boards

    def _feed(self, *events: Event) -> None:
        """Tell the work list, and do what it says, until there is nothing more to do."""
        todo = list(events)
        while todo:
            for action in self._list.handle(todo.pop(0), self._clock()):
                told = self._perform(action)
                if told is not None:
                    todo.append(told)

    def _perform(self, action: Action) -> Event | None:
        match action:
            case LoadTask(board=board, task=task):
                self._loads[self._boards.load(board, self._memory)] = board, task
            case HandOut(ticket=ticket, board=board, candidate=name):
                return self._hand_out(ticket, board, name)
            case Settle(ticket=ticket, candidate=name, board=board, ratio=ratio):
                self._settled(self._rulings.pop(ticket), name, board, ratio)
            case BoardBlame(candidate=name, deaths=deaths):
                reason = f"{deaths} boards left the farm while they ran it"
                self._asked[name].verdict = Verdict(outcome=Outcome.CRASH, reason=reason)
            case Tell(board=board, text=text):
                self._tell(f"{self._host(board)} {text}")
        return None

    def _hand_out(self, ticket: int, board: str, name: str) -> Event | None:
        assert self._workload is not None
        asked = self._asked[name]
        if not asked.noted:
            try:
                self._begin(asked.candidate)
            except HonedError as error:  # in quarantine, or in flight elsewhere
                asked.refused = error
                return Refused(ticket)
            asked.noted = True
        trial = rows.FarmTrial(
            search=self._search,
            task=self._workload.task,
            candidate=rows.candidate_map(asked.candidate),
            best=self._best,
        )
        self._tickets[self._boards.judge(board, rows.pack(trial))] = ticket
        return None

    def _settled(self, ruled: _Ruled, name: str, board: str, ratio: float) -> None:
        asked, verdict, host = self._asked[name], ruled.verdict, self._hosts[board]
        if verdict.timing is not None:
            verdict = replace(verdict, timing=replace(verdict.timing, yardstick_ratio=ratio))
        if verdict.yardstick_s is not None:
            verdict = replace(verdict, yardstick_s=verdict.yardstick_s / ratio)
        asked.verdict, asked.phases = replace(verdict, host=host), ruled.phases
        self.counts[host] = self.counts.get(host, 0) + 1

    def _pump(self) -> None:
        """Take in what comes within a second. Raises Unavailable where nothing has for long."""
        now = self._clock()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look()
        came = self._boards.came(_LOOK_SECONDS)
        if came is not None:
            self._heard = self._clock()
            self._take(came)
        elif self._clock() - self._heard > _PATIENCE_SECONDS:
            raise Unavailable(
                f"no board of the farm has answered for {_PATIENCE_SECONDS / 60:.0f} min; "
                "see `hone status` on them, and tune again when they are idle"
            )
        else:
            self._feed(Tick())

    def _look(self) -> None:
        present = self._boards.present()
        for board in sorted(present - self._present):
            self._greeted[self._boards.greet(board)] = board
        for board in sorted(self._present - present):
            if board in self._list.boards:
                self._tell(f"{self._host(board)} has left; what it had is given to others")
            for number in self._calls_of(board):
                self._boards.give_up(number)
                for calls in (self._greeted, self._loads, self._tickets):
                    calls.pop(number, None)
            self._feed(BoardLeft(board))
            self._hosts.pop(board, None)
        self._present = present

    def _calls_of(self, board: str) -> list[int]:
        return [
            *(n for n, b in self._greeted.items() if b == board),
            *(n for n, (b, _) in self._loads.items() if b == board),
            *(n for n, ticket in self._tickets.items() if self._board_of(ticket) == board),
        ]

    def _board_of(self, ticket: int) -> str | None:
        known = self._list.tickets.get(ticket)
        return None if known is None else known.board

    def _take(self, came: Came) -> None:
        board = self._greeted.pop(came.number, None)
        if board is not None:
            self._take_greeting(board, came)
            return
        answer: rows.Answer
        try:
            answer = _unfit(came.why) if came.data is None else rows.answer(came.data)
        except InvalidArgument as error:
            answer = _unfit(str(error))
        loading = self._loads.pop(came.number, None)
        if loading is not None:
            self._take_load(*loading, answer)
        elif came.number in self._settling:
            self._settling.discard(came.number)
            if isinstance(answer, rows.Ruling):
                self._faults += rows.stories(answer.faults)
        else:
            self._take_ruling(self._tickets.pop(came.number, 0), answer)

    def _take_greeting(self, board: str, came: Came) -> None:
        if not came.data:
            return  # somebody else's worker, or one that is gone again
        try:
            greeting = rows.unpack(rows.Greeting, came.data)
            profile = profilefile.from_dict(greeting.profile)
        except HonedError as error:
            self._tell(f"{board} cannot be used: {error}")
            return
        self._hosts[board] = greeting.host
        if greeting.version != rows.VERSION:
            self._tell(f"{greeting.host} has another honed ({greeting.honed}); install the same")
        elif greeting.bench == self._bench and profile.identity == self._profile.identity:
            if profile.peaks is not None:
                self.peaks = bounds.higher(self.peaks, profile.peaks)
            self._feed(Joined(board, greeting.depth))

    def _take_load(self, board: str, task: str, answer: rows.Answer) -> None:
        if isinstance(answer, rows.BoardReady):
            if task == self._list.task:
                self.rate = answer.rate
            self._feed(TaskLoaded(board, task))
        else:
            self._feed(NotLoaded(board, task, self._put_off(board, answer)))

    def _take_ruling(self, ticket: int, answer: rows.Answer) -> None:
        board = self._board_of(ticket)
        if board is None:
            return
        try:
            ruled = _ruled(answer)
        except InvalidArgument as error:
            put_off = answer if isinstance(answer, rows.NotNow) else _unfit(str(error))
            self._feed(GivenBack(ticket, self._put_off(board, put_off), put_off.reload))
            return
        assert isinstance(answer, rows.Ruling)
        self._complained.pop(board, None)
        self._faults += rows.stories(answer.faults)
        self._rulings[ticket] = ruled
        self._feed(CandidateJudged(ticket, ruled.verdict.yardstick_s))
        self._rulings.pop(ticket, None)

    def _put_off(self, board: str, answer: rows.Answer) -> float:
        """Seconds that a board is left alone; why is told once."""
        if not isinstance(answer, rows.NotNow):
            return _BROKEN_SECONDS
        if self._complained.get(board) != answer.why:
            self._complained[board] = answer.why
            self._tell(f"{self._host(board)} gave a candidate back: {answer.why}")
        return answer.seconds

    def _host(self, board: str) -> str:
        host = self._hosts.get(board, board)
        alone = sum(h == host for h in self._hosts.values()) == 1
        return host if alone else f"{host} ({board})"


def _unfit(why: str) -> rows.NotNow:
    """In the place of an answer that did not come, or makes no sense."""
    return rows.NotNow(why=why, seconds=_BROKEN_SECONDS, reload=True)


def _ruled(answer: rows.Answer) -> _Ruled:
    """A verdict in an answer; raises InvalidArgument where there is none."""
    if not isinstance(answer, rows.Ruling):
        raise InvalidArgument("it is no ruling")
    verdict = rows.verdict_of(answer)
    check_verdict(verdict)
    if verdict.yardstick_s is not None and not 0 < verdict.yardstick_s < math.inf:
        raise InvalidArgument(f"a yardstick of {verdict.yardstick_s} s cannot be")
    return _Ruled(verdict, answer.phases)
