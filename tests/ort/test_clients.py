"""Programs that others wrote, unmodified, beside a real service: the answers that they give alone."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from benchmarks.native.programs import PROGRAMS, install, near, run

from tests.daemon.running import IDLE, NO_TUNER, Service, serving

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
OFTEN = "2.5"  # an allowance by which runs are routed on a busy machine, too
TRIES = 10


@pytest.fixture(scope="module")
def programs(made_once: Made) -> Path:
    """The folder with all programs and their models."""
    return made_once("native-programs", install)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Service]:
    """A service that compiles what programs bring as soon as nobody asks."""
    with serving(tmp_path_factory, cache_dir, config=CONFIG) as running:
        yield running


@pytest.mark.parametrize("name", PROGRAMS)
def test_answers_are_the_same(programs: Path, preload: Path, service: Service, name: str) -> None:
    """Whether runs are routed or not, a program gives the answers that it gives alone."""
    library = preload / "libhoned-ort.so"
    alone = run(programs, name, 2)
    beside = run(programs, name, 10, library, str(service.socket), HONED_ORT_ALLOWANCE=OFTEN)
    assert near(beside.answer, alone.answer)
    assert "runs routed" in beside.log


def test_runs_are_routed_whatever_happens_to_the_service(
    programs: Path, preload: Path, service: Service
) -> None:
    """The service is stopped, killed and started again while a program runs: its answers stay."""
    name, library = "onnxruntime-node", preload / "libhoned-ort.so"
    alone = run(programs, name, 2)
    for _ in range(TRIES):  # until its model is compiled
        service.hasten()
        beside = run(programs, name, 30, library, str(service.socket), HONED_ORT_ALLOWANCE=OFTEN)
        assert near(beside.answer, alone.answer)
        if beside.routed:
            break
    assert beside.routed
    with ThreadPoolExecutor(1) as others:
        going_on = others.submit(
            run, programs, name, 40, library, str(service.socket), HONED_ORT_ALLOWANCE=OFTEN
        )
        time.sleep(10)
        service.process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        service.process.send_signal(signal.SIGCONT)
        time.sleep(5)
        service.kill()
        time.sleep(2)
        service.restart()
        disturbed = going_on.result()
    assert near(disturbed.answer, alone.answer)
    assert max(disturbed.times) < 5000
