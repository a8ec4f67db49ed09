"""Models that apps bring, in a real service with several users."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.protocol.methods import METHODS
from honed.protocol.peer import ResponseReceived
from honed.runtime import AsyncClient, Client
from honed.runtime.errors import (
    HonedError,
    InvalidArgument,
    MissingFiles,
    ModelRefused,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from tests.daemon.running import Service, wait_for

from .own_models import ANNA, BERT, CLEO, X, adding, answers, beside, client, for_users

pytestmark = [pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
MIB = 1 << 20
QUOTAS = "\n[apps]\nmax_models = 3\ndisk_mib = 8\ncompile_seconds = 0\n"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    with for_users(tmp_path_factory, cache_dir, QUOTAS) as running:
        yield running


@pytest.fixture
def anna(own: Service) -> Iterator[Client]:
    with client(own, ANNA) as connected:
        yield connected
        forget(connected)


@pytest.fixture
def bert(own: Service) -> Iterator[Client]:
    with client(own, BERT) as connected:
        yield connected
        forget(connected)


def asked(
    connected: Client, method: str, params: dict[str, Any], descriptors: Sequence[int] = ()
) -> ResponseReceived:
    """The answer to a message that no client would send."""
    link = connected._ensure_link()
    waiting = link.send(method, params, descriptors)
    while not isinstance(news := link.wait(waiting, None), ResponseReceived):
        pass
    return news


def forget(connected: Client) -> None:
    for name in names(connected):
        connected.remove(name)


def names(connected: Client) -> set[str]:
    return {model["name"] for model in connected.models() if model["owner"]}


def objects(service: Service) -> int:
    return len(list((service.state / "objects").iterdir()))


def test_an_app_brings_a_model_and_uses_it(own: Service, anna: Client, tmp_path: Path) -> None:
    brought = anna.upload(adding(3))
    name = brought.model_name
    assert (brought.ready, brought.engine) == (True, "cpu")
    assert answers(anna, name, 3)
    path = tmp_path / "the same.onnx"
    path.write_bytes(adding(3))
    assert anna.upload(path) == brought
    assert anna.ready(name)
    assert anna.metadata(name)["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [4]}]
    assert anna.show(name)["source"]["sha256"] == brought.sha256
    assert anna.statistics(name)[0]["inference_count"] == 1
    assert [(each["name"], each["owner"]) for each in anna.models()] == [(name, str(ANNA))]
    anna.remove(name)
    with pytest.raises(NotFound):
        anna.infer(name, {"x": X})
    assert objects(own) == 0


def test_external_data_comes_along(anna: Client, tmp_path: Path) -> None:
    path = beside(tmp_path, 5)
    data = (tmp_path / "number.bin").read_bytes()
    first = anna.upload(path).model_name
    assert answers(anna, first, 5)
    assert anna.upload(path.read_bytes(), external={"number.bin": data}).model_name == first
    with pytest.raises(MissingFiles):
        anna.upload(path.read_bytes())
    other = np.array([6], np.float32).tobytes().ljust(len(data), b"\0")
    assert answers(anna, anna.upload(path.read_bytes(), external={"number.bin": other}).model_name, 6)


def test_both_clients_bring(own: Service, anna: Client) -> None:
    async def brought() -> str:
        async with AsyncClient(own.socket) as connected:
            return (await connected.upload(adding(4))).model_name

    name = asyncio.run(brought())
    with own.client() as root:
        assert {model["name"]: model["owner"] for model in root.models()}[name] == "root"
        assert name not in names(anna)
        root.remove(name)


def asked_by_another(connected: Client, name: str, method: str) -> tuple[str, str]:
    """The error that a method gives for a name, without the name."""
    field = next(
        f for f in ("model_name", "model", "name") if f in METHODS[method].params.__dataclass_fields__
    )
    extra: dict[str, dict[str, Any]] = {
        "ModelInfer": {"inputs": [], "raw_input_contents": []},
        "ModelPin": {"version": None},
        "ModelRollback": {"version": None},
        "ModelPublish": {"expected": "0" * 64, "why": ""},
        "TunerRun": {"command": "history"},
        "RepositoryModelLoad": {"files": ["m.onnx"]},
    }
    with pytest.raises(HonedError) as told:
        asked(connected, method, {field: name, **extra.get(method, {})})
    return type(told.value).__name__, str(told.value).replace(name.partition("@")[0], "NAME")


OF_MODELS = sorted(
    name
    for name, row in METHODS.items()
    if {"name", "model_name", "model"} & set(row.params.__dataclass_fields__) and "Memory" not in name
)


def test_another_is_told_what_an_unknown_name_is_told(anna: Client, bert: Client) -> None:
    name, unknown = anna.upload(adding(7)).model_name, f"own-{'7' * 40}"
    for method in OF_MODELS:
        for sizes in ("", "@4"):
            told = [asked_by_another(bert, each + sizes, method) for each in (name, unknown)]
            assert told[0] == told[1], method
    assert answers(anna, name, 7)
    assert bert.models() == []


def test_nothing_tells_of_anothers_model(own: Service, anna: Client, bert: Client) -> None:
    def told() -> list[Any]:
        metrics, status = bert.metrics(), bert.status()
        figures = [metrics[key] for key in ("models", "variants", "whole", "queue", "tuning")]
        parts = [status[key] for key in ("models", "jobs", "damaged", "queue", "sequences")]
        shown = [bert.models(), bert.statistics(), status["idle"]["models"], bert.ready()]
        engines = [(device["name"], device["models"], device["away"]) for device in status["devices"]]
        return [figures, parts, shown, engines]

    before = told()
    name = anna.upload(adding(8)).model_name
    for _ in range(5):
        assert answers(anna, name, 8)
    with pytest.raises(NotFound):
        bert.infer(name, {"x": X})
    with pytest.raises(NotFound):
        bert.infer("own-" + "1" * 40, {"x": X})
    after = told()
    was, whole = before[0].pop(2), after[0].pop(2)
    assert (whole["requests"], whole["served"]) == (was["requests"] + 2, was["served"])
    assert whole["failures"]["NOT_FOUND"] == was["failures"].get("NOT_FOUND", 0) + 2
    assert after == before
    assert name not in bert.openmetrics()
    assert name in anna.openmetrics()
    with own.client() as root:
        assert root.statistics(name)[0]["inference_count"] == 5, "others' tries are not among them"
        assert root.metrics()["whole"]["served"] >= 5


def test_what_two_bring_alike_is_stored_once_and_each_has_its_own(
    own: Service, anna: Client, bert: Client
) -> None:
    data = adding(9, nbytes=MIB)
    one, other = anna.upload(data), bert.upload(data)
    assert one.model_name != other.model_name
    assert (one.ready, one.engine, one.engine_why) == (other.ready, other.engine, other.engine_why)
    assert objects(own) == 1
    assert (names(anna), names(bert)) == ({one.model_name}, {other.model_name})
    with own.client() as root:
        assert {m["owner"] for m in root.models()} == {str(ANNA), str(BERT)}
    anna.infer(one.model_name, {"x": X})
    assert bert.statistics()[0]["inference_count"] == 0
    anna.remove(one.model_name)
    assert answers(bert, other.model_name, 9)
    bert.remove(other.model_name)
    assert objects(own) == 0


def test_quotas_are_kept_and_the_longest_unused_goes(own: Service, anna: Client, bert: Client) -> None:
    others = bert.upload(adding(10)).model_name
    brought = [anna.upload(adding(number)).model_name for number in (11, 12, 13)]
    with pytest.raises(ResourceExhausted, match=r"apps\.max_models .* last minute"):
        anna.upload(adding(14))
    assert names(anna) == set(brought), "nothing goes for what is refused"
    with pytest.raises(ResourceExhausted, match=r"9 MiB, .* apps\.disk_mib"):
        anna.upload(adding(1, nbytes=8 * MIB + 1))
    assert answers(bert, others, 10)
    own.configure(_settings(max_models=4))
    anna.upload(adding(14))
    with pytest.raises(ResourceExhausted, match="last minute"):
        bert_fills(bert)
    own.configure(_settings(max_models=3))


def bert_fills(bert: Client) -> None:
    for number in range(10):
        bert.upload(adding(20 + number, nbytes=3 * MIB))


def _settings(**apps: object) -> str:
    told = {"max_models": 3, "disk_mib": 8, "compile_seconds": 0, **apps}
    lines = "\n".join(f"{key} = {str(value).lower()}" for key, value in told.items())
    return f'[serve]\nengine = "fastest"\n[tuner]\nspawn = false\n[apps]\n{lines}\n'


def test_wrong_brings_change_nothing(own: Service, anna: Client, small_model: Path, tmp_path: Path) -> None:
    with pytest.raises(PermissionDenied, match="compiled files are taken from administrators only"):
        anna.upload(small_model)
    with pytest.raises(ModelRefused):
        anna.upload(b"nonsense")
    with pytest.raises(ModelRefused):
        anna.upload(adding(1)[:-20])
    with pytest.raises(InvalidArgument, match="engine"):
        anna.upload(adding(1), engine="npu")
    wrong = {"files": ["m.onnx"], "sha256": ["0" * 64]}
    assert _raw_bring(anna, wrong, adding(1)).startswith("the SHA-256 of 'm.onnx' is")
    refused: tuple[dict[str, Any], ...] = (
        {"files": ["m.onnx"], "sha256": ["0" * 63]},
        {"files": ["m.onnx"], "sha256": []},
        {"files": ["m.onnx"], "sha256": ["G" * 64]},
        {"files": [], "sha256": []},
        {"files": ["../m.onnx"], "sha256": ["0" * 64]},
        {"files": ["m.onnx"], "sha256": ["0" * 64], "parameters": {"precision": "fp8"}},
        {"files": ["m.onnx"], "sha256": ["0" * 64], "parameters": {"shapes": {"x": [0]}}},
    )
    for params in refused:
        assert _raw_bring(anna, params, adding(1))
    read_end, write_end = os.pipe()
    with pytest.raises(InvalidArgument, match="not a regular file"):
        asked(anna, "ModelBring", wrong, [read_end])
    os.close(read_end)
    os.close(write_end)
    assert names(anna) == set()
    wait_for(lambda: not list((own.state / "staging").iterdir()), "nothing to be left over", own)
    assert objects(own) == 0


def _raw_bring(connected: Client, params: dict[str, Any], data: bytes) -> str:
    """The sentence that it is refused with."""
    descriptor = os.memfd_create("m")
    os.write(descriptor, data)
    try:
        with pytest.raises(InvalidArgument) as told:
            asked(connected, "ModelBring", params, [descriptor])
    finally:
        os.close(descriptor)
    return str(told.value)


def test_names_that_models_of_apps_have_are_taken(own: Service, small_model: Path) -> None:
    with own.client() as root, pytest.raises(InvalidArgument, match="brought"):
        root.add(small_model, name="own-" + "a" * 40)


def test_members_remove_no_model_of_administrators(own: Service, anna: Client, small_model: Path) -> None:
    with own.client() as root:
        root.add(small_model, name="small")
        with pytest.raises(PermissionDenied, match="honed-admin"):
            anna.remove("small")
        assert anna.ready("small")
        root.remove("small")


def test_the_switch(own: Service, anna: Client) -> None:
    name = anna.upload(adding(2)).model_name
    own.configure(_settings(enabled=False))
    with pytest.raises(PermissionDenied, match="enabled in"):
        anna.upload(adding(2))
    assert answers(anna, name, 2)
    anna.remove(name)
    own.configure(_settings())


def test_each_user_has_an_engine_of_its_own(own: Service, anna: Client, bert: Client) -> None:
    """One whose process ends costs the others nothing."""
    one, other = anna.upload(adding(15)).model_name, bert.upload(adding(16)).model_name
    with own.client() as root:
        engines = {d["name"]: d["worker"] for d in root.status()["devices"] if d["models"]}
    assert len(engines) == 2
    pids = {name.rpartition(" ")[2]: worker["pid"] for name, worker in engines.items()}
    os.kill(pids[str(ANNA)], 9)
    with own.client() as root:
        while anna.ready(one) and not any(d["worker"]["restarts"] for d in root.status()["devices"]):
            pass  # the service does not know of it yet
    assert anna.upload(adding(15)).ready, "what is asked for now waits for the new process"
    assert answers(bert, other, 16)
    assert answers(anna, one, 15), "a new process serves it"
    with own.client() as root:
        again = {d["name"].rpartition(" ")[2]: d["worker"]["pid"] for d in root.status()["devices"]}
    assert again[str(BERT)] == pids[str(BERT)]
    assert again[str(ANNA)] != pids[str(ANNA)]


@pytest.mark.slow
def test_models_are_there_after_a_restart_and_then_compiled(
    tmp_path_factory: pytest.TempPathFactory, cache_dir: Path
) -> None:
    with for_users(tmp_path_factory, cache_dir, "\n[apps]\ncompile_seconds = 0\n") as service:
        with client(service, ANNA) as anna, client(service, CLEO) as cleo:
            one, other = anna.upload(adding(31)).model_name, cleo.upload(adding(32)).model_name
        service.kill()
        service.write_configuration(_settings(max_models=16, disk_mib=100, compile_seconds=600))
        service.restart()
        service.wait_listening()
        service.wait_ready()
        service.socket.chmod(0o777)
        with client(service, ANNA) as anna, client(service, CLEO) as cleo:
            assert (names(anna), names(cleo)) == ({one}, {other})
            assert answers(anna, one, 31)
            assert answers(cleo, other, 32)
            compiled(anna, one, service)
            compiled(cleo, other, service)
            assert answers(anna, one, 31)


def compiled(connected: Client, name: str, service: Service) -> None:
    wait_for(lambda: bool(connected.show(name)["kernels"]), f"{name} to be compiled", service)
