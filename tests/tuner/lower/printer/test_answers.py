"""Our printer and TVM's give the same answers, executed: of models, node tests and drawn schedules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from tvm import tirx
from tvm.target import Target

from honed.machine.devices import Device
from honed.machine.families import FAMILIES
from honed.machine.profile import DeviceProfile
from honed.tuner import frontend
from honed.tuner.compiler.verification import run_model
from honed.tuner.lower import schedule
from honed.tuner.lower.module import lower_module
from honed.tuner.lower.opencl import Lowered, LoweringFailed
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules
from tests import models
from tests.tuner.backend import cases
from tests.tuner.backend.run import RIGHT_LIST
from tests.tuner.backend.worker import run_case
from tests.tuner.search.search_functions import GRAPHS, dense, draws, profile_of, tasks

from .printers import Printed, assert_same_answers, builds, print_both

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]

MODELS = ("mobilenet_v2_035_128", "squeezenet_fp16", "super_resolution", "yolox_nano")
QUICK_GRAPHS = ("place of the largest",)
NODES = RIGHT_LIST.read_text().split()


def driven_by(driver: str, profile: DeviceProfile) -> DeviceProfile:
    """The profile with such a version of its driver, unless that is empty."""
    identity = replace(profile.identity, driver_version=driver or profile.identity.driver_version)
    return replace(profile, identity=identity)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Printed]]:
    """What default schedules are lowered to from here on, by both printers."""
    found: list[Printed] = []

    def both(func: tirx.PrimFunc, name: str, target: Target, profile: DeviceProfile) -> Lowered:
        found.append(print_both(func, name, target, profile))
        return found[-1].ours

    monkeypatch.setattr(schedule, "lower_function", both)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, printed: list[Printed], device: Device) -> None:
    normalised = frontend.normalise(frontend.load(models.path(name)), profile=device.profile)
    lower_module(frontend.import_relax(normalised), device.profile)
    assert printed
    for one in printed:
        assert_same_answers(one, device)


def sample() -> list[Any]:
    quick = set(NODES[::640])
    return [pytest.param(n, marks=() if n in quick else pytest.mark.slow) for n in NODES[::16]]


@pytest.mark.parametrize("name", sample())
def test_node_tests(name: str, printed: list[Printed], device: Device) -> None:
    assert run_case(cases.all_cases()[name], device)["outcome"] == "right"
    for one in printed:
        assert_same_answers(one, device)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK_GRAPHS else pytest.mark.slow) for n in GRAPHS]
)
@pytest.mark.parametrize(
    ("family", "driver"),
    [
        *(pytest.param(f, "", marks=() if f == "mali" else pytest.mark.slow) for f in FAMILIES),
        ("mali", "Mesa 26.2"),
    ],
)
def test_drawn_schedules(name: str, family: str, driver: str, device: Device, tmp_path: Path) -> None:
    profile = driven_by(driver, profile_of(family, device.profile))
    target = target_for(profile)
    compared = 0
    for one in tasks(name, tmp_path, profile):
        for sketch in rules.space(one.func, target, profile):
            for drawn in draws(one.func, profile, [sketch], 1):
                try:
                    both = print_both(drawn.mod["main"], "main", target, profile)
                except LoweringFailed as failed:
                    # Bytes and numbers of a product may share memory of a work-group, which is not printed.
                    shared = "packed" in name and re.search("_shared_[0-9]+ is read as", str(failed))
                    assert shared or "above the device profile's" in str(failed)  # noqa: PT017
                    continue
                assert builds(both.ours.source, device)
                if "packed" in name and not builds(both.theirs, device):
                    continue  # TVM's printer shifts a number by a vector, which OpenCL C has not
                assert_same_answers(both, device)
                compared += 1
    assert compared


def test_numbers_that_mesa_cannot_know_are_right(device: Device) -> None:
    profile = driven_by("Mesa 26.2", profile_of("mali", device.profile))
    func, target = narrow_indices(dense(16, 32, 640)), target_for(profile)
    hidden = 0  # of the draws from a sketch whose loops no schedule marks
    for drawn in draws(func, profile, rules.space(func, target, profile)[-1:], 2):
        both = print_both(drawn.mod["main"], "main", target, profile)
        assert_same_answers(both, device)
        hidden += "+ get_group_id(2);" in both.ours.source
    assert hidden


def test_a_vector_of_conditions_meets_one_that_is_the_same_for_all(device: Device) -> None:
    """Of 16 boxes RoiAlign's vectors are of places in a row, for which a column's bounds are one."""
    boxes, r = 16, np.random.default_rng(0)
    node = helper.make_node(
        "RoiAlign",
        ["x", "boxes", "images"],
        ["y"],
        output_height=4,
        output_width=4,
        spatial_scale=0.25,
        sampling_ratio=2,
    )
    kinds = {
        "x": ("float32", [1, 32, 16, 16]),
        "boxes": ("float32", [boxes, 4]),
        "images": ("int64", [boxes]),
    }
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)
        for name, (kind, shape) in kinds.items()
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8)
    given = {
        "x": r.normal(size=(1, 32, 16, 16)).astype(np.float32),
        "boxes": np.sort(r.uniform(0, 64, (boxes, 2, 2)), 1).reshape(boxes, 4).astype(np.float32),
        "images": np.zeros(boxes, np.int64),
    }
    [expected] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given)
    np.testing.assert_allclose(run_model(model, given, device)["y"], expected, rtol=1e-4, atol=1e-5)
