"""Models that move between a device and the processor's cores: by made-up times, and in a real service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from honed.runtime import Client
from tests.daemon.running import Service, wait_for
from tests.pocl import ALL, ONE, two_drivers

from .test_sessions import IDLE, product

CONFIG = f'[serve]\nengine = "fastest"\n[service]\ndevice = "{ONE}"\nfallback = "{ALL}"\n' + IDLE
X = np.arange(128, dtype=np.float32).reshape(2, 64)
# Times are real, and what is concluded from them is given: whether a form on the cores is the fastest.
FASTEST_ON_CORES = """
import sys

if "honed.daemon.service" in sys.orig_argv:
    from honed.daemon.serving import selection

    class Deciding(selection.Comparison):
        holds = not {faster}

    selection.Comparison = Deciding
    selection.compiled_serves = lambda *_, **__: True
"""


def lane(client: Client, device: str) -> dict[str, Any]:
    (found,) = [each for each in client.status()["devices"] if device in (each["name"], each["spec"])]
    return dict(found)


def drivers(process: psutil.Process) -> set[str]:
    """The drivers that a process has loaded, by the files of `two_drivers`."""
    return {Path(m.path).name for m in process.memory_maps(grouped=False) if "vendors" in m.path}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "vendors").mkdir()
    return {**two_drivers(tmp_path / "vendors"), "PYTHONPATH": str(tmp_path)}


@pytest.mark.slow
@pytest.mark.service
@pytest.mark.opencl
def test_a_model_moves_to_the_cores_and_back_when_their_driver_is_gone(
    start_service: Callable[..., Service], tmp_path: Path, environment: dict[str, str]
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FASTEST_ON_CORES.format(faster=True))
    service = start_service(config=CONFIG, environment=environment)
    with service.client() as client:
        client.add(product(tmp_path / "m.onnx", 2, 2.0))

        def right() -> None:
            np.testing.assert_array_equal(client.infer("m", {"x": X})["y"], 2 * X)

        wait_for(lambda: lane(client, ALL)["models"] == ["m"], "the model to move", service, seconds=100)
        print(client.show("m")["placement"], client.history("m"), client.status()["devices"])
        print(service.log)
        right()
    assert 0
