"""Chains in a real service: what they answer, on several engines, and whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from honed.protocol.params import ChainStep
from honed.runtime import AsyncClient, Client
from honed.runtime.errors import (
    AlreadyExists,
    HonedError,
    InvalidArgument,
    ModelRefused,
    NotFound,
    Unavailable,
)
from honed.tool.main import main
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw
from tests.daemon.running import DEADLINE, NO_TUNER, Service, descriptors, serving, too_late, wait_for

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Array = NDArray[Any]
Arrays = Mapping[str, Array]
BOTH = '[serve]\nengine = "fastest"\n' + NO_TUNER
AT_ONCE = 20  # requests
LARGE = 50_000  # elements: more than clients send in line
X = np.linspace(-3, 4, SIZE, dtype=np.float32)
KINDS = {"f": TensorProto.FLOAT, "i": TensorProto.INT64, "s": TensorProto.STRING}


def onnx_model(inputs: str, outputs: str, *nodes: onnx.NodeProto, size: Any = "n", **constants: Any) -> bytes:
    """Tensors are told as "x:f y:i", by name and kind; all have `size` elements."""

    def tensors(text: str) -> list[onnx.ValueInfoProto]:
        pairs = (each.split(":") for each in text.split())
        return [helper.make_tensor_value_info(name, KINDS[kind], [size]) for name, kind in pairs]

    known = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(list(nodes), "g", tensors(inputs), tensors(outputs), initializer=known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


node = helper.make_node
HALF = np.float32([0.5])
FILES = {
    "sum": onnx_model("a:f b:f", "y:f", node("Add", ["a", "b"], ["y"])),
    "parts": onnx_model(
        "x:f",
        "low:f high:f",
        node("Mul", ["x", "half"], ["low"]),
        node("Neg", ["x"], ["high"]),
        half=HALF,
    ),
    "whole": onnx_model("x:f", "y:i", node("Cast", ["x"], ["y"], to=TensorProto.INT64)),
    "float": onnx_model("x:i", "y:f", node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)),
    "fixed": onnx_model("x:f", "y:f", node("Mul", ["x", "half"], ["y"]), size=SIZE, half=HALF),
    "text": onnx_model("x:s", "y:s", node("Identity", ["x"], ["y"])),
}
# By kind: inputs and outputs. "small" is compiled, and its answers are known.
TENSORS = {
    "sum": ({"a": "f", "b": "f"}, {"y": "f"}),
    "parts": ({"x": "f"}, {"low": "f", "high": "f"}),
    "whole": ({"x": "f"}, {"y": "i"}),
    "float": ({"x": "i"}, {"y": "f"}),
    "fixed": ({"x": "f"}, {"y": "f"}),
    "small": ({"x": "f"}, {"y": "f"}),
}
SESSIONS = {name: onnxruntime.InferenceSession(data) for name, data in FILES.items()}


def by_hand(model: str, inputs: Arrays) -> dict[str, Array]:
    """What a model answers, by ONNX Runtime."""
    if model == "small":
        return {"y": inputs["x"] + np.arange(SIZE, dtype=np.float32) + np.float32(1)}
    session = SESSIONS[model]
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(inputs)), strict=True))


def step_by_step(steps: list[ChainStep], given: Arrays) -> dict[str, Array]:
    """All tensors of a chain, by what they are called in it."""
    tensors = dict(given)
    for step in steps:
        outputs = by_hand(step.model, {name: tensors[text] for name, text in step.inputs.items()})
        tensors |= {f"{step.name}:{name}": array for name, array in outputs.items()}
    return tensors


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, small_model: Path) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("files")
    with serving(tmp_path_factory, cache_dir, config=BOTH) as running:
        with running.client() as client:
            add_all(client, folder)
            client.add(small_model, name="small")
        yield running


def add_all(client: Client, folder: Path) -> None:
    for name, data in FILES.items():
        path = folder / f"{name}.onnx"
        path.write_bytes(data)
        client.add(path, engine="cpu")


@pytest.fixture
def client(served: Service) -> Iterator[Client]:
    with served.client() as connected:
        yield connected
        for model in connected.models():
            if model["steps"]:
                connected.remove(model["name"])


def step(model: str, name: str = "", **inputs: str) -> ChainStep:
    return ChainStep(model=model, name=name, inputs=inputs)


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[ChainStep], dict[str, str], int]:
    """Steps in an order in which they can run, outputs, and how many elements tensors have."""
    size = draw(st.sampled_from([SIZE, LARGE]))
    models = sorted(name for name in TENSORS if size == SIZE or name not in ("small", "fixed"))
    sources = {"in": "f", "in2": "f", "ints": "i"}
    steps: list[ChainStep] = []
    for number in range(draw(st.integers(1, 5))):
        model = draw(st.sampled_from(models))
        takes, gives = TENSORS[model]
        choices = {name: [s for s, of in sources.items() if of == kind] for name, kind in takes.items()}
        inputs = {name: draw(st.sampled_from(choices[name])) for name in takes}
        steps.append(ChainStep(model=model, name=f"s{number}", inputs=inputs))
        sources |= {f"s{number}:{name}": kind for name, kind in gives.items()}
    read = {text.partition(":")[0] for each in steps for text in each.inputs.values()}
    unread = {f"{each.name}:{next(iter(TENSORS[each.model][1]))}" for each in steps if each.name not in read}
    more = draw(st.sets(st.sampled_from(sorted(sources.keys() - {"in", "in2", "ints"}))))
    return steps, {f"o{i}": text for i, text in enumerate(sorted(unread | more))}, size


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data(), made=dags())
def test_any_chain_answers_what_its_steps_do(
    client: Client, data: st.DataObject, made: tuple[list[ChainStep], dict[str, str], int]
) -> None:
    steps, outputs, size = made
    added = client.add_chain("any", data.draw(st.permutations(steps)), outputs, replace=True)
    numbers = np.random.default_rng(size)
    values: dict[str, Array] = {
        "in": numbers.normal(0, 9, size).astype(np.float32),
        "in2": numbers.normal(0, 9, size).astype(np.float32),
        "ints": numbers.integers(-99, 99, size),
    }
    given = {tensor.name: values[tensor.name] for tensor in added.inputs}
    wanted = data.draw(st.sets(st.sampled_from(sorted(outputs)), min_size=1))
    expected = step_by_step(steps, values)
    placed = data.draw(st.sampled_from(["nowhere", "outputs", "all"]))
    if placed == "nowhere":
        found = client.infer("any", given, outputs=sorted(wanted))
        same(found, {name: expected[outputs[name]] for name in wanted})
        return
    arrays = {name: expected[outputs[name]] for name in wanted} | (given if placed == "all" else {})
    with client.region(sum(array.nbytes + 64 for array in arrays.values())) as region:
        at = 0
        there: dict[str, Array] = {}
        for name, array in arrays.items():
            there[name] = region.array(str(array.dtype), array.shape, at)
            at += -(-array.nbytes // 64) * 64
            there[name][...] = array if name in given else 99
        inputs = {name: there.get(name, array) for name, array in given.items()}
        client.infer("any", inputs, outputs={name: there[name] for name in wanted})
        same({name: there[name] for name in wanted}, {name: expected[outputs[name]] for name in wanted})


def same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def diamond(client: Client, name: str = "diamond") -> None:
    """in -> parts; the compiled model and the CPU engine take one of its outputs each; sum."""
    client.add_chain(
        name,
        [
            step("parts", x="in"),
            step("small", x="parts:low"),
            step("fixed", x="parts:high"),
            step("sum", a="small:y", b="fixed:y"),
        ],
        {"y": "sum:y", "low": "parts:low"},
    )


def diamond_of(x: Array) -> Array:
    """Its y."""
    low, high = by_hand("parts", {"x": x}).values()
    a, b = by_hand("small", {"x": low})["y"], by_hand("fixed", {"x": high})["y"]
    return by_hand("sum", {"a": a, "b": b})["y"]


def test_it_is_a_model_to_apps(served: Service, client: Client) -> None:
    diamond(client)
    assert client.ready("diamond")
    assert client.metadata("diamond") == {
        "name": "diamond",
        "versions": ["1"],
        "platform": "ensemble",
        "inputs": [{"name": "in", "datatype": "FP32", "shape": [SIZE]}],
        "outputs": [
            {"name": "y", "datatype": "FP32", "shape": [SIZE]},
            {"name": "low", "datatype": "FP32", "shape": [SIZE]},
        ],
    }
    row = next(model for model in client.models() if model["name"] == "diamond")
    assert (row["state"], row["engine"]) == ("READY", "gpu+cpu")
    assert row["steps"] == ["parts", "small", "fixed", "sum"]
    shown = client.show("diamond")
    assert shown["steps"][3] == {"model": "sum", "name": "sum", "inputs": {"a": "small:y", "b": "fixed:y"}}
    assert shown["step_outputs"] == {"y": "sum:y", "low": "parts:low"}
    before = client.statistics("sum")[0]["inference_count"]
    answer = client.answer("diamond", {"in": X})
    np.testing.assert_array_equal(answer.outputs["y"], diamond_of(X))
    assert answer.engine == "gpu+cpu"
    counted = client.statistics("diamond")[0]
    assert (counted["name"], counted["inference_count"]) == ("diamond", 1)
    assert client.statistics("sum")[0]["inference_count"] == before + 1
    assert "diamond" in {each["name"] for each in client.statistics()}

    async def asked() -> Any:
        async with AsyncClient(served.socket) as connected:
            return await connected.infer("diamond", {"in": X}, outputs=["low"])

    np.testing.assert_array_equal(asyncio.run(asked())["low"], X * np.float32(0.5))


def test_text_goes_through(client: Client) -> None:
    client.add_chain("texts", [step("text", "one", x="in"), step("text", "two", x="one:y")], {"y": "two:y"})
    found = client.infer("texts", {"in": np.array(["a", "", "β"], object)})["y"]
    assert found.tolist() == ["a", "", "β"]


def test_tensors_larger_than_expected_go_through(client: Client) -> None:
    steps = [step("parts", x="in"), step("sum", a="parts:low", b="parts:high")]
    client.add_chain("large", steps, {"y": "sum:y", "high": "parts:high"})
    for size in (3_000_000, 10, 3_000_000):
        x = np.arange(size, dtype=np.float32)
        same(client.infer("large", {"in": x}), {"y": x * np.float32(0.5) - x, "high": -x})


def test_what_is_between_steps_does_not_pass_through_the_service(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = start_service(config=f"{BOTH}\n[limits]\nmax_message_bytes = 8192\n")
    many = 1 << 20
    copies = node("Tile", ["x", "times"], ["y"])
    with service.client() as client:
        for name, takes, gives, what, constants in (
            ("spread", 1, many, copies, {"times": np.int64([many])}),
            ("gather", many, 1, node("ReduceSum", ["x"], ["y"], keepdims=1), {}),
        ):
            model = onnx.load_from_string(onnx_model("x:f", "y:f", what, **constants))
            for tensor, size in ((model.graph.input[0], takes), (model.graph.output[0], gives)):
                tensor.type.tensor_type.shape.dim[0].dim_value = size
            onnx.save(model, tmp_path / f"{name}.onnx")
            client.add(tmp_path / f"{name}.onnx", engine="cpu")
        client.add_chain("both", [step("spread", x="in"), step("gather", x="spread:y")], {"y": "gather:y"})
        assert client.infer("both", {"in": np.float32([2])})["y"] == 2 * many
    two = {"datatype": "FP32", "shape": [1]}
    with Raw(service.socket) as raw:
        for name, given, told in (("both", "in", None), ("spread", "x", "RESOURCE_EXHAUSTED")):
            params = {
                "model_name": name,
                "inputs": [{"name": given, **two}],
                "raw_input_contents": [bytes(4)],
            }
            _, _, error, _ = raw.call("ModelInfer", params)
            assert (error and error["code"]) == told


@pytest.mark.parametrize(
    ("name", "steps", "outputs", "kind", "told"),
    [
        ("c", [step("none", x="in")], {"y": "none:y"}, ModelRefused, "there is no model 'none'"),
        ("c", [step("sum", a="in")], {"y": "sum:y"}, InvalidArgument, "input 'b' of model 'sum' comes from"),
        (
            "c",
            [step("whole", x="in"), step("sum", a="whole:y", b="in")],
            {"y": "sum:y"},
            InvalidArgument,
            "input 'a' of step 'sum' is FP32 [-1], and what comes from 'whole:y' is INT64 [-1]",
        ),
        ("c", [step("small", x="small:y")], {"y": "small:y"}, InvalidArgument, "a chain cannot be a circle"),
        ("sum", [step("small", x="in")], {"y": "small:y"}, AlreadyExists, "there is a model 'sum' already"),
        ("known", [step("small", x="in")], {"y": "small:y"}, AlreadyExists, "there is a chain 'known'"),
        ("c", [step("known", x="in")], {"y": "known:y"}, InvalidArgument, "'known' is a chain"),
        ("c/d", [step("small", x="in")], {"y": "small:y"}, InvalidArgument, "cannot name a model"),
        ("own-" + "0" * 40, [step("small", x="in")], {"y": "small:y"}, InvalidArgument, "an app has brought"),
    ],
)
def test_what_is_refused(
    client: Client,
    name: str,
    steps: list[ChainStep],
    outputs: dict[str, str],
    kind: type[HonedError],
    told: str,
) -> None:
    client.add_chain("known", [step("small", x="in")], {"y": "small:y"})
    before = client.models()
    with pytest.raises(kind) as refused:
        client.add_chain(name, steps, outputs)
    assert told in str(refused.value)
    assert client.models() == before


def test_what_a_chain_is_asked_wrongly(client: Client, small_model: Path) -> None:
    diamond(client)
    with pytest.raises(InvalidArgument, match=r"has shape .* and the model takes"):
        client.infer("diamond", {"in": X[1:]})
    with pytest.raises(InvalidArgument, match="no output 'z'"):
        client.infer("diamond", {"in": X}, outputs=["z"])
    with pytest.raises(InvalidArgument, match="no state is kept"):
        client.sequence("diamond").infer({"in": X})
    with pytest.raises(InvalidArgument, match="'diamond' is a chain of models, which has no ModelProfile"):
        client.profile("diamond")
    with pytest.raises(InvalidArgument, match="which has no ModelPin"):
        client.pin("diamond")
    with pytest.raises(AlreadyExists, match="'diamond' is a chain"):
        client.add(small_model, name="diamond")
    with pytest.raises(InvalidArgument, match="step 'parts' of chain 'diamond': input 'x' holds NaN"):
        client.infer("diamond", {"in": np.full(SIZE, np.nan, np.float32)}, finite=True)
    assert client.infer("diamond", {"in": np.full(SIZE, np.nan, np.float32)}).keys() == {"y", "low"}


def test_a_step_that_fails_is_named(client: Client) -> None:
    client.add_chain("sums", [step("parts", x="a"), step("sum", a="parts:low", b="b")], {"y": "sum:y"})
    with pytest.raises(HonedError, match="step 'sum' of chain 'sums': ") as failed:
        client.infer("sums", {"a": np.zeros(3, np.float32), "b": np.zeros(4, np.float32)})
    assert not isinstance(failed.value, Unavailable)
    np.testing.assert_array_equal(client.infer("sums", {"a": X, "b": X})["y"], X * np.float32(1.5))


def test_removing_a_model_that_a_chain_needs(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "extra.onnx"
    path.write_bytes(FILES["parts"])
    client.add(path, engine="cpu")
    client.add_chain("one", [step("extra", x="in")], {"y": "extra:low"})
    client.add_chain("two", [step("extra", x="in"), step("small", x="extra:low")], {"y": "small:y"})
    with pytest.raises(ModelRefused, match="model 'extra' is needed by chain 'one' and chain 'two'; "):
        client.remove("extra")
    np.testing.assert_array_equal(client.infer("one", {"in": X})["y"], X * np.float32(0.5))
    client.remove("one")
    with pytest.raises(NotFound):
        client.infer("one", {"in": X})
    client.remove("extra", chains=True)
    for name in ("two", "extra"):
        with pytest.raises(NotFound):
            client.metadata(name)


def test_a_model_that_is_replaced_by_another_of_its_name(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "extra.onnx"
    path.write_bytes(FILES["parts"])
    client.add(path, engine="cpu")
    client.add_chain("one", [step("extra", x="in"), step("sum", a="extra:low", b="in")], {"y": "sum:y"})
    path.write_bytes(FILES["whole"])
    client.add(path, engine="cpu", replace=True)
    row = next(model for model in client.models() if model["name"] == "one")
    assert row["state"] == "UNAVAILABLE"
    assert "do not fit each other any more: " in row["reason"]
    assert not client.ready("one")
    with pytest.raises(Unavailable, match=r"chain 'one' cannot be used: .* has no output 'low'"):
        client.infer("one", {"in": X})
    path.write_bytes(FILES["parts"])
    client.add(path, engine="cpu", replace=True)
    np.testing.assert_array_equal(client.infer("one", {"in": X})["y"], X * np.float32(1.5))
    client.remove("one")
    client.remove("extra")


class Asking(threading.Thread):
    """A request from a thread of its own."""

    def __init__(self, client: Client, **options: Any) -> None:
        super().__init__()
        self._client = client
        self._options = options
        self.outcome: object = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._client.infer("diamond", {"in": X}, **self._options)["y"]
        except HonedError as error:
            self.outcome = error

    def answered(self) -> object:
        self.join(DEADLINE)
        assert not self.is_alive()
        return self.outcome


def running(client: Client, engine: str) -> int:
    """Requests that an engine of this kind runs."""
    return sum(each["queue"]["running"] for each in client.status()["devices"] if each["engine"] == engine)


def worker(client: Client, engine: str) -> psutil.Process:
    [pid] = [each["worker"]["pid"] for each in client.status()["devices"] if each["engine"] == engine]
    return psutil.Process(pid)


def test_independent_steps_run_on_their_engines_at_once(served: Service, client: Client) -> None:
    diamond(client)
    steps = [step("small", x="in"), step("fixed", x="in"), step("sum", a="small:y", b="fixed:y")]
    client.add_chain("diamond", steps, {"y": "sum:y"}, replace=True)
    client.infer("diamond", {"in": X})
    held = [worker(client, "gpu"), worker(client, "cpu")]
    for process in held:
        process.suspend()
    with served.client() as other:
        asking = Asking(other)
        try:
            wait_for(
                lambda: (running(client, "gpu"), running(client, "cpu")) == (1, 1), "both to run", served
            )
        finally:
            for process in held:
                process.resume()
        expected = by_hand("small", {"x": X})["y"] + by_hand("fixed", {"x": X})["y"]
        np.testing.assert_array_equal(asking.answered(), expected)


@pytest.mark.parametrize("engine", ["gpu", "cpu"])
def test_a_worker_killed_in_the_middle(served: Service, client: Client, engine: str) -> None:
    diamond(client)
    client.infer("diamond", {"in": X})
    other_engine = {"gpu": "cpu", "cpu": "gpu"}[engine]
    held = worker(client, engine)
    with served.client() as other:
        held.suspend()
        asking = Asking(other)
        # With the CPU engine held its first step runs; with the device, the first step has been answered.
        wait_for(lambda: running(client, engine) == 1, "the step to run", served)
        wait_for(lambda: running(client, other_engine) == 0, "the other engine to be done", served)
        held.send_signal(signal.SIGKILL)
        np.testing.assert_array_equal(asking.answered(), diamond_of(X))
    figures = {each["name"]: each["retries"] for each in client.metrics()["models"]}
    assert figures["small" if engine == "gpu" else "parts"] >= 1
    served.wait_ready()


def test_a_deadline_holds_for_all_steps_and_spoils_nothing(served: Service, client: Client) -> None:
    diamond(client)
    client.infer("diamond", {"in": X})
    held = worker(client, "gpu")
    held.suspend()
    try:
        where = "step 'small' of chain 'diamond': "
        too_late(lambda timeout: client.infer("diamond", {"in": X}, timeout=timeout), where, 0.5)
        with served.client() as other:
            # The step that nobody waits for still runs, and may write to its memory.
            asking = Asking(other)
            wait_for(lambda: client.status()["queue"]["waiting"] >= 1, "the next to wait", served)
            held.resume()
            np.testing.assert_array_equal(asking.answered(), diamond_of(X))
    finally:
        held.resume()


def test_requests_that_are_given_up_leave_nothing(served: Service, client: Client) -> None:
    diamond(client)
    client.infer("diamond", {"in": X})
    held = worker(client, "gpu")

    async def give_up() -> None:
        async with AsyncClient(served.socket) as connected:
            asking = [asyncio.ensure_future(connected.infer("diamond", {"in": X})) for _ in range(AT_ONCE)]
            while running(client, "gpu") == 0:
                await asyncio.sleep(0.01)
            for each in asking[::2]:
                each.cancel()
            await asyncio.wait(asking[::2])
        await asyncio.gather(*asking, return_exceptions=True)  # those that ended with the connection

    before = descriptors(served.process.pid)
    for _ in range(10):
        held.suspend()
        try:
            asyncio.run(give_up())
        finally:
            held.resume()
        np.testing.assert_array_equal(client.infer("diamond", {"in": X})["y"], diamond_of(X))
    assert client.status()["queue"] == {"waiting": 0, "running": 0}
    # What was needed at once, for three steps of each, may be kept to be used again.
    assert descriptors(served.process.pid) <= before + 3 * AT_ONCE + 5


def test_requests_that_wait_when_a_model_is_removed(
    served: Service, client: Client, small_model: Path
) -> None:
    client.add(small_model, name="going")
    client.add_chain("diamond", [step("going", "only", x="in")], {"y": "only:y"})
    client.infer("diamond", {"in": X})
    held = worker(client, "gpu")
    held.suspend()
    told: list[str] = []

    def ask(connected: Client, model: str, name: str) -> None:
        with pytest.raises(NotFound) as refused:
            connected.infer(model, {name: X})
        told.append(str(refused.value))

    with served.client() as other:
        threads = [threading.Thread(target=ask, args=(other, *each)) for each in 2 * [("diamond", "in")]]
        threads += [threading.Thread(target=ask, args=(other, "going", "x")) for _ in range(2)]
        running_first = Asking(client)
        try:
            wait_for(lambda: running(other, "gpu") == 1, "one to run", served)
            for thread in threads:
                thread.start()
            wait_for(lambda: other.status()["queue"]["waiting"] == len(threads), "the rest to wait", served)
            other.remove("going", chains=True)
            for thread in threads:
                thread.join(DEADLINE)
        finally:
            held.resume()
        np.testing.assert_array_equal(running_first.answered(), by_hand("small", {"x": X})["y"])
    first = [text.partition(": ")[0] for text in sorted(told)]
    assert first.count("step 'only' of chain 'diamond'") == 2
    assert sum("step 'only'" in text for text in told) == 2
    assert all(text.count("step 'only'") < 2 for text in told)


def test_figures_of_a_chain(client: Client) -> None:
    diamond(client)
    client.infer("diamond", {"in": X})
    with pytest.raises(InvalidArgument):
        client.infer("diamond", {"in": X[1:]})
    [figures] = client.metrics()["chains"]
    assert (figures["name"], figures["ready"], figures["requests"]) == ("diamond", True, 2)
    assert (figures["served"], figures["failures"]) == (1, {"INVALID_ARGUMENT": 1})
    samples = {
        (sample.name, sample.labels.get("code", sample.labels.get("quantile", ""))): sample.value
        for family in text_string_to_metric_families(client.openmetrics())
        for sample in family.samples
        if sample.labels.get("chain") == "diamond"
    }
    assert samples["honed_chain_ready", ""] == 1
    assert samples["honed_chain_requests_total", ""] == 2
    assert samples["honed_chain_failures_total", "INVALID_ARGUMENT"] == 1
    assert samples["honed_chain_latency_seconds_count", ""] == 1
    assert samples["honed_chain_latency_seconds", "0.5"] > 0


def test_many_at_once(served: Service, client: Client) -> None:
    diamond(client)

    async def ask() -> list[Any]:
        async with AsyncClient(served.socket) as connected:
            each = [X + np.float32(i) for i in range(40)]
            answers = await asyncio.gather(*(connected.infer("diamond", {"in": x}) for x in each))
            return list(zip(each, answers, strict=True))

    for x, answer in asyncio.run(ask()):
        np.testing.assert_array_equal(answer["y"], diamond_of(x))


def test_the_tool(
    served: Service, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tool.toml"
    path.write_text(
        '[[step]]\nmodel = "parts"\ninputs = { x = "picture" }\n'
        '[[step]]\nname = "end"\nmodel = "small"\ninputs = { x = "parts:low" }\n'
        '[outputs]\nfound = "end:y"\n'
    )
    socket = f"--socket={served.socket}"
    assert main([socket, "chain", str(path)]) == 0
    assert "tool is served, a chain of 2 steps: parts, end" in capsys.readouterr().out
    assert main([socket, "chain", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "ALREADY_EXISTS"
    assert main([socket, "chain", str(path), "--replace", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"][0]["name"] == "picture"
    assert main([socket, "list"]) == 0
    assert "a chain of parts, small" in " ".join(capsys.readouterr().out.split())
    assert main([socket, "show", "tool"]) == 0
    shown = capsys.readouterr().out
    assert "parts:low" in shown
    assert "end:y" in shown
    assert main([socket, "infer", "tool", "--random"]) == 0
    assert main([socket, "bench", "tool", "--random", "-n", "3"]) == 0
    assert main([socket, "remove", "parts"]) == 1
    assert "needed by chain 'tool'" in capsys.readouterr().err
    assert main([socket, "remove", "tool"]) == 0
    path.write_text("[outputs]\n")
    assert main([socket, "chain", str(path)]) == 1
    assert "is not the file of a chain: " in capsys.readouterr().err


def test_it_is_there_after_a_restart(
    start_service: Callable[..., Service], small_model: Path, tmp_path: Path
) -> None:
    service = start_service(config=BOTH)
    with service.client() as client:
        add_all(client, tmp_path)
        client.add(small_model, name="small")
        diamond(client)
        diamond(client, "other")
        client.add_chain("gone", [step("small", x="in")], {"y": "small:y"})
        client.remove("gone")
    service.kill()
    for name in os.listdir(service.state / "chains"):
        assert name in ("diamond.json", "other.json")
    (service.state / "chains" / "other.json").write_text("nonsense\n")
    service.restart()
    service.wait_listening()
    service.wait_ready()
    with service.client() as client:
        assert [model["name"] for model in client.models() if model["steps"]] == ["diamond"]
        [told] = client.status()["damaged"]
        assert told.startswith("chain other: it does not match its checksum")
        wait_for(lambda: client.ready("diamond"), "the chain to be ready", service)
        np.testing.assert_array_equal(client.infer("diamond", {"in": X})["y"], diamond_of(X))
        with pytest.raises(ModelRefused, match="needed by chain 'diamond'"):
            client.remove("small")


def test_a_model_that_is_gone_after_a_restart(
    start_service: Callable[..., Service], small_model: Path, tmp_path: Path
) -> None:
    service = start_service(config=BOTH)
    with service.client() as client:
        add_all(client, tmp_path)
        client.add(small_model, name="small")
        diamond(client)
    service.kill()
    (service.state / "models" / "fixed.json").unlink()
    service.restart()
    service.wait_listening()
    service.wait_ready()
    with service.client() as client:
        row = next(model for model in client.models() if model["name"] == "diamond")
        assert row["state"] == "UNAVAILABLE"
        assert row["reason"].startswith("step 'fixed': there is no model 'fixed'")
        assert [each["name"] for each in client.show("diamond")["steps"]] == [
            "parts",
            "small",
            "fixed",
            "sum",
        ]
        with pytest.raises(Unavailable, match="chain 'diamond' cannot be used: step 'fixed': there is no"):
            client.infer("diamond", {"in": X})
        client.add(tmp_path / "fixed.onnx", engine="cpu")
        np.testing.assert_array_equal(client.infer("diamond", {"in": X})["y"], diamond_of(X))
