"""The library against a real service."""

from __future__ import annotations

import ctypes
import select
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.runtime import Client
from tests.daemon.conftest import SIZE, service, small_model, start_service
from tests.daemon.running import DEADLINE, Service, start
from tests.decoders import decoder
from tests.ort.app import SIZE as OWN
from tests.ort.app import feed, model

from .binding import CODES, FP32, Library
from .calls import Floats, Request, floats, opened

__all__ = ["service", "small_model", "start_service"]  # fixtures
pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.arange(SIZE, dtype=np.float32) * 1.5
VAD = Path(__file__).parents[1] / "models" / "silero_vad.onnx"


def expected(x: Floats) -> Floats:
    """What the small model makes of it."""
    return x + np.arange(SIZE, dtype=np.float32) + 1


@pytest.fixture
def connected(library: Library, service: Service) -> Iterator[int]:
    with opened(library, service.socket) as made:
        yield made


@pytest.fixture
def request_(library: Library, connected: int) -> Iterator[Request]:
    with Request(library, connected, "small") as made:
        yield made


def test_a_model_is_described(library: Library, connected: int) -> None:
    model = ctypes.c_void_p()
    assert library.describe(connected, "small", ctypes.byref(model)) == CODES["OK"]
    assert library.model_name(model) == "small"
    for side, name in (("input", "x"), ("output", "y")):
        count, at = getattr(library, f"model_{side}_count"), getattr(library, f"model_{side}")
        assert count(model) == 1
        tensor = at(model, 0)
        assert at(model, 1) is None
        assert library.tensor_name(tensor) == name
        assert library.tensor_type(tensor) == FP32
        assert library.tensor_shape(tensor)[: library.tensor_rank(tensor)] == [SIZE]
        assert library.tensor_bytes(tensor) == 4 * SIZE
        assert library.tensor_data(tensor) is None
    library.model_free(model)


def test_a_file_of_the_programs_own_is_brought_with_its_external_data(
    library: Library, driver: Path, start_service: Callable[..., Service], tmp_path: Path
) -> None:
    """The model is described, and answers by its name; bringing it again gives the same name."""
    path, found = tmp_path / "own.onnx", ctypes.c_void_p()
    path.write_bytes(model(location="weights.bin", folder=tmp_path))
    running = start_service(config='[serve]\nengine = "cpu"\n')
    with opened(library, running.socket) as connected:
        names = []
        for _ in range(2):
            code = library.bring(connected, str(path), "auto", ctypes.byref(found))
            assert code == CODES["OK"], library.service_error(connected)
            names.append(library.model_name(found))
            assert library.model_input_count(found) == 2
            library.model_free(found)
        assert names[0] == names[1]
        with Request(library, connected, names[0]) as request:
            inputs = feed(rows=3)
            for name, value in inputs.items():
                request.input(name, value)
            assert request.infer() == CODES["OK"], request.error
            weights = np.fromfile(tmp_path / "weights.bin", np.float32).reshape(OWN, OWN)
            expected = np.maximum(inputs["x"] @ weights, 0) + inputs["bias"]
            np.testing.assert_allclose(request.outputs()["y"], expected, atol=1e-3)
        brought = subprocess.run([driver, "bring", running.socket, path], capture_output=True, text=True)
        assert brought.stdout == f"{names[0]} 2\n", brought.stderr
        (tmp_path / "none.onnx").write_bytes(b"no model")
        for wrong, told in (("none.onnx", "not an ONNX model"), ("missing.onnx", "cannot be read")):
            code = library.bring(connected, str(tmp_path / wrong), "auto", ctypes.byref(found))
            assert (code, found.value) == (CODES["FAILED_PRECONDITION"], None)
            assert told in library.service_error(connected)
        (tmp_path / "weights.bin").unlink()
        assert (
            library.bring(connected, str(path), "fp32", ctypes.byref(found)) == CODES["FAILED_PRECONDITION"]
        )
        assert "weights.bin" in library.service_error(connected)


def test_models_are_listed(library: Library, connected: int) -> None:
    models, ready = ctypes.c_void_p(), ctypes.c_int()
    assert library.list(connected, ctypes.byref(models)) == CODES["OK"]
    rows = [library.models_name, library.models_state, library.models_reason, library.models_engine]
    assert [[row(models, i) for row in rows] for i in range(library.models_count(models))] == [
        ["small", "READY", "", "gpu"]
    ]
    assert rows[0](models, 1) == ""
    library.models_free(models)
    assert library.ready(connected, "small", ctypes.byref(ready)) == CODES["OK"]
    assert ready.value == 1
    assert library.ready(connected, "nosuch", ctypes.byref(ready)) == CODES["NOT_FOUND"]
    assert library.service_error(connected).startswith("there is no model 'nosuch'")


