"""Apps written against onnxruntime, with honed in its place: a real service, and onnxruntime beside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed import ort
from honed.ort import errors, session
from honed.runtime import Client
from tests.daemon.running import NO_TUNER, Service, serving

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
CPU = '[serve]\nengine = "cpu"\n' + NO_TUNER
X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
_ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A service that takes models of apps."""
    with serving(tmp_path_factory, cache_dir, config=CPU) as service:
        yield service


@pytest.fixture(autouse=True)
def pointed(served: Service, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is an app of that service's."""
    monkeypatch.setenv("HONED_SOCKET", str(served.socket))
    session._clients.clear()
    yield
    session._clients.clear()


def model(number: float = 1.5, *, batch: int | str = "batch") -> bytes:
    """y = x + number and its rows' sums, of any batch of rows of three."""
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", [batch, 3]), ("y", [batch, 3]), ("sums", [batch]))
    ]
    nodes = [
        helper.make_node("Add", ["x", "number"], ["y"]),
        helper.make_node("ReduceSum", ["y", "axes"], ["sums"], keepdims=0),
    ]
    known = [
        numpy_helper.from_array(np.float32(number), "number"),
        numpy_helper.from_array(np.int64([1]), "axes"),
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializer=known)
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="t"
    )
    helper.set_model_props(made, {"names": "a,b"})
    return bytes(made.SerializeToString())


def both(data: bytes) -> tuple[Any, Any]:
    """A session of each."""
    return ort.InferenceSession(data), onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])


def test_answers_and_descriptions_are_onnxruntimes() -> None:
    ours, theirs = both(model())
    for mine, its in ((ours.get_inputs(), theirs.get_inputs()), (ours.get_outputs(), theirs.get_outputs())):
        assert [(a.name, a.type, a.shape) for a in mine] == [(a.name, a.type, a.shape) for a in its]
    mine, its = ours.get_modelmeta(), theirs.get_modelmeta()
    for name in ("producer_name", "graph_name", "domain", "description", "version", "custom_metadata_map"):
        assert getattr(mine, name) == getattr(its, name), name
    for names in (None, [], ["sums"], ["sums", "y"]):
        found, expected = ours.run(names, {"x": X}), theirs.run(names, {"x": X})
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(ours.run(None, {"x": X[:1].tolist()})[0], theirs.run(None, {"x": X[:1]})[0])
    np.testing.assert_array_equal(ours.run(["y"], {"x": np.asfortranarray(X)})[0], X + 1.5)


def test_text_goes_in_and_out() -> None:
    ends = [helper.make_tensor_value_info(n, TensorProto.STRING, ["n"]) for n in ("x", "y")]
    node = helper.make_node("StringConcat", ["x", "x"], ["y"])
    graph = helper.make_graph([node], "g", ends[:1], ends[1:])
    opsets = [helper.make_opsetid("", 20)]
    ours, theirs = both(helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString())
    for given in (np.array(["ab", "é"]), np.array(["ab", "c" * 100_000], object)):
        assert ours.run(None, {"x": given})[0].tolist() == theirs.run(None, {"x": given})[0].tolist()
    with pytest.raises(errors.InvalidArgument, match="Unexpected input data type"):
        ours.run(None, {"x": X[0]})


