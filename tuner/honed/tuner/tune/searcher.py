"""The searching child: `python -m honed.tuner.tune.searcher --channel FD`, the tuner's only TVM.

TVM may raise, crash or hang on a task; then this process ends and its parent, which knows everything that
matters, starts another. Messages are those of `honed.tuner.measure.codec`; each names what a `Searcher` does.
Lowering candidates, default schedules and answers are left to forked processes.
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
from typing import Any
from zipfile import BadZipFile

import numpy as np
import tvm
from tvm.target import Target

from honed.machine.forked import Forked
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import HonedError, InvalidArgument, ModelRefused
from honed.protocol.strict import from_plain, to_plain
from honed.tuner.compiler.schedules import first_kernels
from honed.tuner.lower.opencl import Lowered, LoweringFailed, last_line, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.measure import codec
from honed.tuner.measure.candidate import Candidate
from honed.tuner.search import traces
from honed.tuner.search.batches import Batches, Evolution, Proposal
from honed.tuner.search.costmodel import WIDTH, CostModel, Prior, prior_of, ranking
from honed.tuner.search.rules import postprocs, space

from .extract import Extraction, adopt, extract, workload, write_sets
from .task import Found

MOST_PROCESSES = 6  # that candidates are lowered by: each has a share of TVM's memory of its own
_HUNTS = 64  # that are kept; a model rarely has as many tasks worth tuning
_Made = tuple[str, str, float | None, tvm.tirx.PrimFunc]  # id, trace, score and the function scheduled by it
_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Serve the channel until it closes."""
    channel = codec.channel(argv, "honed.tuner.tune.searcher")
    with suppress(codec.ChannelClosed):
        _serve(channel)
    return 0


def _serve(channel: socket.socket) -> None:
    searcher: Searcher | None = None
    while True:
        message = codec.receive(channel)
        try:
            if message["do"] == "start":
                searcher = Searcher(message)
                codec.send(channel, {"started": os.getpid()})
                continue
            assert searcher is not None
            codec.send(channel, getattr(searcher, message["do"])(message))
        except ModelRefused as refused:
            codec.send(channel, {"refused": str(refused), "reasons": list(refused.reasons)})
        except BrokenProcessPool as error:
            sys.exit(f"a process that lowers candidates ended: {error}")
        except (HonedError, LoweringFailed, RuntimeError, ValueError, TypeError) as error:
            text = " ".join(str(error).split())[-300:] or type(error).__name__
            codec.send(channel, {"failed": text})


