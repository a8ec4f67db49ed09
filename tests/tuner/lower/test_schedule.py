"""Default schedules: the one that always works is right, is used where rules fail, and is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
from onnx import parser
from tvm import relax, s_tir, te, tirx
from tvm.s_tir import dlight

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.runtime.errors import ModelRefused
from honed.tuner.compiler import verification
from honed.tuner.lower import schedule as scheduling
from honed.tuner.lower.module import lower_module
from honed.tuner.lower.opencl import LoweringFailed, last_line
from honed.tuner.lower.schedule import SERIAL, default_kernels, fresh
from honed.tuner.lower.sums import reductions
from honed.tuner.lower.target import target_for
from tests.runtime.builder import PROFILE

from .lowering import Make, normal, only_function, relax_module, run_lowered

pytestmark = pytest.mark.tvm
Rules = Iterator[tuple[str, Callable[[], dlight.ScheduleRule]]]


class _Choking(dlight.ScheduleRule):
    def apply(self, _func: tirx.PrimFunc, _target: object, _tunable: bool) -> None:
        raise AssertionError("this rule chokes on everything")


class _Declining(dlight.ScheduleRule):
    def apply(self, _func: tirx.PrimFunc, _target: object, _tunable: bool) -> None:
        return None


def _none_fits(_func: tirx.PrimFunc, _profile: DeviceProfile) -> Rules:
    yield "choking", _Choking
    yield "declining", _Declining


X, W, BIAS = normal(2, 6, 65), normal(2, 65, 5), normal(5)
IMAGE, KERNEL = normal(1, 3, 8, 9), normal(4, 3, 3, 3)


def _softmax(x: np.ndarray) -> np.ndarray:
    exact = np.exp(x - x.max(axis=-1, keepdims=True))
    return exact / exact.sum(axis=-1, keepdims=True)


CASES: dict[str, tuple[Make, dict[str, np.ndarray], np.ndarray]] = {
    "elementwise": (lambda _, v: relax.op.tanh(v["x"]), {"x": X}, np.tanh(X)),
    "product and sum": (
        lambda b, v: relax.op.add(b.emit(relax.op.matmul(v["x"], v["w"])), v["b"]),
        {"x": X, "w": W, "b": BIAS},
        X @ W + BIAS,
    ),
    "softmax": (lambda _, v: relax.op.nn.softmax(v["x"], axis=-1), {"x": X}, _softmax(X)),
    "two results of one block": (lambda _, v: relax.op.argmax(v["x"], axis=-1), {"x": X}, X.argmax(-1)),
    "a buffer of one nest": (
        lambda b, v: relax.op.astype(b.emit(relax.op.argmax(v["x"], axis=-1)), "float32"),
        {"x": X},
        X.argmax(-1).astype(np.float32),
    ),
    "single number": (lambda _, v: relax.op.sum(v["x"]), {"x": X}, X.sum()),
    "rank 0": (lambda _, v: relax.op.exp(v["x"]), {"x": np.array(1.5, np.float32)}, np.exp(np.float32(1.5))),
    "padding": (
        lambda _, v: relax.op.nn.conv2d(v["x"], v["w"], padding=1),
        {"x": IMAGE, "w": KERNEL},
        np.zeros(0),
    ),
}


def _convolution() -> np.ndarray:
    padded = np.pad(IMAGE, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, KERNEL)


@pytest.mark.parametrize("name", CASES)
def test_a_single_work_item_gives_right_answers(
    name: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "_rules", lambda _func, _profile: iter(()))
    make, inputs, expected = CASES[name]
    expected = _convolution() if name == "padding" else np.asarray(expected)
    func = only_function(relax_module(make, inputs), device.profile)
    rule, lowered, passed_over = default_kernels(func, "f", target_for(device.profile), device.profile)
    assert (rule, passed_over) == (SERIAL, [])
    assert all(launch.grid == launch.block == (1, 1, 1) for launch in lowered.launches)
    found = np.zeros(expected.shape, expected.dtype if expected.dtype != np.float64 else np.float32)
    run_lowered(lowered, list(inputs.values()), [found], device)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_rules_that_fail_are_passed_over_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_rules", _none_fits)
    func = only_function(relax_module(*CASES["elementwise"][:2]), PROFILE)
    rule, _, passed_over = default_kernels(func, "f", target_for(PROFILE), PROFILE)
    assert rule == SERIAL
    assert passed_over == ["choking: this rule chokes on everything"]


def test_errors_of_rules_do_not_print_the_function() -> None:
    """TVM has rules try to inline blocks, and the text takes most of the time of a rule that fails so."""
    x = te.placeholder((4,), name="x")
    schedule = s_tir.Schedule(te.create_prim_func([x, te.compute((4,), lambda i: x[i] + 1, name="y")]))
    with pytest.raises(s_tir.ScheduleError) as raised:
        schedule.compute_inline(schedule.get_sblock("y"))
    assert "def main" not in str(raised.value)
    assert "output block" in last_line(raised.value)


def test_a_rule_whose_kernels_must_not_run_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(func: tirx.PrimFunc, *others: object) -> object:
        if "threadIdx" in str(func.script()):
            raise LoweringFailed("a barrier in divergent control flow")
        return real(func, *others)

    real = scheduling.lower_function
    monkeypatch.setattr(scheduling, "lower_function", refuse)
    func = only_function(relax_module(*CASES["elementwise"][:2]), PROFILE)
    rule, _, passed_over = default_kernels(func, "f", target_for(PROFILE), PROFILE)
    assert rule == SERIAL
    assert passed_over == ["fallback: a barrier in divergent control flow"]


def test_the_last_resort_is_reported_in_the_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = relax_module(*CASES["product and sum"][:2])
    assert lower_module(module, PROFILE).notes == ()
    monkeypatch.setattr(scheduling, "_rules", _none_fits)
    lowered = lower_module(module, PROFILE)
    (function,) = lowered.functions.values()
    assert function.schedule == SERIAL
    assert lowered.notes == (
        f"{function.name} runs on a single work-item, slowly: no default schedule fits "
        "(choking: this rule chokes on everything)",
    )


def test_a_compiled_model_of_last_resorts_is_right(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_rules", _none_fits)
    model = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20]> f (float[2,6,65] x, float[2,65,5] w) => (float[2,6,5] y)'
        "{ a = MatMul(x, w) b = Relu(a) y = Softmax <axis = -1> (b) }"
    )
    found = verification.run_model(model, {"x": X, "w": W}, device)["y"]
    np.testing.assert_allclose(found, _softmax(np.maximum(X @ W, 0)), rtol=1e-4, atol=1e-6)


def test_a_recorded_schedule_that_fails_keeps_the_default_and_is_reported() -> None:
    def choose(_task: str, _func: tirx.PrimFunc) -> None:
        raise LoweringFailed("the trace names no such block")

    lowered = lower_module(relax_module(*CASES["elementwise"][:2]), PROFILE, choose=choose)
    (function,) = lowered.functions.values()
    assert function.schedule == "fallback"
    (note,) = lowered.notes
    assert note.endswith(
        "keeps its default schedule, the recorded one cannot be used: the trace names no such block"
    )


def test_a_recorded_schedule_is_used_and_named() -> None:
    def choose(_task: str, func: tirx.PrimFunc) -> tuple[str, tirx.PrimFunc]:
        with target_for(PROFILE) as target:
            return "record:1", dlight.gpu.Fallback().apply(fresh(func), target, False).mod["main"]

    lowered = lower_module(relax_module(*CASES["elementwise"][:2]), PROFILE, choose=choose)
    assert [f.schedule for f in lowered.functions.values()] == ["record:1"]


def test_a_function_that_cannot_be_lowered_refuses_the_model() -> None:
    def fail(*_: object) -> NoReturn:
        raise LoweringFailed("part of it would run on the host")

    with pytest.raises(ModelRefused) as refused:
        lower_module(relax_module(*CASES["elementwise"][:2]), PROFILE, first=fail)
    assert refused.value.reasons == ("tir_tanh: part of it would run on the host",)


def test_long_reductions_are_shared_on_gpus_and_not_on_cpus() -> None:
    func = only_function(relax_module(lambda _, v: relax.op.sum(v["x"], axis=-1), {"x": X}), PROFILE)
    names = [name for name, _ in scheduling._rules(func, PROFILE)]
    assert names == ["matmul", "gemv", "reduction", "general-reduction", "fallback"]
    assert [one.terms for one in reductions(func)] == [65]
    cpu = replace(PROFILE, rules=replace(PROFILE.rules, family="cpu"))
    assert [name for name, _ in scheduling._rules(func, cpu)] == ["matmul", "fallback"]


def test_scheduling_leaves_the_function_as_it_was() -> None:
    func = only_function(relax_module(*CASES["softmax"][:2]), PROFILE)
    before = func.script()
    default_kernels(func, "f", target_for(PROFILE), PROFILE)
    assert func.script() == before


def test_elements_reduced_along_several_axes_are_counted_together() -> None:
    x = te.placeholder((4, 5, 6), "float32", "x")
    i, j = te.reduce_axis((0, 5), "i"), te.reduce_axis((0, 6), "j")
    y = te.compute((4,), lambda n: te.sum(x[n, i, j], axis=[i, j]), "y")
    assert [one.terms for one in reductions(te.create_prim_func([x, y]))] == [30]


def test_no_kernel_reads_and_writes_one_inner_buffer(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where each element is made of the one in its place: arguments are `restrict`."""
    monkeypatch.setattr(scheduling, "_rules", _none_fits)

    def chain(b: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        return relax.op.sigmoid(b.emit(relax.op.tanh(b.emit(relax.op.exp(v["x"])))))

    func = only_function(relax_module(chain, {"x": X}), device.profile)
    _, lowered, _ = default_kernels(func, "chain", target_for(device.profile), device.profile)
    assert [set(launch.args) for launch in lowered.launches] == [{0, 2}, {2, 3}, {3, 1}]
    assert [value.nbytes for value in lowered.inner] == [X.nbytes, X.nbytes]
    found = np.empty_like(X)
    run_lowered(lowered, [X], [found], device)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.tanh(np.exp(X)))), rtol=1e-5)
