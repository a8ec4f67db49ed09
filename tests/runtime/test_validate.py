from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.runtime.compiled import plan, validate
from honed.runtime.compiled.model import (
    Buffer,
    CompiledModel,
    Copy,
    FusedGroup,
    HostCall,
    Launch,
    Operator,
    Precondition,
    Probe,
    Proof,
    Tensor,
    View,
)
from honed.runtime.errors import ModelFileError

from .builder import INCREMENT, PROFILE, Builder, add_constant, add_prepared, chain

Change = Callable[[CompiledModel], CompiledModel]


def with_item(field: str, index: int, **changes: Any) -> Change:
    """Replace fields of one buffer, kernel, tensor or step."""

    def change(model: CompiledModel) -> CompiledModel:
        items = list(getattr(model, field))
        items[index] = replace(items[index], **changes)
        whole: dict[str, Any] = {field: tuple(items)}
        return replace(model, **whole)

    return change


def with_arg(kernel: int, arg: int, **changes: Any) -> Change:
    def change(model: CompiledModel) -> CompiledModel:
        args = list(model.kernels[kernel].args)
        args[arg] = replace(args[arg], **changes)
        return with_item("kernels", kernel, args=tuple(args))(model)

    return change


def with_fields(**changes: Any) -> Change:
    return lambda model: replace(model, **changes)


def with_limits(**changes: Any) -> Change:
    limits = replace(PROFILE.limits, **changes)
    return lambda model: replace(model, device=replace(model.device, limits=limits))


def with_steps(*extra: Launch | Copy | HostCall) -> Change:
    return lambda model: replace(model, steps=model.steps + extra)


def with_proof(**changes: Any) -> Change:
    fields: dict[str, Any] = {"inputs": (1,), "outputs": (1,), "tolerance": (0.0,), **changes}
    return lambda model: replace(
        model, proof=Proof(reference="r", probes=(Probe(**fields),), device=None, error=())
    )


