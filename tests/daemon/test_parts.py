"""Models that run in parts in a real service: the dense part on the device, the rest in the CPU engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from honed.runtime import Client

from .running import NO_TUNER, Service, serving
from .split_models import detector, images, reference

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
COMPILED = '[serve]\nengine = "gpu"\n' + NO_TUNER


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=COMPILED) as running:
        yield running


@pytest.fixture(scope="module")
def added(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = detector(tmp_path_factory.mktemp("models"))
    with service.client() as client:
        return path, client.add(path)


def check(client: Client, name: str, path: Path, image: Any) -> int:
    """Compare with ONNX Runtime; gives how many objects there are."""
    found, expected = client.infer(name, {"image": image}), reference(path, {"image": image})
    for output, value in expected.items():
        assert found[output].dtype == value.dtype
        np.testing.assert_allclose(found[output], value, rtol=1e-3, atol=1e-4, err_msg=output)
    return len(expected["found"])


def processes(service: Service) -> list[psutil.Process]:
    """Those that run parts of models."""
    children = psutil.Process(service.process.pid).children(recursive=True)
    return [child for child in children if "honed.cpu.parts" in child.cmdline()]


def test_a_detector_is_served_in_parts_with_answers_of_any_length(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    path, told = added
    assert told["engine"] == "gpu+cpu"
    assert told["kernels"] > 0
    with service.client() as client:
        counts = {check(client, "detector", path, image) for image in images(8)}
        assert len(counts) > 2
        assert client.metadata("detector")["outputs"][0] == {
            "name": "found",
            "datatype": "FP32",
            "shape": [-1, 4],
        }


def test_it_is_told_which_parts_run_where_and_why(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    with service.client() as client:
        client.infer("detector", {"image": images(1)[0]})
        [listed] = [model for model in client.models() if model["name"] == "detector"]
        assert listed["engine"] == "gpu+cpu"
        compiled, last = client.show("detector")["parts"]
        assert (compiled["engine"], last["engine"], last["last"]) == ("gpu", "cpu", True)
        assert compiled["flops"] > 100 * last["flops"]
        assert "NonMaxSuppression" in last["why"][0]
        [figures] = [model for model in client.metrics()["models"] if model["name"] == "detector"]
        assert set(figures["engines"]) == {"gpu+cpu"}
        assert any(row["name"] == "(cpu_part)" for row in client.profile("detector", 2)["rows"])


def test_a_lost_process_of_parts_costs_no_answer(
    service: Service, added: tuple[Path, dict[str, Any]]
) -> None:
    path, _ = added
    with service.client() as client:
        check(client, "detector", path, images(3)[2])
        [before] = processes(service)
        os.kill(before.pid, signal.SIGKILL)
        check(client, "detector", path, images(3)[2])
        [after] = processes(service)
        assert after.pid != before.pid
        assert client.status()["devices"][0]["worker"]["restarts"] >= 1
