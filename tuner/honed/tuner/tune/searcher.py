"""The searching child: `python -m honed.tuner.tune.searcher --channel FD`, the tuner's only TVM.

TVM may raise, crash or hang on a task; then this process ends and its parent, which knows everything that
matters, starts another. Messages are those of `honed.tuner.measure.codec`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import tvm

from honed.runtime.errors import HonedError, InvalidArgument, ModelRefused
from honed.runtime.offspring import die_with
from honed.runtime.profile import DeviceProfile
from honed.runtime.strict import from_plain, to_plain
from honed.tuner.first import first_kernels
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.measure import codec
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.search import traces
from honed.tuner.search.costmodel import CostModel, ranking
from honed.tuner.search.evolve import Evolution, Proposal
from honed.tuner.search.features import WIDTH
from honed.tuner.search.rules import postprocs, space

from .extract import SETS, Extracted, adopt, extract, parameters, tolerances, write_sets
from .task import Task

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Serve the channel until it closes."""
    parser = argparse.ArgumentParser(prog="honed.tuner.tune.searcher")
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(argv)
    die_with(options.parent)
    channel = socket.socket(fileno=options.channel)
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
            codec.send(channel, getattr(searcher, _OPERATIONS[message["do"]])(message))
        except ModelRefused as refused:
            codec.send(channel, {"refused": str(refused), "reasons": list(refused.reasons)})
        except (HonedError, LoweringFailed, RuntimeError, ValueError, TypeError) as error:
            text = " ".join(str(error).split())[-300:] or type(error).__name__
            codec.send(channel, {"failed": text})


_OPERATIONS = {
    "extract": "extract",
    "adopt": "adopt",
    "load": "load",
    "default": "default",
    "propose": "propose",
    "replay": "replay",
    "learn": "learn",
}


