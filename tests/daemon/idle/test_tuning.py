"""The whole service, left alone: it tunes what was added, and serves what it found. Real tuner, real PoCL."""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from honed.machine.devices import Device
from honed.runtime import Client
from tests.daemon.running import IDLE, Service, has_ended, wait_for
from tests.daemon.tool.test_tuned import INNER, ROWS, X, write_model

pytest.importorskip("honed.tuner")

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
ROOT = Path(__file__).parents[3]
SIZE = 256
TUNED = IDLE + "[tuner]\nspawn = true\n"


def tuner_of(service: Service) -> psutil.Process | None:
    return next(iter(service.children("honed.tuner.service")), None)


def wait_for_tuner_aside(service: Service) -> psutil.Process:
    """The tuner, when it has told the kernel to run it only where nobody else wants the processor."""
    found: list[psutil.Process] = []

    def aside() -> bool:
        tuner = tuner_of(service)
        if tuner is None or os.sched_getscheduler(tuner.pid) != os.SCHED_IDLE:
            return False
        found.append(tuner)
        return True

    wait_for(aside, "the tuner", service)
    return found[-1]


def write_product(path: Path) -> Path:
    onnx = pytest.importorskip("onnx")
    text = "g (float[SIZE, SIZE] x, float[SIZE, SIZE] w) => (float[SIZE, SIZE] y) { y = MatMul(x, w) }"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> {text.replace("SIZE", str(SIZE))}'
    )
    onnx.save(model, path)
    return path


def trials(client: Client) -> int:
    tuning = client.metrics()["tuning"]
    return sum(tuning["trials"].values()) if tuning else 0


@pytest.mark.slow
def test_a_model_gets_faster_with_no_command_given(
    start_service: Callable[..., Service], device: Device, tmp_path: Path
) -> None:
    model, state = write_product(tmp_path / "m.onnx"), tmp_path / "state"
    state.mkdir()
    record = runpy.run_path(str(ROOT / "debian/tests/slow_start.py"))["record"]
    (slow,) = record(state / "records.sqlite", model, device.profile)
    service = start_service(state, config=TUNED)
    random = np.random.default_rng(0)
    given = {name: random.standard_normal((SIZE, SIZE)).astype(np.float32) for name in ("x", "w")}
    # Other tests keep the processors busy, and it would wait until they end.
    os.sched_setscheduler(wait_for_tuner_aside(service).pid, os.SCHED_OTHER, os.sched_param(0))
    with service.client() as client:
        client.add(model, name="m")
        assert [kernel["schedule"] for kernel in client.show("m")["kernels"]] == [f"measured:{slow[:12]}"]

        def check_answers() -> None:
            answer = client.infer("m", given)["y"]
            np.testing.assert_allclose(answer, given["x"] @ given["w"], atol=1e-3)

        check_answers()
        wait_for(lambda: trials(client) > 1, "a trial beside the recorded one", service, seconds=300)
        assert client.status()["lease"]["granted"] > 0
        check_answers()
        wait_for(
            lambda: client.status()["lease"]["revoked"] > 0, "the lease to be revoked", service, seconds=300
        )
        wait_for(lambda: client.history("m")["version"] > 1, "a tuned version", service, seconds=500)
        history = client.history("m")
        assert history["versions"][1]["why"].startswith("idle tuning")
        assert history["versions"][1]["new_us"] < history["versions"][1]["old_us"]
        check_answers()
        assert client.status()["tuner"]["pid"] > 0


@pytest.mark.slow
def test_where_the_time_of_a_used_model_goes_is_asked_before_it_is_tuned(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = start_service(config=TUNED.replace("[idle]", "[idle]\nenabled = false"))
    with service.client() as client:
        client.add(write_model(tmp_path / "mlp.onnx"), name="mlp", shapes={"x": (ROWS, INNER)})
        client.infer("mlp", {"x": X})
        spent = client.metrics()["models"][0]["spent"]
        assert (spent["tasks"], spent["profiled"]) == ({}, "")
        service.configure(TUNED)
        wait_for(lambda: client.metrics()["models"][0]["spent"]["profiled"], "a profile", service)
        model = client.metrics()["models"][0]
        assert model["spent"]["profiled"] == client.show("mlp")["sha256"]
        assert model["requests"] == 1, "a profile is no request"
        assert 0 < sum(model["spent"]["tasks"].values()) <= model["spent"]["seconds"] * 1.001
        tasks = {kernel["task"] for kernel in client.show("mlp")["kernels"]}
        assert set(model["spent"]["tasks"]) <= tasks


def test_a_tuner_that_dies_is_started_anew_and_ends_with_the_service(
    start_service: Callable[..., Service],
) -> None:
    service = start_service(config=TUNED)
    # A second look may find the command line empty: the process is about to exec the tuner.
    first = wait_for(lambda: tuner_of(service), "the tuner", service)
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)

    def another() -> psutil.Process | None:
        found = tuner_of(service)
        return found if found is not None and found.pid != first.pid else None

    second = wait_for(another, "another tuner", service)
    assert second is not None
    service.kill()
    wait_for(lambda: has_ended(second), "its end", service)
