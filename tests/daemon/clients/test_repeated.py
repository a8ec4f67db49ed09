"""Whole requests on one connection are answered as if each were the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.runtime import Client
from honed.runtime.calling.shared_memory import Region
from honed.runtime.errors import NotFound
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw
from tests.daemon.running import Service
from tests.runtime.builder import add_constant

X = np.linspace(-3, 4, SIZE, dtype=np.float32)
NAN = np.full(SIZE, np.nan, np.float32)
INPUT = {"name": "x", "datatype": "FP32", "shape": [SIZE]}
GOOD = {"model_name": "small", "inputs": [INPUT], "raw_input_contents": [X.tobytes()]}
FINITE = {"parameters": {"finite": True}}
ANOTHER: dict[str, dict[str, Any]] = {
    "data": {"raw_input_contents": [(-X).tobytes()]},
    "less data": {"raw_input_contents": [X.tobytes()[4:]]},
    "more data": {"raw_input_contents": [X.tobytes() + bytes(4)]},
    "data twice": {"raw_input_contents": [X.tobytes()] * 2},
    "no data": {"raw_input_contents": []},
    "nothing as data": {"raw_input_contents": None},
    "text as data": {"raw_input_contents": ["a" * X.nbytes]},
    "numbers as data": {"raw_input_contents": [X.tolist()]},
    "a map of data": {"raw_input_contents": {"x": X.tobytes()}},
    "an id": {"id": "seven"},
    "an empty id": {"id": ""},
    "a number as id": {"id": 7},
    "nothing as id": {"id": None},
    "true for a size": {"inputs": [INPUT | {"shape": [True]}]},
    "a size with a fraction": {"inputs": [INPUT | {"shape": [float(SIZE)]}]},
    "another type": {"inputs": [INPUT | {"datatype": "INT32"}]},
    "another model": {"model_name": "absent"},
    "an unknown key": {"input": []},
    "a version": {"model_version": "1"},
    "another version": {"model_version": "2"},
    "no time": {"parameters": {"timeout": 0}},
    "NaN": {"raw_input_contents": [NAN.tobytes()]},
    "NaN where that is asked for": FINITE | {"raw_input_contents": [NAN.tobytes()]},
    "what is finite": FINITE,
    "the output": {"outputs": [{"name": "y"}]},
    "another output": {"outputs": [{"name": "z"}]},
}


def answered(raw: Raw, params: dict[str, Any], method: str = "ModelInfer") -> Any:
    """The answer without its times."""
    _, _, error, result = raw.call(method, params)
    if result is not None and "parameters" in result:
        for name in ("queue_us", "compute_us"):
            assert result["parameters"].pop(name) >= 0
    return error or result


@pytest.fixture(scope="module")
def raw(service: Service) -> Iterator[Raw]:
    """One connection for all."""
    with Raw(service.socket) as connected:
        yield connected


@pytest.mark.parametrize("changes", ANOTHER.values(), ids=ANOTHER)
def test_a_request_that_differs_is_answered_as_on_a_new_connection(
    service: Service, raw: Raw, changes: dict[str, Any]
) -> None:
    with Raw(service.socket) as fresh:
        expected = answered(fresh, GOOD | changes)
    usual = answered(raw, GOOD)
    assert (
        np.frombuffer(usual["raw_output_contents"][0], np.float32).tolist()
        == (X + np.arange(SIZE, dtype=np.float32) + 1).tolist()
    )
    for _ in range(2):
        assert answered(raw, GOOD | changes) == expected
        assert answered(raw, GOOD) == usual


def test_regions_count_as_they_are_when_a_request_comes(service: Service) -> None:
    place = {"shared_memory_region": "r", "shared_memory_offset": 0, "shared_memory_byte_size": X.nbytes}
    placed = {"model_name": "small", "inputs": [INPUT | {"parameters": place}]}
    with Raw(service.socket) as raw, Region("r", 4096) as region, Region("r", 4096) as another:

        def register(one: Region, byte_size: int) -> None:
            params = {"name": "r", "byte_size": byte_size}
            assert raw.call("SystemSharedMemoryRegister", params, [one.descriptor])[2] is None

        def first() -> float:
            return float(np.frombuffer(answered(raw, placed)["raw_output_contents"][0], np.float32)[0])

        register(region, 4096)
        x = region.array("float32", (SIZE,))
        for value in (1.0, 2.0, 3.0):
            x[:] = value
            assert first() == value + 1
        assert answered(raw, placed | {"raw_input_contents": {}})["code"] == "INVALID_ARGUMENT"
        assert raw.call("SystemSharedMemoryUnregister", {"name": "r"})[2] is None
        for _ in range(2):
            assert answered(raw, placed)["code"] == "NOT_FOUND"
        another.array("float32", (SIZE,))[:] = 7.0
        register(another, 4096)
        for _ in range(2):
            assert first() == 8.0
        assert raw.call("SystemSharedMemoryUnregister", {"name": "r"})[2] is None
        register(another, X.nbytes - 4)
        for _ in range(2):
            assert answered(raw, placed)["code"] == "INVALID_ARGUMENT"


def test_failures_are_counted_like_any(service: Service, raw: Raw, client: Client) -> None:
    answered(raw, GOOD)
    before = client.metrics()["models"][0]
    answered(raw, GOOD)
    answered(raw, GOOD | ANOTHER["less data"])
    after = client.metrics()["models"][0]
    assert after["requests"] == before["requests"] + 2
    assert sum(after["failures"].values()) == sum(before["failures"].values()) + 1


def test_a_model_that_was_replaced_or_removed_is_not_remembered(
    service: Service, small_model: Path, tmp_path: Path
) -> None:
    given = {"x": X}
    longer = add_constant(SIZE + 1).write(tmp_path / "longer.honed")
    with service.client() as app, service.client() as admin:
        admin.add(small_model, name="m")
        for _ in range(3):
            assert app.infer("m", given)["y"].shape == (SIZE,)
        admin.add(longer, name="m", replace=True)
        for _ in range(2):
            with pytest.raises(Exception, match=f"takes \\[{SIZE + 1}\\]"):
                app.infer("m", given)
        assert app.infer("m", {"x": np.append(X, X[:1])})["y"].shape == (SIZE + 1,)
        admin.remove("m")
        for _ in range(2):
            with pytest.raises(NotFound):
                app.infer("m", {"x": np.append(X, X[:1])})
        admin.add(small_model, name="m")
        for _ in range(2):
            assert app.infer("m", given)["y"].shape == (SIZE,)
        admin.remove("m")


def test_limits_that_change_count_for_the_next_request(
    start_service: Callable[..., Service], tmp_path: Path
) -> None:
    service, size = start_service(), 4000
    large = add_constant(size).write(tmp_path / "large.honed")
    asked = {
        "model_name": "m",
        "inputs": [INPUT | {"shape": [size]}],
        "raw_input_contents": [bytes(4 * size)],
    }
    with service.client() as client, Raw(service.socket) as raw:
        client.add(large, name="m")
        for _ in range(2):
            assert len(answered(raw, asked)["raw_output_contents"][0]) == 4 * size
        service.configure("[limits]\nmax_message_bytes = 4096\n")
        assert "an answer may hold 8192" in answered(raw, asked)["message"]
