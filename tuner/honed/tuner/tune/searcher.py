"""The searching child: `python -m honed.tuner.tune.searcher FD`, the tuner's only TVM.

TVM may raise, crash or hang on a task; then this process ends and its parent, which knows everything that
matters, starts another. It answers the calls of `children` on the socket FD. Lowering candidates, default
schedules and answers are left to forked processes.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zipfile import BadZipFile

import numpy as np
import tvm
from tvm.target import Target

from honed.jobs.events import Ranking
from honed.machine.profile import DeviceProfile
from honed.process.forked import ForkPool
from honed.process.rpc import RpcServer, by_name, connect
from honed.protocol.errors import HonedError, Internal, InvalidArgument, ModelRefused
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import Lowered, LoweringFailed, last_line, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.search import traces
from honed.tuner.search.batches import Batches, Evolution, Proposal
from honed.tuner.search.costmodel import WIDTH, CostModel, Prior, prior_of, ranking
from honed.tuner.search.rules import postprocs, space

from .children import (
    Adopt,
    DefaultSchedule,
    Extract,
    LoadedTask,
    LoadTask,
    MakeDefault,
    Propose,
    Proposed,
    ProposedCandidate,
    Replay,
    StartSearch,
    UpdateCostModel,
)
from .extract import Extraction, adopt, extract, workload, write_sets
from .task import ModelTasks

if TYPE_CHECKING:
    from honed.tuner.frontend import Precision

MOST_PROCESSES = 6  # Processes that lower candidates: each needs its own share of memory for TVM
_HUNTS = 64  # Searches that are kept; a model rarely has as many tasks worth tuning
_Made = tuple[str, str, float | None, tvm.tirx.PrimFunc]  # Id, trace, score and the function scheduled by it
_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the parent hangs up."""
    Searcher(connect(arguments)).serve()
    return 0