# add_constant: buffers 0 input x, 1 constant, 2 scratch, 3 output y; kernels 0 add, 1 increment
BROKEN: dict[str, tuple[Change, str]] = {
    "bad digest": (lambda m: replace(m, source=replace(m.source, sha256="0" * 63)), "sha256"),
    "bad precision": (lambda m: replace(m, source=replace(m.source, precision="fp8")), "precision 'fp8'"),
    "precondition of nothing": (
        with_fields(preconditions=(Precondition(input="z", low=0, high=1, why=""),)),
        "precondition 0 is about 'z', which is no input",
    ),
    "precondition of no value": (
        lambda m: replace(m, preconditions=(Precondition(input=m.inputs[0].name, low=1, high=0, why=""),)),
        "precondition 0 allows no value: 1 to 0",
    ),
    "bad profile": (with_limits(base_align_bytes=96), "base_align_bytes is 96"),
    "no work-items": (with_limits(max_work_group_size=0), "max_work_group_size is 0"),
    "unknown dtype": (with_item("buffers", 2, dtype="float8"), "buffer 2 has the unknown element type"),
    "wrong size": (with_item("buffers", 2, nbytes=31), "says 31 bytes and float32[8] takes 32"),
    "negative dimension": (with_item("buffers", 2, shape=(-2, -4)), "negative dimension"),
    "too many dimensions": (with_item("buffers", 2, shape=(1,) * 33), "33 dimensions"),
    "too large": (with_limits(max_alloc_bytes=16), "allocate at once"),
    "misaligned scratch": (with_item("buffers", 2, offset=64), "offset 64, no multiple of 128"),
    "negative offset": (with_item("buffers", 2, offset=-128), "negative offset"),
    "outside the arena": (with_item("buffers", 2, offset=4096), "outside the scratch arena"),
    "outside the constants": (with_item("buffers", 1, offset=4096), "outside the constant section"),
    "misaligned constant": (with_item("buffers", 1, offset=4), "offset 4, no multiple of 64"),
    "input with an offset": (with_item("buffers", 0, offset=128), "offset 128 instead of 0"),
    "negative arena": (with_fields(arena_bytes=-1), "arena"),
    "negative constants": (with_fields(constant_bytes=-1), "negative size"),
    "overlapping constants": (
        lambda m: replace(m, buffers=(*m.buffers, m.buffers[1])),
        "constants in buffers 1 and 4 overlap",
    ),
    "input without name": (with_item("inputs", 0, name=""), "empty name"),
    "two inputs of a name": (lambda m: replace(m, inputs=m.inputs * 2), "same name"),
    "input in a missing buffer": (with_item("inputs", 0, buffer=9), "buffer 9, which does not exist"),
    "input in a constant": (with_item("inputs", 0, buffer=1), "which is of place constant"),
    "input of another shape": (with_item("inputs", 0, shape=(4, 2)), "shape [4, 2] and its buffer [8]"),
    "input cast from integers": (with_item("inputs", 0, dtype="int32"), "cannot be cast"),
    "output without tensor": (with_fields(outputs=()), "output buffer belongs to no output"),
    "inputs sharing a buffer": (
        lambda m: replace(m, inputs=(m.inputs[0], replace(m.inputs[0], name="z"))),
        "share a buffer",
    ),
    "missing source": (with_item("kernels", 0, source=2), "names source 2"),
    "entry is code": (with_item("kernels", 0, entry="add; }"), "no C identifier"),
    "entry elsewhere": (with_item("kernels", 0, entry="increment"), "declares no __kernel increment"),
    "source with zero": (lambda m: replace(m, sources=("\0", *m.sources[1:])), "zero character"),
    "kernels of one name": (with_item("kernels", 0, name="increment"), "not unique"),
    "block too large": (with_item("kernels", 0, block=(16, 17, 1)), "work-groups of [16, 17, 1]"),
    "block too long": (with_item("kernels", 0, block=(257, 1, 1)), "work-groups of [257, 1, 1]"),
    "empty block": (with_item("kernels", 0, block=(0, 1, 1)), "work-groups of [0, 1, 1]"),
    "empty grid": (with_item("kernels", 0, grid=(0, 1, 1)), "grid of [0, 1, 1]"),
    "grid too large": (with_item("kernels", 0, grid=(2**31, 1, 1)), "grid of [2147483648, 1, 1]"),
    "negative work": (with_item("kernels", 0, flops=-1), "negative work"),
    "argument too large": (with_arg(0, 1, nbytes=36), "needs 36 bytes and buffer 1 has 32"),
    "argument of another dtype": (with_arg(0, 1, dtype="int32"), "is int32 and buffer 1 is float32"),
    "argument missing": (with_item("steps", 0, buffers=(0, 1)), "takes 3 buffers and gets 2"),
    "buffer missing": (with_item("steps", 0, buffers=(0, 1, 4)), "names buffer 4"),
    "buffer before the first": (with_item("steps", 0, buffers=(-4, 1, 2)), "names buffer -4"),
    "kernel missing": (with_item("steps", 0, kernel=2), "names kernel 2"),
    "writes an input": (with_item("steps", 0, buffers=(1, 1, 0)), "writes buffer 0, which is of place input"),
    "writes a constant": (with_item("steps", 0, buffers=(0, 0, 1)), "writes buffer 1"),
    "reads what it writes": (with_item("steps", 1, buffers=(2, 2)), "uses buffer 2 twice"),
    "reads too early": (lambda m: replace(m, steps=m.steps[::-1]), "step 0 reads buffer 2 before"),
    "output unwritten": (lambda m: replace(m, steps=m.steps[:1]), "nothing writes output 'y'"),
    "copies another size": (
        lambda m: with_steps(Copy(source=0, target=2))(with_item("buffers", 2, shape=(9,), nbytes=36)(m)),
        "copies 32 bytes to a buffer of 36",
    ),
    "copies onto itself": (with_steps(Copy(source=2, target=2)), "uses buffer 2 twice"),
    "copies to an input": (with_steps(Copy(source=2, target=0)), "writes buffer 0"),
    "copies from nowhere": (with_steps(Copy(source=7, target=2)), "names buffer 7"),
    "unknown function": (
        with_steps(HostCall(function="sort", inputs=(0,), outputs=(2,), attrs={"axis": 0})),
        "'sort', which does not exist",
    ),
    "probe without output": (with_proof(outputs=()), "0 outputs and the model 1"),
    "probe without tolerance": (with_proof(tolerance=()), "not one tolerance"),
    "negative tolerance": (with_proof(tolerance=(-1.0,)), "tolerance that is negative"),
    "endless tolerance": (with_proof(tolerance=(float("inf"),)), "not finite"),
    "probe in scratch": (with_proof(inputs=(2,)), "buffer 2 is not a constant of the type"),
    "probe nowhere": (with_proof(inputs=(-1,)), "names buffer -1"),
    "proof of more outputs": (
        with_fields(proof=Proof(reference="r", probes=(), device=None, error=(0.0, 0.0))),
        "2 errors",
    ),
}


def with_preparation(*extra: Launch | Copy) -> Change:
    return lambda model: replace(model, prepare=model.prepare + extra)


