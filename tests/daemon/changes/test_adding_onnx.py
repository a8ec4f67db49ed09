"""ONNX files through the daemon and the real compiler."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from honed.daemon.changes import compilation
from honed.jobs.commands import Compile
from honed.runtime.errors import HonedError, ModelRefused, ResourceExhausted
from tests.daemon.running import DEADLINE, Service, has_ended, wait_for

onnx = pytest.importorskip("onnx")
pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def dense(
    path: Path, *, external: str = "", operator: str = "Relu", rows: int | str = 2, side: int = 0
) -> Path:
    """y = relu(x @ W), with W in the file or in one of its own beside it, or zeros of `side` x `side`."""
    from onnx import TensorProto, helper, numpy_helper

    weights = np.zeros((side, side), np.float32) if side else WEIGHTS
    depth, columns = weights.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node(operator, ["h"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows, depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [rows, columns])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    if external:
        onnx.save(model, path, save_as_external_data=True, location=external, size_threshold=0)
    else:
        onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def service(empty_service: Service) -> Service:
    return empty_service


def test_an_onnx_file_is_compiled_proven_and_served(service: Service, tmp_path: Path) -> None:
    progress: list[dict[str, Any]] = []
    with service.client() as client:
        added = client.add(
            dense(tmp_path / "d.onnx", rows="n"), shapes={"x": (2, 3)}, progress=progress.append
        )
        np.testing.assert_allclose(client.infer("d", {"x": X})["y"], np.maximum(X @ WEIGHTS, 0), rtol=1e-5)
        shown = client.show("d")
        client.remove("d")
    assert added["model_name"] == "d"
    stages = list(dict.fromkeys(p["stage"] for p in progress))
    assert stages == ["receive", "check", "normalise", "import", "lower", "prove", "write", "load"]
    fractions = [p["fraction"] for p in progress]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert shown["shapes"] == {"x": [2, 3]}
    assert shown["source"]["filename"] == "d.onnx"
    assert shown["proof"]["probes"] >= 1
    assert all(o["error"] <= o["tolerance"] for o in shown["checked"]["outputs"])


@pytest.mark.slow
def test_external_data_is_sent_along(service: Service, tmp_path: Path) -> None:
    path = dense(tmp_path / "e.onnx", external="weights.bin")
    with service.client() as client:
        client.add(path)
        np.testing.assert_allclose(client.infer("e", {"x": X})["y"], np.maximum(X @ WEIGHTS, 0), rtol=1e-5)
        client.remove("e")
        (tmp_path / "weights.bin").unlink()
        with pytest.raises(ModelRefused, match=r"weights\.bin|file"):
            client.add(path)


def test_what_cannot_be_compiled_is_refused_with_reasons(service: Service, tmp_path: Path) -> None:
    (tmp_path / "noise.onnx").write_bytes(os.urandom(1000))
    (tmp_path / "empty.onnx").touch()
    with service.client() as client:
        for name in ("noise", "empty"):
            with pytest.raises(HonedError) as refused:
                client.add(tmp_path / f"{name}.onnx")
            assert refused.value.code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT")
        assert client.models() == []
        assert client.status()["jobs"] == []
    assert os.listdir(service.state / "objects") == []
    assert os.listdir(service.state / "staging") == []


def compiling(service: Service) -> list[psutil.Process]:
    return service.children("honed.tuner")


def test_the_compiler_ends_with_its_client(service: Service, tmp_path: Path) -> None:
    leaving = service.client()

    def add() -> None:
        with pytest.raises(HonedError):
            leaving.add(dense(tmp_path / "gone.onnx"))

    adding = threading.Thread(target=add)
    adding.start()
    # A second look may find the command line empty: the process is about to exec the compiler.
    found = wait_for(lambda: compiling(service), "the compiler to start", service)
    leaving.close()
    adding.join(DEADLINE)
    wait_for(lambda: all(map(has_ended, found)), "the compiler to end", service)
    with service.client() as client:
        wait_for(lambda: not client.status()["jobs"], "the addition to end", service)
        assert client.models() == []


@pytest.mark.slow
def test_limits_of_the_compiler(start_service: Callable[..., Service], tmp_path: Path) -> None:
    service = start_service(config="[limits]\ncompile_seconds = 1.0\n")
    path = dense(tmp_path / "m.onnx")
    with service.client() as client:
        with pytest.raises(ResourceExhausted, match="longer than 1 s"):
            client.add(path)
        assert compiling(service) == []


@pytest.mark.slow
def test_the_compilers_memory_is_bounded(service: Service, tmp_path: Path) -> None:
    with service.client() as client:
        device = client.status()["device_spec"]
    large = dense(tmp_path / "large.onnx", side=8192)
    for memory_mib in (500, 800):
        job = Compile(
            file=large,
            output=tmp_path / "m.honed",
            device=device,
            memory_mib=memory_mib,
        )
        with pytest.raises(HonedError, match=f"{memory_mib} MiB"):
            asyncio.run(compilation.compile_model(job, 280.0, lambda _: None))
        assert not job.output.exists()


@pytest.mark.slow
def test_a_damaged_compiled_file_is_compiled_again(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    service = start_service()
    with service.client() as client:
        client.add(dense(tmp_path / "d.onnx"))
        sha256 = client.show("d")["sha256"]
    service.stop()
    stored = service.state / "objects" / sha256
    stored.write_bytes(stored.read_bytes()[:-1])
    service = start_service(service.state)
    with service.client() as client:
        wait_for(lambda: client.ready("d"), "the model to be compiled again", service)
        np.testing.assert_allclose(client.infer("d", {"x": X})["y"], np.maximum(X @ WEIGHTS, 0), rtol=1e-5)
        assert client.status()["damaged"]
