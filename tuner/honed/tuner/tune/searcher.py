"""The searching child: `python -m honed.tuner.tune.searcher --channel FD`, the tuner's only TVM.

TVM may raise, crash or hang on a task; then this process ends and its parent, which knows everything that
matters, starts another. Messages are those of `honed.tuner.measure.codec`.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import tvm

from honed.machine.profile import DeviceProfile
from honed.protocol.errors import HonedError, InvalidArgument, ModelRefused
from honed.protocol.strict import from_plain, to_plain
from honed.tuner.forked import Forked
from honed.tuner.lower.opencl import Lowered, LoweringFailed
from honed.tuner.lower.target import target_for
from honed.tuner.measure import codec
from honed.tuner.measure.candidate import Candidate
from honed.tuner.search.costmodel import CostModel
from honed.tuner.search.features import WIDTH
from honed.tuner.search.prior import Prior, prior_of

from . import making
from .extract import Extracted, Extraction, adopt, extract_all, workload
from .hunt import Hunt, Tools

MOST_PROCESSES = 6  # that candidates are lowered by: each has a share of TVM's memory of its own
_HUNTS = 64  # that are kept; a model rarely has as many tasks worth tuning
_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Serve the channel until it closes."""
    parser = argparse.ArgumentParser(prog="honed.tuner.tune.searcher")
    parser.add_argument("--channel", type=int, required=True)
    options = parser.parse_args(argv)
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
        except BrokenProcessPool as error:
            sys.exit(f"a process that lowers candidates ended: {error}")
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
        seed, threads = int(message["seed"]), int(message["threads"])
        self.making = making.Making(
            target=target_for(self.profile),
            profile=self.profile,
            folder=Path(message["folder"]),
            seed=seed if message["answers"] else None,
        )
        forked = Forked(min(threads, MOST_PROCESSES), self.making)
        self.model_file = Path(message["cost_model"])
        self.tools = Tools(
            target=self.making.target,
            profile=self.profile,
            model=_cost_model(self.model_file, prior_of(self.profile.rules.family)),
            threads=threads,
            batch=int(message["batch"]),
            seed=seed,
            forked=forked,
        )
        self.begun: dict[str, Future[Lowered]] = {}  # default schedules, by task
        self.hunts: dict[str, Hunt] = {}  # by task; the one loaded last is the last

    def extract(self, message: Mapping[str, Any]) -> codec.Message:
        """All tasks of a model; their functions are written to the folder."""
        shapes = {name: tuple(shape) for name, shape in message["shapes"].items()}
        found = extract_all(
            Path(message["path"]),
            shapes,
            message["precision"],
            self.profile,
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
        tasks: list[Extracted] = [*found.tasks, *found.rivals]
        for one in tasks:
            self.making.file(one.task.key).write_text(tvm.ir.save_json(one.func))
        return {
            "tasks": [to_plain(one.task) | {"outputs": one.outputs} for one in tasks],
            "opaque": [to_plain(task) for task in found.opaque],
            "contests": [to_plain(one) for one in found.contests],
        }

    def load(self, message: Mapping[str, Any]) -> codec.Message:
        """Take up a task: its workload, where answers are checked with drawn inputs and TVM's outputs.

        `fresh` says whether its search begins anew; those of tasks loaded of late go on.
        """
        key, outputs = message["task"], int(message["outputs"])
        hunt = self.hunts.pop(key, None)
        fresh = hunt is None
        if hunt is None:
            hunt = Hunt(key, self.making.func(key), self.tools)
        self.hunts[key] = hunt
        while len(self.hunts) > _HUNTS:
            del self.hunts[next(iter(self.hunts))]
        answers = self.making.answers(key)
        made = workload(key, hunt.func, outputs, answers, self.making.seed, message["constants"])
        return {"workload": codec.workload_to_plain(made), "fresh": fresh}

    def default(self, message: Mapping[str, Any]) -> codec.Message:
        """Load a task, and make its default schedule a candidate; those of the `following` are begun.

        With `settle` they are all made when it answers.
        """
        for named in (message, *message["following"]):
            key = named["task"]
            if key not in self.begun:
                self.begun[key] = self.tools.forked.begin(making.default, key, int(named["outputs"]))
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
        """Learn from a batch of a loaded task."""
        answer = self.hunts[message["task"]].learn(message["results"])
        self.tools.model.save(self.model_file)
        return answer


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


if __name__ == "__main__":
    main()