@pytest.mark.parametrize(
    "feed",
    [
        {"x": X.astype(np.float64)},
        {"x": X[:, :2]},
        {"x": X.reshape(1, 2, 3)},
        {"x": X, "other": X},
        {"other": X},
        {"x": None},
        {},
    ],
)
def test_wrong_inputs_raise_what_onnxruntime_raises(feed: dict[str, np.ndarray]) -> None:
    ours, theirs = both(model())
    with pytest.raises(Exception) as expected:  # noqa: PT011 - which one is what is compared
        theirs.run(None, feed)
    with pytest.raises(Exception) as found:  # noqa: PT011
        ours.run(None, feed)
    assert type(found.value).__name__ == type(expected.value).__name__
    assert str(found.value).split(":")[:4][:3] == str(expected.value).split(":")[:4][:3]


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSuchFile, match="NO_SUCHFILE"):
        ort.InferenceSession(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("this is no model")
    with pytest.raises(errors.InvalidProtobuf):
        ort.InferenceSession(tmp_path / "text.onnx")
    (tmp_path / "empty.onnx").touch()
    with pytest.raises(errors.Fail):
        ort.InferenceSession(str(tmp_path / "empty.onnx"))
    unknown = onnx.load_from_string(model())
    unknown.graph.node[0].op_type = "Unheard"
    with pytest.raises(errors.Fail, match="Unheard"):
        ort.InferenceSession(unknown.SerializeToString())


def test_sessions_of_one_file_are_one_model(served: Service, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(model(7))
    first, second = ort.InferenceSession(path), ort.InferenceSession(path.read_bytes())
    with served.client() as client:
        owned = [each["name"] for each in client.models()]
    assert first._name == second._name
    assert owned.count(first._name) == 1


def test_values_and_bindings() -> None:
    ours = ort.InferenceSession(model())
    value = ort.OrtValue.ortvalue_from_numpy(X)
    assert (value.shape(), value.data_type(), value.element_type()) == ([2, 3], "tensor(float)", 1)
    [sums] = ours.run_with_ort_values(["sums"], {"x": value})
    np.testing.assert_array_equal(sums.numpy(), (X + 1.5).sum(1))
    binding = ours.io_binding()
    target = np.zeros((2, 3), np.float32)
    binding.bind_input("x", "cpu", 0, np.float32, X.shape, X.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, target.shape, target.ctypes.data)
    binding.bind_output("sums")
    ours.run_with_iobinding(binding)
    np.testing.assert_array_equal(target, X + 1.5)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[1], (X + 1.5).sum(1))
    with pytest.raises(errors.NotImplemented, match="on the host"):
        binding.bind_output("y", "cuda")


def test_runs_in_the_background_and_from_threads() -> None:
    ours = ort.InferenceSession(model())
    told: list[Any] = []
    done = threading.Event()

    def callback(outputs: Any, data: Any, error: str) -> None:
        told.append((outputs, data, error))
        done.set()

    ours.run_async(["y"], {"x": X}, callback, "mine")
    assert done.wait(60)
    [(outputs, data, error)] = told
    assert (data, error) == ("mine", "")
    np.testing.assert_array_equal(outputs[0], X + 1.5)
    wrong: list[int] = []

    def ask(n: int) -> None:
        found = [ours.run(["y"], {"x": X + n})[0] for _ in range(10)]
        wrong.extend(n for each in found if not np.array_equal(each, X + n + np.float32(1.5)))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forked_child_has_a_connection_of_its_own() -> None:
    ours = ort.InferenceSession(model())
    ours.run(None, {"x": X})
    child = os.fork()
    if not child:
        right = np.array_equal(ours.run(["y"], {"x": X})[0], X + 1.5)
        os._exit(0 if right else 1)
    for _ in range(20):
        np.testing.assert_array_equal(ours.run(["y"], {"x": X})[0], X + 1.5)
    assert os.waitpid(child, 0)[1] == 0


def test_goes_on_when_the_service_was_restarted_or_the_model_removed(served: Service) -> None:
    ours = ort.InferenceSession(model(3))
    ours.run(None, {"x": X})
    served.kill()
    served.restart()
    served.wait_listening()
    served.wait_ready()
    np.testing.assert_array_equal(ours.run(["y"], {"x": X})[0], X + 3)
    with Client(str(served.socket)) as client:
        client.remove(ours._name)
    np.testing.assert_array_equal(ours.run(["y"], {"x": X})[0], X + 3)


def test_onnxruntime_takes_over_only_where_the_app_allows_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HONED_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.setattr(session, "_AGAIN_SECONDS", 0.0)
    session._clients.clear()
    with pytest.raises(errors.RuntimeException, match="service"):
        ort.InferenceSession(model())
    options = ort.SessionOptions()
    options.add_session_config_entry("honed.fallback", "1")
    ours = ort.InferenceSession(model(), options)
    np.testing.assert_array_equal(ours.run(["y"], {"x": X})[0], X + 1.5)
    assert "run by ONNX Runtime in the app" in caplog.text
    assert ours.get_providers() == ["CPUExecutionProvider"]


def test_what_honed_does_not_do_is_said() -> None:
    options = ort.SessionOptions()
    with pytest.raises(errors.NotImplemented, match="libraries"):
        options.register_custom_ops_library("x.so")
    options.enable_profiling = True
    with pytest.raises(errors.NotImplemented, match="hone profile"):
        ort.InferenceSession(model(), options)
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"):
        ort.InferenceSession(model(), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])


