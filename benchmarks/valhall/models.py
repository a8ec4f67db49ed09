"""Whole models by each judge: `python -m benchmarks.valhall models --judges 25.0,26.2`.

Judges the kernels first served of LightGlue and of the models in tests/models, in halves, for each judge's
class of drivers: the sources of their schedules, how many kernels a compiler refuses and how many spill
registers, and the time of an inference by both bounds. The program fails if a compiler refuses a kernel, or a
tile of a table spills.

With `--draws N`, how much longer than the best known a tile of a table takes at worst, by the busiest pipe:
the best of the rows of all classes' tables, those that a search tries first, and N draws from each sketch.

With `--by-task`, instead of the comparison, each task's limit, and how far the bound by pipes is above it. A
limit is arithmetic at the peak for halves or memory, with each of the function's values moved once, whichever
takes longer, and the launches of its kernels.

With `--decoder FILE...` the models are decoders (`benchmarks.decoders`) compiled for one token and for the
most that a run has, with room for 512.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.forms import decoder_in
from honed.daemon.features.decoding import DecoderBucket, longest_chunk
from honed.machine.families import DriverClass
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import ModelRefused
from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource
from honed.tuner import lightglue
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules, traces
from honed.tuner.search.sketches import starts
from honed.tuner.search.traces import read
from honed.tuner.tune.extract import Extracted, extract
from honed.valhall.compiler import Dump, OfflineCompileFailed
from honed.valhall.judge import BANDWIDTH, FP16_FLOPS, LAUNCH_SECONDS, JudgedLaunch, MachineCodeJudge, seconds

from .check import launches
from .draws import draws
from .tasks import profile

_MODELS = Path(__file__).parents[2] / "tests/models"
_ROOM = 512


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """The kernels first served to a class of drivers for a task, while they are built, and their rivals."""

    task: Extracted
    origin: ScheduleProvenance
    lowered: Lowered
    dump: Future[Dump]
    rivals: Sequence[tuple[Lowered, Future[Dump]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """The times of a task in an inference, in ms, and the limits of them."""

    name: str
    arithmetic: float
    memory: float
    launches: float
    origin: str
    limiter: str  # Limit of the launch that takes longest by pipes
    pipes: float
    alu: float

    @property
    def least(self) -> float:
        """The limit of arithmetic and memory, which may go on at once, and of launches."""
        return max(self.arithmetic, self.memory) + self.launches

    @property
    def cells(self) -> list[str]:
        """The cells of one judge in the report."""
        gap = f"{self.pipes - self.least:.2f}"
        return [self.origin, self.limiter, f"{self.pipes:.2f}", f"{self.alu:.2f}", gap]


@dataclass(slots=True)
class Totals:
    """The kernels of a model's inference by one judge. Times are without the refused."""

    kernels: int = 0
    launches: int = 0  # Launches of an inference
    served: Counter[str] = field(default_factory=Counter)  # Functions, by source of their schedules
    refused: list[str] = field(default_factory=list)
    spilling: list[str] = field(default_factory=list)
    spilling_tiles: int = 0  # Spilling functions with schedules from tables
    uncertain: list[str] = field(default_factory=list)  # Loops count once: iterations are unknown
    pipes: float = 0.0
    alu: float = 0.0
    losses: list[tuple[float, str]] = field(default_factory=list)  # Losses of tables' tiles to the best known
    tasks: dict[str, TaskTimes] = field(default_factory=dict)  # Times by the tasks' keys

    def add(self, one: Served, judge: MachineCodeJudge) -> None:
        """Add a task's kernels."""
        launched, weight, name = launches(one.task, one.lowered), one.task.task.weight, one.task.task.name
        self.kernels += len(launched)
        self.launches += weight * len(launched)
        self.served[one.origin.source] += 1
        try:
            judged = judge.judge(one.lowered.source, launched, one.dump)
        except OfflineCompileFailed as failed:
            self.refused.append(f"{name}: {str(failed)[:90]}")
            return
        times = _times(one, judged)
        self.tasks[one.task.task.key] = times
        self.pipes += times.pipes
        self.alu += times.alu
        for each in judged:
            if not each.counted.certain:
                self.uncertain.append(name)
            if each.kernel.spills:
                self.spilling.append(f"{name} ({one.origin}): {each.kernel.spills}:{each.kernel.fills}")
                self.spilling_tiles += one.origin.source is ScheduleSource.TABLES
        taken = seconds(judged, DriverClass.MESA)
        rivals = [found for each in one.rivals if (found := _seconds(one.task, *each, judge)) is not None]
        if rivals:
            self.losses.append((taken / min(taken, *rivals), f"{name}, {1e6 * taken:.1f} us, x{weight}"))

    @property
    def cells(self) -> list[str]:
        """The cells of the report's columns."""
        loss = max(self.losses, default=None)
        return [
            ", ".join(f"{count} {source}" for source, count in sorted(self.served.items())),
            str(len(self.refused)),
            f"{len(self.spilling)} ({self.spilling_tiles})",
            f"{self.pipes:.2f}" + (" ?" if self.uncertain else ""),
            f"{self.alu:.2f}",
            "" if loss is None else f"{loss[0]:.2f}",
        ]

    def notes(self) -> Iterator[str]:
        """Yield errors, and the distance of the worst tiles from the best."""
        yield from (f"refuses {each}" for each in self.refused)
        yield from (f"spills {each}" for each in self.spilling)
        yield from (f"has loops of unknown turns, counted once: {each}" for each in self.uncertain)
        yield from (f"{loss:.2f} of the best: {what}" for loss, what in sorted(self.losses)[::-1][:_WORST])


