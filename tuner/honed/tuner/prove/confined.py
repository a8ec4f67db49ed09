"""Child processes that evaluate an untrusted model: bounded in time and memory, with files for answers."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from honed.machine.children import Bounds, Death, python
from honed.machine.children import run as run_child

RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLimits:
    """What one evaluation may use; seconds are wall time over all inputs, and all evaluators tried."""

    seconds: float = 120.0
    memory_bytes: int = 4 << 30
    threads: int = 2


DEFAULT_LIMITS = EvaluationLimits()


def run(
    module: str, folder: Path, arguments: Sequence[str], limits: EvaluationLimits, deadline: float
) -> dict[str, Any]:
    """Run a module as a child with `folder` for its files; what it wrote to RESULT there.

    Where it wrote nothing: "failure" is why in a sentence and "kind" is "time", "memory" or "failed".
    `deadline` is of time.monotonic().
    """
    left = max(deadline - time.monotonic(), 0.0)
    threads = str(limits.threads)
    bounds = Bounds(address_mib=limits.memory_bytes >> 20, cpu_seconds=math.ceil(left * limits.threads) + 1)
    _, death = run_child(
        python(module, str(folder), *arguments, "--threads", threads),
        bounds,
        seconds=left,
        environment=os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
    )
    result = folder / RESULT
    if death.status == 0 and result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        result.unlink()
        return found
    return _failure(death, limits)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` tells every child."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, required=True)


def out_of_memory(error: Exception) -> bool:
    """Whether an evaluator's error means that there was too little memory."""
    text = str(error)
    return isinstance(error, MemoryError) or "bad_alloc" in text or "Failed to allocate" in text


def _failure(death: Death, limits: EvaluationLimits) -> dict[str, Any]:
    """What to make of a child that ended without a result."""
    if death.late:
        return {"failure": f"it was not done after {limits.seconds:g} s", "kind": "time"}
    if death.signal is signal.SIGXCPU:
        return {"failure": f"it was not done after {limits.seconds:g} s of each processor", "kind": "time"}
    if death.out_of_memory:
        return {"failure": "it needs more memory than allowed", "kind": "memory"}
    return {"failure": str(death), "kind": "failed"}
