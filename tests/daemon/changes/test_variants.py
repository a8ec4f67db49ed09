"""Variants in a real service on PoCL: any shape is answered, and those asked for often run compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.daemon.store.compiled import Interface, TensorSpec
from honed.daemon.store.files import describe
from honed.daemon.store.store import EngineDecision, Manifest, Store, begin
from honed.daemon.store.versions import NO_HISTORY
from honed.runtime import Client
from honed.runtime.compiled import modelfile
from honed.runtime.errors import InvalidArgument, NotFound
from tests.daemon import spin
from tests.daemon.idle.test_tuning import wait_for_tuner_aside
from tests.daemon.running import ALL_HOLDS, IDLE, NO_TUNER, Service, serving, wait_for

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
WIDTH = 64


def config(memory_mib: int = 512, more: str = NO_TUNER) -> str:
    """Idle as soon as nobody asks; variants of two shapes, after four requests each."""
    return f"""
[serve]
engine = "fastest"
[variants]
requests = 4
per_model = 2
memory_mib = {memory_mib}
[usage]
save_seconds = 0.2
{IDLE}{more}"""


def attention(path: Path) -> Path:
    """Cross attention of n queries to m keys, two open sizes that are independent of each other."""
    random = np.random.default_rng(3)
    weights = [
        numpy_helper.from_array((random.normal(size=(WIDTH, WIDTH)) / 8).astype(np.float32), name)
        for name in ("wq", "wk", "wv")
    ]
    nodes = [
        helper.make_node("MatMul", ["queries", "wq"], ["q"]),
        helper.make_node("MatMul", ["keys", "wk"], ["k"]),
        helper.make_node("MatMul", ["keys", "wv"], ["v"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("MatMul", ["weights", "v"], ["mixed"]),
        helper.make_node("Add", ["mixed", "queries"], ["y"]),
    ]
    return write(path, nodes, weights)


def mean(path: Path) -> Path:
    """The weighted mean of m keys added to n queries: compiled in half of the time that attention takes."""
    weight = numpy_helper.from_array(np.linspace(1, 2, WIDTH, dtype=np.float32), "w")
    nodes = [
        helper.make_node("ReduceMean", ["keys"], ["mean"], axes=[1]),
        helper.make_node("Mul", ["mean", "w"], ["weighted"]),
        helper.make_node("Add", ["queries", "weighted"], ["y"]),
    ]
    return write(path, nodes, [weight])


def write(path: Path, nodes: list[onnx.NodeProto], constants: list[TensorProto]) -> Path:
    """The model of n queries and m keys to what the last of the nodes gives."""
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("queries", TensorProto.FLOAT, [1, "n", WIDTH]),
            helper.make_tensor_value_info("keys", TensorProto.FLOAT, [1, "m", WIDTH]),
        ],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, [1, "n", WIDTH])],
        initializer=constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A service for models whose variants are made by hand."""
    with serving(tmp_path_factory, cache_dir, config=config()) as running:
        yield running


class Asking:
    """Asks for a model in shapes, and compares with ONNX Runtime."""

    def __init__(self, client: Client, path: Path) -> None:
        self._client = client
        self._name = path.stem
        self._session = onnxruntime.InferenceSession(str(path))
        self._random = np.random.default_rng(5)

    def __call__(self, n: int, m: int) -> None:
        given = {
            "queries": self._random.normal(size=(1, n, WIDTH)).astype(np.float32),
            "keys": self._random.normal(size=(1, m, WIDTH)).astype(np.float32),
        }
        [expected] = self._session.run(None, given)
        [found] = self._client.infer(self._name, given).values()
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def variants(client: Client, model: str = "model") -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in client.show(model)["variants"]}


def states(client: Client) -> dict[str, str]:
    return {name.partition("@")[2]: each["state"] for name, each in variants(client).items()}


def answered(client: Client, engine: str, model: str = "model") -> int:
    [figures] = [each for each in client.metrics()["models"] if each["name"] == model]
    return int(figures["engines"].get(engine, 0))


