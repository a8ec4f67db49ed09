"""The CPU engine in a real service: served from the first second, right, in any shape, and told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.cpu import profiling
from honed.daemon.core.engines import comparable
from honed.daemon.core.machine import Machine
from honed.daemon.core.model import DRIFT_RUNS, LatencyDrift
from honed.daemon.core.state import Registry
from honed.daemon.features.reselection import EngineReselection
from honed.daemon.serving.loader import LONGEST_OWN_MS
from honed.daemon.serving.selection import choose, compare, is_only_slower, is_unfinished
from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.files import describe
from honed.daemon.store.store import EngineDecision, EngineTimes, Manifest, Store, begin
from honed.daemon.store.versions import NO_HISTORY
from honed.daemon.worker.calls import ComparisonRun
from honed.daemon.worker.supervisor import WorkerDied
from honed.protocol import strict
from honed.runtime import Client
from honed.runtime.compiled import modelfile
from honed.runtime.engines import MIN_PAIRS, TIE
from honed.runtime.errors import (
    InvalidArgument,
    MissingFiles,
    ModelRefused,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from honed.tool.main import main
from tests.daemon import spin
from tests.daemon.running import IDLE, NO_TUNER, Service, serving, wait_for
from tests.daemon.serving.vendors import Vendors

FASTEST = '[serve]\nengine = "fastest"\n' + NO_TUNER
CPU = "ONNX Runtime/CPU"
pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]


def tensor(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def write(
    path: Path, nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], **more: Any
) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, **more)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


def recurrent(folder: Path) -> Path:
    """What is not compiled: a GRU that computes how long its sequence is, of any number of steps."""
    r = np.random.default_rng(1)
    weights = [
        numpy_helper.from_array(r.normal(size=shape).astype(np.float32), name)
        for name, shape in (("w", (1, 12, 3)), ("r", (1, 12, 4)))
    ]
    weights += [
        numpy_helper.from_array(np.float32([0]), "nought"),
        numpy_helper.from_array(np.float32([1]), "one"),
    ]
    return write(
        folder / "recurrent.onnx",
        [
            helper.make_node("ReduceMax", ["x"], ["highest"], keepdims=0),
            helper.make_node("Mul", ["highest", "nought"], ["none"]),
            helper.make_node("Add", ["none", "one"], ["length"]),
            helper.make_node("Cast", ["length"], ["lengths"], to=TensorProto.INT32),
            helper.make_node("GRU", ["x", "w", "r", "", "lengths"], ["y"], hidden_size=4),
        ],
        [tensor("x", ["steps", 1, 3])],
        [tensor("y", ["steps", 1, 1, 4])],
        initializer=weights,
    )


def steps(folder: Path) -> Path:
    """A GRU of any number of steps and sequences."""
    r = np.random.default_rng(1)
    weights = [
        numpy_helper.from_array(r.normal(size=shape).astype(np.float32), name)
        for name, shape in (("w", (1, 12, 3)), ("r", (1, 12, 4)))
    ]
    return write(
        folder / "steps.onnx",
        [helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=4)],
        [tensor("x", ["steps", "batch", 3])],
        [tensor("y", ["steps", 1, "batch", 4])],
        initializer=weights,
    )


def dense(folder: Path) -> Path:
    """What is compiled."""
    w = np.random.default_rng(2).normal(size=(6, 6)).astype(np.float32)
    return write(
        folder / "dense.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        [tensor("x", ["n", 6])],
        [tensor("y", ["n", 6])],
        initializer=[numpy_helper.from_array(w, "w")],
    )


def expected(path: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def check(client: Client, name: str, path: Path, inputs: dict[str, Any]) -> None:
    found = client.infer(name, inputs)
    for output, value in expected(path, inputs).items():
        np.testing.assert_allclose(found[output], value, rtol=1e-3, atol=1e-4)


def engine(client: Client, name: str) -> str:
    return next(model["engine"] for model in client.models() if model["name"] == name)


def device(client: Client) -> dict[str, Any]:
    return next(each for each in client.status()["devices"] if each["engine"] == "cpu")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=FASTEST) as running:
        yield running


def test_what_cannot_be_compiled_is_served_right_in_every_shape(both: Service, tmp_path: Path) -> None:
    path = recurrent(tmp_path)
    with both.client() as client:
        added = client.add(path)
        assert (added["engine"], added["kernels"]) == ("cpu", 0)
        assert "GRU" in added["engine_why"]
        assert client.metadata("recurrent")["inputs"] == [
            {"name": "x", "datatype": "FP32", "shape": [-1, 1, 3]}
        ]
        for steps in (1, 5, 2):
            check(client, "recurrent", path, {"x": np.ones((steps, 1, 3), np.float32)})
        with pytest.raises(InvalidArgument, match=r"the model takes \[-1, 1, 3\]"):
            client.infer("recurrent", {"x": np.ones((1, 2, 3), np.float32)})
        shown = client.show("recurrent")
        assert shown["placement"]["engine"] == "cpu"
        assert "GRU" in shown["placement"]["why"]
        assert device(client)["models"] == ["recurrent"]
        [figures] = [model for model in client.metrics()["models"] if model["name"] == "recurrent"]
        assert figures["engines"] == {"cpu": 3}
        client.remove("recurrent")
        wait_for(lambda: device(client)["worker"]["state"] == "resting", "the CPU engine to rest", both)


def test_what_is_compiled_is_served_meanwhile_and_in_other_shapes(both: Service, tmp_path: Path) -> None:
    path = dense(tmp_path)
    with both.client() as client:
        added = client.add(path, wait=False)
        assert (added["engine"], added["engine_why"]) == ("cpu", "it is being compiled")
        check(client, "dense", path, {"x": np.ones((3, 6), np.float32)})
        wait_for(lambda: client.models()[0]["engine_why"], "it to be compiled", both, seconds=200)
        shown = client.show("dense")
        assert shown["kernels"]
        assert "measured in turns" in shown["placement"]["why"]
        for rows in (1, 4):
            check(client, "dense", path, {"x": np.ones((rows, 6), np.float32)})
        client.remove("dense")


def test_a_restart_serves_the_stored_source_and_a_crash_is_survived(both: Service, tmp_path: Path) -> None:
    path = recurrent(tmp_path)
    with both.client() as client:
        client.add(path)
    both.kill()
    both.restart()
    both.wait_listening()
    both.wait_ready()
    with both.client() as client:
        check(client, "recurrent", path, {"x": np.ones((2, 1, 3), np.float32)})
        os.kill(device(client)["worker"]["pid"], signal.SIGKILL)
        check(client, "recurrent", path, {"x": np.ones((3, 1, 3), np.float32)})
        assert psutil.pid_exists(device(client)["worker"]["pid"])
        client.remove("recurrent")


def test_what_ends_the_cpu_engine_is_refused_and_everything_else_goes_on(
    both: Service, tmp_path: Path
) -> None:
    """ONNX Runtime 1.31 ends its process on a GRU of no steps, and on one of no sequences."""
    path = steps(tmp_path)
    with both.client() as client:
        client.add(path, engine="cpu")
        client.add(dense(tmp_path), engine="cpu")
        for shape, where in (((0, 1, 3), "axis 0"), ((2, 0, 3), "axis 1")):
            for _ in range(3):
                with pytest.raises(InvalidArgument, match=f"are empty .'x' in {where}.*; give others"):
                    client.infer("steps", {"x": np.ones(shape, np.float32)})
                check(client, "steps", path, {"x": np.ones((3, 2, 3), np.float32)})
        check(client, "dense", tmp_path / "dense.onnx", {"x": np.ones((0, 6), np.float32)})
        assert device(client)["worker"]["restarts"] >= 2
        for name in ("steps", "dense"):
            assert next(m for m in client.models() if m["name"] == name)["state"] == "READY"
            client.remove(name)


@pytest.mark.slow
def test_compiling_ends_with_the_model_and_goes_on_after_a_restart(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    path = dense(tmp_path)
    service = start_service(config=FASTEST)
    with service.client() as client:
        client.add(path, wait=False)
        client.remove("dense")
        assert not client.models()
        client.add(path, wait=False)
    service.kill()
    service.restart()
    service.wait_listening()
    with service.client() as client:
        check(client, "dense", path, {"x": np.ones((3, 6), np.float32)})
        wait_for(lambda: client.show("dense")["kernels"], "it to be compiled", service, seconds=200)
        check(client, "dense", path, {"x": np.ones((1, 6), np.float32)})


def test_what_is_served_meanwhile_is_compiled_at_a_low_priority(both: Service, tmp_path: Path) -> None:
    def compilers() -> list[int]:
        """How nice the compiler's processes are."""
        found = []
        for child in both.children("honed.tuner"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(child.nice())
        return found

    with both.client() as client:
        client.add(dense(tmp_path), wait=False)
        # They are not yet what they become for the first moment.
        behind = min(19, psutil.Process(both.process.pid).nice() + 15)
        wait_for(lambda: set(compilers()) == {behind}, "it to be compiled behind what answers")
        client.remove("dense")


def test_gpu_refuses_and_cpu_compiles_nothing(both: Service, tmp_path: Path) -> None:
    with both.client() as client:
        with pytest.raises(ModelRefused, match="GRU"):
            client.add(recurrent(tmp_path), engine="gpu")
        with pytest.raises(NotFound):
            client.show("recurrent")
        added = client.add(dense(tmp_path), engine="cpu")
        assert added["engine_why"] == "the CPU engine was asked for"
        assert engine(client, "dense") == "cpu"
        client.remove("dense")
        with pytest.raises(InvalidArgument, match="use one of fastest, gpu, cpu"):
            client.add(dense(tmp_path), engine="npu")


def test_shapes_that_depend_on_the_data(both: Service, tmp_path: Path) -> None:
    path = write(
        tmp_path / "nonzero.onnx",
        [helper.make_node("NonZero", ["x"], ["y"])],
        [tensor("x", [4])],
        [tensor("y", [1, "found"], TensorProto.INT64)],
    )
    with both.client() as client:
        client.add(path, engine="cpu")
        for x in ([0, 1, 1, 0], [0, 0, 0, 0]):
            check(client, "nonzero", path, {"x": np.array(x, np.float32)})
        client.remove("nonzero")


def test_what_cannot_travel_is_one_clear_error(both: Service, tmp_path: Path) -> None:
    path = write(
        tmp_path / "list.onnx",
        [helper.make_node("SequenceConstruct", ["x"], ["y"])],
        [tensor("x", [2])],
        [helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)],
    )
    with both.client() as client:
        with pytest.raises(ModelRefused, match=r"output 'y' is seq\(tensor\(float\)\)"):
            client.add(path, engine="cpu")
        with pytest.raises(ModelRefused, match="it is a sequence") as refused:
            client.add(path)
        assert "the CPU engine does not run it: what the model takes or gives" in refused.value.reasons[-1]


