"""What operators become before they are scheduled: erf, and reductions over a single element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from onnx import parser
from tvm import relax, s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import dlight
from tvm_ffi import structural_walk

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.opencl import lower_function
from honed.tuner.lower.schedule import default_kernels, narrow_indices
from honed.tuner.lower.target import target_for

from .lowering import Make, normal, only_function, relax_module, run_lowered

pytestmark = pytest.mark.tvm


def _erf(x: np.ndarray, device: Device) -> np.ndarray:
    func = only_function(relax_module(lambda _, v: relax.op.erf(v["x"]), {"x": x}), device.profile)
    _, lowered, _ = default_kernels(func, "erf", target_for(device.profile), device.profile)
    found = np.empty_like(x)
    run_lowered(lowered, [x], [found], device)
    return found


def test_erf_is_right_and_stays_within_one(device: Device) -> None:
    x = np.linspace(-6, 6, 100_001, dtype=np.float32)
    found = _erf(x, device)
    assert np.abs(found - [math.erf(v) for v in x]).max() < 5.5e-7
    assert np.abs(found).max() == 1.0


def test_erf_of_large_numbers_is_one_and_of_nan_is_nan(device: Device) -> None:
    x = np.array([4, -4, 1e30, -1e30, np.inf, -np.inf, np.nan, 0, 1e-30], np.float32)
    found = _erf(x, device)
    np.testing.assert_array_equal(found[:8], np.array([1, -1, 1, -1, 1, -1, np.nan, 0], np.float32))
    assert found[8] == pytest.approx(2e-30 / math.sqrt(math.pi))


def test_erf_of_vectors_is_the_same(device: Device) -> None:
    x = np.append(np.linspace(-6, 6, 255, dtype=np.float32), np.float32(np.nan))
    func = only_function(relax_module(lambda _, v: relax.op.erf(v["x"]), {"x": x}), device.profile)
    schedule = s_tir.Schedule(narrow_indices(func))
    (loop,) = schedule.get_loops(schedule.get_sblock("erf"))
    outer, inner = schedule.split(loop, [None, 4])
    schedule.bind(outer, "threadIdx.x")
    schedule.vectorize(inner)
    lowered = lower_function(schedule.mod["main"], "erf", target_for(device.profile), device.profile)
    assert "float4*)" in lowered.source
    found = np.empty_like(x)
    run_lowered(lowered, [x], [found], device)
    np.testing.assert_allclose(found[:-1], [math.erf(v) for v in x[:-1]], atol=5.5e-7)
    assert np.isnan(found[-1])


def test_gelu_of_a_large_negative_number_is_nothing(device: Device) -> None:
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> f (float[3] x) => (float[3] y) {y = Gelu(x)}'
    )
    found = run_model(model, {"x": np.array([-1e30, 1e30, np.nan], np.float32)}, device)["y"]
    np.testing.assert_array_equal(found, np.array([0, 1e30, np.nan], np.float32))


def test_equal_operators_are_made_once(profile: DeviceProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    call_te = relax.BlockBuilder.call_te

    def counted(builder: relax.BlockBuilder, compute: Any, *args: Any, **named: Any) -> relax.Expr:
        made.append(str(compute))
        return call_te(builder, compute, *args, **named)

    def chain(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        found = v["x"]
        for _ in range(5):
            found = builder.emit(relax.op.add(relax.op.tanh(found), v["y"]))
        return found

    monkeypatch.setattr(relax.BlockBuilder, "call_te", counted)
    legalize(relax_module(chain, {"x": normal(4, 6), "y": normal(4, 6)}), profile)
    assert len(made) == 2


def test_operators_of_equal_types_that_are_given_otherwise_stay_apart(device: Device) -> None:
    model = parser.parse_model(
        """<ir_version: 9, opset_import: ["": 20]>
        f (float[3] x, float[3] y) => (float[3] a, float[3] b, float[3] c, float[3] d, float[3] e, float[3] g)
        <float two = {2}, float three = {3}, float[3] some = {4, 5, 6}, float[3] more = {7, 8, 9}>
        { a = Mul(x, x) b = Mul(x, y) c = Mul(x, two) d = Mul(x, three) e = Mul(x, some) g = Mul(x, more) }"""
    )
    x, y = normal(3), normal(3, seed=1)
    found = run_model(model, {"x": x, "y": y}, device)
    wanted = {"a": x * x, "b": x * y, "c": 2 * x, "d": 3 * x, "e": x * [4, 5, 6], "g": x * [7, 8, 9]}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_root_mean_square_is_one_kernel(dtype: type[np.floating[Any]], device: Device) -> None:
    x, gamma = normal(3, 64).astype(dtype), normal(64)

    def norm(b: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        wide = b.emit(relax.op.astype(v["x"], "float32")) if dtype is np.float16 else v["x"]
        square = b.emit(relax.op.mean(b.emit(relax.op.multiply(wide, wide)), [-1], keepdims=True))
        root = b.emit(relax.op.sqrt(b.emit(relax.op.add(square, relax.const(1e-5)))))
        return relax.op.multiply(b.emit(relax.op.divide(wide, root)), v["gamma"])

    func = only_function(relax_module(norm, {"x": x, "gamma": gamma}), device.profile)
    if dtype is np.float16 and not device.profile.limits.fp16:
        return  # one function all the same
    _, lowered, _ = default_kernels(func, "norm", target_for(device.profile), device.profile)
    found, wide = np.zeros(x.shape, np.float32), x.astype(np.float32)
    run_lowered(lowered, [x, gamma], [found], device)
    expected = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * gamma
    np.testing.assert_allclose(found, expected, rtol=1e-5)


_REDUCED = {
    "softmax": lambda wide, _: relax.op.nn.softmax(wide),
    "log-softmax": lambda wide, _: relax.op.nn.log_softmax(wide),
    "layer norm": lambda wide, given: relax.op.nn.layer_norm(wide, given["g"], given["g"], axes=[-1]),
    "sum": lambda wide, _: relax.op.sum(wide, [-1]),
    "mean": lambda wide, _: relax.op.mean(wide, [-1]),
    "product": lambda wide, _: relax.op.prod(wide, [-1]),
}


_SPELLED = {"log-softmax": "log_softmax", "layer norm": "layer_norm", "product": "prod"}


@pytest.mark.parametrize("name", _REDUCED)
@pytest.mark.parametrize("halves", [True, False])
def test_reductions_in_singles_read_the_halves_that_they_are_made_of(
    name: str, halves: bool, profile: DeviceProfile
) -> None:
    """What is doubled before is stored as it was made; integers are converted where they are made."""

    def reduced(b: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        product = b.emit(relax.op.matmul(v["x"], v["y"]))
        return _REDUCED[name](b.emit(relax.op.astype(product, "float32")), v)

    dtype = np.float16 if halves else np.int32
    given = {"x": normal(8, 16).astype(dtype), "y": normal(16, 32).astype(dtype), "g": normal(32)}
    legal, _ = legalize(relax_module(reduced, given), profile)
    made, read = _types(legal, "matmul"), _types(legal, _SPELLED.get(name, name))
    assert made[-1] == ("float16" if halves else "float32")
    assert read[0] == made[-1]


def _types(module: IRModule, part: str) -> list[str]:
    """The types of the parameters of the only function whose name has a part."""
    ((_, func),) = [
        (name, func)
        for name, func in module.functions_items()
        if isinstance(func, tirx.PrimFunc) and part in str(name.name_hint)
    ]
    return [str(one.dtype) for one in func.params]


def _twice(builder: relax.BlockBuilder, value: relax.Expr) -> relax.Expr:
    one, other = builder.emit(relax.op.tanh(value)), builder.emit(relax.op.negative(value))
    return relax.op.multiply(one, other)


A, B, C, D = normal(8, 1), normal(1, 16), normal(8, 16), normal(16, seed=1)
IMAGE, WEIGHTS, BIAS = normal(1, 4, 5, 6), normal(4, 1, 1, 1), normal(1, 4, 1, 1)
ONE_ELEMENT: dict[str, tuple[Make, dict[str, np.ndarray], np.ndarray]] = {
    "product, then two sums": (
        lambda b, v: relax.op.add(
            b.emit(relax.op.add(b.emit(relax.op.matmul(v["a"], v["b"])), v["c"])), v["d"]
        ),
        {"a": A, "b": B, "c": C, "d": D},
        A @ B + C + D,
    ),
    "product, then two consumers": (
        lambda b, v: _twice(b, b.emit(relax.op.add(b.emit(relax.op.matmul(v["a"], v["b"])), v["c"]))),
        {"a": A, "b": B, "c": C},
        np.tanh(A @ B + C) * -(A @ B + C),
    ),
    "depthwise convolution, then a sum": (
        lambda b, v: relax.op.add(b.emit(relax.op.nn.conv2d(v["x"], v["w"], groups=4)), v["c"]),
        {"x": IMAGE, "w": WEIGHTS, "c": BIAS},
        IMAGE * WEIGHTS.reshape(1, 4, 1, 1) + BIAS,
    ),
    "pooling, then a sum": (
        lambda b, v: relax.op.add(b.emit(relax.op.nn.max_pool2d(v["x"], strides=2)), v["c"]),
        {"x": IMAGE, "c": BIAS},
        IMAGE[:, :, ::2, ::2] + BIAS,
    ),
    "largest": (lambda _, v: relax.op.max(v["a"], axis=[1]), {"a": A}, A[:, 0]),
    "place of the largest": (lambda _, v: relax.op.argmax(v["a"], axis=1), {"a": A}, np.zeros(8, np.int64)),
    "softmax, then a sum": (
        lambda b, v: relax.op.add(b.emit(relax.op.nn.softmax(v["a"], axis=1)), v["a"]),
        {"a": A},
        1 + A,
    ),
}


@pytest.mark.parametrize(("make", "inputs", "expected"), ONE_ELEMENT.values(), ids=list(ONE_ELEMENT))
def test_what_follows_a_reduction_of_one_element_is_applied_once(
    make: Make, inputs: dict[str, np.ndarray], expected: np.ndarray, device: Device
) -> None:
    func = only_function(relax_module(make, inputs), device.profile)
    assert not _reductions(func)
    _, lowered, _ = default_kernels(func, "f", target_for(device.profile), device.profile)
    found = np.zeros_like(expected)
    run_lowered(lowered, list(inputs.values()), [found], device)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def _reductions(func: tirx.PrimFunc) -> list[str]:
    found: list[str] = []

    def visit(block: s_tir.SBlock) -> None:
        if block.init is not None:
            found.append(str(block.name_hint))

    structural_walk(func.body, [(s_tir.SBlock, visit)], order="post")
    return found


def test_longer_reductions_stay(device: Device) -> None:
    inputs = {"a": normal(8, 2), "b": normal(2, 16)}
    func = only_function(relax_module(lambda _, v: relax.op.matmul(v["a"], v["b"]), inputs), device.profile)
    assert _reductions(func) == ["matmul"]
    assert dlight.gpu.Matmul().apply(narrow_indices(func), target_for(device.profile), False) is not None
