"""Steps of several sequences of one decoder that are run as one, by a form that has room for as many.

A step of one token reads all weights, and one for several sequences reads them once. A sequence comes again
as soon as its client has chosen the next token, so that a step waits for those that are about to come, for
less time than a run takes. A sequence that is alone waits for nobody, and its steps are run as without this.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import field
from functools import partial
from typing import Any, NamedTuple

from honed.daemon.core.model import ServedModel
from honed.daemon.feature import InferCall
from honed.daemon.observe.usage import UsageLog
from honed.daemon.serving.in_flight import PendingRequest
from honed.daemon.serving.plan import CheckedForm
from honed.daemon.serving.pool import Pool
from honed.daemon.worker.calls import RunStep, RunSteps, StepRan
from honed.protocol.dataclass import dataclass
from honed.protocol.errors import (
    HonedError,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    ResourceExhausted,
    SequenceLost,
)

from .batching import BatchMember, Gatherer, Gathering, lately
from .decoding import Form, Piece

_PATIENCE = 0.5  # of a run's time: a step waits for no sequence that takes longer to come again
_NEAR_RUNS = 4.0  # since its last step, in which a sequence counts as one of those that generate
_ANY = 1 << 30  # sequences: for as many each form is that takes less time at all
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pace:
    """When a sequence had its last answer, and how many seconds it takes to come again: 0 if not known.

    It `joins` others unless no form for several is ready for it; it is `busy` while a step waits or runs.
    """

    joins: bool = True
    busy: bool = True
    answered: float = 0.0
    pause: float = 0.0


class StepGathering(Gathering):
    """Steps of one token, by the numbers of their sequences, of which each has one at a time.

    `begin` and `end` enclose all of them, those that are run alone, too. No I/O and no clock.
    """

    def __init__(self) -> None:
        super().__init__(most=1, delay=0.0)
        self._paces: dict[int, _Pace] = {}

    def begin(self, number: int, now: float) -> int:
        """Record that a step has come; return how many are under way, with this one."""
        pace = self._paces.setdefault(number, _Pace())
        if not pace.busy:
            pace.pause, pace.busy = lately(pace.pause, now - pace.answered), True
        return sum(each.busy for each in self._paces.values())

    def end(self, number: int, now: float) -> None:
        """Record that a step was answered, or failed."""
        self._paces[number].busy, self._paces[number].answered = False, now
        self._paces = {n: each for n, each in self._paces.items() if self._near(each, now)}

    def company(self, now: float) -> int:
        """Return how many sequences join others that have steps under way, or had some a few runs ago."""
        return sum(each.joins and self._near(each, now) for each in self._paces.values())

    def joins(self, number: int, ready: bool) -> None:
        """Record whether a form for several is ready for a sequence."""
        self._paces[number].joins = ready

    def run_together(self, most: int) -> None:
        """Run at most so many steps as one from now on."""
        self._most = most

    def alone(self, seconds: float) -> None:
        """Record that a run for one sequence took so many seconds."""
        self._seconds = lately(self._seconds, seconds)

    def _near(self, pace: _Pace, now: float) -> bool:
        return pace.busy or now - pace.answered < _NEAR_RUNS * self._seconds

    def _time(self) -> float:
        """Return when the next run is due: at once where nobody is waited for, else with the last of them."""
        if self._running:  # whose turn it is then depends on who waits when it ends
            return self._urgent()
        if len(self._waiting) >= self._most:
            return float("-inf")
        until, waiting = float("-inf"), {member.number for member in self._waiting}
        longest = _PATIENCE * self._seconds
        for number, pace in self._paces.items():
            if number in waiting or not pace.joins:
                continue
            if pace.busy:
                until = float("inf")  # it is looked again when it ends
            elif pace.pause <= longest:
                until = max(until, pace.answered + min(longest, 2 * pace.pause or longest))
        return min(until, self._urgent())


class Planned(NamedTuple):
    """A run of a form for one sequence, checked, and the call for the key that the form has."""

    piece: Piece
    form: CheckedForm
    call: Callable[[str], RunStep]


_Kind = tuple[str, int, bool, int | None]
Ran = tuple[PendingRequest[Any], StepRan, CheckedForm]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A step of one token of sequence `number`, which came at `arrived` and is worthless after `deadline`.

    It needs a form of that `capacity`; `planned` is its run by one of a capacity. `form` returns a form for
    several sequences that is ready, by capacity and their number, and for how many it is, or the model itself
    where ONNX Runtime runs them; None where none takes less time than runs one by one. `wish` counts that so
    many were under way at once.
    """

    call: InferCall
    number: int
    arrived: float
    deadline: float
    capacity: int
    on_device: bool
    planned: Callable[[int], Planned]
    form: Callable[[int, int], tuple[int, ServedModel] | None]
    wish: Callable[[int], None]
    alone: Callable[[], Awaitable[Ran]]


