"""What stands in for onnxruntime, without a service: modules and names that apps use, and forked apps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from honed.ort import ExecutionMode, InferenceSession, OrtValue, RunOptions, SessionOptions, errors, session

_ROOT = Path(__file__).resolve().parents[2]
_USES = (
    "import onnxruntime as rt; rt.capi.onnxruntime_pybind11_state.InvalidArgument",
    "import onnxruntime as rt; rt.capi._pybind_state.get_available_providers()",
    "from onnxruntime.capi import _pybind_state as C; C.SessionOptions(), C.Fail",
    "from onnxruntime.capi.onnxruntime_pybind11_state import NodeArg, RunOptions, NoSuchFile",
    "from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession, IOBinding, OrtValue",
    "import onnxruntime as rt; C = rt.capi._pybind_state; C.OrtDevice(C.OrtDevice.cpu(), 0, 0)",
    "import onnxruntime as rt; rt.get_ep_devices(), rt.set_global_thread_pool_sizes(1, 1)",
    "import onnxruntime as rt; rt.set_default_logger_callback(print), rt.print_debug_info()",
)


@pytest.mark.parametrize("use", _USES)
def test_modules_have_what_onnxruntimes_have(use: str) -> None:
    # A process each: what an app imports first must not depend on what another did.
    script = (
        f"from honed import standin; standin.install(); {use}; import sys; assert 'onnx' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "runtime")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_modules_that_honed_has_none_for_are_onnxruntimes_and_use_honeds() -> None:
    pytest.importorskip("onnxruntime")
    script = (
        "from honed import standin; standin.install(); import onnxruntime.quantization.calibrate as c; "
        "import onnxruntime.capi.onnxruntime_validation, honed.ort; "
        "assert c.onnxruntime.InferenceSession is honed.ort.InferenceSession, c.onnxruntime"
    )
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "runtime")}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_child_forked_while_a_thread_has_the_lock_is_not_held_up() -> None:
    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        with session._lock:
            taken.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    taken.wait()
    child = os.fork()
    if not child:
        os._exit(0 if session._lock.acquire(blocking=False) else 1)
    release.set()
    holder.join()
    assert os.waitpid(child, 0)[1] == 0


def test_onnxruntime_takes_over_with_the_options_that_the_app_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv("HONED_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.setattr(session, "_clients", {})
    monkeypatch.setattr(session, "_AGAIN_SECONDS", 0.0)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.execution_mode = ExecutionMode.ORT_PARALLEL
    options.add_session_config_entry("session.use_env_allocators", "1")
    with pytest.raises(errors.NotImplemented, match="optimised"):
        InferenceSession(model.SerializeToString(), options)
    options.add_session_config_entry("honed.fallback", "1")
    theirs = InferenceSession(model.SerializeToString(), options)._genuine.get_session_options()
    assert onnx.load(options.optimized_model_filepath).graph.output[0].name == "y"
    assert theirs.execution_mode.name == "ORT_PARALLEL"
    assert theirs.get_session_config_entry("session.use_env_allocators") == "1"
    taken = InferenceSession(model.SerializeToString(), options)
    given = OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))
    logged = RunOptions()
    logged.logid = "of the app"
    np.testing.assert_array_equal(taken.run(None, {"x": given}, logged)[0], -np.ones(3, np.float32))


def test_onnx_runtime_in_an_app_sends_nothing_to_its_makers(tmp_path: Path) -> None:
    """Since 1.31 its wheels would keep a number of the machine under the home folder, and report by it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    environment |= {"PYTHONPATH": str(_ROOT / "runtime"), "HOME": str(tmp_path)}
    script = "from honed import standin; assert standin.genuine() is not None"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.rglob("*")) == []