def with_part(prepare: tuple[int, ...] = (), steps: tuple[int, ...] = ()) -> Change:
    return lambda model: replace(model, parts=(FusedGroup(operators=(), prepare=prepare, steps=steps),))


def with_view(shape: tuple[int, ...], buffer: int) -> Change:
    operator = Operator(name="v", op="Reshape", passes=())
    return lambda model: replace(model, views=(View(operator=operator, shape=shape, buffer=buffer),))


# add_prepared: buffers 0 input x, 1 constant, 2 prepared, 3 scratch, 4 output y; kernels 0 add, 1 increment
BROKEN_PREPARATION: dict[str, tuple[Change, str]] = {
    "misaligned": (with_item("buffers", 2, offset=64), "offset 64, no multiple of 128"),
    "outside": (with_item("buffers", 2, offset=4096), "outside the prepared section of 4096 bytes"),
    "negative section": (with_fields(prepared_bytes=-1), "prepared section of -1 bytes"),
    "endless section": (with_fields(prepared_bytes=1 << 60), "exceeds the device's memory"),
    "overlapping": (
        lambda m: replace(m, buffers=(*m.buffers, m.buffers[2])),
        "prepared values in buffers 2 and 5 overlap",
    ),
    "reads an input": (
        with_item("prepare", 0, buffers=(0, 2)),
        "preparation step 0 reads buffer 0, which is",
    ),
    "reads scratch": (with_item("prepare", 0, buffers=(3, 2)), "reads buffer 3, which is of place scratch"),
    "writes scratch": (with_item("prepare", 0, buffers=(1, 3)), "writes buffer 3, which is of place scratch"),
    "writes an output": (with_item("prepare", 0, buffers=(1, 4)), "writes buffer 4"),
    "writes a constant": (with_preparation(Copy(source=2, target=1)), "preparation step 1 writes buffer 1"),
    "writes what it reads": (with_item("prepare", 0, buffers=(2, 2)), "uses buffer 2 twice"),
    "prepared by none": (with_fields(prepare=()), "step 0 reads buffer 2 before anything was written to it"),
    "written by an inference": (with_steps(Copy(source=0, target=2)), "step 2 writes buffer 2, which is of"),
    "updated by an inference": (with_arg(0, 1, access="readwrite"), "step 0 writes buffer 2"),
    "kernel missing": (with_item("prepare", 0, kernel=2), "preparation step 0 names kernel 2"),
    "buffer missing": (
        with_item("prepare", 0, buffers=(1, 5)),
        "preparation step 0, kernel 'increment' names",
    ),
    "another dtype": (with_arg(1, 0, dtype="int32"), "argument 0 is int32 and buffer 1 is float32"),
    "argument too large": (with_arg(1, 1, nbytes=36), "needs 36 bytes and buffer 2 has 32"),
    "step of a part missing": (with_part(steps=(2,)), "part 0 names step 2, which does not exist"),
    "prepared step of a part missing": (with_part(prepare=(-1,)), "part 0 names preparation step -1"),
    "view of nothing": (with_view((8,), 5), "view 0 names buffer 5, which does not exist"),
    "view of other size": (with_view((3, 3), 0), "view 0 has shape [3, 3] and its buffer [8]"),
    "output in its place": (
        lambda m: with_item("outputs", 0, buffer=2)(with_item("buffers", 4, place="scratch")(m)),
        "which is of place prepared",
    ),
}


@pytest.mark.parametrize("name", BROKEN_PREPARATION)
def test_a_broken_rule_of_preparation_is_named(name: str) -> None:
    change, message = BROKEN_PREPARATION[name]
    with pytest.raises(ModelFileError) as caught:
        validate.check(change(add_prepared().build()))
    assert message in str(caught.value)


def test_preparation_reads_only_what_it_wrote_before() -> None:
    b = add_prepared()
    second = b.prepared("float32", (8,))
    b.prepare.append(Launch(kernel=1, buffers=(2, second)))
    validate.check(b.build())
    b.prepare.reverse()
    with pytest.raises(ModelFileError, match="preparation step 0 reads buffer 2 before"):
        validate.check(b.build())


