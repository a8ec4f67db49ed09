"""Every kind of function has a space on every family of devices, and what is drawn from it is right.

Candidates of all families run on the OpenCL devices of this machine, through the real measuring child: its
checks find what writes out of bounds or leaves elements out.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tvm import te
from tvm.s_tir import Schedule, ScheduleError

from honed.machine.devices import Device
from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceProfile
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.target import target_for
from honed.tuner.lower.workload import mark_constants
from honed.tuner.measure.candidate import Candidate, MeasureLimits, Workload
from honed.tuner.measure.measurer import Measurer
from honed.tuner.records.rows import Outcome
from honed.tuner.search import parts, rules, traces
from honed.tuner.search.budget import size_of
from honed.tuner.search.parts import Sketch
from honed.tuner.search.sketches import starts
from honed.tuner.search.sketches.blockwise import shares_blocks
from honed.tuner.search.sketches.convolutions import pointwise, tile_packed, tile_windowed
from honed.tuner.search.sketches.held import tile_held
from honed.tuner.search.sketches.processors import channels, panels
from honed.tuner.search.sketches.rows import share_rows
from honed.tuner.search.sketches.tile import tile_across
from honed.tuner.search.traces import read
from honed.tuner.tune import extract
from honed.tuner.tune.extract import Extracted

from .search_functions import GRAPHS, draws, profile_of, tasks

pytestmark = pytest.mark.tvm

# Verdicts are looked at and not times; a busy machine may take its time to build and to run anything.
LIMITS = MeasureLimits(
    build_seconds=120.0, run_seconds=10.0, timing_seconds=0.01, warm_seconds=0.0, max_repeats=2
)
QUICK = (  # the others are slow
    "convolution, grouped",
    "layer norm with gelu",
    "transpose",
    "product of two",
)
SPACES = 3  # of a function that are drawn from: the first, one in the middle and the last
DrawsOf = Callable[[Extracted, Sketch], list[bool]]
LOCAL = re.compile(r"__local (?:uint|int|float|long)(\d*) \w+\[(\d+)\]")


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=() if f == "mali" else pytest.mark.slow) for f in FAMILIES],
)
def profile(request: pytest.FixtureRequest, device: Device) -> DeviceProfile:
    return profile_of(request.param, device.profile)


@pytest.fixture(scope="module")
def measurer(device: Device, profile: DeviceProfile) -> Iterator[Measurer]:
    with Measurer(device.spec, profile, LIMITS) as one:
        yield one


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Extracted], Workload]:
    """Workloads of tasks, each made once for all families."""
    folder = tmp_path_factory.mktemp("sets")

    def made(one: Extracted) -> Workload:
        key = one.task.key
        return extract.workload(key, one.func, one.task.outputs, folder / key, 1)

    return made


@pytest.fixture
def one(name: str, profile: DeviceProfile, tmp_path: Path) -> Extracted:
    """The task with most operations of the graph that a test names."""
    return max(tasks(name, tmp_path, profile), key=lambda found: found.task.flops)


@pytest.fixture
def draws_of(
    profile: DeviceProfile, measurer: Measurer, workload: Callable[[Extracted], Workload]
) -> DrawsOf:
    """Draws from what a sketch makes of a task, each measured: whether it could be run. A wrong one fails."""

    def drawn(one: Extracted, sketch: Sketch) -> list[bool]:
        made = _made(one, profile, sketch)
        assert made, "the sketch fits none"
        measurer.load(workload(one))
        found = [schedule for each in made for schedule in draws(one.func, profile, [each], 1)]
        return [_right(one, schedule, profile, measurer) for schedule in found]

    return drawn


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in GRAPHS]
)
def test_draws_are_right_and_replay(
    name: str,
    profile: DeviceProfile,
    measurer: Measurer,
    workload: Callable[[Extracted], Workload],
    tmp_path: Path,
) -> None:
    for one in tasks(name, tmp_path, profile):
        space = rules.space(one.func, target_for(profile), profile)
        assert space, f"nothing to search for {one.task.name}"
        measurer.load(workload(one))
        tried = [space[n] for n in sorted({0, len(space) // 2, len(space) - 1})][:SPACES]
        drawn = [schedule for sketch in tried for schedule in draws(one.func, profile, [sketch], 1)]
        right = [_right(one, schedule, profile, measurer) for schedule in drawn]
        assert any(right), f"nothing drawn for {one.task.name} could be run"


@pytest.mark.parametrize("profile", ["mali"], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        "convolution, strided, with a shortcut",
        "convolution, strided, of rows that end with a vector",
        "convolution along one axis",
        pytest.param("convolution 3x3", marks=pytest.mark.slow),
        pytest.param("convolution 5x5 of odd images", marks=pytest.mark.slow),
        pytest.param("convolution, dilated, of wide images", marks=pytest.mark.slow),
        pytest.param("convolution, padded after 3x3", marks=pytest.mark.slow),
    ],
)
def test_packed_convolutions_are_right(one: Extracted, draws_of: DrawsOf) -> None:
    assert any(draws_of(one, tile_packed))


@pytest.mark.parametrize("profile", ["mali"], indirect=True)
@pytest.mark.parametrize(
    ("name", "sketch"),
    [
        ("convolution 1x1 of odd images, with a shortcut", pointwise),
        ("convolution 1x1 of two odd images", pointwise),
        ("convolution 1x1", tile_held),
    ],
)
def test_convolutions_of_flat_images_are_right(one: Extracted, sketch: Sketch, draws_of: DrawsOf) -> None:
    assert any(draws_of(one, sketch))


@pytest.mark.parametrize(
    "name", ["convolution 1x1", "convolution 3x3", "convolution, grouped", "convolution, padded after"]
)
def test_pointwise_is_for_odd_images_without_a_window(name: str, device: Device, tmp_path: Path) -> None:
    profile = profile_of("mali", device.profile)
    assert not [one.task.name for one in tasks(name, tmp_path, profile) if _made(one, profile, pointwise)]


@pytest.mark.parametrize("profile", ["mali"], indirect=True)
@pytest.mark.parametrize("name", ["depthwise convolution", "depthwise convolution with a sigmoid"])
def test_windows_over_single_channels_are_right(one: Extracted, draws_of: DrawsOf) -> None:
    assert any(draws_of(one, tile_windowed))


@pytest.mark.parametrize("profile", ["mali"], indirect=True)
@pytest.mark.parametrize("name", ["softmax", "softmax of long rows", "layer norm with gelu"])
def test_rows_that_work_items_share_are_right(
    name: str, one: Extracted, draws_of: DrawsOf, profile: DeviceProfile, measurer: Measurer
) -> None:
    assert any(draws_of(one, share_rows))
    found = starts([read(traces.to_text(each.trace)) for each in _made(one, profile, share_rows)])
    assert bool(found) == (name != "softmax"), "seven rows make no whole warps"
    for start in found:
        assert _right(one, traces.apply(start.text(), one.func), profile, measurer)


@pytest.mark.parametrize("profile", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        "convolution, strided, with a shortcut",
        "depthwise convolution",
        "depthwise convolution with a sigmoid",
        "convolution of a sound",
        pytest.param("convolution 1x1", marks=pytest.mark.slow),
        pytest.param("convolution 3x3", marks=pytest.mark.slow),
        pytest.param("convolution 5x5 of odd images", marks=pytest.mark.slow),
        pytest.param("convolution, dilated, of wide images", marks=pytest.mark.slow),
        pytest.param("convolution, padded after 3x3", marks=pytest.mark.slow),
        pytest.param("convolution, padded after", marks=pytest.mark.slow),
    ],
)
def test_convolutions_with_channels_along_the_lanes_are_right(one: Extracted, draws_of: DrawsOf) -> None:
    assert any(draws_of(one, channels))


@pytest.mark.parametrize("profile", ["cpu"], indirect=True)
@pytest.mark.parametrize(
    ("name", "constant"),
    [
        ("product of odd sizes with bias", True),
        ("product of odd rows of two heads", False),
        ("dense with bias", True),
        ("dense of 1000 classes", True),
        pytest.param("product of odd sizes with bias", False, marks=pytest.mark.slow),
        pytest.param("product of odd sizes, transposed", True, marks=pytest.mark.slow),
        pytest.param("product of odd sizes, transposed", False, marks=pytest.mark.slow),
        pytest.param("product of odd rows of two heads", True, marks=pytest.mark.slow),
    ],
)
def test_products_of_panels_are_right(
    one: Extracted, constant: bool, profile: DeviceProfile, draws_of: DrawsOf
) -> None:
    if constant:
        one = replace(one, func=mark_constants(one.func, [1], profile))
    assert any(draws_of(one, panels))


@pytest.mark.parametrize("profile", ["gpu"], indirect=True)
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("product with packed weights", 1),
        pytest.param("product with packed weights and a residual", 1, marks=pytest.mark.slow),
        pytest.param("product with packed weights, padded", 2, marks=pytest.mark.slow),
    ],
)
def test_groups_that_share_the_blocks_of_a_row_are_right(
    one: Extracted,
    kernels: int,
    profile: DeviceProfile,
    measurer: Measurer,
    workload: Callable[[Extracted], Workload],
) -> None:
    space = rules.space(one.func, target_for(profile), profile)
    shared = [each for each in space if shares_blocks(read(traces.to_text(each.trace)))]
    measurer.load(workload(one))
    drawn = draws(one.func, profile, shared, 6)
    first, *_ = starts([read(traces.to_text(each.trace)) for each in shared])
    drawn.append(traces.apply(first.text(), one.func))
    assert sum(_right(one, schedule, profile, measurer) for schedule in drawn) > 2
    assert {len(_lowered(schedule, profile).launches) for schedule in drawn} == {kernels}


@pytest.mark.parametrize(
    "name", ["dense with bias", "batched matmul of heads", "convolution 1x1", "pooling", "softmax"]
)
def test_panels_leaves_what_other_sketches_serve_as_well(name: str, device: Device, tmp_path: Path) -> None:
    profile = profile_of("cpu", device.profile)
    assert not [one.task.name for one in tasks(name, tmp_path, profile) if _made(one, profile, panels)]


@pytest.mark.parametrize(
    "name",
    [
        "convolution 1x1 of rows of vectors",
        "convolution, grouped",
        "pooling",
        "batched matmul",
        "batched matmul of heads",
    ],
)
def test_channels_leaves_what_other_sketches_serve_as_well(name: str, device: Device, tmp_path: Path) -> None:
    profile = profile_of("cpu", device.profile)
    assert not [one.task.name for one in tasks(name, tmp_path, profile) if _made(one, profile, channels)]


@pytest.mark.parametrize(
    "name", ["convolution 1x1", "convolution, grouped", "depthwise convolution", "pooling"]
)
def test_packed_leaves_what_other_sketches_serve_as_well(name: str, device: Device, tmp_path: Path) -> None:
    profile = profile_of("mali", device.profile)
    assert not [one.task.name for one in tasks(name, tmp_path, profile) if _made(one, profile, tile_packed)]


@pytest.mark.parametrize(
    "name", ["convolution 1x1", "convolution 3x3", "convolution, grouped", "pooling", "batched matmul"]
)
def test_windowed_is_for_single_channels(name: str, device: Device, tmp_path: Path) -> None:
    profile = profile_of("mali", device.profile)
    assert not [one.task.name for one in tasks(name, tmp_path, profile) if _made(one, profile, tile_windowed)]


@pytest.mark.parametrize("profile", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", ["convolution of a sound"])
def test_lanes_across_gather_the_operand_that_moves_along_them(
    one: Extracted, profile: DeviceProfile
) -> None:
    """The other, copied, took a convolution of a sound 230 times as long: most of it is between frames."""
    made, *_ = _made(one, profile, tile_across)
    kept = re.findall(r'alloc_buffer\(\(([0-9, ]+)\).*scope="local"', made.mod["main"].script())
    assert "34, 1, 40" in kept
    assert "1, 1, 640" not in kept


@pytest.mark.parametrize("profile", ["cpu"], indirect=True)
@pytest.mark.parametrize("name", ["convolution of a sound", "pooling"])
def test_lanes_across_have_no_row_of_another_sketch(one: Extracted, profile: DeviceProfile) -> None:
    made, *_ = _made(one, profile, tile_across)
    assert starts([read(traces.to_text(made.trace))]) == []


def _made(one: Extracted, profile: DeviceProfile, sketch: Sketch) -> list[Schedule]:
    """What a sketch makes of a function, by lanes."""
    limits, found = rules.rules_of(profile).sketches, []
    for lanes in parts.lane_choices(one.func, limits):
        schedule = Schedule(traces.as_module(one.func), debug_mask="none")
        with contextlib.suppress(ValueError, ScheduleError):
            sketch(schedule, limits, lanes)
            found.append(schedule)
    return found


def _right(one: Extracted, schedule: Schedule, profile: DeviceProfile, measurer: Measurer) -> bool:
    """Whether a draw could be run; fails where it is wrong, too large, or not what its trace makes."""
    scheduled, text = schedule.mod["main"], traces.to_text(schedule.trace)
    assert size_of(scheduled).registers <= rules.rules_of(profile).most.registers
    try:
        lowered = _lowered(schedule, profile)
    except LoweringFailed as failed:
        if "above the device profile's" not in str(failed):
            raise
        return False  # its source is too long: known only now
    assert _lowered(traces.apply(text, one.func), profile) == lowered
    for launch in lowered.launches:
        assert math.prod(launch.block) <= profile.rules.max_threads
    assert _local_bytes(lowered.source) <= profile.limits.local_mem_bytes
    verdict = measurer.measure(Candidate.of(traces.identity(text), lowered))
    assert verdict.outcome is Outcome.RIGHT, f"{verdict.outcome}: {verdict.reason}\n{lowered.source}"
    return True


def _lowered(schedule: Schedule, profile: DeviceProfile) -> Lowered:
    return lower_function(schedule.mod["main"], "main", target_for(profile), profile)


def _local_bytes(source: str) -> int:
    """Of the kernel that declares most; elements have four bytes here."""
    kernels = source.split("__kernel")
    return max(sum(4 * int(w or 1) * int(n) for w, n in LOCAL.findall(kernel)) for kernel in kernels)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_reads_a_scalar_has_a_space(device: Device, family: str) -> None:
    """Found in a random graph: a scalar's region has no axis to look at."""
    image, scalar = te.placeholder((1, 4, 6, 6), name="image"), te.placeholder((), name="scalar")
    scaled = te.compute((1, 4, 6, 6), lambda *at: image(*at) * scalar(), name="scaled")
    profile = profile_of(family, device.profile)
    func = te.create_prim_func([image, scalar, scaled])
    assert rules.space(func, target_for(profile), profile) is not None
