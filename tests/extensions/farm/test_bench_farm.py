"""The bench of a device that is not here, in a farm, with Mesa's compiler where it has been made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from honed.farm.boards import FarmChoice, join
from honed.protocol.errors import DeviceError
from honed.valhall.compiler import ROOT
from tests.tuner.running import write_convolution

from .running import RunningFarm

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "root/server").exists(), reason="benchmarks/valhall/build was not run"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the offline compiler needs root"),
]


def test_the_cores_of_two_machines_predict(farm: RunningFarm, tmp_path: Path) -> None:
    workers = [farm.worker("--bench=mali-g610") for _ in range(2)]
    for worker in workers:
        worker.hear_until("in the farm at")
    with pytest.raises(DeviceError, match="there is the bench of mali-g610 on "):
        join(FarmChoice(url=farm.url, certificates=farm.certificates / "pc"))
    model, output = write_convolution(tmp_path / "m.onnx"), tmp_path / "m.honed"
    command = [sys.executable, "-m", "honed.tool.main", "tune", str(model), "--bench", "mali-g610"]
    command += ["--farm", farm.url, "--certificates", str(farm.certificates / "pc")]
    done = subprocess.run(
        [*command, "--trials", "32", "--json", "-o", str(output)],
        env=os.environ | {"STATE_DIRECTORY": str(tmp_path), "CACHE_DIRECTORY": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    said = json.loads(done.stdout)
    assert (said["predicted"], said["farm"], said["trials"]) == (True, farm.url, 32)
    assert said["records"] == str(tmp_path / "predicted.sqlite")
    assert output.exists()
    assert [worker.stop() for worker in workers] == [0, 0]
