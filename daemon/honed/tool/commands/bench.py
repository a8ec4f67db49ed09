"""Command bench: how long an inference takes, as an app sees it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.protocol.methods import METRICS, MODEL_STATISTICS
from honed.protocol.params import ModelParams
from honed.protocol.results import InferenceStatistics, Tallied
from honed.runtime.client import Client
from honed.tool.output import Console, Output, fields, line
from honed.tool.parser import Parser, count, define
from honed.tool.progress import Reporter

from .infer import add_input_options, inputs

_WARM_UP = 3  # inferences before the clock starts: caches fill, the device clocks up


def define_bench(bench: Parser) -> None:
    """What `hone bench` takes."""
    define(
        bench,
        _bench,
        details="Inputs that are not given are made up. Runs one inference after the other.",
        examples="hone bench lightglue\nhone bench lightglue -n 200 --json",
    )
    add_input_options(bench)
    bench.add_argument("-n", "--runs", metavar="N", type=count, default=50, help="inferences (default 50)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benched:
    """What came of a run: times through the socket, and the means in the engine and in the queue.

    `std_ms` is of the sample, 0 for a single time. `engines` counts the answers of each meanwhile, with those
    to other clients.
    """

    model: str
    runs: int
    median_ms: float
    mean_ms: float
    std_ms: float
    p95_ms: float
    min_ms: float
    max_ms: float
    device_ms: float | None
    queue_ms: float | None
    engines: dict[str, int]


def _bench(arguments: argparse.Namespace, output: Output) -> None:
    with Client(arguments.socket) as client:
        values = inputs(client, arguments, random=True)
        for _ in range(_WARM_UP):
            client.infer(arguments.model, values)
        before, answered = _spent(client, arguments.model), _answers(client, arguments.model)
        times = _timed(client, arguments.model, values, arguments.runs)
        after, answers = _spent(client, arguments.model), _answers(client, arguments.model)
    done = Benched(
        model=arguments.model,
        runs=len(times),
        median_ms=float(np.median(times)),
        mean_ms=float(times.mean()),
        std_ms=float(times.std(ddof=1)) if len(times) > 1 else 0.0,
        p95_ms=float(np.percentile(times, 95)),
        min_ms=float(times.min()),
        max_ms=float(times.max()),
        device_ms=_mean_between(before.compute_infer, after.compute_infer),
        queue_ms=_mean_between(before.queue, after.queue),
        engines={kind: n for kind, count in answers.items() if (n := count - answered.get(kind, 0))},
    )
    output.emit(done, lambda console: _print(console, done))


def _timed(client: Client, model: str, values: Mapping[str, Any], runs: int) -> NDArray[np.float64]:
    """Milliseconds."""
    times = []
    with Reporter(f"bench {model}") as reporter:
        for run in range(runs):
            reporter.update("run", run / runs, f"{runs} inferences")
            start = time.perf_counter()
            client.infer(model, values)
            times.append(time.perf_counter() - start)
    return np.asarray(times) * 1e3


def _mean_between(before: Tallied, after: Tallied) -> float | None:
    """Mean time between two readings, in ms; None where nothing was counted.

    Requests of other clients count too.
    """
    count = after.count - before.count
    return (after.ns - before.ns) / count / 1e6 if count > 0 else None


def _spent(client: Client, model: str) -> InferenceStatistics:
    return client.ask(MODEL_STATISTICS, ModelParams(name=model)).model_stats[0].inference_stats


def _answers(client: Client, model: str) -> dict[str, int]:
    """How many answers each engine has given for a model."""
    return next((each.engines for each in client.ask(METRICS).models if each.name == model), {})


def _print(console: Console, done: Benched) -> None:
    line(console, f"{done.model}, {done.runs} inferences through the socket, in milliseconds:")
    figures = {
        "median": done.median_ms,
        "mean": done.mean_ms,
        "std": done.std_ms,
        "95 % within": done.p95_ms,
        "fastest": done.min_ms,
        "slowest": done.max_ms,
        "in the engine": done.device_ms,
        "in the queue": done.queue_ms,
    }
    rows = [(name, f"{ms:9.3f}") for name, ms in figures.items() if ms is not None]
    answered = ", ".join(f"{kind} {count}" for kind, count in sorted(done.engines.items()))
    console.print(fields([*rows, ("answered by", answered)]))
