"""`--calibration DIR` on its way to the compiler, and what `hone show` tells of the choice."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from honed.runtime.compiled.model import PrecisionChoice
from honed.runtime.errors import InvalidArgument, NotFound
from honed.tool.main import main
from tests.daemon.running import Service
from tests.daemon.stubs import StubTuner
from tests.runtime.builder import add_constant

pytestmark = [pytest.mark.service, pytest.mark.opencl]
SIZE = 8
CHOICE = PrecisionChoice(
    half=True, why="largest error 0.001 of an output's range", single=("a",), wide=("b",)
)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    folder = tmp_path / "sets"
    folder.mkdir()
    for number in range(2):
        np.savez(folder / f"{number}.npz", x=np.full(SIZE, number, np.float32))
    (folder / "notes.txt").touch()
    return folder


def test_sets_reach_the_compiler_and_are_not_kept(
    tmp_path: Path, sets: Path, stub: StubTuner, stub_service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    source, heard = tmp_path / "m.onnx", tmp_path / "heard"
    source.write_bytes(b"not really ONNX, which the stub does not mind")
    stub.knows(source, add_constant(SIZE), CHOICE)
    stub.first(
        source,
        "folder = pathlib.Path(option('--calibration'))\n"
        "found = {path.name: len(path.read_bytes()) for path in folder.iterdir()}\n"
        f"pathlib.Path({str(heard)!r}).write_text(json.dumps(found))\n",
    )
    tool = ["--socket", str(stub_service.socket)]
    assert main([*tool, "add", str(source), "--calibration", str(sets)]) == 0
    sizes = {path.name: path.stat().st_size for path in sets.glob("*.npz")}
    assert json.loads(heard.read_text()) == sizes
    with stub_service.client() as client, client.export("m") as given:
        assert list(given.sources) == ["m.onnx"]
    assert os.listdir(stub_service.state / "staging") == []
    capsys.readouterr()
    assert main([*tool, "show", "m"]) == 0
    assert f"computes in fp32 {CHOICE.why}" in " ".join(capsys.readouterr().out.split())
    assert main([*tool, "show", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"]["choice"] == {
        "half": True, "why": CHOICE.why, "single": ["a"], "wide": ["b"],
    }  # fmt: skip


def test_what_decides_nothing_is_refused(stub_service: Service, small_model: Path, sets: Path) -> None:
    with stub_service.client() as client:
        given = sets.parent / "small.honed"
        given.write_bytes(small_model.read_bytes())
        with pytest.raises(InvalidArgument, match="compiled already; shapes, precision, calibration inputs"):
            client.add(given, name="other", calibration=sets)
        with pytest.raises(NotFound, match="no folder"):
            client.add(small_model, name="other", calibration=sets / "none")
        for path in sets.glob("*.npz"):
            path.unlink()
        with pytest.raises(InvalidArgument, match=r"holds no \.npz file"):
            client.add(small_model, name="other", calibration=sets)
