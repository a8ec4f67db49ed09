"""ONNX Runtime's optimisations, checked in a real service: what serves answers as the file says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.daemon.changes.optimisations import NO_COMPILER, OptimisationChecks
from honed.daemon.core.machine import Machine
from honed.daemon.core.messages import Added, Event, OptimisationChecked, Persist, WorkerReady
from honed.daemon.core.model import cpu_engine
from honed.daemon.core.state import Registry
from honed.daemon.serving.engine_server import EngineServer
from honed.daemon.serving.pool import EngineManager
from honed.daemon.settings.schema import Limits
from honed.daemon.store.compiled import Interface
from honed.daemon.store.files import StoredFile
from honed.daemon.store.store import Manifest, Store
from honed.daemon.store.versions import NO_HISTORY
from honed.protocol.values import OptimisationCheck
from honed.runtime import Client
from honed.tool.main import main
from tests import lookalikes
from tests.daemon.running import NO_TUNER, Service, serving, wait_for

CPU = cpu_engine(None)
FASTEST = '[serve]\nengine = "fastest"\n' + NO_TUNER
pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]


def stem(path: Path, size: int = 32) -> Path:
    """As Keras' ResNetV2 begins: ONNX Runtime 1.31 pads the MaxPool with minus infinity, and not zeros."""
    r = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array((r.standard_normal((4, 3, 3, 3)) / 12).astype(np.float32), "w"),
        numpy_helper.from_array(np.full(4, -1, np.float32), "b"),
        numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads"),
    ]
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Pad", ["c", "pads"], ["d"]),
            helper.make_node("MaxPool", ["d"], ["y"], kernel_shape=[3, 3], strides=[2, 2]),
        ],
        "stem",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, size // 2, size // 2])],
        constants,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8), path)
    return path


def given(size: int = 32) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((1, 3, size, size)).astype(np.float32)


def answers(path: Path, *, optimised: bool) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    [found] = onnxruntime.InferenceSession(str(path), options).run(None, {"x": given()})
    return np.asarray(found)


