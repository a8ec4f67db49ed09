from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.process.children import output
from honed.runtime import load
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import Precondition
from honed.runtime.compiled.plan import allocations
from honed.runtime.errors import Cancelled, DeviceError, InvalidArgument, NotFound, PreconditionBroken
from honed.runtime.execution import programs
from honed.runtime.execution.executor import Executor
from honed.runtime.execution.segments import running_now
from tests.daemon.running import DEADLINE, memory

from .builder import ADD, Builder, add_constant, chain, only_in_groups_of_two

X = np.arange(8, dtype=np.float32)
LEAK = 150 << 10  # Bytes; 3,000 runs that keep a small array each grow a process by twice that, at least


@pytest.fixture
def executor(either: Device, tmp_path: Path) -> Iterator[Executor]:
    with load(add_constant().write(tmp_path / "m.honed", either.profile), either) as loaded:
        yield loaded


def loaded(b: Builder, device: Device, folder: Path) -> Executor:
    return load(b.write(folder / "m.honed", device.profile), device)


def test_run(executor: Executor) -> None:
    for k in range(3):
        out = executor.run({"x": X + k})
        assert list(out) == ["y"]
        np.testing.assert_array_equal(out["y"], 2 * X + k + 1, strict=True)


def test_a_run_that_is_to_end_ends_between_launches_and_the_next_is_right(
    either: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    with load(chain(300, 8).write(tmp_path / "m.honed", either.profile), either) as executor:
        right = executor.run({"x": X})["y"]
        monkeypatch.setattr(running_now, "ended", lambda: asked.append(1) or len(asked) > 2)
        with pytest.raises(Cancelled, match="nobody waits"):
            executor.run({"x": X + 1})
        monkeypatch.setattr(running_now, "ended", None)
        np.testing.assert_array_equal(executor.run({"x": X})["y"], right)
    assert len(asked) == 3, "the third chunk is not enqueued"


def test_outputs_belong_to_the_caller(executor: Executor) -> None:
    first = executor.run({"x": X})["y"]
    kept = first.copy()
    assert first.flags.owndata
    assert first.flags.writeable
    executor.run({"x": X + 100})
    np.testing.assert_array_equal(first, kept)


def test_inputs_are_left_alone_and_need_not_be_contiguous(executor: Executor) -> None:
    wide = np.repeat(X, 2)
    wide.flags.writeable = False
    np.testing.assert_array_equal(executor.run({"x": wide[::2]})["y"], 2 * X + 1)
    np.testing.assert_array_equal(executor.run({"x": wide[::-2]})["y"], X[::-1] + X + 1)


def test_nan_and_infinity_are_values(executor: Executor) -> None:
    out = executor.run({"x": np.array([np.nan, np.inf, -np.inf, 0, 0, 0, 0, 0], np.float32)})["y"]
    assert math.isnan(out[0])
    assert (out[1], out[2]) == (np.inf, -np.inf)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input 'x' is missing; this model's inputs are 'x' as float32[8]"),
        ({"x": X, "z": X, "w": X}, "input 'z', 'w' is unknown"),
        ({"z": X}, "input 'x' is missing and input 'z' is unknown"),
        ({"x": X.astype(np.float64)}, "input 'x' is float64[8] and must be float32[8]"),
        ({"x": X.astype(">f4")}, "must be float32[8]"),
        ({"x": X[:7]}, "input 'x' is float32[7]"),
        ({"x": X.reshape(2, 4)}, "input 'x' is float32[2, 4]"),
        ({"x": X.tolist()}, "input 'x' is list"),
        ({"x": np.float32(1)}, "input 'x' is float32; give a NumPy array"),
    ],
)
def test_wrong_inputs(executor: Executor, inputs: dict[str, Any], message: str) -> None:
    for call in (executor.run, executor.profile):
        with pytest.raises(InvalidArgument) as caught:
            call(inputs)
        assert message in str(caught.value)
    np.testing.assert_array_equal(executor.run({"x": X})["y"], 2 * X + 1)


