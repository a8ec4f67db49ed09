"""Child processes that evaluate an untrusted model: bounded in time and memory, with files for tensors."""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from honed.process import children
from honed.process.children import ExitInfo, ResourceLimits, answering, python
from honed.process.limits import out_of_memory
from honed.protocol.errors import ModelRefused
from honed.runtime.engines import message_of

if TYPE_CHECKING:
    import onnx

MAX_MODEL = 2**31 - 2**20  # Bytes; a protobuf message ends at 2 GiB
MODEL = "model.onnx"


Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLimits:
    """The limits of one evaluation; seconds are wall time over all inputs, and all evaluators tried."""

    seconds: float = 120.0
    memory_bytes: int = 4 << 30
    threads: int = 2


DEFAULT_LIMITS = EvaluationLimits()


@dataclass(frozen=True, slots=True)
class LoadedEvaluator:
    """A model that an evaluator runs: `run` takes inputs by name, and returns the outputs in order.

    `outputs` have NumPy's names of their types where the evaluator may give others, else None.
    """

    evaluator: str  # Name and version
    inputs: Sequence[str]
    outputs: Mapping[str, str | None]
    run: Callable[[dict[str, np.ndarray]], list[object]]


class EvaluationFailed(Exception):
    """Raised when the evaluation failed; the text is what follows "because"."""


class InputsRefused(EvaluationFailed):
    """Raised when the model can be run, but not on these inputs."""


def run(
    module: str, folder: Path, arguments: Sequence[str], limits: EvaluationLimits, deadline: float
) -> dict[str, Any]:
    """Run a module as a child with `folder` for its files; return its answer.

    On failure: "failure" is the reason in a sentence and "kind" is "time", "memory" or "failed". `deadline`
    is of time.monotonic().
    """
    left = max(deadline - time.monotonic(), 0.0)
    threads = str(limits.threads)
    bounds = ResourceLimits(
        address_mib=limits.memory_bytes >> 20, cpu_seconds=math.ceil(left * limits.threads) + 1
    )
    answers, death = children.run(
        python(module, str(folder), *arguments, "--threads", threads),
        bounds,
        seconds=left,
        environment=os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
    )
    if death.status == 0 and answers:
        return answers[-1]
    return _failure(death, limits)


def write(folder: Path, model: onnx.ModelProto, names: Sequence[str], sets: Sequence[Arrays]) -> None:
    """Write a model, and sets of its inputs in the order of `names`, where a child finds them."""
    if not fits(model):
        raise ModelRefused("the model is larger than 2 GiB, more than a child can be given; make it smaller")
    (folder / MODEL).write_bytes(model.SerializeToString())
    for i, values in enumerate(sets):
        for j, name in enumerate(names):
            np.save(folder / f"input.{i}.{j}.npy", values[name], allow_pickle=False)


def fits(model: onnx.ModelProto) -> bool:
    """Return whether a model can be written; beyond protobuf's 2 GiB not even its size can be computed."""
    try:
        return int(model.ByteSize()) <= MAX_MODEL
    except Exception as error:
        if "serialize" in str(error):
            return False
        raise


def sets_in(folder: Path, names: Sequence[str], count: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the sets of inputs that `write` stored in the folder."""
    for i in range(count):
        yield {name: np.load(folder / f"input.{i}.{j}.npy") for j, name in enumerate(names)}


def parser(module: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that `run` gives a child, with the number of sets of inputs."""
    made = argparse.ArgumentParser(prog=module)
    made.add_argument("folder", type=Path)
    made.add_argument("--threads", type=int, required=True)
    made.add_argument("--sets", type=int, default=0)
    return made


def one_line(error: Exception) -> str:
    """Return an error as one line, without the paths and signatures of other projects' source code."""
    return (
        str(error) if isinstance(error, EvaluationFailed) else f"{type(error).__name__}: {message_of(error)}"
    )


def answer(work: Callable[[], Mapping[str, object]]) -> int:
    """Answer the parent process with the result of `work`, or why there is none; return the exit status."""
    with answering() as say:
        try:
            say(work())
        except Exception as error:  # noqa: BLE001  an evaluator may raise anything about an untrusted model
            if out_of_memory(error):
                say({"failure": "it needs more memory than allowed", "kind": "memory"})
            else:
                kind = "inputs" if isinstance(error, InputsRefused) else "failed"
                say({"failure": one_line(error), "kind": kind})
    return 0


def _failure(death: ExitInfo, limits: EvaluationLimits) -> dict[str, Any]:
    """Return the answer for a child that ended without a result."""
    if death.late:
        return {"failure": f"it was not done after {limits.seconds:g} s", "kind": "time"}
    if death.signal is signal.SIGXCPU:
        return {"failure": f"it was not done after {limits.seconds:g} s of each processor", "kind": "time"}
    if death.out_of_memory:
        return {"failure": "it needs more memory than allowed", "kind": "memory"}
    return {"failure": str(death), "kind": "failed"}
