"""Whatever is wrong with one model's files makes that model unavailable, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from honed.daemon.store.store import Store
from honed.runtime.compiled.model import FORMAT_VERSION
from honed.runtime.errors import Unavailable
from tests.daemon.conftest import SIZE
from tests.daemon.running import DEADLINE, Service, wait_for
from tests.runtime.builder import add_constant, chain

pytestmark = [pytest.mark.service, pytest.mark.opencl]
Starter = Callable[..., Service]
X = np.arange(SIZE, dtype=np.float32)
GOOD, BAD = "good", "bad"


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def folder(path: Path) -> None:
    remove(path)
    path.mkdir()
    (path / "within").write_text("something")


def fifo(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    remove(path)
    path.symlink_to(path)


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(4000))


def of_another_version(path: Path) -> None:
    data = path.read_bytes()
    remove(path)
    path.write_bytes(data[:8] + (FORMAT_VERSION - 1).to_bytes(4, "little") + data[12:])


def nested(path: Path) -> None:
    path.write_text("[" * 200_000)


def test_models_without_their_files_are_unavailable_alone(
    start_service: Starter, small_model: Path, tmp_path: Path
) -> None:
    service = start_service()
    models = {
        spoil: chain(n, SIZE).write(tmp_path / f"{spoil.__name__}.honed")
        for n, spoil in enumerate((remove, folder, fifo, link_to_itself, garbage, of_another_version), 2)
    }
    with service.client() as client:
        client.add(small_model, name=GOOD)
        for spoil, file in models.items():
            client.add(file, name=spoil.__name__)
        objects = {spoil: client.show(spoil.__name__)["sha256"] for spoil in models}
    service.process.terminate()
    service.process.wait(DEADLINE)
    for spoil, sha256 in objects.items():
        spoil(service.state / "objects" / sha256)
    service.restart()
    service.wait_listening()
    with service.client() as client:
        for n, (spoil, file) in enumerate(models.items(), 2):
            name = spoil.__name__
            wait_for(_told(service, name), f"the reason of {name}", service)
            np.testing.assert_array_equal(client.infer(GOOD, {"x": X})["y"], 2 * X + 1)
            other = spoil is of_another_version
            told = "of another version of honed" if other else "damaged"
            with pytest.raises(Unavailable, match=f"its compiled file is {told}"):
                client.infer(name, {"x": X})
            # It can be added again under its name.
            client.add(file, name=name, replace=True)
            np.testing.assert_array_equal(client.infer(name, {"x": X})["y"], X + n)
    assert "Traceback" not in service.log


def _told(service: Service, name: str) -> Callable[[], bool]:
    return lambda: "could not be compiled again" in states(service)[name][1]


def states(service: Service) -> dict[str, tuple[str, str]]:
    with service.client() as client:
        return {model["name"]: (model["state"], model["reason"]) for model in client.models()}


def test_a_compiled_file_and_its_source_that_are_both_gone(
    start_service: Starter, small_model: Path, tmp_path: Path
) -> None:
    from tests.daemon.stubs import StubTuner

    stub, source = StubTuner(tmp_path), tmp_path / "bad.onnx"
    source.write_bytes(b"a source")
    stub.knows(source, chain(2, SIZE))
    service = start_service(environment=stub.environment)
    with service.client() as client:
        client.add(small_model, name=GOOD)
        client.add(source, name=BAD)
    service.process.terminate()
    service.process.wait(DEADLINE)
    manifest = Store(service.state).open()[0][BAD]
    for file in (manifest.compiled, *manifest.sources):
        (service.state / "objects" / file.sha256).unlink()
    service.restart()
    service.wait_listening()
    with service.client() as client:
        np.testing.assert_array_equal(client.infer(GOOD, {"x": X})["y"], 2 * X + 1)
        wait_for(lambda: "could not be compiled again" in states(service)[BAD][1], "the reason", service)
        assert states(service)[BAD][0] == "UNAVAILABLE"
    assert "Traceback" not in service.log


def test_what_has_no_business_in_the_state_folder_stops_nothing(
    start_service: Starter, small_model: Path
) -> None:
    service = start_service()
    with service.client() as client:
        client.add(small_model, name=GOOD)
    service.process.terminate()
    service.process.wait(DEADLINE)
    state = service.state
    folder_in(state / "objects" / "a folder")
    os.mkfifo(state / "objects" / "a fifo")
    os.mkfifo(state / "models" / "fifo.json")
    folder_in(state / "models" / "folder.json")
    folder_in(state / "models" / ".unfinished")
    nested(state / "models" / "nested.json")
    for name in ("usage.json", "latencies.json"):
        (state / name).unlink(missing_ok=True)
    folder_in(state / "usage.json")
    os.mkfifo(state / "latencies.json")
    (state / os.fsdecode(b"\xff")).write_text("no UTF-8")
    (state / "models" / os.fsdecode(b"\xff.json")).write_text("no UTF-8")
    service.restart()
    service.wait_listening()
    service.wait_ready()
    with service.client() as client:
        np.testing.assert_array_equal(client.infer(GOOD, {"x": X})["y"], 2 * X + 1)
        damaged = " ".join(client.status()["damaged"])
        assert "fifo.json" in damaged
        assert "folder.json" in damaged
        assert "nested.json" in damaged
    assert "Traceback" not in service.log
    assert service.process.poll() is None


def test_a_lock_that_leads_elsewhere_is_told_in_a_sentence(tmp_path: Path) -> None:
    from honed.daemon.service import lock
    from honed.runtime.errors import HonedError

    (tmp_path / "lock").symlink_to("/dev/zero")
    with pytest.raises(HonedError, match="lock"):
        lock(tmp_path / "lock", "it")
    (tmp_path / "lock").unlink()
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(HonedError, match="no regular file"):
        lock(tmp_path / "lock", "it")


def test_files_in_the_place_of_folders_that_can_be_made_again_go(tmp_path: Path) -> None:
    state = tmp_path / "state"
    Store(state).open()
    for name in ("staging", "damaged"):
        (state / name).rmdir()
    (state / "staging").write_text("a file")
    os.mkfifo(state / "damaged")
    store = Store(state)
    store.open()
    with store.staging() as folder:
        assert folder.is_dir()


def test_a_removal_that_the_disk_refuses_leaves_the_model_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio
    from types import SimpleNamespace
    from typing import Any, cast

    from honed.daemon.changes.add import ModelInstaller
    from honed.daemon.changes.change import Changes, StoreWriter
    from honed.daemon.core.machine import Machine
    from honed.daemon.core.messages import Added
    from honed.daemon.core.state import Registry
    from honed.daemon.settings.schema import Limits
    from honed.runtime.errors import PermissionDenied
    from tests.daemon.changes.test_proof_cache import manifest

    def refused(*_: object) -> None:
        raise PermissionDenied("the disk is read-only")

    async def go() -> None:
        models, nothing = Registry(), cast(Any, None)
        added = Added(manifest=manifest(), compiled=nothing, preferred_engine="", proof=None)
        Machine(models, ("",), "", 1).handle(added, 0.0, 0.0)
        store = cast(Any, SimpleNamespace(remove=refused))
        commits = StoreWriter(store, models)
        changes = Changes(Limits(), store, models, nothing, commits, nothing, tmp_path)
        jobs = ModelInstaller(changes, "gpu", tmp_path)
        with pytest.raises(PermissionDenied):
            await jobs.remove("m")
        assert models.find("m") is not None

    asyncio.run(go())


def folder_in(path: Path) -> None:
    path.mkdir()
    (path / "within").write_text("something")


def test_a_usage_file_of_another_kind_is_put_aside(tmp_path: Path) -> None:
    from honed.daemon.observe.latencies import Keeper

    for spoil in (nested, garbage, lambda path: path.write_text(json.dumps({"models": {"m": 1}}))):
        path = tmp_path / "latencies.json"
        path.touch()
        spoil(path)
        assert Keeper(path).latencies.of("m") == ()
        assert not path.exists()


def test_a_manifest_that_cannot_be_read_now_keeps_what_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from honed.daemon.store import store as module
    from honed.daemon.store.files import describe
    from honed.daemon.store.store import Manifest, begin

    store = Store(tmp_path / "state")
    store.open()
    path = add_constant(SIZE).write(tmp_path / "m.honed")
    file = describe(path, "m.honed")
    history = begin(file, schedules="", why="added", now=0.0)
    store.commit(
        Manifest(
            name="m", added=0.0, compiled=file, history=history, sources=(), shapes={}, precision="auto"
        ),
        [(file, path)],
    )

    def failing_disk(path: Path, limit: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(module, "read_regular", failing_disk)
        models, damaged = Store(tmp_path / "state").open()
    assert models == {}
    assert "Input/output error" in damaged[0]
    assert set(Store(tmp_path / "state").open()[0]) == {"m"}
    assert store.object(file).exists()
