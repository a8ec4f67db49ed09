"""Programs that others wrote, unmodified, beside a real service: the answers that they give alone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from benchmarks.beside.comparison import Program, Running, near
from benchmarks.native.programs import install, programs

from tests.daemon.running import IDLE, NO_TUNER, Service, serving, wait_for

from .conftest import Made

pytestmark = [
    pytest.mark.slow,
    pytest.mark.service,
    pytest.mark.opencl,
    pytest.mark.tvm,
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm"),
    pytest.mark.timeout(1800),
]
CONFIG = IDLE + NO_TUNER
NAMES = ("transformers.js", "onnxruntime-node", "sherpa-onnx-node", "sherpa-onnx", "piper_phonemize")
OFTEN = "10"  # an allowance, and so deadlines, by which runs are routed on a busy machine, too
SECONDS = 8.0


@pytest.fixture(scope="module")
def every(made_once: Made, preload: Path) -> Mapping[str, Program]:
    """All programs from npm and PyPI, with their models."""
    return programs(made_once("native-programs", install), preload / "libhoned-ort.so")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A service that compiles what programs bring as soon as nobody asks."""
    with serving(tmp_path_factory, cache_dir, config=CONFIG) as running:
        yield running


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same(
    every: Mapping[str, Program], service: Service, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether runs are routed or not, a program gives the answers that it gives alone."""
    monkeypatch.setenv("HONED_ORT_ALLOWANCE", OFTEN)

    def answered() -> int:
        with service.client() as client:
            return sum(each["inference_count"] for each in client.statistics())

    before = answered()  # Of programs that have ended
    with Running(every[name]("")) as alone, Running(every[name](str(service.socket))) as beside:

        def is_routed() -> bool:
            until = time.monotonic() + 1
            while time.monotonic() < until:
                beside.use()
                assert near(beside.found, alone.found)
            return answered() > before

        if name == "onnxruntime-node":
            wait_for(is_routed, "its runs to be routed", service)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            is_routed()
        ended = beside.end()
    assert ended.runs >= beside.uses
    assert name != "onnxruntime-node" or ended.routed
