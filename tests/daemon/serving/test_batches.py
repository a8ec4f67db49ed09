"""Requests that are run as one, and models that are warmed up: a real service, ONNX Runtime and PoCL."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from onnx import TensorProto, helper

from honed.protocol.errors import DeadlineExceeded, InvalidArgument
from honed.runtime import Client
from honed.runtime.calling.shared_memory import LARGE
from tests.daemon.changes.test_engines import dense, engine, expected, tensor, write
from tests.daemon.running import NO_TUNER, Service, serving, wait_for

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
FASTEST = '[serve]\nengine = "fastest"\n' + NO_TUNER
LONG = 240_000_000  # microseconds: what is not full waits longer than a test should take
# It is more than settings allow: requests of a busy machine may come seconds apart.
PATIENT = f"""
from honed.daemon.changes import settings

settings.MAX_DELAY_US = {LONG}
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=FASTEST, patch=PATIENT) as service:
        yield service


@pytest.fixture
def model(both: Service, tmp_path: Path) -> Iterator[Path]:
    """One of any number of rows, served by the CPU engine."""
    path = dense(tmp_path)
    with both.client() as client:
        client.add(path, engine="cpu")
        yield path
        client.remove("dense")


def figures(client: Client) -> dict[str, Any]:
    return next(each for each in client.metrics()["models"] if each["name"] == "dense")


def rows(number: int, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(number).normal(size=(count, 6)).astype(np.float32)}


def at_once(service: Service, asked: list[Callable[[Client], Any]]) -> list[Any]:
    """What each call gives, or raises, made by a client of its own, all at once."""
    gate = threading.Barrier(len(asked))

    def one(call: Callable[[Client], Any]) -> Any:
        with service.client() as client:
            client.models()
            gate.wait()
            try:
                return call(client)
            except Exception as error:  # noqa: BLE001 - the result
                return error

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(one, asked))


def infer(number: int, count: int = 1, **options: Any) -> Callable[[Client], Any]:
    return lambda client: client.infer("dense", rows(number, count), **options)["y"]


def right(path: Path, number: int, found: Any, count: int = 1) -> None:
    np.testing.assert_allclose(found, expected(path, rows(number, count))["y"], rtol=1e-3, atol=1e-4)


def test_requests_that_come_together_are_run_as_one(both: Service, model: Path) -> None:
    with both.client() as client:
        assert client.set("dense", max_batch=8, batch_delay_us=LONG)["max_batch"] == 8
        counts = [1, 1, 2, 1, 3]
        found = at_once(both, [infer(n, count) for n, count in enumerate(counts)])
        for number, (answer, count) in enumerate(zip(found, counts, strict=True)):
            right(model, number, answer, count)
        told = figures(client)
        assert (told["batches"], told["batched"], told["served"]) == (1, 5, 5)
        [statistics] = client.statistics("dense")
        assert (statistics["inference_count"], statistics["execution_count"]) == (5, 1)


def test_large_tensors_in_shared_memory_are_joined_too(both: Service, tmp_path: Path) -> None:
    wide = LARGE // 4
    nodes = [helper.make_node("Abs", ["x"], ["y"])]
    path = write(tmp_path / "wide.onnx", nodes, [tensor("x", ["n", wide])], [tensor("y", ["n", wide])])
    given = [np.random.default_rng(n).normal(size=(1, wide)).astype(np.float32) for n in range(4)]

    def one(x: np.ndarray) -> Callable[[Client], Any]:
        return lambda client: client.infer("wide", {"x": x})["y"]

    with both.client() as client:
        client.add(path, engine="cpu")
        client.set("wide", max_batch=4, batch_delay_us=LONG)
        for x, y in zip(given, at_once(both, [one(x) for x in given]), strict=True):
            np.testing.assert_array_equal(y, np.abs(x))
        client.remove("wide")


def test_a_wrong_request_costs_itself_alone(both: Service, model: Path) -> None:
    nan = {"x": np.full((1, 6), np.nan, np.float32)}
    with both.client() as client:
        client.set("dense", max_batch=3, batch_delay_us=LONG)
        asked = [infer(1, finite=True), infer(2, finite=True)]
        found = at_once(both, [*asked, lambda c: c.infer("dense", nan, finite=True)])
        right(model, 1, found[0])
        right(model, 2, found[1])
        assert isinstance(found[2], InvalidArgument)
        assert "NaN" in str(found[2])
        with pytest.raises(InvalidArgument, match="shape"):
            client.infer("dense", {"x": np.zeros((1, 5), np.float32)})


def test_shared_memory_that_is_let_go_of_meanwhile_stays_until_the_answer(both: Service, model: Path) -> None:
    with both.client() as client, both.client() as other:
        client.set("dense", max_batch=2, batch_delay_us=LONG)
        answers: list[Any] = []
        with client.region(24) as region:
            x = region.array("float32", (1, 6))
            x[...] = rows(1)["x"]
            asking = threading.Thread(target=lambda: answers.append(client.infer("dense", {"x": x})["y"]))
            asking.start()
            wait_for(lambda: figures(other)["requests"] == 1, "the request to wait", both)
        with other.region(24):  # which would get its descriptor
            right(model, 2, infer(2)(other))
        asking.join()
        right(model, 1, answers[0])


