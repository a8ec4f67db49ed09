"""`hone fit`: what of a file would run where, with a real compiler child and nothing added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import parser

from honed.machine.devices import Device
from honed.tool.main import main

pytestmark = pytest.mark.opencl
WHOLE = '<ir_version: 9, opset_import: ["": 20]> f (float[4] x) => (float[4] y) { y = Sin(x) }'
OPEN = '<ir_version: 9, opset_import: ["": 20]> f (float[n] x) => (float[n] y) { y = Sin(x) }'
NEVER = '<ir_version: 9, opset_import: ["": 20]> f (float[4] x) => (int64[1,m] y) { y = NonZero(x) }'


def saved(folder: Path, name: str, text: str) -> Path:
    onnx.save(parser.parse_model(text), folder / name)
    return folder / name


def fit(
    capsys: pytest.CaptureFixture[str], device: Device, *arguments: Any
) -> tuple[int, list[dict[str, Any]]]:
    status = main(["fit", "--json", f"--device={device.spec}", *map(str, arguments)])
    files: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["files"]
    return status, files


@pytest.mark.slow
def test_what_is_compiled_and_what_is_not(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [saved(tmp_path, "whole.onnx", WHOLE), saved(tmp_path, "never.onnx", NEVER)]
    status, (whole, never) = fit(capsys, device, *files)
    assert status == 0
    assert [(part["engine"], part["nodes"]) for part in whole["parts"]] == [("gpu", 1)]
    assert (whole["served"], whole["reasons"], whole["inputs"]) == (True, [], ["x: float [4]"])
    assert [part["engine"] for part in never["parts"]] == ["cpu"]
    assert never["served"]
    assert any("NonZero" in reason for reason in never["reasons"])


def test_open_sizes_are_reasons_until_they_are_given(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path, "open.onnx", OPEN)
    assert any("--shape" in reason for reason in fit(capsys, device, file)[1][0]["reasons"])
    assert fit(capsys, device, file, "--shape", "x=7")[1][0]["reasons"] == []


def test_what_is_no_model_is_told_beside_the_others(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    status, (first, second) = fit(capsys, device, broken, saved(tmp_path, "whole.onnx", WHOLE))
    assert status == 1
    assert "not an ONNX model" in first["error"]
    assert second["served"]
    assert main(["fit", f"--device={device.spec}", str(broken)]) == 1
    assert main(["fit", str(broken), str(broken), "--shape", "x=1"]) == 2


def test_for_people_it_is_a_table(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", f"--device={device.spec}", str(saved(tmp_path, "never.onnx", NEVER))]) == 0
    said = capsys.readouterr().out
    assert "by the CPU engine alone" in said
    assert "not compiled: NonZero" in said
