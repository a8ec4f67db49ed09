"""From Relax to steps: parts between launches, reshapes without work, constants, and what runs of it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from tvm import relax

from honed.runtime.compiled import model
from honed.runtime.compiled.model import CPU_PART, Copy, HostCall, Launch, Step
from honed.runtime.errors import ModelRefused
from honed.tuner.lower.functions.legalize import legalize
from honed.tuner.lower.module import lower_module, read_program
from honed.tuner.lower.plan import Plan
from honed.tuner.lower.program import FunctionCall, HostFunctionCall
from tests.runtime.builder import PROFILE

from .lowering import Make, normal, relax_module

pytestmark = pytest.mark.tvm


def _plan(make: Make, inputs: Mapping[str, np.ndarray]) -> Plan:
    return lower_module(relax_module(make, inputs), PROFILE).plan(PROFILE)


def _kinds(steps: tuple[Step, ...]) -> list[str]:
    return [step.function if isinstance(step, HostCall) else type(step).__name__ for step in steps]


def _part(value: relax.Var) -> relax.Call:
    """What the first output of part 3 is to Relax, of the type of what it is given."""
    return relax.call_dps_packed(model.part_symbol(3, 0), relax.Tuple([value]), value.ty)


def _between(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
    first = builder.emit(relax.op.tanh(v["x"]))
    return relax.op.add(builder.emit(_part(first)), first)


def test_a_part_stands_between_its_launches() -> None:
    plan = _plan(_between, {"x": normal(4, 8)})
    assert _kinds(plan.steps) == ["Launch", CPU_PART, "Launch"]
    before, call, after = plan.steps
    assert isinstance(before, Launch)
    assert isinstance(call, HostCall)
    assert isinstance(after, Launch)
    assert call.attrs == {"part": 3, "wanted": (0,)}
    assert call.inputs[0] in before.buffers
    assert set(after.buffers) >= {*call.inputs, *call.outputs}
    one, other = (plan.buffers[b] for b in (*call.inputs, *call.outputs))
    assert one.place == other.place == "scratch"
    assert abs(one.offset - other.offset) >= one.nbytes  # both are alive in the last launch


def test_a_part_after_a_reshape_sees_the_new_shape() -> None:
    def make(builder: relax.BlockBuilder, v: Mapping[str, relax.Var]) -> relax.Expr:
        flat = builder.emit(relax.op.reshape(v["x"], (32,)))
        return relax.op.tanh(builder.emit(_part(flat)))

    plan = _plan(make, {"x": normal(4, 8)})
    assert _kinds(plan.steps) == ["Copy", CPU_PART, "Launch"]
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
        return relax.op.tanh(builder.emit(_part(v["x"])))

    values = relax_module(make, {"x": normal(4, 8)})
    read = read_program(legalize(values, PROFILE)[0])
    assert [type(call) for call in read.calls] == [HostFunctionCall, FunctionCall]
    opaque = relax_module(lambda _, v: relax.op.unique(v["x"], sorted=True), {"x": normal(4)})
    with pytest.raises(ModelRefused):
        read_program(legalize(opaque, PROFILE)[0])


def test_values_of_one_name_are_not_confused() -> None:
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        one = relax.Var("same", relax.TensorType((4,), "float32"))
        two = relax.Var("same", relax.TensorType((4,), "float32"))
        builder.emit_normalized(relax.VarBinding(one, builder.normalize(_part(x))))
        builder.emit_normalized(relax.VarBinding(two, builder.normalize(_part(one))))
        builder.emit_func_output(relax.Tuple([one, two]))
    read = read_program(legalize(builder.get(), PROFILE)[0])
    assert len(set(read.outputs)) == 2
