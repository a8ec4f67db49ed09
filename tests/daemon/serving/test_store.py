"""The store: what is committed stays, whatever happens in between."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.daemon.restoring import without_raced_devices
from honed.daemon.serving.selection import is_unfinished
from honed.daemon.store.compiled import summarise
from honed.daemon.store.files import StoredFile, describe, receive
from honed.daemon.store.store import FORMAT, Manifest, NewerFormat, Store, begin, new_version, version_file
from honed.daemon.store.versions import succeed
from honed.protocol.values import OptimisationCheck, SessionSettings
from honed.runtime.errors import HonedError, InvalidArgument, ResourceExhausted
from tests.daemon.core import serving_world
from tests.daemon.core.serving_world import stored
from tests.runtime.builder import INCREMENT, Builder


@pytest.fixture
def store(tmp_path: Path) -> Store:
    opened = Store(tmp_path / "state")
    opened.open()
    return opened


def add(store: Store, name: str, compiled: bytes, source: bytes = b"onnx") -> Manifest:
    with store.staging() as folder:
        files = []
        for file_name, content in ((f"{name}.honed", compiled), (f"{name}.onnx", source)):
            (folder / file_name).write_bytes(content)
            files.append((describe(folder / file_name, file_name), folder / file_name))
        manifest = Manifest(
            name=name,
            added=1.5,
            compiled=files[0][0],
            history=begin(files[0][0], schedules="s", why="added", now=1.5),
            sources=(files[1][0],),
            shapes={"x": (1, 3)},
            precision="auto",
        )
        store.commit(manifest, files)
    return manifest


def contents(store: Store) -> dict[str, tuple[bytes, bytes]]:
    """What a fresh start finds: compiled and source bytes by name; nothing may be damaged."""
    models, damaged = store.open()
    assert damaged == []
    return {
        name: (store.object(m.compiled).read_bytes(), store.object(m.sources[0]).read_bytes())
        for name, m in models.items()
    }


def test_models_come_back(store: Store) -> None:
    manifest = add(store, "a", b"compiled a")
    add(store, "b", b"compiled b", b"other")
    assert contents(store) == {"a": (b"compiled a", b"onnx"), "b": (b"compiled b", b"other")}
    assert store.open()[0]["a"] == manifest


def test_versions_that_are_kept_keep_their_files(store: Store, tmp_path: Path) -> None:
    manifest = add(store, "a", b"first")
    history = manifest.history
    for number, content in ((2, b"second"), (3, b"third"), (4, b"fourth")):
        with store.staging() as folder:
            (folder / "a.honed").write_bytes(content)
            file = describe(folder / "a.honed", "a.honed")
            version = new_version(file, number, schedules="s", why="tuned", now=2.0, settled=True)
            history = succeed(history, version, 2.0, keep=True)
            manifest = dataclasses.replace(manifest, compiled=file, history=history)
            store.commit(manifest, [(file, folder / "a.honed")])
            store.sweep([manifest])
    found, damaged = store.open()
    assert found["a"] == manifest
    assert damaged == []
    kept = {v.number: store.object(version_file(manifest, v)).exists() for v in history.versions}
    assert kept == {1: False, 2: True, 3: True, 4: True}


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter a manifest, with a checksum that fits."""
    plain = json.loads(path.read_text().partition("\n")[2])
    change(plain)
    body = json.dumps(plain)
    path.write_text(f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n")


def test_the_device_is_kept(store: Store) -> None:
    manifest = dataclasses.replace(add(store, "a", b"compiled"), device="mali", placement_reason="asked for")
    store.commit(manifest, [])
    assert store.open()[0] == {"a": manifest}


def test_equal_files_are_kept_once_and_as_long_as_needed(store: Store, tmp_path: Path) -> None:
    a, b = add(store, "a", b"same"), add(store, "b", b"same")
    assert len(os.listdir(tmp_path / "state" / "objects")) == 2
    store.remove("a", [b])
    assert contents(store) == {"b": (b"same", b"onnx")}
    store.remove("b", [])
    assert contents(store) == {}
    assert os.listdir(tmp_path / "state" / "objects") == []
    assert a.compiled == dataclasses.replace(b.compiled, name="a.honed")


def test_a_form_in_fp16_is_kept_as_long_as_onnx_runtime_is_to_run_it(store: Store, tmp_path: Path) -> None:
    manifest = add(store, "a", b"compiled")
    source = str(store.object(manifest.sources[0]))
    form = tmp_path / "fp16.onnx"
    form.write_bytes(b"half")
    key = store.keep(form)
    assert store.keep(form) == key
    session = SessionSettings(us=1.0, first_us=2.0, first="4 threads", half=key)
    found = OptimisationCheck(level="all", checked=True, error=0.0, why="", seconds=1.0, session=session)
    halved = dataclasses.replace(manifest, optimisation=found)
    store.commit(halved, [])
    store.sweep([halved])
    assert store.open()[0] == {"a": halved}
    assert Path(store.run_as(source, found.session_config.half)).read_bytes() == b"half"
    assert store.run_as(source, "") == source
    store.sweep([manifest])
    assert store.run_as(source, key) == source, "the model itself where the form is gone"


def test_replacing_sweeps_what_was(store: Store, tmp_path: Path) -> None:
    add(store, "a", b"old")
    new = add(store, "a", b"new")
    store.sweep([new])
    assert contents(store) == {"a": (b"new", b"onnx")}
    assert len(os.listdir(tmp_path / "state" / "objects")) == 2


def test_a_start_clears_away_what_was_left(store: Store, tmp_path: Path) -> None:
    add(store, "a", b"compiled")
    state = tmp_path / "state"
    (state / "objects" / ("0" * 64)).write_bytes(b"orphan")
    (state / "staging" / "left").mkdir()
    (state / "staging" / "left" / "file").write_bytes(b"x")
    (state / "models" / ".b.json.123.tmp").write_bytes(b"half")
    assert contents(store) == {"a": (b"compiled", b"onnx")}
    assert len(os.listdir(state / "objects")) == 2
    assert os.listdir(state / "staging") == []
    assert os.listdir(state / "models") == ["a.json"]


@pytest.mark.parametrize("position", [0, 40, 70, 100, -3])
def test_a_damaged_manifest_is_set_aside(store: Store, tmp_path: Path, position: int) -> None:
    add(store, "a", b"compiled")
    add(store, "kept", b"other")
    path = tmp_path / "state" / "models" / "a.json"
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)
    models, damaged = store.open()
    assert list(models) == ["kept"]
    assert len(damaged) == 1
    assert damaged[0].startswith("a.json: ")
    assert (tmp_path / "state" / "damaged" / "a.json").read_bytes() == bytes(data)
    assert contents(store) == {"kept": (b"other", b"onnx")}


