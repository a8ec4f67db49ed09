"""Calls that only copy are left out where values can lie in place; random programs give the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.compiled import validate
from honed.runtime.compiled.model import CompiledModel, Copy, KernelArg, Launch, Tensor
from honed.tuner.lower.plan import Plan, plan
from honed.tuner.lower.program import (
    Function,
    FunctionCall,
    KernelLaunch,
    MemoryValue,
    Program,
    Within,
    move_in_place,
)
from tests.runtime.builder import PROFILE, Builder

ALIGN = PROFILE.limits.base_align_bytes
ROOM = 1 << 20
UNIT = ALIGN // 2  # bytes of the smallest value: some ends are no multiples of the alignment
Bytes = np.ndarray


@dataclass
class _Model:
    """A program of bytes that grows call by call, and what each call does."""

    values: list[MemoryValue] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    calls: list[FunctionCall] = field(default_factory=list)

    def value(self, nbytes: int, constant: Bytes | None = None) -> int:
        self.values.append(MemoryValue(dtype="uint8", shape=(nbytes,), constant=constant))
        return len(self.values) - 1

    def input(self, units: int) -> int:
        self.inputs.append(self.value(units * UNIT))
        return self.inputs[-1]

    def constant(self, units: int) -> int:
        rng = np.random.default_rng(len(self.values))
        return self.value(units * UNIT, rng.integers(0, 256, units * UNIT, np.uint8))

    def compute(self, inputs: Sequence[int], units: int) -> int:
        return self._call(inputs, units * UNIT)

    def join(self, *parts: int) -> int:
        sizes = [self.values[v].nbytes for v in parts]
        whole = len(self.values)
        moves = tuple(Within(v, whole, sum(sizes[:n])) for n, v in enumerate(parts))
        return self._call(parts, sum(sizes), moves)

    def cut(self, source: int, start: int, units: int) -> int:
        return self._call([source], units * UNIT, (Within(len(self.values), source, start * UNIT),))

    def program(self, *outputs: int) -> Program:
        return Program(
            values=tuple(self.values),
            inputs=tuple(self.inputs),
            outputs=outputs,
            output_shapes=tuple(self.values[v].shape for v in outputs),
            calls=tuple(self.calls),
        )

    def _call(self, inputs: Sequence[int], nbytes: int, moves: tuple[Within, ...] = ()) -> int:
        result = self.value(nbytes)
        name = f"c{len(self.calls)}"
        self.calls.append(
            FunctionCall(
                function=name, inputs=tuple(inputs), outputs=(result,), operators=(name,), moves=moves
            )
        )
        return result


def _function(call: FunctionCall, program: Program) -> Function:
    values = [program.values[v] for v in (*call.inputs, *call.outputs)]
    access = ["read"] * len(call.inputs) + ["write"]
    launch = KernelLaunch(
        entry=call.function,
        args=tuple(range(len(values))),
        arg_types=tuple(
            KernelArg(dtype=v.dtype, nbytes=v.nbytes, access=a)  # type: ignore[arg-type]
            for v, a in zip(values, access, strict=True)
        ),
        grid=(1, 1, 1),
        block=(1, 1, 1),
        flops=0,
        bytes=0,
    )
    source = f"__kernel void {call.function}() {{}}"
    return Function(
        name=call.function,
        task=call.function,
        schedule="by hand",
        source=source,
        inner=(),
        launches=(launch,),
    )


def _done(call: FunctionCall, given: Sequence[Bytes], nbytes: int) -> Bytes:
    """What a call computes, byte by byte of all it is given."""
    if call.moves and call.moves[0].outer == call.outputs[0]:
        return np.concatenate(given)
    if call.moves:
        return given[0][call.moves[0].offset :][:nbytes].copy()
    seed = [int(call.function[1:]), *(int.from_bytes(one.tobytes()[:4096], "little") for one in given)]
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def _expected(program: Program, inputs: Sequence[Bytes]) -> list[Bytes]:
    """The outputs as the program says, each value in memory of its own."""
    known = {v: value.constant for v, value in enumerate(program.values) if value.constant is not None}
    known |= dict(zip(program.inputs, inputs, strict=True))
    for call in program.calls:
        (result,) = call.outputs
        known[result] = _done(call, [known[v] for v in call.inputs], program.values[result].nbytes)
    return [known[v] for v in program.outputs]


def _compiled(made: Plan, program: Program) -> CompiledModel:
    def tensors(kind: str, buffers: Sequence[int]) -> tuple[Tensor, ...]:
        shapes = [made.buffers[b].shape for b in buffers]
        return tuple(
            Tensor(name=f"{kind}{n}", dtype="uint8", shape=shape, buffer=b)
            for n, (b, shape) in enumerate(zip(buffers, shapes, strict=True))
        )

    return replace(
        Builder().build(),
        inputs=tensors("x", made.input_buffers),
        outputs=tensors("y", made.output_buffers),
        buffers=made.buffers,
        arena_bytes=made.arena_bytes,
        prepared_bytes=made.prepared_bytes,
        constant_bytes=made.constant_bytes,
        sources=made.sources,
        kernels=made.kernels,
        prepare=made.prepare,
        steps=made.steps,
    )


def _ran(made: Plan, calls: Sequence[FunctionCall], inputs: Sequence[Bytes]) -> list[Bytes]:
    """The outputs as the plan says, in memory that was full of something else."""
    sizes = {"scratch": made.arena_bytes, "prepared": made.prepared_bytes}
    section = {name: np.full(nbytes, 0xA5, np.uint8) for name, nbytes in sizes.items()}
    memory: list[Bytes] = []
    for n, b in enumerate(made.buffers):
        if b.within is not None:
            memory.append(np.empty(0, np.uint8))  # below
        elif b.place in section:
            memory.append(section[b.place][b.offset : b.offset + b.nbytes])
        else:
            constant = made.constants.get(n)
            memory.append(np.full(b.nbytes, 0xA5, np.uint8) if constant is None else constant.copy())
    for n, b in enumerate(made.buffers):
        if b.within is not None:
            memory[n] = memory[b.within][b.offset : b.offset + b.nbytes]
    for index, value in zip(made.input_buffers, inputs, strict=True):
        memory[index][:] = value
    named = {call.function: call for call in calls}
    for step in (*made.prepare, *made.steps):
        if isinstance(step, Copy):
            memory[step.target][:] = memory[step.source]
            continue
        assert isinstance(step, Launch)
        *given, result = step.buffers
        call = named[made.kernels[step.kernel].name]
        memory[result][:] = _done(call, [memory[b].copy() for b in given], memory[result].size)
    return [memory[b] for b in made.output_buffers]


def _planned(program: Program) -> Plan:
    functions = {call.function: _function(call, program) for call in program.calls}  # type: ignore[arg-type]
    made = plan(program, functions, ALIGN, ROOM)
    validate.check(_compiled(made, program))
    return made


@given(st.data())
def test_random_programs_give_the_same_answers(data: st.DataObject) -> None:
    model = _Model()
    for _ in range(data.draw(st.integers(1, 2))):
        model.input(data.draw(st.integers(1, 6)))
    model.constant(data.draw(st.integers(1, 4)))
    for _ in range(data.draw(st.integers(1, 12))):
        some = st.integers(0, len(model.values) - 1)
        kind = data.draw(st.sampled_from(["compute", "compute", "join", "again", "cut"]))
        if kind == "compute":
            given_to = data.draw(st.lists(some, min_size=1, max_size=3))
            model.compute(given_to, data.draw(st.integers(1, 6)))
        elif kind == "join":
            model.join(*data.draw(st.lists(some, min_size=1, max_size=4)))
        elif kind == "again":
            joins = [call.inputs for call in model.calls if call.moves] or [(0,)]
            before = data.draw(st.sampled_from(joins))
            model.join(*before[: data.draw(st.integers(1, len(before)))], data.draw(some))
        else:
            source = data.draw(some)
            units = model.values[source].nbytes // UNIT
            start = data.draw(st.integers(0, units - 1))
            model.cut(source, start, data.draw(st.integers(1, units - start)))
    made_by_calls = st.integers(0, len(model.values) - 1)
    outputs = data.draw(st.lists(made_by_calls, min_size=1, max_size=3))
    program = model.program(*outputs)
    moved = move_in_place(program, ALIGN)
    assert len(moved.calls) + len(moved.views) == len(program.calls)
    inputs = [
        np.random.default_rng(n).integers(0, 256, model.values[v].nbytes, np.uint8)
        for n, v in enumerate(model.inputs)
    ]
    wanted = _expected(program, inputs)
    for one in (program, moved):
        for got, want in zip(_ran(_planned(one), model.calls, inputs), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


def _left(model: _Model, *outputs: int) -> list[str]:
    """The calls that are left of a program."""
    program = move_in_place(model.program(*outputs), ALIGN)
    _planned(program)
    return [call.function for call in program.calls]


def test_parts_are_written_into_place() -> None:
    model = _Model()
    x = model.input(2)
    whole = model.join(model.compute([x], 2), model.compute([x], 4))
    y = model.compute([whole], 2)
    program = move_in_place(model.program(y), ALIGN)
    assert [call.function for call in program.calls] == ["c0", "c1", "c3"]
    assert [(view.operator, view.value) for view in program.views] == [("c2", whole)]
    made = _planned(program)
    assert made.arena_bytes == 3 * ALIGN
    parts = [b for b in made.buffers if b.within is not None]
    assert [(b.offset, b.nbytes) for b in parts] == [(0, ALIGN), (ALIGN, 2 * ALIGN)]


def test_joins_of_joins_are_one_block() -> None:
    model = _Model()
    last = model.compute([model.input(2)], 2)
    for _ in range(5):
        last = model.join(last, model.compute([last], 2))
    y = model.compute([last], 2)
    assert _left(model, y) == ["c0", "c1", "c3", "c5", "c7", "c9", "c11"]


def test_what_is_joined_again_with_more_lies_in_that() -> None:
    model = _Model()
    x = model.input(2)
    parts = [model.compute([x], 2) for _ in range(4)]
    joined = [model.join(*parts[:n]) for n in (2, 3, 4)]
    y = model.compute(joined, 2)
    assert _left(model, y) == ["c0", "c1", "c2", "c3", "c7"]


def test_halves_of_a_value_are_joined_with_what_is_made_of_one() -> None:
    model = _Model()
    both = model.compute([model.input(4)], 4)
    halves = [model.cut(both, n, 2) for n in (0, 2)]
    y = model.compute([model.join(*halves, model.compute([halves[1]], 2))], 2)
    assert _left(model, y) == ["c0", "c3", "c5"]


def test_slices_lie_in_inputs_and_results_in_outputs() -> None:
    model = _Model()
    x = model.input(6)
    one, two = model.compute([model.cut(x, 2, 4)], 2), model.compute([model.cut(x, 0, 2)], 2)
    assert _left(model, model.join(one, two)) == ["c1", "c3"]


def _twice(model: _Model) -> int:
    part = model.compute([model.input(2)], 2)
    return model.join(part, part)


def _swapped(model: _Model) -> int:
    x = model.input(2)
    one, two = model.compute([x], 2), model.compute([x], 2)
    return model.compute([model.join(one, two), model.compute([model.cut(model.join(two, one), 0, 1)], 1)], 1)


def _of_an_input(model: _Model) -> int:
    x = model.input(2)
    return model.join(x, model.compute([x], 2))


def _of_a_constant(model: _Model) -> int:
    return model.join(model.compute([model.input(2)], 2), model.compute([model.constant(2)], 2))


def _of_odd_sizes(model: _Model) -> int:
    x = model.input(2)
    return model.join(model.compute([x], 1), model.compute([x], 2))


@pytest.mark.parametrize("make", [_twice, _of_an_input, _of_a_constant, _of_odd_sizes])
def test_what_cannot_lie_in_place_is_copied(make: object) -> None:
    model = _Model()
    y = make(model)  # type: ignore[operator]
    assert _left(model, y)[-1] == model.calls[-1].function


def test_of_two_orders_one_is_copied() -> None:
    model = _Model()
    y = _swapped(model)
    assert _left(model, y) == ["c0", "c1", "c3", "c5", "c6"]


def test_two_values_are_not_put_in_one_place() -> None:
    model = _Model()
    x = model.input(2)
    first, *others = (model.compute([x], 2) for _ in range(4))
    one, two = model.join(first, *others[:2]), model.join(first, others[2])
    y = model.compute([one, two], 2)
    assert _left(model, y) == ["c0", "c1", "c2", "c3", "c5", "c6"]


def test_parts_that_are_outputs_have_memory_of_their_own() -> None:
    model = _Model()
    x = model.input(2)
    part = model.compute([x], 2)
    y = model.compute([model.join(part, model.compute([x], 2))], 2)
    assert _left(model, part, y) == ["c0", "c1", "c2", "c3"]
    assert _left(model, y) == ["c0", "c1", "c3"]
