"""Tasks as the tuner gets them: what is drawn for them judges kernels as a network would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from tvm import te, tirx

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.schedule import default_kernels
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Outcome
from honed.tuner.tune.extract import extract, product_scale, tolerances, workload, write_sets
from tests.tuner.running import LIMITS
from tests.tuner.search.search_functions import dense

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]

SQUASHED = """(float[1,256,5,5] x, float[16,256,3,3] w, float[16] b) => (float[1,16,5,5] y) {
    c = Conv <pads = [1, 1, 1, 1]> (x, w, b) y = Tanh(c) }"""


@pytest.mark.parametrize("depth", [16, 4096])
def test_sums_of_drawn_products_are_about_as_large_as_one(depth: int, tmp_path: Path) -> None:
    func = dense(8, 32, depth)
    assert product_scale(func) == pytest.approx(depth**-0.25)
    write_sets(func, 1, tmp_path / "sets", 1)
    sums = np.load(tmp_path / "sets" / f"0.{len(func.params) - 1}.npy")
    assert 0.5 < sums.std() < 2


def product(dtype: str, accumulator: str, wide: str) -> tirx.PrimFunc:
    """4 x 64 times 64 x 4, widened at its end."""
    a, b = (te.placeholder(shape, dtype, name) for shape, name in (((4, 64), "a"), ((64, 4), "b")))
    k = te.reduce_axis((0, 64))

    def dot(m: tirx.Var, n: tirx.Var) -> tirx.PrimExpr:
        return te.sum(a[m, k].astype(accumulator) * b[k, n].astype(accumulator), axis=k)

    inner = te.compute((4, 4), dot)
    return te.create_prim_func([a, b, te.compute((4, 4), lambda m, n: inner[m, n].astype(wide))])


def test_an_output_is_as_far_off_as_what_it_was_made_of() -> None:
    """Products of halves that are widened at once, as LightGlue has, are not judged by float32's bound."""
    (half,) = tolerances(product("float16", "float16", "float16"), 1)
    assert half == pytest.approx(8 * 2**-11 * 8)
    assert tolerances(product("float16", "float16", "float32"), 1) == (half,)
    assert tolerances(product("float16", "float32", "float32"), 1) == pytest.approx((32 * 2**-24 * 8,))
    assert tolerances(product("float16", "float16", "int32"), 1) == (0.0,)


def test_what_squashes_long_sums_is_judged_by_their_size(
    device: Device, profile: DeviceProfile, tmp_path: Path
) -> None:
    """Sums of 2,304 products, squashed into the range of a tanh: refused once, by the range of the tanh."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {SQUASHED}')
    onnx.save(model, tmp_path / "m.onnx")
    (one,) = extract(tmp_path / "m.onnx", {}, "fp32", profile).tasks
    task = workload(one.task.key, one.func, one.task.outputs, tmp_path / "sets", 1)
    assert (task.flops, task.bytes) == (one.task.flops, one.task.bytes)
    _, lowered, _ = default_kernels(one.func, "main", target_for(profile), profile)
    with Measurer(device.spec, profile, LIMITS) as measurer:
        measurer.load(task)
        verdict = measurer.measure(Candidate.of("default", lowered))
    assert verdict.outcome is Outcome.RIGHT, verdict.reason
