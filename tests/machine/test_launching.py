"""The ways of launching that `benchmarks.launching` compares do the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.launching.recorded import VERSION, Recording, version
from benchmarks.launching.ways import CALLS, commands_of, ways

from honed.machine.devices import Device
from honed.runtime import load
from honed.runtime.errors import DeviceError
from honed.runtime.execution.executor import Executor
from tests.runtime.builder import add_constant, chain

X = np.arange(8, dtype=np.float32)


@pytest.fixture
def added(device: Device, tmp_path: Path) -> Iterator[Executor]:
    """y = (x + c) + 1 and a copy of y, z."""
    b = add_constant()
    b.copy(3, b.output("z", "float32", (8,)))
    with load(b.write(tmp_path / "added.honed", device.profile), device) as executor:
        yield executor


def run(executor: Executor, way: Any, value: np.ndarray) -> list[np.ndarray]:
    """The outputs of an inference whose launches and copies `way` enqueues."""
    memory, queue = executor._memory, executor._queue
    with memory.written(queue, executor._inputs.ports[0].buffer) as target:
        target[...] = value
    way()
    with memory.read(queue, tuple(port.buffer for port in executor._outputs.ports)) as held:
        return [array.copy() for array in held]


def test_every_way_computes_the_outputs(added: Executor) -> None:
    compared = ways(added)
    for k, (name, way) in enumerate(compared.items()):
        if name in (CALLS, "driver, one kernel"):
            continue
        for array in run(added, way, X + k):
            np.testing.assert_array_equal(array, 2 * X + k + 1, err_msg=name)


def test_recordings_of_two_models_by_turns(device: Device, added: Executor, tmp_path: Path) -> None:
    if version(device.cl) != VERSION:
        pytest.skip("the device records no commands")
    with load(chain(100).write(tmp_path / "chain.honed", device.profile), device) as chained:
        first, second = (Recording(device.cl, each._queue, commands_of(each)) for each in (added, chained))
        for k in range(3):
            for array in run(added, first.replay, X + k):
                np.testing.assert_array_equal(array, 2 * X + k + 1)
            np.testing.assert_array_equal(run(chained, second.replay, X + k)[0], X + k + 100)
            np.testing.assert_array_equal(chained.run({"x": X})["y"], X + 100)
        first.close()
        second.close()


class Later:
    """In the place of a device whose driver has a later version of the extension."""

    extensions = "cl_khr_fp16 cl_khr_command_buffer"

    def __init__(self) -> None:
        self.extensions_with_version = [SimpleNamespace(name="cl_khr_command_buffer", version=9 << 12 | 7)]


def test_another_version_is_not_called() -> None:
    with pytest.raises(DeviceError, match=r"has \(0, 9, 7\) of cl_khr_command_buffer, not \(0, 9, 0\)"):
        Recording(Later(), None, [])
