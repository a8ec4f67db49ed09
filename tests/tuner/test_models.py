"""Real models through the whole pipeline: right answers against ONNX Runtime, or refused with reasons."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from honed.runtime import modelfile
from honed.runtime.devices import Device
from honed.runtime.executor import load
from honed.tuner.bind import bind_shapes
from honed.tuner.demo import lightglue
from honed.tuner.prove.reference import Reference, evaluate
from tests import models

pytestmark = pytest.mark.tvm


def _compile(file: Path, output: Path, *options: str) -> dict[str, Any]:
    """Compile in the compiling child; returns its last event."""
    command = [sys.executable, "-m", "honed.tuner", "compile", str(file), "-o", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr[-4000:]
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert last["event"] in ("done", "refused", "error"), done.stderr[-4000:]
    assert (done.returncode == 0) == (last["event"] == "done")
    return last


def _onnxruntime(file: Path, given: list[dict[str, np.ndarray]]) -> tuple[dict[str, np.ndarray], ...]:
    bound = bind_shapes(onnx.load(file), {n: v.shape for n, v in given[0].items()})
    result = evaluate(bound, given, evaluators=["onnxruntime"])
    assert isinstance(result, Reference), result
    return result.outputs


def _check(
    file: Path, folder: Path, device: Device, given: list[dict[str, np.ndarray]], tolerance: float
) -> list[dict[str, np.ndarray]]:
    """Compile, run on the inputs and compare every output with ONNX Runtime; returns what came out."""
    event = _compile(file, folder / "model.honed", "--device", device.spec)
    assert event["event"] == "done", event
    assert event["proof"]["reference"].startswith("onnxruntime ")
    assert event["proof"]["device"] == device.profile.identity.name
    with load(folder / "model.honed", device.spec) as executor:
        found = [executor.run(values) for values in given]
    for expected, outputs in zip(_onnxruntime(file, given), found, strict=True):
        assert list(expected) == list(outputs)
        for name, value in expected.items():
            assert outputs[name].dtype == value.dtype
            assert outputs[name].shape == value.shape
            error = np.abs(outputs[name].astype(np.float64) - value).max() / np.abs(value).max()
            assert error <= tolerance, name
    return found


def _classifier(image: np.ndarray) -> np.ndarray:
    return image[None] / np.float32(127.5) - 1


def _raw(image: np.ndarray) -> np.ndarray:
    return image[None]


def _luma(image: np.ndarray) -> np.ndarray:
    return np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), image, 1)[None, None] / 255


def _half(image: np.ndarray) -> np.ndarray:
    return (image - np.float32(115))[None].astype(np.float16)


@pytest.mark.parametrize(
    ("name", "side", "prepare", "tolerance"),
    [
        ("mobilenet_v2_035_128", 128, _classifier, 1e-3),
        ("yolox_nano", 416, _raw, 1e-3),
        ("super_resolution", 224, _luma, 1e-3),
        ("squeezenet_fp16", 224, _half, 2e-2),
    ],
)
def test_answers_are_right(
    name: str,
    side: int,
    prepare: Callable[[np.ndarray], np.ndarray],
    tolerance: float,
    device: Device,
    tmp_path: Path,
) -> None:
    file = models.path(name)
    graph = onnx.load(file).graph
    weights = {t.name for t in graph.initializer}
    given = next(v.name for v in graph.input if v.name not in weights)
    pictures = [{given: prepare(models.picture(side, side, seed))} for seed in range(2)]
    first, second = _check(file, tmp_path, device, pictures, tolerance)
    for output, other in zip(first.values(), second.values(), strict=True):
        assert np.isfinite(output).all()
        assert not np.array_equal(output, other)


def test_half_computed_in_single_says_so(device: Device, tmp_path: Path) -> None:
    if device.profile.limits.fp16:
        pytest.skip("the device has fp16 arithmetic")
    event = _compile(models.path("squeezenet_fp16"), tmp_path / "m.honed", "--device", device.spec)
    assert any("float16" in note and "float32" in note for note in event["notes"])
    assert modelfile.read(tmp_path / "m.honed").model.source.precision == "fp32"


@pytest.mark.parametrize(("name", "operators"), [("silero_vad", ("LSTM", "If")), ("gtcrn_simple", ("GRU",))])
def test_what_cannot_be_compiled_is_refused_by_operator(
    name: str, operators: tuple[str, ...], tmp_path: Path
) -> None:
    event = _compile(models.path(name), tmp_path / "m.honed")
    assert event["event"] == "refused"
    for operator in operators:
        assert operator in event["message"]
        reason = next(r for r in event["reasons"] if r.startswith(f"{operator} ("))
        assert "node" in reason
    assert not (tmp_path / "m.honed").exists()


@pytest.mark.parametrize("points", [64, 192])
def test_lightglue_matches_what_it_is_shown(points: int, device: Device, tmp_path: Path) -> None:
    file = lightglue.write(tmp_path / "lightglue.onnx", points)
    given = [lightglue.example_inputs(points)]
    (outputs,) = _check(file, tmp_path, device, given, 1e-3)
    matched = outputs["scores"][0].argmax(axis=1) == lightglue.partners(points)
    assert matched.mean() > 0.95


def test_symbolic_lightglue_is_bound_by_shapes(device: Device, tmp_path: Path) -> None:
    file = lightglue.write(tmp_path / "n.onnx", symbolic=True)
    points = 16
    shapes: list[str] = []
    for name, value in lightglue.example_inputs(points).items():
        shapes += ["--shape", f"{name}={','.join(map(str, value.shape))}"]
    event = _compile(file, tmp_path / "n.honed", "--device", device.spec, *shapes)
    assert event["event"] == "done", event
    with load(tmp_path / "n.honed", device.spec) as executor:
        outputs = executor.run(lightglue.example_inputs(points))
    assert outputs["scores"].shape == (1, points, points)
