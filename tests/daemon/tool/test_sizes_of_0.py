"""A model with sizes of 0 in a real service: on the wire, in both engines, and in what `hone show` says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from tests.daemon.conftest import Hone
from tests.daemon.running import Service

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
MODEL = """<ir_version: 8, opset_import: ["": 17]>
g (float[2,8] x, float[0,8] e) => (float[2,8] y, float[0,8] z)
{ c = Concat<axis=0>(x, e) y = Tanh(c) z = Neg(e) }
"""


@pytest.mark.parametrize("engine", ["gpu", "cpu"])
def test_they_are_served_and_shown(empty_service: Service, typed: Hone, tmp_path: Path, engine: str) -> None:
    path = tmp_path / f"{engine}.onnx"
    onnx.save(parser.parse_model(MODEL), path)
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    with empty_service.client() as client:
        client.add(path, engine=engine)
        found = client.infer(engine, {"x": x, "e": np.zeros((0, 8), np.float32)}, finite=True)
        np.testing.assert_allclose(found["y"], np.tanh(x), rtol=1e-5)
        assert (found["z"].shape, found["z"].dtype) == ((0, 8), np.float32)
    status, said, _ = typed("--socket", str(empty_service.socket), "show", engine)
    assert status == 0
    if engine == "gpu":
        assert "z: error 0" in said


def test_made_up_inputs_have_the_sizes_that_a_model_was_added_for(
    empty_service: Service, typed: Hone, tmp_path: Path
) -> None:
    """With 1 in their place a window of 320 elements does not fit a sound."""
    path = tmp_path / "open.onnx"
    header, _, _ = MODEL.partition("\n")
    onnx.save(parser.parse_model(header + "g (float[N, M] x) => (float[N, M] y) { y = Tanh(x) }"), path)
    with empty_service.client() as client:
        client.add(path, engine="cpu", shapes={"x": (2, 3)})
    status, said, _ = typed("--socket", str(empty_service.socket), "infer", "open", "--random", "--json")
    assert status == 0
    assert json.loads(said)["outputs"][0]["shape"] == [2, 3]
