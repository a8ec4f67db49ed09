"""The kernels that are measured beside their predictions: `kernels.jsonl`, which `draw` makes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from honed.protocol import strict

FILE = Path(__file__).with_name("kernels.jsonl")
FAMILIES = ("products", "convolutions", "depthwise", "rows", "moves")
PREDICTED_FOR = "Mali-G610"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Memory of a program: its contents, and whether it is read, written, or both in turn (scratch)."""

    dtype: str
    elements: int
    role: str  # "in", "out" or "scratch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A launch; `args` are indices of the program's buffers, `grid` is in work-groups."""

    entry: str
    args: tuple[int, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A schedule of a task, as OpenCL C. All schedules of a task have equal outputs.

    `plain_us` is the bound of its launches on a Mali-G610 with Mesa's code as it is, `packed_us` with Arm's
    driver, where arithmetic on vectors of halves goes in pairs; `limiter` is the limit then.
    """

    family: str
    task: str
    schedule: str
    buffers: tuple[Buffer, ...]
    launches: tuple[Launched, ...]
    flops: int
    plain_us: float
    packed_us: float
    limiter: str
    source: str

    @property
    def half(self) -> bool:
        """Return whether the program needs cl_khr_fp16."""
        return any(buffer.dtype == "float16" for buffer in self.buffers)

    @property
    def tolerance(self) -> float:
        """The largest difference of two schedules' outputs, over the largest value."""
        return 0.05 if self.half else 1e-3


def load(file: Path = FILE) -> list[Program]:
    """Return all programs, in the order of the file."""
    with file.open() as lines:
        return [strict.from_plain(Program, json.loads(line), where="kernel") for line in lines]


def in_turns(programs: Iterable[Program]) -> list[Program]:
    """Return the first task of each family, then the second: if time is short, each family has some."""
    tasks: dict[str, list[str]] = {}
    turns: list[tuple[int, Program]] = []
    for program in programs:
        mine = tasks.setdefault(program.family, [])
        if program.task not in mine:
            mine.append(program.task)
        turns.append((mine.index(program.task), program))
    return [program for _, program in sorted(turns, key=lambda turn: turn[0])]


def save(programs: Iterable[Program], file: Path = FILE) -> None:
    """Write the programs, so that equal kernels make equal bytes."""
    with file.open("w") as lines:
        for program in programs:
            lines.write(json.dumps(strict.to_plain(program), separators=(",", ":")) + "\n")
