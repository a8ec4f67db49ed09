"""A driver that does not build a kernel: that function falls back, and the model says which, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from honed.machine.devices import Device
from honed.protocol.errors import ModelRefused
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel
from honed.runtime.engines import PROVING_MIB, PartLimits
from honed.runtime.execution import programs
from honed.runtime.execution.cpuparts import CpuPartitionProcess
from honed.runtime.execution.executor import Executor
from honed.tuner.compiler import compile as compiling
from honed.tuner.compiler.compile import compile_file
from honed.tuner.lower.schedule import default_kernels
from tests.tuner.requests import request_for

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]

COMPLAINT = "error: nir_shader not fully linked"
SINES = "(float[32,256] x) => (float[32,256] y) { p = MatMul(x, v) s = Sin(p) y = MatMul(s, w) }"
Refuse = Callable[[Callable[[str], bool]], None]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Have a stand-in for the driver's compiler refuse sources."""
    built = programs.build

    def refusing(refused: Callable[[str], bool]) -> None:
        def build(device: Device, source: str, cache_dir: Path | None) -> Any:
            if refused(source):
                raise programs.NotBuilt(device, COMPLAINT)
            return built(device, source, cache_dir)

        monkeypatch.setattr(programs, "build", build)

    return refusing


def model(text: str) -> onnx.ModelProto:
    """A model with weights `v` and `w` of 256 x 512 and 512 x 256."""
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    rng = np.random.default_rng(1)
    for name, shape in (("v", (256, 512)), ("w", (512, 256))):
        weights = rng.normal(size=shape).astype(np.float32) / 16
        made.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    return made


def compiled(text: str, device: Device, folder: Path) -> CompiledModel:
    """Compile a model of input `x`, and check that it gives what ONNX Runtime gives."""
    path, output = folder / "m.onnx", folder / "m.honed"
    onnx.save(model(text), path)
    request = request_for(path, device)
    made = compile_file(request, lambda *_: None).model
    x = np.random.default_rng(2).normal(size=(32, 256)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": x})
    parts = partial(CpuPartitionProcess, PartLimits(memory_mib=PROVING_MIB))
    with Executor(modelfile.read(output), device, part_process=parts) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], expected, rtol=1e-4, atol=1e-4)
    return made


@pytest.mark.slow
def test_what_no_schedule_builds_runs_in_the_cpu_engine(
    device: Device, tmp_path: Path, refuse: Refuse
) -> None:
    refuse(lambda source: "honed_sin" in source)
    made = compiled(SINES, device, tmp_path)
    assert made.split is not None
    (part,) = made.split.parts
    (why,) = part.why
    assert why.startswith("Sin: ")
    assert "does not build its kernel" in why
    assert COMPLAINT in why
    assert part.nodes == 1  # the product that it was fused with is compiled
    assert not any("honed_sin" in source for source in made.sources)


def test_a_function_keeps_its_default_schedule_where_that_alone_builds(
    device: Device, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def better(*function: Any, **_: Any) -> Any:
        origin, kernels, passed = default_kernels(*function)
        if "sin" not in kernels.launches[0].entry:
            return origin, kernels, passed
        return "better", replace(kernels, source=f"// better\n{kernels.source}"), passed

    monkeypatch.setattr(compiling, "untuned_kernels", better)
    refuse(lambda source: source.startswith("// better"))
    made = compiled(SINES, device, tmp_path)
    assert made.split is None
    (note,) = (note for note in made.source.notes if "default schedule" in note)
    assert "sin" in note
    assert COMPLAINT in note
    assert not any("better" in source for source in made.sources)


def test_a_model_that_cannot_be_cut_is_refused_with_the_driver_s_words(
    device: Device, tmp_path: Path, refuse: Refuse
) -> None:
    refuse(lambda source: "honed_sin" in source)
    with pytest.raises(ModelRefused, match="does not build kernels of the model") as refused:
        compiled("(float[32,256] x) => (float[32,256] y) { y = Sin(x) }", device, tmp_path)
    assert any(COMPLAINT in reason for reason in refused.value.reasons)


def test_a_driver_that_changes_its_mind_is_told_as_before(
    device: Device, tmp_path: Path, refuse: Refuse
) -> None:
    answers = iter([True])
    refuse(lambda _source: next(answers, False))
    with pytest.raises(programs.NotBuilt, match="cannot compile a kernel of this model"):
        compiled(SINES, device, tmp_path)
