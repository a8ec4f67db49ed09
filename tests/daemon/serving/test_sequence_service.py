"""Sequences in a real service: state is kept between requests, by both engines, whatever ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.runtime import AsyncClient, Client
from honed.runtime.calling.calls import SequenceOptions
from honed.runtime.errors import InvalidArgument, NotFound, ResourceExhausted, SequenceLost
from tests.daemon.running import NO_TUNER, Service, serving, wait_for
from tests.runtime.builder import Builder

VAD = Path(__file__).parents[2] / "models" / "silero_vad.onnx"
BOTH = '[serve]\nengine = "fastest"\n' + NO_TUNER
SIZE = 4
pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]


def tensor(name: str, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def sums(path: Path, *, grows: bool = False, **names: str) -> Path:
    """y is what x adds up to; with `grows` the state is every x so far, and y the latest."""
    state, after = names.get("state", "state"), names.get("after", "state_out")
    sizes = [[1, "seen" if grows else SIZE], [1, "seen_after" if grows else SIZE]]
    nodes = [
        helper.make_node("Concat", [state, "x"], [after], axis=1)
        if grows
        else helper.make_node("Add", [state, "x"], [after]),
        helper.make_node("Mul", ["x" if grows else after, "one"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [tensor("x", [1, SIZE]), tensor(state, sizes[0])],
        [tensor("y", [1, SIZE]), tensor(after, sizes[1])],
        initializer=[numpy_helper.from_array(np.ones((), np.float32), "one")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def compiled_sums(path: Path) -> Path:
    """`sums`, compiled."""
    builder = Builder()
    x, state = (builder.input(name, "float32", (1, SIZE)) for name in ("x", "state"))
    y, after = (builder.output(name, "float32", (1, SIZE)) for name in ("y", "state_out"))
    source = """__kernel void sum(__global const float* x, __global const float* state, __global float* y,
        __global float* after) { int i = get_global_id(0); y[i] = after[i] = state[i] + x[i]; }"""
    kernel = builder.kernel(source, "sum", "rrww", 4 * SIZE, groups=SIZE, block=1)
    builder.launch(kernel, x, state, y, after)
    return builder.write(path)


@pytest.fixture(scope="module")
def either(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """It has "sums" compiled."""
    with serving(tmp_path_factory, cache_dir, config=BOTH) as running:
        with running.client() as client:
            client.add(compiled_sums(tmp_path_factory.mktemp("m") / "sums.honed"))
        yield running


@pytest.fixture(scope="module")
def both(either: Service) -> Service:
    """The compiled form of "sums" serves, and the CPU engine runs beside it."""
    with either.client() as client:
        wait_for(lambda: engine(client, "sums") == "gpu", "the compiled form to serve", either)
    return either


def engine(client: Client, name: str) -> str:
    return next(model["engine"] for model in client.models() if model["name"] == name)


def kill_workers(service: Service) -> None:
    """Of both engines, as `kill -9` does; one killed twice while it starts would count as failing."""
    with service.client() as client:
        workers = [device["worker"] for device in client.status()["devices"]]
    ready = [worker["pid"] for worker in workers if worker["state"] == "ready" and worker["pid"]]
    assert ready
    for pid in ready:
        os.kill(pid, signal.SIGKILL)


def frame(number: int) -> np.ndarray[Any, Any]:
    return np.full((1, SIZE), number, np.float32)


@pytest.mark.slow
def test_a_thousand_requests_of_a_voice_detector_equal_those_with_state_in_the_app(both: Service) -> None:
    sound = np.random.default_rng(3).normal(scale=0.1, size=(1000, 1, 576)).astype(np.float32)
    rate = np.array(16000, np.int64)
    with both.client() as client:
        client.add(VAD, name="vad", engine="cpu")
    with both.client() as client, client.sequence("vad") as vad:
        state = np.zeros((2, 1, 128), np.float32)
        for number, part in enumerate(sound):
            if number in (300, 301, 700):
                kill_workers(both)
            in_app = client.infer("vad", {"input": part, "state": state, "sr": rate})
            kept = vad.infer({"input": part, "sr": rate})
            assert set(kept) == {"output"}
            np.testing.assert_array_equal(kept["output"], in_app["output"])
            state = in_app["stateN"]
        assert np.abs(state).max() > 0.1, "it is state that says something"


def test_the_compiled_form_keeps_state_and_a_killed_worker_loses_none(both: Service) -> None:
    with both.client() as client, client.sequence("sums") as sequence:
        for number in range(1, 41):
            if number % 13 == 0:
                kill_workers(both)
            found = sequence.infer({"x": frame(1)})
            np.testing.assert_array_equal(found["y"], frame(number))
        with client.sequence("sums") as other:
            begun = other.infer({"x": frame(1), "state": frame(100)}, outputs=["state_out", "y"])
            np.testing.assert_array_equal(begun["state_out"], frame(101))
            np.testing.assert_array_equal(other.infer({"x": frame(1)})["y"], frame(102))


def test_requests_of_a_sequence_run_in_order_and_one_that_fails_changes_nothing(either: Service) -> None:
    async def many() -> list[Any]:
        async with AsyncClient(either.socket) as client, client.sequence("sums") as sequence:
            work = [sequence.infer({"x": frame(2**n % 17)}) for n in range(50)]
            return await asyncio.gather(*work)

    expected = np.cumsum([2**n % 17 for n in range(50)])
    found = asyncio.run(many())
    assert [answer["y"][0, 0] for answer in found] == list(expected)
    with either.client() as client:
        sequence = client.sequence("sums")
        sequence.infer({"x": frame(1)})
        with pytest.raises(InvalidArgument):
            sequence.infer({"x": frame(1)[:, :2]})
        with pytest.raises(InvalidArgument, match="holds NaN"):
            sequence.infer({"x": frame(1) * np.nan}, finite=True)
        np.testing.assert_array_equal(sequence.infer({"x": frame(1)})["y"], frame(2))
        sequence.close()
        np.testing.assert_array_equal(sequence.infer({"x": frame(5)})["y"], frame(5))


def test_what_is_not_known_is_refused_and_never_begins_at_zero(either: Service, tmp_path: Path) -> None:
    service = either
    service.configure(BOTH + "[sequences]\nmax_per_model = 2\n")
    path = sums(tmp_path / "own.onnx")
    with service.client() as client:
        client.add(path, engine="cpu")
        sequence = client.sequence("own")
        sequence.infer({"x": frame(1)})
        service.kill()
        service.restart()
        service.wait_listening()
        service.wait_ready()
        for _ in range(2):
            with pytest.raises(SequenceLost, match="the service was started anew since; begin it with"):
                sequence.infer({"x": frame(1)})
        sequence.restart()
        np.testing.assert_array_equal(sequence.infer({"x": frame(1)})["y"], frame(1))
        with client.sequence("own") as second:
            second.infer({"x": frame(1)})
            with pytest.raises(ResourceExhausted, match="2 sequences of model 'own' are under way"):
                client.sequence("own").infer({"x": frame(1)})
        assert client.status()["sequences"]["count"] == 1
        service.configure(BOTH + "[sequences]\nidle_seconds = 0.1\n")
        none = {"count": 0, "bytes": 0}
        wait_for(lambda: client.status()["sequences"] == none, "sequences to be forgotten", service)
        with pytest.raises(SequenceLost, match=r"had no request for 0.1 s"):
            sequence.infer({"x": frame(1)})
        service.configure(BOTH)
        sequence.restart()
        sequence.infer({"x": frame(1)})
        client.add(sums(tmp_path / "own.onnx", grows=True), engine="cpu", replace=True)
        with pytest.raises(SequenceLost, match="its model was replaced"):
            sequence.infer({"x": frame(1)})
        sequence.restart()
        with pytest.raises(InvalidArgument, match=r"give 'state' with the first request"):
            sequence.infer({"x": frame(1)})
        sequence.infer({"x": frame(1), "state": np.zeros((1, 0), np.float32)})
        last = sequence.infer({"x": frame(2)}, outputs=["state_out"])
        assert last["state_out"].tolist() == [[1] * SIZE + [2] * SIZE]
        client.remove("own")
        with pytest.raises(NotFound):
            sequence.infer({"x": frame(1)})


def test_state_is_named_by_who_adds_the_model_or_by_its_file(either: Service, tmp_path: Path) -> None:
    path = sums(tmp_path / "odd.onnx", state="a", after="b")
    with either.client() as client:
        client.add(path, engine="cpu")
        with pytest.raises(InvalidArgument, match="add it again with --state OUT=IN"):
            client.sequence("odd").infer({"x": frame(1)})
        with pytest.raises(InvalidArgument, match="no output 'c'"):
            client.add(path, engine="cpu", replace=True, state={"c": "a"})
        client.add(path, engine="cpu", replace=True, state={"b": "a"})
        with client.sequence("odd") as sequence:
            sequence.infer({"x": frame(1)})
            np.testing.assert_array_equal(sequence.infer({"x": frame(1)})["y"], frame(2))
        assert client.show("odd")["sequence_state"] == {"b": "a"}
        model = onnx.load(path)
        helper.set_model_props(model, {"honed.state": "b=a"})
        onnx.save(model, path)
        client.add(path, engine="cpu", replace=True)
        assert client.show("odd")["sequence_state"] == {"b": "a"}
        client.remove("odd")
        with pytest.raises(InvalidArgument, match="need a sequence_id"):
            client.infer("sums", {"x": frame(1)}, sequence=SequenceOptions("", start=True))
