"""The tasks that the Valhall bench is judged by: LightGlue's products and rows, and typical convolutions."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from tvm import ir, te, tirx
from tvm.s_tir import Schedule

from honed.machine.profile import DeviceProfile
from honed.tuner import lightglue
from honed.tuner.frontend import Precision
from honed.tuner.measure.candidate import Workload
from honed.tuner.search.parts import blocks, part_of, reads_along
from honed.tuner.tune.extract import Extracted, extract, workload
from honed.valhall.bench import bench_profile
from honed.valhall.compiler import ROOTS

from .hand import Product

# Graph and shape of the weights, by name.
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

    `product` is the matrix product that a function begins with, for comparison with a hand-written one.
    """

    name: str
    func: tirx.PrimFunc
    flops: int
    weight: int
    workload: Workload
    product: Product | None = None


def profile(judge: str = "") -> DeviceProfile:
    """Return the Mali-G610 that is judged for, with the driver of a judge, else with Arm's."""
    return bench_profile("mali-g610", judge if judge in ROOTS else "")


def tasks(precision: Precision = "fp16") -> Iterator[BenchTask]:
    """Yield all tasks of the bench."""
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as folder:
        file = lightglue.write(Path(folder) / "lightglue.onnx", 192)
        found = extract(file, {}, precision, profile()).tasks
        by_flops = sorted(found, key=lambda one: -one.task.flops * one.task.weight)
        for one, product in _products(by_flops):
            yield _task(one, f"matmul {product}", product)
        for prefix, name in (("layer_norm", "layer norm"), ("softmax", "softmax")):
            one = next(one for one in by_flops if one.task.name.removeprefix("fused_").startswith(prefix))
            yield _task(one, name, None)
        for name, (text, weights) in _CONVOLUTIONS.items():
            onnx.save(_convolution(text, weights), Path(folder) / "conv.onnx")
            found = extract(Path(folder) / "conv.onnx", {}, precision, profile()).tasks
            yield _task(max(found, key=lambda one: one.task.flops), name, None)


def alone(what: Product) -> tirx.PrimFunc:
    """Return a product of matrices in halves, without the other operators of its task."""
    x = te.placeholder((what.batch, what.m, what.k), "float16", "x")
    y = te.placeholder((1 if what.shared else what.batch, what.k, what.n), "float16", "y")
    k = te.reduce_axis((0, what.k), "k")

    def summed(b: tirx.Var, i: tirx.Var, j: tirx.Var) -> ir.Expr:
        return te.sum(x[b, i, k] * y[0 if what.shared else b, k, j], axis=k)

    return te.create_prim_func([x, y, te.compute((what.batch, what.m, what.n), summed, "matmul")])


def _convolution(text: str, weights: tuple[int, ...]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    rng = np.random.default_rng(1)
    for name, shape in (("w", weights), ("b", weights[:1])):
        value = rng.standard_normal(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def _task(one: Extracted, name: str, product: Product | None) -> BenchTask:
    task = one.task
    made = workload(task.key, one.func, one.task.outputs, Path(), None, task.constants)
    return BenchTask(name, one.func, task.flops, task.weight, made, product)


def _products(found: Sequence[Extracted]) -> Iterator[tuple[Extracted, Product]]:
    """Yield the first matrix products, one of each shape."""
    shapes = set[Product]()
    for one in found:
        if "matmul" not in one.task.name:
            continue
        product = _product(one.func)
        if product not in shapes:
            shapes.add(product)
            yield one, product
        if len(shapes) == _PRODUCTS:
            return


def _product(func: tirx.PrimFunc) -> Product:
    """Return the product of a function's reduction, whose last two output axes are rows and columns."""
    schedule = Schedule(func)
    (block,) = (one for one in blocks(schedule) if part_of(schedule, one).is_reduction)
    *batch, rows, columns, inner = (int(axis.dom.extent) for axis in schedule.get(block).iter_vars)
    shared = all(1 not in reads_along(schedule, block, n) for n in range(len(batch)))
    return Product(math.prod(batch), rows, columns, inner, shared)