def test_a_request_is_made_again_with_what_lies_in_its_inputs(library: Library, request_: Request) -> None:
    x = X.copy()
    request_.input("x", x)
    for number in range(3):
        x[...] = number
        assert request_.infer() == CODES["OK"], request_.error
        np.testing.assert_array_equal(request_.outputs()["y"], expected(x))
    assert library.request_engine(request_.c) == "gpu"
    assert library.request_compute_us(request_.c) > 0
    assert library.tensor_data(library.request_output(request_.c, 0)) % 64 == 0


def test_tensors_in_shared_memory_are_not_copied(library: Library, connected: int, request_: Request) -> None:
    buffer = ctypes.c_void_p()
    assert library.buffer_new(connected, 4096, ctypes.byref(buffer)) == CODES["OK"]
    place = library.buffer_data(buffer)
    x, y = floats(place, SIZE), floats(place + 64, SIZE)
    assert library.request_input_shared(request_.c, "x", FP32, [SIZE], 1, buffer, 0) == CODES["OK"]
    assert library.request_want_shared(request_.c, "y", buffer, 64, 4 * SIZE) == CODES["OK"]
    library.buffer_free(buffer)  # the request keeps it
    for number in range(3):
        x[...] = number
        assert request_.infer() == CODES["OK"], request_.error
        assert library.tensor_data(library.request_output(request_.c, 0)) == place + 64
        np.testing.assert_array_equal(y, expected(x))


def test_several_are_on_their_way_and_a_descriptor_says_when_one_has_ended(
    library: Library, connected: int
) -> None:
    requests = [Request(library, connected, "small") for _ in range(5)]
    inputs = [X + number for number in range(5)]
    for request, x in zip(requests, inputs, strict=True):
        request.input("x", x)
        assert library.submit(request.c) == CODES["OK"]
        assert library.submit(request.c) == CODES["INVALID_ARGUMENT"]  # it is on its way
    ended: list[Any] = []
    while len(ended) < 5:
        assert select.select([library.service_fd(connected)], [], [], DEADLINE)[0]
        while (request := library.collect(connected, 0)) is not None:
            ended.append(request)
    assert sorted(ended) == sorted(request.c for request in requests)
    assert library.collect(connected, 1000) is None  # none is on its way: it does not wait
    for request, x in zip(requests, inputs, strict=True):
        np.testing.assert_array_equal(request.outputs()["y"], expected(x))
        request.free()


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (lambda r: r.input("z", X), "INVALID_ARGUMENT", "z"),
        (lambda r: r.input("x", X[:4]), "INVALID_ARGUMENT", "x"),
        (lambda r: r.library.request_want(r.c, "nosuch"), "INVALID_ARGUMENT", "nosuch"),
        (lambda r: r.library.request_priority(r.c, 9), "INVALID_ARGUMENT", "priority"),
        (
            lambda r: (r.input("x", X * np.nan), r.library.request_finite(r.c, 1)),
            "INVALID_ARGUMENT",
            "finite",
        ),
        (lambda r: r.library.request_sequence(r.c, 5, 1), "INVALID_ARGUMENT", "state"),
    ],
)
def test_what_the_service_refuses_is_a_code_and_a_sentence(
    request_: Request, change: Callable[[Request], Any], code: str, told: str
) -> None:
    request_.input("x", X)
    change(request_)
    assert request_.infer() == CODES[code]
    assert told in request_.error
    assert request_.outputs() == {}
    request_.library.request_clear(request_.c)
    request_.library.request_priority(request_.c, 2)
    request_.library.request_finite(request_.c, 0)
    request_.input("x", X)
    assert request_.infer() == CODES["OK"]  # nothing of it stays
    assert request_.error == ""


