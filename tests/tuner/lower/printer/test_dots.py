"""Dot products of bytes: exact, by functions that stand in for a device's, and used only where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled.model import CompiledModel
from honed.tuner.compiler import verification
from honed.tuner.frontend import import_relax, normalise
from honed.tuner.lower import DOT, DOT_ADD
from honed.tuner.lower.module import lower_module
from honed.valhall.bench import bench_profile
from tests.tuner.frontend.test_rules import run

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]
# No stand-in of speed: it multiplies byte by byte, and saturates as cl_khr_integer_dot_product says.
STAND_IN = f"""
int {DOT}(uint a, uint b) {{
  const char4 x = as_char4(a), y = as_char4(b);
  return x.s0 * y.s0 + x.s1 * y.s1 + x.s2 * y.s2 + x.s3 * y.s3;
}}
int {DOT_ADD}(uint a, uint b, int c) {{ return add_sat({DOT}(a, b), c); }}
"""


def integers(dtype: Any, *shape: int, seed: int = 0) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.random.default_rng((seed, *shape)).integers(limits.min, limits.max + 1, shape).astype(dtype)


def model(
    op: str, given: Mapping[str, np.ndarray], constants: Mapping[str, np.ndarray], **attrs: Any
) -> onnx.ModelProto:
    """One operator on its inputs, then constants, in int32."""
    graph = helper.make_graph(
        [helper.make_node(op, [*given, *constants], ["out"], **attrs)],
        "bytes",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in given.items()
        ],
        [helper.make_tensor_value_info("out", TensorProto.INT32, None)],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.fixture
def mali(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device with the rules of a Mali, and its dot products as functions."""
    profile = bench_profile("mali-g610")
    assembled = verification.assemble

    def standing_in(*args: Any) -> tuple[CompiledModel, Any]:
        made, constants = assembled(*args)
        assert any(DOT_ADD in source for source in made.sources)
        return replace(made, sources=tuple(STAND_IN + source for source in made.sources)), constants

    monkeypatch.setattr(verification, "assemble", standing_in)
    limits = replace(device.profile.limits, int8_dots=True)
    return replace(device, profile=replace(device.profile, limits=limits, rules=profile.rules))


def same(model: onnx.ModelProto, given: Mapping[str, np.ndarray], device: Device) -> None:
    (found,) = verification.run_model(model, given, device).values()
    (expected,) = run(model, given)
    np.testing.assert_array_equal(found, expected)


PRODUCTS = [
    ((8, 64), (64, 24), np.uint8, {}),
    ((5, 30), (30, 7), np.int8, {}),  # no sum of whole words, no vectors of columns
    ((2, 3, 12), (12, 16), np.uint8, {"z": np.array(7, np.uint8)}),
    ((2, 3, 12), (2, 12, 16), np.int8, {"z": np.array(-5, np.int8)}),
]


@pytest.mark.parametrize(("left", "right", "kind", "zero"), PRODUCTS)
def test_products(
    left: tuple[int, ...], right: tuple[int, ...], kind: Any, zero: dict[str, np.ndarray], mali: Device
) -> None:
    given = {"x": integers(kind, *left)}
    same(model("MatMulInteger", given, {"w": integers(np.int8, *right, seed=1), **zero}), given, mali)


UNSIGNED = [np.array(100, np.uint8), integers(np.uint8, 16, seed=5), None]


@pytest.mark.parametrize("zero", UNSIGNED)
def test_unsigned_weights(zero: np.ndarray | None, mali: Device) -> None:
    given = {"x": integers(np.uint8, 5, 24)}
    constants = {"w": integers(np.uint8, 24, 16, seed=1), "z": np.array(77, np.uint8)}
    same(model("MatMulInteger", given, constants | ({} if zero is None else {"q": zero})), given, mali)


def test_unsigned_weights_of_a_convolution(mali: Device) -> None:
    given = {"x": integers(np.uint8, 1, 6, 7, 7)}
    constants = {"w": integers(np.uint8, 8, 6, 3, 3, seed=1), "z": np.array(77, np.uint8)}
    made = model("ConvInteger", given, constants | {"q": np.array(130, np.uint8)}, pads=[1, 1, 1, 1])
    (found,) = verification.run_model(made, given, mali).values()
    (expected,) = onnx.reference.ReferenceEvaluator(made).run(None, given)
    np.testing.assert_array_equal(found, expected)


def test_extremes_fit(mali: Device) -> None:
    given = {"x": np.full((2, 4096), -128, np.int8)}
    same(model("MatMulInteger", given, {"w": np.full((4096, 8), -128, np.int8)}), given, mali)


def test_a_zero_point_that_is_computed(mali: Device) -> None:
    given = {"x": integers(np.uint8, 4, 20), "z": np.array(99, np.uint8)}
    made = model("MatMulInteger", {"x": given["x"]}, {"w": integers(np.int8, 20, 8)})
    made.graph.node[0].input.append("z")
    made.graph.input.append(helper.make_tensor_value_info("z", TensorProto.UINT8, []))
    same(made, given, mali)


CONVOLUTIONS = [
    ((1, 8, 10, 9), (12, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 7, 9, 9), (5, 7, 3, 3), {"strides": [2, 2], "pads": [0, 1, 1, 0]}),
    ((2, 8, 6, 6), (8, 8, 1, 1), {}),
    ((1, 4, 12, 7), (4, 4, 2, 3), {"dilations": [2, 1]}),
]


@pytest.mark.parametrize(("image", "kernel", "attrs"), CONVOLUTIONS)
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_convolutions(
    image: tuple[int, ...], kernel: tuple[int, ...], attrs: dict[str, Any], kind: Any, mali: Device
) -> None:
    given = {"x": integers(kind, *image)}
    constants = {"w": integers(np.int8, *kernel, seed=1), "z": np.array(9, kind)}
    made = model("ConvInteger", given, constants, **attrs)
    (found,) = verification.run_model(made, given, mali).values()
    (expected,) = onnx.reference.ReferenceEvaluator(made).run(None, given)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("image", "kernel", "attrs"), CONVOLUTIONS[:2])
def test_convolutions_of_a_device_without(
    image: tuple[int, ...], kernel: tuple[int, ...], attrs: dict[str, Any], device: Device
) -> None:
    given = {"x": integers(np.uint8, *image)}
    constants = {"w": integers(np.int8, *kernel, seed=1), "z": np.array(9, np.uint8)}
    made = model("ConvInteger", given, constants, **attrs)
    (found,) = verification.run_model(made, given, device).values()
    (expected,) = onnx.reference.ReferenceEvaluator(made).run(None, given)
    np.testing.assert_array_equal(found, expected)


def uses_dots(profile: DeviceProfile) -> bool:
    made = normalise(model("MatMulInteger", {"x": integers(np.int8, 4, 16)}, {"w": integers(np.int8, 16, 8)}))
    functions = lower_module(import_relax(made), profile).functions.values()
    return any(DOT_ADD in function.source for function in functions)


def test_only_devices_that_have_instructions_for_them_use_them() -> None:
    profile = bench_profile("mali-g610")
    assert uses_dots(profile)
    assert not uses_dots(replace(profile, limits=replace(profile.limits, int8_dots=False)))


@pytest.mark.parametrize("driver", ["kbase", "panthor", ""])
def test_no_driver_is_told_from_another_by_its_name(driver: str) -> None:
    profile = bench_profile("mali-g610")
    assert uses_dots(replace(profile, identity=replace(profile.identity, kernel_driver=driver)))
