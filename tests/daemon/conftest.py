"""Fixtures with real daemons, real sockets and the real worker on PoCL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from honed.runtime import Client
from honed.tool.main import main
from tests.runtime.builder import add_constant

from .running import Made, Service, serving, start, state_with

Hone = Callable[..., tuple[int, str, str]]
SIZE = 8  # elements of the small model's input


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled file: y = (x + [0, 1, 2, ...]) + 1."""
    return add_constant(SIZE).write(tmp_path_factory.mktemp("models") / "small.honed")


@pytest.fixture
def start_service(tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Service]]:
    """Starts daemons; those still running are stopped after the test."""
    started: list[Service] = []

    def starter(state: Path | None = None, **options: object) -> Service:
        service = start(state or tmp_path / "state", cache_dir, **options)  # type: ignore[arg-type]
        started.append(service)
        return service

    yield starter
    for service in started:
        service.stop()


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path, made_once: Made, small_model: Path
) -> Iterator[Service]:
    """A daemon for a whole module, serving the small model as "small"."""
    stored = state_with(made_once, small_model, cache_dir)
    with serving(tmp_path_factory, cache_dir, stored=stored) as running:
        yield running


@pytest.fixture(scope="module")
def empty_service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A daemon for a whole module, without models."""
    with serving(tmp_path_factory, cache_dir) as running:
        yield running


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    """A client of the module's daemon."""
    with service.client() as connected:
        yield connected


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hone:
    """Runs `hone` in a terminal of 80 columns: status, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        if status == 0 and "--json" not in arguments:
            assert all(len(line) <= 80 for line in said.out.splitlines()), said.out
        return status, said.out, said.err

    return run
