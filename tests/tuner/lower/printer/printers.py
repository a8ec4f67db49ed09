"""Kernels printed by TVM and by us, run on the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx
from tvm.target import Target

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.runtime.execution import programs
from honed.tuner.lower.opencl import Lowered, lower_function
from tests.tuner.lower.lowering import run_lowered

from .tvm_printer import lower_by_tvm

# Of the largest value: sums are fused and constants exact in one of them and not in the other.
TOLERANCE = {2: 5e-3, 4: 1e-4, 8: 1e-10}


@dataclass(frozen=True, slots=True)
class Printed:
    """A scheduled function, lowered with our printer, and TVM's source for it."""

    func: tirx.PrimFunc
    ours: Lowered
    theirs: str


def print_both(func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile) -> Printed:
    """Lower with both printers; all but the source must be the same."""
    ours = lower_function(func, name, target, profile)
    long = replace(profile, rules=replace(profile.rules, max_source_bytes=1 << 30))
    theirs = lower_by_tvm(func, name, target, long)
    assert replace(ours, source="") == replace(theirs, source="")
    return Printed(func, ours, theirs.source)


def builds(source: str, device: Device) -> bool:
    """Whether the device's driver builds a program."""
    try:
        programs.build(device, source, None)
    except programs.NotBuilt:
        return False
    return True


def assert_same_answers(printed: Printed, device: Device) -> None:
    """Run both on the same made-up data, and compare all memory they were given."""
    given = [_made_up(p, n) for n, p in enumerate(printed.func.params)]
    answers = []
    for source in (printed.theirs, printed.ours.source):
        memory = [array.copy() for array in given]
        run_lowered(replace(printed.ours, source=source), [], memory, device)
        answers.append(memory)
    _compare(*answers, source=printed.ours.source)


def _made_up(parameter: Any, seed: int) -> np.ndarray:
    """Normal numbers; small integers from 0, which may be indices."""
    dtype = np.dtype(str(parameter.dtype))
    shape = tuple(int(extent) for extent in parameter.shape)
    rng = np.random.default_rng(seed)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.itemsize == 1:
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    return rng.integers(0, 2, shape).astype(dtype)


def _compare(theirs: Sequence[np.ndarray], ours: Sequence[np.ndarray], source: str) -> None:
    for n, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        if expected.dtype.kind != "f":
            np.testing.assert_array_equal(found, expected, err_msg=f"parameter {n}\n{source}")
            continue
        tolerance = TOLERANCE[expected.dtype.itemsize]
        largest = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
        np.testing.assert_allclose(
            found, expected, rtol=tolerance, atol=tolerance * largest, err_msg=f"parameter {n}\n{source}"
        )
