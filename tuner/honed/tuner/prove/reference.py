"""Evaluates the original model with something that shares nothing with TVM or the frontend.

ONNX Runtime where it is installed and can run the model, else ONNX's reference evaluator; each in a child
process of its own, bounded in time and memory, because the model is untrusted. What goes wrong is a value.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from . import graphs
from .evaluator import EVALUATORS

_MAX_MODEL = 2**31 - 2**20  # bytes; a protobuf message ends at 2 GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one evaluation may use; seconds are wall time over all inputs, and all evaluators tried."""

    seconds: float = 120.0
    memory_bytes: int = 4 << 30
    threads: int = 2


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the reference gave: for every set of inputs, the outputs by name, in the model's order."""

    outputs: tuple[dict[str, np.ndarray], ...]
    evaluator: str  # name and version, "onnxruntime 1.20.0"
    note: str | None  # why the first choice of evaluator was not used, one sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceFailure:
    """No evaluator could evaluate the model within its limits; `reason` is one sentence."""

    reason: str


def evaluate(
    model: onnx.ModelProto,
    inputs: Sequence[Mapping[str, np.ndarray]],
    limits: Limits = DEFAULT_LIMITS,
    evaluators: Sequence[str] = EVALUATORS,
) -> Reference | ReferenceFailure:
    """Run the model, with static shapes and all its tensors inside, on every set of inputs.

    `evaluators` are tried in order ("onnxruntime", "reference"); one that runs out of time or memory ends
    the evaluation, one that fails otherwise hands over to the next. Raises InvalidArgument where the
    inputs or shapes of the model are not such as honed carries.
    """
    names = [v.name for v in graphs.inputs(model)]
    if model.ByteSize() > _MAX_MODEL:
        return ReferenceFailure(reason="the model is larger than 2 GiB, more than the reference can be given")
    deadline = time.monotonic() + limits.seconds
    reasons: list[str] = []
    with tempfile.TemporaryDirectory(prefix="honed-reference-") as folder:
        place = Path(folder)
        onnx.save(model, place / "model.onnx")
        for i, values in enumerate(inputs):
            for j, name in enumerate(names):
                np.save(place / f"input.{i}.{j}.npy", values[name], allow_pickle=False)
        for evaluator in evaluators:
            result = _child(place, evaluator, len(inputs), limits, deadline)
            if "evaluator" in result:
                return Reference(
                    outputs=_read(place, graphs.outputs(model), len(inputs)),
                    evaluator=result["evaluator"],
                    note="; ".join(reasons) or None,
                )
            reasons.append(f"{evaluator} could not evaluate the model: {result['failure']}")
            if result["kind"] != "failed":
                break
    return ReferenceFailure(reason="; ".join(reasons))


def _child(folder: Path, evaluator: str, sets: int, limits: Limits, deadline: float) -> dict[str, str]:
    """Run one evaluator; the dict is what `evaluator` documents, with the kinds "time" and "failed" added."""
    left = max(deadline - time.monotonic(), 0.0)
    # -P: the folder holds files of an untrusted model, and nothing is to be imported from there.
    command = [sys.executable, "-P", "-m", "honed.tuner.prove.evaluator", str(folder), evaluator]
    command += ["--parent", str(os.getpid()), "--sets", str(sets), "--memory-bytes", str(limits.memory_bytes)]
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
    result = folder / "result.json"
    if done.returncode == 0 and result.exists():
        found: dict[str, str] = json.loads(result.read_text())
        result.unlink()
        return found
    last = (folder / "log").read_text(errors="replace").strip().splitlines()[-1:] or [""]
    return _death(done.returncode, last[0][:200], limits)


def _death(status: int, last: str, limits: Limits) -> dict[str, str]:
    """What to make of a child that ended without a result; `last` is the last line it wrote."""
    if status == -signal.SIGXCPU:
        return {"failure": f"it was not done after {limits.seconds:g} s of each processor", "kind": "time"}
    if status == -signal.SIGKILL or "MemoryError" in last or "bad_alloc" in last:
        return {"failure": "it needs more memory than allowed", "kind": "memory"}
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    return {"failure": f"it ended with {ending} {last}".strip(), "kind": "failed"}


def _read(folder: Path, names: Sequence[str], sets: int) -> tuple[dict[str, np.ndarray], ...]:
    return tuple(
        {name: np.load(folder / f"output.{i}.{j}.npy") for j, name in enumerate(names)} for i in range(sets)
    )