class Searcher(RpcServer):
    """Serves one model's tasks, one at a time. Functions lie in a folder, for a successor to take up."""

    making: LoweringContext
    model: CostModel
    model_file: Path
    forked: ForkPool[LoweringContext]
    seed: int
    threads: int  # Threads of a search
    batch: int  # Candidates proposed at once

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.begun: dict[str, Future[Lowered]] = {}  # Default schedules, by task
        self.hunts: dict[str, TaskSearch] = {}  # Searches by task; the most recently loaded one is last

    def error_of(self, raised: Exception, method: str) -> HonedError:
        """Return the error to answer with; for errors of TVM, it has the end of their text.

        Where a process that lowers candidates has ended, this process exits, too.
        """
        if isinstance(raised, BrokenProcessPool):
            # Joined first: Python's hook at exit writes to a pipe that the pool's thread may just have closed
            # (EBADF), and that would be the last thing said in the place of this sentence.
            with self.forked:
                sys.exit(f"a process that lowers candidates ended: {raised}")
        if isinstance(raised, ModelRefused):
            return raised
        if isinstance(raised, (HonedError, LoweringFailed, RuntimeError, ValueError, TypeError)):
            return Internal(" ".join(str(raised).split())[-300:] or type(raised).__name__)
        raise raised

    def _start(self, call: StartSearch) -> None:
        self.making = LoweringContext(
            target=target_for(call.profile),
            profile=call.profile,
            folder=call.folder,
            seed=call.seed if call.answers else None,
        )
        self.forked = ForkPool(min(call.threads, MOST_PROCESSES), self.making)
        self.model_file = call.cost_model
        self.model = _cost_model(self.model_file, prior_of(call.profile.rules.family, call.profile.driver))
        self.seed, self.threads, self.batch = call.seed, call.threads, call.batch

    def extract(self, call: Extract) -> ModelTasks:
        """Extract all tasks of a model; their functions are written to the folder."""
        found = extract(
            call.path,
            call.shapes,
            cast("Precision", call.precision),
            self.making.profile,
            calibration=call.calibration,
            existing_build=call.existing_build,
        )
        return self._keep(found)

    def _adopt(self, call: Adopt) -> ModelTasks:
        func = tvm.ir.load_json(call.func)
        if not isinstance(func, tvm.tirx.PrimFunc):
            raise InvalidArgument(f"{call.name} is no PrimFunc; give one")
        only = adopt(func, call.name, call.outputs)
        return self._keep(Extraction(tasks=[only], rivals=[], opaque=[], contests=()))

    def _keep(self, extraction: Extraction) -> ModelTasks:
        tasks = (*extraction.tasks, *extraction.rivals)
        for one in tasks:
            self.making.file(one.task.key).write_text(tvm.ir.save_json(one.func))
        return ModelTasks(
            tasks=tuple(one.task for one in tasks),
            opaque=tuple(extraction.opaque),
            contests=extraction.contests,
        )

    def _load(self, call: LoadTask | MakeDefault | Propose) -> LoadedTask:
        """Load a task: its workload, whose answers are checked with drawn inputs and TVM's outputs.

        `fresh` says whether its search is yet to begin; searches of recently loaded tasks continue.
        """
        task, key = call.task, call.task.key
        hunt = self.hunts.pop(key) if key in self.hunts else TaskSearch(key, self)
        self.hunts[key] = hunt
        while len(self.hunts) > _HUNTS:
            del self.hunts[next(iter(self.hunts))]
        if hunt.workload is None:
            answers = self.making.answers(key)
            hunt.workload = workload(key, hunt.func, task.outputs, answers, self.making.seed, task.constants)
        return LoadedTask(workload=hunt.workload, fresh=hunt.fresh)

    def _default(self, call: MakeDefault) -> DefaultSchedule:
        for task in (call.task, *call.following):
            if task.key not in self.begun:
                self.begun[task.key] = self.forked.begin(lower_default, task.key, task.outputs)
        lowered = self.begun.pop(call.task.key).result()
        if call.settle:
            wait(self.begun.values())
        return DefaultSchedule(loaded=self._load(call), candidate=Candidate.of("default", lowered))

    def propose(self, call: Propose) -> Proposed | None:
        """Load a task and propose a batch of it."""
        loaded = self._load(call)
        return self.hunts[call.task.key].propose(loaded, call)

    def _replay(self, call: Replay) -> tuple[ProposedCandidate, ...]:
        return self.hunts[call.task].replay(call.traces)

    def _learn(self, call: UpdateCostModel) -> Ranking | None:
        """Learn from a batch of a task, if its search has not ended since."""
        hunt = self.hunts.get(call.task)
        if hunt is None:
            return None
        ranked = hunt.learn(call.results)
        self.model.save(self.model_file)
        return ranked

    METHODS = by_name(
        {
            StartSearch: _start,
            Extract: extract,
            Adopt: _adopt,
            LoadTask: _load,
            MakeDefault: _default,
            Propose: propose,
            Replay: _replay,
            UpdateCostModel: _learn,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringContext:
    """The context of the forked processes that lower.

    Functions lie in `folder`; `seed` draws inputs, None: no answers are needed.
    """

    target: Target
    profile: DeviceProfile
    folder: Path
    seed: int | None

    def func(self, task: str) -> tvm.tirx.PrimFunc:
        """Return the function of a task."""
        return tvm.ir.load_json(self.file(task).read_text())

    def file(self, task: str) -> Path:
        """Return the file of a task's function."""
        return self.folder / f"{task}.json"

    def answers(self, task: str) -> Path:
        """Return the folder of a task's inputs and answers."""
        return self.folder / task


class TaskSearch:
    """Proposes schedules of one task's function, and learns from their times."""

    def __init__(self, key: str, searcher: Searcher) -> None:
        self.key = key
        self.func = searcher.making.func(key)
        self.workload: Workload | None = None  # Made on first use
        self._searcher = searcher
        self._batches: Batches | None = None
        self._proposed: dict[str, Proposal] = {}  # Proposals whose times are still unknown

    @property
    def fresh(self) -> bool:
        """Return whether the search has not learned from earlier measurements yet."""
        return self._batches is None

    def propose(self, loaded: LoadedTask, call: Propose) -> Proposed | None:
        """Return a batch of candidates; None where no rule fits the function."""
        if self._batches is None:
            self._batches = self._begin(call.related, call.round)
        if self._batches is None:
            return None
        for trace, seconds in call.known:
            with suppress(LoweringFailed):
                self._batches.know(trace, _seconds_or_infinity(seconds))
        batch = self._batches.next()
        self._proposed |= {p.id: p for p in batch.proposals}
        entries = self._entries([(p.id, p.trace, p.score, p.scheduled) for p in batch.proposals])
        return Proposed(loaded=loaded, entries=entries, way=batch.way, last=batch.last)

    def _begin(self, related: Sequence[str], round_: int) -> Batches | None:
        func, searcher = narrow_indices(self.func), self._searcher
        target, profile = searcher.making.target, searcher.making.profile
        sketches = space(func, target, profile)
        if not sketches:
            return None
        evolution = Evolution(
            func,
            target,
            sketches,
            searcher.model,
            batch=searcher.batch,
            seed=searcher.seed + round_,
            threads=searcher.threads,
            postprocs=postprocs(profile),
        )
        return Batches(evolution, searcher.batch, related, profile.driver)

    def replay(self, recorded: Sequence[str]) -> tuple[ProposedCandidate, ...]:
        """Return recorded schedules as candidates, where they fit.

        The search learns from them once their times are known.
        """
        func = narrow_indices(self.func)
        found: list[_Made] = []
        for trace in recorded:
            with suppress(LoweringFailed):
                scheduled = traces.apply(trace, func).mod["main"]
                found.append((traces.identity(trace), trace, None, scheduled))
        return self._entries(found)

    def learn(self, results: Mapping[str, float | None]) -> Ranking | None:
        """Learn from a batch: `results` maps ids to seconds, None for refused ones."""
        known = [(self._proposed.pop(i), s) for i, s in results.items() if i in self._proposed]
        if not known or self._batches is None:
            return None
        seconds = np.array([_seconds_or_infinity(s) for _, s in known])
        scores = [p.score for p, _ in known]
        ranked = None if None in scores else ranking(np.array(scores, np.float32), seconds)
        model = self._searcher.model
        model.add(self.key, np.array([p.features for p, _ in known]), seconds)
        model.train()
        for (proposal, _), s in zip(known, seconds, strict=True):
            self._batches.know(proposal.trace, float(s))
        return ranked

    def _entries(self, candidates: Sequence[_Made]) -> tuple[ProposedCandidate, ...]:
        """Return candidates, lowered by all processes at once, or why they have no kernels."""
        begin = self._searcher.forked.begin
        begun = [begin(lower, tvm.ir.save_json(scheduled)) for *_, scheduled in candidates]
        entries = list[ProposedCandidate]()
        for (key, trace, score, _), one in zip(candidates, begun, strict=True):
            made = one.result()
            refused = made if isinstance(made, str) else ""
            candidate = None if isinstance(made, str) else Candidate.of(key, made)
            entries.append(ProposedCandidate(key, trace, score, candidate, refused))
        return tuple(entries)


def _cost_model(file: Path, prior: Prior | None) -> CostModel:
    """Load the cost model; move a damaged one aside, and begin an empty one."""
    try:
        return CostModel.load(file, WIDTH, prior=prior)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        aside = file.with_name(f"{file.name}.damaged")
        _log.warning("the cost model %s is damaged (%s); it is kept in %s", file, error, aside)
        os.replace(file, aside)
        return CostModel(WIDTH, prior=prior)


def _seconds_or_infinity(seconds: float | None) -> float:
    return np.inf if seconds is None else float(seconds)


def lower(making: LoweringContext, scheduled: str) -> Lowered | str:
    """Return a candidate's kernels, or why there are none; `scheduled` is the function as TVM's JSON."""
    try:
        return lower_function(tvm.ir.load_json(scheduled), "main", making.target, making.profile)
    except LoweringFailed as failed:
        return str(failed)


def lower_default(making: LoweringContext, task: str, outputs: int) -> Lowered:
    """Lower a task's default schedule, and write its inputs and answers if they are missing.

    Raises LoweringFailed with whatever TVM reports, because TVM's own errors cannot travel between processes.
    """
    func = making.func(task)
    try:
        if making.seed is not None and not making.answers(task).exists():
            write_sets(func, outputs, making.answers(task), making.seed)
        _, kernels, _ = untuned_kernels(func, "main", making.target, making.profile)
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringFailed(last_line(error)) from None
    return kernels


if __name__ == "__main__":
    main()
