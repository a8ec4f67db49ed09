"""Python apps with ONNX Runtime of their own, beside a real service that answers their runs where it may."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.protocol.methods import MODEL_FORM
from honed.protocol.params import FormParams, RunReport
from honed.runtime.errors import InvalidArgument, MissingFiles, ModelRefused, NotCompiled
from tests.daemon.conftest import Hone
from tests.daemon.running import IDLE, NO_TUNER, Service, serving, wait_for
from tests.ort.app import SIZE, feed, model

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
ROOT = Path(__file__).resolve().parents[3]
CONFIG = IDLE + '[serve]\nengine = "fastest"\n[variants]\nrequests = 2\n' + NO_TUNER


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A service that compiles what apps bring as soon as nobody asks."""
    with serving(tmp_path_factory, cache_dir, config=CONFIG) as running:
        yield running


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The model of the app, in a file."""
    file = tmp_path / "model.onnx"
    file.write_bytes(model())
    return file


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No app outlives its test."""
    yield
    while _started:
        _started.pop().kill()


def begun(service: Service, script: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start an app."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HONED_")}
    environment = {**kept, "HONED_SOCKET": str(service.socket), "PYTHONPATH": str(ROOT), **variables}
    head = "import json, os, sys, time\nimport numpy as np\nfrom tests.ort.app import *\nort = quick()\n"
    process = subprocess.Popen(
        [sys.executable, "-c", head + script], cwd=folder, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    _started.append(process)
    return process


def ran(service: Service, script: str, folder: Path, **variables: str) -> Any:
    """Run an app to its end; return what it printed last, and check that nothing failed."""
    out, err = (process := begun(service, script, folder, **variables)).communicate(timeout=400)
    assert process.returncode == 0, f"{err}\n{service.log}"
    return json.loads(out.splitlines()[-1])


def test_runs_go_to_the_compiled_form_and_the_cpu_engine_loads_nothing(
    service: Service, path: Path, typed: Hone
) -> None:
    script = """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
own = session.run(None, feed())
routed = until_routed(session, feed())
assert np.abs(own[0] - routed[0]).max() < 1e-4 and own[0].dtype == routed[0].dtype
session._honed._kinds and [setattr(r, "ask_at", 0) for r in routes(session)]
[setattr(r, "reported", -10**18) for r in routes(session)]
session.run(None, feed())
print("ready", flush=True); input()
print(json.dumps(routes(session)[0].routed_runs))
"""
    process = begun(service, script, path.parent, HONED_ORT_LOG="1")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]

    def reported() -> Any:
        with service.client() as client:
            return next((m for m in client.models() if m["apps"] and m["apps"][0]["compiled_us"]), None)

    listed = wait_for(reported, "the app to report", service)
    use = listed["apps"][0]
    assert (use["app"], use["pid"], use["shapes"]) == ("-c", process.pid, {"x": [8, SIZE], "bias": []})
    assert use["own_us"] > 0
    assert 0 < use["routed"] < 1
    with service.client() as client:
        shown = client.show(listed["name"])
        devices = client.status()["devices"]
    assert shown["apps"] == listed["apps"]
    assert shown["precision"] == "fp32"
    assert not [each for each in devices if each["engine"] == "cpu" and each["worker"]["pid"]]
    _, told, _ = typed("show", listed["name"], "--socket", str(service.socket))
    assert f"-c ({process.pid})" in (text := " ".join(told.split()))
    assert "of its runs routed" in text
    out, err = process.communicate("\n")
    assert json.loads(out) > 0
    for state in ("trying", "routed"):
        assert f"honed: model.onnx (8x64, ): {state}; own " in err


