"""The examples for app developers, compiled and run against a real service."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import helper

import honed.runtime
from tests.daemon.changes.test_engines import tensor, write
from tests.daemon.conftest import SIZE, service, small_model, start_service
from tests.daemon.running import DEADLINE, Made, Service, start
from tests.daemon.serving.own_models import adding
from tests.decoders import InApp, decoder
from tests.docs.test_documents import GUIDES, blocks
from tests.libhoned.binding import SANITIZED, compiled, lacking, objects

__all__ = ["service", "small_model", "start_service"]  # fixtures

EXAMPLES = Path(__file__).parents[2] / "examples"
X = np.arange(SIZE, dtype=np.float32) * 1.5
Y = X + np.arange(SIZE, dtype=np.float32) + 1  # what the small model makes of it
pytestmark = [pytest.mark.service, pytest.mark.opencl]
MOBILENET = Path(__file__).parents[1] / "models" / "mobilenet_v2_035_128.onnx"
VAD = Path(__file__).parents[1] / "models" / "silero_vad.onnx"
needs_gcc = pytest.mark.skipif(bool(lacking()), reason=f"there is no {', '.join(lacking())}")


@pytest.fixture(scope="session")
def program(made_once: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """infer.c, compiled with all warnings as errors, and with checks of memory and undefined behaviour."""
    library = made_once("libhoned-sanitized-objects", lambda path: objects(path, *SANITIZED))
    made = tmp_path_factory.mktemp("c") / "infer"
    return compiled(EXAMPLES / "infer.c", made, *SANITIZED, library=library)


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
        (["nosuch"], "there is no model 'nosuch'"),
        (["small"], "give INPUT=FILE for the model's x"),
        (["small", "z=x.raw", "x"], "give INPUT=FILE for the model's x"),
        (["small", "x=missing.raw"], "missing.raw: cannot be opened"),
        (["small", "x=short.raw"], "short.raw: has another size than the input"),
        (["small", "x=long.raw"], "long.raw: has another size than the input"),
    ],
)
def test_c_says_what_is_wrong(
    program: Path, service: Service, tmp_path: Path, arguments: list[str], told: str
) -> None:
    (tmp_path / "x.raw").write_bytes(X.tobytes())
    (tmp_path / "short.raw").write_bytes(X.tobytes()[1:])
    (tmp_path / "long.raw").write_bytes(X.tobytes() * 2)
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


def gstreamer() -> list[str]:
    """What a program needs to be built with it; nothing where it is not there."""
    if any(shutil.which(name) is None for name in ("pkg-config", "gst-inspect-1.0")):
        return []
    found = [
        subprocess.run(command, capture_output=True, text=True, check=False)
        for command in (
            ["gst-inspect-1.0", "videoconvert"],
            ["pkg-config", "--cflags", "--libs", "gstreamer-app-1.0"],
        )
    ]
    flags = found[1].stdout.replace("-I", "-isystem ").split()
    return flags if not any(each.returncode for each in found) else []


@needs_gcc
@pytest.mark.skipif(not gstreamer(), reason="there is no libgstreamer-plugins-base1.0-dev with its plug-ins")
def test_c_takes_frames_of_gstreamer(service: Service, tmp_path: Path) -> None:
    camera = compiled(EXAMPLES / "camera.c", tmp_path / "camera", *gstreamer())
    with service.client() as client:
        client.add(MOBILENET, name="pictures", engine="cpu")
        done = run([str(camera), "pictures", "3", "videotestsrc pattern=red"], service.socket)
        client.remove("pictures")
    assert (done.returncode, done.stderr) == (0, b"")
    session = onnxruntime.InferenceSession(MOBILENET)
    given, wanted = session.get_inputs()[0], session.get_outputs()[0]
    red = np.zeros((1, *given.shape[1:]), np.float32)
    red[:, 0] = 1
    (scores,) = session.run(None, {given.name: red})
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 3
    for line in lines:
        named, _, value = line.partition(" = ")
        assert named == f"{wanted.name}[{np.argmax(scores)}]"
        np.testing.assert_allclose(float(value), scores.max(), rtol=1e-3)


def test_the_guide_joins_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are `detector.onnx` and `embed.onnx`, joined by `crops` and `x`."""
    monkeypatch.chdir(tmp_path)
    for name, given, made in (("detector", "image", "crops"), ("embed", "x", "y")):
        node = helper.make_node("Neg" if name == "detector" else "Exp", [given], [made])
        write(tmp_path / f"{name}.onnx", [node], [tensor(given, [2])], [tensor(made, [2])])
    (block,) = [each for each in blocks(GUIDES[0], "python") if "compose" in each]
    exec(block, {})
    session = onnxruntime.InferenceSession("faces.onnx")
    (y,) = session.run(None, {"detector_image": np.array([1, 2], np.float32)})
    np.testing.assert_allclose(y, np.exp([-1.0, -2.0]), rtol=1e-6)


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


def test_python_generates_tokens(service: Service, tmp_path: Path) -> None:
    path = decoder(tmp_path / "llama.onnx")
    with service.client() as client:
        client.add(path, name="llama", engine="cpu")
        (line,) = python(
            "generate.py", "llama", "1", "4", "9", "--end=-1", "--length=10", path=service.socket
        )
        (drawn,) = python(
            "generate.py", "llama", "1", "--end=-1", "--length=5", "--temperature=1", path=service.socket
        )
        client.remove("llama")
    app, new, tokens = InApp(path), np.array([[1, 4, 9]]), []
    while len(tokens) < 7:
        new = app.step(new)[:, -1:].argmax(-1)
        tokens.append(int(new.item()))
    assert [int(token) for token in line.split()] == tokens
    assert len(drawn.split()) == 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")
def test_node_infers(service: Service, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "infer.mjs", tmp_path)
    install = ["npm", "install", "--silent", "--prefix", str(tmp_path), "@msgpack/msgpack@3"]
    subprocess.run(install, check=True, timeout=DEADLINE)
    done = run(["node", "infer.mjs", "small"], service.socket, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"y FP32 [8] 1 2 3 4\n"
    for model, socket, said in (
        ("nosuch", service.socket, b"infer: NOT_FOUND: there is no model 'nosuch'"),
        ("small", tmp_path / "none", b"infer: ENOENT: connect ENOENT"),
    ):
        done = run(["node", "infer.mjs", model], socket, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(said)


def test_the_index_names_every_example_and_a_test_runs_each() -> None:
    programs = {path.name for path in EXAMPLES.glob("*.*")} - {"README.md"}
    index = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", (EXAMPLES / "README.md").read_text(), re.M)
    assert {name for name, _ in index} == {target for _, target in index} == programs
    here = Path(__file__).read_text()
    assert {name for name in programs if f'"{name}"' not in here} == set()


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