@pytest.mark.slow
def test_shapes_asked_for_often_are_compiled_in_idle_time(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    path = attention(tmp_path / "model.onnx")
    service = start_service(config=config(), patch=ALL_HOLDS)
    random = np.random.default_rng(1)
    with service.client() as client:
        client.add(path, wait=False)
        ask = Asking(client, path)
        for n, m in random.integers(5, 400, (200, 2)):
            ask(n, m)
        assert answered(client, "cpu") == 200
        for _ in range(6):
            ask(11, 13)
            ask(12, 13)
        wait_until(service, {"11x13": "READY", "12x13": "READY"})
        for variant in variants(client).values():
            assert variant["engine"] == "gpu", variant
            assert "measured in turns" in variant["why"]
        before = answered(client, "gpu")
        for n, m in ((11, 13), (12, 13), (13, 11), (12, 12)):
            ask(n, m)
        assert answered(client, "gpu") == before + 2
        assert [(model["name"], model["variants"]) for model in client.models()] == [("model", 2)]
        # What is asked for much more takes the place of what is asked for least.
        ask(12, 13)
        for _ in range(30):
            ask(9, 14)
        wait_until(service, {"9x14": "READY", "12x13": "READY"})
    service.kill()
    service.restart()
    service.wait_listening()
    service.wait_ready()
    wait_until(service, {"9x14": "READY", "12x13": "READY"})
    with service.client() as client:
        ask = Asking(client, path)
        ask(9, 14)
        assert answered(client, "gpu") == 1
        # What does not fit into memory rests, and comes back when it does.
        service.configure(config(memory_mib=0))
        wait_until(service, {"9x14": "RESTING", "12x13": "RESTING"})
        ask(9, 14)
        assert (answered(client, "gpu"), answered(client, "cpu")) == (1, 1)
        assert variants(client)["model@9x14"]["requests"] > 30
        service.configure(config())
        ask(9, 14)
        wait_until(service, {"9x14": "READY", "12x13": "RESTING"})
        ask(9, 14)
        assert answered(client, "gpu") == 2
        client.remove("model")
        assert not client.models()
        assert not client.metrics()["variants"]
        assert not list((service.state / "objects").iterdir())
        assert not list((service.state / "models").iterdir())


def wait_until(service: Service, expected: dict[str, str]) -> None:
    """Until the variants are in these states."""
    with service.client() as client:
        wait_for(lambda: states(client) == expected, f"variants {expected}", service, seconds=200)


def test_several_shapes_by_hand_serve_without_the_cpu_engine(by_hand: Service, tmp_path: Path) -> None:
    path = mean(tmp_path / "several.onnx")
    sets = [{"queries": (1, n, WIDTH), "keys": (1, m, WIDTH)} for n, m in ((7, 5), (5, 7), (6, 6), (4, 4))]
    with by_hand.client() as client:
        added = client.add(path, engine="gpu", shapes=sets[0], variants=sets[1:])
        others = ((5, 7), (6, 6), (4, 4))
        told = [f"compiled for queries [1, {n}, {WIDTH}], keys [1, {m}, {WIDTH}]" for n, m in others]
        assert [note.partition(", too")[0] for note in added["notes"][-3:]] == told
        ask = Asking(client, path)
        for n, m in ((7, 5), (5, 7), (6, 6), (4, 4)):
            ask(n, m)
        assert answered(client, "gpu", "several") == 4
        with pytest.raises(InvalidArgument, match="the shapes of a model are fixed"):
            ask(5, 5)
        assert all(each["by_hand"] for each in variants(client, "several").values()), (
            "more than two stay, by hand"
        )
        check_by_name(client, sorted(variants(client, "several"))[0])


def check_by_name(client: Client, name: str) -> None:
    """What is done to the versions of a model is done to those of a variant by its name."""
    assert client.history(name)["version"] == 1
    assert client.show(name)["kernels"]
    assert client.pin(name) == {"version": 1, "pinned": True, "engine": ""}
    with client.export(name) as files:
        assert {name: list(shape) for name, shape in files.shapes.items()} == client.show(name)["shapes"]
        assert len(files.sources) == 1
    with pytest.raises(NotFound, match="is a variant; ask its model"):
        client.infer(name, {})
    with pytest.raises(NotFound, match="is a variant"):
        client.remove(name)


@pytest.mark.slow
def test_another_model_of_the_name_has_none_of_them(by_hand: Service, tmp_path: Path) -> None:
    path = mean(tmp_path / "replaced.onnx")
    shapes = {"queries": (1, 7, WIDTH), "keys": (1, 5, WIDTH)}
    with by_hand.client() as client:
        client.add(path, shapes=shapes, variants=[{"queries": (1, 5, WIDTH), "keys": (1, 7, WIDTH)}])
        assert len(variants(client, "replaced")) == 1
        model = onnx.load(path)
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros(WIDTH, np.float32), "w"))
        onnx.save(model, path)
        client.add(path, shapes=shapes, replace=True)
        assert not variants(client, "replaced")
        Asking(client, path)(5, 7)