def test_what_onnx_runtime_takes_is_taken_and_nothing_else(service: Service, path: Path) -> None:
    """Each odd input, alone and where its kind would be routed: the same answer, or the same error."""
    script = """
plain = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
plain._honed = None
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
x, bias = feed().values()
odd = {
    "scalar as [1]": ({"x": x, "bias": bias.reshape(1)}, True),
    "scalar as [1, 1]": ({"x": x, "bias": bias.reshape(1, 1)}, True),
    "scalar as [64]": ({"x": x, "bias": np.full(64, bias)}, False),
    "scalar as a Python float": ({"x": x, "bias": 0.5}, False),
    "nested lists": ({"x": x.tolist(), "bias": bias}, True),
    "tuples": ({"x": tuple(x.tolist()), "bias": bias}, False),
    "float64": ({"x": x.astype(np.float64), "bias": bias}, False),
    "int64": ({"x": x.astype(np.int64), "bias": bias}, False),
    "float16": ({"x": x.astype(np.float16), "bias": bias}, False),
    "rank 3": ({"x": x[None], "bias": bias}, False),
    "rank 1": ({"x": x[0], "bias": bias}, False),
    "a wrong fixed size": ({"x": x[:, :3], "bias": bias}, False),
    "no rows": ({"x": x[:0], "bias": bias}, False),
    "not contiguous": ({"x": np.asfortranarray(x), "bias": bias}, True),
    "every second row, backwards": ({"x": np.repeat(x, 2, 0)[::-2], "bias": bias}, True),
    "big-endian": ({"x": x.astype(">f4"), "bias": bias}, False),
    "an input too few": ({"x": x}, False),
    "an input too many": ({"x": x, "bias": bias, "more": x}, False),
    "None": ({"x": None, "bias": bias}, False),
    "an OrtValue": ({"x": ort.OrtValue.ortvalue_from_numpy(x), "bias": bias}, False),
    "a subclass of ndarray": ({"x": np.asmatrix(x), "bias": bias}, True),
}
until_routed(session, feed())
def outcome(session, given, names):
    try:
        return [(a.shape, a.dtype.str, a.tolist()) for a in session.run(names, given)]
    except Exception as error:
        return f"{type(error).__module__}.{type(error).__name__}: {error}"
def near(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(a[:2] == e[:2] and np.allclose(a[2], e[2], atol=1e-4, equal_nan=True) for a, e in pairs)
failed = []
for what, (given, routed) in odd.items():
    for names in (None, ["y"], ["z"], ["y", "y"], ("y",)):
        expected = outcome(plain, given, names)
        answers = [outcome(session, given, names) for _ in range(6)]
        if routed and names is None:
            until_routed(session, given)
            answers.append(outcome(session, given, names))
        for answer in answers:
            if answer != expected and not (type(answer) is type(expected) is list and near(answer, expected)):
                failed.append((what, names, str(expected)[:200], str(answer)[:200]))
print(json.dumps(failed))
"""
    assert ran(service, script, path.parent) == []


def test_sessions_stay_onnx_runtimes(service: Service, path: Path) -> None:
    script = """
from onnxruntime import InferenceSession
import onnxruntime.capi.onnxruntime_pybind11_state as C
class Own(InferenceSession):
    def run(self, names, given, options=None):
        return [10 * each for each in super().run(names, given, options)]
data = open("model.onnx", "rb").read()
cpu = dict(providers=["CPUExecutionProvider"])
of_bytes, subclass = InferenceSession(data, **cpu), Own("model.onnx", **cpu)
assert type(of_bytes) is ort.InferenceSession and isinstance(subclass, ort.InferenceSession)
own = of_bytes.run(None, feed())[0]
for session, times in ((of_bytes, 1), (subclass, 10)):
    found = until_routed(session, feed())[0]
    assert np.allclose(found, times * own, atol=1e-3)
    binding = session.io_binding()
    for name, value in feed().items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("y")
    session.run_with_iobinding(binding)
    assert np.array_equal(binding.copy_outputs_to_cpu()[0], own)
    values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in feed().items()}
    assert np.array_equal(session.run_with_ort_values(None, values)[0].numpy(), own)
options = ort.RunOptions()
options.terminate = True
try:
    of_bytes.run(None, feed(), options)
    raise SystemExit("it was not terminated")
except C.Fail:
    pass
altered, profiled, deterministic = ort.SessionOptions(), ort.SessionOptions(), ort.SessionOptions()
weights = ort.OrtValue.ortvalue_from_numpy(np.zeros((64, 64), np.float32))
altered.add_initializer("w", weights)
profiled.enable_profiling = True
profiled.profile_file_prefix = "profile"
for options in (altered, profiled):
    assert InferenceSession("model.onnx", options, **cpu)._honed is None
text = helper.make_tensor_value_info("t", TensorProto.STRING, [1])
same = helper.make_tensor_value_info("s", TensorProto.STRING, [1])
graph = helper.make_graph([helper.make_node("Identity", ["t"], ["s"])], "g", [text], [same])
strings = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
assert InferenceSession(strings.SerializeToString(), **cpu)._honed is None
print(json.dumps("done"))
"""
    assert ran(service, script, path.parent) == "done"


def test_threads_and_forked_children_have_their_runs_routed(service: Service, path: Path) -> None:
    script = """
import threading
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
own = session.run(None, feed())[0]
until_routed(session, feed())
wrong = []
def work():
    for _ in range(40):
        if not np.allclose(session.run(None, feed())[0], own, atol=1e-4):
            wrong.append(1)
threads = [threading.Thread(target=work) for _ in range(8)]
[each.start() for each in threads]
child = os.fork()
if not child:
    from honed.ort import routing
    routing._process.account.begun = -(10**18)
    until_routed(session, feed())
    os._exit(0)
[each.join() for each in threads]
assert os.waitpid(child, 0)[1] == 0
print(json.dumps([len(wrong), routes(session)[0].in_flight]))
"""
    assert ran(service, script, path.parent) == [0, 0]


