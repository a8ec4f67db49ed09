"""`hone tune FILE --bench` with Mesa's compiler, where it has been made."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import ScheduleProvenance, ScheduleSource
from honed.valhall.bench import DRIVER
from honed.valhall.compiler import ROOT, OfflineCompiler
from tests.tuner.running import write_convolution

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "root/server").exists(), reason="benchmarks/valhall/build was not run"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the offline compiler needs root"),
]


def test_logarithms_are_built_though_tables_are_not() -> None:
    kernel = (
        "#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n"
        "__kernel void f(__global float4* a, __global half* b)\n"
        "{ a[0] = log(a[0]) + log2(a[1]); b[0] = log10(b[0]); }"
    )
    with OfflineCompiler(ROOT, jobs=1) as compiler:
        assert "fma" in compiler.build(kernel).result().stats


def test_a_file_is_tuned_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    """Its records are those of predictions, and the file is compiled with the best of them, unproven."""
    # What is first served of a product leaves nothing to find.
    model, output = write_convolution(tmp_path / "m.onnx"), tmp_path / "m.honed"
    command = [sys.executable, "-m", "honed.tool.main", "tune", str(model), "--bench", "mali-g610"]
    done = subprocess.run(
        [*command, "--trials", "32", "--json", "-o", str(output)],
        env=os.environ | {"STATE_DIRECTORY": str(tmp_path), "CACHE_DIRECTORY": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    said = json.loads(done.stdout)
    assert said["predicted"]
    assert said["trials"] == 32
    assert "no answer was checked" in said["sentence"]
    assert said["model"] == "m.onnx"
    assert said["estimate"]["now_us"] < said["estimate"]["before_us"]
    records = tmp_path / "predicted.sqlite"
    assert said["records"] == str(records)
    with closing(sqlite3.connect(records)) as database:
        drivers = database.execute("SELECT DISTINCT driver FROM candidates").fetchall()
        in_flight = database.execute("SELECT COUNT(*) FROM candidates WHERE state = 'in-flight'").fetchone()
    assert drivers == [(DRIVER,)]
    assert in_flight == (0,)
    with modelfile.read(output) as file:
        compiled = file.model
    assert compiled.device.identity.driver_version == DRIVER
    assert any(
        ScheduleProvenance.parse(kernel.schedule).source is ScheduleSource.PREDICTED
        for kernel in compiled.kernels
    )
    assert compiled.proof is not None
    assert compiled.proof.device is None
