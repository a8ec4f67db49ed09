"""Models given away by the service, and tuned versions put in their place."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from honed.protocol.errors import DeadlineExceeded, Internal, NotFound
from honed.protocol.wire import DescriptorQueue
from honed.runtime import AsyncClient, Client
from honed.runtime.calling.files import open_export
from tests.daemon.conftest import SIZE
from tests.daemon.raw import Raw, packed
from tests.daemon.running import Service, descriptors, wait_for
from tests.daemon.stubs import StubTuner, write_from
from tests.runtime.builder import add_constant, chain

pytestmark = [pytest.mark.service, pytest.mark.opencl]
X = np.linspace(-3, 4, SIZE, dtype=np.float32)


def test_a_compiled_model_comes_back_as_it_was(client: Client, service: Service, small_model: Path) -> None:
    client.live()  # connected
    before = descriptors(os.getpid()), descriptors(service.process.pid)
    with client.export("small") as given:
        assert given.compiled.read() == small_model.read_bytes()
        assert given.sources == {}
        assert given.sha256 == client.show("small")["sha256"]
        assert (given.shapes, given.precision) == ({}, "auto")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(given.compiled.fileno(), b"x")
    for _ in range(20):
        client.export("small").close()
    assert descriptors(os.getpid()) <= before[0]
    wait_for(lambda: descriptors(service.process.pid) <= before[1], "the service to close its descriptors")
    with pytest.raises(NotFound):
        client.export("nope")


def test_descriptors_stay_with_their_answer(service: Service, small_model: Path) -> None:
    """Among other answers, from many threads of one client, and to an asyncio client."""
    failures: list[str] = []

    def ask(client: Client, number: int) -> None:
        for _ in range(20):
            if number % 2:
                client.metadata("small")
            else:
                with client.export("small") as given:
                    if given.compiled.read() != small_model.read_bytes():
                        failures.append("wrong")

    with service.client() as client:
        client.live()
        before = descriptors(os.getpid())
        threads = [threading.Thread(target=ask, args=(client, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert descriptors(os.getpid()) <= before

    async def run() -> None:
        async with AsyncClient(service.socket) as client:
            calls = [client.export("small") if i % 2 else client.metadata("small") for i in range(10)]
            for i, result in enumerate(await asyncio.gather(*calls)):
                if i % 2:
                    with result as given:  # type: ignore[union-attr]
                        assert given.compiled.read() == small_model.read_bytes()
            tasks = [asyncio.create_task(client.export("small")) for _ in range(10)]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await client.live()

    before = descriptors(os.getpid())
    asyncio.run(run())
    assert descriptors(os.getpid()) <= before


def test_an_answer_that_comes_too_late_is_closed(service: Service) -> None:
    with service.client() as client:
        client.live()
        before = descriptors(os.getpid())
        for timeout in np.linspace(1e-5, 1e-3, 30):
            client.timeout = float(timeout)
            try:
                client.export("small").close()
            except DeadlineExceeded:
                continue
        client.timeout = 60.0
        assert client.live()
        assert descriptors(os.getpid()) <= before


def test_a_client_that_does_not_read_holds_few_descriptors(service: Service) -> None:
    """Answers wait with their files open: after some, nothing more is read from that client."""
    before = descriptors(service.process.pid)
    with Raw(service.socket) as raw:
        raw.socket.settimeout(1.0)  # until then the service has read what it will
        requests = b"".join(packed(i, "ModelExport", {"name": "small"}) for i in range(1, 20_000))
        with pytest.raises(TimeoutError):
            raw.send(requests)
        with service.client() as client:
            assert client.live()
        assert descriptors(service.process.pid) - before < 200
    wait_for(lambda: descriptors(service.process.pid) <= before, "the service to close its descriptors")


@pytest.mark.slow
def test_a_tuned_version_keeps_the_source(
    tmp_path: Path, start_service: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub compiles; everything else is real."""
    stub = StubTuner(tmp_path)
    source = tmp_path / "m.onnx"
    source.write_bytes(b"not really ONNX, which the stub does not mind")
    stub.knows(source, add_constant(SIZE))
    service = start_service(environment=stub.environment)
    with service.client() as client:
        client.add(source, shapes={"x": (SIZE,)}, precision="fp32")
        first = client.show("m")["sha256"]
        tuned = write_from(source, chain(3, SIZE), tmp_path / "tuned.honed")
        client.add(tuned, name="m", replace=True)
        np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], X + 3)
        with client.export("m") as given:
            assert given.compiled.read() == tuned.read_bytes()
            assert given.sha256 != first
            assert list(given.sources) == ["m.onnx"]
            assert (given.shapes, given.precision) == ({"x": (SIZE,)}, "fp32")
            saved = given.save_sources(tmp_path / "saved")
            assert saved.read_bytes() == source.read_bytes()
        for wrong in (
            write_from(source, chain(3, 2 * SIZE), tmp_path / "other_shape.honed"),
            chain(3, SIZE).write(tmp_path / "other_source.honed"),
        ):
            client.add(wrong, name="m", replace=True)
            assert client.export("m").sources == {}
            client.add(source, name="m", shapes={"x": (SIZE,)}, precision="fp32", replace=True)
        client.add(
            write_from(source, chain(2, SIZE), tmp_path / "half.honed", precision="fp16"),
            name="m",
            replace=True,
        )
        assert client.export("m").sources == {}
        # What is stored survives a restart.
        client.add(source, name="m", replace=True)
        client.add(tuned, name="m", replace=True)
    state = service.state
    service.stop()
    again = start_service(state=state, environment=stub.environment)
    with again.client() as client, client.export("m") as given:
        assert list(given.sources) == ["m.onnx"]
        assert given.compiled.read() == tuned.read_bytes()


