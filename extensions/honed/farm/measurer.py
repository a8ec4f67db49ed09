"""Judges a session's candidates on the boards of a farm, in place of a device."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from honed.jobs import commands
from honed.machine.kernellog.story import FaultIncident
from honed.machine.profile import DevicePeaks, DeviceProfile, higher_peaks
from honed.protocol.errors import HonedError, InvalidArgument, Unavailable
from honed.tuner.measure.candidate import Begin, Candidate, Workload
from honed.tuner.records.rows import Outcome, Verdict, check_verdict
from honed.tuner.tune.children import BATCH
from honed.tuner.tune.session import MeasurementBackend, Sharing
from honed.valhall.bench import AHEAD, YARDSTICK

from . import rows
from .boards import BoardAnswer, DaskBoards, FarmChoice, join
from .worklist import Action, AssignCandidate, BoardBlame, BoardNotice, LoadBoardTask, Settle, WorkList

_LOOK_SECONDS = 1.0  # Time between two looks at the boards present
_PATIENCE_SECONDS = 1800.0  # Time without any answer after which a search ends
_BROKEN_SECONDS = 10.0  # Time that a board whose call failed gets no candidates
_SETTLE_SECONDS = 10.0


@dataclass(slots=True)
class _Asked:
    """A candidate by its name in the work list, and its verdict once there is one."""

    candidate: Candidate
    noted: bool = False
    verdict: Verdict | None = None
    phases: Mapping[str, float] | None = None
    refused: HonedError | None = None


class FarmMeasurer:
    """A `CandidateRunner` on boards: each candidate is queued for them as soon as it is prepared.

    A candidate is noted (`begin`) when it is first sent to a board, not before. The timing of a verdict has
    the ratio of the board's yardstick to the farm's as its `yardstick_ratio`, and the verdict's yardstick is
    scaled to the farm's.
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
        """Own `boards`, of which those with the device of `profile` are used.

        `bench` is the device that is predicted, "" for one that measures. `tell` gets sentences on boards.
        Raises InvalidArgument if `profile` has no peaks.
        """
        if profile.peaks is None:
            raise InvalidArgument("the farm's boards have no peaks; see `hone doctor` on them")
        self.ahead = ahead
        self.rate = 0.0
        self.peaks: DevicePeaks = profile.peaks  # The best of all boards
        self.spent: dict[str, float] = {}
        self.counts: dict[str, int] = {}  # Verdicts accepted, by host
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
        self._asked: dict[str, _Asked] = {}  # Requested candidates, by name in the work list
        self._names: dict[str, str] = {}  # The latest name of a candidate, by its id
        self._count = 0
        self._calls: dict[
            int, tuple[str, Callable[[BoardAnswer], None]]
        ] = {}  # Boards, and the handlers of their answers
        self._present: frozenset[str] = frozenset()
        self._hosts: dict[str, str] = {}
        self._complained: dict[str, str] = {}
        self._rulings: dict[int, tuple[Verdict, Mapping[str, float]]] = {}  # Verdicts with phases, by ticket
        self._faults: list[tuple[str, FaultIncident]] = []
        self._looked = float("-inf")
        self._heard = clock()

    def close(self) -> None:
        """Close the connection to the farm; its boards stay."""
        self._boards.close()

    @property
    def board_count(self) -> int:
        """Number of boards that judge candidates."""
        return len(self._list.boards)

    def load(self, workload: Workload) -> None:
        """Have boards judge candidates of `workload` from now on; wait until one of them is ready."""
        self._workload = workload
        self._memory = rows.pack(rows.memory_of(workload, self._search))
        self._best = None
        self._asked.clear()
        self._names.clear()
        self._heard = self._clock()
        self._do(self._list.take(workload.task, self._clock()))
        while not any(board.ready == workload.task for board in self._list.boards.values()):
            self._pump()

    def prepare(self, candidate: Candidate) -> None:
        """Have a candidate judged as soon as a board is free."""
        if candidate.id not in self._names:
            self._want(candidate)

    def build(self, candidates: object) -> None:
        """Do nothing: boards build what they judge."""

    def measure(self, candidate: Candidate, best: float | None = None) -> Verdict:
        """Return a board's verdict on the candidate, and wait for it if need be.

        Raises what `begin` raised for it.
        """
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
        """Drop the candidates that no board has; return the verdicts that `measure` did not collect.

        Waits until boards have ended theirs.
        """
        self._heard = self._clock()
        self._do(self._list.drop(self._heard))
        while self._list.out:
            self._pump()
            self._do(self._list.drop(self._clock()))  # Drop candidates that boards gave back meanwhile
        left = {
            asked.candidate.id: asked.verdict for asked in self._asked.values() if asked.verdict is not None
        }
        self._asked.clear()
        self._names.clear()
        return left

    def settle(self) -> None:
        """Wait until boards have looked into their kernel logs, 10 s at most."""
        asked = {self._boards.settle(board): (board, self._take_settled) for board in self._list.boards}
        self._calls |= asked
        until = self._clock() + _SETTLE_SECONDS
        while self._calls.keys() & asked.keys() and self._clock() < until:
            self._pump()

    def take_faults(self) -> list[tuple[str, FaultIncident]]:
        """Return faults that boards found since the last call, with the ids of their candidates."""
        found, self._faults = self._faults, []
        return found

    def _want(self, candidate: Candidate) -> str:
        self._count += 1
        name = f"{self._count} {candidate.id}"
        self._asked[name] = _Asked(candidate)
        self._names[candidate.id] = name
        self._do(self._list.want(name, self._clock()))
        return name

    def _do(self, actions: list[Action]) -> None:
        for action in actions:  # The list grows while it is read
            actions += self._perform(action)

    def _perform(self, action: Action) -> list[Action]:
        match action:
            case LoadBoardTask(board=board, task=task):
                number = self._boards.load(board, self._memory)
                self._calls[number] = board, partial(self._take_load, board, task)
            case AssignCandidate(ticket=ticket, board=board, candidate=name):
                return self._hand_out(ticket, board, name)
            case Settle(ticket=ticket, candidate=name, board=board, ratio=ratio):
                self._record_verdict(*self._rulings.pop(ticket), name, board, ratio)
            case BoardBlame(candidate=name, deaths=deaths):
                reason = f"{deaths} boards left the farm while they ran it"
                self._asked[name].verdict = Verdict(outcome=Outcome.CRASH, reason=reason)
            case BoardNotice(board=board, text=text):
                self._tell(f"{self._host(board)} {text}")
        return []

    def _hand_out(self, ticket: int, board: str, name: str) -> list[Action]:
        assert self._workload is not None
        asked = self._asked[name]
        if not asked.noted:
            try:
                self._begin(asked.candidate)
            except HonedError as error:  # The candidate is in quarantine, or in flight elsewhere
                asked.refused = error
                return self._list.refuse(ticket, self._clock())
            asked.noted = True
        trial = rows.FarmTrial(
            search=self._search,
            task=self._workload.task,
            candidate=rows.candidate_map(asked.candidate),
            best=self._best,
        )
        number = self._boards.judge(board, rows.pack(trial))
        self._calls[number] = board, partial(self._take_ruling, board, ticket)
        return []

    def _record_verdict(
        self, verdict: Verdict, phases: Mapping[str, float], name: str, board: str, ratio: float
    ) -> None:
        asked, host = self._asked[name], self._hosts[board]
        if verdict.timing is not None:
            verdict = replace(verdict, timing=replace(verdict.timing, yardstick_ratio=ratio))
        if verdict.yardstick_s is not None:
            verdict = replace(verdict, yardstick_s=verdict.yardstick_s / ratio)
        asked.verdict, asked.phases = replace(verdict, host=host), phases
        self.counts[host] = self.counts.get(host, 0) + 1

    def _pump(self) -> None:
        """Process what arrives within a second; raise Unavailable if nothing has for half an hour."""
        now = self._clock()
        if now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look()
        came = self._boards.next_answer(_LOOK_SECONDS)
        if came is not None:
            self._heard = self._clock()
            if came.number in self._calls:
                _, take = self._calls.pop(came.number)
                take(came)
        elif self._clock() - self._heard > _PATIENCE_SECONDS:
            raise Unavailable(
                f"no board of the farm has answered for {_PATIENCE_SECONDS / 60:.0f} min; "
                "see `hone status` on them, and tune again when they are idle"
            )
        else:
            self._do(self._list.tick(self._clock()))

    def _look(self) -> None:
        present = self._boards.present()
        for board in sorted(present - self._present):
            self._calls[self._boards.greet(board)] = board, partial(self._take_greeting, board)
        for board in sorted(self._present - present):
            if board in self._list.boards:
                self._tell(f"{self._host(board)} has left; what it had is given to others")
            for number in [number for number, (whose, _) in self._calls.items() if whose == board]:
                self._boards.give_up(number)
                del self._calls[number]
            self._do(self._list.leave(board, self._clock()))
            self._hosts.pop(board, None)
        self._present = present

    def _take_greeting(self, board: str, came: BoardAnswer) -> None:
        if not came.data:
            return  # The worker of another program, or one that has left
        try:
            greeting = rows.unpack(rows.Greeting, came.data)
            profile = DeviceProfile.from_dict(greeting.profile)
        except HonedError as error:
            self._tell(f"{board} cannot be used: {error}")
            return
        self._hosts[board] = greeting.host
        if greeting.version != rows.VERSION:
            self._tell(f"{greeting.host} has another honed ({greeting.honed}); install the same")
        elif greeting.bench == self._bench and profile.identity == self._profile.identity:
            if profile.peaks is not None:
                self.peaks = higher_peaks(self.peaks, profile.peaks)
            self._do(self._list.join(board, greeting.depth, self._clock()))

    def _take_load(self, board: str, task: str, came: BoardAnswer) -> None:
        answer = _answer(came)
        if isinstance(answer, rows.BoardReady):
            if task == self._list.task:
                self.rate = answer.rate
            self._do(self._list.record_load(board, task, self._clock()))
        else:
            away = self._put_off(board, answer)
            self._do(self._list.record_load(board, None, self._clock(), away=away))

    def _take_settled(self, came: BoardAnswer) -> None:
        answer = _answer(came)
        if isinstance(answer, rows.BoardVerdict):
            self._faults += rows.stories(answer.faults)

    def _take_ruling(self, board: str, ticket: int, came: BoardAnswer) -> None:
        answer = _answer(came)
        try:
            if not isinstance(answer, rows.BoardVerdict):
                raise InvalidArgument("it is no ruling")
            verdict = _check_ruling(answer)
        except InvalidArgument as error:
            put_off = answer if isinstance(answer, rows.BoardBusy) else _unfit(str(error))
            away, now = self._put_off(board, put_off), self._clock()
            self._do(self._list.give_back(ticket, now, away=away, reload=put_off.reload))
            return
        self._complained.pop(board, None)
        self._faults += rows.stories(answer.faults)
        self._rulings[ticket] = verdict, answer.phases
        self._do(self._list.accept_verdict(ticket, verdict.yardstick_s, self._clock()))
        self._rulings.pop(ticket, None)

    def _put_off(self, board: str, answer: rows.Answer) -> float:
        """Return the seconds that a board gets no candidates; report a repeated reason once."""
        if not isinstance(answer, rows.BoardBusy):
            return _BROKEN_SECONDS
        if self._complained.get(board) != answer.why:
            self._complained[board] = answer.why
            self._tell(f"{self._host(board)} gave a candidate back: {answer.why}")
        return answer.seconds

    def _host(self, board: str) -> str:
        host = self._hosts.get(board, board)
        alone = sum(h == host for h in self._hosts.values()) == 1
        return host if alone else f"{host} ({board})"