def test_closed(executor: Executor) -> None:
    executor.close()
    executor.close()
    with pytest.raises(InvalidArgument, match="closed"):
        executor.run({"x": X})


@pytest.mark.parametrize("launches", [1, 2, 63, 64, 65, 300])
def test_every_launch_runs_in_order(either: Device, tmp_path: Path, launches: int) -> None:
    with loaded(chain(launches), either, tmp_path) as executor:
        assert executor.launches == launches
        for k in range(2):
            np.testing.assert_array_equal(executor.run({"x": X + k})["y"], X + k + launches)


@pytest.mark.parametrize("cap", [1, 2, 3, 7, 64, 200])
def test_a_cap_on_queued_launches(device: Device, tmp_path: Path, cap: int) -> None:
    rules = replace(device.profile.rules, max_queued_launches=cap)
    capped = replace(device, profile=replace(device.profile, rules=rules))
    with loaded(chain(150), capped, tmp_path) as executor:
        np.testing.assert_array_equal(executor.run({"x": X})["y"], X + 150)
        assert executor.profile({"x": X}).launches == 150


def test_casts_at_the_border(either: Device, tmp_path: Path) -> None:
    b = Builder()
    for i, (seen, held) in enumerate(
        [
            ("float16", "float32"),
            ("int64", "int32"),
            ("float64", "float32"),
            ("bool", "uint8"),
            ("bool", "bool"),
        ]
    ):
        b.copy(b.input(f"i{i}", seen, (4,), held), b.output(f"o{i}", seen, (4,), held))
    inputs = {
        "i0": np.array([1, 65504, np.nan, -0.5], np.float16),
        "i1": np.array([0, -1, 2**31 - 1, -(2**31)]),
        "i2": np.array([0.1, 1e300, -np.inf, 3]),
        "i3": np.array([True, False, True, True]),
        "i4": np.array([1, 0, 255, 2], np.uint8).view(np.bool_),  # bytes off the wire need not be 0 or 1
    }
    with loaded(b, either, tmp_path) as executor:
        out = executor.run(inputs)
        np.testing.assert_array_equal(out["o0"], inputs["i0"], strict=True)
        np.testing.assert_array_equal(out["o1"], inputs["i1"], strict=True)
        np.testing.assert_array_equal(
            out["o2"], np.array([np.float32(0.1), np.inf, -np.inf, 3.0]), strict=True
        )
        np.testing.assert_array_equal(out["o3"], inputs["i3"], strict=True)
        assert out["o4"].view(np.uint8).tolist() == [1, 0, 1, 1]
        with pytest.raises(InvalidArgument, match=r"computes in int32.*has 0 to 2147483648"):
            executor.run({**inputs, "i1": np.array([0, 0, 0, 2**31])})


@pytest.mark.parametrize("kind", ["int32", "float32"])
def test_values_that_a_precondition_does_not_allow_are_refused(
    device: Device, tmp_path: Path, kind: str
) -> None:
    b = Builder()
    b.copy(b.input("ends", kind, (2,)), b.output("y", kind, (2,)))
    bound = Precondition(input="ends", low=0, high=5, why="rows of its cache")
    model = replace(b.build(device.profile), preconditions=(bound,))
    modelfile.write(tmp_path / "m.honed", model, {})
    with load(tmp_path / "m.honed", device) as executor:
        assert executor.model.preconditions == (bound,)
        for served in ([0, 5], [3, 3]):
            assert executor.run({"ends": np.array(served, kind)})["y"].tolist() == served
        others = [[-1, 2], [0, 6], *([[np.nan, 0]] if kind == "float32" else [])]
        for other in others:
            with pytest.raises(PreconditionBroken, match=r"'ends' holds 0 to 5 \(rows of its cache\)"):
                executor.run({"ends": np.array(other, kind)})


