"""Each access of a kernel is shown to lie inside its buffer, is made behind a branch, or is refused."""

from __future__ import annotations

import re

import pytest
import tvm.script
from tvm import te, tirx

from honed.machine.devices import Device
from honed.tuner.lower.functions.layouts import blocking
from honed.tuner.lower.opencl import LoweringFailed, lower_function
from honed.tuner.lower.printer.bounds import OutOfBounds, bound_accesses
from honed.tuner.lower.printer.kernel import source_of
from honed.tuner.lower.target import target_for
from tests.tuner.search.search_functions import imagined

pytestmark = pytest.mark.tvm

_HEAD = """
# from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def k(a_ptr: T.handle("float32", "global"), i_ptr: T.handle("int32", "global"),
      b_ptr: T.handle("float32", "global")):
    T.func_attr({"tirx.noalias": True})
    a = T.decl_buffer((52,), data=a_ptr)
    i = T.decl_buffer((64,), "int32", data=i_ptr)
    b = T.decl_buffer((64,), data=b_ptr)
    with T.launch_thread("blockIdx.x", 4) as x:
        with T.launch_thread("threadIdx.x", 16) as y:
"""
_AT = "x * 16 + y"


def kernel(*lines: str) -> tirx.PrimFunc:
    return tvm.script.from_source(_HEAD + "".join(f"            {line}\n" for line in lines))


@pytest.mark.parametrize(
    "lines",
    [
        (f"b[{_AT}] = a[x * 13 + T.min(y, 12)]",),
        (f"if {_AT} < 52:", f"    b[{_AT}] = a[{_AT}]"),
        (f"b[{_AT}] = T.if_then_else({_AT} < 52, a[{_AT}], T.float32(0))",),
        (f"b[{_AT}] = T.if_then_else(52 <= {_AT}, T.float32(0), a[{_AT}])",),
        (f"b[{_AT}] = T.if_then_else({_AT} < 52 and a[{_AT}] < T.float32(1), T.float32(1), T.float32(0))",),
        (f"b[{_AT}] = T.if_then_else({_AT} < 52, a[T.Div({_AT}, 13) * 13 + T.truncmod({_AT}, 13)], "
         "T.float32(0))",),
        (f"b[{_AT}] = T.if_then_else(12 <= {_AT}, a[(({_AT} - 12) >> 2) * 4 + (y & 3)], T.float32(0))",),
        ("for j in range(T.min(16, 52 - x * 16)):", "    b[x * 16 + j] = a[x * 16 + j]"),
        # What one access shows holds for others some elements further.
        (f"if 12 <= {_AT} and {_AT} < 40:", f"    b[{_AT}] = a[{_AT} - 4] + a[{_AT} + 12] + a[{_AT} - 12]"),
        # What is read out of memory is bounded, or checked.
        (f"b[{_AT}] = a[T.max(T.min(i[{_AT}], 51), 0)]",),
        (f"b[{_AT}] = T.if_then_else(0 <= i[{_AT}] and i[{_AT}] < 52, a[i[{_AT}]], T.float32(0))",),
        (f"b[{_AT}] = T.if_then_else(i[{_AT}] < 0, a[T.max(i[{_AT}] + 52, 0)], a[T.min(i[{_AT}], 51)])",),
    ],
)  # fmt: skip
def test_what_lies_inside_stays_as_it_is(lines: tuple[str, ...]) -> None:
    func = kernel(*lines)
    assert bound_accesses(func).same_as(func)


_ROWS = """
# from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def k(a_ptr: T.handle("float32", "global"), b_ptr: T.handle("float32", "global")):
    T.func_attr({"tirx.noalias": True})
    a = T.decl_buffer((16,), data=a_ptr)
    b = T.decl_buffer((1040,), data=b_ptr)
    with T.launch_thread("blockIdx.x", 5) as x:
        with T.launch_thread("threadIdx.x", 256) as y:
            if x * 16 + (y >> 4) < 65:
                b[x * 256 + y] = T.if_then_else(
                    0 < T.Cast("int32", b[x * 256 + y] < T.float32(0)),
                    a[T.Div(x * 256 + y, 65)], T.float32(0))
"""