def _answer(came: BoardAnswer) -> rows.Answer:
    try:
        return _unfit(came.why) if came.data is None else rows.answer(came.data)
    except InvalidArgument as error:
        return _unfit(str(error))


def _unfit(why: str) -> rows.BoardBusy:
    """Return the answer that replaces one that is missing or makes no sense."""
    return rows.BoardBusy(why=why, seconds=_BROKEN_SECONDS, reload=True)


def _check_ruling(ruling: rows.BoardVerdict) -> Verdict:
    """Return the verdict of a ruling; raise InvalidArgument if it is not possible."""
    verdict = rows.verdict_of(ruling)
    check_verdict(verdict)
    if verdict.yardstick_s is not None and not 0 < verdict.yardstick_s < math.inf:
        raise InvalidArgument(f"a yardstick of {verdict.yardstick_s} s cannot be")
    return verdict


# Candidates of a batch for each that a farm's boards accept at once. Fewer leave boards idle at the batch's
# end; more are proposed without the results of the others.
_PER_PLACE = 4


def instrument(job: commands.Search[Any], tell: Callable[[str], None]) -> MeasurementBackend:
    """Return the boards of a farm that have one device, with the best peaks that any of them measured.

    `tell` gets sentences on boards that join, leave or are slow. Raises what `boards.join` raises.
    """
    folder = job.settings.get("certificates")
    farm = FarmChoice(
        url=job.settings["url"],
        certificates=Path(folder) if folder else None,
        bench=job.settings.get("bench", ""),
        device=job.device,
    )
    joined = join(farm)
    profile = joined.profile
    return MeasurementBackend(
        spec=None,
        answers=not farm.bench,
        profile=profile,
        measurer=lambda begin: FarmMeasurer(joined.boards, profile, farm.bench, begin, tell, ahead=AHEAD),
        peaks_again=lambda: profile,
        keep_peaks=lambda _: None,
        sharing=Sharing(ahead=True, threads=len(os.sched_getaffinity(0)), builders=0),
        yardstick=YARDSTICK if farm.bench else None,
        batch=AHEAD if farm.bench else min(AHEAD, max(BATCH, _PER_PLACE * joined.depth)),
    )
