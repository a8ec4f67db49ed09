"""LightGlue tuned for a while, beside its default schedules, ONNX Runtime and the case.

`python -m benchmarks.tuning [--minutes 20] [--state DIR]` tunes the model of cases.md, case 1, on the best
OpenCL device here, then runs the default and the tuned version and ONNX Runtime in turns in one process and
prints the ratios, the table of the case beside ours, the result of every task, and how well the cost model
ranked. With --state the records stay there, and the next run continues from them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from honed.machine import devices
from honed.runtime.execution.executor import load
from honed.tuner import lightglue

# Cases.md, case 1: the auto-scheduler over RPC, on an RK3588's Mali-G610.
FULL = 8  # Candidates of a batch that a rank correlation says something of
CASE_TRIALS, CASE_SECONDS, CASE_TUNED, CASE_TASKS = 1408, 10_564, 4, 14
WARM_UP = 2


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--keypoints", type=int, default=lightglue.KEYPOINTS)
    parser.add_argument("-n", "--runs", type=int, default=30)
    parser.add_argument("--device", help="the OpenCL device; the best one where not given")
    parser.add_argument("--threads", type=int, default=2, help="of ONNX Runtime")
    parser.add_argument("--state", type=Path, help="folder of records and caches, kept")
    args = parser.parse_args()
    device = devices.select(args.device)
    with tempfile.TemporaryDirectory() as name, _state(args.state) as state:
        folder = Path(name)
        source, default, tuned = (folder / n for n in ("lightglue.onnx", "default.honed", "tuned.honed"))
        lightglue.write(source, args.keypoints)
        _events("compile", str(source), "-o", str(default), "--device", device.spec)
        done, rankings = _tuned(args, source, default, tuned, device.spec, state)
        _report(done, rankings)
        if not tuned.exists():
            raise SystemExit("nothing faster was found")
        given = lightglue.example_inputs(args.keypoints)
        session = _session(source, args.threads)
        with load(default, device) as before, load(tuned, device) as now:
            times = _interleaved(
                args.runs, lambda: before.run(given), lambda: now.run(given), lambda: session.run(None, given)
            )
            expected = np.asarray(session.run(["scores"], given)[0])
            error, launches = _error(now.run(given)["scores"], expected), now.launches
    middle = [statistics.median(each) for each in times]
    print(f"\ndevice                {device.profile.identity.name}, {args.keypoints} keypoints")
    for title, taken in zip(("default schedules", "tuned", "ONNX Runtime"), times, strict=True):
        print(f"{title:21s} {_summary(taken)}")
    print(f"tuned / default       {middle[0] / middle[1]:.2f} times faster")
    print(f"tuned / ONNX Runtime  {middle[2] / middle[1]:.2f} of its speed ({args.threads} threads)")
    print(f"launches              {launches}")
    print(f"largest difference    {error:.1e} of the range of scores, to ONNX Runtime")


@contextmanager
def _state(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _events(*command: str) -> Iterator[dict[str, Any]]:
    """Run a command of the compiler, and return its events."""
    done = subprocess.run(
        [sys.executable, "-m", "honed.tuner", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    if not events or events[-1]["event"] != "done":
        raise SystemExit(f"{command[0]} failed: {events[-1:]}")
    return iter(events)


def _tuned(
    args: argparse.Namespace, source: Path, default: Path, tuned: Path, spec: str, state: Path
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Tune; return the last event, and each round's ranking."""
    command = [sys.executable, "-m", "honed.tuner", "tune", str(source), "-o", str(tuned)]
    command += ["--current", str(default), "--device", spec, "--seconds", str(args.minutes * 60)]
    command += ["--records", str(state / "records.sqlite"), "--cache-dir", str(state / "cache")]
    begun, rankings, event = time.monotonic(), [], {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "round":
                if event["ranking"]:
                    rankings.append(event["ranking"])
                spent, now = time.monotonic() - begun, event["model"]["now_us"] / 1e3
                print(f"\r{spent:5.0f} s, {event['trials']} trials, {now:.1f} ms   ", end="", file=sys.stderr)
            elif event["event"] in ("broke", "condemned", "note"):
                print(f"\n{event}", file=sys.stderr)
    print(file=sys.stderr)
    if event.get("event") != "done":
        raise SystemExit(f"tuning failed: {event}")
    return event, rankings


def _report(done: dict[str, Any], rankings: list[dict[str, Any]]) -> None:
    tasks = done["tasks"]
    print(f"{'task':44s} {'runs':>5s} {'default us':>11s} {'best us':>9s} {'GFLOP/s':>8s} {'trials':>6s}")
    for row in tasks:
        default, best, rate = row["default_us"] or 0, row["best_us"] or 0, row["gflops"] or 0
        figures = f"{row['weight']:5d} {default:11.1f} {best:9.1f} {rate:8.1f} {row['trials']:6d}"
        state = ", ".join(part for part in (row["state"], row["reason"]) if part)
        print(f"{row['name'][:44]:44s} {figures}  {state}")
    states = [row["state"] for row in tasks]
    failures = sum(done["failures"].values())
    tuned, case = f"{states.count('tuned')} of {len(states)}", f"{CASE_TUNED} of {CASE_TASKS}"
    rates = CASE_TRIALS / CASE_SECONDS, done["trials"] / done["seconds"]
    print()
    for title, theirs, ours in (
        ("", "case 1", "honed"),
        ("tasks tuned", case, tuned),
        ("tasks left, with a reason", "0", str(states.count("skipped"))),
        ("tasks lost", str(CASE_TASKS - CASE_TUNED), str(states.count("lost"))),
        ("trials", str(CASE_TRIALS), str(done["trials"])),
        ("seconds", str(CASE_SECONDS), f"{done['seconds']:.0f}"),
        ("trials a second", f"{rates[0]:.2f}", f"{rates[1]:.2f}"),
    ):
        print(f"{title:30s} {theirs:>14s} {ours:>14s}")
    share = 100 * failures / max(1, done["trials"])
    print(f"failures by cause: {done['failures'] or 'none'}, {share:.1f} % of the trials")
    full = [r for r in rankings if r["batch"] >= FULL]
    if full:
        correlation = statistics.median(r["correlation"] for r in full)
        place = statistics.median(r["best_rank"] for r in full)
        print(f"cost model: rank correlation {correlation:.2f}, median of {len(full)} batches of {FULL}+;")
        print(f"the measured best was in its first {place:.0f} in half of them")


def _session(source: Path, threads: int) -> onnxruntime.InferenceSession:
    """Return ONNX Runtime with all its optimisations; its threads sleep between runs, to leave ours alone."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _interleaved(runs: int, *functions: Callable[[], object]) -> tuple[list[float], ...]:
    """Return the seconds of every run, in turns, so that both see the same machine."""
    times: tuple[list[float], ...] = tuple([] for _ in functions)
    for i in range(runs + WARM_UP):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if i >= WARM_UP:
                taken.append(time.perf_counter() - start)
    return times


def _summary(seconds: list[float]) -> str:
    middle, deviation = statistics.median(seconds), statistics.pstdev(seconds)
    return f"{middle * 1e3:.1f} ms median of {len(seconds)} runs (std {deviation * 1e3:.1f})"


def _error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / (theirs.max() - theirs.min()))


if __name__ == "__main__":
    main()
