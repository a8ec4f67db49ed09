"""Command bench: how long an inference takes, as an app sees it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .infer import add_input_options
from .output import Output, fields, line
from .parser import add_command, count, unique

if TYPE_CHECKING:
    from rich.console import Console

    from honed.runtime.client import Client

_WARM_UP = 3  # inferences before the clock starts: caches fill, the device clocks up


def register(commands: Any) -> None:
    """Add this command to the parser."""
    bench = add_command(
        commands,
        "bench",
        _bench,
        about="time a model through the socket, as an app sees it",
        details="Inputs that are not given are made up. Runs one inference after the other.",
        examples="hone bench lightglue\nhone bench lightglue -n 200 --json",
    )
    add_input_options(bench)
    bench.add_argument("-n", "--runs", metavar="N", type=count, default=50, help="inferences (default 50)")


def _bench(arguments: argparse.Namespace, output: Output) -> int:
    from honed.runtime.client import Client

    from . import arrays

    with Client(arguments.socket) as client:
        values = arrays.collect(
            client.metadata(arguments.model)["inputs"],
            unique("--input", arguments.input),
            model=arguments.model,
            random=True,
            seed=arguments.seed,
        )
        for _ in range(_WARM_UP):
            client.infer(arguments.model, values)
        before = _spent(client, arguments.model)
        times = _timed(client, arguments.model, values, arguments.runs)
        after = _spent(client, arguments.model)
    document = {
        "model": arguments.model,
        **summary(times),
        "device_ms": mean_between(before, after, "compute_infer"),
        "queue_ms": mean_between(before, after, "queue"),
    }
    output.emit(document, lambda console: _print(console, document))
    return 0


def _timed(client: Client, model: str, values: Mapping[str, Any], runs: int) -> list[float]:
    from .progress import Reporter

    times = []
    with Reporter(f"bench {model}") as reporter:
        for run in range(runs):
            reporter.update("run", run / runs, f"{runs} inferences")
            start = time.perf_counter()
            client.infer(model, values)
            times.append(time.perf_counter() - start)
    return times


def summary(times: Sequence[float]) -> dict[str, Any]:
    """Figures of these times (seconds) in milliseconds; `std_ms` is of the sample, 0 for a single time."""
    import numpy as np

    milliseconds = np.asarray(times) * 1e3
    return {
        "runs": len(times),
        "median_ms": float(np.median(milliseconds)),
        "mean_ms": float(milliseconds.mean()),
        "std_ms": float(milliseconds.std(ddof=1)) if len(times) > 1 else 0.0,
        "p95_ms": float(np.percentile(milliseconds, 95)),
        "min_ms": float(milliseconds.min()),
        "max_ms": float(milliseconds.max()),
    }


def mean_between(before: Mapping[str, Any], after: Mapping[str, Any], what: str) -> float | None:
    """Mean of a statistic over the requests between two readings, in ms; None where there were none.

    Requests of other clients count too.
    """
    count = after[what]["count"] - before[what]["count"]
    return (after[what]["ns"] - before[what]["ns"]) / count / 1e6 if count > 0 else None


def _spent(client: Client, model: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = client.statistics(model)[0]["inference_stats"]
    return found


def _print(console: Console, document: Mapping[str, Any]) -> None:
    line(console, f"{document['model']}, {document['runs']} inferences through the socket, in milliseconds:")
    names = {"median_ms": "median", "mean_ms": "mean", "std_ms": "std", "p95_ms": "95 % within"}
    names |= {
        "min_ms": "fastest",
        "max_ms": "slowest",
        "device_ms": "on the device",
        "queue_ms": "in the queue",
    }
    console.print(
        fields((name, f"{document[key]:9.3f}") for key, name in names.items() if document[key] is not None)
    )