def test_external_data_stays_beside_the_file(both: Service, tmp_path: Path) -> None:
    path = dense(tmp_path)
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    with both.client() as client:
        client.add(path, engine="cpu")
        check(client, "dense", path, {"x": np.ones((2, 6), np.float32)})
        client.remove("dense")
        (tmp_path / "w.bin").unlink()
        with pytest.raises(MissingFiles):
            client.add(path, engine="cpu")
        for entry in (model := onnx.load(path, load_external_data=False)).graph.initializer[0].external_data:
            if entry.key == "location":
                entry.value = "/etc/passwd"
        onnx.save(model, path)
        with pytest.raises(ModelRefused, match="leads outside"):
            client.add(path, engine="cpu")


def scaled(folder: Path, factor: float) -> Path:
    """y = factor x, of any number of rows, with a second output where the factor is odd."""
    nodes = [helper.make_node("Mul", ["x", "factor"], ["y"])]
    outputs = [tensor("y", ["n", 4])]
    if factor % 2:
        nodes.append(helper.make_node("Neg", ["y"], ["z"]))
        outputs.append(tensor("z", ["n", 4]))
    known = [numpy_helper.from_array(np.float32([factor]), "factor")]
    return write(folder / "scaled.onnx", nodes, [tensor("x", ["n", 4])], outputs, initializer=known)


