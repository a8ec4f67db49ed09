"""What the searching child leaves to forked processes: lowering candidates, default schedules, answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm.target import Target

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.opencl import Lowered, LoweringFailed, last_line, lower_function
from honed.tuner.schedules import first_kernels

from .extract import write_sets


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """What it is done with. Functions lie in `folder`; `seed` draws inputs, None: no answers are needed."""

    target: Target
    profile: DeviceProfile
    folder: Path
    seed: int | None

    def func(self, task: str) -> tvm.tirx.PrimFunc:
        """The function of a task."""
        return tvm.ir.load_json(self.file(task).read_text())

    def file(self, task: str) -> Path:
        """Where that function lies."""
        return self.folder / f"{task}.json"

    def answers(self, task: str) -> Path:
        """Where the task's inputs and answers lie."""
        return self.folder / task


def lowered(making: Making, scheduled: str) -> Lowered | str:
    """A candidate's kernels, or why there are none; `scheduled` is the function as TVM's JSON."""
    try:
        return lower_function(tvm.ir.load_json(scheduled), "main", making.target, making.profile)
    except LoweringFailed as failed:
        return str(failed)


def default(making: Making, task: str, outputs: int) -> Lowered:
    """A task's default schedule, and its inputs and answers where they are not there.

    Raises LoweringFailed with whatever TVM says, as its own errors do not travel between processes.
    """
    func = making.func(task)
    try:
        if making.seed is not None and not making.answers(task).exists():
            write_sets(func, outputs, making.answers(task), making.seed)
        _, kernels, _ = first_kernels(func, "main", making.target, making.profile)
    except (RuntimeError, ValueError, TypeError) as error:
        raise LoweringFailed(last_line(error)) from None
    return kernels
