"""No kernel that is lowered for a processor, a Mali or an NVIDIA GPU reads or writes beside its buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from tests.models import FOLDER

from .fence import FAMILIES, FencedKernel, FencedRuns, examine, files, node_tests, random_models
from .graph.graphs import parsed, weights
from .search.search_functions import profile_of

pytestmark = pytest.mark.tvm

_KERNEL = "__kernel void k(__global const float* a, __global float* b) {{ b[get_global_id(0)] = a[{}]; }}"
# Depthwise, of channels that fill no block, between products over all channels.
_BLOCKS = """(float[1,6,9,11] x) => (float[1,5,9,11] y) {
    a = Conv(x, w) b = Conv <group = 52, pads = [3, 3, 3, 3]> (a, d) c = Relu(b) y = Conv(c, v) }"""


@pytest.fixture(scope="module")
def runs(device: Device) -> Iterator[FencedRuns]:
    with FencedRuns(device.spec) as made:
        yield made


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, device: Device) -> DeviceProfile:
    return profile_of(FAMILIES[request.param], device.profile)


def test_the_fence_sees_one_element_too_many(runs: FencedRuns) -> None:
    inside = FencedKernel(_KERNEL.format("get_global_id(0)"), "k", (256, 256), (64, 1, 1), (16, 1, 1))
    assert runs.run(inside) == ""
    for index in ("get_global_id(0) + 1", "(int)get_global_id(0) - 1"):
        assert "its process ended" in runs.run(replace(inside, source=_KERNEL.format(index)))
    assert runs.run(replace(inside, source=_KERNEL.format("63 - get_global_id(0)"))) == ""
    assert runs.run(replace(inside, source="not C")).startswith("not built")


def test_channels_that_fill_no_block(family: DeviceProfile, runs: FencedRuns) -> None:
    constants: dict[str, np.ndarray] = {
        "w": weights(52, 6, 1, 1), "d": weights(52, 1, 7, 7), "v": weights(5, 52, 1, 1)
    }  # fmt: skip
    found = examine([("blocks", parsed(_BLOCKS, **constants))], family, runs)
    assert found.models == 1
    assert not found.bad
    assert not found.not_built


@pytest.mark.slow
def test_random_graphs(family: DeviceProfile, runs: FencedRuns) -> None:
    found = examine(random_models(0, 40), family, runs)
    assert found.models > 35
    assert not found.bad


@pytest.mark.slow
def test_real_models(family: DeviceProfile, runs: FencedRuns) -> None:
    found = examine(files(sorted(FOLDER.glob("*.onnx"))), family, runs)
    assert found.models
    assert not found.bad


@pytest.mark.slow
def test_node_tests(family: DeviceProfile, runs: FencedRuns) -> None:
    """Each eighth, as all take half an hour: `python -m tests.tuner.fence --nodes` has them."""
    found = examine(itertools.islice(node_tests(), 0, None, 8), family, runs)
    assert found.models > 150
    assert not found.bad