@pytest.mark.slow
def test_a_variant_is_tuned_as_models_are(start_service: Callable[..., Service], tmp_path: Path) -> None:
    path = attention(tmp_path / "model.onnx")
    service = start_service(config=config(more="[tuner]\nspawn = true\n"), patch=ALL_HOLDS)
    # Other tests keep the processors busy, and it would wait until they end.
    os.sched_setscheduler(wait_for_tuner_aside(service).pid, os.SCHED_OTHER, os.sched_param(0))
    with service.client() as client:
        client.add(path, shapes={"queries": (1, 5, WIDTH), "keys": (1, 5, WIDTH)})
        ask = Asking(client, path)
        for _ in range(8):
            ask(2, 7)
        wait_until(service, {"2x7": "READY"})
        for _ in range(8):
            ask(2, 7)
        # Of so few queries the schedules that need no trial leave a search much to find.
        name = "model@2x7"

        def tuned() -> bool:
            return bool(client.history(name)["version"] > 1)

        wait_for(tuned, "a tuned version of the variant", service, seconds=560)
        ask(2, 7)
        assert client.history(name)["versions"][1]["why"].startswith("idle tuning")


def stored_with_a_slower_variant(state: Path, folder: Path) -> str:
    """A state folder with a model of any size, and a variant that was found slower; the source's hash."""
    folder.mkdir()
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "y")]
    nodes = [helper.make_node("Add", ["x", "one"], ["y"])]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initializer=[one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), folder / "m.onnx")
    source = describe(folder / "m.onnx", "m.onnx")
    slow = spin.write(folder / "m.honed", 400_000, sha256=source.sha256)
    compiled = describe(slow, "m.honed")
    x = TensorSpec(name="x", dtype="float32", shape=(-1,), symbols=("n",))
    model = Manifest(
        name="m",
        added=1.0,
        compiled=None,
        history=NO_HISTORY,
        sources=(source,),
        shapes={},
        precision="auto",
        interface=Interface(inputs=(x,), outputs=(replace(x, name="y"),), opset=17, producer=""),
        decision=EngineDecision(reason="its sizes are open"),
    )
    variant = replace(
        model,
        name=f"m@{spin.SIZE}",
        compiled=compiled,
        history=begin(compiled, schedules="slow", why="asked for", now=1.0),
        shapes={"x": (spin.SIZE,)},
        decision=EngineDecision(chosen="cpu", reason="it was slower"),
    )
    store = Store(state)
    store.open()
    store.commit(model, [(source, folder / "m.onnx")])
    store.commit(variant, [(compiled, slow)])
    return source.sha256


def test_a_better_version_of_a_variant_that_rests_is_taken(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    sha256 = stored_with_a_slower_variant(tmp_path / "state", tmp_path / "made")
    service = start_service(config=config())
    name = f"m@{spin.SIZE}"
    with service.client() as client:

        def variant() -> dict[str, Any]:
            [found] = client.show("m")["variants"]
            return dict(found)

        def right() -> None:
            np.testing.assert_allclose(client.infer("m", {"x": spin.X})["y"], spin.X + 1)

        right()
        assert (variant()["state"], variant()["engine"]) == ("RESTING", "cpu")
        with client.export(name) as files:
            expected = files.sha256
        fast = spin.write(tmp_path / "fast.honed", 40_000, sha256=sha256)
        told = client.publish(name, fast, expected=expected, why="tuned: a test")
        assert told["published"], told
        assert client.history(name)["version"] == 2
        wait_for(lambda: variant()["state"] == "RESTING", "it to rest, still the slower one", service)
        right()
        assert client.rollback(name) == {"version": 1}
        wait_for(lambda: variant()["state"] == "READY", "what was chosen by hand to serve", service)
        right()
        assert variant()["answered"] == 1


def test_a_damaged_variant_is_dropped(start_service: Callable[..., Service], tmp_path: Path) -> None:
    stored_with_a_slower_variant(tmp_path / "state", tmp_path / "made")
    objects = (tmp_path / "state" / "objects").iterdir()
    [compiled] = [path for path in objects if path.read_bytes().startswith(modelfile.MAGIC)]
    compiled.write_bytes(b"damaged")
    service = start_service(config=config())
    with service.client() as client:
        assert not client.show("m")["variants"]
        np.testing.assert_allclose(client.infer("m", {"x": spin.X})["y"], spin.X + 1)
        assert f"variant m@{spin.SIZE} is dropped: its compiled file is damaged" in service.log
        assert [path.name for path in (service.state / "models").glob("*.json")] == ["m.json"]


def test_a_variant_without_its_model_is_dropped(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    stored_with_a_slower_variant(tmp_path / "state", tmp_path / "made")
    (tmp_path / "state" / "models" / "m.json").unlink()
    service = start_service(config=config())
    with service.client() as client:
        wait_for(lambda: not client.metrics()["variants"], "it to be dropped", service)
        wait_for(lambda: not list((service.state / "objects").iterdir()), "its files to be removed", service)
