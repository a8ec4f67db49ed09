"""What stands in for onnxruntime, without a service: modules and names that apps use, and forked apps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from honed.ort import session

_ROOT = Path(__file__).resolve().parents[2]
_USES = (
    "import onnxruntime as rt; rt.capi.onnxruntime_pybind11_state.InvalidArgument",
    "import onnxruntime as rt; rt.capi._pybind_state.get_available_providers()",
    "from onnxruntime.capi import _pybind_state as C; C.SessionOptions(), C.Fail",
    "from onnxruntime.capi.onnxruntime_pybind11_state import NodeArg, RunOptions, NoSuchFile",
    "from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession, IOBinding, OrtValue",
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