def test_other_sizes_get_forms_of_their_own(service: Service, path: Path) -> None:
    script = """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
for rows in (8, 5):
    own = session.run(None, feed(rows))[0]
    assert np.allclose(until_routed(session, feed(rows))[0], own, atol=1e-4)
print(json.dumps(sorted(r.state for r in routes(session))))
"""
    assert ran(service, script, path.parent) == ["routed"] * 2


def test_bytes_have_their_data_beside_the_folder_where_the_app_opened_them(
    service: Service, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    script = """
data = model(3.0, location="weights.bin")
time.sleep(0.05)
session = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
own = session.run(None, feed())[0]
os.chdir("../there")
model(5.0, location="weights.bin")
assert np.allclose(until_routed(session, feed())[0], own, atol=1e-3)
print(json.dumps("done"))
"""
    assert ran(service, script, tmp_path / "here") == "done"


def test_a_file_that_changed_since_is_never_handed_over(service: Service, path: Path) -> None:
    script = """
session = ort.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
open("model.onnx", "wb").write(model(7.0))
end = time.monotonic() + 60
while time.monotonic() < end and not (routes(session) and "changed" in routes(session)[0].why):
    session.run(None, feed())
    time.sleep(0.02)
print(json.dumps(routes(session)[0].why))
"""
    assert (
        ran(service, script, path.parent) == "model.onnx has changed since the app opened it; open it again"
    )


# What the service does for such apps


def test_a_file_that_its_app_runs_is_loaded_by_the_cpu_engine_only_when_it_is_asked_for(
    service: Service, path: Path, tmp_path: Path
) -> None:
    with service.client() as client:
        brought = client.upload(path, engine="opencl", precision="fp32", shapes={"x": (2, SIZE)})
        again = client.upload(path, engine="opencl", precision="fp32", shapes={"x": (4, SIZE)})
        assert brought.model_name == again.model_name
        name = brought.model_name
        asked = FormParams(name=name, shapes={"x": (2, SIZE), "bias": (1,)})
        form = wait_for(
            lambda: (found := client.ask(MODEL_FORM, asked)).verified and found, "it to be compiled", service
        )
        assert (form.precision, form.why) == ("fp32", "")
        assert form.time_us > 0
        inputs = feed(2)
        compiled = client.infer_response(name, inputs, compiled=True)
        assert compiled.engine == "gpu"
        scalar = client.infer_response(name, {**inputs, "bias": inputs["bias"].reshape(1)}, compiled=True)
        np.testing.assert_array_equal(scalar.outputs["y"], compiled.outputs["y"])
        with pytest.raises(NotCompiled, match="no compiled form"):
            client.infer_response(name, feed(31), compiled=True)
        by_cpu = client.infer_response(name, feed(31))
        assert by_cpu.engine == "cpu"
        weights = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
        expected = np.maximum(feed(31)["x"] @ weights, 0) + np.float32(0.5)
        np.testing.assert_allclose(by_cpu.outputs["y"], expected, atol=1e-3)
        report = RunReport(
            app="camera\x1b[1m", own_us=9000, routed_us=0, own_runs=9, routed_runs=3, state="own", why="slow"
        )
        client.ask(MODEL_FORM, FormParams(name=name, shapes=asked.shapes, report=report))
        idle = dataclasses.replace(report, own_runs=0)
        for rows in range(1, 70):  # no more are remembered than there is room for
            client.ask(MODEL_FORM, FormParams(name=name, shapes={"x": (rows, SIZE)}, report=idle))
        with pytest.raises(InvalidArgument, match="more than"):
            client.ask(MODEL_FORM, FormParams(name=name, shapes={"x": (1,) * 1000}))
        assert len(client.show(name)["apps"]) == 64
        client.ask(MODEL_FORM, FormParams(name=name, shapes=asked.shapes, report=report))
        use = client.show(name)["apps"][-1]
        assert (use["own_us"], use["routed"], use["why"]) == (9000, 0.25, "slow")
    with service.client() as other:  # a report goes with its connection
        wait_for(lambda: not other.show(name)["apps"], "the report to go", service)
        other.remove(name)


def test_what_is_no_model_is_refused_and_missing_data_is_named(service: Service, tmp_path: Path) -> None:
    with service.client() as client:
        for data in (b"", b"no model", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\x7f"):
            with pytest.raises(ModelRefused, match="no ONNX"):
                client.upload(data, engine="opencl")
        data = model(location="weights.bin", folder=tmp_path)
        with pytest.raises(MissingFiles) as missing:
            client.upload(data, engine="opencl")
        assert missing.value.files == ("weights.bin",)
        brought = client.upload(data, engine="opencl", folder=tmp_path, unchanged_since=time.time_ns())
        client.remove(brought.model_name)
        with pytest.raises(InvalidArgument, match="has changed"):
            client.upload(data, engine="opencl", folder=tmp_path, unchanged_since=1)