class Searcher:
    """Serves one model's tasks, one at a time. Functions lie in `folder`, for a successor to take up."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        profile = from_plain(DeviceProfile, message["profile"], where="profile")
        self.seed, self.threads = int(message["seed"]), int(message["threads"])
        self.batch = int(message["batch"])  # candidates proposed at once
        self.making = Making(
            target=target_for(profile),
            profile=profile,
            folder=Path(message["folder"]),
            seed=self.seed if message["answers"] else None,
        )
        self.forked = Forked(min(self.threads, MOST_PROCESSES), self.making)
        self.model_file = Path(message["cost_model"])
        self.model = _cost_model(self.model_file, prior_of(profile.rules.family))
        self.begun: dict[str, Future[Lowered]] = {}  # default schedules, by task
        self.hunts: dict[str, Hunt] = {}  # by task; the one loaded last is the last

    def extract(self, message: Mapping[str, Any]) -> codec.Message:
        """All tasks of a model; their functions are written to the folder."""
        shapes = {name: tuple(shape) for name, shape in message["shapes"].items()}
        found = extract(
            Path(message["path"]),
            shapes,
            message["precision"],
            self.making.profile,
            calibration=_path(message["calibration"]),
            like=_path(message["like"]),
        )
        return self._kept(found)

    def adopt(self, message: Mapping[str, Any]) -> codec.Message:
        """A function of the caller's as the only task."""
        func = tvm.ir.load_json(message["func"])
        if not isinstance(func, tvm.tirx.PrimFunc):
            raise InvalidArgument(f"{message['name']} is no PrimFunc; give one")
        only = adopt(func, message["name"], int(message["outputs"]))
        return self._kept(Extraction(tasks=[only], rivals=[], opaque=[], contests=()))

    def _kept(self, found: Extraction) -> codec.Message:
        tasks = (*found.tasks, *found.rivals)
        for one in tasks:
            self.making.file(one.task.key).write_text(tvm.ir.save_json(one.func))
        told = Found(
            tasks=tuple(one.task for one in tasks), opaque=tuple(found.opaque), contests=found.contests
        )
        plain: codec.Message = to_plain(told)
        return plain

    def load(self, message: Mapping[str, Any]) -> codec.Message:
        """Take up a task: its workload, where answers are checked with drawn inputs and TVM's outputs.

        `fresh` says whether its search is yet to begin; those of tasks loaded of late go on.
        """
        key = message["task"]
        hunt = self.hunts.pop(key) if key in self.hunts else Hunt(key, self)
        self.hunts[key] = hunt
        while len(self.hunts) > _HUNTS:
            del self.hunts[next(iter(self.hunts))]
        if hunt.workload is None:
            outputs, answers = int(message["outputs"]), self.making.answers(key)
            made = workload(key, hunt.func, outputs, answers, self.making.seed, message["constants"])
            hunt.workload = codec.workload_to_plain(made)
        return {"workload": hunt.workload, "fresh": hunt.fresh}

    def default(self, message: Mapping[str, Any]) -> codec.Message:
        """Load a task, and make its default schedule a candidate; those of the `following` are begun.

        With `settle` they are all made when it answers.
        """
        for named in (message, *message["following"]):
            key = named["task"]
            if key not in self.begun:
                self.begun[key] = self.forked.begin(lower_default, key, int(named["outputs"]))
        lowered = self.begun.pop(message["task"]).result()
        if message["settle"]:
            wait(self.begun.values())
        return self.load(message) | {
            "candidate": codec.candidate_to_plain(Candidate.of("default", lowered)),
        }

    def propose(self, message: Mapping[str, Any]) -> codec.Message:
        """Load a task and propose a batch of it; `known` holds [trace, seconds or nil] measured before."""
        loaded = self.load(message)
        hunt = self.hunts[message["task"]]
        return loaded | hunt.propose(message["known"], message["kin"], int(message["round"]))

    def replay(self, message: Mapping[str, Any]) -> codec.Message:
        """Recorded schedules of a loaded task as candidates."""
        return self.hunts[message["task"]].replay(message["traces"])

    def learn(self, message: Mapping[str, Any]) -> codec.Message:
        """Learn from a batch of a task, if its search has not ended since."""
        hunt = self.hunts.get(message["task"])
        if hunt is None:
            return {"ranking": None}
        answer = hunt.learn(message["results"])
        self.model.save(self.model_file)
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What forked processes lower with.

    Functions lie in `folder`; `seed` draws inputs, None: no answers are needed.
    """

    target: Target
    profile: DeviceProfile
    folder: Path
    seed: int | None

    def func(self, task: str) -> tvm.tirx.PrimFunc:
        """The function of a task."""
        return tvm.ir.load_json(self.file(task).read_text())

    def file(self, task: str) -> Path:
        """Where that function lies."""
        return self.folder / f"{task}.json"

    def answers(self, task: str) -> Path:
        """Where the task's inputs and answers lie."""
        return self.folder / task


