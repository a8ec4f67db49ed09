"""Convolutions in blocks of channels on devices whose groups have many work-items: right, and cut to fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tvm import te, tirx, topi
from tvm.s_tir import Schedule

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.functions.layouts import BlockedConvolution, blocks_of
from honed.tuner.lower.opencl import lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.measure.candidate import Candidate, MeasureLimits
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.verdict import Outcome
from honed.tuner.search import rules, traces
from honed.tuner.search.budget import launches_of, size_of
from honed.tuner.search.decisions import read
from honed.tuner.search.sketches.blocked import blocked_group_tile, blocked_groups
from honed.tuner.tune.extract import workload
from tests.tuner.search.search_functions import draws, imagined, profile_of

pytestmark = pytest.mark.tvm

LANES = 4
# Channels in and out (the same where each is by itself), rows and columns, window, step, columns added.
CASES = {
    "3x3 of odd images": (8, 16, (13, 13), 3, 1, 0, False),
    "3x3 of odd images with columns added": (8, 8, (5, 13), 3, 1, 1, False),
    "3x3, strided, of an image in the model's layout": (3, 12, (11, 12), 3, 2, 0, False),
    "1x1 of a flat image": (12, 20, (1, 40), 1, 1, 0, False),
    "1x1 of a flat image with pixels added": (8, 8, (1, 49), 1, 1, 3, False),
    "each channel by itself": (12, 12, (14, 9), 3, 1, 0, True),
    "each channel by itself, 5x5, strided": (8, 8, (12, 12), 5, 2, 0, True),
}


def convolution(name: str, *, selects: bool = True) -> tirx.PrimFunc:
    """With a bias and a ReLU."""
    inputs, outputs, image, window, step, more, depthwise = CASES[name]
    pad, given = window // 2, inputs >= LANES
    what = BlockedConvolution(
        channels=outputs,
        depthwise=depthwise,
        blocked=given,
        window=(window, window),
        strides=(step, step),
        dilation=(1, 1),
        padding=(pad, pad, pad, pad + more),
        lanes=LANES,
        selects=selects,
    )
    into, out = blocks_of(inputs, LANES), blocks_of(outputs, LANES)
    x = te.placeholder((1, into, *image, LANES) if given else (1, inputs, *image), "float32", "x")
    w = te.placeholder(what.weights(weights(name)).shape, "float32", "w")
    b = te.placeholder((1, out, 1, 1, LANES), "float32", "b")
    made = what.compute(x, w)
    images, channels, rows, columns, lanes = (int(extent) for extent in made.shape)
    kept = te.compute((images, channels, rows, columns - more, lanes), lambda *at: made(*at), "kept")
    return narrow_indices(te.create_prim_func([x, w, b, topi.nn.relu(topi.add(kept if more else made, b))]))


def weights(name: str) -> np.ndarray:
    inputs, outputs, _, window, _, _, depthwise = CASES[name]
    return np.ones((outputs, 1 if depthwise else inputs, window, window), np.float32)


@pytest.mark.slow
@pytest.mark.opencl
@pytest.mark.parametrize("family", ["mali", "gpu"])
def test_draws_are_right(family: str, device: Device, tmp_path: Path) -> None:
    """The table's rectangle, where its group is one for the family, and a draw."""
    profile = profile_of(family, device.profile)
    limits = MeasureLimits(timing_seconds=0.01, warm_seconds=0.0, max_repeats=2)
    with Measurer(device.spec, profile, limits) as measurer:
        for n, name in enumerate(CASES):
            func = convolution(name)
            sketch = sketched(func, profile)
            made = draws(func, profile, [sketch], 1)
            assert made, f"nothing drawn for {name}"
            if (table := blocked_group_tile(read(traces.to_text(sketch.trace)))) is not None:
                made.append(traces.apply(table.text(), func))
            measurer.load(workload(f"{family}{n}", func, 1, tmp_path / f"{family}{n}", seed=1))
            for one in made:
                lowered = lower_function(one.mod["main"], "main", target_for(profile), profile)
                assert len(lowered.launches) == 1, name  # nothing is padded before or left out behind
                identity = traces.identity(traces.to_text(one.trace))
                verdict = measurer.measure(Candidate.of(identity, lowered))
                assert verdict.outcome is Outcome.RIGHT, f"{name}: {verdict.reason}\n{lowered.source}"


@pytest.mark.parametrize("name", CASES)
def test_what_is_selected_is_what_branches_choose(name: str, tmp_path: Path) -> None:
    for folder, selects in (("selected", True), ("chosen", False)):
        workload("same", convolution(name, selects=selects), 1, tmp_path / folder, seed=1)
    for file in sorted((tmp_path / "selected").glob("*.npy")):
        np.testing.assert_array_equal(np.load(file), np.load(tmp_path / "chosen" / file.name))


@pytest.mark.parametrize("name", CASES)
def test_the_tables_rectangle_fits_the_registers(name: str) -> None:
    profile, func = imagined("mali"), convolution(name)
    limits = rules.rules_of(profile.rules)
    found = blocked_group_tile(read(traces.to_text(sketched(func, profile).trace)))
    assert found is not None
    played = traces.apply(found.text(), func)
    assert read(traces.to_text(played.trace)).decisions == found.decisions
    registers = size_of(played.mod["main"], limits.element_bits).registers
    assert 0 < registers <= limits.most.registers
    assert all(threads <= profile.rules.max_threads for threads, _ in launches_of(played.mod["main"]))


def test_processors_have_their_own_sketch() -> None:
    limits = rules.rules_of(imagined("cpu").rules).sketches
    schedule = traces.unscheduled(traces.as_module(convolution("3x3 of odd images")))
    assert not blocked_groups(schedule, limits, LANES)


def sketched(func: tirx.PrimFunc, profile: DeviceProfile) -> Schedule:
    schedule = traces.unscheduled(traces.as_module(func))
    assert blocked_groups(schedule, rules.rules_of(profile.rules).sketches, LANES)
    return schedule
