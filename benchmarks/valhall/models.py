"""Whole models by each judge: `python -m benchmarks.valhall models --judges 25.0,26.2`.

What is first served of LightGlue and of the models in tests/models, in halves, to each judge's class of
drivers: how many kernels a compiler refuses and how many spill registers, and what an inference takes by both
bounds, as the compiler has it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from honed.protocol.errors import ModelRefused
from honed.tuner.compiler.schedules import first_kernels
from honed.tuner.demo import lightglue
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.target import target_for
from honed.tuner.tune.extract import Extracted, extract
from honed.valhall.compiler import Dump, NotBuilt
from honed.valhall.judge import LAUNCH_SECONDS, MachineCodeJudge

from .check import launches
from .tasks import profile

_MODELS = Path(__file__).parents[2] / "tests/models"


@dataclass(slots=True)
class Totals:
    """The kernels of a model's inference by one judge. Times are without the refused."""

    kernels: int = 0
    launches: int = 0  # of an inference
    refused: list[str] = field(default_factory=list)
    spilling: list[str] = field(default_factory=list)
    pipes: float = 0.0
    alu: float = 0.0

    def add(self, one: Extracted, lowered: Lowered, judge: MachineCodeJudge, dump: Future[Dump]) -> None:
        """Add a task's kernels."""
        launched = launches(one, lowered)
        self.kernels += len(launched)
        self.launches += one.task.weight * len(launched)
        try:
            judged = judge.judge(lowered.source, launched, dump)
        except NotBuilt as failed:
            self.refused.append(f"{one.task.name}: {str(failed)[:90]}")
            return
        for each in judged:
            self.pipes += one.task.weight * (each.plain.seconds + LAUNCH_SECONDS)
            self.alu += one.task.weight * (each.plain.shared_seconds + LAUNCH_SECONDS)
            if each.kernel.spills:
                self.spilling.append(f"{one.task.name}: {each.kernel.spills}:{each.kernel.fills}")


def report(judges: Mapping[str, MachineCodeJudge], only: str) -> None:
    """Print the table, and which kernels are refused or spill (stores:loads)."""
    heads = [
        f"{name}: {what}" for name in judges for what in ("refused", "spilling", "ms by pipes", "by alu")
    ]
    table = Table("model", "kernels", "launches", *heads)
    notes = []
    for model, found in _found(only):
        firsts = {name: [(one, _first(one, name)) for one in found] for name in judges}
        begun = {
            name: [judge.begin(lowered.source) for _, lowered in firsts[name]]
            for name, judge in judges.items()
        }
        by_judge = {name: Totals() for name in judges}
        for name, totals in by_judge.items():
            for (one, lowered), dump in zip(firsts[name], begun[name], strict=True):
                totals.add(one, lowered, judges[name], dump)
            notes += [f"{model}, {name} refuses {each}" for each in totals.refused]
            notes += [f"{model}, {name} spills {each}" for each in totals.spilling]
        cells = [
            cell
            for one in by_judge.values()
            for cell in (
                len(one.refused),
                len(one.spilling),
                f"{1e3 * one.pipes:.2f}",
                f"{1e3 * one.alu:.2f}",
            )
        ]
        first = next(iter(by_judge.values()))
        table.add_row(model, *map(str, (first.kernels, first.launches, *cells)))
    Console(width=60 + 60 * len(judges)).print(table)
    print(*notes, sep="\n")


def _found(only: str) -> Iterator[tuple[str, list[Extracted]]]:
    """The models with their tasks; without those that cannot be compiled."""
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as folder:
        lightglue_192 = lightglue.write(Path(folder) / "lightglue_192.onnx", 192)
        for path in (lightglue_192, *sorted(_MODELS.glob("*.onnx"))):
            if only in path.stem:
                try:
                    yield path.stem, list(extract(path, {}, "fp16", profile()).tasks)
                except ModelRefused as refused:
                    print(f"{path.stem} is left out: {refused}")


def _first(one: Extracted, judge: str) -> Lowered:
    return first_kernels(one.func, "main", target_for(profile(judge)), profile(judge))[1]
