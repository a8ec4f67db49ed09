"""Generated OpenCL C: launches, inner buffers, indices, names, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import tvm
from onnx import parser
from tvm import relax, s_tir, te, tirx, topi
from tvm.ir import IRModule
from tvm.ir.transform import PassInfo

from honed.machine.devices import Device
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower.module import LONGEST_NAME, kernel_name, lower_module
from honed.tuner.lower.opencl import LoweringFailed, lower_function
from honed.tuner.lower.printer.library import CIRCULAR
from honed.tuner.lower.schedule import default_kernels, narrow_indices
from honed.tuner.lower.statements import nodes
from honed.tuner.lower.target import NAMES, target_for
from tests.runtime.builder import PROFILE

from .lowering import Run, normal, only_function, relax_module, run_lowered, run_together

pytestmark = pytest.mark.tvm
TARGET = target_for(PROFILE)
PAIRS = {"atan2": np.arctan2, "copysign": np.copysign, "hypot": np.hypot, "nextafter": np.nextafter}
SINGLES = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh, "log1p": np.log1p, "tan": np.tan,
}  # fmt: skip


def _serial(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its only loop bound to groups."""
    schedule = s_tir.Schedule(func)
    (block,) = schedule.get_child_blocks(schedule.get_sblock("root"))
    schedule.bind(schedule.get_loops(block)[0], "blockIdx.x")
    return schedule.mod["main"]


def _elementwise(op: str, dtype: str, second: str | None) -> tirx.PrimFunc:
    x = te.placeholder((64,), dtype, "x")
    y = te.placeholder((64,), second or dtype, "y")
    function = getattr(tirx, op)
    z = te.compute((64,), lambda i: function(x[i], y[i]) if second else function(x[i]), "z")
    return te.create_prim_func([x, y, z] if second else [x, z])


def _second(op: str, dtype: str) -> str | None:
    return "int32" if op == "ldexp" else dtype if op in PAIRS else None


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", NAMES)
def test_functions_have_the_names_of_opencl(op: str, dtype: str) -> None:
    source = lower_function(_serial(_elementwise(op, dtype, _second(op, dtype))), "f", TARGET, PROFILE).source
    own = op in CIRCULAR and dtype != "float64"
    name = f"honed_{op}_{'half' if dtype == 'float16' else 'float'}" if own else op
    assert re.search(rf"\b{name}\(", source)
    assert f"{op}f(" not in source


def test_the_named_functions_are_those_meant(device: Device) -> None:
    x, y = np.linspace(1.05, 3, 64, dtype=np.float32), normal(64)
    small = np.linspace(-0.9, 0.9, 64, dtype=np.float32)
    target, runs, wanted = target_for(device.profile), list[Run](), list[np.ndarray]()
    for op in NAMES:
        given = small if op in ("acos", "asin", "atanh", "log1p") else x
        powers = np.arange(64, dtype=np.int32) % 7 - 3
        if op == "ldexp":
            inputs, expected = [x, powers], np.ldexp(x, powers)
        elif op in PAIRS:
            inputs, expected = [x, y], PAIRS[op](x, y)
        else:
            inputs, expected = [given], SINGLES[op](given)
        func = _elementwise(op, "float32", _second(op, "float32"))
        lowered = lower_function(_serial(func), f"the_{op}", target, device.profile)
        runs.append((lowered, inputs, [np.zeros_like(x)]))
        wanted.append(expected)
    run_together(runs, device)
    for op, (_, _, (found,)), expected in zip(NAMES, runs, wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=op)


def test_several_launches_share_an_inner_buffer(device: Device) -> None:
    x = normal(4, 96)
    func = only_function(
        relax_module(lambda _, v: relax.op.nn.softmax(v["x"], axis=1), {"x": x}), device.profile
    )
    _, lowered, _ = default_kernels(func, "softmax", target_for(device.profile), device.profile)
    assert len(lowered.launches) > 1
    assert lowered.inner
    inner = set(range(2, 2 + len(lowered.inner)))
    written = {
        a for n in lowered.launches for a, t in zip(n.args, n.arg_types, strict=True) if t.access != "read"
    }
    read = {
        a for n in lowered.launches for a, t in zip(n.args, n.arg_types, strict=True) if t.access != "write"
    }
    assert inner <= written & read
    assert 0 not in written
    entries = [launch.entry for launch in lowered.launches]
    assert len(set(entries)) == len(entries)
    for launch in lowered.launches:
        group = ", ".join(map(str, launch.block))
        told = f"__kernel __attribute__((reqd_work_group_size({group})))\nvoid {launch.entry}("
        assert told in lowered.source
    found = np.empty_like(x)
    run_lowered(lowered, [x], [found], device)
    exact = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(found, exact / exact.sum(axis=1, keepdims=True), rtol=1e-5)


