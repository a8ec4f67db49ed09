"""Convolutions whose output channels no vector divides: rounded up, with the same answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from honed.machine.devices import Device
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import SourceModel
from honed.runtime.execution.executor import load
from honed.tuner import frontend
from honed.tuner.compiler.assemble import assemble
from honed.tuner.compiler.schedules import untuned_kernels
from honed.tuner.lower.module import lower_module
from honed.tuner.tune.extract import extract
from tests.tuner.graph.graphs import answers, parsed, weights
from tests.tuner.search.search_functions import imagined, profile_of

pytestmark = pytest.mark.tvm


def model(shape: tuple[int, ...], attributes: str = "pads = [1, 1, 1, 1]") -> onnx.ModelProto:
    """Relu(Conv(x, w) + b) of images of 8 x 8, by the weights' shape; 9 channels are shuffled to pixels."""
    outputs, channels, window, *_ = shape
    size = 8 if "pads" in attributes else 9 - window
    shuffled = 'r = Relu(c) y = DepthToSpace <blocksize = 3, mode = "CRD"> (r)'
    result = f"[1, 1, {size * 3}, {size * 3}]" if outputs == 9 else f"[1, {outputs}, {size}, {size}]"
    return parsed(
        f"""(float[1, {channels}, 8, 8] x) => (float{result} y) {{
        c = Conv <{attributes}> (x, w, b) {shuffled if outputs == 9 else "y = Relu(c)"} }}""",
        w=weights(*shape),
        b=weights(outputs),
    )


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("shape", "family"), [((9, 4, 3, 3), "mali"), ((7, 3, 5, 5), "mali"), ((18, 4, 3, 3), "cpu")]
)
def test_answers_are_those_of_the_channels_there_are(
    shape: tuple[int, int, int, int], family: str, device: Device, tmp_path: Path
) -> None:
    made, profile = model(shape, f"pads = {[shape[-1] // 2] * 4}"), profile_of(family, device.profile)
    normalised = frontend.normalise(made, precision="fp32")
    lowered = lower_module(frontend.import_relax(normalised), profile, first=untuned_kernels)
    assert len(lowered.functions) == 2, "the convolution, and all that is behind it"
    source = SourceModel(sha256="0" * 64, filename="m", producer="", opset=17, precision="fp32", notes=())
    found, constants = assemble(source, profile, normalised, lowered, None)
    modelfile.write(tmp_path / "m.honed", found, constants)
    x = np.random.default_rng(2).standard_normal((1, shape[1], 8, 8)).astype(np.float32)
    (right,) = answers(made, {"x": x})
    with load(tmp_path / "m.honed", device) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], right, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    ("shape", "family", "channels"),
    [
        ((9, 4, 3, 3), "mali", 12),
        ((10, 4, 3, 3), "mali", 10),  # vectors of two
        ((3, 4, 3, 3), "mali", 3),  # a third more than there are
        ((7, 4, 1, 1), "mali", 7),  # products have their pixels along the lanes
        ((9, 4, 3), "mali", 12),
        ((9, 4, 3, 3), "cpu", 9),  # fewer than a vector has
        ((18, 4, 3, 3), "cpu", 32),
        ((20, 4, 3), "cpu", 32),
        ((24, 4, 3, 3), "cpu", 24),  # half vectors
        ((17, 4, 3, 3), "cpu", 17),  # vectors run along the rows of 8 pixels
        ((18, 4, 3, 3), "gpu", 18),
    ],
)
def test_channels_are_rounded_up_where_they_fill_vectors_then(
    shape: tuple[int, ...], family: str, channels: int, tmp_path: Path
) -> None:
    made = model(shape, "pads = [1, 1, 1, 1]" if shape[-1] == 3 else "strides = [1, 1]")
    if len(shape) == 3:
        text = f"(float[1, 4, 8] x) => (float[1, {shape[0]}, 8] y) {{ y = Conv <pads = [1, 1]> (x, w) }}"
        made = parsed(text, w=weights(*shape))
    onnx.save(made, tmp_path / "m.onnx")
    found = extract(tmp_path / "m.onnx", {}, "fp32", imagined(family)).tasks
    names = [one.task.name for one in found]
    assert any("without_rounding" in name for name in names) == (channels != shape[0])
    if channels != shape[0]:
        (convolved,) = (one.func for one in found if one.task.name.startswith("conv"))
        assert int(convolved.params[-1].shape[1]) == channels
