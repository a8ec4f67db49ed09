"""LightGlue with default kernels beside ONNX Runtime: `python -m benchmarks.lightglue`.

Prints the time to add the model, launches per inference beside the 834 of the case, the latency of both
(median and deviation over interleaved runs) and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

from honed.machine import devices
from honed.runtime.execution.executor import load
from honed.tuner.demo import lightglue

CASE_LAUNCHES = 834  # Launches of TVM's graph executor in cases.md, case 1
GFLOP = 10.035  # GFLOP of MatMul at 192 keypoints
WARM_UP = 2


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--runs", type=int, default=20)
    parser.add_argument("--keypoints", type=int, default=lightglue.KEYPOINTS)
    parser.add_argument("--device", help="the OpenCL device; the best one where not given")
    parser.add_argument("--threads", type=int, default=2, help="of ONNX Runtime")
    args = parser.parse_args()
    device = devices.select(args.device)
    given = lightglue.example_inputs(args.keypoints)
    with tempfile.TemporaryDirectory() as folder:
        source, compiled = Path(folder) / "lightglue.onnx", Path(folder) / "lightglue.honed"
        lightglue.write(source, args.keypoints)
        event, seconds = _add(source, compiled, device.spec)
        session = _session(source, args.threads)
        with load(compiled, device) as executor:
            ours, theirs = _interleaved(
                args.runs, lambda: executor.run(given), lambda: session.run(None, given)
            )
            error = _error(executor.run(given)["scores"], np.asarray(session.run(["scores"], given)[0]))
            launches = executor.launches
    print(f"device                {device.profile.identity.name}, {args.keypoints} keypoints")
    print(f"add (child, proven)   {seconds:.1f} s, of which compiling {event['seconds']} s")
    print(f"kernels               {event['kernels']}")
    print(f"launches              {launches}, {launches / CASE_LAUNCHES:.2f} of the case's {CASE_LAUNCHES}")
    print(f"honed                 {_summary(ours)}")
    print(f"onnxruntime {onnxruntime.__version__:9s} {_summary(theirs)}, {args.threads} threads")
    print(f"honed / onnxruntime   {statistics.median(ours) / statistics.median(theirs):.2f}")
    if args.keypoints == lightglue.KEYPOINTS:
        print(f"honed                 {GFLOP / statistics.median(ours):.1f} GFLOP/s of MatMul")
    print(f"largest difference    {error:.2e} of the range of scores")


def _add(source: Path, compiled: Path, spec: str) -> tuple[dict[str, object], float]:
    """Compile and prove as the service does; the child's last event and the wall time in seconds."""
    command = [sys.executable, "-m", "honed.tuner", "compile", str(source), "-o", str(compiled)]
    start = time.perf_counter()
    done = subprocess.run([*command, "--device", spec], stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.perf_counter() - start
    event = json.loads(done.stdout.splitlines()[-1])
    if event["event"] != "done":
        raise SystemExit(f"the model was not compiled: {event['message']}")
    return event, seconds


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
