"""Products and convolutions of bytes on a Mali: as integers, by dot products, and the same in halves.

Dot products are judged as an instruction, which Arm's compiler has (`honed.valhall.compiler` says how they
are represented), and as Mesa expands them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import helper, numpy_helper
from rich.console import Console
from rich.table import Table
from tvm import tirx

from honed.machine.profile import DeviceProfile
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.frontend import Precision, import_relax, normalise
from honed.tuner.lower import DOT_ADD
from honed.tuner.lower.module import legal_model
from honed.tuner.lower.target import target_for
from honed.valhall.compiler import OfflineCompileFailed
from honed.valhall.judge import MachineCodeJudge, seconds

from .draws import draws
from .tasks import profile

_PRECISIONS: Mapping[str, Precision] = {"halves": "fp16"}
_FORMS = ("integers", "dot products", "written out by Mesa", "halves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer's integer operator and its float one, each on `x` of a shape, with weights of another."""

    image: tuple[int, ...]
    weights: tuple[int, ...]
    operations: int  # Operations of one run
    attributes: Mapping[str, list[int]]

    def model(self, *, bytes_: bool) -> onnx.ModelProto:
        """Return the layer with quantised bytes in and out, or halves."""
        rng = np.random.default_rng(0)
        is_conv = len(self.image) == 4
        kind: type[np.generic] = np.uint8 if bytes_ else np.float16
        if not bytes_:
            op, names = "Conv" if is_conv else "MatMul", ["x", "w"]
            given = {"w": rng.standard_normal(self.weights).astype(kind)}
        else:
            op = "QLinearConv" if is_conv else "QLinearMatMul"
            names = ["x", "s", "z", "w", "t", "q", "u", "z"]
            given = {
                "w": rng.integers(-127, 128, self.weights).astype(np.int8),
                **{name: np.array(0.02, np.float32) for name in "stu"},
                "z": np.array(120, np.uint8),
                "q": np.array(0, np.int8),
            }
        element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
        graph = helper.make_graph(
            [helper.make_node(op, names, ["y"], **self.attributes)],
            "layer",
            [helper.make_tensor_value_info("x", element, self.image)],
            [helper.make_tensor_value_info("y", element, None)],
            [numpy_helper.from_array(value, name) for name, value in given.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


LAYERS = {
    "product 192x512x512": Layer(
        image=(192, 512), weights=(512, 512), operations=2 * 192 * 512 * 512, attributes={}
    ),
    "product 64x768x3072": Layer(
        image=(64, 768), weights=(768, 3072), operations=2 * 64 * 768 * 3072, attributes={}
    ),
    "conv 3x3 64, 56x56": Layer(
        image=(1, 64, 56, 56),
        weights=(64, 64, 3, 3),
        operations=2 * 64 * 64 * 9 * 56 * 56,
        attributes={"pads": [1, 1, 1, 1]},
    ),
    "conv 1x1 96-24, 28x28": Layer(
        image=(1, 96, 28, 28), weights=(24, 96, 1, 1), operations=2 * 96 * 24 * 28 * 28, attributes={}
    ),
}


def report(judge: MachineCodeJudge, mesa: str, count: int) -> None:
    """Print each layer in each form: the best of the kernels first served and `count` draws a sketch."""
    table = Table(
        "layer", *_FORMS, "gain over integers", "over halves", title=f"Mesa {mesa}, us, with 4 us a launch"
    )
    for name, layer in LAYERS.items():
        times = [_layer(layer, form, judge, count) for form in _FORMS]
        integers, dots, _, halves = times
        table.add_row(
            name, *(f"{1e6 * time:.0f}" for time in times), f"{integers / dots:.1f}", f"{halves / dots:.1f}"
        )
    Console(width=140).print(table)


def _layer(layer: Layer, form: str, judge: MachineCodeJudge, count: int) -> float:
    """Return the seconds of a layer's launches in an inference."""
    device, precision = profile(), _PRECISIONS.get(form, "auto")
    if form == "integers":
        device = replace(device, limits=replace(device.limits, int8_dots=False))
    normalised = normalise(layer.model(bytes_=form != "halves"), precision=precision)
    legal = legal_model(import_relax(normalised), device)
    return sum(_function(func, device, judge, count, form) for func in legal.functions.values())


def _function(
    func: tirx.PrimFunc, device: DeviceProfile, judge: MachineCodeJudge, count: int, form: str
) -> float:
    _, lowered, _ = untuned_kernels(func, "main", target_for(device), device)
    found = []
    for one in (lowered, *(drawn.lowered for drawn in draws(func, device, count))):
        source = one.source
        if form == "written out by Mesa":
            source = f"#undef {DOT_ADD}\n{source}"
        try:
            found.append(seconds(judge.judge(source, one.launches)))
        except OfflineCompileFailed:
            continue
    return min(found)
