"""Kernels for a Mali-G610 judged by their machine code: `python -m benchmarks.valhall`.

Without arguments: the bench's tasks, with the default schedule, the one that is first served, and the best of
many draws; for matrix products also the one first served and the hand-written one, both without the task's
other operators. Nothing runs on a GPU: times are bounds (honed.valhall.judge) of the launches in each
inference: weights are packed before. There are bounds by the busiest pipe, by Mesa's `alu`, where pipes share
the issue of instructions, and by the busiest pipe for Arm's driver, which multiplies halves in pairs and has
constants in the offsets of loads. `--judges 25.0,26.2` prints those of both compilers side by side. With
`models`: whole models, and which kernels are refused or spill; with `--draws 8` also the distance of tables
from the best, with `--by-task` the limit of each task. With `check`: the bench beside others' measurements on
the chip. With `winograd`: bounds of Winograd's convolutions. With `dots`: products and convolutions of bytes.
With `nodes`: which kernels of ONNX's node tests are refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.program import KernelLaunch
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate, inference_launches
from honed.valhall.compiler import ROOTS, Dump, OfflineCompileFailed, OfflineCompiler
from honed.valhall.judge import FP16_FLOPS, JudgedLaunch, MachineCodeJudge, seconds

from . import check, dots, models, nodes, winograd
from .draws import default, draws
from .hand import product
from .tasks import BenchTask, alone, profile, tasks

_HEADS = ("us", "alu us", "arm us", "of peak", "limiter", "fma:cvt:sfu:ls", "spills", "half")
_Judges = Mapping[str, MachineCodeJudge]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.valhall", description=__doc__)
    what = ("tasks", "models", "nodes", "check", "winograd", "dots")
    parser.add_argument("what", nargs="?", choices=what, default="tasks")
    parser.add_argument(
        "--judges", default="25.0", help=f"offline compilers: {', '.join(ROOTS)}, or their roots (25.0)"
    )
    parser.add_argument("--jobs", type=int, help="processes of each compiler (one for each processor)")
    parser.add_argument("--draws", type=int, default=32, help="schedules drawn from each sketch (32)")
    parser.add_argument("--only", default="", help="tasks or models whose names contain this")
    parser.add_argument("--decoder", type=Path, nargs="+", default=[], help="with models: forms of decoders")
    parser.add_argument("--by-task", action="store_true", help="with models: what limits each of their tasks")
    parser.add_argument("--show", action="store_true", help="print the best draw's OpenCL C")
    options = parser.parse_args()
    right = True
    with ExitStack() as stack:
        judges: dict[str, MachineCodeJudge] = {}
        for name in options.judges.split(","):
            compiler = OfflineCompiler(ROOTS.get(name, Path(name)), options.jobs)
            judges[name] = MachineCodeJudge(stack.enter_context(compiler))
        if options.what == "models":
            right = models.report(
                judges, options.only, options.draws, options.decoder, by_task=options.by_task
            )
        elif options.what == "nodes":
            nodes.report(judges, options.only)
        elif options.what == "tasks":
            for task in tasks():
                if options.only in task.name:
                    _report(task, judges, options.draws, show=options.show)
        for name, judge in judges.items():
            if options.what == "check":
                check.report(judge, name)
            elif options.what == "winograd":
                winograd.report(judge, name, options.draws)
            elif options.what == "dots":
                dots.report(judge, name, options.draws)
    return 0 if right else 1


def _report(task: BenchTask, judges: _Judges, count: int, *, show: bool) -> None:
    device = profile()
    rule, lowered = default(task.func, device)
    heads = [f"{name}\n{head}" for name in judges for head in _HEADS]
    table = Table("kernel", *heads, title=f"{task.name}, {task.flops / 1e6:.1f} MFLOP, x{task.weight}")
    _row(table, f"default: {rule}", task, _judged(judges, lowered.source, _launches(task, lowered)))
    for name in judges:
        served = profile(name)
        origin, lowered, _ = untuned_kernels(task.func, "main", target_for(served), served)
        first = _judged(judges, lowered.source, _launches(task, lowered))
        _row(table, f"first served to {name}: {origin}", task, first)
    if task.product is not None:
        origin, lowered, _ = untuned_kernels(alone(task.product), "main", target_for(device), device)
        _row(table, f"the product alone: {origin}", task, _judged(judges, lowered.source, lowered.launches))
        source, launch = product(task.product)
        _row(table, "the product alone: by hand", task, _judged(judges, source, [launch]))
    drawn = list(draws(task.func, device, count))
    built = [{name: judge.begin(one.lowered.source) for name, judge in judges.items()} for one in drawn]
    found = [
        (one, _judged(judges, one.lowered.source, _launches(task, one.lowered), dumps))
        for one, dumps in zip(drawn, built, strict=True)
    ]
    for sketch in sorted({one.draw.sketch for one, _ in found}):
        for name in judges:
            mine = [each for one, each in found if one.draw.sketch == sketch and name in each]
            if mine:
                best = min(mine, key=lambda each: seconds(each[name]))
                _row(table, f"{name}: best of {len(mine)}, sketch {sketch}", task, best)
    Console(width=60 + 80 * len(judges)).print(table)
    one_judge = next(iter(judges))
    built_by_first = [pair for pair in found if one_judge in pair[1]]
    if show and built_by_first:
        best_one = min(built_by_first, key=lambda pair: seconds(pair[1][one_judge]))[0]
        print(best_one.lowered.source, *(_launched(one) for one in best_one.lowered.launches), sep="\n")


def _judged(
    judges: _Judges,
    source: str,
    launches: Sequence[KernelLaunch],
    dumps: Mapping[str, Future[Dump]] | None = None,
) -> dict[str, list[JudgedLaunch]]:
    """Return the launches by each judge whose compiler builds them."""
    begun = dumps or {name: judge.begin(source) for name, judge in judges.items()}
    found = {}
    for name, judge in judges.items():
        try:
            found[name] = judge.judge(source, launches, begun[name])
        except OfflineCompileFailed as failed:
            print(f"{name}: {failed}")
    return found


def _launches(task: BenchTask, lowered: Lowered) -> tuple[KernelLaunch, ...]:
    return inference_launches(task.workload, Candidate.of(task.name, lowered))


def _launched(launch: KernelLaunch) -> str:
    return f"// {launch.entry}: groups {launch.grid} of {launch.block}"


def _row(table: Table, name: str, task: BenchTask, by_judge: Mapping[str, list[JudgedLaunch]]) -> None:
    """Add a kernel's row; where a judge's compiler refuses it, its cells are empty."""
    judges = [str(column.header).partition("\n")[0] for column in table.columns[1 :: len(_HEADS)]]
    cells = [cell for judge in judges for cell in _cells(task, by_judge.get(judge, []))]
    table.add_row(name, *cells)


def _cells(task: BenchTask, judged: list[JudgedLaunch]) -> list[str]:
    if not judged:
        return ["refused", *[""] * (len(_HEADS) - 1)]
    arm = sum(one.arm.seconds for one in judged)
    longest = max(judged, key=lambda one: one.plain.seconds)
    cycles = longest.counted.main.cycles
    return [
        f"{1e6 * sum(one.plain.seconds for one in judged):.1f}",
        f"{1e6 * sum(one.plain.shared_seconds for one in judged):.1f}",
        f"{1e6 * arm:.1f}",
        f"{task.flops / arm / FP16_FLOPS:.0%}",
        longest.plain.limiter,
        ":".join(f"{cycles[pipe]:.0f}" for pipe in ("fma", "cvt", "sfu", "ls"))
        + ("" if longest.counted.certain else " ?"),
        str(sum(one.kernel.spills for one in judged)),
        "yes" if longest.kernel.half_occupancy else "",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
