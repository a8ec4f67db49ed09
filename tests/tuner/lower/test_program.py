"""From Relax to steps: host calls between launches, reshapes without work, constants, and what runs of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel, Copy, HostCall, Launch, SourceModel, Step, Tensor
from honed.runtime.errors import ModelRefused
from honed.runtime.execution.executor import Executor
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.graph import read_program
from honed.tuner.lower.module import lower_module
from honed.tuner.lower.plan import Plan
from honed.tuner.lower.program import FunctionCall, HostFunctionCall
from tests.runtime.builder import PROFILE

from .lowering import Make, normal, relax_module

pytestmark = pytest.mark.tvm


def _plan(make: Make, inputs: Mapping[str, np.ndarray]) -> Plan:
    return lower_module(relax_module(make, inputs), PROFILE).plan(PROFILE)


def _kinds(steps: tuple[Step, ...]) -> list[str]:
    return [step.function if isinstance(step, HostCall) else type(step).__name__ for step in steps]


def _between(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
    first = builder.emit(relax.op.tanh(v["x"]))
    ordered = builder.emit(relax.op.sort(first, axis=-1, descending=True))
    return relax.op.add(ordered, first)


def test_a_host_call_stands_between_its_launches() -> None:
    plan = _plan(_between, {"x": normal(4, 8)})
    assert _kinds(plan.steps) == ["Launch", "sort", "Launch"]
    before, call, after = plan.steps
    assert isinstance(before, Launch)
    assert isinstance(call, HostCall)
    assert isinstance(after, Launch)
    assert call.attrs == {"axis": 1, "descending": True}
    assert call.inputs[0] in before.buffers
    assert set(after.buffers) >= {*call.inputs, *call.outputs}
    one, other = (plan.buffers[b] for b in (*call.inputs, *call.outputs))
    assert one.place == other.place == "scratch"
    assert abs(one.offset - other.offset) >= one.nbytes  # both are alive in the last launch


def test_a_host_call_after_a_reshape_sees_the_new_shape() -> None:
    def make(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        flat = builder.emit(relax.op.reshape(v["x"], (32,)))
        return relax.op.tanh(builder.emit(relax.op.cumsum(flat, axis=0)))

    plan = _plan(make, {"x": normal(4, 8)})
    assert _kinds(plan.steps) == ["Copy", "cumsum", "Launch"]
    call = plan.steps[1]
    assert isinstance(call, HostCall)
    assert plan.buffers[call.inputs[0]].shape == (32,)


def test_a_reshape_is_no_work() -> None:
    def make(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        first = builder.emit(relax.op.tanh(v["x"]))
        flat = builder.emit(relax.op.reshape(first, (8, 4)))
        return relax.Tuple([first, builder.emit(relax.op.matmul(flat, v["w"]))])

    plan = _plan(make, {"x": normal(4, 8), "w": normal(4, 6)})
    assert _kinds(plan.steps) == ["Launch", "Launch"]
    assert plan.output_buffers[0] in plan.steps[1].buffers


def test_an_input_reshaped_to_an_output_is_copied() -> None:
    plan = _plan(lambda _, v: relax.op.reshape(v["x"], (2, 16)), {"x": normal(4, 8)})
    (step,) = plan.steps
    assert isinstance(step, Copy)
    assert plan.buffers[step.target].shape == (2, 16)


def test_a_constant_used_twice_is_kept_once() -> None:
    weight = relax.const(normal(8, 8))

    def make(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        return relax.op.matmul(builder.emit(relax.op.matmul(v["x"], weight)), weight)

    plan = _plan(make, {"x": normal(4, 8)})
    (constant,) = plan.constants.values()
    np.testing.assert_array_equal(constant, normal(8, 8))


def test_every_operator_without_a_kernel_is_named() -> None:
    def make(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        shown = builder.emit(relax.op.topk(v["x"], k=2, ret_type="values"))
        return relax.op.tanh(shown)

    values = relax_module(make, {"x": normal(4, 8)})
    read = read_program(legalize(values, PROFILE))
    assert [type(call) for call in read.calls] == [HostFunctionCall, FunctionCall]
    opaque = relax_module(lambda _, v: relax.op.unique(v["x"], sorted=True), {"x": normal(4)})
    with pytest.raises(ModelRefused):
        read_program(legalize(opaque, PROFILE))


def test_values_of_one_name_are_not_confused() -> None:
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        one = relax.Var("same", relax.TensorType((4,), "float32"))
        two = relax.Var("same", relax.TensorType((4,), "float32"))
        builder.emit_normalized(relax.VarBinding(one, builder.normalize(relax.op.sort(x))))
        builder.emit_normalized(relax.VarBinding(two, builder.normalize(relax.op.sort(one, descending=True))))
        builder.emit_func_output(relax.Tuple([one, two]))
    read = read_program(legalize(builder.get(), PROFILE))
    assert len(set(read.outputs)) == 2


def _compiled(plan: Plan, inputs: Mapping[str, np.ndarray], device: Device) -> CompiledModel:
    def tensors(names: Iterable[str], buffers: Iterable[int]) -> tuple[Tensor, ...]:
        held = [(name, b, plan.buffers[b]) for name, b in zip(names, buffers, strict=True)]
        return tuple(Tensor(name=n, dtype=h.dtype, shape=h.shape, buffer=b) for n, b, h in held)

    return CompiledModel(
        source=SourceModel(
            sha256="0" * 64, filename="made", producer="", opset=17, precision="fp32", notes=()
        ),
        compiler={},
        device=replace(device.profile, peaks=None),
        inputs=tensors(inputs, plan.input_buffers),
        outputs=tensors([f"out{n}" for n in range(len(plan.output_buffers))], plan.output_buffers),
        buffers=plan.buffers,
        arena_bytes=plan.arena_bytes,
        constant_bytes=plan.constant_bytes,
        sources=plan.sources,
        kernels=plan.kernels,
        steps=plan.steps,
        prepare=plan.prepare,
        prepared_bytes=plan.prepared_bytes,
        proof=None,
    )


def test_host_calls_between_launches_give_right_answers(device: Device, tmp_path: Path) -> None:
    def make(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        rows = builder.emit(relax.op.reshape(builder.emit(relax.op.tanh(v["x"])), (12, 6)))
        best = builder.emit(relax.op.topk(rows, k=2, axis=-1, ret_type="both", largest=True, dtype="int64"))
        grown = builder.emit(relax.op.exp(builder.emit(relax.TupleGetItem(best, 0))))
        order = builder.emit(relax.op.argsort(grown, axis=0, dtype="int64"))
        summed = builder.emit(relax.op.cumsum(grown, axis=1))
        places = builder.emit(relax.TupleGetItem(best, 1))
        return relax.Tuple([builder.emit(relax.op.negative(summed)), places, order])

    x = normal(3, 4, 6)
    plan = lower_module(relax_module(make, {"x": x}), device.profile).plan(device.profile)
    kinds = _kinds(plan.steps)
    assert [k for k in kinds if k not in ("Launch", "Copy")] == ["topk", "argsort", "cumsum"]
    path = tmp_path / "m.honed"
    modelfile.write(path, _compiled(plan, {"x": x}, device), plan.constants)
    with Executor(modelfile.read(path), device) as executor:
        found = executor.run({"x": x})
        again = executor.run({"x": x})
    rows = np.tanh(x).reshape(12, 6)
    places = np.argsort(-rows, axis=1, kind="stable")[:, :2]
    grown = np.exp(np.take_along_axis(rows, places, axis=1))
    np.testing.assert_allclose(found["out0"], np.negative(grown.cumsum(axis=1)), rtol=1e-5)
    np.testing.assert_array_equal(found["out1"], places)
    np.testing.assert_array_equal(found["out2"], grown.argsort(axis=0, kind="stable"))
    assert all(np.array_equal(found[name], again[name]) for name in found)
