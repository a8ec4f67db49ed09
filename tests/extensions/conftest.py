"""Fixtures: real services, and real bridges in processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.conftest import small_model, start_service
from tests.daemon.running import Service, serving

Main = Callable[[list[str]], int]  # of a bridge's program
__all__ = ["small_model", "start_service"]

MODELS = Path(__file__).parents[1] / "models"
YOLOX = MODELS / "yolox_nano.onnx"
CPU_ENGINE = '\n[serve]\nengine = "cpu"\n'


class Bridge:
    """A bridge's process, which can be killed and started again."""

    def __init__(self, module: str, config: str, service_socket: Path, folder: Path) -> None:
        """`config` is the text of its configuration file."""
        file = folder / f"{module.rpartition('.')[0]}.toml"
        file.write_text(config)
        self._command = [sys.executable, "-m", module, f"--config={file}", f"--socket={service_socket}"]
        self._log = folder / f"{module}.log"
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as stream:
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stderr=stream)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(60)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")


@pytest.fixture
def start_bridge(tmp_path: Path) -> Iterator[Callable[[str, str, Path], Bridge]]:
    """Starts bridges; those still running are stopped after the test."""
    started: list[Bridge] = []

    def starter(module: str, config: str, service_socket: Path) -> Bridge:
        started.append(Bridge(module, config, service_socket, tmp_path))
        return started[-1]

    yield starter
    for bridge in started:
        with contextlib.suppress(ProcessLookupError):
            bridge.stop()


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[Main, str], str]]:
    """What a bridge says about settings that it refuses. It runs in this process."""
    mask = os.umask(0o077)  # a bridge sets it for its process

    def run(main: Main, config: str) -> str:
        file = tmp_path / "settings.toml"
        file.write_text(config)
        assert main([f"--config={file}", f"--socket={tmp_path / 'none'}"]) == 1
        return capsys.readouterr().err

    yield run
    os.umask(mask)


@pytest.fixture(scope="module")
def yolox_service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A daemon whose CPU engine serves YOLOX-nano as "yolox_nano"."""
    with serving(tmp_path_factory, cache_dir, config=CPU_ENGINE) as running:
        with running.client() as client:
            client.add(YOLOX)
        yield running