def test_every_half_becomes_the_single_it_is_and_back(either: Device, tmp_path: Path) -> None:
    """On the device: NumPy does it one by one. NaN stays one; rounding is to the nearest, ties to even."""
    b = Builder()
    b.copy(b.input("halves", "float16", (65535,), "float32"), b.output("singles", "float32", (65535,)))
    b.copy(b.input("given", "float32", (4096,)), b.output("rounded", "float16", (4096,), "float32"))
    halves = np.arange(65535, dtype=np.uint16).view(np.float16)  # not a whole number of work-groups
    between = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    between *= np.exp2(np.arange(4096) % 48 - 28, dtype=np.float32)  # less than the least half, and too large
    between[:4] = 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.99, np.inf
    with loaded(b, either, tmp_path) as executor:
        for _ in range(2):
            out = executor.run({"halves": halves, "given": between})
            np.testing.assert_array_equal(out["singles"], halves.astype(np.float32), strict=True)
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(out["rounded"], between.astype(np.float16), strict=True)
        assert executor.profile({"halves": halves, "given": between}).launches == executor.launches


def test_shapes_without_elements_or_dimensions(either: Device, tmp_path: Path) -> None:
    b = Builder()
    empty = b.input("empty", "int32", (0, 3))
    b.copy(empty, b.output("still empty", "int32", (0, 3)))
    b.copy(b.constant(np.array(7, np.int64)), b.output("seven", "int64", ()))
    b.copy(b.input("scalar", "float32", ()), b.output("same", "float32", ()))
    with loaded(b, either, tmp_path) as executor:
        out = executor.run({"empty": np.zeros((0, 3), np.int32), "scalar": np.array(2.5, np.float32)})
    assert out["still empty"].shape == (0, 3)
    assert (out["seven"].shape, int(out["seven"])) == ((), 7)
    assert (out["same"].shape, float(out["same"])) == ((), 2.5)


def test_scratch_may_be_shared_over_time(either: Device, tmp_path: Path) -> None:
    b = chain(3)
    b.buffers = [replace(p, offset=0) if i == 2 else p for i, p in enumerate(b.buffers)]
    with pytest.raises(InvalidArgument, match="share scratch"):
        b.write(tmp_path / "m.honed", either.profile)
    copied = add_constant()  # x -> s -> y, then s's bytes again as t -> z
    s = next(i for i, p in enumerate(copied.buffers) if p.place == "scratch")
    t = copied.scratch("float32", (8,))
    copied.buffers[t] = replace(copied.buffers[t], offset=copied.buffers[s].offset)
    copied.copy(0, t)
    copied.copy(t, copied.output("z", "float32", (8,)))
    with loaded(copied, either, tmp_path) as executor:
        out = executor.run({"x": X})
    np.testing.assert_array_equal(out["y"], 2 * X + 1)
    np.testing.assert_array_equal(out["z"], X)


def test_scratch_may_lie_across_other_scratch(either: Device, tmp_path: Path) -> None:
    """As in files of planners that pack buffers: parts of one allocation, at offsets that GPUs take, too."""
    b = Builder()
    kernel = b.kernel(ADD, "add", "rrw", 512, groups=16, block=8)
    x, y = b.input("x", "float32", (128,)), b.output("y", "float32", (128,))
    one, two = b.scratch("float32", (128,)), b.scratch("float32", (128,))
    wide = b.scratch("float32", (256,))
    b.buffers[two] = replace(b.buffers[two], offset=b.buffers[one].nbytes)
    b.buffers[wide] = replace(b.buffers[wide], offset=0)  # over both
    twice = b.kernel(ADD, "add", "rrw", 512, groups=16, block=8, name="twice")
    b.launch(kernel, x, x, one)
    b.launch(kernel, one, x, two)
    b.launch(kernel, two, one, y)
    b.launch(twice, x, y, wide)
    third = b.output("z", "float32", (128,))
    b.launch(twice, wide, x, third)
    given = np.arange(128, dtype=np.float32)
    with loaded(b, either, tmp_path) as executor:
        assert {len(lies) for lies in allocations(executor.model.buffers, "scratch")} == {1024}
        out = executor.run({"x": given})
    np.testing.assert_array_equal(out["y"], 5 * given)
    np.testing.assert_array_equal(out["z"], 7 * given)


