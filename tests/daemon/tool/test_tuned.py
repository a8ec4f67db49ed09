"""`hone tune` with the real tuner on a small model: faster, as right as before, and recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource
from tests.daemon.running import Service, serving

from .test_tuning import until

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
ROWS, INNER, OUTER = 64, 128, 256
X = np.linspace(-1, 1, ROWS * INNER, dtype=np.float32).reshape(ROWS, INNER)


def weights() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((INNER, OUTER)).astype(np.float32)


def write_model(path: Path) -> Path:
    """y = softmax(x w), the number of rows of x left open."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Softmax", ["a"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, ["N", INNER])],
        [helper.make_tensor_value_info("y", 1, ["N", OUTER])],
        [onnx.numpy_helper.from_array(weights(), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A daemon that serves the model as "mlp", with the shape of x given when it was added."""
    path = write_model(tmp_path_factory.mktemp("model") / "mlp.onnx")
    with serving(tmp_path_factory, cache_dir) as running:
        with running.client() as client:
            client.add(path, shapes={"x": (ROWS, INNER)})
        yield running


def hone(service: Service, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "honed.tool.main", *arguments],
        env=os.environ | {"HONED_SOCKET": str(service.socket), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def document(service: Service, *arguments: str) -> dict[str, Any]:
    with hone(service, *arguments, "--json") as process:
        out, err = process.communicate(timeout=560)
    assert process.returncode == 0, err
    loaded: dict[str, Any] = json.loads(out)
    return loaded


def check_answers(service: Service) -> None:
    exponent = np.exp(X @ weights() - (X @ weights()).max(-1, keepdims=True))
    with service.client() as client:
        y = client.infer("mlp", {"x": X})["y"]
    np.testing.assert_allclose(y, exponent / exponent.sum(-1, keepdims=True), atol=1e-5)


@pytest.mark.slow
def test_tunes_and_remembers(served: Service, tmp_path: Path) -> None:
    with served.client() as client:
        before = client.show("mlp")
    told = document(served, "tune", "mlp", "--trials", "8")
    assert told["trials"] <= 8
    assert {row["state"] for row in told["tasks"]} <= {"tuned", "skipped", "lost"}
    assert all(row["reason"] for row in told["tasks"] if row["state"] != "tuned")
    with served.client() as client:
        after = client.show("mlp")
    assert after["sha256"] == told["sha256"]
    assert told["published"] == (after["sha256"] != before["sha256"])
    assert after["source"]["sha256"] == before["source"]["sha256"]
    if told["published"]:
        assert told["after_us"] < told["before_us"]
    check_answers(served)

    history = document(served, "history", "mlp")
    assert history["points"][-1]["trials"] == told["trials"]
    assert history["points"][0]["us"] >= history["points"][-1]["us"] > 0
    assert len(history["served"]["versions"]) == 1 + told["published"]
    file = tmp_path / "records.jsonl"
    assert document(served, "records", "export", "-o", str(file))["count"] <= told["trials"]
    again = document(served, "records", "import", str(file))
    assert (again["count"], again["refused"]) == (0, [])
    assert document(served, "faults")["records"] == told["records"]
    rows = document(served, "tasks", "mlp")["tasks"]
    assert {row["task"] for row in rows} == {row["task"] for row in told["tasks"]}


@pytest.mark.slow
def test_ctrl_c_uses_what_was_found(served: Service) -> None:
    """After the first batch at the latest: the answers are right whichever version is served then."""
    with hone(served, "tune", "mlp", "--json") as process:
        assert process.stderr is not None
        until(process.stderr, "tasks: ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=560)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert told["stopped"]
    assert told["sentence"]
    check_answers(served)


@pytest.mark.slow
def test_a_model_added_later_has_the_schedules_that_are_recorded(served: Service, tmp_path: Path) -> None:
    """The same tasks under another name: compiled with what was found for the first."""
    rows = document(served, "tasks", "mlp")["tasks"]  # times default schedules anew: from here on they stand
    with served.client() as client, client.export("mlp") as given:
        source = given.save_sources(tmp_path)
        client.add(source, name="again", shapes={"x": (ROWS, INNER)})
        schedules = [kernel["schedule"] for kernel in client.show("again")["kernels"]]
        client.remove("again")
    assert any(
        ScheduleProvenance.parse(schedule).source is ScheduleSource.MEASURED for schedule in schedules
    ) == any(row["best_us"] < row["default_us"] for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_an_admin_who_is_not_the_services_user(served: Service, tmp_path: Path) -> None:
    """Everything on the records is done by the service, whose folder it is."""
    owner = served.state.stat()
    os.chown(served.state, 4711, 4711)
    try:
        told = document(served, "tune", "mlp", "--trials", "4")
        check_answers(served)
        assert document(served, "history", "mlp")["notes"] == []
        file = tmp_path / "records.jsonl"
        exported = document(served, "records", "export", "-o", str(file))["count"]
        assert len(file.read_bytes().splitlines()) == exported > 0
        assert document(served, "records", "import", str(file))["merged"] == exported
        faults = document(served, "faults")
        assert (faults["records"], faults["quarantined"]) == (told["records"], [])
        assert set(faults["kernel_log"]) == {"readable", "reason", "faults"}
        assert {row["task"] for row in document(served, "tasks", "mlp")["tasks"]} >= {
            row["task"] for row in told["tasks"]
        }
        (tmp_path / "none.jsonl").write_text("{}\n")
        with hone(served, "records", "import", str(tmp_path / "none.jsonl")) as process:
            _, err = process.communicate(timeout=560)
        assert process.returncode == 1
        assert "none of the 1 records" in err
    finally:
        os.chown(served.state, owner.st_uid, owner.st_gid)