_HEADS = ("served", "refused", "spilling (of tables)", "ms by pipes", "by alu", "worst of tables")
_NAME = 40  # Characters of a task's name
_WORST = 4  # Number of losses to print


def report(
    judges: Mapping[str, MachineCodeJudge],
    only: str,
    count: int,
    decoders: Sequence[Path],
    *,
    by_task: bool = False,
) -> bool:
    """Print the table, including `decoders` if any, and the kernels that are refused or spill.

    Return whether none is refused and no table's tile spills. `count` are the draws from each sketch that
    tables' tiles are compared with; with `by_task`, prints the tasks of each model instead of the comparison.
    """
    heads = [f"{name}: {what}" for name in judges for what in _HEADS]
    table = Table("model", "kernels", "launches", *heads)
    notes, right = list[str](), True
    for model, found in _forms(decoders) if decoders else _found(only):
        served = {
            name: [_served(one, profile(name), judge, None if by_task else count) for one in found]
            for name, judge in judges.items()
        }
        by_judge = {name: Totals() for name in judges}
        for name, totals in by_judge.items():
            for one in served[name]:
                totals.add(one, judges[name])
            notes += [f"{model}, {name}: {each}" for each in totals.notes()]
            right &= not totals.refused and not totals.spilling_tiles
        if by_task:
            _print_tasks(model, by_judge)
        first = next(iter(by_judge.values()))
        cells = [cell for totals in by_judge.values() for cell in totals.cells]
        table.add_row(model, str(first.kernels), str(first.launches), *cells)
    Console(width=60 + 80 * len(judges)).print(table)
    print(*notes, sep="\n")
    return right


def _times(one: Served, judged: Sequence[JudgedLaunch]) -> TaskTimes:
    task, longest = one.task.task, max(judged, key=lambda each: each.plain.seconds)
    each, launched = 1e3 * task.weight, len(judged) * LAUNCH_SECONDS
    return TaskTimes(
        name=f"{task.name[:_NAME]}, x{task.weight}" + f" of {len(judged)}" * (len(judged) > 1),
        arithmetic=each * task.flops / FP16_FLOPS,
        memory=each * task.bytes / BANDWIDTH,
        launches=each * launched,
        origin=str(one.origin).partition(":")[0],
        limiter=longest.plain.limiter,
        pipes=each * (sum(one.plain.seconds for one in judged) + launched),
        alu=each * (sum(one.plain.shared_seconds for one in judged) + launched),
    )


