"""Real models through the whole pipeline: right answers against ONNX Runtime, or refused with reasons."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile
from honed.runtime.execution.executor import load
from honed.tuner import lightglue
from honed.tuner.verify.evaluator import Reference, evaluate
from honed.tuner.verify.graphs import bind_shapes
from tests import models

pytestmark = pytest.mark.tvm
Compiled = Callable[[Path], tuple[Path, dict[str, Any]]]


def _compile(file: Path, output: Path, *options: str) -> dict[str, Any]:
    """Compile in the compiling child; returns its last event."""
    command = [sys.executable, "-m", "honed.tuner", "compile", str(file), "-o", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=False)
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


@pytest.fixture
def compiled(made_once: Callable[[str, Callable[[Path], object]], Path], device: Device) -> Compiled:
    """A model compiled once for all tests of a run: the compiled file, and the compiler's last event."""

    def made(file: Path) -> tuple[Path, dict[str, Any]]:
        def make(folder: Path) -> None:
            folder.mkdir()
            event = _compile(file, folder / "model.honed", "--device", device.spec, "--keep-slower")
            (folder / "event.json").write_text(json.dumps(event))

        name = hashlib.sha256(device.spec.encode() + file.read_bytes()).hexdigest()[:16]
        folder = made_once(f"{file.stem}-{name}", make)
        return folder / "model.honed", json.loads((folder / "event.json").read_text())

    return made


def _check(
    file: Path,
    compiled: Compiled,
    device: Device,
    given: list[dict[str, np.ndarray]],
    tolerance: float,
) -> list[dict[str, np.ndarray]]:
    """Compile, run on the inputs and compare every output with ONNX Runtime; returns what came out."""
    output, event = compiled(file)
    assert event["event"] == "done", event
    assert event["proof"]["reference"].startswith("onnxruntime ")
    assert event["proof"]["device"] == device.profile.identity.name
    with load(output, device.spec) as executor:
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
        pytest.param("super_resolution", 224, _luma, 1e-3, marks=pytest.mark.slow),
        pytest.param("mobilenet_v2_035_128", 128, _classifier, 1e-3, marks=pytest.mark.slow),
        pytest.param("yolox_nano", 416, _raw, 1e-3, marks=pytest.mark.slow),
        pytest.param("squeezenet_fp16", 224, _half, 2e-2, marks=pytest.mark.slow),
    ],
)
def test_answers_are_right(
    name: str,
    side: int,
    prepare: Callable[[np.ndarray], np.ndarray],
    tolerance: float,
    device: Device,
    compiled: Compiled,
) -> None:
    file = models.path(name)
    graph = onnx.load(file).graph
    weights = {t.name for t in graph.initializer}
    given = next(v.name for v in graph.input if v.name not in weights)
    pictures = [{given: prepare(models.picture(side, side, seed))} for seed in range(2)]
    first, second = _check(file, compiled, device, pictures, tolerance)
    for output, other in zip(first.values(), second.values(), strict=True):
        assert np.isfinite(output).all()
        assert not np.array_equal(output, other)


@pytest.mark.slow
def test_half_computed_in_single_says_so(device: Device, compiled: Compiled) -> None:
    if device.profile.limits.fp16:
        pytest.skip("the device has fp16 arithmetic")
    output, event = compiled(models.path("squeezenet_fp16"))
    assert any("float16" in note and "float32" in note for note in event["notes"])
    assert modelfile.read(output).model.source.precision == "fp32"


@pytest.mark.slow
def test_a_recurrent_model_of_one_frame_is_right(device: Device, compiled: Compiled) -> None:
    file = models.path("gtcrn_simple")
    r = np.random.default_rng(0)
    given = {
        v.name: 0.1 * r.normal(size=[d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in onnx.load(file).graph.input
    }
    _check(file, compiled, device, [given], 1e-3)


def test_what_cannot_be_compiled_is_refused_by_operator(tmp_path: Path) -> None:
    """A model whose one branch does not fit the frames of the other."""
    shapes = ["--shape", "input=1,512", "--shape", "state=2,1,128"]
    event = _compile(models.path("silero_vad"), tmp_path / "m.honed", *shapes)
    assert event["event"] == "refused"
    reason, *_ = event["reasons"]
    assert reason.startswith("If (")
    assert "node" in reason
    assert "LSTM" in reason
    assert not (tmp_path / "m.honed").exists()


def test_hundreds_of_tiny_kernels_are_left_to_onnx_runtime(device: Device, tmp_path: Path) -> None:
    event = _compile(models.path("gtcrn_simple"), tmp_path / "m.honed", "--device", device.spec)
    assert event["event"] == "refused"
    assert "before this device could launch its kernels" in event["message"]
    assert re.match(
        r"1,\d{3} launches take at least [\d.]+ ms on .*, and ONNX Runtime takes", event["reasons"][0]
    )
    assert not (tmp_path / "m.honed").exists()


@pytest.mark.slow
def test_what_cannot_be_compiled_whole_runs_in_parts(
    device: Device, compiled: Compiled, tmp_path: Path
) -> None:
    path = models.path("gtcrn_simple")
    with modelfile.read(compiled(path)[0]) as file:
        split = file.model.split
        assert split is None or any("GRU" in why for part in split.parts for why in part.why)
        given = [
            {t.name: np.random.default_rng(0).normal(size=t.shape).astype(t.dtype) for t in file.model.inputs}
        ]
    _check(path, compiled, device, given, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("points", [64, 192])
def test_lightglue_matches_what_it_is_shown(
    points: int, device: Device, compiled: Compiled, tmp_path: Path
) -> None:
    file = lightglue.write(tmp_path / "lightglue.onnx", points)
    given = [lightglue.example_inputs(points)]
    (outputs,) = _check(file, compiled, device, given, 1e-3)
    matched = outputs["scores"][0].argmax(axis=1) == lightglue.partners(points)
    assert matched.mean() > 0.95


@pytest.mark.slow
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