def test_a_guard_that_says_nothing_of_the_index_hides_no_other() -> None:
    """Seen in gtcrn for Malis: what a guard compares is no side that the index depends on."""
    func = tvm.script.from_source(_ROWS)
    assert bound_accesses(func).same_as(func)


@pytest.mark.parametrize(
    "lines",
    [
        (f"b[{_AT}] = a[{_AT}]",),
        (f"b[{_AT} + 1] = T.float32(0)",),
        (f"b[{_AT}] = a[{_AT} - 12]",),
        (f"if {_AT} < 53:", f"    b[{_AT}] = a[{_AT}]"),
        (f"b[{_AT}] = T.if_then_else(a[{_AT}] < T.float32(1) and {_AT} < 52, T.float32(1), T.float32(0))",),
        (f"if 12 <= {_AT} and {_AT} < 40:", f"    b[{_AT}] = a[{_AT} - 4] + a[{_AT} + 13]"),
        (f"if 12 <= {_AT} and {_AT} < 40:", f"    b[{_AT}] = a[{_AT} + 4] + a[{_AT} - 13]"),
        (f"b[{_AT}] = a[i[{_AT}]]",),
        (f"b[{_AT}] = T.if_then_else(i[{_AT}] < 52, a[i[{_AT}]], T.float32(0))",),
        ("for j in range(T.min(16, 53 - x * 16)):", "    b[x * 16 + j] = a[x * 16 + j]"),
        ("b[x * 16:x * 16 + 16] = a[T.Ramp(x * 16, 1, 16)]",),
    ],
)
def test_what_may_lie_outside_is_refused(lines: tuple[str, ...]) -> None:
    with pytest.raises(OutOfBounds, match="may lie outside of its"):
        bound_accesses(kernel(*lines))


@pytest.mark.parametrize(
    "line",
    [
        f"b[{_AT}] = T.Select({_AT} < 52, a[{_AT}], T.float32(0))",
        "b[x * 16:x * 16 + 16] = T.Select(T.Ramp(x * 16, 1, 16) < T.Broadcast(52, 16), "
        "a[T.Ramp(x * 16, 1, 16)], T.Broadcast(T.float32(0), 16))",
        "b[x * 16:x * 16 + 16] = T.Select(T.Ramp(x * 16, 1, 16) < T.Broadcast(52, 16), "
        "T.Select(T.Broadcast(y, 16) < T.Broadcast(3, 16), a[T.Ramp(x * 16, 1, 16)], "
        "T.Broadcast(T.float32(1), 16)), T.Broadcast(T.float32(0), 16))",
    ],
)
def test_the_guard_of_a_select_becomes_branches(line: str) -> None:
    func = bound_accesses(kernel(line))
    source = source_of({"k": func}, imagined("mali"))
    assert "select(" not in source
    assert re.search(r"\? [^?]*a", source), source
    assert bound_accesses(func).same_as(func)  # what was made is inside by its branches


@pytest.mark.parametrize("channels", [3, 17, 52])
@pytest.mark.parametrize("lanes", [4, 16])
def test_blocks_of_channels_that_do_not_fill_them(channels: int, lanes: int, device: Device) -> None:
    plain = te.placeholder((1, channels, 5, 7), name="plain")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([plain, blocking(plain, lanes)]))
    loops = schedule.get_loops(schedule.get_sblock("block"))
    schedule.vectorize(loops[-1])
    schedule.bind(schedule.fuse(*loops[:-1]), "blockIdx.x")
    lowered = lower_function(schedule.mod["main"], "block", target_for(device.profile), device.profile)
    assert "select(" not in lowered.source


def test_a_schedule_that_reaches_outside_is_refused_with_the_reason(device: Device) -> None:
    given = te.placeholder((16,), name="given")
    func = te.create_prim_func([given, te.compute((16,), lambda n: given(n + 1), "moved")])
    schedule = tvm.s_tir.Schedule(func)
    schedule.bind(schedule.get_loops(schedule.get_sblock("moved"))[0], "threadIdx.x")
    with pytest.raises(LoweringFailed, match="may lie outside of its 16 elements"):
        lower_function(schedule.mod["main"], "moved", target_for(device.profile), device.profile)
