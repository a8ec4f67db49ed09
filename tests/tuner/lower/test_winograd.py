"""Winograd's convolutions: what they compute, how far off halves are, and where they are taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from honed.machine.devices import Device
from honed.machine.profile import DeviceProfile
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import SourceModel
from honed.runtime.execution.executor import load
from honed.tuner import frontend
from honed.tuner.compiler.assemble import assemble
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.functions import winograd
from honed.tuner.lower.module import lower_module
from honed.tuner.lower.target import target_for
from honed.tuner.search import rules
from honed.tuner.tune.extract import extract
from tests.tuner.search.search_functions import imagined, profile_of

pytestmark = pytest.mark.tvm


def model(channels: int, outputs: int, shape: tuple[int, int, int], *, steps: int = 1) -> onnx.ModelProto:
    """Relu(Conv(x, w) + b), padded to the size of its images."""
    images, rows, columns = shape
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((outputs, channels, 3, 3)) * np.sqrt(2 / (9 * channels))).astype(np.float32)
    b: np.ndarray = rng.standard_normal(outputs).astype(np.float32)
    kind = onnx.TensorProto.FLOAT
    made = [-(-extent // steps) for extent in (rows, columns)]
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4, strides=[steps] * 2),
        onnx.helper.make_node("Relu", ["c"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", kind, [images, channels, rows, columns])],
        [onnx.helper.make_tensor_value_info("y", kind, [images, outputs, *made])],
        [onnx.numpy_helper.from_array(w, "w"), onnx.numpy_helper.from_array(b, "b")],
    )
    return onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])


def kernels(made: onnx.ModelProto, profile: DeviceProfile, folder: Path) -> list[str]:
    onnx.save(made, folder / "m.onnx")
    return sorted(one.task.name for one in extract(folder / "m.onnx", {}, "fp32", profile).tasks)


def expected(made: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The direct sum, in float64."""
    w, b = (onnx.numpy_helper.to_array(one).astype(np.float64) for one in made.graph.initializer)
    rows, columns = x.shape[2:]
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    total = b[None, :, None, None] + sum(
        np.einsum("kc,nchw->nkhw", w[:, :, i, j], padded[:, :, i : i + rows, j : j + columns])
        for i in range(3)
        for j in range(3)
    )
    found: np.ndarray = np.maximum(total, 0)
    return found


@pytest.mark.opencl
@pytest.mark.parametrize("shape", [(1, 6, 6), (2, 5, 7)], ids=["even", "two odd images"])
def test_it_is_the_convolution(
    shape: tuple[int, int, int], device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To five times the error of the direct sum."""
    monkeypatch.setattr(winograd, "_LEAST_CHANNELS", 1)
    monkeypatch.setattr(winograd, "_LEAST_TILES", 1)
    made, profile = model(12, 8, shape), profile_of("mali", device.profile)
    normalised = frontend.normalise(made, precision="fp32")
    lowered = lower_module(frontend.import_relax(normalised), profile, first=untuned_kernels)
    assert len(lowered.functions) == 3, "the image, the products, and the result with bias and Relu"
    source = SourceModel(sha256="0" * 64, filename="m", producer="", opset=17, precision="fp32", notes=())
    found, constants = assemble(source, profile, normalised, lowered, None)
    modelfile.write(tmp_path / "m.honed", found, constants)
    x = np.random.default_rng(2).standard_normal((shape[0], 12, *shape[1:])).astype(np.float32)
    right = expected(made, x)
    with load(tmp_path / "m.honed", device) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], right, atol=5e-6 * np.abs(right).max())


def test_halves_err_little_more_than_the_direct_sum_does() -> None:
    """With weights as they are transformed, and points and sums of a tile rounded to halves."""
    rng = np.random.default_rng(3)
    x = np.maximum(rng.standard_normal((256, 4, 4)), 0).astype(np.float16).astype(np.float64)
    w = (rng.standard_normal((32, 256, 3, 3)) * np.sqrt(2 / (9 * 256))).astype(np.float16)
    into, back = np.array(winograd._INTO), np.array(winograd._BACK)
    points = np.einsum("ia,cab,jb->ijc", into, x, into).astype(np.float16).astype(np.float64)
    weights = winograd._weights(w).astype(np.float64).reshape(4, 4, 32, 256)
    sums = np.einsum("ijkc,ijc->kij", weights, points).astype(np.float16).astype(np.float64)
    found = np.einsum("ai,kij,bj->kab", back, sums, back)
    right = np.stack(
        [
            np.einsum("kcij,cij->k", w.astype(np.float64), x[:, a : a + 3, b : b + 3])
            for a in range(2)
            for b in range(2)
        ],
        1,
    ).reshape(32, 2, 2)
    assert np.abs(found - right).max() < 3e-3 * np.abs(right).max()


@pytest.mark.parametrize(
    ("channels", "shape", "steps", "family", "taken"),
    [
        (256, (1, 14, 14), 1, "mali", True),
        (256, (1, 14, 14), 2, "mali", False),
        (256, (1, 8, 8), 1, "mali", False),  # few tiles for so many weights
        (64, (1, 28, 28), 1, "mali", False),  # few channels for so many tiles
        (256, (1, 14, 14), 1, "cpu", False),
    ],
)
def test_it_is_taken_where_it_pays(
    channels: int, shape: tuple[int, int, int], steps: int, family: str, taken: bool, tmp_path: Path
) -> None:
    names = kernels(model(channels, 256, shape, steps=steps), imagined(family), tmp_path)
    assert ("winograd_image" in names) == taken
    assert len(names) == (3 if taken else 1)


def test_tiles_are_transformed_by_one_sketch_only(tmp_path: Path) -> None:
    """It loads no pixel of the sums' tiles twice."""
    onnx.save(model(256, 256, (1, 14, 14)), tmp_path / "m.onnx")
    one = imagined("mali")
    found = {task.task.name: task.func for task in extract(tmp_path / "m.onnx", {}, "fp32", one).tasks}
    spaces = {name: rules.space(func, target_for(one), one) for name, func in found.items()}
    assert {name: len(space) for name, space in spaces.items() if "matmul" not in name} == {
        "winograd_image": 1,
        "fused_winograd_result_add_relu": 1,
    }
    result = found["fused_winograd_result_add_relu"]
    source = untuned_kernels(result, "main", target_for(one), one)[1].source
    assert source.count("lv1_at[") == 16