def test_replacing_a_model_under_load_refuses_no_request(both: Service, tmp_path: Path) -> None:
    """What waits meanwhile is checked anew for the model that took its place."""
    count, done = 7, threading.Event()
    answered: list[dict[str, Any]] = []
    errors: list[Exception] = []
    before: list[int] = []

    def ask() -> None:
        with both.client() as asking:
            while not done.is_set():
                try:
                    answered.append(asking.infer("scaled", {"x": np.ones((2, 4), np.float32)}))
                except Exception as error:  # noqa: BLE001 - told below
                    errors.append(error)

    with both.client() as client:
        client.add(scaled(tmp_path, 1), engine="cpu")
        askers = [threading.Thread(target=ask) for _ in range(4)]  # three of them wait at any time
        for asker in askers:
            asker.start()
        try:
            for factor in range(2, count):
                client.add(scaled(tmp_path, factor), engine="cpu", replace=True)
                before.append(len(answered))
                wait_for(lambda: errors or len(answered) > before[-1], "answers of the new one", both)
        finally:
            done.set()
            for asker in askers:
                asker.join()
        client.remove("scaled")
    assert not errors
    for outputs in answered:
        factor = outputs["y"][0, 0]
        np.testing.assert_array_equal(outputs["y"], np.full((2, 4), factor))
        assert set(outputs) == ({"y", "z"} if factor % 2 else {"y"})