def checked(client: Client, name: str, service: Service) -> OptimisationCheck:
    """What was found, once it was."""
    told = "the check of optimisations"  # at a low priority
    wait_for(lambda: client.show(name)["optimisation"] is not None, told, service, seconds=240)
    return OptimisationCheck(**client.show(name)["optimisation"])


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=FASTEST) as running:
        yield running


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that this ONNX Runtime optimises wrongly."""
    path = stem(tmp_path_factory.mktemp("wrong") / "stem.onnx")
    if np.abs(answers(path, optimised=True) - answers(path, optimised=False)).max() < 0.01:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} optimises the model rightly")
    return path


def test_a_wrong_optimisation_is_found_and_not_served_and_no_request_is_lost(
    service: Service, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = answers(wrong, optimised=False)
    found: list[np.ndarray] = []
    errors: list[Exception] = []
    done = threading.Event()

    def ask() -> None:
        with service.client() as asking:
            while not done.is_set():
                try:
                    found.append(asking.infer("stem", {"x": given()})["y"])
                except Exception as error:  # noqa: BLE001 - the test tells it
                    errors.append(error)

    with service.client() as client:
        client.add(wrong, engine="cpu")
        asker = threading.Thread(target=ask)
        asker.start()
        try:
            told = checked(client, "stem", service)
            after = client.infer("stem", {"x": given()})["y"]
        finally:
            done.set()
            asker.join()
        assert not errors
        for each in (*found, after):  # from the first on
            np.testing.assert_allclose(each, right, atol=1e-4)
        assert told.checked
        assert told.level in ("layout", "extended", "basic", "none")
        assert told.error is not None
        assert told.error > 0.1
        assert "output 'y' differs" in told.why
        assert "MaxPool" in told.why
        assert "Pad 'd'" in told.why
        assert client.status()["devices"][-1]["worker"]["restarts"] == 0
    capsys.readouterr()
    assert main(["--socket", str(service.socket), "show", "stem"]) == 0
    said = capsys.readouterr().out
    assert f"optimises no further than level {told.level}" in " ".join(said.split())
    assert main(["--socket", str(service.socket), "--json", "show", "stem"]) == 0
    assert json.loads(capsys.readouterr().out)["optimisation"]["level"] == told.level
    assert "ONNX Runtime's optimisations change its answers" in service.log


def test_the_verdict_outlives_the_service_and_its_worker(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, wrong: Path
) -> None:
    right = answers(wrong, optimised=False)
    with serving(tmp_path_factory, cache_dir, config=FASTEST) as service:
        with service.client() as client:
            client.add(wrong, engine="cpu")
            told = checked(client, "stem", service)
        service.kill()
        service.restart()
        service.wait_listening()
        service.wait_ready()
        with service.client() as client:
            assert OptimisationCheck(**client.show("stem")["optimisation"]) == told
            np.testing.assert_allclose(client.infer("stem", {"x": given()})["y"], right, atol=1e-4)
            # The same file under another name has no check of its own, and is right from the first answer.
            client.add(wrong, name="again", engine="cpu")
            np.testing.assert_allclose(client.infer("again", {"x": given()})["y"], right, atol=1e-4)
            assert checked(client, "again", service) == told
        assert service.log.count("ONNX Runtime's optimisations change its answers") == 1


def test_engines_are_compared_at_the_level_that_is_right(service: Service, wrong: Path) -> None:
    """What is compiled is told the same, and which engine answers changes nothing."""
    right = answers(wrong, optimised=False)
    with service.client() as client:
        client.add(wrong, name="both")
        assert checked(client, "both", service).level != "all"
        for engine in ("cpu", "gpu"):
            client.pin("both", engine=engine)
            np.testing.assert_allclose(client.infer("both", {"x": given()})["y"], right, atol=1e-4)


def random(path: Path) -> Path:
    graph = helper.make_graph(
        [
            helper.make_node("RandomNormalLike", ["x"], ["noise"]),
            helper.make_node("Add", ["x", "noise"], ["y"]),
        ],
        "random",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_what_cannot_be_checked_is_told_with_the_reason(service: Service, tmp_path: Path) -> None:
    with service.client() as client:
        client.add(random(tmp_path / "random.onnx"), engine="cpu")
        told = checked(client, "random", service)
        assert (told.checked, told.level) == (False, "none")
        assert "random" in told.why
        assert "not checked, because" in service.log


SCALE = (0.5, -2.0)


def test_an_optimised_form_that_fails_is_never_seen(service: Service, tmp_path: Path) -> None:
    """The check finds it, or the request for which it is run first, which the plain one answers."""
    made, x, runs = lookalikes.layer_norm(["n", "m"], SCALE), np.ones((1, 1), np.float32), (1, 2)
    if not lookalikes.fails_optimised(made, x):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} runs it optimised")
    onnx.save(made, tmp_path / "open.onnx")
    onnx.save(lookalikes.layer_norm([1, 1], SCALE), tmp_path / "closed.onnx")
    with service.client() as client:
        client.add(tmp_path / "closed.onnx", engine="cpu")
        client.add(tmp_path / "open.onnx", engine="cpu", shapes={"x": runs})
        assert client.infer("closed", {"x": x})["y"].tolist() == [[0, 0]]
        told = checked(client, "closed", service)
        assert (told.checked, told.level) == (True, "basic")
        assert client.infer("closed", {"x": x})["y"].tolist() == [[0, 0]]
        assert checked(client, "open", service).level == "all"
        for given in (np.array([[1, 3]], np.float32), x):
            found = client.infer("open", {"x": given})["y"]
            np.testing.assert_allclose(found, lookalikes.normalised(given, SCALE), atol=1e-5)
        told = checked(client, "open", service)
        assert (told.checked, told.level) == (True, "none")
        assert "SimplifiedLayerNormalization" in told.why
        assert client.infer("open", {"x": x})["y"].tolist() == [[0, 0]]
    assert "model open: the CPU engine runs it without optimisation" in service.log


class Worker:
    """The CPU engine's, of an ONNX Runtime of some version."""

    def __init__(self, runtime: str) -> None:
        self.engine = SimpleNamespace(fingerprint=runtime)


class Checks(OptimisationChecks):
    """Counts the checks that are made, and makes none."""

    def __init__(self, registry: Registry, runtime: str) -> None:
        pool = SimpleNamespace(cpu_for=lambda owner: Worker(runtime), handle=self.heard)
        super().__init__(Limits(), cast(Any, None), registry, cast(EngineManager, pool))
        self.made: list[str] = []
        self.told: list[Event] = []

    def heard(self, event: Event) -> None:
        self.told.append(event)

    async def _check(self, manifest: Manifest, key: str, cpu: EngineServer) -> None:
        self.made.append(manifest.name)


FOUND = OptimisationCheck(level="basic", checked=True, error=0.5, why="y", seconds=1.0, runtime="1.31")


def stored(name: str, sha256: str, found: OptimisationCheck | None) -> Manifest:
    file = StoredFile(name="m.onnx", sha256=sha256, nbytes=1)
    interface = Interface(inputs=(), outputs=(), opset=17, producer="")
    return Manifest(
        name=name,
        added=0.0,
        compiled=None,
        history=NO_HISTORY,
        sources=(file,),
        shapes={},
        precision="auto",
        interface=interface,
        optimisation=found,
    )


