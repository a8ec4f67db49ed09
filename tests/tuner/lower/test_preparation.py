"""Plans whose steps on constants only are prepared, by hand and by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.compiled import validate
from honed.runtime.compiled.model import (
    CPU_PART,
    CompiledModel,
    Copy,
    HostCall,
    KernelArg,
    Launch,
    Preparation,
    SourceModel,
    Tensor,
)
from honed.runtime.compiled.plan import uses
from honed.tuner.lower.plan import Plan, plan
from honed.tuner.lower.program import (
    Function,
    FunctionCall,
    HostFunctionCall,
    KernelLaunch,
    MemoryValue,
    Program,
)
from tests.runtime.builder import PROFILE

ROOM = 1 << 28  # bytes
ALIGNMENT = 128
ACCESS = {"r": "read", "w": "write", "x": "readwrite"}


def function(name: str, inner: tuple[int, ...], *launches: dict[int, str]) -> Function:
    """`inner` are sizes in floats, each launch the access (r, w or x) to memory by its number."""
    return Function(
        name=name,
        task="t",
        schedule="by hand",
        source="\n".join(f"__kernel void {name}_{n}() {{}}" for n in range(len(launches))),
        inner=tuple(MemoryValue(dtype="float32", shape=(size,)) for size in inner),
        launches=tuple(
            KernelLaunch(
                entry=f"{name}_{n}",
                args=tuple(launch),
                arg_types=tuple(
                    KernelArg(dtype="float32", nbytes=0, access=ACCESS[a])  # type: ignore[arg-type]
                    for a in launch.values()
                ),
                grid=(1, 1, 1),
                block=(1, 1, 1),
                flops=0,
                bytes=0,
            )
            for n, launch in enumerate(launches)
        ),
    )


def program(
    calls: Sequence[FunctionCall | HostFunctionCall], outputs: tuple[int, ...], *sizes: int
) -> Program:
    """Value 0 is an input of 8 floats; `sizes` are of the others, in floats, negative for constants."""
    values = [MemoryValue(dtype="float32", shape=(8,))]
    for size in sizes:
        constant = np.zeros(-size, np.float32) if size < 0 else None
        values.append(MemoryValue(dtype="float32", shape=(abs(size),), constant=constant))
    return Program(
        values=tuple(values),
        inputs=(0,),
        outputs=outputs,
        output_shapes=tuple(values[v].shape for v in outputs),
        calls=tuple(calls),
    )


def compiled(made: Plan) -> CompiledModel:
    """A whole model with the plan in it."""

    def tensors(buffers: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(name=f"t{n}", dtype="float32", shape=made.buffers[b].shape, buffer=b)
            for n, b in enumerate(buffers)
        )

    return CompiledModel(
        source=SourceModel(
            sha256="0" * 64, filename="made", producer="", opset=17, precision="fp32", notes=()
        ),
        compiler={},
        device=PROFILE,
        inputs=tensors(made.input_buffers),
        outputs=tensors(made.output_buffers),
        buffers=made.buffers,
        arena_bytes=made.arena_bytes,
        constant_bytes=made.constant_bytes,
        sources=made.sources,
        kernels=made.kernels,
        steps=made.steps,
        proof=None,
        prepare=made.prepare,
        prepared_bytes=made.prepared_bytes,
    )


def kernels(made: Plan, steps: tuple[object, ...]) -> list[str]:
    return [made.kernels[step.kernel].name for step in steps if isinstance(step, Launch)]


PACKED = function("conv", (64,), {1: "r", 3: "w"}, {0: "r", 3: "r", 2: "w"})
CALL = FunctionCall(function="conv", inputs=(0, 1), outputs=(2,))


def test_packed_weights_are_prepared() -> None:
    made = plan(program([CALL], (2,), -64, 8), {"conv": PACKED}, ALIGNMENT, ROOM)
    assert kernels(made, made.prepare) == ["conv.0"]
    assert kernels(made, made.steps) == ["conv.1"]
    assert [b.place for b in made.buffers] == ["input", "output", "constant", "prepared"]
    assert (made.prepared_bytes, made.arena_bytes) == (256, 0)
    validate.check(compiled(made))


def test_dynamic_weights_are_packed_in_each_inference() -> None:
    made = plan(program([replace(CALL, inputs=(0, 0))], (2,), -64, 8), {"conv": PACKED}, ALIGNMENT, ROOM)
    assert made.prepare == ()
    assert kernels(made, made.steps) == ["conv.0", "conv.1"]
    assert (made.prepared_bytes, made.arena_bytes) == (0, 256)


def test_what_is_written_again_once_it_was_read_is_not_prepared() -> None:
    """Were it, the last value would stand there from the first inference on."""
    func = function(
        "conv",
        (8,),
        {1: "r", 3: "w"},
        {0: "r", 3: "r", 2: "w"},
        {1: "r", 3: "w"},
        {0: "r", 3: "r", 2: "x"},
    )
    made = plan(program([CALL], (2,), -64, 8), {"conv": func}, ALIGNMENT, ROOM)
    assert made.prepare == ()
    assert kernels(made, made.steps) == [f"conv.{n}" for n in range(4)]


def test_one_function_with_constant_and_with_dynamic_weights() -> None:
    calls = [CALL, FunctionCall(function="conv", inputs=(2, 0), outputs=(3,))]
    made = plan(program(calls, (3,), -64, 8, 8), {"conv": PACKED}, ALIGNMENT, ROOM)
    assert kernels(made, made.prepare) == ["conv.0"]
    assert kernels(made, made.steps) == ["conv.1", "conv.0", "conv.1"]
    validate.check(compiled(made))


def test_a_chain_on_constants_is_prepared_whole() -> None:
    chain = function("f", (8, 8), {0: "r", 2: "w"}, {2: "r", 3: "w"}, {3: "r", 0: "r", 1: "w"})
    last = FunctionCall(function="g", inputs=(2, 0), outputs=(3,))
    calls = [FunctionCall(function="f", inputs=(1,), outputs=(2,)), last]
    functions = {"f": chain, "g": function("g", (), {0: "r", 1: "r", 2: "w"})}
    made = plan(program(calls, (3,), -8, 8, 8), functions, ALIGNMENT, ROOM)
    assert kernels(made, made.prepare) == ["f.0", "f.1", "f.2"]
    assert kernels(made, made.steps) == ["g"]
    validate.check(compiled(made))


@pytest.mark.parametrize(
    ("constant", "grown", "prepared"),
    [(1, 4096, True), (1, 4097, False), (4096, 8192, True), (4096, 8193, False)],
)
def test_what_grows_stays_in_the_steps(constant: int, grown: int, prepared: bool) -> None:
    broadcast = function("conv", (grown,), {1: "r", 3: "w"}, {0: "r", 3: "r", 2: "w"})
    made = plan(program([CALL], (2,), -constant, 8), {"conv": broadcast}, ALIGNMENT, ROOM)
    assert kernels(made, made.prepare) == ["conv.0"] * prepared


def test_growth_is_counted_from_the_constants() -> None:
    doubling = function("f", (8192,), {0: "r", 2: "w"}, {2: "r", 1: "w"})
    last = FunctionCall(function="g", inputs=(2, 0), outputs=(3,))
    calls = [FunctionCall(function="f", inputs=(1,), outputs=(2,)), last]
    functions = {"f": doubling, "g": function("g", (), {0: "r", 1: "r", 2: "w"})}
    made = plan(program(calls, (3,), -4096, 16384, 8), functions, ALIGNMENT, ROOM)
    assert kernels(made, made.prepare) == ["f.0"]


def test_all_that_is_prepared_can_be_allocated_at_once() -> None:
    calls = [CALL, replace(CALL, outputs=(3,))]
    made = plan(program(calls, (2, 3), -72, 8, 8), {"conv": PACKED}, ALIGNMENT, 511)
    assert kernels(made, made.prepare) == ["conv.0"]
    assert made.prepared_bytes == 256
    assert len(plan(program(calls, (2, 3), -72, 8, 8), {"conv": PACKED}, ALIGNMENT, 512).prepare) == 2


def test_an_output_of_constants_is_written_in_each_inference() -> None:
    only = function("f", (), {0: "r", 1: "w"})
    calls = [FunctionCall(function="f", inputs=(1,), outputs=(2,))]
    made = plan(program(calls, (2,), -8, 8), {"f": only}, ALIGNMENT, ROOM)
    assert (made.prepare, kernels(made, made.steps)) == ((), ["f"])


def test_what_a_later_launch_updates_is_not_prepared() -> None:
    """The sum is begun from a constant and goes on in place: each inference must begin it anew."""
    added = function("f", (8,), {1: "r", 3: "w"}, {0: "r", 3: "x"}, {3: "r", 2: "w"})
    calls = [FunctionCall(function="f", inputs=(0, 1), outputs=(2,))]
    made = plan(program(calls, (2,), -8, 8), {"f": added}, ALIGNMENT, ROOM)
    assert (made.prepare, len(made.steps)) == ((), 3)


def test_parts_stay_and_their_reshaped_constants_do_not() -> None:
    calls: list[FunctionCall | HostFunctionCall] = [
        HostFunctionCall(
            function=CPU_PART,
            inputs=(1,),
            input_shapes=((4, 2),),
            outputs=(2,),
            attrs={"part": 0, "wanted": (0,)},
        )
    ]
    made = plan(program(calls, (2,), -8, 8), {}, ALIGNMENT, ROOM)
    assert [type(step) for step in made.prepare] == [Copy]
    assert [type(step) for step in made.steps] == [HostCall]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, dict[str, Function]]:
    """Calls of functions of several launches on constants, inputs and what others wrote."""
    sizes = st.sampled_from([1, 8, 5000])
    values = [-draw(sizes) for _ in range(draw(st.integers(1, 3)))]
    calls: list[FunctionCall | HostFunctionCall] = []
    functions = {}
    for n in range(draw(st.integers(1, 5))):
        inputs = draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=3, unique=True))
        inner = tuple(draw(st.lists(sizes, max_size=2)))
        output = len(inputs)
        places = [*range(output + 1, output + 1 + len(inner)), output]
        known, launches = list(range(output)), []
        for target in [*draw(st.lists(st.sampled_from(places), max_size=4)), *places]:
            read = draw(st.lists(st.sampled_from([k for k in known if k != target]), max_size=2, unique=True))
            again = target in known and draw(st.booleans())
            launches.append({**dict.fromkeys(read, "r"), target: "x" if again else "w"})
            known = [*dict.fromkeys([*known, target])]
        values.append(draw(sizes))
        functions[f"f{n}"] = function(f"f{n}", inner, *launches)
        calls.append(FunctionCall(function=f"f{n}", inputs=tuple(inputs), outputs=(len(values),)))
    made = st.integers(0, len(values))
    return program(calls, tuple(draw(st.lists(made, min_size=1, max_size=3))), *values), functions


def outcome(made: Plan, preparation: tuple[Preparation, ...], runs: int) -> list[object]:
    """What the outputs depend on after so many inferences, as nested tuples, each of another input."""
    held: dict[int, object] = {b: f"constant {b}" for b in made.constants}

    def run(step: object) -> None:
        assert not isinstance(step, HostCall)
        found = list(uses(made.kernels, step))  # type: ignore[arg-type]
        what = tuple(held[use.buffer] for use in found if not use.writes)
        updated = getattr(step, "kernel", None)
        for n, use in enumerate(found):
            if use.writes:
                access = "read" if updated is None else made.kernels[updated].args[n].access
                before = held.get(use.buffer) if access == "readwrite" else None
                held[use.buffer] = hash((updated, n, what, before))

    for prepared in preparation:
        run(prepared)
    for n in range(runs):
        held.update({b: f"input {b} of run {n}" for b in made.input_buffers})
        for step in made.steps:
            run(step)
    return [held[b] for b in made.output_buffers]


@given(programs(), st.sampled_from([0, 512, ROOM]))
def test_prepared_plans_keep_all_rules_and_give_the_same_answers(
    drawn: tuple[Program, dict[str, Function]], room: int
) -> None:
    made, plain = (plan(*drawn, ALIGNMENT, most) for most in (room, 0))
    validate.check(compiled(made))
    assert plain.prepare == ()
    assert made.prepared_bytes <= room
    order = [*made.prepare, *made.steps]
    assert len(order) == len(plain.steps)
    for runs in (1, 2):
        assert outcome(made, made.prepare, runs) == outcome(plain, (), runs)