def test_arguments_say_how_much_they_need_and_what_is_done_with_them() -> None:
    func = only_function(
        relax_module(lambda _, v: relax.op.add(v["a"], v["b"]), {"a": normal(8, 16), "b": normal(16)}),
        PROFILE,
    )
    _, lowered, _ = default_kernels(func, "add", TARGET, PROFILE)
    (launch,) = lowered.launches
    needs = {a: (t.dtype, t.nbytes, t.access) for a, t in zip(launch.args, launch.arg_types, strict=True)}
    assert needs == {0: ("float32", 512, "read"), 1: ("float32", 64, "read"), 2: ("float32", 512, "write")}
    assert math.prod(launch.grid) * math.prod(launch.block) >= 128


def test_an_inner_buffer_of_vectors_is_one_of_single_elements() -> None:
    a = te.placeholder((8, 16), "float16", "a")
    between = te.compute((8, 16), lambda i, j: a[i, j] * a[i, j], "between")
    schedule = s_tir.Schedule(
        te.create_prim_func([a, te.compute((8, 16), lambda i, j: between[i, j], "out")])
    )
    for name in ("between", "out"):
        rows, columns = schedule.get_loops(schedule.get_sblock(name))
        _, vector = schedule.split(columns, [None, 4])
        schedule.bind(rows, "blockIdx.x")
        schedule.vectorize(vector)
    lowered = lower_function(narrow_indices(schedule.mod["main"]), "f", TARGET, PROFILE)
    assert [(one.dtype, one.nbytes) for one in lowered.inner] == [("float16", 256)]
    assert {t.nbytes for launch in lowered.launches for t in launch.arg_types} == {256}


@pytest.mark.parametrize("shape", [(48, 40), (2, 3, 16, 24)])
def test_indices_are_32_bits_wide(shape: tuple[int, ...]) -> None:
    inputs = {"a": normal(*shape), "b": normal(*shape[:-2], shape[-1], 8)}
    func = only_function(relax_module(lambda _, v: relax.op.matmul(v["a"], v["b"]), inputs), PROFILE)
    assert "int64" in str(func.script())
    _, lowered, _ = default_kernels(func, "matmul", TARGET, PROFILE)
    assert "long" not in lowered.source


def test_indices_stay_wide_where_a_tensor_needs_them() -> None:
    x = te.placeholder((2**31 + 8,), "int8", "x")
    func = te.create_prim_func([x, topi.negative(x)])
    assert narrow_indices(func).same_as(func)


CHAIN = " ".join(f"v{n + 1} = Add(v{n}, w)" for n in range(24))


def test_a_kernel_of_many_operators_has_a_short_name_and_runs(device: Device) -> None:
    model = parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 20]>'
        f"f (float[4,8] v0, float[8] w) => (float[4,8] v24) {{ {CHAIN} }}"
    )
    x, w = normal(4, 8), normal(8)
    np.testing.assert_allclose(run_model(model, {"v0": x, "w": w}, device)["v24"], x + 24 * w, rtol=1e-4)


def test_names_of_functions_and_entries_are_short_and_unique() -> None:
    def make(builder: relax.BlockBuilder, v: dict[str, relax.Var]) -> relax.Expr:
        found = []
        for start in (v["a"], v["b"]):
            value = start
            for _ in range(12):
                value = builder.emit(relax.op.add(builder.emit(relax.op.tanh(value)), start))
            found.append(value)
        return relax.Tuple(found)

    lowered = lower_module(relax_module(make, {"a": normal(4, 8), "b": normal(5, 8)}), PROFILE)
    functions = lowered.functions.values()
    assert any(len(name) > 2 * LONGEST_NAME for name in lowered.functions)
    assert len({f.name for f in functions}) == len(functions) == 2
    for function in functions:
        assert len(function.name) <= LONGEST_NAME
        assert all(len(launch.entry) <= LONGEST_NAME + len("_kernel_99") for launch in function.launches)


