"""Parts of a detector whose sizes depend on the data, compiled by a real service for those that it meets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.runtime import Client
from honed.tool.main import main
from tests.daemon.running import IDLE, NO_TUNER, Service, serving, wait_for
from tests.daemon.split_models import images, reference, two_stage

pytestmark = [pytest.mark.slow, pytest.mark.service, pytest.mark.opencl, pytest.mark.tvm]
_EMPTY, *_SOME = images(7)


def config(engine: str) -> str:
    """Idle as soon as nobody asks; parts are compiled for two sizes, after four requests."""
    return f"""
[serve]
engine = "{engine}"
[variants]
requests = 4
sizes = 2
[usage]
save_seconds = 0.2
{IDLE}{NO_TUNER}"""


def dense(client: Client) -> dict[str, Any]:
    """The part that is compiled for sizes."""
    [found] = [part for part in client.show("two_stage")["parts"] if part["sized"]]
    return dict(found)


def boxes(client: Client, path: Path, image: Any) -> int:
    """How many there are, which are as ONNX Runtime has them."""
    found, expected = client.infer("two_stage", {"image": image}), reference(path, {"image": image})
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    return len(expected["boxes"])


def others() -> Iterator[Any]:
    """Images of none of those numbers of boxes that were met, and of more than any."""
    yield from images(5, seed=11)[1:]


@dataclasses.dataclass(frozen=True)
class Detector:
    """The service, and the model's file; `met` are the numbers of boxes that it was asked for."""

    service: Service
    path: Path
    met: frozenset[int]


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Detector]:
    """A detector that was asked for some numbers of boxes, and is compiled for two of them by now."""
    path = two_stage(tmp_path_factory.mktemp("models"))
    with serving(tmp_path_factory, cache_dir, config=config("gpu")) as service, service.client() as client:
        client.add(path)
        assert dense(client)["forms"] == []
        met = frozenset(boxes(client, path, image) for image in (_EMPTY, *_SOME))
        assert 0 in met
        wait_for(lambda: dense(client)["forms"], "a form of the dense part", service, seconds=300.0)
        yield Detector(service, path, met)


def test_the_dense_part_is_compiled_for_sizes_that_were_met(sized: Detector) -> None:
    with sized.service.client() as client:
        part = dense(client)
        assert part["by_rows"]
        assert 1 <= len(part["forms"]) <= 2
        for form in part["forms"]:
            assert form["sizes"][0] in sized.met - {0}
            assert form["compiled_us"] > 0 < form["cpu_us"]
        history = client.history("two_stage")
        assert history["version"] >= 2, "another where it was compiled before all sizes were met"
        assert "sizes that its parts meet" in history["versions"][-1]["why"]


def test_it_is_right_for_every_number_of_boxes(sized: Detector) -> None:
    with sized.service.client() as client:
        assert boxes(client, sized.path, _EMPTY) == 0
        for image in _SOME:
            assert boxes(client, sized.path, image) in sized.met
        assert {boxes(client, sized.path, image) for image in others()} - sized.met


def test_it_is_right_after_the_worker_was_killed(sized: Detector) -> None:
    with sized.service.client() as client:
        boxes(client, sized.path, _SOME[1])
        worker = sized.service.worker
        assert worker is not None
        worker.kill()
        for image in (_EMPTY, *_SOME[:3]):
            boxes(client, sized.path, image)
        assert dense(client)["forms"]


def test_its_sizes_are_shown(sized: Detector, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    socket = f"--socket={sized.service.socket}"
    drawing = tmp_path / "graph.dot"
    assert main([socket, "show", "two_stage", "--graph", "-o", str(drawing)]) == 0
    with sized.service.client() as client:
        sizes = [form["sizes"][0] for form in dense(client)["forms"]]
    drawn = drawing.read_text()
    assert "dense part" in drawn
    assert all(f"size {n}" in drawn for n in sizes)
    capsys.readouterr()
    assert main([socket, "show", "two_stage"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"compiled for size {n}" in told for n in sizes)


def test_it_keeps_its_forms_over_a_restart(sized: Detector) -> None:
    with sized.service.client() as client:
        before = dense(client)["forms"]
    sized.service.kill()
    sized.service.restart()
    sized.service.wait_listening()
    sized.service.wait_ready()
    with sized.service.client() as client:
        assert dense(client)["forms"] == before
        boxes(client, sized.path, _SOME[2])
