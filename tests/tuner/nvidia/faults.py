"""One of our own kernels made to write out of bounds, near and far, in a real tuning session.

The session is the real one, with real records, a real measuring child and the real kernel log; only what
is proposed is planted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from honed.jobs.events import News, Trial, to_map
from honed.machine.kernellog.reader import Reader
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled.model import SearchStrategy
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import MeasurementSetup
from honed.tuner.records.store import Records
from honed.tuner.tune.children import (
    DefaultSchedule,
    LoadedTask,
    Proposals,
    Proposed,
    ProposedCandidate,
    SearchChild,
)
from honed.tuner.tune.session import Rooflines, SearchBudget, TuningSession
from honed.tuner.tune.task import ModelTasks, TuningTask
from honed.tuner.tune.trials import Trials

from .tuning import dense_function, dense_workload

SHAPE = (192, 512, 512)
NEAR, FAR = 16, 1 << 40  # elements: into the guard band, and out of all memory


class Planted:
    """Proposes four candidates: right, writing near, writing far, right."""

    def __init__(self, profile: DeviceProfile, folder: Path) -> None:
        func = dense_function(*SHAPE)
        _, lowered, _ = default_kernels(func, "main", target_for(profile), profile)
        self._right = Candidate.of("default", lowered)
        self._folder = folder
        self._asked: tuple[TuningTask, int] | None = None
        self.results: dict[str, float | None] = {}

    def extract(self, *_: Any) -> ModelTasks:
        m, n, k = SHAPE
        task = TuningTask(
            key="dense",
            name="dense",
            weight=1,
            flops=2 * m * n * k,
            bytes=4 * (m * k + k * n + m * n),
            dtype="float32",
            opaque="",
        )
        return ModelTasks(tasks=(task,))

    def load(self, _task: TuningTask) -> LoadedTask:
        return LoadedTask(workload=dense_workload(self._folder / "dense", *SHAPE), fresh=True)

    def default(self, task: TuningTask, *_: object, **__: bool) -> DefaultSchedule:
        return DefaultSchedule(loaded=self.load(task), candidate=self._right)

    def begin(self, task: TuningTask, _known: object, _kin: object, round_: int) -> None:
        self._asked = task, round_

    def collect(self) -> Proposed:
        assert self._asked is not None
        task, round_ = self._asked
        entries = [] if round_ else self._entries()
        return Proposed(
            loaded=self.load(task), entries=tuple(entries), way=SearchStrategy.EVOLUTION, last=False
        )

    def _entries(self) -> list[ProposedCandidate]:
        made = {
            "right-1": _marked(self._right, 1),
            "near": writing_beyond(self._right, NEAR),
            "far": writing_beyond(self._right, FAR),
            "right-2": _marked(self._right, 2),
        }
        return [
            ProposedCandidate(name, json.dumps([name]), None, replace(c, id=name), "")
            for name, c in made.items()
        ]

    def learn(self, _task: str, results: Mapping[str, float | None]) -> None:
        self.results.update(results)


def writing_beyond(candidate: Candidate, elements: int) -> Candidate:
    """The candidate with a work-item that writes `elements` after the end of the output, too."""
    m, n, _ = SHAPE
    name = _output_name(candidate)
    body = candidate.source.rindex("}")
    statement = f"  if (get_global_id(0) == 0) {name}[{m * n - 1}L + {elements}L] = 1.0f;\n"
    return replace(candidate, source=candidate.source[:body] + statement + candidate.source[body:])


def _output_name(candidate: Candidate) -> str:
    """The pointer of the kernel's argument that is the function's third parameter."""
    names = re.findall(r"__global \w+\* restrict (\w+)", candidate.source)
    args = candidate.launches[-1].args
    return cast("str", names[args.index(2)])


def _marked(candidate: Candidate, number: int) -> Candidate:
    return replace(candidate, source=f"{candidate.source}// {number}\n")


def run(spec: str, profile: DeviceProfile, folder: Path, kernel_log: Reader | None) -> dict[str, Any]:
    """The session's story: what became of each candidate, children, what is in quarantine."""
    planted = Planted(profile, folder)
    events: list[News] = []
    setup = MeasurementSetup(device=profile.identity, compiler="bench")
    with Records.open(folder / "records.db", measured_by="bench") as records:
        trials = Trials(
            lambda begin: Measurer(spec, profile, kernel_log=kernel_log, begin=begin), records, setup
        )
        search = cast("SearchChild", planted)
        proposals = Proposals(search, records, setup, ahead=False)
        rooflines = Rooflines(profile, lambda: profile)
        session = TuningSession("dense", rooflines, trials, proposals, events.append)
        session.run(planted.extract, SearchBudget(seconds=120))
        candidates = [
            {"trace": c.trace, "state": str(c.state), "outcome": str(c.outcome), "reason": c.reason}
            for c in records.history("dense", setup)
        ]
        return {
            "trials": [to_map(e) for e in events if isinstance(e, Trial)],
            "records": candidates,
            "quarantine": [c.trace for c in records.list_quarantined(setup)],
            "children": cast("Measurer", trials.measurer).children,
            "results": planted.results,
        }
