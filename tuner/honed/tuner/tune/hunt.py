"""One task's search, as the searching child holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm.target import Target

from honed.machine.profile import DeviceProfile
from honed.protocol.strict import to_plain
from honed.tuner.forked import Forked
from honed.tuner.lower.opencl import LoweringFailed
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.measure import codec
from honed.tuner.measure.candidate import Candidate
from honed.tuner.search import traces
from honed.tuner.search.batches import Batches
from honed.tuner.search.costmodel import CostModel, ranking
from honed.tuner.search.evolve import Evolution, Proposal
from honed.tuner.search.rules import postprocs, space

from . import making

_Made = tuple[str, str, float | None, tvm.tirx.PrimFunc]  # id, trace, score and the function scheduled by it


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What all hunts of a child share."""

    target: Target
    profile: DeviceProfile
    model: CostModel
    threads: int  # that a search may use
    seed: int
    batch: int  # candidates proposed at once
    forked: Forked[making.Making]


class Hunt:
    """Proposes schedules of one function, and learns from what came of them."""

    def __init__(self, key: str, func: tvm.tirx.PrimFunc, tools: Tools) -> None:
        """`key` is the task's."""
        self.key = key
        self.func = func
        self._tools = tools
        self._batches: Batches | None = None
        self._proposed: dict[str, Proposal] = {}  # and not learned from yet

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
        func, tools = narrow_indices(self.func), self._tools
        sketches = space(func, tools.target, tools.profile)
        if not sketches:
            return None
        evolution = Evolution(
            func,
            tools.target,
            sketches,
            tools.model,
            batch=tools.batch,
            seed=tools.seed + round_,
            threads=tools.threads,
            postprocs=postprocs(tools.profile),
        )
        return Batches(evolution, tools.batch, kin)

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
        model = self._tools.model
        model.add(self.key, np.array([p.features for p, _ in known]), seconds)
        model.train()
        for (proposal, _), s in zip(known, seconds, strict=True):
            self._batches.know(proposal.trace, float(s))
        return {"ranking": ranked and to_plain(ranked)}

    def _entries(self, found: Sequence[_Made]) -> list[dict[str, Any]]:
        """Candidates, lowered by all processes at once, or why they are none."""
        begin = self._tools.forked.begin
        begun = [begin(making.lowered, tvm.ir.save_json(scheduled)) for *_, scheduled in found]
        entries: list[dict[str, Any]] = []
        for (key, trace, score, _), one in zip(found, begun, strict=True):
            made, entry = one.result(), {"id": key, "trace": trace, "score": score}
            if isinstance(made, str):
                entries.append(entry | {"refused": made})
            else:
                entries.append(entry | {"candidate": codec.candidate_to_plain(Candidate.of(key, made))})
        return entries


def _measured(seconds: float | None) -> float:
    return np.inf if seconds is None else float(seconds)
