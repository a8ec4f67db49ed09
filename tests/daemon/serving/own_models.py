"""Small ONNX models that apps bring, as bytes, and a service that knows several users."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from honed.runtime import Client
from tests.attack import users
from tests.daemon.running import NO_TUNER, Service, start

ANNA, BERT, CLEO = 61_001, 61_002, 61_003
X = np.arange(4, dtype=np.float32)


def adding(number: float, *, nbytes: int = 0) -> bytes:
    """y = x + number, of four elements, in a file of at least `nbytes` bytes."""
    node = helper.make_node("Add", ["x", "number"], ["y"])
    known = [numpy_helper.from_array(np.array([number], np.float32), "number")]
    if nbytes:
        known.append(numpy_helper.from_array(np.zeros(nbytes, np.uint8), "ballast"))
    graph = helper.make_graph([node], "g", [_tensor("x")], [_tensor("y")], initializer=known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def beside(folder: Path, number: float) -> Path:
    """The same with the number in a file of its own."""
    path = folder / "beside.onnx"
    onnx.save_model(
        onnx.load_from_string(adding(number)),
        path,
        save_as_external_data=True,
        location="number.bin",
        size_threshold=0,
    )
    return path


def _tensor(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [4])


@contextmanager
def for_users(folders: pytest.TempPathFactory, cache: Path, config: str = "") -> Iterator[Service]:
    """A service in whose group honed all of `users.acting` are."""
    folder = Path(tempfile.mkdtemp(prefix="honed-groups-"))
    prefix = users.with_groups(folder)
    if not prefix:
        pytest.skip("only root, who may mount, can be several users")
    settings = '[serve]\nengine = "fastest"\n' + NO_TUNER + config
    service = start(folders.mktemp("state"), cache, config=settings, prefix=prefix)
    service.socket.parent.chmod(0o711)
    service.socket.chmod(0o777)
    try:
        yield service
    finally:
        service.stop()


def client(service: Service, user: int) -> users.UserClient:
    """A client of a user, who may infer."""
    return users.UserClient(service.socket, user)


def answers(client: Client, name: str, number: float) -> bool:
    """Whether the model of that name adds the number."""
    found: Any = client.infer(name, {"x": X})["y"]
    return bool(np.array_equal(found, X + np.float32(number)))