class Hunt:
    """Proposes schedules of one task's function, and learns from what came of them."""

    def __init__(self, key: str, searcher: Searcher) -> None:
        self.key = key
        self.func = searcher.making.func(key)
        self.workload: codec.Message | None = None  # once it is made
        self._searcher = searcher
        self._batches: Batches | None = None
        self._proposed: dict[str, Proposal] = {}  # and not learned from yet

    @property
    def fresh(self) -> bool:
        """Whether it knows nothing yet of what was measured before."""
        return self._batches is None

    def propose(
        self, known: Sequence[tuple[str, float | None]], kin: Sequence[str], round_: int
    ) -> codec.Message:
        """A batch of candidates.

        `known` are traces with their seconds (None: refused) that this hunt was not told of yet, `kin` the
        best ones of other tasks: they count at the first call only. The answer says whether any rule `fits`.
        """
        if self._batches is None:
            self._batches = self._begun(kin, round_)
        if self._batches is None:
            return {"fits": False}
        for trace, seconds in known:
            with suppress(LoweringFailed):
                self._batches.know(trace, _measured(seconds))
        batch = self._batches.next()
        self._proposed |= {p.id: p for p in batch.proposals}
        entries = self._entries([(p.id, p.trace, p.score, p.scheduled) for p in batch.proposals])
        return {"fits": True, "candidates": entries, "way": str(batch.way), "last": batch.last}

    def _begun(self, kin: Sequence[str], round_: int) -> Batches | None:
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
        return Batches(evolution, searcher.batch, kin)

    def replay(self, recorded: Sequence[str]) -> codec.Message:
        """Recorded schedules as candidates, where they fit; learned from when they are known."""
        func = narrow_indices(self.func)
        found: list[_Made] = []
        for trace in recorded:
            with suppress(LoweringFailed):
                scheduled = traces.apply(trace, func).mod["main"]
                found.append((traces.identity(trace), trace, None, scheduled))
        return {"candidates": self._entries(found)}

    def learn(self, results: Mapping[str, float | None]) -> codec.Message:
        """Learn from a batch: `results` maps ids to seconds, None for refused ones."""
        known = [(self._proposed.pop(i), s) for i, s in results.items() if i in self._proposed]
        if not known or self._batches is None:
            return {"ranking": None}
        seconds = np.array([_measured(s) for _, s in known])
        scores = [p.score for p, _ in known]
        ranked = None if None in scores else ranking(np.array(scores, np.float32), seconds)
        model = self._searcher.model
        model.add(self.key, np.array([p.features for p, _ in known]), seconds)
        model.train()
        for (proposal, _), s in zip(known, seconds, strict=True):
            self._batches.know(proposal.trace, float(s))
        return {"ranking": ranked and to_plain(ranked)}

    def _entries(self, found: Sequence[_Made]) -> list[dict[str, Any]]:
        """Candidates, lowered by all processes at once, or why they are none."""
        begin = self._searcher.forked.begin
        begun = [begin(lower, tvm.ir.save_json(scheduled)) for *_, scheduled in found]
        entries: list[dict[str, Any]] = []
        for (key, trace, score, _), one in zip(found, begun, strict=True):
            made, entry = one.result(), {"id": key, "trace": trace, "score": score}
            if isinstance(made, str):
                entries.append(entry | {"refused": made})
            else:
                entries.append(entry | {"candidate": codec.candidate_to_plain(Candidate.of(key, made))})
        return entries


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _cost_model(file: Path, prior: Prior | None) -> CostModel:
    """The kept cost model; a damaged one is moved aside, and a new one learned."""
    try:
        return CostModel.load(file, WIDTH, prior=prior)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        aside = file.with_name(f"{file.name}.damaged")
        _log.warning("the cost model %s is damaged (%s); it is kept in %s", file, error, aside)
        os.replace(file, aside)
        return CostModel(WIDTH, prior=prior)


def _measured(seconds: float | None) -> float:
    return np.inf if seconds is None else float(seconds)


def lower(making: Making, scheduled: str) -> Lowered | str:
    """A candidate's kernels, or why there are none; `scheduled` is the function as TVM's JSON."""
    try:
        return lower_function(tvm.ir.load_json(scheduled), "main", making.target, making.profile)
    except LoweringFailed as failed:
        return str(failed)


def lower_default(making: Making, task: str, outputs: int) -> Lowered:
    """A task's default schedule, and its inputs and answers where they are not there.

    Raises LoweringFailed with whatever TVM says, as its own errors do not travel between processes.
    """
    func = making.func(task)
    try:
        if making.seed is not None and not making.answers(task).exists():
            write_sets(func, outputs, making.answers(task), making.seed)
        _, kernels, _ = first_kernels(func, "main", making.target, making.profile)
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringFailed(last_line(error)) from None
    return kernels


if __name__ == "__main__":
    main()
