"""`honed-frigate` between a real service and a detector that behaves as Frigate's."""

from __future__ import annotations

import json
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import zmq

from honed.frigate.main import main
from tests.daemon.running import Service, wait_for

from . import frigate_reference
from .conftest import CPU_ENGINE, YOLOX, Bridge, Main
from .detector import Detector

pytestmark = [pytest.mark.service, pytest.mark.opencl]
PATIENT_MS = 120_000  # for a machine that others keep busy
PATIENT = "retry_seconds = 100\nready_seconds = 100\n"
Starter = Callable[[str, Path], Bridge]


@pytest.fixture
def endpoint() -> Iterator[str]:
    folder = Path(tempfile.mkdtemp(prefix="honed-"))  # a short path: sockets allow 107 bytes
    yield f"ipc://{folder}/detector"
    shutil.rmtree(folder)


@pytest.fixture
def start(endpoint: str, start_bridge: Callable[[str, str, Path], Bridge]) -> Starter:
    """Starts the bridge at the endpoint."""

    def starter(config: str, service_socket: Path) -> Bridge:
        whole = f'endpoint = "{endpoint}"\n{PATIENT}{config}'
        return start_bridge("honed.frigate.main", whole, service_socket)

    return starter


@pytest.fixture(scope="module")
def picture() -> Any:
    return frigate_reference.photograph(416, 416)


@pytest.fixture(scope="module")
def wanted(picture: Any) -> Any:
    session = onnxruntime.InferenceSession(YOLOX, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {"images": picture})
    made = frigate_reference.yolox(output, 416, 416)
    assert made[0, 1] > 0.5, "there is a person in the picture"
    return made


def test_detections_are_those_of_onnx_runtime(
    yolox_service: Service, start: Starter, endpoint: str, picture: Any, wanted: Any
) -> None:
    start("", yolox_service.socket)
    detector = Detector(endpoint, YOLOX, "yolox", timeout_ms=PATIENT_MS)
    assert detector.ready
    for _ in range(3):
        np.testing.assert_allclose(detector.detect(picture), wanted, rtol=1e-5, atol=1e-6)
    detector.close()


def test_a_model_that_is_not_there_is_sent_and_added(
    start_service: Callable[..., Service], start: Starter, endpoint: str, picture: Any, wanted: Any
) -> None:
    service = start_service(config=CPU_ENGINE)
    start("", service.socket)
    detector = Detector(endpoint, YOLOX, "yolox", timeout_ms=PATIENT_MS)
    assert detector.ready
    np.testing.assert_allclose(detector.detect(picture), wanted, rtol=1e-5, atol=1e-6)
    with service.client() as client:
        assert [model["name"][:4] for model in client.models()] == ["own-"]
    detector.close()


def test_a_model_is_not_taken_where_that_is_off(
    yolox_service: Service, start: Starter, endpoint: str
) -> None:
    bridge = start("take_models = false", yolox_service.socket)
    other = YOLOX.with_name("mobilenet_v2_035_128.onnx")
    detector = Detector(endpoint, other, "yolox", timeout_ms=PATIENT_MS)
    assert not detector.ready
    assert "was not taken" in bridge.log
    detector.close()


def test_the_configured_model_serves_whatever_file_is_named(
    yolox_service: Service, start: Starter, endpoint: str, picture: Any, wanted: Any, tmp_path: Path
) -> None:
    start('model = "yolox_nano"', yolox_service.socket)
    detector = Detector(endpoint, tmp_path / "not-there.onnx", "yolox", timeout_ms=PATIENT_MS)
    assert detector.ready
    np.testing.assert_allclose(detector.detect(picture), wanted, rtol=1e-5, atol=1e-6)
    detector.close()


def test_what_is_wrong_is_told_in_the_log_and_answered_with_nothing(
    yolox_service: Service, start: Starter, endpoint: str, picture: Any
) -> None:
    bridge = start("", yolox_service.socket)
    for model_type, given, sentence in (
        ("yolonas", picture, r"a yolonas model gives one output \[n, 7\]"),
        ("rfdetr", picture, "model_type 'rfdetr' is not supported"),
        ("yolox", picture.astype(np.uint8), "UINT8"),
        ("yolox", picture[0], "a picture of "),
    ):
        detector = Detector(endpoint, YOLOX, model_type, timeout_ms=PATIENT_MS)
        assert not detector.detect(given).any()
        assert detector.lost == 0, "an answer came"
        assert re.search(sentence, bridge.log), bridge.log
        detector.close()