def test_sources_stay_inside_their_folder(tmp_path: Path) -> None:
    def opened() -> list[int]:
        return [os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)]

    for name in ("../m.onnx", "/m.onnx", ""):
        plain = {"files": ["m.honed", name], "shapes": {}, "precision": "auto", "sha256": ""}
        with open_export(plain, opened()) as given, pytest.raises(Internal):
            given.save_sources(tmp_path)
    for plain in ({}, {"files": ["a"], "shapes": {}, "precision": "auto", "sha256": ""}):
        before = descriptors(os.getpid())
        with pytest.raises(Internal):
            open_export(plain, opened())
        assert descriptors(os.getpid()) <= before


def test_sources_are_saved_with_their_external_data(tmp_path: Path) -> None:
    names = {"m.honed": b"compiled", "m.onnx": b"model", "data/w.bin": b"weights"}
    opened = []
    for name, content in names.items():
        file = tmp_path / name.replace("/", "-")
        file.write_bytes(content)
        opened.append(os.open(file, os.O_RDONLY))
    plain = {"files": list(names), "shapes": {"x": [1, 2]}, "precision": "auto", "sha256": "0"}
    with open_export(plain, opened) as given:
        for folder in (tmp_path / "first", tmp_path / "second"):
            assert given.save_sources(folder) == folder / "m.onnx"
            assert (folder / "m.onnx").read_bytes() == b"model"
            assert (folder / "data" / "w.bin").read_bytes() == b"weights"
        assert given.shapes == {"x": (1, 2)}


def test_arrivals_go_to_the_message_that_ends_where_they_came() -> None:
    read, write = os.pipe()
    arrivals = DescriptorQueue()
    arrivals.note(10, [])
    arrivals.note(5, [read, write])
    assert arrivals.take(undecoded=6) == []  # ended before
    assert len(arrivals) == 2
    arrivals.note(20, [])
    assert arrivals.take(undecoded=3) == [read, write]
    arrivals.note(1, [read])
    arrivals.note(1, [write])
    arrivals.close()
    for descriptor in (read, write):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
