"""The storage plan and the steps, on programs made by hand and by hypothesis."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.compiled.model import CPU_PART, Copy, HostCall, KernelArg, Launch
from honed.tuner.lower.plan import Lifetime, place, plan
from honed.tuner.lower.program import (
    Function,
    FunctionCall,
    HostFunctionCall,
    KernelLaunch,
    MemoryValue,
    Program,
)

ROOM = 1 << 28  # bytes

lifetimes = st.builds(
    lambda nbytes, first, length: Lifetime(nbytes, first, first + length),
    st.integers(0, 5000),
    st.integers(0, 30),
    st.integers(0, 12),
)


@given(st.lists(lifetimes, max_size=40), st.sampled_from([1, 64, 128, 4096]))
def test_buffers_alive_together_never_share_memory(spans: list[Lifetime], alignment: int) -> None:
    offsets, arena = place(spans, alignment)
    for i, mine in enumerate(spans):
        assert offsets[i] % alignment == 0
        assert offsets[i] + mine.nbytes <= arena
        for j in range(i):
            other = spans[j]
            together = mine.first <= other.last and other.first <= mine.last
            apart = offsets[i] + mine.nbytes <= offsets[j] or offsets[j] + other.nbytes <= offsets[i]
            assert apart or not together or 0 in (mine.nbytes, other.nbytes)


@given(st.lists(lifetimes, max_size=40))
def test_buffers_that_share_memory_begin_together(spans: list[Lifetime]) -> None:
    offsets, _ = place(spans, 64)
    ends: dict[int, int] = {}
    for offset, span in zip(offsets, spans, strict=True):
        ends[offset] = max(ends.get(offset, 0), offset + span.nbytes)
    starts = sorted(ends)
    assert all(ends[one] <= other for one, other in itertools.pairwise(starts))


@given(st.lists(lifetimes, max_size=40))
def test_arena_is_no_larger_than_keeping_everything(spans: list[Lifetime]) -> None:
    _, arena = place(spans, 64)
    assert arena <= sum(-(-s.nbytes // 64) * 64 for s in spans)


def test_a_chain_needs_two_buffers() -> None:
    spans = [Lifetime(1024, n, n + 1) for n in range(10)]
    _, arena = place(spans, 64)
    assert arena == 2048


def _function(name: str, inputs: int, launches: int = 1, inner: int = 0) -> Function:
    arg = KernelArg(dtype="float32", nbytes=16, access="readwrite")
    parameters = inputs + 1
    return Function(
        name=name,
        task="t",
        schedule="fallback",
        source=f"__kernel void {name}_kernel() {{}}",
        inner=(MemoryValue(dtype="float32", shape=(4,)),) * inner,
        launches=tuple(
            KernelLaunch(
                entry=f"{name}_kernel",
                args=tuple(range(parameters + inner)),
                arg_types=(arg,) * (parameters + inner),
                grid=(1, 1, 1),
                block=(4, 1, 1),
                flops=4,
                bytes=32,
            )
            for _ in range(launches)
        ),
    )


def _program(values: int, calls: list[FunctionCall | HostFunctionCall], outputs: list[int]) -> Program:
    return Program(
        values=tuple(MemoryValue(dtype="float32", shape=(4,)) for _ in range(values)),
        inputs=(0,),
        outputs=tuple(outputs),
        output_shapes=tuple((2, 2) for _ in outputs),
        calls=tuple(calls),
    )


def test_an_input_that_is_an_output_is_copied() -> None:
    made = plan(_program(1, [], [0]), {}, 64, ROOM)
    assert made.steps == (Copy(source=made.input_buffers[0], target=made.output_buffers[0]),)


def test_an_output_that_keeps_an_input_has_its_buffer() -> None:
    calls = [FunctionCall(function="f", inputs=(0,), outputs=(1,), keeps=(0,))]
    made = plan(_program(2, calls, [1, 1]), {"f": _function("f", 1)}, 64, ROOM)
    assert made.input_buffers == made.output_buffers[:1]
    assert made.buffers[made.input_buffers[0]].place == "output"
    assert isinstance(made.steps[1], Copy)
    assert len(made.buffers) == 2


def test_a_value_under_two_output_names_is_computed_once_and_copied() -> None:
    calls = [FunctionCall(function="f", inputs=(0,), outputs=(1,))]
    made = plan(_program(2, calls, [1, 1]), {"f": _function("f", 1)}, 64, ROOM)
    first, second = made.output_buffers
    assert [type(s) for s in made.steps] == [Launch, Copy]
    assert made.steps[1] == Copy(source=first, target=second)


def test_a_constant_that_is_an_output_is_copied() -> None:
    program = Program(
        values=(MemoryValue(dtype="float32", shape=(4,), constant=np.arange(4, dtype=np.float32)),),
        inputs=(),
        outputs=(0,),
        output_shapes=((4,),),
        calls=(),
    )
    made = plan(program, {}, 64, ROOM)
    (copy,) = made.steps
    assert isinstance(copy, Copy)
    assert made.buffers[copy.source].place == "constant"
    np.testing.assert_array_equal(made.constants[copy.source], np.arange(4, dtype=np.float32))


def test_a_function_called_twice_is_one_kernel_of_one_source() -> None:
    calls = [
        FunctionCall(function="f", inputs=(0,), outputs=(1,)),
        FunctionCall(function="f", inputs=(1,), outputs=(2,)),
    ]
    made = plan(_program(3, calls, [2]), {"f": _function("f", 1)}, 64, ROOM)
    assert len(made.kernels) == len(made.sources) == 1
    assert [s.kernel for s in made.steps if isinstance(s, Launch)] == [0, 0]


def test_several_launches_share_their_inner_buffers_and_source() -> None:
    calls = [FunctionCall(function="f", inputs=(0,), outputs=(1,))]
    made = plan(_program(2, calls, [1]), {"f": _function("f", 1, launches=2, inner=1)}, 64, ROOM)
    one, two = (s for s in made.steps if isinstance(s, Launch))
    assert one.buffers == two.buffers
    assert [k.name for k in made.kernels] == ["f.0", "f.1"]
    assert len(made.sources) == 1
    assert made.buffers[one.buffers[-1]].place == "scratch"


def test_a_part_sees_the_shape_it_asked_for() -> None:
    calls: list[FunctionCall | HostFunctionCall] = [
        HostFunctionCall(function=CPU_PART, inputs=(0,), input_shapes=((2, 2),), outputs=(1,), attrs={})
    ]
    made = plan(_program(2, calls, [1]), {}, 64, ROOM)
    copy, call = made.steps
    assert isinstance(copy, Copy)
    assert isinstance(call, HostCall)
    assert call.inputs == (copy.target,)
    assert made.buffers[copy.target].shape == (2, 2)


def test_extra_arrays_are_the_last_constants_and_page_aligned() -> None:
    extra = [np.zeros(3, np.int64), np.ones((2, 2), bool)]
    made = plan(_program(1, [], [0]), {}, 64, ROOM, extra)
    last = sorted(made.constants)[-2:]
    assert [made.constants[i].dtype for i in last] == [np.int64, np.bool_]
    assert all(made.buffers[i].offset % 4096 == 0 for i in last)


@pytest.mark.parametrize("alignment", [64, 128, 512])
def test_the_arena_is_a_multiple_of_the_alignment(alignment: int) -> None:
    calls = [
        FunctionCall(function="f", inputs=(0,), outputs=(1,)),
        FunctionCall(function="f", inputs=(1,), outputs=(2,)),
    ]
    made = plan(_program(3, calls, [2]), {"f": _function("f", 1)}, alignment, ROOM)
    assert made.arena_bytes == alignment
