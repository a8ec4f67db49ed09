"""The tuner as a library, on functions that broke other tuners; docs/dev/library.md's example runs, too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tvm")

from tvm import tirx

import honed.tuner
from honed.machine.devices import Device
from honed.runtime.errors import InvalidArgument
from tests.tuner.liars import searched
from tests.tuner.running import ROOT

pytestmark = [pytest.mark.tvm, pytest.mark.opencl]


def tuned(func: tirx.PrimFunc, device: Device, cache_dir: Path, folder: Path) -> honed.tuner.TunedFunction:
    events: list[dict[str, Any]] = []
    found = honed.tuner.tune_function(
        func,
        device=device.spec,
        trials=4,
        records=folder / "records.sqlite",
        cache_dir=cache_dir,
        emit=events.append,
    )
    assert [e for e in events if e["event"] in ("broke", "condemned")] == []
    assert found.failures == {}
    assert "__kernel" in found.lowered.source
    return found


@pytest.mark.slow
def test_a_convolution_that_was_measured_impossibly_fast(
    device: Device, cache_dir: Path, tmp_path: Path
) -> None:
    """Case 2: 1x1, 348 to 2084 channels, 12x12, with bias and x sigmoid(x)."""
    found = tuned(searched.pointwise_convolution(), device, cache_dir, tmp_path)
    assert found.trials == 4
    assert found.best_s <= found.default_s
    assert (found.trace is None) == (found.scheduled is None) == (found.best_s == found.default_s)


@pytest.mark.slow
def test_a_reduction_of_two_elements_that_ended_a_run(
    device: Device, cache_dir: Path, tmp_path: Path
) -> None:
    """Case 4: the sum of the products of two vectors of two elements."""
    found = tuned(searched.product_of_two(), device, cache_dir, tmp_path)
    assert found.best_s <= found.default_s


@pytest.mark.slow
def test_another_call_goes_on_from_the_records(device: Device, cache_dir: Path, tmp_path: Path) -> None:
    func = searched.functions()["softmax"]
    first = tuned(func, device, cache_dir, tmp_path)
    again = honed.tuner.tune_function(
        func, device=device.spec, trials=0, records=tmp_path / "records.sqlite", cache_dir=cache_dir
    )
    assert again.trials == 0
    if first.trace is not None and again.trace is not None:
        assert again.trace == first.trace


def test_a_function_that_is_no_task_is_refused() -> None:
    func = searched.product_of_two()
    with pytest.raises(InvalidArgument, match="last 4 cannot be outputs"):
        honed.tuner.tune_function(func, outputs=4)


@pytest.mark.slow
def test_the_documented_example_runs(cache_dir: Path) -> None:
    text = (ROOT / "docs" / "dev" / "library.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    short = example.replace("trials=64", f"trials=3, cache_dir=Path({str(cache_dir)!r})")
    assert short != example
    done = subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path\n{short}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GFLOP/s" in done.stdout


@pytest.mark.parametrize("module", ["honed.tuner", "honed.tuner.__main__"])
def test_importing_the_package_does_not_import_tvm(module: str) -> None:
    """Nor does what its jobs have in common: many need none, and compiling loads it in a way of its own."""
    code = f"import sys, {module}; sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