@pytest.mark.parametrize("killed", ["bridge", "service"])
def test_killed_and_started_anew(
    start_service: Callable[..., Service],
    start: Starter,
    endpoint: str,
    picture: Any,
    wanted: Any,
    killed: str,
) -> None:
    """The detector goes on; only what was under way with the bridge may be lost, which nobody could help."""
    service = start_service(config=CPU_ENGINE)
    with service.client() as client:
        client.add(YOLOX)
    bridge = start("", service.socket)
    detector = Detector(endpoint, YOLOX, "yolox", timeout_ms=PATIENT_MS)
    for _ in range(3):
        victim = bridge if killed == "bridge" else service
        victim.kill()
        if killed == "bridge":
            bridge.start()
        else:
            service.restart()
        # What goes to a bridge that is gone is lost; the detector then waits until the next one answers.
        detector.detect(picture, timeout_ms=500 if killed == "bridge" else None)
        for _ in range(5):
            np.testing.assert_allclose(detector.detect(picture), wanted, rtol=1e-5, atol=1e-6)
    assert detector.lost <= (3 if killed == "bridge" else 0)
    detector.close()


def test_it_survives_hostile_frames(
    yolox_service: Service, start: Starter, endpoint: str, picture: Any, wanted: Any
) -> None:
    bridge = start("max_message_mib = 4", yolox_service.socket)
    context = zmq.Context()
    header = {"shape": [1, 3, 416, 416], "dtype": "float32", "model_type": "yolox"}
    for frames in (
        [b""],
        [b"not JSON", b""],
        [b"[" * 4000, b""],
        [b"9" * 4000, b""],
        [json.dumps(header).encode()],
        [json.dumps(header).encode(), b"short"],
        [json.dumps({**header, "shape": [-1, 1 << 62]}).encode(), b""],
        [json.dumps({**header, "shape": [1 << 30] * 8}).encode(), b""],
        [json.dumps({**header, "shape": 3}).encode(), b"123"],
        [json.dumps({**header, "dtype": "object"}).encode(), picture.tobytes()],
        [json.dumps({**header, "model_type": None}).encode(), picture.tobytes()],
        [json.dumps({"model_request": True}).encode()],
        [json.dumps({"model_request": True, "model_name": "../\0/x" * 100}).encode()],
        [json.dumps({"model_data": True, "model_name": "x.onnx"}).encode(), b"no ONNX"],
        [b"x"] * 100,
    ):
        with context.socket(zmq.REQ) as req:
            req.setsockopt(zmq.LINGER, 0)
            req.connect(endpoint)
            req.send_multipart(frames)
            assert req.poll(60_000), (frames, bridge.log)
    with context.socket(zmq.DEALER) as dealer:  # no REQ
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart([b"no delimiter", b"x"])
        dealer.send_multipart([b"", b"x" * (5 << 20)])  # ends the connection
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(endpoint.removeprefix("ipc://"))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    detector = Detector(endpoint, YOLOX, "yolox", timeout_ms=PATIENT_MS)
    np.testing.assert_allclose(detector.detect(picture), wanted, rtol=1e-5, atol=1e-6)
    assert bridge.process.poll() is None
    assert "Traceback" not in bridge.log
    detector.close()
    context.term()


def test_only_its_group_may_connect_and_it_stops_when_told(
    yolox_service: Service, start: Starter, endpoint: str
) -> None:
    bridge = start("", yolox_service.socket)
    wait_for(lambda: "listening" in bridge.log, "the bridge to listen")
    assert Path(endpoint.removeprefix("ipc://")).stat().st_mode & 0o777 == 0o660
    assert bridge.stop() == 0
    assert "Traceback" not in bridge.log


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ('endpoint = "tcp://0.0.0.0:5555"', "which other machines reach"),
        ('endpoint = "tcp://*:5555"', "give an IP address and a port"),
        ('endpoint = "udp://127.0.0.1:5555"', "give ipc:// with a path"),
        ('endpoint = "ipc://relative"', "give an absolute path"),
        ("max_requests = 0", "max_requests is 0; give a number from 1"),
        ("retry_seconds = nan", "retry_seconds is nan"),
        ("polite = true", "the settings are endpoint"),
        ("model = 3", "model"),
        ("= 3", "is not TOML"),
    ],
)
def test_wrong_settings_are_one_sentence(
    refused: Callable[[Main, str], str], config: str, sentence: str
) -> None:
    said = refused(main, config)
    assert sentence in said
    assert said.count("\n") == 1


def test_the_program_ends_with_wrong_settings(
    start_bridge: Callable[[str, str, Path], Bridge], tmp_path: Path
) -> None:
    bridge = start_bridge("honed.frigate.main", "= 3", tmp_path / "none")
    assert bridge.process.wait(60) == 1
    assert "is not TOML" in bridge.log
    assert bridge.log.count("\n") == 1
