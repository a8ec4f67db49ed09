"""Makes `kernels.jsonl`: `python -m benchmarks.board.draw`, with TVM and the offline compiler installed.

For each task it has the default schedule, and the fastest, the median and a slow one of many draws, as the
bench predicts them, so that measurements on a board show whether the model of the machine ranks them right.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx.parser

from benchmarks.valhall.draws import default, draws
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.opencl import Lowered
from honed.tuner.lower.workload import parameters
from honed.tuner.tune.extract import Extracted, extract
from honed.valhall.bench import bench_profile
from honed.valhall.compiler import ROOT, OfflineCompileFailed, OfflineCompiler
from honed.valhall.judge import JudgedLaunch, MachineCodeJudge

from .kernels import FILE, Buffer, Launched, Program, save
from .tasks import TASKS, Precision

_SLOW = 0.9  # The quantile of a slow draw
_LONGEST_US = 20_000.0  # Slower draws are left out: the boards have ten minutes
_LONGEST_SOURCE = 12_000  # Characters


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.board.draw", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help=f"of the offline compiler ({ROOT})")
    parser.add_argument("--draws", type=int, default=8, help="schedules drawn from each sketch (8)")
    options = parser.parse_args()
    profile, found = bench_profile("mali-g610"), list[Program]()
    with OfflineCompiler(options.root) as compiler:
        for family, name, precision, text in TASKS:
            one = _extracted(text, precision, profile)
            mine = list(
                _programs(
                    family, f"{name} {precision}", one, profile, MachineCodeJudge(compiler), options.draws
                )
            )
            print(
                f"{family}: {name} {precision}: {', '.join(f'{p.packed_us:.1f}' for p in mine)} us",
                flush=True,
            )
            found += mine
    save(found)
    print(f"{len(found)} kernels in {FILE}")
    return 0


def _extracted(text: str, precision: Precision, profile: DeviceProfile) -> Extracted:
    with tempfile.TemporaryDirectory(prefix="honed-board-") as folder:
        path = Path(folder) / "one.onnx"
        onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}'), path)
        found = extract(path, {}, precision, profile).tasks
    return max(found, key=lambda one: (one.task.flops, one.task.bytes))


def _programs(
    family: str, name: str, one: Extracted, profile: DeviceProfile, judge: MachineCodeJudge, count: int
) -> Iterator[Program]:
    _, lowered = default(one.func, profile)
    try:
        judged = judge.judge(lowered.source, lowered.launches)
        yield _program(family, name, "default", one, lowered, judged)
    except OfflineCompileFailed as failed:
        print(f"{name}: the default schedule is left out: {failed}")
    begun = [
        (drawn, judge.begin(drawn.lowered.source))
        for drawn in draws(one.func, profile, count)
        if len(drawn.lowered.source) <= _LONGEST_SOURCE
    ]
    ranked: list[tuple[float, Lowered, list[JudgedLaunch]]] = []
    for drawn, dump in begun:
        try:
            judged = judge.judge(drawn.lowered.source, drawn.lowered.launches, dump)
        except OfflineCompileFailed:
            continue
        taken = _microseconds(judged, arm=True)
        if taken <= _LONGEST_US:
            ranked.append((taken, drawn.lowered, judged))
    ranked.sort(key=lambda each: each[0])
    places = {"best": 0, "median": len(ranked) // 2, "slow": int(_SLOW * (len(ranked) - 1))}
    for schedule, place in places.items():
        if place < len(ranked):
            yield _program(family, name, schedule, one, *ranked[place][1:])


def _program(
    family: str, name: str, schedule: str, one: Extracted, lowered: Lowered, judged: list[JudgedLaunch]
) -> Program:
    values = parameters(one.func)
    outputs = one.task.outputs
    roles = ["in"] * (len(values) - outputs) + ["out"] * outputs + ["scratch"] * len(lowered.inner)
    longest = max(judged, key=lambda each: each.arm.seconds)
    return Program(
        family=family,
        task=name,
        schedule=schedule,
        buffers=tuple(
            Buffer(dtype=value.dtype, elements=math.prod(value.shape), role=role)
            for value, role in zip((*values, *lowered.inner), roles, strict=True)
        ),
        launches=tuple(
            Launched(entry=launch.entry, args=launch.args, grid=launch.grid, block=launch.block)
            for launch in lowered.launches
        ),
        flops=one.task.flops,
        plain_us=round(_microseconds(judged, arm=False), 2),
        packed_us=round(_microseconds(judged, arm=True), 2),
        limiter=longest.arm.limiter,
        source=lowered.source,
    )


def _microseconds(judged: list[JudgedLaunch], *, arm: bool) -> float:
    return 1e6 * sum((one.arm if arm else one.plain).seconds for one in judged)


if __name__ == "__main__":
    raise SystemExit(main())