def test_a_manifest_under_another_name_is_damaged(store: Store, tmp_path: Path) -> None:
    add(store, "a", b"compiled")
    models = tmp_path / "state" / "models"
    (models / "b.json").write_bytes((models / "a.json").read_bytes())
    found, damaged = store.open()
    assert list(found) == ["a"]
    assert len(damaged) == 1


def test_what_a_newer_honed_stored_is_left_alone(store: Store, tmp_path: Path) -> None:
    """Going back to an older version loses nothing, and says what to do."""
    add(store, "a", b"compiled")
    add(store, "b", b"other")
    state = tmp_path / "state"
    (state / "models" / ".c.json.1.tmp").write_bytes(b"half")
    (state / "models" / "0.json").write_bytes(b"damaged")
    kept = (state / "models" / "a.json").read_bytes()
    rewrite(state / "models" / "b.json", lambda plain: plain.update(format=FORMAT + 1, invention={}))
    before = sorted(state.rglob("*"))
    said = rf"model b .* format {FORMAT + 1}, .* up to {FORMAT}; install the newer honed again"
    with pytest.raises(NewerFormat, match=said):
        store.open()
    assert sorted(state.rglob("*")) == before
    assert (state / "models" / "a.json").read_bytes() == kept


class PowerCut(BaseException):
    """Nothing after this moment happens."""