def test_threads_take_turns(executor: Executor) -> None:
    wrong: list[object] = []

    def work(k: int) -> None:
        for _ in range(50):
            out = executor.run({"x": X + k})["y"]
            if not np.array_equal(out, 2 * X + k + 1):
                wrong.append(out)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_models_share_the_device(device: Device, tmp_path: Path) -> None:
    with (
        load(add_constant().write(tmp_path / "a.honed", device.profile), device) as a,
        load(chain(5).write(tmp_path / "b.honed", device.profile), device.spec) as b,
    ):
        for _ in range(3):
            np.testing.assert_array_equal(a.run({"x": X})["y"], 2 * X + 1)
            np.testing.assert_array_equal(b.run({"x": X})["y"], X + 5)


def test_a_kernel_that_does_not_compile(device: Device, tmp_path: Path) -> None:
    b = add_constant()
    b.sources[0] = b.sources[0].replace("a[i] + b[i]", "a[i] + nonsense[i]")
    with pytest.raises(DeviceError, match="cannot compile a kernel of this model") as caught:
        loaded(b, device, tmp_path)
    assert "nonsense" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_kernel_is_not_called_wrong_where_memory_ran_out(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "data_is_short", lambda: True)
    b = add_constant()
    b.sources[0] = b.sources[0].replace("a[i] + b[i]", "a[i] + nonsense[i]")
    with pytest.raises(MemoryError, match="built a kernel of the model"):
        loaded(b, device, tmp_path)


def test_a_kernel_with_other_arguments(device: Device, tmp_path: Path) -> None:
    b = add_constant()
    b.sources[0] = b.sources[0].replace("__global float* out", "__global float* out, int n")
    with pytest.raises(DeviceError, match="'add' has 4 arguments in its source and 3 in its model"):
        loaded(b, device, tmp_path)


LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "alignment": ({"base_align_bytes": 8192}, "needs buffers aligned to 8192"),
    "work-items": ({"max_work_group_size": 4}, "allows work-groups of 4"),
    "one axis": ({"max_work_item_sizes": (4, 4, 4)}, "has [8, 1, 1]"),
    "one allocation": ({"max_alloc_bytes": 16}, "allocates at most 16 bytes"),
    "memory": ({"global_mem_bytes": 64}, "has 64 bytes of memory"),
}


@pytest.mark.parametrize("name", LACKS)
def test_a_device_that_lacks_something(device: Device, tmp_path: Path, name: str) -> None:
    changes, message = LACKS[name]
    path = chain(3).write(tmp_path / "m.honed", device.profile)
    lesser = replace(device.profile, limits=replace(device.profile.limits, **changes))
    with pytest.raises(DeviceError) as caught:
        load(path, replace(device, profile=lesser))
    assert message in str(caught.value)
    assert "compile the model again for this device" in str(caught.value)


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_types_the_device_lacks(device: Device, tmp_path: Path, kind: str) -> None:
    b = Builder()
    source = "__kernel void same(__global const uchar* a, __global uchar* b) { b[0] = a[0]; }"
    same = b.kernel(source, "same", "rw", 8, groups=1, block=1, kind=kind)
    b.launch(same, b.input("x", kind, (8,)), b.output("y", kind, (8,)))
    limits = replace(device.profile.limits, fp16=False, fp64=False)
    with pytest.raises(DeviceError, match="has no cl_khr_fp"):
        loaded(b, replace(device, profile=replace(device.profile, limits=limits)), tmp_path)


