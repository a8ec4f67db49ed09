"""`hone compile` and `hone demo`: the compiling child, well behaved and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.tool.main import main
from tests.daemon.running import wait_for_end

ROOT = Path(__file__).parents[3]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a compiler of our own making before the real one: `child(code)`."""

    def put(code: str) -> None:
        package = tmp_path / "stub" / "honed" / "tuner"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(
            f"import json, os, sys, time\ndef say(**event): print(json.dumps(event), flush=True)\n{code}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(package.parents[1]))

    return put


def compile_x(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main(["compile", "x.onnx", "-o", "y.honed", *options])
    said = capsys.readouterr()
    return status, said.out, said.err


DONE = """say(event="done", output="y.honed", sha256="0", notes=["a note"], kernels=1, launches=2,
    precision="mixed", why="it errs little", seconds=0.5,
    proof={"reference": "judge 1", "probes": 2, "device": None, "error": {}, "tolerance": {}})"""


def test_arguments_reach_the_compiler(child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    child(f'say(event="stage", stage="check", fraction=0.5, text=json.dumps(sys.argv[1:]))\n{DONE}')
    options = ["--shape", "a=b=1,2", "--calibration", "sets", "--profile", "-p.toml", "--device", "-d"]
    status, out, err = compile_x(
        capsys, "--json", *options[:4], f"--profile={options[5]}", f"--device={options[7]}"
    )
    assert status == 0
    assert json.loads(err.partition("50% ")[2]) == [
        "compile", "--shape=a=b=1,2", "--calibration=sets", "--device=-d", "--output=y.honed",
        "--profile=-p.toml", "--", "x.onnx",
    ]  # fmt: skip
    document = json.loads(out)
    assert "event" not in document
    assert (document["kernels"], document["notes"]) == (1, ["a note"])


def test_progress_is_a_line_per_stage(child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    child(
        'for stage, part in (("check", 0), ("check", 0.1), ("lower", 0.5)):\n'
        '    say(event="stage", stage=stage, fraction=part, text=f"{stage} at {part}")\n' + DONE
    )
    status, out, err = compile_x(capsys)
    assert status == 0
    assert err.splitlines() == ["compile x.onnx:   0% check at 0", "compile x.onnx:  50% lower at 0.5"]
    assert "y.honed is written: 1 kernels, 2 launches an inference" in out
    assert "judge 1, not run yet" in " ".join(out.split())
    assert "a note" in out
    assert "computes in mixed it errs little" in " ".join(out.split())


def test_a_refusal_lists_its_reasons(child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    child(
        'say(event="refused", message="it cannot be", reasons=["one", "two"], external_data=[])\nsys.exit(1)'
    )
    status, _, err = compile_x(capsys)
    assert (status, err) == (1, "hone: it cannot be\n  - one\n  - two\n")
    status, out, _ = compile_x(capsys, "--json")
    error = {"code": "FAILED_PRECONDITION", "message": "it cannot be", "reasons": ["one", "two"]}
    assert json.loads(out) == {"error": error}


def test_an_error_keeps_its_code(child: Any, capsys: pytest.CaptureFixture[str]) -> None:
    child('say(event="error", code="RESOURCE_EXHAUSTED", message="too much")\nsys.exit(1)')
    status, out, _ = compile_x(capsys, "--json")
    assert status == 1
    assert json.loads(out)["error"]["code"] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        (
            "print('first', file=sys.stderr); raise ValueError('last words')",
            ["status 1", "ValueError: last words"],
        ),
        ("os.kill(os.getpid(), 11)", ["ended by signal SIGSEGV"]),
        ("os.kill(os.getpid(), 9)", ["was killed", "memory"]),
        ("print('not json', flush=True); time.sleep(600)", ["said something that is no event"]),
        ("print('[]', flush=True); time.sleep(600)", ["said something that is no event"]),
        (f"{DONE}; sys.exit(3)", ["status 3"]),
        ("sys.exit(0)", ["status 0"]),
    ],
)
def test_a_compiler_that_dies(
    child: Any, capsys: pytest.CaptureFixture[str], code: str, parts: list[str]
) -> None:
    child(code)
    started = time.monotonic()
    status, out, err = compile_x(capsys)
    assert time.monotonic() - started < 60
    assert (status, out) == (1, "")
    assert err.startswith("hone: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_compiler_that_takes_too_long_is_stopped_with_its_children(
    child: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    child(
        "import subprocess\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        'say(event="stage", stage="lower", fraction=0, text=str(helper.pid))\ntime.sleep(600)'
    )
    status, _, err = compile_x(capsys, "--time-limit", "10")
    assert status == 1
    assert "longer than 10 s" in err.splitlines()[-1]
    wait_for_end(int(err.split()[3]))


def test_a_compiler_without_bounds_meets_the_memory_limit(
    child: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    child("held = []\nwhile True: held.append(bytearray(1 << 26))")
    status, _, err = compile_x(capsys, "--memory-limit", "300")
    assert status == 1
    assert "MemoryError" in err


def test_without_the_compiler(tmp_path: Path) -> None:
    """As on a board with only honed's own package: the tuner's folder is not there."""
    path = os.pathsep.join(str(ROOT / part) for part in ("daemon", "runtime"))
    for arguments in (["compile", "x.onnx", "-o", "y"], ["demo", "lightglue", "-o", "y"]):
        done = subprocess.run(
            [sys.executable, "-S", "-m", "honed.tool.main", *arguments, "--json"],
            env={"PYTHONPATH": path, "PATH": os.environ["PATH"]},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert (
            done.stderr
            == "hone: the compiler is not installed; install honed-tuner (apt install honed-tuner)\n"
        )
        assert json.loads(done.stdout)["error"]["code"] == "NOT_FOUND"


@pytest.mark.slow
@pytest.mark.tvm
@pytest.mark.opencl
def test_compiles_a_model_that_the_runtime_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    node = helper.make_node("Relu", ["x"], ["y"])
    values = [helper.make_tensor_value_info(name, 1, ["N", 3]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "relu.onnx")
    target = tmp_path / "relu.honed"
    assert (
        main(["compile", str(tmp_path / "relu.onnx"), "-o", str(target), "--shape", "x=2,3", "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert document["output"] == str(target)
    assert document["proof"]["error"]["y"] <= document["proof"]["tolerance"]["y"]
    from honed import runtime

    x = np.array([[1, -1, 2], [-2, 3, -3]], np.float32)
    with runtime.load(target) as executor:
        np.testing.assert_array_equal(executor.run({"x": x})["y"], np.maximum(x, 0))


@pytest.mark.tvm
def test_demo_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    file = tmp_path / "lg.onnx"
    assert main(["demo", "lightglue", "-o", str(file), "--symbolic", "--seed", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == str(file)
    assert [value.name for value in onnx.load(file).graph.input][:2] == ["kpts0", "kpts1"]
    assert main(["demo", "lightglue", "-o", str(tmp_path / "no" / "lg.onnx")]) == 1
    assert "hone: " in capsys.readouterr().err
