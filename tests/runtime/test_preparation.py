"""What depends on constants only: computed when a model is loaded, and not again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.runtime import load
from honed.runtime.compiled.model import Copy, Launch
from honed.runtime.errors import DeviceError

from .builder import add_prepared, only_in_groups_of_two

X = np.arange(8, dtype=np.float32)
SPOIL = """__kernel void spoil(__global const float* a, __global float* out) {
  int i = get_global_id(0); out[i] = a[i]; ((__global float*)a)[i] = 0.0f; }"""


def test_what_is_prepared_is_computed_once(either: Device, tmp_path: Path) -> None:
    b = add_prepared()
    spoil = b.kernel(SPOIL, "spoil", "rw", 32, groups=8, block=1)
    b.steps.insert(2, Launch(kernel=spoil, buffers=(2, b.output("p", "float32", (8,)))))
    path = b.write(tmp_path / "m.honed", either.profile)
    for _ in range(2):  # loading it again prepares it again
        with load(path, either) as executor:
            assert executor.launches == 3
            first = executor.run({"x": X})
            np.testing.assert_array_equal(first["y"], 3 * X + 2)
            np.testing.assert_array_equal(first["p"], X + 1)
            # A kernel that breaks the rules shows that no inference prepares anew.
            np.testing.assert_array_equal(executor.run({"x": X})["p"], 0 * X)


def test_many_inferences_read_what_was_prepared(either: Device, tmp_path: Path) -> None:
    with load(add_prepared().write(tmp_path / "m.honed", either.profile), either) as executor:
        for k in range(20):
            np.testing.assert_array_equal(executor.run({"x": X + k})["y"], 3 * X + k + 2)
        rows = {row.name: row.count for row in executor.profile({"x": X}).kernels}
    assert rows == {"add": 2}


def test_preparation_in_several_steps(either: Device, tmp_path: Path) -> None:
    b = add_prepared()
    copied, none = b.prepared("float32", (8,)), b.prepared("float32", (0,))
    b.prepare += [
        Copy(source=2, target=copied),
        Copy(source=b.constant(np.zeros(0, np.float32)), target=none),
        Launch(kernel=0, buffers=(1, copied, again := b.prepared("float32", (8,)))),
    ]
    b.launch(0, 0, again, b.output("z", "float32", (8,)))
    b.copy(1, b.output("c", "float32", (8,)))  # so that the constant is read by both
    with load(b.write(tmp_path / "m.honed", either.profile), either) as executor:
        for _ in range(2):
            out = executor.run({"x": X})
            np.testing.assert_array_equal(out["y"], 3 * X + 2)
            np.testing.assert_array_equal(out["z"], X + (X + (X + 1)))
            np.testing.assert_array_equal(out["c"], X)


def test_constants_that_only_preparation_reads_leave_the_device(either: Device, tmp_path: Path) -> None:
    with load(add_prepared().write(tmp_path / "m.honed", either.profile), either) as executor:
        held = executor._memory.buffers
        assert [buffer is None for buffer in held] == [False, True, False, False, False]


def test_memory_is_counted_for_loading_and_for_running(device: Device, tmp_path: Path) -> None:
    b = add_prepared(1024)  # 4 KiB each of x, c, p, s and y; c goes when p is there
    extra = b.prepared("float32", (1024,))
    b.prepare.append(Copy(source=b.constant(np.zeros(1024, np.float32)), target=extra))
    path = b.write(tmp_path / "m.honed", device.profile)
    x = np.zeros(1024, np.float32)

    def limited(nbytes: int) -> Device:
        limits = replace(device.profile.limits, global_mem_bytes=nbytes)
        return replace(device, profile=replace(device.profile, limits=limits))

    with load(path, limited(6 * 4096)) as executor:
        np.testing.assert_array_equal(executor.run({"x": x})["y"], 2 * np.arange(1024) + 2)
    with pytest.raises(DeviceError, match="the model needs 24576"):
        load(path, limited(6 * 4096 - 1))


def test_a_preparation_that_fails_is_an_error_of_loading(device: Device, tmp_path: Path) -> None:
    b = add_prepared()
    b.sources[1] = only_in_groups_of_two(b.sources[1])  # prepared in groups of one
    with pytest.raises(DeviceError, match=r"could not launch kernel 'increment'"):
        load(b.write(tmp_path / "m.honed", device.profile), device)