class Searcher:
    """Serves one model's tasks, one at a time. Functions lie in `folder`, for a successor to take up."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.profile: DeviceProfile = from_plain(DeviceProfile, message["profile"], where="profile")
        self.folder = Path(message["folder"])
        self.model_file = Path(message["cost_model"])
        self.seed = int(message["seed"])
        self.batch = int(message["batch"])
        self.answers = bool(message["answers"])
        self.target = target_for(self.profile)
        self.model = _cost_model(self.model_file)
        self.key = ""
        self.func: tvm.tirx.PrimFunc | None = None
        self.evolution: Evolution | None = None
        self.proposed: dict[str, Proposal] = {}

    def extract(self, message: Mapping[str, Any]) -> codec.Message:
        """All tasks of a model; their functions are written to the folder."""
        shapes = {name: tuple(shape) for name, shape in message["shapes"].items()}
        found, opaque = extract(Path(message["path"]), shapes, message["precision"], self.profile)
        return self._kept(found, opaque)

    def adopt(self, message: Mapping[str, Any]) -> codec.Message:
        """A function of the caller's as the only task."""
        func = tvm.ir.load_json(message["func"])
        if not isinstance(func, tvm.tirx.PrimFunc):
            raise InvalidArgument(f"{message['name']} is no PrimFunc; give one")
        return self._kept([adopt(func, message["name"], int(message["outputs"]))], [])

    def _kept(self, found: Sequence[Extracted], opaque: Sequence[Task]) -> codec.Message:
        for one in found:
            (self.folder / f"{one.task.key}.json").write_text(tvm.ir.save_json(one.func))
        return {
            "tasks": [to_plain(one.task) | {"outputs": one.outputs} for one in found],
            "opaque": [to_plain(task) for task in opaque],
        }

    def load(self, message: Mapping[str, Any]) -> codec.Message:
        """Take up a task: its workload, where answers are checked with drawn inputs and TVM's outputs."""
        self.key, outputs = message["task"], int(message["outputs"])
        self.func = tvm.ir.load_json((self.folder / f"{self.key}.json").read_text())
        sets = self.folder / self.key
        if self.answers and not sets.exists():
            write_sets(self.func, outputs, sets, self.seed)
        values = parameters(self.func)
        workload = Workload(
            task=self.key,
            parameters=values,
            outputs=tuple(range(len(values) - outputs, len(values))),
            sets=SETS if self.answers else 0,
            folder=sets,
            flops=int(message["flops"]),
            bytes=int(message["bytes"]),
            tolerance=tolerances(self.func, outputs),
        )
        self.evolution, self.proposed = None, {}
        return {"workload": codec.workload_to_plain(workload)}

    def default(self, _message: Mapping[str, Any]) -> codec.Message:
        """The default schedule as a candidate."""
        assert self.func is not None
        rule, lowered, _ = first_kernels(self.func, "main", self.target, self.profile)
        return {"candidate": codec.candidate_to_plain(_candidate("default", lowered)), "rule": rule}

    def propose(self, message: Mapping[str, Any]) -> codec.Message:
        """A batch of candidates; `known` holds [trace, seconds or nil] measured before."""
        assert self.func is not None
        func = narrow_indices(self.func)
        if self.evolution is None:
            sketches = space(func, self.target, self.profile)
            if not sketches:
                return {"candidates": [], "why": "no schedule rule fits the function"}
            self.evolution = Evolution(
                func,
                self.target,
                sketches,
                self.model,
                batch=self.batch,
                seed=self.seed + int(message["round"]),
                postprocs=postprocs(self.profile),
            )
            for trace, seconds in message["known"]:
                with suppress(LoweringFailed):
                    self.evolution.know(trace, float("inf") if seconds is None else seconds)
        proposals = self.evolution.propose()
        self.proposed = {p.id: p for p in proposals}
        entries = [self._entry(p.id, p.trace, p.score, p.scheduled) for p in proposals]
        return {"candidates": entries, "why": ""}

    def replay(self, message: Mapping[str, Any]) -> codec.Message:
        """Recorded schedules as candidates, where they fit; learned from when they are known."""
        assert self.func is not None
        func = narrow_indices(self.func)
        self.proposed, entries = {}, []
        for trace in message["traces"]:
            with suppress(LoweringFailed):
                scheduled = traces.apply(trace, func).mod["main"]
                entries.append(self._entry(traces.identity(trace), trace, None, scheduled))
        return {"candidates": entries}

    def _entry(
        self, key: str, trace: str, score: float | None, scheduled: tvm.tirx.PrimFunc
    ) -> codec.Message:
        entry: codec.Message = {"id": key, "trace": trace, "score": score}
        try:
            lowered = lower_function(scheduled, "main", self.target, self.profile)
        except LoweringFailed as failed:
            return entry | {"refused": str(failed)}
        return entry | {"candidate": codec.candidate_to_plain(_candidate(key, lowered))}

    def learn(self, message: Mapping[str, Any]) -> codec.Message:
        """Learn from a batch: `results` maps ids to seconds, nil for refused ones."""
        known = [(self.proposed[i], s) for i, s in message["results"].items() if i in self.proposed]
        if not known or self.evolution is None:
            return {"ranking": None}
        seconds = np.array([np.inf if s is None else s for _, s in known])
        scores = [p.score for p, _ in known]
        ranked = None if None in scores else ranking(np.array(scores, np.float32), seconds)
        self.model.add(self.key, np.array([p.features for p, _ in known]), seconds)
        self.model.train()
        self.model.save(self.model_file)
        for (proposal, _), s in zip(known, seconds, strict=True):
            self.evolution.know(proposal.trace, float(s))
        return {"ranking": ranked and to_plain(ranked)}


def _cost_model(file: Path) -> CostModel:
    """The kept cost model; a damaged one is moved aside, and a new one learned."""
    try:
        return CostModel.load(file, WIDTH)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        aside = file.with_name(f"{file.name}.damaged")
        _log.warning("the cost model %s is damaged (%s); it is kept in %s", file, error, aside)
        os.replace(file, aside)
        return CostModel(WIDTH)


def _candidate(key: str, lowered: Lowered) -> Candidate:
    return Candidate(id=key, source=lowered.source, inner=lowered.inner, launches=lowered.launches)


if __name__ == "__main__":
    main()
