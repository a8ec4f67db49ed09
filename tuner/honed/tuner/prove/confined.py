"""Child processes that evaluate an untrusted model: bounded in time and memory, with files for answers."""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.runtime.offspring import die_with

RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one evaluation may use; seconds are wall time over all inputs, and all evaluators tried."""

    seconds: float = 120.0
    memory_bytes: int = 4 << 30
    threads: int = 2


DEFAULT_LIMITS = Limits()


def run(
    module: str, folder: Path, arguments: Sequence[str], limits: Limits, deadline: float
) -> dict[str, Any]:
    """Run a module as a child with `folder` for its files; what it wrote to RESULT there.

    Where it wrote nothing: "failure" is why in a sentence and "kind" is "time", "memory" or "failed".
    `deadline` is of time.monotonic().
    """
    left = max(deadline - time.monotonic(), 0.0)
    # -P: the folder holds files of an untrusted model, and nothing is to be imported from there.
    command = [sys.executable, "-P", "-m", module, str(folder), *arguments]
    command += ["--parent", str(os.getpid()), "--memory-bytes", str(limits.memory_bytes)]
    command += ["--cpu-seconds", str(math.ceil(left * limits.threads) + 1), "--threads", str(limits.threads)]
    threads = str(limits.threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    with (folder / "log").open("w+b") as log:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=left,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"failure": f"it was not done after {limits.seconds:g} s", "kind": "time"}
    result = folder / RESULT
    if done.returncode == 0 and result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        result.unlink()
        return found
    last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:] or [""]
    return _death(done.returncode, last[0][:200], limits)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` tells every child."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of who started this")
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--cpu-seconds", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)


def confine(arguments: argparse.Namespace) -> None:
    """In the child: bound memory and processor time, and end with the parent."""
    die_with(arguments.parent)
    resource.setrlimit(resource.RLIMIT_AS, (arguments.memory_bytes, arguments.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (arguments.cpu_seconds, arguments.cpu_seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def out_of_memory(error: Exception) -> bool:
    """Whether an evaluator's error means that there was too little memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "bad_alloc" in text or "Failed to allocate" in text


def _death(status: int, last: str, limits: Limits) -> dict[str, Any]:
    """What to make of a child that ended without a result; `last` is the last line it wrote."""
    if status == -signal.SIGXCPU:
        return {"failure": f"it was not done after {limits.seconds:g} s of each processor", "kind": "time"}
    if status == -signal.SIGKILL or "MemoryError" in last or "bad_alloc" in last:
        return {"failure": "it needs more memory than allowed", "kind": "memory"}
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    return {"failure": f"it ended with {ending} {last}".strip(), "kind": "failed"}
