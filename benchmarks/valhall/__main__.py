"""Kernels for a Mali-G610 judged by their machine code: `python -m benchmarks.valhall`.

Without arguments: the bench's tasks, with the default schedule, the one that is first served, and the best of
many draws; for matrix products also the one first served and the one written by hand, neither with what the
task computes of it. Nothing runs on a GPU: times are bounds of the busiest pipe
(tuner.valhall.machine), of the launches in each inference: weights are packed before. With `check`: the bench
beside what others measured on the chip. With `winograd`: what Winograd's convolutions could take at least.
With `dots`: products and convolutions of bytes, by dot products and without.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from honed.tuner.compiler.schedules import first_kernels
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.program import KernelLaunch
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate, inference_launches
from honed.valhall.compiler import ROOT, NotBuilt, OfflineCompiler
from honed.valhall.judge import FP16_FLOPS, JudgedLaunch, MachineCodeJudge, seconds

from . import check, dots, winograd
from .draws import default, draws
from .hand import product
from .tasks import BenchTask, alone, profile, tasks

_HEADS = ("kernel", "us", "packed us", "of peak", "limiter", "fma:cvt:sfu:ls", "spills", "half")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.valhall", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("tasks", "check", "winograd", "dots"), default="tasks")
    parser.add_argument("--root", type=Path, default=ROOT, help=f"of the offline compiler ({ROOT})")
    parser.add_argument("--draws", type=int, default=32, help="schedules drawn from each sketch (32)")
    parser.add_argument("--only", default="", help="tasks whose names contain this")
    parser.add_argument("--show", action="store_true", help="print the best draw's OpenCL C")
    options = parser.parse_args()
    with OfflineCompiler(options.root) as compiler:
        judge = MachineCodeJudge(compiler)
        if options.what == "check":
            check.report(judge)
            return 0
        if options.what == "winograd":
            winograd.report(judge, options.draws)
            return 0
        if options.what == "dots":
            dots.report(judge, options.draws)
            return 0
        for task in tasks():
            if options.only in task.name:
                _report(task, judge, options.draws, show=options.show)
    return 0


def _report(task: BenchTask, judge: MachineCodeJudge, count: int, *, show: bool) -> None:
    device = profile()
    rule, lowered = default(task.func, device)
    table = Table(*_HEADS, title=f"{task.name}, {task.flops / 1e6:.1f} MFLOP, x{task.weight}")
    _row(table, f"default: {rule}", task, judge.judge(lowered.source, _launches(task, lowered)))
    origin, lowered, _ = first_kernels(task.func, "main", target_for(device), device)
    _row(table, f"first served: {origin}", task, judge.judge(lowered.source, _launches(task, lowered)))
    if task.product is not None:
        origin, lowered, _ = first_kernels(alone(task.product), "main", target_for(device), device)
        _row(table, f"the product alone: {origin}", task, judge.judge(lowered.source, lowered.launches))
        source, launch = product(task.product)
        _row(table, "the product alone: by hand", task, judge.judge(source, [launch]))
    drawn = list(draws(task.func, device, count))
    built = [judge.begin(one.lowered.source) for one in drawn]
    found = []
    for one, dump in zip(drawn, built, strict=True):
        try:
            found.append((one, judge.judge(one.lowered.source, _launches(task, one.lowered), dump)))
        except NotBuilt as failed:
            print(f"sketch {one.draw.sketch}: {failed}")
    for sketch in sorted({one.draw.sketch for one, _ in found}):
        mine = sorted((j for one, j in found if one.draw.sketch == sketch), key=seconds)
        _row(table, f"best of {len(mine)}, sketch {sketch}", task, mine[0])
    Console(width=140).print(table)
    if show and found:
        best = min(found, key=lambda pair: seconds(pair[1]))
        print(best[0].lowered.source, *(_launched(launch) for launch in best[0].lowered.launches), sep="\n")


def _launches(task: BenchTask, lowered: Lowered) -> tuple[KernelLaunch, ...]:
    return inference_launches(task.workload, Candidate.of(task.name, lowered))


def _launched(launch: KernelLaunch) -> str:
    return f"// {launch.entry}: groups {launch.grid} of {launch.block}"


def _row(table: Table, name: str, task: BenchTask, judged: list[JudgedLaunch]) -> None:
    plain = sum(one.plain.seconds for one in judged)
    packed = sum(one.packed.seconds for one in judged)
    longest = max(judged, key=lambda one: one.plain.seconds)
    cycles = longest.counted.main.cycles
    table.add_row(
        name,
        f"{plain * 1e6:.1f}",
        f"{packed * 1e6:.1f}",
        f"{task.flops / packed / FP16_FLOPS:.0%}",
        longest.plain.limiter,
        ":".join(f"{cycles[pipe]:.0f}" for pipe in ("fma", "cvt", "sfu", "ls"))
        + ("" if longest.counted.certain else " ?"),
        str(sum(one.kernel.spills for one in judged)),
        "yes" if longest.kernel.half_occupancy else "",
    )


if __name__ == "__main__":
    raise SystemExit(main())
