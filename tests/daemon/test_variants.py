"""Variants in a real service on PoCL: any shape is answered, and those asked for often run compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.runtime import Client

from .running import NO_TUNER, Service, wait_for

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
WIDTH = 8
IDLE = """
[serve]
engine = "fastest"
[variants]
requests = 4
per_model = 2
[idle]
quiet_seconds = 0.2
settle_seconds = 0
max_pressure_percent = 100
max_load_per_core = 1000
"""


def attention(path: Path) -> Path:
    """Cross attention of n queries to m keys: two open sizes that are independent of each other."""
    random = np.random.default_rng(3)
    weights = [
        numpy_helper.from_array(random.normal(size=(WIDTH, WIDTH)).astype(np.float32), name)
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
    graph = helper.make_graph(
        nodes,
        "attention",
        [
            helper.make_tensor_value_info("queries", TensorProto.FLOAT, [1, "n", WIDTH]),
            helper.make_tensor_value_info("keys", TensorProto.FLOAT, [1, "m", WIDTH]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "n", WIDTH])],
        initializer=weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return path


class Asking:
    """Asks for a model in shapes, and compares with ONNX Runtime."""

    def __init__(self, client: Client, path: Path) -> None:
        self._client = client
        self._session = onnxruntime.InferenceSession(str(path))
        self._random = np.random.default_rng(5)

    def __call__(self, n: int, m: int) -> None:
        given = {
            "queries": self._random.normal(size=(1, n, WIDTH)).astype(np.float32),
            "keys": self._random.normal(size=(1, m, WIDTH)).astype(np.float32),
        }
        [expected] = self._session.run(["y"], given)
        np.testing.assert_allclose(
            self._client.infer("attention", given)["y"], expected, rtol=1e-3, atol=1e-4
        )


def variants(client: Client) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in client.show("attention")["variants"]}


def answered(client: Client, engine: str) -> int:
    [figures] = client.metrics()["models"]
    return int(figures["engines"].get(engine, 0))


def test_shapes_asked_for_often_are_compiled_in_idle_time(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    path = attention(tmp_path / "attention.onnx")
    service = start_service(config=IDLE + NO_TUNER)
    random = np.random.default_rng(1)
    with service.client() as client:
        client.add(path, wait=False)
        ask = Asking(client, path)
        for _ in range(40):
            ask(*random.integers(5, 30, 2))
        assert answered(client, "cpu") == 40
        for _ in range(6):
            ask(11, 13)
            ask(12, 13)
        wait_for(lambda: len(variants(client)) == 2, "two variants", service, seconds=300)
        assert sorted(variants(client)) == ["attention@11x13", "attention@12x13"]
