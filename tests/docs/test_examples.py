"""The examples for app developers, compiled and run against a real service."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import honed.runtime
from tests.daemon.conftest import SIZE, service, small_model, start_service
from tests.daemon.own_models import adding
from tests.daemon.running import DEADLINE, Service, start

__all__ = ["service", "small_model", "start_service"]  # fixtures

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
X = np.arange(SIZE, dtype=np.float32) * 1.5
Y = X + np.arange(SIZE, dtype=np.float32) + 1  # what the small model makes of it
pytestmark = [pytest.mark.service, pytest.mark.opencl]
VAD = Path(__file__).parents[1] / "models" / "silero_vad.onnx"
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """infer.c, compiled with all warnings as errors, and with checks of memory and undefined behaviour."""
    made = tmp_path_factory.mktemp("c") / "infer"
    flags = ["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, "-o", str(made), str(EXAMPLES / "infer.c")], check=True)
    return made


def run(
    command: list[str], path: Path | str, *, cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"HONED_SOCKET": str(path)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, timeout=DEADLINE, check=False
    )


def python(name: str, *arguments: str, path: Path | str) -> list[str]:
    done = run([sys.executable, str(EXAMPLES / name), *arguments], path)
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout.decode().splitlines()


def first(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> str:
    return str(values[:4])


@needs_gcc
def test_c_infers(program: Path, service: Service, tmp_path: Path) -> None:
    (tmp_path / "x.raw").write_bytes(X.tobytes())
    done = run([str(program), "small", "x=x.raw"], service.socket, cwd=tmp_path)
    assert (done.returncode, done.stderr.decode()) == (0, "input x: FP32 [8]\noutput y: FP32 [8]\n")
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32), Y)


@needs_gcc
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nosuch"], "NOT_FOUND: there is no model 'nosuch'"),
        (["small"], "the model needs x, 32 bytes; give x=FILE"),
        (["small", "z=x.raw"], "z: give INPUT=FILE with an input of the model"),
        (["small", "x"], "x: give INPUT=FILE with an input of the model"),
        (["small", "x=missing.raw"], "missing.raw cannot be opened"),
        (["small", "x=short.raw"], "short.raw does not hold the 32 bytes that x takes"),
    ],
)
def test_c_says_what_is_wrong(
    program: Path, service: Service, tmp_path: Path, arguments: list[str], told: str
) -> None:
    (tmp_path / "x.raw").write_bytes(X.tobytes())
    (tmp_path / "short.raw").write_bytes(X.tobytes()[1:])
    done = run([str(program), *arguments], service.socket, cwd=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr.decode()
    assert done.stdout == b""


@needs_gcc
def test_c_without_a_service_or_arguments(program: Path, tmp_path: Path) -> None:
    done = run([str(program), "small"], tmp_path / "none")
    assert done.returncode == 1
    assert done.stderr.startswith(b"infer: no service answers at ")
    assert run([str(program)], tmp_path / "none").returncode == 2


def answers() -> list[bytes]:
    """Answers to ModelMetadata, right and wrong in many ways."""
    inputs = b"\x91\x83\xa4name\xa1x\xa8datatype\xa4FP32\xa5shape\x91\x08"
    right = b"\x94\x01\x01\xc0\x81\xa6inputs" + inputs
    broken = [right[:size] for size in range(len(right))]
    for at in range(len(right)):
        broken += [right[:at] + byte + right[at + 1 :] for byte in (b"\x9f", b"\xc6")]
    deep = b"\x94\x01\x01\xc0\x81\xa1x" + b"\x91" * 5000
    huge = right[:-2] + b"\x92\xcf" + b"\xff" * 8 + b"\x08"
    many = b"\x94\x01\x01\xc0\x81\xa6inputs\xdd\xff\xff\xff\xff"
    return [*broken, deep, huge, many, right]


@pytest.mark.slow
@needs_gcc
def test_c_survives_whatever_is_answered(program: Path, tmp_path: Path) -> None:
    """It ends with a sentence and status 1; a fault of memory would be another status and a report."""
    path = tmp_path / "s"
    wanted = answers()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            for answer in wanted:
                connected, _ = listening.accept()
                with connected:
                    connected.recv(4096)
                    connected.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        for answer in wanted:
            done = run([str(program), "m"], path)
            assert done.returncode == 1, (answer, done.stderr)
            assert done.stderr.splitlines()[-1].startswith(b"infer: "), (answer, done.stderr)
        thread.join(DEADLINE)


def test_python_brings_a_model(start_service: Callable[..., Service], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(adding(1))
    running = start_service(config='[serve]\nengine = "fastest"\n')
    assert python("bring.py", str(path), path=running.socket) == ["y (4,)"]


def test_python_infers(service: Service, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    printed = python("infer.py", "small", f"x={tmp_path / 'x.npy'}", path=service.socket)
    assert printed == [f"y float32 (8,) {first(Y)}"]


def test_python_says_what_is_wrong(service: Service, tmp_path: Path) -> None:
    done = run([sys.executable, str(EXAMPLES / "infer.py"), "nosuch"], service.socket)
    assert done.returncode == 1
    assert done.stderr.startswith(b"NOT_FOUND: there is no model 'nosuch'")
    done = run([sys.executable, str(EXAMPLES / "infer.py"), "small"], tmp_path / "none")
    assert done.returncode == 1
    assert done.stderr.startswith(b"try again later: no service answers")


def expected(count: int) -> list[str]:
    return [f"{n} y {first(np.float32(n) + np.arange(SIZE, dtype=np.float32) + 1)}" for n in range(count)]


def test_python_sends_several_at_once(service: Service) -> None:
    assert python("several.py", "small", "5", path=service.socket) == expected(5)


def test_python_uses_shared_memory(service: Service) -> None:
    assert python("region.py", "small", path=service.socket) == expected(3)


def test_python_has_the_service_keep_state(service: Service) -> None:
    with service.client() as client:
        client.add(VAD, name="vad", engine="cpu")
        found = python("voice.py", "vad", "1", path=service.socket)
        client.remove("vad")
    session = onnxruntime.InferenceSession(VAD)
    state, told = np.zeros((2, 1, 128), np.float32), []
    sound = np.random.default_rng(0).normal(scale=0.1, size=16_000).astype(np.float32)
    for frame in sound[: 31 * 512].reshape(-1, 1, 512):
        output, state = session.run(None, {"input": frame, "state": state, "sr": np.array(16000, np.int64)})
        told.append(output.item())
    np.testing.assert_allclose([float(line) for line in found], told, atol=2e-4)


@pytest.mark.slow
def test_python_lasts_while_the_service_is_killed_and_started_again(
    start_service: Callable[..., Service], small_model: Path, cache_dir: Path
) -> None:
    running = start_service()
    with running.client() as client:
        client.add(small_model, name="small")
    environment = os.environ | {"HONED_SOCKET": str(running.socket)}
    command = [sys.executable, str(EXAMPLES / "patient.py"), "small", "2000"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as patient:
        assert patient.stdout is not None
        printed = [patient.stdout.readline().rstrip()]
        running.kill()
        again = start(running.state, cache_dir, socket=running.socket, wait=False)
        try:
            printed += patient.stdout.read().splitlines()
            assert patient.wait(DEADLINE) == 0
        finally:
            again.stop()
    assert printed == expected(2000)


def test_a_compiled_file_runs_without_the_service(small_model: Path) -> None:
    outputs = honed.runtime.load(small_model).run({"x": X})
    np.testing.assert_array_equal(outputs["y"], Y)
    assert struct.unpack("<f", outputs["y"].tobytes()[:4]) == (1.0,)