def test_names_are_kept_where_they_are_short_and_told_apart_where_they_are_cut() -> None:
    long = "fused_" + "add_" * 30
    assert kernel_name("matmul", "0123456789abcdef", set()) == "matmul"
    taken: set[str] = set()
    for task in ("0123456789abcdef", "0123aaaaaaaaaaaa", "0123aabbbbbbbbbb", "0123456789abcdef"):
        name = kernel_name(long, task, taken)
        assert name not in taken
        assert len(name) <= LONGEST_NAME
        assert name.isidentifier()
        taken.add(name)


def test_a_work_group_beyond_the_device_is_refused() -> None:
    schedule = s_tir.Schedule(_elementwise("tan", "float32", None))
    schedule.bind(schedule.get_loops(schedule.get_sblock("z"))[0], "threadIdx.x")
    small = replace(PROFILE, limits=replace(PROFILE.limits, max_work_group_size=32))
    with pytest.raises(LoweringFailed, match="work-group"):
        lower_function(schedule.mod["main"], "f", target_for(small), small)


def test_a_source_beyond_the_profile_is_refused() -> None:
    terse = replace(PROFILE, rules=replace(PROFILE.rules, max_source_bytes=64))
    with pytest.raises(LoweringFailed, match="bytes, above the device profile's 64"):
        lower_function(_serial(_elementwise("tan", "float32", None)), "f", TARGET, terse)


@tvm.instrument.pass_instrument
class _StoresSeen:
    """The largest number of stores that each pass is given, by the pass's name."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}

    def run_before_pass(self, module: IRModule, info: PassInfo) -> None:
        stores = sum(len(nodes(func.body, tirx.BufferStore)) for func in module.functions.values())
        self.most[info.name] = max(stores, self.most.get(info.name, 0))


@pytest.mark.parametrize("private", [False, True])
def test_no_ops_are_sought_before_loops_are_unrolled(private: bool) -> None:
    """TVM simplifies each store for that, which took half the time of lowering unrolled loops.

    The schedule unrolls them, or the printer does for a private array.
    """
    schedule = s_tir.Schedule(_elementwise("tan", "float32", None))
    block = schedule.get_sblock("z")
    outer, inner = schedule.split(schedule.get_loops(block)[0], [None, 8])
    schedule.bind(outer, "blockIdx.x")
    if private:
        schedule.reverse_compute_at(schedule.cache_write(block, 0, "local"), outer)
    else:
        schedule.unroll(inner)
    seen = _StoresSeen()
    with tvm.transform.PassContext(instruments=[seen]):
        lowered = lower_function(schedule.mod["main"], "f", TARGET, PROFILE)
    assert lowered.source.count("  z_at[") == 8
    assert seen.most["tirx.StmtSimplify"] == 8 + 8 * private
    assert seen.most["tirx.RemoveNoOp"] == 1 + private


def test_local_memory_beyond_the_device_is_refused() -> None:
    func = _elementwise("tan", "float32", None)
    schedule = s_tir.Schedule(func)
    block = schedule.get_sblock("z")
    (loop,) = schedule.get_loops(block)
    outer, inner = schedule.split(loop, [None, 32])
    schedule.bind(outer, "blockIdx.x")
    schedule.bind(inner, "threadIdx.x")
    copied = schedule.cache_read(block, 0, "shared")
    schedule.compute_at(copied, outer)
    lower_function(schedule.mod["main"], "f", TARGET, PROFILE)
    small = replace(PROFILE, limits=replace(PROFILE.limits, local_mem_bytes=64))
    with pytest.raises(LoweringFailed, match="128 bytes of local memory are more than the device's 64"):
        lower_function(schedule.mod["main"], "f", TARGET, small)


def test_a_function_left_to_the_host_is_refused() -> None:
    with pytest.raises(LoweringFailed):
        lower_function(_elementwise("tan", "float32", None), "f", TARGET, PROFILE)


def test_a_kernel_that_declares_global_memory_is_refused() -> None:
    x = te.placeholder((8, 4), "float32", "x")
    y = te.compute((8, 4), lambda i, j: x[i, j] + 1.0, "y")
    z = te.compute((8, 4), lambda i, j: y[i, 3 - j] * 2.0, "z")
    schedule = s_tir.Schedule(te.create_prim_func([x, z]))
    outer = schedule.get_loops(schedule.get_sblock("z"))[0]
    schedule.bind(outer, "threadIdx.x")
    schedule.compute_at(schedule.get_sblock("y"), outer)
    with pytest.raises(LoweringFailed, match="declares global memory of its own"):
        lower_function(schedule.mod["main"], "f", TARGET, PROFILE)
