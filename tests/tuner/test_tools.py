"""Models as ONNX Runtime's optimisers and quantisers write them are compiled, and right."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantFormat, QuantType

from honed.machine.devices import Device
from honed.runtime.execution.executor import load
from honed.tuner.frontend import normalise
from honed.tuner.verify import graphs

from . import tooled
from .frontend.test_rules import run

pytestmark = pytest.mark.tvm
Made = Callable[[Path], onnx.ModelProto]
CALIBRATED = {
    f"{form.name} {kind.name}": (form, kind)
    for form in QuantFormat
    for kind in (QuantType.QUInt8, QuantType.QInt8)
}
MODELS: dict[str, tuple[Made, str]] = {
    "optimised": (lambda d: tooled.optimised(tooled.bert(), d), "Attention"),
    "optimised, heads apart": (
        lambda d: tooled.optimised(tooled.bert(), d, multi_head=True),
        "MultiHeadAttention",
    ),
    "optimised and quantised": (
        lambda d: tooled.quantised(tooled.optimised(tooled.bert(), d), d),
        "QAttention",
    ),
    "saved": (lambda d: tooled.saved_by_runtime(tooled.bert(), d), "SkipLayerNormalization"),
    "saved network": (lambda d: tooled.saved_by_runtime(tooled.network(), d), "FusedConv"),
    "quantised": (lambda d: tooled.quantised(tooled.bert(), d), "MatMulInteger"),
    "quantised and saved": (
        lambda d: tooled.saved_by_runtime(tooled.quantised(tooled.bert(), d), d),
        "MatMulIntegerToFloat",
    ),
    "quantised network": (lambda d: tooled.quantised(tooled.network(), d), "ConvInteger"),
    "quantised voice": (lambda d: tooled.quantised(tooled.voice(), d), "DynamicQuantizeLSTM"),
    "quantised voice, both ways": (
        lambda d: tooled.quantised(tooled.voice("bidirectional"), d, QuantType.QUInt8),
        "DynamicQuantizeLSTM",
    ),
    "calibrated BERT": (
        lambda d: tooled.calibrated(tooled.bert(), d, QuantFormat.QOperator, QuantType.QInt8),
        "QLinearMatMul",
    ),
    "calibrated and saved": (
        lambda d: tooled.saved_by_runtime(tooled.calibrated(tooled.network(), d, QuantFormat.QDQ), d),
        "QGemm",
    ),
    **{
        f"calibrated {name}": (
            lambda d, form=form, kind=kind: tooled.calibrated(tooled.network(), d, form, kind),  # type: ignore[misc]
            "QLinearConv" if form == QuantFormat.QOperator else "QuantizeLinear",
        )
        for name, (form, kind) in CALIBRATED.items()
    },
}
# What ends in quantised steps may be off by one of them: 1/255 of softmax's range, and rounding.
QUANTUM = 1.01 / 255


@pytest.mark.parametrize("name", MODELS)
def test_rewritten_as_onnx_runtime_answers(name: str, tmp_path: Path) -> None:
    make, operator = MODELS[name]
    model = make(tmp_path)
    assert operator in {node.op_type for node in model.graph.node}
    data = tooled.given(model)
    for got, wanted in zip(run(normalise(model).model, data), run(model, data), strict=True):
        assert np.abs(got - wanted).max() <= (QUANTUM if "calibrated" in name else 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_types_and_shapes_are_known_as_onnx_runtime_has_them(name: str, tmp_path: Path) -> None:
    model = MODELS[name][0](tmp_path)
    known = graphs.infer(model)
    names = [output for node in model.graph.node for output in node.output if output]
    assert set(names) <= set(known)
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    del exposed.graph.output[:]
    exposed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    for name_, value in zip(names, run(exposed, tooled.given(model)), strict=True):
        assert (known[name_].dtype, known[name_].shape) == (value.dtype.name, value.shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_as_onnx_runtime_answers(name: str, tmp_path: Path, device: Device) -> None:
    model = MODELS[name][0](tmp_path)
    file, output = tmp_path / "m.onnx", tmp_path / "m.honed"
    onnx.save(model, file)
    command = [sys.executable, "-m", "honed.tuner", "compile", file, "-o", output, "--device", device.spec]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["event"] == "done", last
    data = tooled.given(model)
    with load(output, device.spec) as executor:
        found = executor.run(data)
    for (key, got), wanted in zip(found.items(), run(model, data), strict=True):
        # Where a value lies between two steps, the proof says how far the end may be off.
        allowed = last["proof"]["tolerance"][key] * np.abs(wanted).max()
        assert np.abs(got - wanted).max() <= max(allowed, QUANTUM if "calibrated" in name else 0)