def _print_tasks(model: str, by_judge: Mapping[str, Totals]) -> None:
    """Print what an inference spends in each task, that with the largest gap to its limit first."""
    first = next(iter(by_judge.values()))
    heads = [
        f"{name}: {what}" for name in by_judge for what in ("schedule", "limited by", "pipes", "alu", "gap")
    ]
    limits = ("arithmetic", "memory", "launches", "limit")
    table = Table("task, ms an inference", *limits, *heads, title=model)
    for key, one in sorted(first.tasks.items(), key=lambda item: item[1].least - item[1].pipes):
        known = (one.arithmetic, one.memory, one.launches, one.least)
        cells = [totals.tasks[key].cells if key in totals.tasks else [""] * 5 for totals in by_judge.values()]
        table.add_row(one.name, *(f"{ms:.2f}" for ms in known), *(cell for each in cells for cell in each))
    sums = [
        sum(each)
        for each in zip(
            *((t.arithmetic, t.memory, t.launches, t.least) for t in first.tasks.values()), strict=True
        )
    ]
    cells = [
        ["", "", f"{t.pipes:.2f}", f"{t.alu:.2f}", f"{t.pipes - sums[-1]:.2f}"] for t in by_judge.values()
    ]
    table.add_row("all", *(f"{ms:.2f}" for ms in sums), *(cell for each in cells for cell in each))
    Console(width=100 + 60 * len(by_judge)).print(table)


def _found(only: str) -> Iterator[tuple[str, list[Extracted]]]:
    """Yield the models with their tasks; skip those that cannot be compiled."""
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as folder:
        lightglue_192 = lightglue.write(Path(folder) / "lightglue_192.onnx", 192)
        for path in (lightglue_192, *sorted(_MODELS.glob("*.onnx"))):
            if only in path.stem:
                try:
                    yield path.stem, list(extract(path, {}, "fp16", profile()).tasks)
                except ModelRefused as refused:
                    print(f"{path.stem} is left out: {refused}")


def _forms(decoders: Sequence[Path]) -> Iterator[tuple[str, list[Extracted]]]:
    """Yield the compiled shapes of decoders with their tasks."""
    for path in decoders:
        known = decoder_in(path)
        for form in (DecoderBucket(tokens, _ROOM) for tokens in (1, longest_chunk(profile()))):
            name = f"{path.parent.name}, {form.tokens}"
            yield name, list(extract(path, known.shapes(form), "fp16", profile()).tasks)


def _served(one: Extracted, device: DeviceProfile, judge: MachineCodeJudge, count: int | None) -> Served:
    name, lowered, _ = untuned_kernels(one.func, "main", target_for(device), device)
    origin = ScheduleProvenance.parse(name)
    compared = count is not None and origin.source is ScheduleSource.TABLES
    rivals = {each.source: each for each in _rivals(one, device, count or 0)} if compared else {}
    begun = [(each, judge.begin(source)) for source, each in rivals.items() if source != lowered.source]
    return Served(one, origin, lowered, judge.begin(lowered.source), begun)


def _rivals(one: Extracted, device: DeviceProfile, count: int) -> Iterator[Lowered]:
    """Yield kernels with the rows of all classes' tables, those of searches included, and with draws."""
    func, target = narrow_indices(one.func), target_for(device)
    sketches = [read(traces.to_text(sketch.trace)) for sketch in rules.space(func, target, device)]
    rows = {row.text() for driver in DriverClass for row in starts(sketches, driver, trial=True)}
    for row in sorted(rows):
        with suppress(LoweringFailed):
            yield lower_function(traces.apply(row, func).mod["main"], "main", target, device)
    yield from (each.lowered for each in draws(one.func, device, count))


def _seconds(one: Extracted, lowered: Lowered, dump: Future[Dump], judge: MachineCodeJudge) -> float | None:
    """Return the seconds of a rival by Mesa's code; None if it is refused or spills."""
    try:
        judged = judge.judge(lowered.source, launches(one, lowered), dump)
    except OfflineCompileFailed:
        return None
    return None if any(each.kernel.spills for each in judged) else seconds(judged, DriverClass.MESA)