def test_dot_products_the_device_lacks(device: Device, tmp_path: Path) -> None:
    b = Builder()
    call = "int d(uint a) { return dot_acc_sat_4x8packed_ss_int(a, a, 0); }"
    same = b.kernel(f"{call}\n__kernel void same(__global uint* a) {{}}", "same", "w", 32, groups=1, block=1)
    b.launch(same, b.output("y", "float32", (8,)))
    limits = replace(device.profile.limits, int8_dots=False)
    with pytest.raises(DeviceError, match="has no cl_khr_integer_dot_product"):
        loaded(b, replace(device, profile=replace(device.profile, limits=limits)), tmp_path)


def test_dot_products_that_a_driver_writes_out_are_computed_all_the_same(device: Device) -> None:
    b = Builder()
    call = "int d(uint a) { return dot_acc_sat_4x8packed_ss_int(a, a, 0); }"
    same = b.kernel(f"{call}\n__kernel void same(__global uint* a) {{}}", "same", "w", 32, groups=1, block=1)
    b.launch(same, b.output("y", "float32", (8,)))
    limits = replace(device.profile.limits, int8_dots=False)
    extended = SimpleNamespace(extensions="cl_khr_integer_dot_product")
    programs.check(b.build(), replace(device, profile=replace(device.profile, limits=limits), cl=extended))


def test_a_refused_launch_is_told_with_its_kernel_and_ends_the_executor(
    either: Device, tmp_path: Path
) -> None:
    b = add_constant()
    b.sources[1] = only_in_groups_of_two(b.sources[1])  # launched in groups of one
    refused = r"could not launch kernel 'increment' \(clEnqueueNDRangeKernel: INVALID_WORK_GROUP_SIZE, -54\)"
    for call in (Executor.run, Executor.profile):
        with loaded(b, either, tmp_path) as executor:
            with pytest.raises(DeviceError, match=f"^the OpenCL driver {refused}"):
                call(executor, {"x": X})
            with pytest.raises(DeviceError, match=f"failed before .*{refused}"):
                executor.run({"x": X})


