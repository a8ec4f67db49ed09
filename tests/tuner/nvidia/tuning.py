"""Tunes dense products with the tuner's own search and measuring child, in one process, for a given time."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tvm import te, tirx, topi

from honed.machine.profile import DeviceProfile
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import LoweringFailed, lower_function
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.measure.process import COMMAND
from honed.tuner.records.rows import Verdict
from honed.tuner.search import rules
from honed.tuner.search.batches import Batches, Evolution
from honed.tuner.search.costmodel import CostModel, ranking
from tests.tuner.liars import honest

from .prebuild import build_all

# The measuring child turns the driver's cache off; here it finds what `prebuild` made in parallel.
CACHED = ("env", "CUDA_CACHE_DISABLE=0", *COMMAND)
BATCH = 48


def dense_function(m: int, n: int, k: int) -> tirx.PrimFunc:
    """out[m, n] = sum over k of a[m, k] b[k, n], float32."""
    a, b = te.placeholder((m, k), name="a"), te.placeholder((k, n), name="b")
    return te.create_prim_func([a, b, topi.matmul(a, b)])


def dense_workload(folder: Path, m: int, n: int, k: int) -> Workload:
    """Its inputs and outputs, these from NumPy in double precision."""
    return honest.dense(folder, m, n, k, sets=2)


@dataclass
class Tuned:
    """What came of one product; `best` is the fastest right candidate found, by its trace."""

    shape: tuple[int, int, int]
    default: Candidate
    default_rule: str
    default_seconds: float | None = None
    best: Candidate | None = None
    best_trace: str = ""
    best_seconds: float = math.inf
    known: dict[str, float] = field(default_factory=dict)  # seconds by trace
    outcomes: Counter[str] = field(default_factory=Counter)
    rankings: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Bench:
    """What all products share."""

    profile: DeviceProfile
    measurer: Measurer
    workers: ProcessPoolExecutor
    model: CostModel
    folder: Path
    threads: int


def tune(bench: Bench, shape: tuple[int, int, int], seconds: float, kin: Iterable[str] = ()) -> Tuned:
    """Search for `seconds`. `kin` are traces to begin with, of the same function at another size."""
    func, target = dense_function(*shape), target_for(bench.profile)
    rule, lowered, _ = untuned_kernels(func, "main", target, bench.profile)
    found = Tuned(shape, Candidate.of("default", lowered), rule)
    bench.measurer.load(dense_workload(bench.folder / "x".join(map(str, shape)), *shape))
    verdict = bench.measurer.measure(found.default)
    found.default_seconds = verdict.timing.median_s if verdict.timing else None
    deadline = time.monotonic() + seconds
    evolution = Evolution(
        func,
        target,
        rules.space(func, target, bench.profile),
        bench.model,
        batch=BATCH,
        seed=sum(shape),
        threads=bench.threads,
        postprocs=rules.postprocs(bench.profile),
    )
    batches = Batches(evolution, BATCH, list(kin))
    while time.monotonic() < deadline and _round(bench, found, batches, deadline):
        pass
    return found


def _round(bench: Bench, found: Tuned, batches: Batches, deadline: float) -> bool:
    began = time.monotonic()
    batch = batches.next()
    proposed = time.monotonic()
    made = []
    for proposal in batch.proposals:
        try:
            lowered = lower_function(proposal.scheduled, "main", target_for(bench.profile), bench.profile)
        except LoweringFailed as failed:
            found.outcomes[f"lowering: {failed}"[:60]] += 1
            continue
        made.append((proposal, Candidate.of(proposal.id, lowered)))
    build_all(bench.workers, [candidate.source for _, candidate in made])
    built = time.monotonic()
    measured = []
    for proposal, candidate in made:
        if time.monotonic() > deadline:
            break
        verdict = bench.measurer.measure(candidate, found.best_seconds if found.best else None)
        seconds = _note(found, candidate, proposal.trace, verdict)
        batches.know(proposal.trace, seconds)
        measured.append((proposal, seconds))
    if measured:
        _learn(bench, found, measured)
    found.rounds.append(
        {
            "way": str(batch.way),
            "proposed": len(batch.proposals),
            "measured": len(measured),
            "propose_s": proposed - began,
            "build_s": built - proposed,
            "measure_s": time.monotonic() - built,
            "best_us": found.best_seconds * 1e6,
        }
    )
    print(found.shape, json.dumps(found.rounds[-1]), dict(found.outcomes), file=sys.stderr, flush=True)
    return bool(batch.proposals)


def _learn(bench: Bench, found: Tuned, measured: list[tuple[Any, float]]) -> None:
    seconds = np.array([s for _, s in measured])
    scores = [p.score for p, _ in measured]
    if None not in scores:
        ranked = ranking(np.array(scores, np.float32), seconds)
        if ranked is not None:
            found.rankings.append(
                {"correlation": ranked.correlation, "best_rank": ranked.best_rank, "batch": ranked.batch}
            )
    bench.model.add("x".join(map(str, found.shape)), np.array([p.features for p, _ in measured]), seconds)
    bench.model.train()


def _note(found: Tuned, candidate: Candidate, trace: str, verdict: Verdict) -> float:
    found.outcomes[str(verdict.outcome)] += 1
    seconds = verdict.timing.median_s if verdict.timing else math.inf
    found.known[trace] = seconds
    if seconds < found.best_seconds:
        found.best, found.best_trace, found.best_seconds = candidate, trace, seconds
    return seconds
