"""Building and checking happen apart from serving, and endanger nothing that is served."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from honed.daemon.store import inspector
from honed.daemon.store.compiled import CompiledFileInfo
from honed.runtime.errors import HonedError, ModelFileError, ModelRefused, Unavailable
from tests.daemon.conftest import SIZE
from tests.daemon.running import NO_TUNER, Service, has_ended, serving, wait_for
from tests.daemon.serving.test_crashes import crashing_model
from tests.daemon.stubs import StubTuner
from tests.runtime.builder import Builder, chain

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]
X = np.arange(SIZE, dtype=np.float32)


class Adding(threading.Thread):
    """Adds a model in the background; `error` is the result."""

    def __init__(self, service: Service, path: Path, name: str) -> None:
        super().__init__()
        self._service, self._path, self._name = service, path, name
        self.error: HonedError | None = None
        self.start()

    def run(self) -> None:
        try:
            with self._service.client() as client:
                client.add(self._path, name=self._name)
        except HonedError as error:
            self.error = error


def others(service: Service) -> list[psutil.Process]:
    """Processes of workers that do not serve."""
    with service.client() as client:
        serving = client.status()["worker"]["pid"]
    return [child for child in service.children("honed.daemon.worker.worker") if child.pid != serving]


@pytest.mark.slow
def test_building_that_does_not_end_endangers_nothing(start_service: Starter, tmp_path: Path) -> None:
    service = start_service()
    (tmp_path / "first").mkdir()
    with service.client() as client:
        client.add(never_built(tmp_path / "first"), name="same")
        worker = client.status()["worker"]["pid"]
        service.configure("[limits]\nload_seconds = 1.0\n[tuner]\nspawn = false\n")
        adding = Adding(service, never_built(tmp_path), "slow")
        while adding.is_alive():
            for process in others(service):
                with contextlib.suppress(psutil.Error):
                    process.suspend()
        assert isinstance(adding.error, ModelRefused)
        assert "longer than 1 s" in " ".join((str(adding.error), *adding.error.reasons))
        np.testing.assert_array_equal(client.infer("same", {"x": X})["y"], X)
        assert client.status()["worker"]["pid"] == worker


def never_built(folder: Path) -> Path:
    """A model that no test before has built, so that the cache does not know it."""
    builder = Builder()
    x, y = builder.input("x", "float32", (SIZE,)), builder.output("y", "float32", (SIZE,))
    source = f"""// {folder}
      __kernel void same(__global const float* a, __global float* b) {{
        int i = get_global_id(0); b[i] = a[i]; }}"""
    builder.launch(builder.kernel(source, "same", "rw", 4 * SIZE, groups=SIZE, block=1), x, y)
    return builder.write(folder / "same.honed")


@pytest.fixture(scope="module")
def building(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A daemon with memory for what builds; the last of its tests kills it."""
    limits = "[limits]\nworker_memory_mib = 1024\ncompile_memory_mib = 2048\n"
    with serving(tmp_path_factory, cache_dir, config=limits) as running:
        yield running


def test_a_crash_of_the_process_that_builds_names_its_memory(building: Service, tmp_path: Path) -> None:
    adding = Adding(building, never_built(tmp_path), "m")
    while adding.is_alive():
        for process in others(building):
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSEGV)
        adding.join(0.01)
    assert isinstance(adding.error, ModelRefused)
    assert (
        "SIGSEGV; it may have needed more than 2048 MiB of limits.compile_memory_mib"
        in adding.error.reasons[0]
    )


def test_the_process_that_builds_is_killed_and_the_addition_goes_on(
    building: Service, tmp_path: Path
) -> None:
    service = building
    with service.client() as client:
        worker = client.status()["worker"]["pid"]
        adding = Adding(service, never_built(tmp_path), "m")
        wait_for(lambda: others(service) or not adding.is_alive(), "a process that builds", service)
        for process in others(service):
            with contextlib.suppress(psutil.Error):
                process.kill()
        adding.join()
        assert adding.error is None
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], X)
        assert client.status()["worker"]["pid"] == worker
    children = psutil.Process(service.process.pid).children(recursive=True)
    assert worker in {child.pid for child in children}
    service.kill()
    wait_for(lambda: all(map(has_ended, children)), "what it started to end", service)


