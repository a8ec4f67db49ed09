"""Limits of the service, and a service that is not there yet: apps of ONNX Runtime go on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from honed import ort, standin
from honed.ort import errors, session
from honed.protocol.errors import AnswerTooLarge, Busy, ResourceExhausted, Unavailable
from honed.protocol.results import BringResult
from honed.runtime import AsyncClient
from tests.daemon.running import NO_TUNER, Service, serving, wait_for

from .test_ort import X, model

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
MODELS = 3  # of a user
# An answer holds twice as much as a message; a large output of the tests is 512 KiB.
CONFIG = (
    '[serve]\nengine = "cpu"\n[cpu]\nin_app_ms = 0\n'
    f"[apps]\nmax_models = {MODELS}\n[limits]\nmax_message_bytes = 65536\n{NO_TUNER}"
)
COLUMNS = 1 << 17


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A service that takes few models, and answers little in line."""
    with serving(tmp_path_factory, cache_dir, config=CONFIG) as service:
        yield service


@pytest.fixture
def app(served: Service, monkeypatch: pytest.MonkeyPatch) -> Service:
    """This process is an app of that service's, whose user has brought nothing yet."""
    monkeypatch.setenv("HONED_SOCKET", str(served.socket))
    monkeypatch.setattr(session, "_clients", {})
    with served.client() as client:
        for each in client.models():
            client.remove(each["name"])
    return served


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """No service: `bring` raises what is in `raises`, then takes the model. The clock is that of waits."""
    told = SimpleNamespace(raises=[], slept=0.0, asked=0)

    def bring(given: object) -> BringResult:
        told.asked += 1
        if told.raises:
            raise told.raises.pop(0)
        return BringResult(model_name="m", sha256="", ready=True, engine="cpu", engine_why="")

    def sleep(seconds: float) -> None:
        told.slept += seconds

    monkeypatch.setattr(session, "_client", lambda: SimpleNamespace(bring=bring))
    monkeypatch.setattr(session, "_absent", {})
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: told.slept, sleep=sleep))
    return told


def right(one: Any, number: float) -> bool:
    """Whether a session of `model(number)` answers so."""
    return bool(np.array_equal(one.run(["y"], {"x": X})[0], X + np.float32(number)))


