"""A norm of one row and the products that read it in one kernel: right, and only where it pays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from benchmarks.running import ready

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner import frontend
from honed.tuner.compiler.fusion import FusionPolicy, one_row_seconds
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.module import legal_model, lower_module, read_program
from honed.tuner.search.sketches.attention import attention_of
from honed.tuner.search.sketches.one_row import one_row_of
from tests.tuner.graph.graphs import answers, parsed, weights
from tests.tuner.search.search_functions import imagined, profile_of

from .test_decoders import packed

pytestmark = pytest.mark.tvm

_NORM = "n = SimplifiedLayerNormalization <axis = -1, epsilon = 0.00001> (x, gamma)"
_LAYER_NORM = "n = LayerNormalization <axis = -1> (x, gamma, beta)"
_GATED = "g = MatMul(n, w1) u = MatMul(n, w2) s = Sigmoid(g) a = Mul(g, s) y = Mul(a, u)"
_GATED_ROW = _GATED.replace("(n,", "(x,")
_FEW = "com.microsoft.MatMulNBits <K = 96, N = 160, bits = 4, block_size = 16>"
_BODIES = {  # with the functions that are left
    "a product": (f"{_NORM} y = MatMul(n, w1)", 1),
    "a product with what is added": (f"{_LAYER_NORM} m = MatMul(n, w1) y = Add(m, r)", 1),
    "a gated layer": (f"{_NORM} {_GATED}", 1),
    "a gated layer without a norm": (_GATED_ROW, 1),
    "packed weights": (f"{_NORM} y = {_FEW} (n, p1, s1)", 1),
    "a gated layer of packed weights": (
        f"{_NORM} g = {_FEW} (n, p1, s1) u = {_FEW} (n, p2, s2) t = Tanh(g) y = Mul(t, u)",
        1,
    ),
    "a norm that others read, too": (
        f"{_NORM} m = MatMul(n, w1) t = Neg(n) y = Concat <axis = -1> (m, t)",
        3,
    ),
    "a product of what is no norm": ("n = Softmax <axis = -2> (x) y = MatMul(n, w1)", 2),
    "gates of two rows": (
        f"{_NORM} {_GATED.replace('u = MatMul(n, w2)', 'v = Neg(x) u = MatMul(v, w2)')}",
        3,
    ),
}


def _model(body: str, rows: int = 1, columns: int = 160) -> onnx.ModelProto:
    p1, s1 = packed(96, columns, 4, 16)
    text = f"(float[1,{rows},96] x, float[1,1,{columns}] r) => (float[1,{rows},N] y) {{ {body} }}"
    return parsed(
        text.replace("N] y", f"{columns + 96 * ('Concat' in body)}] y"),
        gamma=1 + weights(96) / 8,
        beta=weights(96),
        w1=weights(96, columns),
        w2=weights(96, columns)[::-1].copy(),
        p1=p1,
        s1=s1,
        p2=p1[::-1].copy(),
        s2=s1[::-1].copy(),
    )


def _calls(model: onnx.ModelProto, profile: DeviceProfile) -> int:
    module = frontend.import_relax(frontend.normalise(model))
    return len(
        read_program(legalize(module, profile, FusionPolicy(profile, sorts=[one_row_seconds]))[0]).calls
    )


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, "gpu") for name in _BODIES),
        ("a gated layer", "mali"),
        ("a gated layer of packed weights", "mali"),
    ],
)
def test_products_of_a_row_in_one_kernel_are_right(name: str, family: str, device: Device) -> None:
    body, functions = _BODIES[name]
    model, profile = _model(body), profile_of(family, device.profile)
    normalised = frontend.normalise(model)
    joined = FusionPolicy(profile, sorts=[one_row_seconds])
    lowered = lower_module(frontend.import_relax(normalised), profile, first=untuned_kernels, joins=joined)
    assert len(lowered.program.calls) == functions
    if functions == 1:
        assert [len(one.launches) for one in lowered.functions.values()] == [1]
    rng = np.random.default_rng(1)
    given = {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in normalised.inputs}
    (expected,) = answers(model, given)
    with ready(normalised, lowered, device) as executor:
        np.testing.assert_allclose(executor.run(given)["y"], expected, atol=1e-4, rtol=1e-4)


def test_those_of_processors_stay_apart() -> None:
    assert _calls(_model(_BODIES["a gated layer"][0]), imagined("cpu")) == 3


def test_those_of_several_rows_stay_apart() -> None:
    assert _calls(_model(_BODIES["a gated layer"][0], rows=2), imagined("gpu")) == 3


def test_a_gated_layer_with_as_many_columns_as_terms_is_no_attention() -> None:
    gpu, module = imagined("gpu"), frontend.import_relax(frontend.normalise(_model(_GATED_ROW, columns=96)))
    (func,) = legal_model(module, gpu, FusionPolicy(gpu)).functions.values()
    assert attention_of(func) is None
    assert one_row_of(func) is not None


def test_a_row_that_does_not_fit_stays_in_memory() -> None:
    gpu = imagined("gpu")
    model = _model(_BODIES["a product"][0])
    assert _calls(model, gpu) == 1
    assert _calls(model, replace(gpu, limits=replace(gpu.limits, local_mem_bytes=96 * 4))) == 2


def test_a_row_is_not_made_again_for_thousands_of_groups() -> None:
    large = imagined("gpu")
    large = replace(large, limits=replace(large.limits, compute_units=128))
    body, _ = _BODIES["a product"]
    assert _calls(_model(body, columns=1 << 16), large) == 2
    assert _calls(_model(body, columns=1 << 12), large) == 1
