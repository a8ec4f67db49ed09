"""How an app comes to have its runs routed, without a service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .app import model

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
PTH = (RUNTIME / "honed-ort.pth").read_text()
ROUTED = "import onnxruntime as o; print(hasattr(o.InferenceSession.run, '__honed__'))"


def python(*arguments: str, folder: Path = RUNTIME, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python, with honed's packages found first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HONED_")}
    environment = {**kept, "PYTHONPATH": str(RUNTIME), "HONED_SOCKET": "/nowhere", **variables}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(("setting", "routed"), [("1", "True"), ("0", "False"), ("", "False")])
def test_a_variable_has_runs_routed(setting: str, routed: str) -> None:
    done = python("-c", f"{PTH}\n{ROUTED}", HONED_ORT=setting)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [routed], "")


def test_a_program_without_onnx_runtime_loads_nothing_large() -> None:
    script = (
        f"{PTH}\nimport sys; print([m for m in ('numpy', 'msgpack', 'honed.runtime') if m in sys.modules])"
    )
    assert python("-c", script, HONED_ORT="1").stdout == "[]\n"


@pytest.mark.parametrize(
    "first",
    [
        "from honed.ort import install; install()",
        "import onnxruntime; from honed.ort import install; install(); install()",
        "import honed.ort as o; assert o.InferenceSession.__module__.startswith('onnxruntime')",
        "from honed.ort import install; install(); import onnxruntime.quantization, onnxruntime.tools",
    ],
)
def test_whatever_an_app_imports_first(first: str) -> None:
    done = python("-c", f"{first}\n{ROUTED}")
    assert done.stdout.split()[-1] == "True", done.stderr


@pytest.mark.parametrize(
    "unlike",
    ["sys.modules['msgpack'] = None", "import onnxruntime.capi._pybind_state as C; del C.SessionOptions"],
)
def test_where_runs_cannot_be_routed_the_app_goes_on(unlike: str) -> None:
    script = f"""
import sys
{unlike}
from honed.ort import install; install()
import onnxruntime.capi.onnxruntime_inference_collection as o
print(o.InferenceSession.__name__)
"""
    done = python("-c", script)
    assert done.stdout == "InferenceSession\n", done.stderr
    assert "honed: runs stay the app's own: " in done.stderr


def test_sessions_from_before_run_as_they_did(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(model())
    script = """
import numpy as np, onnxruntime as o
session = o.InferenceSession("m.onnx", providers=["CPUExecutionProvider"])
from honed.ort import install; install()
print(session.run(None, {"x": np.ones((1, 64), np.float32), "bias": np.float32(0)[...]})[0].shape)
"""
    done = python("-c", script, folder=tmp_path)
    assert done.stdout == "(1, 64)\n", done.stderr


def test_an_app_is_started_by_its_path_or_module(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        f"import os, sys\n{ROUTED}\nprint(sys.argv[1:], os.environ['HONED_ORT'])"
    )
    for named in (["app.py"], ["-m", "app"], ["--fallback", "--socket", "/nowhere", "app.py"]):
        done = python("-m", "honed.ort", *named, "-x", folder=tmp_path)
        assert done.stdout == "True\n['-x'] 1\n", done.stderr
    for wrong, status in ((["--other"], 2), ([], 2), (["-m"], 2), (["--help"], 0)):
        assert python("-m", "honed.ort", *wrong).returncode == status


def test_where_onnx_runtime_is_missing_the_package_is_named_and_honeds_own_taken(tmp_path: Path) -> None:
    script = """
import sys
sys.path = [each for each in sys.path if "site-packages" not in each]
from honed.ort import install; install()
import onnxruntime
print(onnxruntime.name)
"""
    done = python("-c", script)
    assert done.returncode == 1
    assert "honed: onnxruntime is not installed" in done.stderr
    assert "honed-cpu" in done.stderr
    bundle = tmp_path / "honed" / "cpu" / "bundled" / "onnxruntime"
    bundle.mkdir(parents=True)
    (tmp_path / "honed" / "cpu" / "__init__.py").touch()
    (bundle / "__init__.py").write_text("name = 'the bundled one'")
    done = python("-c", script, PYTHONPATH=f"{RUNTIME}{os.pathsep}{tmp_path}")
    assert (done.stdout, done.stderr) == ("the bundled one\n", "")