@pytest.mark.slow
def test_the_compiler_makes_a_form_in_fp16_and_proves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 16]) for name in "xy"]
    weights = numpy_helper.from_array(np.eye(16, dtype=np.float32) / 3, "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Tanh", ["m"], ["y"])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializer=[weights])
    path, form, store = tmp_path / "m.onnx", tmp_path / "fp16.onnx", Store(tmp_path / "state")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    store.open()
    checks = OptimisationChecks(Limits(), store, Registry(), cast(EngineManager, None))

    def halved(source: Path) -> bool:
        known = stored("m", store.keep(source), replace(FOUND, level="all"))
        with caplog.at_level("INFO"):
            return asyncio.run(checks.write_half(known, 1, form))

    assert halved(path), caplog.text
    made = onnx.load(form)
    assert [made.graph.input[0], made.graph.output[0]] == ends
    assert [each.data_type for each in made.graph.initializer] == [TensorProto.FLOAT16]
    assert not halved(stem(tmp_path / "stem.onnx"))
    assert "ONNX Runtime does not run it in fp16: its sums of products stay in float32" in caplog.text


@pytest.mark.parametrize(
    ("runtime", "sha256", "found", "made"),
    [
        ("1.31", "a", FOUND, []),
        ("1.32", "a", FOUND, ["m"]),  # another ONNX Runtime
        ("1.31", "b", FOUND, ["other"]),  # another file
        ("1.31", "a", None, ["m"]),
        ("", "a", FOUND, []),  # nothing runs yet
        ("1.31", "a", replace(FOUND, checked=False, level="all", why=NO_COMPILER), ["m"]),  # there is one now
        ("1.31", "a", replace(FOUND, checked=False, level="all", why="it is random"), ["m"]),  # of old stores
        ("1.31", "a", replace(FOUND, checked=False, level="none", why="it is random"), []),
    ],
)
def test_a_file_is_checked_once_for_each_version_of_onnx_runtime(
    runtime: str, sha256: str, found: OptimisationCheck | None, made: list[str]
) -> None:
    machine = Machine(Registry(), ("",), "", 1, cpu=True)
    model = stored("m", "a", found)
    machine.handle(Added(manifest=model, compiled=None, preferred_engine="", proof=None), 0.0, 0.0)
    if runtime:
        machine.handle(WorkerReady(engine=CPU, worker=1, spec="", family="", fingerprint=runtime), 0.0, 0.0)

    async def go() -> Checks:
        checks = Checks(machine.models, runtime)
        begun = model if sha256 == "a" else stored("other", sha256, None)
        checks.begin(begun)
        checks.begin(begun)  # while it is under way
        await checks.wait_for_result(begun)
        return checks

    assert asyncio.run(go()).made == made


def test_what_is_known_of_a_file_holds_for_all_models_of_it() -> None:
    machine = Machine(Registry(), ("",), "", 1, cpu=True)
    machine.handle(WorkerReady(engine=CPU, worker=1, spec="", family="", fingerprint="1.31"), 0.0, 0.0)
    for name in ("m", "twin"):
        machine.handle(
            Added(manifest=stored(name, "a", None), compiled=None, preferred_engine="", proof=None), 0.0, 0.0
        )
    assert machine.models.session_config("a")[0] == "none"
    doing = machine.handle(OptimisationChecked("a", FOUND), 0.0, 0.0)
    assert sorted(action.model.name for action in doing if isinstance(action, Persist)) == ["m", "twin"]
    assert machine.models.session_config("a")[0] == "basic"
    assert machine.models.session_config("b")[0] == "none"
    assert not machine.handle(OptimisationChecked("a", FOUND), 0.0, 0.0)
    third = stored("third", "a", None)
    checks = Checks(machine.models, "1.31")
    checks.begin(third)
    assert checks.told == [OptimisationChecked("a", FOUND)]


@pytest.mark.parametrize(
    ("found", "level"),
    [
        (None, "none"),
        (FOUND, "basic"),
        (replace(FOUND, level="all"), "all"),
        (replace(FOUND, level="none", checked=False), "none"),
        (replace(FOUND, level="all", checked=False), "none"),  # as stores of earlier versions have it
    ],
)
def test_what_is_not_checked_runs_without_optimisation(found: OptimisationCheck | None, level: str) -> None:
    machine = Machine(Registry(), ("",), "", 1, cpu=True)
    machine.handle(WorkerReady(engine=CPU, worker=1, spec="", family="", fingerprint="1.31"), 0.0, 0.0)
    machine.handle(
        Added(manifest=stored("m", "a", found), compiled=None, preferred_engine="", proof=None), 0.0, 0.0
    )
    assert machine.models.session_config("a").level == level
    machine.handle(WorkerReady(engine=CPU, worker=2, spec="", family="", fingerprint="1.31"), 0.0, 0.0)
    assert machine.models.session_config("a").level == level
    machine.handle(WorkerReady(engine=CPU, worker=3, spec="", family="", fingerprint="1.32"), 0.0, 0.0)
    assert machine.models.session_config("a").level == "none"