def test_a_deadline_does_not_wait_for_others(both: Service, model: Path) -> None:
    with both.client() as client:
        client.set("dense", max_batch=8, batch_delay_us=LONG)
        with contextlib.suppress(DeadlineExceeded):  # on a machine that is this busy
            right(model, 1, infer(1, timeout=0.5)(client))
        client.set("dense", batch_delay_us=0)
        right(model, 2, infer(2)(client))
        right(model, 3, infer(3, 20)(client), 20)


def test_a_killed_worker_is_no_matter(both: Service, model: Path) -> None:
    with both.client() as client:
        client.set("dense", max_batch=4, batch_delay_us=LONG)
        client.set("dense", max_batch=4)
        infer(0, 4)(client)
        cpu = next(each for each in client.status()["devices"] if each["engine"] == "cpu")
        stopped = psutil.Process(cpu["worker"]["pid"])
        stopped.suspend()
        calls = threading.Thread(target=lambda: found.extend(at_once(both, [infer(n) for n in range(4)])))
        found: list[Any] = []
        calls.start()
        wait_for(lambda: figures(client)["requests"] >= 5, "the requests to be there", both)
        os.kill(stopped.pid, signal.SIGKILL)
        calls.join()
        for number, answer in enumerate(found):
            right(model, number, answer)


@pytest.mark.slow
def test_a_compiled_form_of_as_many_rows_runs_them(both: Service, tmp_path: Path) -> None:
    path = dense(tmp_path)
    with both.client() as client:
        client.add(path, shapes={"x": (4, 6)}, engine="gpu")
        with pytest.raises(InvalidArgument, match="the CPU engine"):
            client.set("dense", max_batch=4)
        client.remove("dense")
        client.add(path, shapes={"x": (4, 6)})
        client.pin("dense", engine="gpu")
        wait_for(lambda: engine(client, "dense") == "gpu", "the device to have loaded it", both)
        client.set("dense", max_batch=4, batch_delay_us=LONG)
        for number, answer in enumerate(at_once(both, [infer(n) for n in range(4)])):
            right(path, number, answer)
        assert figures(client)["engines"].get("gpu") == 4
        nan = {"x": np.full((1, 6), np.nan, np.float32)}
        asked = [infer(n, finite=True) for n in range(3)]
        *found, wrong = at_once(both, [*asked, lambda c: c.infer("dense", nan, finite=True)])
        for number, answer in enumerate(found):
            right(path, number, answer)
        assert isinstance(wrong, InvalidArgument)
        assert "NaN" in str(wrong)
        client.remove("dense")


def test_models_whose_rows_depend_on_each_other_are_refused(both: Service, tmp_path: Path) -> None:
    across = [
        helper.make_node("ReduceMax", ["x"], ["m"], axes=[0]),
        helper.make_node("Sub", ["x", "m"], ["y"]),
    ]
    path = write(tmp_path / "across.onnx", across, [tensor("x", ["n", 3])], [tensor("y", ["n", 3])])
    fixed = [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)]
    other = write(tmp_path / "fixed.onnx", fixed, [tensor("x", ["n", 3])], [tensor("y", [])])
    found = [helper.make_node("NonZero", ["x"], ["z"]), helper.make_node("Transpose", ["z"], ["y"])]
    third = write(
        tmp_path / "found.onnx", found, [tensor("x", ["n", 3])], [tensor("y", ["k", 2], TensorProto.INT64)]
    )
    with both.client() as client:
        for file, why in (
            (path, "is another when a request is run beside others"),
            (other, "first dimension of output 'y' is not open"),
            (third, "cannot be run on several requests at once|another shape"),
        ):
            client.add(file, engine="cpu")
            with pytest.raises(InvalidArgument, match=why):
                client.set(file.stem, max_batch=4)
            client.remove(file.stem)


def test_settings_are_kept_and_warm_up(tmp_path: Path, cache_dir: Path, start_service: Any) -> None:
    path = dense(tmp_path)
    service = start_service(config=NO_TUNER)
    with service.client() as client:
        client.add(path, engine="cpu")
        client.set("dense", max_batch=4, warm_up=3, warm_up_shapes={"x": [2, 6]})
        for wrong in (
            {"max_batch": 1},
            {"warm_up": -1},
            {"warm_up_shapes": {"x": [2, 5]}},
            {"batch_delay_us": 10**9},
        ):
            with pytest.raises(InvalidArgument):
                client.set("dense", **wrong)
    service.stop()
    service = start_service(config=NO_TUNER)
    service.wait_ready()
    assert "model dense: warmed up by 3 runs" in service.log
    with service.client() as client:
        settings = client.show("dense")["settings"]
        assert settings == {
            "max_batch": 4,
            "batch_delay_us": 0,
            "warm_up": 3,
            "warm_up_shapes": {"x": [2, 6]},
        }
        client.add(path, engine="cpu", replace=True)
        assert client.show("dense")["settings"]["max_batch"] == 4