@given(st.data())
def test_prepared_buffers_agree_with_comparing_every_pair(data: st.DataObject) -> None:
    b = Builder(prepared_bytes=2048)
    touch = b.kernel(
        "__kernel void touch(__global uchar* a) {}", "touch", "w", 0, groups=1, block=1, kind="uint8"
    )
    for _ in range(data.draw(st.integers(2, 5))):
        size, offset = data.draw(st.sampled_from([0, 64, 128, 200])), 128 * data.draw(st.integers(0, 14))
        b.buffers.append(Buffer(dtype="uint8", shape=(size,), place="prepared", offset=offset, nbytes=size))
        b.prepare.append(Launch(kernel=touch, buffers=(len(b.buffers) - 1,)))
    together = any(
        x.nbytes and y.nbytes and min(x.offset + x.nbytes, y.offset + y.nbytes) > max(x.offset, y.offset)
        for x, y in combinations(b.buffers, 2)
    )
    if together:
        with pytest.raises(ModelFileError, match="overlap"):
            validate.check(b.build())
    else:
        validate.check(b.build())


def test_the_examples_keep_every_rule() -> None:
    validate.check(add_prepared().build())
    validate.check(add_constant().build())
    validate.check(chain(50).build())
    validate.check(with_proof()(add_constant().build()))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_named(name: str) -> None:
    change, message = BROKEN[name]
    with pytest.raises(ModelFileError) as caught:
        validate.check(change(add_constant().build()))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "declaration",
    [
        "__kernel void add(",
        "kernel void add (",
        "__kernel __attribute__((reqd_work_group_size(8, 1, 1))) void add(",
        "__kernel void\n__attribute__((reqd_work_group_size(8, 1, 1)))\nadd(",
    ],
)
def test_ways_to_declare_a_kernel(declaration: str) -> None:
    model = add_constant().build()
    source = model.sources[0].replace("__kernel void add(", declaration)
    validate.check(replace(model, sources=(source, model.sources[1])))


@pytest.mark.parametrize("declaration", ["void add(", "__kernel void add2(", "__kernel void f() { add("])
def test_what_declares_no_kernel(declaration: str) -> None:
    model = add_constant().build()
    source = model.sources[0].replace("__kernel void add(", declaration)
    with pytest.raises(ModelFileError, match="declares no"):
        validate.check(replace(model, sources=(source, model.sources[1])))


def test_empty_buffers_need_no_writer() -> None:
    b = add_constant()
    b.output("none", "float32", (0, 3))
    b.copy(b.scratch("float32", (0,)), b.scratch("float32", (0,)))
    validate.check(b.build())


def test_an_input_may_become_an_output_in_place() -> None:
    b = Builder()
    x, y = b.input("x", "float32", (8,)), b.output("y", "float32", (8,))
    b.inputs.append(Tensor(name="past", dtype="float32", shape=(8,), buffer=y))
    b.launch(b.kernel(INCREMENT, "increment", "rw", 32, groups=8, block=1, flops=8, moved=64), x, y)
    validate.check(b.build())
    validate.check(replace(b.build(), steps=()))


def test_a_kernel_may_accumulate_in_its_output() -> None:
    b = chain(1)
    b.kernels[0] = replace(
        b.kernels[0], args=(b.kernels[0].args[0], replace(b.kernels[0].args[1], access="readwrite"))
    )
    validate.check(b.build())


@given(st.data())
def test_sharing_agrees_with_comparing_every_pair(data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 7))
    b = add_constant()
    for _ in range(count):
        index = b.scratch("uint8", (data.draw(st.sampled_from([0, 64, 128, 200, 256])),))
        offset = 128 * data.draw(st.integers(0, 8))
        b.buffers[index] = replace(b.buffers[index], offset=offset)
    extra = list(range(4, 4 + count))
    order = data.draw(st.lists(st.sampled_from(extra), min_size=1, max_size=12))
    # Each step writes one buffer, so that liveness is all that can be wrong.
    kernel = b.kernel(
        "__kernel void touch(__global uchar* a) {}", "touch", "w", 0, groups=1, block=1, kind="uint8"
    )
    for index in order:
        b.launch(kernel, index)
    model = b.build()
    if shares_wrongly(model.buffers, order):
        with pytest.raises(ModelFileError, match="share scratch bytes"):
            plan.check(model)
    else:
        plan.check(model)


def shares_wrongly(buffers: tuple[Buffer, ...], order: list[int]) -> bool:
    for i, j in combinations(sorted(set(order)), 2):
        a, b = buffers[i], buffers[j]
        together = min(a.offset + a.nbytes, b.offset + b.nbytes) > max(a.offset, b.offset)
        at = {k: [n for n, used in enumerate(order) if used == k] for k in (i, j)}
        apart = at[i][-1] < at[j][0] or at[j][-1] < at[i][0]
        if together and not apart and a.nbytes and b.nbytes:
            return True
    return False


def test_a_large_plan_is_checked_fast() -> None:
    model = chain(20_000).build()
    plan.check(model)
    assert np.prod(model.buffers[0].shape) == 8
