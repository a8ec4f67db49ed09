"""`honed-http` before a real service, asked by Triton's client for HTTP: the protocol's own."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from tests.daemon.running import Service, serving, wait_for
from tests.decoders import decoder

from .conftest import CPU_ENGINE, MODELS, Bridge

pytestmark = [pytest.mark.service, pytest.mark.opencl]
TYPES = {
    "BOOL": (TensorProto.BOOL, np.array([[True, False, True]])),
    "UINT8": (TensorProto.UINT8, np.array([[0, 1, 255]], np.uint8)),
    "INT32": (TensorProto.INT32, np.array([[-(2**31), 0, 2**31 - 1]], np.int32)),
    "INT64": (TensorProto.INT64, np.array([[-(2**63), 0, 2**63 - 1]], np.int64)),
    "FP16": (TensorProto.FLOAT16, np.array([[0.5, -1, 65504]], np.float16)),
    "FP32": (TensorProto.FLOAT, np.array([[0.1, -1e30, 3]], np.float32)),
    "FP64": (TensorProto.DOUBLE, np.array([[0.1, -1e300, 3]], np.float64)),
    "BYTES": (TensorProto.STRING, np.array([[b"a", b"", "\n\u00fc".encode()]], object)),
}


def identity_model(path: Path) -> Path:
    """An output for each input, the same; one of each type, and each of any number of rows."""
    inputs = [helper.make_tensor_value_info(f"x_{name}", kind, [1, 3]) for name, (kind, _) in TYPES.items()]
    outputs = [helper.make_tensor_value_info(f"y_{name}", kind, [1, 3]) for name, (kind, _) in TYPES.items()]
    nodes = [helper.make_node("Identity", [f"x_{name}"], [f"y_{name}"]) for name in TYPES]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with serving(tmp_path_factory, cache_dir, config=CPU_ENGINE) as running:
        with running.client() as client:
            client.add(identity_model(tmp_path_factory.mktemp("models") / "same.onnx"))
            client.add(MODELS / "silero_vad.onnx", name="vad")
            client.add(decoder(tmp_path_factory.mktemp("models") / "dec.onnx"))
        yield running


@pytest.fixture(scope="module")
def address(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("http")
    bridge = Bridge("honed.http.main", "port = 0", service.socket, folder)
    yield listening_at(bridge)
    assert bridge.stop() == 0
    assert "Traceback" not in bridge.log, bridge.log


def listening_at(bridge: Bridge) -> str:
    """Address and port, once it listens."""
    wait_for(lambda: "listening" in bridge.log or bridge.process.poll() is not None, "the bridge to listen")
    found = re.search(r"listening at http://(\S+)", bridge.log)
    assert found is not None, bridge.log
    return found[1]


@pytest.fixture
def client(address: str) -> Iterator[Any]:
    with triton.InferenceServerClient(address, connection_timeout=60, network_timeout=60) as connected:
        yield connected


def inputs(*, binary: bool, leave_out: tuple[str, ...] = ()) -> list[Any]:
    made = []
    for name, (_, array) in TYPES.items():
        if name not in leave_out:
            tensor = triton.InferInput(f"x_{name}", list(array.shape), name)
            tensor.set_data_from_numpy(array, binary_data=binary or name == "FP16")
            made.append(tensor)
    return made


def test_health_and_metadata(client: Any, service: Service) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("same")
    assert not client.is_model_ready("nothing")
    told = client.get_server_metadata()
    assert (told["name"], "binary_tensor_data" in told["extensions"]) == ("honed", True)
    metadata = client.get_model_metadata("same")
    assert metadata["name"] == "same"
    assert metadata["inputs"] == [{"name": f"x_{n}", "datatype": n, "shape": [1, 3]} for n in TYPES]
    (version,) = metadata["versions"]
    assert client.get_model_metadata("same", version) == metadata
    assert client.is_model_ready("same", version)
    assert not client.is_model_ready("same", "99")


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_every_type_there_and_back(client: Any, binary: bool, binary_out: bool) -> None:
    wanted = [
        triton.InferRequestedOutput(f"y_{name}", binary_data=binary_out or name == "FP16") for name in TYPES
    ]
    result = client.infer("same", inputs(binary=binary), outputs=wanted, request_id="a request")
    told = result.get_response()
    assert (told["id"], told["model_name"]) == ("a request", "same")
    assert told["parameters"]["engine"] == "cpu"
    for name, (_, array) in TYPES.items():
        found = result.as_numpy(f"y_{name}")
        if name == "BYTES" and not binary_out:
            found = np.vectorize(str.encode, [object])(found)
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype


def test_outputs_that_are_not_named_are_all_sent(client: Any) -> None:
    result = client.infer("same", inputs(binary=True))
    assert [each["name"] for each in result.get_response()["outputs"]] == [f"y_{name}" for name in TYPES]
    np.testing.assert_array_equal(result.as_numpy("y_BOOL"), TYPES["BOOL"][1])


def test_many_at_once(address: str) -> None:
    """Each request has a connection: the client keeps one until its answer is read.

    With fewer it waits for ever where requests overtake each other: one that is read later has it.
    """
    numbers = [str(n) for n in range(32)]
    with triton.InferenceServerClient(
        address, concurrency=len(numbers), connection_timeout=60, network_timeout=60
    ) as client:
        waiting = [client.async_infer("same", inputs(binary=True), request_id=number) for number in numbers]
        assert [each.get_result().get_response()["id"] for each in waiting] == numbers


def test_priorities_timeouts_and_sequences(client: Any, service: Service) -> None:
    client.infer("same", inputs(binary=True), priority=1, timeout=30_000_000)
    with pytest.raises(InferenceServerException, match="priority must be a whole number from 0 to 3"):
        client.infer("same", inputs(binary=True), priority=4)
    with pytest.raises(InferenceServerException, match="last_token is for sequences of models that generate"):
        client.infer("same", inputs(binary=True), parameters={"last_token": True})
    for option, said in (
        ({"greedy_tokens": 2000}, "greedy_tokens must be a whole number from 0 to 1024"),
        ({"greedy_tokens": 2}, "greedy_tokens is for sequences of models that generate"),
        ({"stop_tokens": [2, "3"]}, "stop_tokens must be a list of at most 1024 whole numbers"),
    ):
        with pytest.raises(InferenceServerException, match=said):
            client.infer("same", inputs(binary=True), parameters=option)
    with service.client() as direct, direct.sequence("dec") as sequence:
        expected = sequence.generate({"input_ids": np.array([[3, 1, 4]])}, 6)
    ids = triton.InferInput("input_ids", [1, 3], "INT64").set_data_from_numpy(np.array([[3, 1, 4]]))
    options = {"greedy_tokens": 6, "stop_tokens": [int(expected[0, 4])]}
    result = client.infer("dec", [ids], sequence_id=9, sequence_start=True, parameters=options)
    stop = expected[0].tolist().index(expected[0, 4]) + 1
    assert result.as_numpy("tokens").tolist() == [expected[0, :stop].tolist()]
    frames = np.random.default_rng(0).uniform(-1, 1, (3, 1, 512)).astype(np.float32)
    with service.client() as direct, direct.sequence("vad") as sequence:
        wanted = [sequence.infer({"input": frame, "sr": np.array(16000)})["output"] for frame in frames]
    for number, (frame, want) in enumerate(zip(frames, wanted, strict=True)):
        tensors = [
            triton.InferInput("input", list(frame.shape), "FP32").set_data_from_numpy(frame),
            triton.InferInput("sr", [], "INT64").set_data_from_numpy(np.array(16000)),
        ]
        ends = {"sequence_start": number == 0, "sequence_end": number == 2}
        result = client.infer("vad", tensors, sequence_id=7, **ends)
        np.testing.assert_allclose(result.as_numpy("output"), want, rtol=1e-5)
    with pytest.raises(InferenceServerException) as raised:
        client.infer("vad", tensors, sequence_id=7)
    assert raised.value.status() == "404"


@pytest.mark.parametrize(
    ("model", "change", "status", "sentence"),
    [
        ("nothing", {}, "404", "nothing"),
        ("same", {"leave_out": ("FP32",)}, "400", "x_FP32"),
    ],
)
def test_errors_are_sentences(client: Any, model: str, change: Any, status: str, sentence: str) -> None:
    with pytest.raises(InferenceServerException, match=sentence) as raised:
        client.infer(model, inputs(binary=True, **change))
    assert raised.value.status() == status


def test_an_output_that_is_not_there(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="scores") as raised:
        client.infer("same", inputs(binary=True), outputs=[triton.InferRequestedOutput("scores")])
    assert raised.value.status() == "400"


def test_compressed_bodies_are_refused(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="encoded as 'gzip'") as raised:
        client.infer("same", inputs(binary=True), request_compression_algorithm="gzip")
    assert raised.value.status() == "415"


def test_the_report_is_shown_live(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/", timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert answer.headers["Refresh"]
        text = answer.read().decode()
    assert text.startswith("<!DOCTYPE html>")
    assert "vad" in text
    assert "same" in text


def test_a_service_that_is_down_is_503_and_then_back(client: Any, service: Service) -> None:
    assert client.is_model_ready("same")
    service.kill()
    assert not client.is_server_live()
    with pytest.raises(InferenceServerException) as raised:
        client.get_model_metadata("same")
    assert raised.value.status() == "503"
    service.restart()
    wait_for(lambda: client.is_model_ready("same"), "the service to be back", service)