@pytest.mark.slow
def test_a_worker_that_hangs_is_noticed_before_anybody_asks(
    start_service: Starter, small_model: Path
) -> None:
    service = start_service()
    with service.client() as client:
        client.add(small_model, name="small")
        worker = service.worker
        assert worker is not None
        worker.suspend()
        service.configure("[limits]\nrun_seconds = 5\n" + NO_TUNER)  # which a replacement can keep
        wait_for(lambda: client.status()["worker"]["restarts"], "the worker to be replaced", service)
        service.wait_ready()
        np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], 2 * X + 1)


@pytest.mark.slow
def test_a_model_that_crashes_now_and_then_is_given_up_and_nobody_else_waits(
    start_service: Starter, small_model: Path, tmp_path: Path
) -> None:
    service = start_service()
    with service.client() as client:
        client.add(small_model, name="small")
        client.add(crashing_model(tmp_path), name="crash")
        for _ in range(10):
            np.testing.assert_array_equal(client.infer("crash", {"x": -X})["y"], -X)  # in between it is well
            with pytest.raises(Unavailable):
                client.infer("crash", {"x": X + 1})
            np.testing.assert_array_equal(client.infer("small", {"x": X})["y"], 2 * X + 1)
            state = next(m for m in client.models() if m["name"] == "crash")
            if state["state"] == "UNAVAILABLE":
                break
        assert "within an hour" in state["reason"]
        assert "next start" not in service.log
        assert client.status()["worker"]["restarts"] <= 8


def test_what_is_refused_does_not_wait_for_what_is_compiled(start_service: Starter, tmp_path: Path) -> None:
    stub = StubTuner(tmp_path)
    slow, refused = tmp_path / "slow.onnx", tmp_path / "refused.onnx"
    slow.write_bytes(b"takes as long as it is told to")
    refused.write_bytes(b"has operators that nobody knows")
    stub.knows(slow, chain(1, SIZE))
    stub.knows(refused, chain(1, SIZE))
    begun, go = tmp_path / "begun", tmp_path / "go"
    stub.first(
        slow,
        f"pathlib.Path({str(begun)!r}).touch()\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n",
    )
    stub.first(refused, 'say(event="refused", message="it has no known operator", reasons=[])\nsys.exit(1)\n')
    service = start_service(environment=stub.environment)
    adding = Adding(service, slow, "slow")
    wait_for(begun.exists, "the compilation to begin", service)
    with service.client() as client, pytest.raises(ModelRefused, match="no known operator"):
        client.add(refused, name="refused")
    assert adding.is_alive()
    go.touch()
    adding.join()
    assert adding.error is None


def test_a_reader_that_somebody_kills_is_not_the_files_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = chain(1, SIZE).write(tmp_path / "m.honed"), inspector.python
    kills = 0

    def python(module: str) -> tuple[str, ...]:
        nonlocal kills
        kills -= 1
        return ("/bin/sh", "-c", "kill -9 $$") if kills >= 0 else real(module)

    monkeypatch.setattr(inspector, "python", python)
    kills = 2
    assert asyncio.run(inspector.Inspector().inspect(path)).launches == 1
    kills = 99
    with pytest.raises(Unavailable, match="SIGKILL"):
        asyncio.run(inspector.Inspector().inspect(path))


def test_a_reader_that_a_file_kills_is_told_of_that_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = chain(1, SIZE).write(tmp_path / "good.honed"), tmp_path / "bad.honed"
    bad.write_bytes(b"whatever")
    killed = (
        "import os, signal\n"
        "from honed.daemon.store import inspector\n"
        "from honed.runtime.compiled import modelfile\n"
        "read = modelfile.read\n"
        "def other(path):\n"
        f"    return os.kill(os.getpid(), signal.SIGBUS) if str(path) == {str(bad)!r} else read(path)\n"
        "modelfile.read = other\n"
        "inspector.InspectorServer(inspector.connect()).serve()\n"
    )

    def python(_module: str) -> tuple[str, ...]:
        return (sys.executable, "-c", killed)

    async def go() -> list[object]:
        return [found async for _, found in inspector.inspect_all([good, bad, good])]

    monkeypatch.setattr(inspector, "python", python)
    first, second, third = asyncio.run(go())
    assert isinstance(first, CompiledFileInfo)
    assert isinstance(second, ModelFileError)
    assert first == third
