"""The tasks that the Valhall bench is judged by: LightGlue's products and rows, and typical convolutions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from tvm import tirx

from honed.runtime.profile import DeviceProfile
from honed.tuner.demo import lightglue
from honed.tuner.frontend import Precision
from honed.tuner.measure.candidate import Workload
from honed.tuner.tune.extract import Extracted, extract, workload
from honed.tuner.valhall.benches import predicted

# By name: the graph, and the shape of its weights.
_CONVOLUTIONS = {
    "conv 3x3 64, 56x56": (
        "(float[1,64,56,56] x) => (float[1,64,56,56] y) { c = Conv <pads=[1,1,1,1]> (x, w, b) y = Relu(c) }",
        (64, 64, 3, 3),
    ),
    "conv 3x3 512, 7x7": (
        "(float[1,512,7,7] x) => (float[1,512,7,7] y) { c = Conv <pads=[1,1,1,1]> (x, w, b) y = Relu(c) }",
        (512, 512, 3, 3),
    ),
    "pointwise 96-24, 28x28": (
        "(float[1,96,28,28] x) => (float[1,24,28,28] y) { y = Conv (x, w, b) }",
        (24, 96, 1, 1),
    ),
    "depthwise 3x3 96, 56x56": (
        "(float[1,96,56,56] x) => (float[1,96,56,56] y) "
        "{ c = Conv <group=96, pads=[1,1,1,1]> (x, w, b) y = Relu(c) }",
        (96, 1, 3, 3),
    ),
}
_PRODUCTS = 6


@dataclass(frozen=True, slots=True, eq=False)
class BenchTask:
    """A function to schedule; `workload` has no inputs.

    `product` holds m, n, k of a plain matrix product of two matrices.
    """

    name: str
    func: tirx.PrimFunc
    flops: int
    weight: int
    workload: Workload
    product: tuple[int, int, int] | None = None


def profile() -> DeviceProfile:
    """The Mali-G610 that is judged for."""
    return predicted("mali-g610")


def tasks(precision: Precision = "fp16") -> Iterator[BenchTask]:
    """All of them."""
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as folder:
        file = lightglue.write(Path(folder) / "lightglue.onnx", 192)
        found, _ = extract(file, {}, precision, profile())
        by_flops = sorted(found, key=lambda one: -one.task.flops * one.task.weight)
        products = [one for one in by_flops if "matmul" in one.task.name][:_PRODUCTS]
        for one in products:
            yield _task(one, one.task.name, _shape(one.func))
        for prefix, name in (("layer_norm", "layer norm"), ("softmax", "softmax")):
            one = next(one for one in by_flops if one.task.name.removeprefix("fused_").startswith(prefix))
            yield _task(one, name, None)
        for name, (text, weights) in _CONVOLUTIONS.items():
            onnx.save(_convolution(text, weights), Path(folder) / "conv.onnx")
            found, _ = extract(Path(folder) / "conv.onnx", {}, precision, profile())
            yield _task(max(found, key=lambda one: one.task.flops), name, None)


def _convolution(text: str, weights: tuple[int, ...]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    rng = np.random.default_rng(1)
    for name, shape in (("w", weights), ("b", weights[:1])):
        value = rng.standard_normal(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def _task(one: Extracted, name: str, product: tuple[int, int, int] | None) -> BenchTask:
    task = one.task
    made = workload(task.key, one.func, one.outputs, Path(), None, task.constants)
    return BenchTask(name, one.func, task.flops, task.weight, made, product)


def _shape(func: tirx.PrimFunc) -> tuple[int, int, int] | None:
    """m, n and k, where the function multiplies two matrices (a batch of one counts)."""
    first, second, *_ = [[int(e) for e in p.shape if int(e) != 1] for p in func.params]
    if len(first) == 2 and len(second) == 2:
        rows, inner = first
        if inner == second[0]:
            return rows, second[1], inner
    return None