def test_a_message_beyond_the_limit_is_refused_with_the_reason(request_: Request) -> None:
    """The service ends the connection long before it has all of it; what it said is heard all the same."""
    request_.input("x", np.zeros((80 << 20) // 4, np.float32))
    assert request_.infer() == CODES["RESOURCE_EXHAUSTED"]
    assert "shared memory" in request_.error
    request_.input("x", X)
    assert request_.infer() == CODES["OK"]


def test_a_service_that_is_started_again_goes_on_with_the_same_requests(
    library: Library, start_service: Callable[..., Service], small_model: Path, cache_dir: Path
) -> None:
    running = start_service()
    with running.client() as client:
        client.add(small_model, name="small")
    with opened(library, running.socket) as service, Request(library, service, "small") as request:
        buffer = ctypes.c_void_p()
        assert library.buffer_new(service, 4096, ctypes.byref(buffer)) == CODES["OK"]
        floats(library.buffer_data(buffer), SIZE)[...] = X
        assert library.request_input_shared(request.c, "x", FP32, [SIZE], 1, buffer, 0) == CODES["OK"]
        assert request.infer() == CODES["OK"]
        running.kill()
        assert request.infer() == CODES["UNAVAILABLE"]
        assert library.code_passes(CODES["UNAVAILABLE"])
        again = start(running.state, cache_dir, socket=running.socket, wait=False)
        try:
            assert library.infer_patiently(request.c, int(DEADLINE * 1000)) == CODES["OK"], request.error
            np.testing.assert_array_equal(request.outputs()["y"], expected(X))
        finally:
            again.stop()
        library.buffer_free(buffer)


def test_the_service_keeps_the_state_of_a_sequence(library: Library, service: Service) -> None:
    frames = np.random.default_rng(0).normal(scale=0.1, size=(3, 1, 512)).astype(np.float32)
    rate = np.array(16000, np.int64)
    with service.client() as client:
        client.add(VAD, name="vad", engine="cpu")
        try:
            told = _by_python(client, frames, rate)
            with opened(library, service.socket) as connected, Request(library, connected, "vad") as request:
                library.request_sequence(request.c, 7, CODES["SEQUENCE_END"])
                request.input("sr", rate)
                found = []
                for number, frame in enumerate(frames):
                    request.input("input", frame)
                    library.request_sequence(request.c, 7, CODES["SEQUENCE_START"] if number == 0 else 0)
                    assert request.infer() == CODES["OK"], request.error
                    found.append(request.outputs()["output"].item())
                library.request_sequence(request.c, 7, CODES["SEQUENCE_END"])
                assert request.infer() == CODES["OK"]
                assert request.infer() == CODES["SEQUENCE_LOST"]
        finally:
            client.remove("vad")
    np.testing.assert_allclose(found, told, atol=1e-6)


def test_a_decoder_answers_for_the_last_token(library: Library, service: Service, tmp_path: Path) -> None:
    with service.client() as client:
        client.add(decoder(tmp_path / "d.onnx"), name="decoder", engine="onnxruntime")
        try:
            ids = np.arange(5, dtype=np.int64)[None]
            with client.sequence("decoder") as sequence:
                told = sequence.infer({"input_ids": ids})["logits"]
            with (
                opened(library, service.socket) as connected,
                Request(library, connected, "decoder") as request,
            ):
                library.request_sequence(request.c, 7, CODES["SEQUENCE_START"] | CODES["SEQUENCE_LAST_TOKEN"])
                for part in (ids[:, :2], ids[:, 2:]):
                    request.input("input_ids", part)
                    assert request.infer() == CODES["OK"], request.error
                    found = request.outputs()["logits"]
                    np.testing.assert_allclose(found, told[:, part[0, -1]][:, None], atol=1e-5)
        finally:
            client.remove("decoder")


def _by_python(client: Client, frames: Any, rate: Any) -> list[float]:
    with client.sequence("vad") as sequence:
        return [sequence.infer({"input": frame, "sr": rate})["output"].item() for frame in frames]


def test_everything_is_clean_by_the_sanitizers(driver: Path, service: Service) -> None:
    assert every(driver, service, 3) == {"OK": 3 * 9, "CANCELLED": 3}


def every(driver: Path, service: Service, rounds: int, *prefix: str) -> dict[str, int]:
    """How often each code came of everything that the library can do."""
    command = [*prefix, str(driver), "every", str(service.socket), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=4 * DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    return {code: int(count) for code, count in map(str.split, done.stdout.splitlines())}


@pytest.mark.slow
def test_everything_is_clean_by_valgrind(plain_driver: Path, service: Service) -> None:
    memcheck = ["valgrind", "-q", "--error-exitcode=9", "--leak-check=full", "--show-leak-kinds=all"]
    memcheck += ["--errors-for-leak-kinds=all", "--track-fds=yes"]
    assert every(plain_driver, service, 10, *memcheck) == {"OK": 10 * 9, "CANCELLED": 10}


def under_load(driver: Path, service: Service, count: int) -> list[tuple[int, int]]:
    """Inferences so far and resident KiB, ten times, while a client of Python's asks, too."""
    command = [str(driver), "load", str(service.socket), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running, service.client() as client:
        while running.poll() is None:
            np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], expected(X))
        assert running.stdout is not None
        told = [(int(done), int(kib)) for done, kib in map(str.split, running.stdout)]
    assert running.returncode == 0
    return told


def test_many_inferences_are_right(plain_driver: Path, service: Service) -> None:
    assert [done for done, _ in under_load(plain_driver, service, 500)] == list(range(50, 501, 50))


@pytest.mark.slow
def test_a_hundred_thousand_inferences_leak_nothing(plain_driver: Path, service: Service) -> None:
    told = under_load(plain_driver, service, 100_000)
    print(f"inferences and resident KiB: {told}")
    assert told[-1][0] == 100_000
    assert told[-1][1] <= told[0][1] + 64, told  # a byte each would be 88 KiB