CALLS = ("rename", "replace", "fsync", "unlink", "open")


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Arranges for the power to fail before the n-th file operation, and all operations after it."""
    originals = {name: getattr(os, name) for name in CALLS}
    left = [10**9]

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise PowerCut
            return originals[name](*args, **kwargs)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name))

    def arrange(count: int) -> None:
        left[0] = count

    return arrange


def survives(store: Store, cut: Callable[[int], None], change: Callable[[], object]) -> list[Any]:
    """What a start finds after a power cut at each moment of a change."""
    found = []
    for moment in range(200):
        add(store, "a", b"old")
        add(store, "kept", b"kept")
        cut(moment)
        try:
            change()
            finished = True
        except PowerCut:
            finished = False
        cut(10**9)
        found.append(contents(store))
        store.remove("b", [m for m in store.open()[0].values() if m.name != "b"])
        if finished:
            return found
    raise AssertionError("the change does not end")


KEPT = {"kept": (b"kept", b"onnx")}


def test_adding_survives_a_power_cut_at_every_moment(store: Store, cut: Callable[[int], None]) -> None:
    found = survives(store, cut, lambda: add(store, "b", b"new", b"new source"))
    before = {**KEPT, "a": (b"old", b"onnx")}
    after = {**before, "b": (b"new", b"new source")}
    assert found[0] == before
    assert found[-1] == after
    assert all(each in (before, after) for each in found)
    assert len(found) > 8


def test_replacing_survives_a_power_cut_at_every_moment(store: Store, cut: Callable[[int], None]) -> None:
    def replace() -> None:
        add(store, "a", b"new", b"new source")
        store.sweep(store.open()[0].values())

    found = survives(store, cut, replace)
    before, after = {**KEPT, "a": (b"old", b"onnx")}, {**KEPT, "a": (b"new", b"new source")}
    assert found[0] == before
    assert found[-1] == after
    assert all(each in (before, after) for each in found)


def test_removing_survives_a_power_cut_at_every_moment(store: Store, cut: Callable[[int], None]) -> None:
    def remove() -> None:
        store.remove("a", [m for m in store.open()[0].values() if m.name != "a"])

    found = survives(store, cut, remove)
    before = {**KEPT, "a": (b"old", b"onnx")}
    assert found[0] == before
    assert found[-1] == KEPT
    assert all(each in (before, KEPT) for each in found)


@pytest.fixture
def given(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "given").write_bytes(b"model" * 1000)
    descriptor = os.open(tmp_path / "given", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_receiving_copies_from_the_start(given: int, tmp_path: Path) -> None:
    os.lseek(given, 100, os.SEEK_SET)
    file, path = receive(given, "sub/m.onnx", tmp_path / "in", 10_000)
    assert path == tmp_path / "in" / "sub" / "m.onnx"
    assert path.read_bytes() == b"model" * 1000
    assert file == StoredFile(name="sub/m.onnx", sha256=file.sha256, nbytes=5000)
    assert describe(path, "sub/m.onnx") == file
    assert os.lseek(given, 0, os.SEEK_CUR) == 100


@pytest.mark.parametrize("name", ["", ".", "..", "/m", "../m", "a/../../m", "a\0", "x" * 2000])
def test_receiving_stays_in_its_folder(given: int, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument):
        receive(given, name, tmp_path / "in", 10_000)
    assert not (tmp_path / "m").exists()


def test_receiving_is_bounded(given: int, tmp_path: Path) -> None:
    receive(given, "fits", tmp_path / "in", 5000)
    with pytest.raises(ResourceExhausted, match="larger than"):
        receive(given, "larger", tmp_path / "in", 4999)
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["fits"], "it was not even begun"


def test_a_state_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(HonedError, match="cannot be used"):
        Store(tmp_path / "state").open()


def test_what_honed_0_1_put_on_the_processor_beside_a_gpu_is_compiled_anew(store: Store) -> None:
    here, there = (
        dataclasses.replace(serving_world.given("m"), compiled=stored("k"), compared_devices="Mali; PoCL")
        for _ in range(2)
    )
    models = {
        "here": here,
        "there": dataclasses.replace(there, device="cpu").with_decision(chosen="gpu", reason="faster"),
    }
    models["asked"] = dataclasses.replace(here, compared_devices=None, device="cpu")
    found = without_raced_devices(cast(Any, SimpleNamespace(cpu=object())), models)
    assert (found["here"].compiled, found["here"].compared_devices) == (stored("k"), None)
    left = found["there"]
    assert (left.compiled, left.device, left.compared_devices, is_unfinished(left, "fastest")) == (
        None,
        "",
        None,
        True,
    )
    assert found["asked"] == models["asked"]
    alone = without_raced_devices(cast(Any, SimpleNamespace(cpu=None)), models)["there"]
    assert (alone.compiled, alone.device) == (stored("k"), ""), "nothing else could serve it"


@pytest.mark.parametrize(
    ("dtype", "names", "anew"), [("int64", False, True), ("int64", True, False), ("float32", False, False)]
)
def test_files_that_may_assume_values_of_integers_are_known(dtype: str, names: bool, anew: bool) -> None:
    built = Builder()
    built.launch(
        built.kernel(INCREMENT, "increment", "rw", 4, groups=1, block=1),
        built.input("x", "float32", (1,)),
        built.output("y", "float32", (1,)),
    )
    model = dataclasses.replace(built.build(), names_values=names)
    model = dataclasses.replace(
        model, inputs=tuple(dataclasses.replace(t, dtype=dtype) for t in model.inputs)
    )
    assert summarise(model).may_assume_values == anew