@pytest.mark.parametrize("count", [MODELS + 1, 3 * MODELS])
def test_more_sessions_than_the_quota_has_models_are_right(
    app: Service, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = [ort.InferenceSession(model(100 + number)) for number in range(count)]
    assert all(right(one, 100 + number) for number, one in enumerate(made))
    assert [one.honed_engine for one in made] == ["cpu"] * MODELS + ["onnxruntime"] * (count - MODELS)
    told = [each.message for each in caplog.records if each.name == "honed.ort"]
    assert len(told) == count - MODELS
    assert all("run by ONNX Runtime in the app" in each and "apps.max_models" in each for each in told)
    assert made[-1].get_providers() == ["CPUExecutionProvider"]


@pytest.mark.slow
def test_one_app_at_its_limit_takes_no_other_down(app: Service) -> None:
    earlier = ort.InferenceSession(model(50))
    assert right(earlier, 50)
    with app.client() as client:
        client.remove(earlier._name)  # as the longest unused of all go for another's
    others = [ort.InferenceSession(model(60 + number)) for number in range(MODELS)]
    assert {one.honed_engine for one in others} == {"cpu"}
    # It cannot be brought again: all others were used just now.
    assert right(earlier, 50)
    assert earlier.honed_engine == "onnxruntime"
    assert all(right(one, 60 + number) for number, one in enumerate(others))


def test_a_limit_is_told_where_nothing_stands_in(app: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [ort.InferenceSession(model(70 + number)) for number in range(MODELS)]
    options = ort.SessionOptions()
    options.add_session_config_entry("honed.fallback", "0")
    with pytest.raises(errors.RuntimeException, match=r"apps\.max_models"):
        ort.InferenceSession(model(79), options)
    monkeypatch.setattr(standin, "_kept", [None])  # not installed
    with pytest.raises(errors.RuntimeException, match=r"apps\.max_models .* where onnxruntime is installed"):
        ort.InferenceSession(model(79))
    assert all(right(one, 70 + number) for number, one in enumerate(kept))


def test_many_that_start_at_once_are_all_served(app: Service) -> None:
    data = model(80)
    with ThreadPoolExecutor(24) as threads:
        made = list(threads.map(lambda _: ort.InferenceSession(data), range(24)))
    assert all(right(one, 80) for one in made)
    assert {one.honed_engine for one in made} == {"cpu"}


def rows_of(columns: int | None, kind: int = T.FLOAT) -> bytes:
    """y = x tiled to so many columns, or to as many as are asked for: more than an answer holds in line."""
    shape = [1, columns if columns is not None else "columns"]
    known = [numpy_helper.from_array(np.int64([1, COLUMNS]), "times")] if columns is not None else []
    asked = [] if columns is not None else [helper.make_tensor_value_info("times", T.INT64, [2])]
    graph = helper.make_graph(
        [helper.make_node("Tile", ["x", "times"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, [1, 1]), *asked],
        [helper.make_tensor_value_info("y", kind, shape)],
        known,
    )
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


TIMES = {"times": np.int64([1, COLUMNS])}
SIZES = pytest.mark.parametrize("columns", [COLUMNS, None], ids=["known", "of the data"])


@SIZES
def test_outputs_that_no_answer_holds_go_through_shared_memory(app: Service, columns: int | None) -> None:
    one = ort.InferenceSession(rows_of(columns))
    feed = {"x": np.float32([[7]])} | (TIMES if columns is None else {})
    for _ in range(2):
        [found] = one.run(None, feed)
        assert found.shape == (1, COLUMNS)
        assert (found == 7).all()
    assert one.honed_engine == "cpu"
    # The second knew.
    assert session._client()._scratch.bytes_for(one._name, [4])[1] >= 4 * COLUMNS

    async def asked() -> Any:
        async with AsyncClient(app.socket) as client:
            return (await client.infer(one._name, feed))["y"]

    assert (asyncio.run(asked()) == 7).all()


def test_what_shared_memory_does_not_hold_is_run_in_the_app(
    app: Service, caplog: pytest.LogCaptureFixture
) -> None:
    one = ort.InferenceSession(rows_of(None, T.STRING))
    feed = {"x": np.array([["ab"]], object), **TIMES}
    with app.client() as client, pytest.raises(AnswerTooLarge, match="an answer may hold"):
        client.infer(one._name, feed)
    for _ in range(2):
        assert set(one.run(None, feed)[0].ravel()) == {"ab"}
    assert one.honed_engine == "onnxruntime"
    assert caplog.text.count("run by ONNX Runtime in the app") == 1


def test_a_service_that_starts_later_is_waited_for(app: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "honed.ort")
    app.kill()
    made: list[Any] = []
    starting = threading.Thread(target=lambda: made.append(ort.InferenceSession(model(90))))
    starting.start()
    wait_for(lambda: "waiting for honed" in caplog.text, "the app to wait")
    app.restart()
    starting.join()
    [one] = made
    assert one.honed_engine == "cpu"
    assert right(one, 90)


def test_waiting_is_bounded_and_once_in_a_process(away: SimpleNamespace) -> None:
    away.raises = [Unavailable("away")] * 1000
    with pytest.raises(errors.RuntimeException, match="away"):
        ort.InferenceSession(model())
    assert session._AGAIN_SECONDS <= away.slept < session._AGAIN_SECONDS + 1
    before = away.slept
    for _ in range(3):
        with pytest.raises(errors.RuntimeException, match="away"):
            ort.InferenceSession(model())
    assert away.slept == before, "the first has waited for all"
    away.raises = []
    ort.InferenceSession(model())
    away.raises = [Unavailable("away")] * 10
    ort.InferenceSession(model())
    assert away.slept > before, "it was there meanwhile"


def test_a_service_that_is_busy_is_asked_again(away: SimpleNamespace) -> None:
    away.raises = [Busy("others are first")] * 100
    assert ort.InferenceSession(model()).honed_engine == "cpu"
    assert away.asked == 101


@pytest.mark.parametrize("refusal", [Busy, ResourceExhausted])
def test_what_stays_busy_is_a_limit(away: SimpleNamespace, refusal: type[ResourceExhausted]) -> None:
    away.raises = [refusal("no more")] * 100_000
    one = ort.InferenceSession(model(1))
    assert one.honed_engine == "onnxruntime"
    assert right(one, 1)
    assert away.slept <= session._BUSY_SECONDS + 1
