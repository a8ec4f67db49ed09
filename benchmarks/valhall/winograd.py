"""Bounds the times of Winograd's convolutions, beside ours: `python -m benchmarks.valhall winograd`.

F(m x m, 3x3) computes tiles of m x m pixels by products of matrices, (m+2)^2 of them at once, of transformed
weights and transformed tiles of the image (Lavin and Gray, "Fast Algorithms for Convolutional Neural
Networks", 2015). Weights are transformed ahead. Printed is a bound by the machine's model: each launch
takes what its arithmetic or its memory does, whichever is longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import onnx
from rich.console import Console
from rich.table import Table
from tvm import te, tirx, topi

from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.frontend import Precision
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate, Workload, inference_launches
from honed.tuner.search.draw import SpaceSampler
from honed.tuner.tune.extract import workload
from honed.valhall.compiler import OfflineCompileFailed
from honed.valhall.judge import BANDWIDTH, FP16_FLOPS, FP32_FLOPS, LAUNCH_SECONDS, MachineCodeJudge, seconds

from .tasks import profile

_MODELS = ("squeezenet_fp16", "super_resolution", "yolox_nano")
_RESNET = ((64, 56), (128, 28), (256, 14), (512, 7))  # Channels, rows and columns
_WINDOW = 3
# Additions and multiplications by constants that transform a tile of the image, and one of the sums (Lavin
# and Gray, 4.1 to 4.3), by m.
_TRANSFORMS = {2: (32, 24), 4: (156, 90)}
# Share of the peak that our best products reach (docs/dev/measurements.md).
_SHARE = 0.66
_SEED = 1


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution by 3x3 windows with a step of one, padded to the size of its image."""

    model: str
    channels: int
    outputs: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.model}: {self.channels} to {self.outputs}, {self.rows}x{self.columns}"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least seconds of F(m x m, 3x3): in three launches, and were it one that keeps all tiles to itself."""

    launches: float
    fused: float


def bounds(layer: Layer, m: int, precision: Precision) -> Bounds:
    """Return the bounds of a layer."""
    size, peak = (2, FP16_FLOPS) if precision == "fp16" else (4, FP32_FLOPS)
    points, pixels = (m + _WINDOW - 1) ** 2, layer.rows * layer.columns
    tiles = math.ceil(layer.rows / m) * math.ceil(layer.columns / m)
    into, back = _TRANSFORMS[m]
    product = 2 * points * layer.channels * layer.outputs * tiles / (_SHARE * peak)
    before = into * layer.channels * tiles / (peak / 2)
    after = back * layer.outputs * tiles / (peak / 2)
    image, result = size * layer.channels * pixels, size * layer.outputs * pixels
    transformed, sums = size * points * layer.channels * tiles, size * points * layer.outputs * tiles
    weights = size * points * layer.channels * layer.outputs
    launches = (
        max(before, (image + transformed) / BANDWIDTH),
        max(product, (transformed + weights + sums) / BANDWIDTH),
        max(after, (sums + result) / BANDWIDTH),
    )
    fused = max(before + product + after, (image + weights + result) / BANDWIDTH)
    return Bounds(sum(launches) + len(launches) * LAUNCH_SECONDS, fused + LAUNCH_SECONDS)


def report(judge: MachineCodeJudge, mesa: str, count: int) -> None:
    """Print the table; ours is the best kernel of those first served and of `count` draws a packed sketch."""
    heads = ("layer", "direct, us", "F(2x2), us", "in one", "F(4x4), us", "in one", "F(2x2) faster", "F(4x4)")
    for precision in ("fp16", "fp32"):
        table = Table(*heads, title=f"Mesa {mesa}, {precision}, 4 us for each launch")
        for layer in layers():
            direct = _direct(layer, precision, judge, count)
            two, four = bounds(layer, 2, precision), bounds(layer, 4, precision)
            times = (direct, two.launches, two.fused, four.launches, four.fused)
            gains = (f"{direct / one.launches:.2f} times" for one in (two, four))
            table.add_row(str(layer), *(f"{one * 1e6:.0f}" for one in times), *gains)
        Console(width=140).print(table)


def layers() -> Iterator[Layer]:
    """Yield the layers of the models at hand, one of each shape, and of a ResNet."""
    for name in _MODELS:
        model = onnx.load(Path(__file__).parents[2] / f"tests/models/{name}.onnx")
        yield from dict.fromkeys(_layers(name, onnx.shape_inference.infer_shapes(model).graph))
    for channels, extent in _RESNET:
        yield Layer("ResNet", channels, channels, extent, extent)


def _layers(name: str, graph: onnx.GraphProto) -> Iterator[Layer]:
    typed = (*graph.input, *graph.value_info)
    shapes = {one.name: [d.dim_value for d in one.type.tensor_type.shape.dim] for one in typed}
    weights = {one.name: list(one.dims) for one in graph.initializer}
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        found = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        outputs, channels, *window = weights[node.input[1]]
        plain = all(set(found.get(key, [1])) == {1} for key in ("strides", "dilations", "pads"))
        if window == [_WINDOW, _WINDOW] and plain and found.get("group", 1) == 1:
            yield Layer(name, channels, outputs, *shapes[node.input[0]][2:])


def _direct(layer: Layer, precision: Precision, judge: MachineCodeJudge, count: int) -> float:
    """Return the seconds of our best kernels for the direct sum, its weights constant."""
    func = _function(layer, "float16" if precision == "fp16" else "float32")
    made = workload(str(layer), func, 1, Path(), None, (1,))
    return min(_taken(made, lowered, judge) for lowered in _kernels(func, count))


def _function(layer: Layer, dtype: str) -> tirx.PrimFunc:
    """Return a function of image, weights and bias: their convolution and a ReLU."""
    x = te.placeholder((1, layer.channels, layer.rows, layer.columns), dtype, "x")
    w = te.placeholder((layer.outputs, layer.channels, _WINDOW, _WINDOW), dtype, "w")
    b = te.placeholder((1, layer.outputs, 1, 1), dtype, "b")
    y = topi.nn.relu(topi.add(topi.nn.conv2d_nchw(x, w, 1, 1, 1), b))
    return te.create_prim_func([x, w, b, y])


def _kernels(func: tirx.PrimFunc, count: int) -> Iterator[Lowered]:
    device = profile()
    target = target_for(device)
    yield untuned_kernels(func, "main", target, device)[1]
    drawing = SpaceSampler(narrow_indices(func), device, _SEED)
    for sketch in drawing.that_take("TransformLayout", 2):  # Packed ones
        for one in islice(drawing.of(sketch), count):
            try:
                yield lower_function(one.scheduled, "main", target, device)
            except LoweringFailed:
                continue


def _taken(made: Workload, lowered: Lowered, judge: MachineCodeJudge) -> float:
    launches = inference_launches(made, Candidate.of("", lowered))
    try:
        return seconds(judge.judge(lowered.source, launches))
    except OfflineCompileFailed as failed:
        print(f"left out of {made.task}: {str(failed)[:80]}")
        return math.inf