def test_memory_that_runs_out_names_the_setting(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    large = numpy_helper.from_array(np.array([1 << 34], np.int64), "large")
    path = write(
        tmp_path / "large.onnx",
        [helper.make_node("Expand", ["x", "large"], ["all"]), helper.make_node("ReduceSum", ["all"], ["y"])],
        [tensor("x", [1])],
        [tensor("y", [1])],
        initializer=[large],
    )
    service = start_service(config=f"{FASTEST}\n[cpu]\nmemory_mib = 1500\n[apps]\nmemory_mib = 1200\n")
    with service.client() as client:
        for add, setting in (
            (lambda: client.add(path, engine="cpu"), "1500 MiB of cpu.memory_mib"),
            (lambda: client.upload(path), "1200 MiB of apps.memory_mib"),
        ):
            with pytest.raises((ModelRefused, ResourceExhausted)) as refused:
                add()
            assert setting in " ".join((str(refused.value), *getattr(refused.value, "reasons", ())))


def test_what_memory_cannot_do_for_is_refused_before_it_starts(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    weights = np.zeros((1 << 10, 25 << 10), np.float32)  # 100 MiB
    large = write(
        tmp_path / "large.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [tensor("x", [1, 1 << 10])],
        [tensor("y", [1, 25 << 10])],
        initializer=[numpy_helper.from_array(weights, "w")],
    )
    bounds = "[limits]\ncompile_memory_mib = 300\n[apps]\nmemory_mib = 170\n"
    service = start_service(config=f"{FASTEST}\n{bounds}")
    with service.client() as client:
        with pytest.raises(
            ModelRefused, match=r"loading it takes at least 180 MiB.* 170 MiB of apps\.memory_mib;"
        ):
            client.upload(large)
        with pytest.raises(
            ModelRefused, match=r"compiling it takes .* 300 MiB of limits\.compile_memory_mib;"
        ):
            client.add(large, engine="gpu")
        added = client.add(large)
        assert "it is not compiled: compiling it takes at least 720 MiB of memory" in str(
            client.show("large")
        )
        assert added["engine"] == "cpu"


def test_the_service_itself_loads_no_onnx(both: Service) -> None:
    mapped = {Path(each.path).name for each in psutil.Process(both.process.pid).memory_maps()}
    assert not [name for name in mapped if "onnx" in name or "multiarray" in name]


def test_ties_go_to_the_gpu() -> None:
    assert choose(EngineTimes(gpu_ms=TIE * 1.1, cpu_ms=1.0)).engine == "cpu"
    assert choose(EngineTimes(gpu_ms=TIE * 0.99, cpu_ms=1.0)).engine == "gpu"
    assert choose(EngineTimes(gpu_ms=1.0, cpu_ms=TIE * 1.1)).engine == "gpu"


def test_a_processor_under_opencl_must_be_faster() -> None:
    """Since it leaves no core to apps."""
    shared = functools.partial(EngineTimes, same_cores=True)
    assert choose(shared(gpu_ms=1.01, cpu_ms=1.0)).engine == "cpu"
    assert choose(shared(gpu_ms=1.0, cpu_ms=1.0)).engine == "gpu"


@pytest.mark.parametrize(
    ("chosen", "times", "owner", "only_slower"),
    [
        ("cpu", EngineTimes(gpu_ms=2.0, cpu_ms=1.0), None, True),
        ("cpu", EngineTimes(gpu_ms=2.0, cpu_ms=1.0), 1000, True),
        ("cpu", EngineTimes(gpu_ms=2.0, cpu_ms=1.0, others_percent=40.0), None, True),
        ("cpu", EngineTimes(gpu_ms=LONGEST_OWN_MS + 1, cpu_ms=1.0), None, True),
        ("cpu", EngineTimes(gpu_ms=LONGEST_OWN_MS + 1, cpu_ms=1.0), 1000, False),  # It would block others
        ("cpu", None, None, False),  # It is not right
        ("gpu", EngineTimes(gpu_ms=1.0, cpu_ms=2.0), None, False),
    ],
)
def test_a_pin_overrides_times_and_nothing_else_whatever_the_reason_says(
    chosen: str, times: EngineTimes | None, owner: int | None, only_slower: bool
) -> None:
    """The reason of a stored manifest is for people."""
    assert times is None or choose(times, owner).engine == chosen
    for reason in ("the CPU engine is faster: compiled 2 ms", "reworded"):
        manifest = Manifest(
            name="m",
            added=1.0,
            compiled=None,
            history=NO_HISTORY,
            sources=(),
            shapes={},
            precision="auto",
            owner=owner,
            decision=EngineDecision(chosen=chosen, reason=reason, times=times),
        )
        assert is_only_slower(manifest) is only_slower


def plus_one(path: Path) -> Path:
    """What `spin` computes."""
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    ends = tensor("x", [spin.SIZE]), tensor("y", [spin.SIZE])
    return write(
        path, [helper.make_node("Add", ["x", "one"], ["y"])], [ends[0]], [ends[1]], initializer=[one]
    )


def stored_as_slower(state: Path, folder: Path) -> str:
    """A state folder with a model whose compiled form was found slower; gives the hash of its source."""
    folder.mkdir()
    source = describe(plus_one(folder / "m.onnx"), "m.onnx")
    slow = spin.write(folder / "m.honed", 400_000, sha256=source.sha256)
    compiled = describe(slow, "m.honed")
    ends = (TensorSpec(name="x", dtype="float32", shape=(spin.SIZE,)),)
    manifest = Manifest(
        name="m",
        added=1.0,
        compiled=compiled,
        history=begin(compiled, schedules="slow", why="added", now=1.0),
        sources=(source,),
        shapes={},
        precision="auto",
        interface=Interface(
            inputs=ends, outputs=(dataclasses.replace(ends[0], name="y"),), opset=17, producer=""
        ),
        decision=EngineDecision(chosen="cpu", reason="it was slower"),
    )
    store = Store(state)
    store.open()
    store.commit(manifest, [(compiled, slow), (source, folder / "m.onnx")])
    return source.sha256


def test_a_better_version_of_what_the_cpu_engine_serves_is_compared_with_that(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    sha256 = stored_as_slower(tmp_path / "state", tmp_path / "made")
    service = start_service(config=FASTEST)
    with service.client() as client:

        def right() -> None:
            np.testing.assert_allclose(client.infer("m", {"x": spin.X})["y"], spin.X + 1)

        right()
        assert engine(client, "m") == "cpu"
        fast = spin.write(tmp_path / "fast.honed", 40_000, sha256=sha256)
        told = client.publish("m", fast, expected=client.show("m")["sha256"], why="tuned: a test")
        assert "CPU engine is faster" in told["sentence"], told
        assert (client.history("m")["version"], client.history("m")["on_trial"]) == (2, False)
        assert engine(client, "m") == "cpu"
        right()
        client.rollback("m")
        assert engine(client, "m") == "gpu", "a version that was chosen by hand serves"
        right()


def test_while_a_damaged_compiled_file_is_made_anew_the_cpu_engine_serves(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    stored_as_slower(tmp_path / "state", tmp_path / "made")
    objects = (tmp_path / "state" / "objects").iterdir()
    [compiled] = [path for path in objects if path.read_bytes().startswith(modelfile.MAGIC)]
    compiled.write_bytes(b"damaged")
    service = start_service(config=FASTEST)
    with service.client() as client:
        np.testing.assert_allclose(client.infer("m", {"x": spin.X})["y"], spin.X + 1)
        wait_for(lambda: client.show("m")["kernels"], "it to be compiled again", service, seconds=200)
        np.testing.assert_allclose(client.infer("m", {"x": spin.X})["y"], spin.X + 1)
        told = "the engines to be compared once the compiled form is back"
        wait_for(lambda: "measured in turns" in client.models()[0]["engine_why"], told, service)
        np.testing.assert_allclose(client.infer("m", {"x": spin.X})["y"], spin.X + 1)


def test_engines_are_compared_again_on_another_driver_and_pinned_by_hand(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    stored_as_slower(tmp_path / "state", tmp_path / "made")  # with times of no driver that is here
    service = start_service(config=FASTEST)
    with service.client() as client:

        def served_by(kind: str) -> None:
            wait_for(lambda: engine(client, "m") == kind, f"the engine {kind} to serve", service)
            found = client.infer_response("m", {"x": spin.X})
            np.testing.assert_allclose(found.outputs["y"], spin.X + 1)
            assert found.engine == kind

        def why() -> Any:
            return client.models()[0]["engine_why"]

        wait_for(lambda: "measured in turns" in why(), "the engines to be compared", service)
        served_by("cpu")  # the compiled form spins
        measured = why()
        assert client.pin("m", engine="gpu")["engine"] == "gpu"
        served_by("gpu")
        assert client.show("m")["placement"]["pinned_engine"] == "gpu"
        service.kill()
        service.restart()
        service.wait_listening()
        service.wait_ready()
        served_by("gpu")
        assert why() == "the engine opencl was pinned"
        assert main(["--socket", str(service.socket), "unpin", "m"]) == 0
        served_by("cpu")
        assert why() == measured, "the times are those of this driver"
        with pytest.raises(InvalidArgument, match="there is no engine 'npu' to pin"):
            client.pin("m", engine="npu")


def test_what_has_one_form_only_is_pinned_to_no_other(both: Service, tmp_path: Path) -> None:
    with both.client() as client:
        client.add(recurrent(tmp_path))
        with pytest.raises(Unavailable, match="no compiled form that could be pinned: it is not compiled"):
            client.pin("recurrent", engine="gpu")
        assert client.pin("recurrent", engine="cpu")["engine"] == "cpu"
        assert client.pin("recurrent", 0, engine="") == {"version": 0, "pinned": False, "engine": ""}
        client.remove("recurrent")


def test_a_model_of_the_cpu_engine_is_profiled_node_by_node(
    both: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with both.client() as client:
        client.add(recurrent(tmp_path))
        client.infer("recurrent", {"x": np.ones((7, 1, 3), np.float32)})
        told = client.profile("recurrent", 2, timeline=True)
        assert (told["engine"], told["runs"], told["device"]["name"]) == ("cpu", 2, "CPU")
        assert {row["kind"] for row in told["rows"]} == {"node"}
        assert "GRU" in {row["schedule"] for row in told["rows"]}
        for _, begin, end, *device_span in told["timeline"]:
            assert 0 <= begin <= end
            assert device_span == [None, None]
        trace = tmp_path / "trace.json"
        assert main(["--socket", str(both.socket), "profile", "recurrent", f"--trace={trace}"]) == 0
        assert "GRU" in capsys.readouterr().out
        assert '"host"' in trace.read_text()
        client.remove("recurrent")


def test_nodes_within_others_are_not_counted_twice() -> None:
    def node(name: str, operator: str, begin: int, took: int) -> dict[str, Any]:
        event = {"cat": "Node", "ph": "X", "name": f"{name}_kernel_time", "ts": begin, "dur": took}
        return event | {"args": {"op_name": operator}}

    warm, run = ({"cat": "Session", "ph": "X", "name": "model_run", "ts": at, "dur": 90} for at in (0, 100))
    body = [node("add", "Add", 112, 10), node("add", "Add", 124, 10)]
    events = [warm, node("loop", "Loop", 5, 80), run, *body, node("loop", "Loop", 110, 30)]
    whole, nodes = profiling.read(json.dumps([*events, node("last", "Relu", 145, 5)]))
    assert whole == 90
    assert [(n.operator, n.own_us) for n in nodes] == [("Add", 10), ("Add", 10), ("Loop", 10), ("Relu", 5)]


def test_requests_that_take_longer_for_long_are_noticed() -> None:
    drift = LatencyDrift()
    assert not any(drift.note("gpu", 1.19, 1.0) for _ in range(3 * DRIFT_RUNS))
    assert not any(drift.note("cpu", 9.0, 1.0) for _ in range(DRIFT_RUNS - 1))
    assert drift.note("cpu", 9.0, 1.0)
    slow_ones = [9.0 if n % 2 else 1.0 for n in range(DRIFT_RUNS)]
    assert not any(drift.note("cpu", ms, 1.0) for ms in slow_ones), "now and then is other work"


def test_requests_that_take_less_than_when_the_engine_was_chosen_are_noticed() -> None:
    """Then the machine was busy, and the other engine may have gained more."""
    drift = LatencyDrift()
    assert not any(drift.note("gpu", 0.81, 1.0) for _ in range(3 * DRIFT_RUNS))
    assert any(drift.note("gpu", 0.5, 1.0) for _ in range(DRIFT_RUNS))


def test_what_waited_for_a_compiler_is_compiled_when_there_is_one(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    path = dense(tmp_path)
    source = describe(path, "dense.onnx")
    sizes = (-1, 6)
    manifest = Manifest(
        name="dense",
        added=1.0,
        compiled=None,
        history=NO_HISTORY,
        sources=(source,),
        shapes={},
        precision="auto",
        interface=Interface(
            inputs=(TensorSpec(name="x", dtype="float32", shape=sizes),),
            outputs=(TensorSpec(name="y", dtype="float32", shape=sizes),),
            opset=17,
            producer="",
        ),
        decision=EngineDecision(
            reason="it is not compiled: the compiler is not installed", awaits_compiler=True
        ),
    )
    assert not is_unfinished(manifest.with_decision(awaits_compiler=False), "fastest")
    store = Store(tmp_path / "state")
    store.open()
    store.commit(manifest, [(source, path)])
    service = start_service(config=FASTEST)
    with service.client() as client:
        x = np.ones((3, 6), np.float32)
        assert client.infer("dense", {"x": x})["y"].shape == (3, 6)
        wait_for(lambda: client.show("dense")["kernels"], "it to be compiled", service, seconds=200)
        assert "measured in turns" in client.show("dense")["placement"]["why"]


@pytest.mark.slow
def test_what_waited_for_a_device_is_compiled_when_there_is_one(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    vendors = Vendors(tmp_path / "opencl")
    service = start_service(config=FASTEST, environment=vendors.environment, wait=False)
    service.wait_listening()
    path = dense(tmp_path)
    with service.client() as client:
        told = client.add(path)
        assert "the worker does not start" in told["engine_why"]
        check(client, "dense", path, {"x": np.ones((3, 6), np.float32)})
        vendors.have("pthread")
        wait_for(lambda: client.show("dense")["kernels"], "it to be compiled", service, seconds=200)
        check(client, "dense", path, {"x": np.ones((1, 6), np.float32)})


_NO_COMPILER = """
import importlib.util, os
real = importlib.util.find_spec
def found(name, package=None):
    return None if name == "honed.tuner" and os.path.exists(MARK) else real(name, package)
importlib.util.find_spec = found
"""


def test_a_compiler_that_is_installed_later_compiles_when_a_tuner_reports(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    mark = tmp_path / "without"
    mark.touch()
    service = start_service(config=FASTEST, patch=_NO_COMPILER.replace("MARK", repr(str(mark))))
    with service.client() as client:
        added = client.add(dense(tmp_path))
        assert added["engine"] == "cpu"
        assert "the compiler is not installed; install honed-tuner" in added["engine_why"]
        mark.unlink()
        client.report("here I am")
        wait_for(lambda: client.show("dense")["kernels"], "it to be compiled", service, seconds=200)
        check(client, "dense", tmp_path / "dense.onnx", {"x": np.ones((1, 6), np.float32)})


class Turns:
    """A loader whose runs take what it is told."""

    def __init__(self, ns: int, fails: bool = False) -> None:
        self.comparing = asyncio.Lock()
        self.turns: list[int] = []
        self.engine = SimpleNamespace(fingerprint="d", on_processor=False)
        self.pid = 0
        self._ns, self._fails = ns, fails

    async def time_cpu_run(self, _: str, __: Path, turn: int) -> ComparisonRun:
        return await self.time_compiled_run("", turn)

    async def time_compiled_run(self, _: str, turn: int) -> ComparisonRun:
        if self._fails:
            raise WorkerDied("it crashed")
        self.turns.append(turn)
        return ComparisonRun(ns=self._ns)


def test_engines_run_in_turns_and_the_compiled_form_serves_where_that_is_not_possible() -> None:
    device, cpu = Turns(5_000_000), Turns(1_000_000)
    choice = asyncio.run(compare(cast(Any, device), "k", Path(), cast(Any, cpu), "s"))
    assert choice.engine == "cpu"
    assert "compiled 5 ms, ONNX Runtime 1 ms" in choice.why
    assert choice.times is not None
    assert device.turns == cpu.turns == list(range(len(cpu.turns)))
    assert len(cpu.turns) >= MIN_PAIRS
    choice = asyncio.run(compare(cast(Any, device), "k", Path(), cast(Any, Turns(1, fails=True)), "s"))
    assert choice.engine == "gpu"
    assert "could not be compared" in choice.why


@pytest.mark.slow
def test_a_choice_made_beside_busy_programs_is_made_again_when_the_machine_is_idle(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    """As idle counts what these settings say: other tests keep the processors busy, and it may stay so."""
    service = start_service(config=FASTEST + IDLE)
    with service.client() as client:

        def why() -> str:
            return str(client.show("dense")["placement"]["why"])

        with contextlib.ExitStack() as others:
            for _ in range(2 * (os.cpu_count() or 1)):
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                others.callback(busy.wait)
                others.callback(busy.kill)
            client.add(dense(tmp_path))
            first = why()
            assert "while other programs took" in first
        wait_for(lambda: why() != first, "another choice", service, seconds=300)
        assert "measured in turns" in why()


class _Rechoosing:
    """A service with one model whose engines were compared beside busy programs, and still are."""

    def __init__(self) -> None:
        self.compared = 0
        times = EngineTimes(gpu_ms=1.0, cpu_ms=1.0, others_percent=50.0)
        self.entry = SimpleNamespace(
            name="m", manifest=SimpleNamespace(decision=SimpleNamespace(times=times))
        )
        self.pool = SimpleNamespace(
            comparable=lambda _: True, compare_engines=self._compared, handle=lambda _: None
        )
        self.rechoice = EngineReselection(
            changes=cast(Any, SimpleNamespace(pool=self.pool, begin=lambda _: contextlib.nullcontext())),
            registry=cast(Any, SimpleNamespace(models=lambda: [self.entry], variants=lambda: [])),
            leasing=cast(Any, SimpleNamespace(adding=lambda *_: contextlib.nullcontext())),
        )

    async def _compared(self, _: Any) -> None:
        self.compared += 1


def test_engines_are_compared_again_in_idle_time_and_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, world = 0.0, _Rechoosing()
    monkeypatch.setattr("honed.daemon.changes.publish.time.monotonic", lambda: now)
    assert world.rechoice.background(idle=False) is None
    done: list[float] = []
    for second in range(10_000):
        now = float(second)
        if (work := world.rechoice.background(idle=True)) is not None:
            asyncio.run(cast(Any, work.run()))
            done.append(now)
    assert done == [0.0, 60.0, 180.0, 420.0, 900.0, 1860.0, 3780.0, 7380.0]
    world.entry.manifest.decision.times = EngineTimes(gpu_ms=1.0, cpu_ms=1.0)
    now += 1e6
    assert world.rechoice.background(idle=True) is None


def test_without_the_cpu_engine_there_is_nothing_to_compare() -> None:
    """As where honed-cpu was removed, and models still have times that are provisional."""
    model = cast(
        Any, SimpleNamespace(manifest=SimpleNamespace(owner=None), comparing=False, canary=None, isolated="")
    )
    assert not comparable(Machine(Registry(), ("",), "", 8), model)


def test_earlier_versions_can_read_the_times_of_a_quiet_machine() -> None:
    quiet = strict.to_plain(EngineTimes(gpu_ms=1.0, cpu_ms=1.0))
    assert set(quiet) == {"gpu_ms", "cpu_ms", "device", "runtime", "same_cores"}
    busy = EngineTimes(gpu_ms=1.0, cpu_ms=1.0, others_percent=50.0)
    assert strict.from_plain(EngineTimes, strict.to_plain(busy), where="times") == busy
