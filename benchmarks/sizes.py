"""The dense part of a two-stage detector: compiled for observed sizes, beside the CPU engine.

python -m benchmarks.sizes [--device SPEC] [--rows 100,50] [--met 100,80,50,20] [--records FILE]

A layer of 1024 on 256 x 7 x 7 features of each box, as in Mask R-CNN, after non-maximum suppression and
RoiAlign. Compiles specialisations for `--rows` boxes, whatever their times. Then runs the tail for each
number of `--met` boxes, with specialisations and without, in turns. Kernels need no trial, or have schedules
of `--records`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from tests.daemon.split_models import two_stage

from honed.machine.devices import Device, select
from honed.protocol.values import ObservedSizes
from honed.runtime import load
from honed.runtime.execution.executor import Executor
from honed.tuner.compiler.compile import CompileRequest, compile_file

from .running import Arrays, apart, in_turns

_TURNS = 40


def main() -> None:
    """Print a line for each specialisation, and for each number of boxes."""
    parser = argparse.ArgumentParser(prog="benchmarks.sizes", description=__doc__)
    parser.add_argument("--device")
    parser.add_argument("--rows", default="100,50")
    parser.add_argument("--met", default="100,80,50,20")
    parser.add_argument("--records", type=Path)
    arguments = parser.parse_args()
    device = select(arguments.device)
    with tempfile.TemporaryDirectory() as name:
        output = _compiled(Path(name), device, _numbers(arguments.rows), arguments.records)
        with load(output, device) as executor:
            print(f"{device.spec}; while compiling, in turns:")
            for form in executor.model.forms:
                times = form.times
                assert times is not None
                print(
                    f"- form of {form.sizes[0]} rows: {times.compiled_us / 1e3:.2f} ms with handing over, "
                    f"CPU engine {times.cpu_us / 1e3:.2f} ms, {times.compiled_us / times.cpu_us:.2f}"
                )
            print("| boxes | with forms, ms | CPU engine, ms | ratio | apart |")
            print("|---|---|---|---|---|")
            for count in _numbers(arguments.met):
                print(_row(executor, count), flush=True)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _compiled(folder: Path, device: Device, rows: list[int], records: Path | None) -> Path:
    path = two_stage(folder, channels=256, bins=7, hidden=1024, most=100)
    request = CompileRequest(
        path=path,
        output=folder / "sized.honed",
        profile=device.profile,
        device=device,
        shapes={},
        precision="fp32",
        filename=path.name,
        records=records,
        sizes=tuple(ObservedSizes(part=1, sizes=(count,)) for count in rows),
        keep_slower=True,
    )
    compile_file(request, lambda _stage, _done, _text: None)
    return request.output


def _row(executor: Executor, count: int) -> str:
    given = _boxes(executor, count)
    with_forms, without = (executor.run_behind(given, forms=forms) for forms in (True, False))
    [observed] = executor.observed
    assert observed.sizes == (count,)
    times = in_turns(
        {
            "forms": lambda: executor.run_behind(given),
            "cpu": lambda: executor.run_behind(given, forms=False),
        },
        _TURNS,
    )
    difference = max(apart(without[name], with_forms[name]) for name in without)
    return (
        f"| {count} | {times['forms'] * 1e3:.2f} | {times['cpu'] * 1e3:.2f} | "
        f"{times['forms'] / times['cpu']:.2f} | {difference:.1g} |"
    )


def _boxes(executor: Executor, count: int) -> Arrays:
    """Return outputs of the steps for an image with `count` objects that do not overlap."""
    rng = np.random.default_rng(0)
    made = {t.name: rng.normal(size=t.shape).astype(np.float32) for t in executor.model.outputs}
    cells = made["proposals"].shape[1]
    corners = np.arange(cells, dtype=np.float32)[:, None]
    made["proposals"][0] = corners / 8 + np.array([0, 0, 0.1, 0.1], np.float32)
    made["objectness"][...] = np.where(np.arange(cells) < count, 0.9, 0.1)
    return made


if __name__ == "__main__":
    main()