@dataclass(kw_only=True, eq=False)
class JointSteps:
    """Runs the steps of one token of all decoders' sequences."""

    pool: Pool
    ledger: UsageLog
    _gatherings: dict[_Kind, StepGathering] = field(init=False, default_factory=dict)
    _gatherer: Gatherer[Turn, Ran] = field(init=False)

    def __post_init__(self) -> None:
        self._gatherer = Gatherer(self._answers)

    async def run(self, turn: Turn) -> Ran:
        """Run a step, with those of other sequences where these come at the same time; raise its error."""
        gathering, kind = self._gathering(turn), self._kind(turn)
        count = gathering.begin(turn.number, turn.arrived)
        try:
            if count > 1:
                turn.wish(count)
            found = None
            if (company := gathering.company(turn.arrived)) > 1:
                gathering.joins(turn.number, turn.form(turn.capacity, _ANY) is not None)
                found = turn.form(turn.capacity, company)
            if found is None:
                ran = await turn.alone()
                gathering.alone(ran[1].result.infer_ns / 1e9)
                return ran
            gathering.run_together(found[0])
            return await self._gathered(turn, kind, gathering)
        finally:
            gathering.end(turn.number, time.monotonic())
            self._gatherer.look(kind)

    def forget(self, model: str) -> None:
        """Forget how the sequences of a model came."""
        self._gatherings = {kind: each for kind, each in self._gatherings.items() if kind[0] != model}

    def _gathering(self, turn: Turn) -> StepGathering:
        kind = self._kind(turn)
        if kind not in self._gatherings:
            others = {k: g for k, g in self._gatherings.items() if k[:2] == kind[:2] or k[0] != kind[0]}
            self._gatherings = others | {kind: StepGathering()}
        return self._gatherings[kind]

    @staticmethod
    def _kind(turn: Turn) -> _Kind:
        """Return what steps that are run as one have in common: model, where they run, and priority."""
        entry, options = turn.call.entry, turn.call.params.parameters
        return entry.name, entry.number, turn.on_device, options.priority if options is not None else None

    async def _gathered(self, turn: Turn, kind: _Kind, gathering: StepGathering) -> Ran:
        regions = turn.planned(turn.capacity).form.regions
        member = BatchMember(
            number=turn.number,
            user=turn.call.connection.client.user,
            rows=1,
            arrived=turn.arrived,
            deadline=turn.deadline,
        )
        for region in regions:
            region.hold()  # its client may let go of it while the step waits
        try:
            timeout = turn.deadline - turn.arrived
            return await self._gatherer.answer(kind, lambda: gathering, member, turn, timeout)
        finally:
            for region in regions:
                self.pool.release(region)

    async def _answers(self, turns: Sequence[Turn]) -> Sequence[Ran | HonedError]:
        """Return the results in the order of the turns; raise an error that all of them share."""
        company = max(len(turns), self._gathering(turns[0]).company(time.monotonic()))
        capacity = max(turn.capacity for turn in turns)
        found = turns[0].form(capacity, company) if company > 1 else None
        if found is None:
            return await asyncio.gather(*map(_alone, turns))
        most, runner = found
        parts = [turns[start : start + most] for start in range(0, len(turns), most)]
        answers = await asyncio.gather(
            *(self._as_one(part, Form(1, capacity, most), runner) for part in parts)
        )
        return [each for part in answers for each in part]

    async def _as_one(
        self, turns: Sequence[Turn], form: Form, runner: ServedModel
    ) -> Sequence[Ran | HonedError]:
        entry, planned = turns[0].call.entry, [turn.planned(form.capacity) for turn in turns]
        try:
            ran, work = await self.pool.asking.ask_for(
                turns[0].call.connection.client,
                runner,
                partial(steps_call, form, planned),
                regions=[region for each in planned for region in each.form.regions],
                priority=planned[0].form.plan.priority,
                timeout=max(turn.deadline for turn in turns) - time.monotonic(),
                open_shape=runner is entry,
            )
        except (InvalidArgument, NotFound, OutOfMemory, ResourceExhausted, SequenceLost) as error:
            # By one of them, which then is told so alone.
            _log.info("model %s: steps of %d sequences are run one by one: %s", entry.name, len(turns), error)
            return await asyncio.gather(*map(_alone, turns))
        if len(turns) > 1:
            entry.statistics.ran_joined(len(turns))
        if not runner.away and (runner is not entry or runner.compiled is None):
            self.ledger.ran(runner.name, ran.members[0].result.infer_ns / 1e9)
        return [(work, member, each.form) for each, member in zip(planned, ran.members, strict=True)]


def steps_call(form: Form, planned: Sequence[Planned], key: str) -> RunSteps:
    """Return the call for several runs as one, by the key of the form."""
    members = tuple(each.call(key) for each in planned)
    return RunSteps(key=key, sequences=form.sequences, capacity=form.capacity, members=members)


async def _alone(turn: Turn) -> Ran | HonedError:
    try:
        return await turn.alone()
    except HonedError as error:
        return error