APP = """
import importlib.util, json, sys
assert importlib.util.find_spec("onnxruntime") is not None
import onnxruntime as rt
from onnxruntime import InferenceSession
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument, Fail
import numpy as np
session = rt.InferenceSession(sys.argv[1], providers=rt.get_available_providers())
try:
    session.run(None, {"x": np.zeros((1, 4), np.float32)})
except InvalidArgument:
    said = True
found = session.run(["y"], {"x": np.ones((2, 3), np.float32)})[0]
print(json.dumps([rt.get_available_providers()[0], said, found.tolist(), __name__, sys.argv[1:]]))
"""


@pytest.mark.parametrize("how", ["script", "module", "variable"])
def test_an_app_is_run_as_it_is(tmp_path: Path, how: str) -> None:
    (tmp_path / "m.onnx").write_bytes(model())
    (tmp_path / "the_app.py").write_text(APP)
    folders = [str(_ROOT / each) for each in ("runtime", "daemon", "tuner")]
    command = {
        "script": [sys.executable, "-m", "honed.ort", "the_app.py"],
        "module": [sys.executable, "-m", "honed.ort", "-m", "the_app"],
        # What honed-ort.pth does when Python starts.
        "variable": [
            sys.executable,
            "-c",
            f"{_pth()}\nimport sys, runpy; sys.argv = sys.argv[1:]\n"
            "runpy.run_path('the_app.py', run_name='__main__')",
            "the_app.py",
        ],
    }[how]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(tmp_path)]), "HONED_ORT": "1"}
    done = subprocess.run([*command, "m.onnx"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    provider, said, found, name, arguments = json.loads(done.stdout)
    assert (provider, said, name, arguments) == ("HonedExecutionProvider", True, "__main__", ["m.onnx"])
    assert found == [[2.5] * 3] * 2


def _pth() -> str:
    return (_ROOT / "runtime" / "honed-ort.pth").read_text().strip()


def test_a_bound_output_is_the_apps_own_array() -> None:
    for rt, one in zip((ort, onnxruntime), both(model(batch=2)), strict=True):
        given, taken = X.copy(), np.zeros((2, 3), np.float32)
        binding = one.io_binding()
        binding.bind_ortvalue_input("x", rt.OrtValue.ortvalue_from_numpy(given))
        binding.bind_ortvalue_output("y", rt.OrtValue.ortvalue_from_numpy(taken))
        given += 1
        one.run_with_iobinding(binding)
        np.testing.assert_array_equal(taken, X + 2.5)
        [vector] = [value.numpy() for value in binding.get_outputs_as_ortvaluevector()]
        np.testing.assert_array_equal(vector, taken)


def test_sizes_that_an_app_gives_are_told() -> None:
    shapes = []
    for rt in (ort, onnxruntime):
        options = rt.SessionOptions()
        options.add_free_dimension_override_by_name("batch", 2)
        one = rt.InferenceSession(model(), options, providers=["CPUExecutionProvider"])
        shapes.append([end.shape for end in (*one.get_inputs(), *one.get_outputs())])
    assert shapes[0] == shapes[1] == [[2, 3], [2, 3], [2]]


def test_a_run_that_is_to_end_is_not_begun() -> None:
    for rt, one in zip((ort, onnxruntime), both(model()), strict=True):
        options = rt.RunOptions()
        options.terminate = True
        with pytest.raises(Exception, match="terminate"):
            one.run(None, {"x": X}, options)
        with pytest.raises(Exception, match="terminate"):
            one.run_with_ort_values(["y"], {"x": rt.OrtValue.ortvalue_from_numpy(X)}, options)
        binding = one.io_binding()
        binding.bind_cpu_input("x", X)
        binding.bind_output("y")
        with pytest.raises(Exception, match="terminate"):
            one.run_with_iobinding(binding, options)
        assert one.end_profiling() == ""
        assert one.get_tuning_results() == []
