"""The bench beside others' measurements on the chip: `python -m benchmarks.valhall check`.

If the kind of kernel of a figure is known (clpeak's, a tile of Arm's), a kernel of that kind is judged. If it
is not (the case's, ncnn's), our own kernels for the same work are, so that the ratio includes the difference
of the kernels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.tuner.lower.printer.tvm_printer import lower_by_tvm

from benchmarks.board import anchors
from honed.machine.profile import DeviceProfile
from honed.tuner import lightglue
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.opencl import Lowered, LoweringFailed
from honed.tuner.lower.program import KernelLaunch
from honed.tuner.lower.schedule import by_rule
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate, inference_launches
from honed.tuner.tune.extract import Extracted, extract, workload
from honed.valhall.compiler import OfflineCompileFailed
from honed.valhall.judge import FP16_FLOPS, MachineCodeJudge, seconds

from .hand import Product, product
from .peaks import arithmetic, loads
from .tasks import profile

# clpeak on libmali g6p0 (facts/rk3588.md): GFLOP/s by type and width, and GB/s by width of float loads.
_CLPEAK = (("float", 1, 249.0), ("float", 2, 470.0), ("half", 1, 442.0), ("half", 4, 910.0))
_CLPEAK_LOADS = ((4, 27.2), (8, 13.6), (16, 13.1))
# Arm's library claims about 40 % of the peak of multiply-adds for its own kernels (facts/valhall.md).
_ARM_SHARE = 40.0
# LightGlue, 192 keypoints, fp16, untuned, with TVM (cases.md, case 1): us of a call.
_CASE_CALLS = {
    "192x512x512": ((192, 512), (512, 512), 308_732 / 36),
    "192x256x256": ((192, 256), (256, 256), 204_685 / 74),
    "192x512x256": ((192, 512), (512, 256), 154_909 / 36),
    "192x256x768": ((192, 256), (256, 768), 149_910 / 18),
    "4x192x64x192": ((4, 192, 64), (4, 64, 192), 25_580 / 36),
    "4x192x192x64": ((4, 192, 192), (4, 192, 64), 74_367 / 36),
}
_SQUEEZENET = Path(__file__).parents[2] / "tests/models/squeezenet_fp16.onnx"
_LONG = 1 << 20  # Bytes of a source: TVM prints longer ones than a device is given


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of others and the bench's: both rates (more is better), or both times."""

    what: str
    unit: str
    measured: float
    predicted: float
    same: str  # Similarity of the kernels

    @property
    def optimism(self) -> float:
        """The factor by which the prediction is better than the measurement."""
        better = self.predicted / self.measured
        return 1 / better if self.unit in ("us", "ms") else better


def report(judge: MachineCodeJudge, mesa: str) -> None:
    """Print the table, and whole models beside what a user of the chip gets today."""
    rows = [*_peaks(judge), *_arm(judge), *_case(judge), *_ncnn(judge)]
    table = Table(
        "figure", "unit", "measured by others", "bench", "bench is better by", "kernel", title=f"Mesa {mesa}"
    )
    for row in rows:
        times = f"{row.optimism:.2f} times"
        table.add_row(row.what, row.unit, f"{row.measured:.4g}", f"{row.predicted:.4g}", times, row.same)
    Console(width=140).print(table)
    print(anchors.table({row.what: row.predicted for row in rows}, "bench"))


def _peaks(judge: MachineCodeJudge) -> Iterator[Row]:
    for dtype, width, measured in _CLPEAK:
        source, launch = arithmetic(dtype, width)
        rate = launch.flops / seconds(judge.judge(source, [launch])) / 1e9
        yield Row(f"clpeak, {dtype}{width}", "GFLOP/s", measured, rate, "of the kind")
    for width, measured in _CLPEAK_LOADS:
        source, launch = loads(width)
        rate = launch.bytes / seconds(judge.judge(source, [launch])) / 1e9
        yield Row(f"clpeak, float{width} loads", "GB/s", measured, rate, "of the kind")


def _arm(judge: MachineCodeJudge) -> Iterator[Row]:
    source, launch = product(Product(1, 192, 512, 512, shared=True))
    share = 100 * launch.flops / seconds(judge.judge(source, [launch])) / FP16_FLOPS
    yield Row("Arm's library, 192x512x512", "% of peak", _ARM_SHARE, share, "its tile (4x8x4), by hand")


def _case(judge: MachineCodeJudge) -> Iterator[Row]:
    """Yield LightGlue with default rules as TVM prints them, for each call of the case's table and in all."""
    with tempfile.TemporaryDirectory(prefix="honed-check-") as folder:
        found = extract(lightglue.write(Path(folder) / "one.onnx", 192), {}, "fp16", profile()).tasks
    total, calls = 0.0, dict[str, float]()
    for one in found:
        taken = _taken(judge, one, _by_tvm(one))
        total += one.task.weight * taken
        name = next((name for name, (x, y, _) in _CASE_CALLS.items() if _shapes(one)[:2] == [x, y]), None)
        if name is not None:
            calls[name] = min(taken, calls.get(name, taken))
    for name, (_, _, measured) in _CASE_CALLS.items():
        if name in calls:
            yield Row(f"case 1, {name}", "us", measured, calls[name] * 1e6, "TVM's default of today")
    others = anchors.load().gpu_ms(anchors.LIGHTGLUE)
    yield Row(anchors.LIGHTGLUE, "ms", others, total * 1e3, "case 1: TVM's defaults of today")


def _ncnn(judge: MachineCodeJudge) -> Iterator[Row]:
    found = extract(_SQUEEZENET, {}, "fp16", profile()).tasks
    total = sum(one.task.weight * _taken(judge, one, _first(one)) for one in found)
    others = anchors.load().gpu_ms(anchors.SQUEEZENET)
    yield Row(anchors.SQUEEZENET, "ms", others, total * 1e3, "ncnn's Vulkan; ours, first served")


def _taken(judge: MachineCodeJudge, one: Extracted, lowered: Lowered) -> float:
    """Return the seconds of a call; 0, with a message, for one that Mesa's compiler cannot build."""
    try:
        return seconds(judge.judge(lowered.source, launches(one, lowered)))
    except OfflineCompileFailed as failed:
        print(f"left out of its model's sum, {one.task.weight} calls of {one.task.name}: {str(failed)[:80]}")
        return 0.0


def launches(one: Extracted, lowered: Lowered) -> tuple[KernelLaunch, ...]:
    """Return those of each inference, once weights are packed."""
    made = workload(one.task.key, one.func, one.task.outputs, Path(), None, one.task.constants)
    return inference_launches(made, Candidate.of(one.task.name, lowered))


def _by_tvm(one: Extracted) -> Lowered:
    device = _roomy()
    found = by_rule(one.func, target_for(device), device)
    if found is None:
        raise LoweringFailed(f"no default rule fits {one.task.name}")
    return lower_by_tvm(found[1].mod["main"], "main", target_for(device), device)


def _first(one: Extracted) -> Lowered:
    return untuned_kernels(one.func, "main", target_for(profile()), profile())[1]


def _roomy() -> DeviceProfile:
    one = profile()
    return replace(one, rules=replace(one.rules, max_source_bytes=_LONG))


def _shapes(one: Extracted) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters, without axes of one element."""
    return [tuple(int(e) for e in p.shape if int(e) != 1) for p in one.func.params]
