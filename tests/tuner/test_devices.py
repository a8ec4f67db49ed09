"""The same kernels on several devices: files of one function, compared with their probes in children."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.devices import beds, kernels
from benchmarks.devices.running import Executed
from benchmarks.supervising import work_off
from tvm import te

from honed.runtime.errors import DeviceError
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.target import target_for
from honed.tuner.tune.extract import workload


def test_what_is_wrong_on_a_device_is_told(tmp_path: Path) -> None:
    x, y = (te.placeholder((4, 32), name=name) for name in "xy")
    func = te.create_prim_func([x, y, te.compute(x.shape, lambda *i: x(*i) - y(*i))])
    device = kernels.mali()
    load = workload("minus", func, 1, tmp_path / "sets", 1)
    rule, lowered, _ = untuned_kernels(func, "main", target_for(device), device)
    assert " - " in lowered.source
    wrong = replace(lowered, source=lowered.source.replace(" - ", " + "))
    broken = replace(lowered, source=lowered.source.replace(" - ", " - missing + "))
    for n, one in enumerate((lowered, wrong, broken)):
        kernels.write_one(tmp_path / f"{n}.honed", load, rule, one, device)
    (bed, *_) = beds.here([], tmp_path)
    found = work_off(Executed, [*bed.command, bed.spec], 3, 240.0, each_seconds=120.0)
    assert [one.error == 0 for one in found] == [True, False, False]
    assert [bool(one.wrong) for one in found] == [False, True, False]
    assert [bool(one.failed) for one in found] == [False, False, True]
    assert "where 1e-05 is allowed" in found[1].wrong


def test_without_its_root_rusticl_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="make it with `benchmarks/devices/build"):
        beds.rusticl(tmp_path, tmp_path)