def test_load_says_what_is_missing(device: Device, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no file"):
        load(tmp_path / "m.honed", device)
    with pytest.raises(NotFound, match="fits no device"):
        load(tmp_path / "m.honed", "abacus")


def test_programs_are_kept_and_damaged_ones_built_again(device: Device, tmp_path: Path) -> None:
    path = add_constant().write(tmp_path / "m.honed", device.profile)
    cache = tmp_path / "cache"

    def answers() -> None:
        with load(path, device, cache_dir=cache) as executor:
            np.testing.assert_array_equal(executor.run({"x": X})["y"], 2 * X + 1)

    answers()
    kept = [p for p in cache.rglob("*") if p.is_file()]
    assert len(kept) == 2
    before = {p: p.read_bytes() for p in kept}
    answers()
    assert {p: p.read_bytes() for p in kept} == before
    for damage in (b"", b"\0" * 40, before[kept[0]][:-1], before[kept[1]]):
        kept[0].write_bytes(damage)
        answers()
        assert kept[0].read_bytes() != damage


_left_over: list[Executor] = []


@pytest.mark.parametrize("turn", range(2))
def test_no_test_is_given_a_program_that_another_left(device: Device, tmp_path: Path, turn: int) -> None:
    path = add_constant().write(tmp_path / "m.honed", device.profile)
    executor = load(path, device, cache_dir=tmp_path / "cache")
    _left_over.append(executor)  # as one in a cycle is, until garbage is collected
    assert any(p.is_file() for p in (tmp_path / "cache").rglob("*"))
    if turn:
        for each in _left_over:
            each.close()
        _left_over.clear()


IN_LITTLE_MEMORY = """
import sys
from pathlib import Path
from honed.machine.devices import select
from honed.process.limits import data_bytes, limit_data
from honed.runtime.execution import programs

device = select(None)
programs.build(device, "__kernel void one(__global int *x) { x[0] = 1; }", None)  # the driver is there
limit_data(data_bytes() + (160 << 20))
programs.build(device, "__kernel void two(__global int *x) { x[0] = 2; }", Path(sys.argv[1]))
print("built")
"""


@pytest.mark.opencl
def test_a_program_is_built_although_there_is_no_memory_for_the_drivers_largest_binary(
    tmp_path: Path,
) -> None:
    said, death = output((sys.executable, "-c", IN_LITTLE_MEMORY, str(tmp_path)), seconds=DEADLINE)
    assert death.status == 0, death
    assert said.strip() == b"built"


def test_models_of_one_process_share_their_programs(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_constant().write(tmp_path / "m.honed", device.profile)
    with load(path, device) as first:
        monkeypatch.setattr(programs, "_build", None)  # nothing is built again
        with load(path, device) as second:
            for one in (second, first):
                np.testing.assert_array_equal(one.run({"x": X})["y"], 2 * X + 1)


def test_a_cache_that_cannot_be_written(device: Device, tmp_path: Path) -> None:
    (tmp_path / "programs").write_text("a file where a folder should be")
    path = add_constant().write(tmp_path / "m.honed", device.profile)
    with load(path, device, cache_dir=tmp_path) as executor:
        np.testing.assert_array_equal(executor.run({"x": X})["y"], 2 * X + 1)


@pytest.mark.slow
def test_memory_stays_where_it_was(either: Device, tmp_path: Path) -> None:
    b = add_constant(64)
    x = np.ones(64, np.float32)
    with loaded(b, either, tmp_path) as executor:
        for _ in range(1000):
            executor.run({"x": x})
        grown: list[int] = []
        # What else is in the process may grow now and then; a leak grows each time.
        while len(grown) < 10 and min(grown, default=LEAK) >= LEAK:
            before = memory(os.getpid())
            for _ in range(3000):
                executor.run({"x": x})
            grown.append(memory(os.getpid()) - before)
    assert min(grown) < LEAK, grown


@pytest.mark.slow
def test_loading_again_and_again_frees_what_was_loaded(device: Device, tmp_path: Path) -> None:
    n = 1 << 18
    path = add_constant(n).write(tmp_path / "m.honed", device.profile)
    x = np.ones(n, np.float32)
    most = 8 << 20  # Bytes; 15 models of 4 MiB would be 60

    def grown(times: int) -> int:
        before = memory(os.getpid())
        for _ in range(times):
            with load(path, device) as executor:
                executor.run({"x": x})
        return memory(os.getpid()) - before

    grown(5)
    found: list[int] = []
    while len(found) < 4 and min(found, default=most) >= most:  # as above
        found.append(grown(15))
    assert min(found) < most, found


def test_the_file_may_go_while_it_runs(device: Device, tmp_path: Path) -> None:
    path = add_constant().write(tmp_path / "m.honed", device.profile)
    with Executor(modelfile.read(path), device) as executor:
        path.unlink()
        np.testing.assert_array_equal(executor.run({"x": X})["y"], 2 * X + 1)


def test_grids_and_blocks_of_three_axes(device: Device, tmp_path: Path) -> None:
    source = """__kernel void where(__global int* out) {
      int i = get_group_id(2), j = get_local_id(2);
      i = (i * get_num_groups(1) + get_group_id(1)) * get_num_groups(0) + get_group_id(0);
      j = (j * get_local_size(1) + get_local_id(1)) * get_local_size(0) + get_local_id(0);
      out[i * 8 + j] = i * 1000 + j; }"""
    grid, block = (2, 3, 4), (4, 2, 1)
    b = Builder()
    kernel = b.kernel(source, "where", "w", 4 * 24 * 8, groups=1, block=1, kind="int32")
    b.kernels[kernel] = replace(b.kernels[kernel], grid=grid, block=block)
    b.launch(kernel, b.output("y", "int32", (24, 8)))
    with loaded(b, device, tmp_path) as executor:
        out = executor.run({})["y"]
    expected = [[i * 1000 + j for j in range(8)] for i in range(24)]
    np.testing.assert_array_equal(out, expected)
