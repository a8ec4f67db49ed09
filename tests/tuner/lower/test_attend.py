"""Attentions as one kernel: the same answers, fewer launches, and only where that pays."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
from benchmarks.running import ready

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner import frontend
from honed.tuner.compiler.fusion import FusionPolicy, attention_seconds
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.module import lower_module, read_program
from tests.tuner.graph.graphs import answers, parsed, weights
from tests.tuner.search.search_functions import imagined, profile_of

pytestmark = pytest.mark.tvm

_SOFTMAX = "s = Mul(p, root) w = Softmax <axis = -1> (s)"
_BODIES = {  # with the functions that are left
    "softmax": (f"p = MatMul(q, k) {_SOFTMAX} y = MatMul(w, v)", 1),
    "a mask": ("p = MatMul(q, k) m = Add(p, mask) w = Softmax <axis = -1> (m) y = MatMul(w, v)", 1),
    "a limit of scores": (
        "p = MatMul(q, k) t = Tanh(p) s = Mul(t, root) w = Softmax <axis = -1> (s) y = MatMul(w, v)",
        1,
    ),
    "an elementwise tail": (f"p = MatMul(q, k) {_SOFTMAX} m = MatMul(w, v) y = Tanh(m)", 1),
    "layer normalisation between": (
        "p = MatMul(q, k) w = LayerNormalization <axis = -1> (p, scale) y = MatMul(w, v)",
        1,
    ),
    "scores that others read, too": (
        f"p = MatMul(q, k) {_SOFTMAX} m = MatMul(w, v) r = ReduceMax <axes = [-1]> (p) y = Add(m, r)",
        5,
    ),
    "weights that others read, too": (
        f"p = MatMul(q, k) {_SOFTMAX} m = MatMul(w, v) r = ReduceMax <axes = [-1]> (w) y = Add(m, r)",
        4,
    ),
    "softmax of columns": (
        "p = MatMul(q, k) w = Softmax <axis = -2> (p) y = MatMul(w, v)",
        3,
    ),
    "columns of as many keys as rows": (
        "p = MatMul(q, k) o = MatMul(p, v) t = Softmax <axis = -2> (o) y = MatMul(t, v)",
        4,
    ),
}
_SHAPES = {"q": (2, 2, 12, 8), "k": (2, 2, 8, 16), "v": (2, 2, 16, 16), "mask": (2, 1, 1, 16)}


def _model(body: str, shapes: dict[str, tuple[int, ...]] = _SHAPES) -> onnx.ModelProto:
    listed = {name: ",".join(map(str, shape)) for name, shape in shapes.items()}
    given = ", ".join(
        f"float[{shape}] {name}"
        for name, shape in listed.items()
        if f"{name})" in body or f"({name}," in body
    )
    made = (*shapes["q"][:-1], shapes["v"][-1])
    text = f"({given}) => (float[{','.join(map(str, made))}] y) {{ {body} }}"
    scale = np.linspace(0.5, 1.5, shapes["k"][-1], dtype=np.float32)
    return parsed(text, root=np.array([0.35], np.float32), scale=scale)


def attention(shapes: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    """Softmax of the products of `q` and `k`, times `v`."""
    return _model(_BODIES["softmax"][0], shapes)


def _calls(model: onnx.ModelProto, profile: DeviceProfile) -> int:
    module = frontend.import_relax(frontend.normalise(model))
    return len(
        read_program(legalize(module, profile, FusionPolicy(profile, sorts=[attention_seconds]))[0]).calls
    )


@pytest.mark.opencl
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "a mask" else pytest.mark.slow) for n in _BODIES]
)
def test_attentions_in_one_kernel_are_right(name: str, device: Device) -> None:
    body, functions = _BODIES[name]
    model = _model(body)
    rng = np.random.default_rng(1)
    given = {i.name: rng.standard_normal(_SHAPES[i.name]).astype(np.float32) for i in model.graph.input}
    (expected,) = answers(model, given)
    np.testing.assert_allclose(run_model(model, given, device)["y"], expected, atol=1e-5, rtol=1e-5)
    assert _calls(model, imagined("gpu")) == functions


def test_those_of_malis_stay_three_kernels() -> None:
    assert _calls(_model(_BODIES["softmax"][0]), imagined("mali")) == 3


@pytest.mark.parametrize("family", ["cpu", "gpu"])
def test_rows_that_do_not_fit_stay_in_memory(family: str) -> None:
    keys = 1 << 14
    shapes = {"q": (1, 1, 16, 8), "k": (1, 1, 8, keys), "v": (1, 1, keys, 16)}
    assert _calls(_model(_BODIES["softmax"][0], shapes), imagined(family)) == 3


def test_few_rows_leave_a_large_device_idle() -> None:
    """Sixteen rows are one work-group, and so one compute unit."""
    one = imagined("gpu")
    large = replace(one, limits=replace(one.limits, compute_units=128))
    shapes = {"q": (1, 1, 16, 512), "k": (1, 1, 512, 256), "v": (1, 1, 256, 512)}
    assert _calls(_model(_BODIES["softmax"][0], shapes), large) == 3
    shapes = {name: (32, 4, *shape[2:]) for name, shape in shapes.items()}
    assert _calls(_model(_BODIES["softmax"][0], shapes), large) == 1


def test_small_ones_take_one_launch(device: Device) -> None:
    for family in ("cpu", "gpu"):
        profile = profile_of(family, device.profile)
        module = frontend.import_named(frontend.normalise(_model(_BODIES["softmax"][0])))
        lowered = lower_module(
            module.module,
            profile,
            first=untuned_kernels,
            names=module.names,
            joins=FusionPolicy(profile, sorts=[attention_seconds]),
        )
        (function,) = lowered.functions.values()
        assert len(function.launches) == 1
        (call,) = lowered.program.calls
        assert call.operators[-1] == "y"
        assert len(call.operators) > 3


_TURNED = """halves = Reshape(q, apart) low = Gather <axis = 3> (halves, zero)
    high = Gather <axis = 3> (halves, one) u = Mul(high, sine) v1 = Sub(low, u) w1 = Mul(low, sine)
    v2 = Add(high, w1) turned = Concat <axis = 3> (v1, v2)"""


def _of_one_query(shared: int, room: int, size: int = 16, *, turned: bool = False) -> onnx.ModelProto:
    """Two heads of keys of a size that so many queries share, and room for so many of them.

    Queries may be `turned` first, as by their position.
    """
    text = f"""(float[1,2,{shared},{size}] q, float[1,2,{room},{size}] k, float[1,2,{room},32] v, int64 first)
        => (float[1,2,{shared},32] y) {{
        {_TURNED if turned else "turned = Identity(q)"}
        seen = LessOrEqual(rows, first) t = Transpose <perm = [0, 1, 3, 2]> (k) p = MatMul(turned, t)
        m = Where(seen, p, least) w = Softmax <axis = -1> (m) y = MatMul(w, v) }}"""
    return parsed(
        text,
        rows=np.arange(room),
        least=np.array(np.finfo(np.float32).min),
        apart=np.array([1, 2, shared, 2, size // 2]),
        zero=np.array(0),
        one=np.array(1),
        sine=np.sin(np.arange(size // 2, dtype=np.float32)),
    )


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("shared", "room", "size", "turned"),
    [
        (3, 48, 16, False),
        (3, 48, 5, False),  # no vectors
        (3, 48, 16, True),
        pytest.param(1, 48, 16, True, marks=pytest.mark.slow),
        pytest.param(1, 48, 16, False, marks=pytest.mark.slow),
        pytest.param(3, 2048, 16, False, marks=pytest.mark.slow),
    ],
)
def test_a_query_over_a_cache_takes_one_launch(
    shared: int, room: int, size: int, turned: bool, device: Device
) -> None:
    one = profile_of("gpu", device.profile)
    one = replace(one, limits=replace(one.limits, compute_units=128))
    normalised = frontend.normalise(_of_one_query(shared, room, size, turned=turned))
    module = frontend.import_relax(normalised)
    lowered = lower_module(
        module, one, first=untuned_kernels, joins=FusionPolicy(one, sorts=[attention_seconds])
    )
    (attends,) = lowered.functions.values()
    (launch,) = attends.launches
    assert math.prod(launch.grid) == 2 * shared
    rng = np.random.default_rng(shared)
    given = {
        port.name: rng.standard_normal(port.shape).astype(port.numpy)
        for port in normalised.inputs
        if port.name != "first"
    }
    with ready(normalised, lowered, device) as executor:
        for first in (0, 1, room // 2, room - 1):
            inputs = given | {"first": np.array(first)}
            (expected,) = answers(_of_one_query(shared, room, size, turned=turned), inputs)
            np.testing.assert_allclose(executor.run(inputs)["y"], expected, atol=1e-5, rtol=1e-5)


_PADDED = "pads = [1, 1, 1, 1]"
_SEPARABLE = (
    f"a = Conv <{_PADDED}> (x, w) r = Relu(a) c = Conv <group = 32, {_PADDED}> (r, each) s = Relu(c) "
)


@pytest.mark.parametrize(
    ("body", "family", "functions"),
    [
        ("m = Conv(s, to) y = Relu(m)", "cpu", 3),  # the first, both others, and what leaves the blocks
        ("m = Conv(s, to) y = Relu(m)", "mali", 3),  # each by itself
        ("m = Conv(s, to) y = Add(m, s)", "cpu", 4),  # what is between is read by others, too
        (f"m = Conv <{_PADDED}> (s, w2) y = Relu(m)", "cpu", 4),  # a window needs its neighbours'
    ],
)
def test_convolutions_of_each_channel_are_one_with_the_pointwise_one_behind(
    body: str, family: str, functions: int
) -> None:
    text = f"(float[1,16,24,24] x) => (float[1,32,24,24] y) {{ {_SEPARABLE} {body} }}"
    model = parsed(
        text,
        w=weights(32, 16, 3, 3),
        each=weights(32, 1, 3, 3),
        to=weights(32, 32, 1, 1),
        w2=weights(32, 32, 3, 3),
    )
    profile = imagined(family)
    module = frontend.import_relax(frontend.normalise(model))
    assert len(read_program(legalize(module, profile, FusionPolicy(profile))[0]).calls) == functions
