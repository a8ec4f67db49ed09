"""The same kernels executed on several OpenCL devices: `python -m benchmarks.devices`.

Without --model: the Valhall bench's tasks with schedules of the Mali's space, the first served and draws of
each sketch, in fp32 and fp16. With it, a whole model as `hone compile --precision` makes it for a Mali. All
are compared with an independent reference on this machine's devices and on rusticl in its root
(`benchmarks/devices/build`). Nothing is timed, and nothing runs on a Mali.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.supervising import work_off
from honed.protocol.errors import HonedError
from honed.tuner.frontend import Precision

from . import beds, kernels, models
from .beds import Bed
from .kernels import Made
from .running import Executed

_SECONDS = 7200.0  # Limit of one device
_KERNEL_SECONDS, _MODEL_SECONDS = 120.0, 1800.0  # Limits of a file; llvmpipe builds a kernel in seconds
_WIDTH = 120  # Columns, at least
_PRECISIONS: tuple[Precision, ...] = ("fp16", "fp32")  # Sorted like their files' names


def main() -> int:
    """Run the command line: 0 where nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=__doc__)
    parser.add_argument("--device", action="append", default=[], help="of this machine (all), repeatable")
    parser.add_argument("--root", type=Path, default=beds.ROOT, help=f"that rusticl is in ({beds.ROOT})")
    parser.add_argument("--draws", type=int, default=2, help="schedules drawn from each sketch (2)")
    parser.add_argument("--only", default="", help="tasks whose names contain this")
    parser.add_argument("--model", type=Path, action="append", default=[], help="an ONNX file, repeatable")
    parser.add_argument("--precision", choices=("auto", *_PRECISIONS), default="auto", help="of the model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="honed-devices-") as name:
        folder = Path(name)
        try:
            found = [*beds.here(options.device, folder), beds.rusticl(options.root, folder)]
        except HonedError as error:
            print(f"devices: {error}", file=sys.stderr)
            return 2
        if options.model:
            return _models(options.model, options.precision, folder, found)
        made = [
            one
            for precision in _PRECISIONS
            for one in kernels.write(folder, precision, options.only, options.draws)
        ]
        return _kernels(made, found)


def _kernels(made: Sequence[Made], found: Sequence[Bed]) -> int:
    executed = [_executed(bed, len(made), _KERNEL_SECONDS) for bed in found]
    table = Table("task", "schedules", "allowed", *(f"{bed.name}: right, error" for bed in found))
    for (task, precision), group in groupby(range(len(made)), lambda n: (made[n].task, made[n].precision)):
        numbers = list(group)
        cells = [_summed([came[n] for n in numbers]) for came in executed]
        table.add_row(f"{task} {precision}", str(len(numbers)), f"{made[numbers[0]].tolerance:.2g}", *cells)
    Console(width=max(_WIDTH, Console().width)).print(table)
    _explain(found, executed, [f"{one.task} {one.precision}, {one.schedule}" for one in made])
    return int(any(one.wrong for came in executed for one in came))


def _summed(came: Sequence[Executed]) -> str:
    """Return the number of right ones and the largest error, as in `12 of 12, 1.2e-06`."""
    if all(one.error is None for one in came):
        return "not executed"
    right = sum(one.error is not None and not one.wrong for one in came)
    return f"{right} of {len(came)}, {max(one.error or 0.0 for one in came):.1e}"


def _models(paths: Sequence[Path], precision: Precision, folder: Path, found: Sequence[Bed]) -> int:
    made = [models.write(folder / f"{n:03}.honed", path, precision) for n, path in enumerate(paths)]
    executed = [_executed(bed, len(made), _MODEL_SECONDS) for bed in found]
    table = Table("model", "arithmetic", "allowed", *(f"{bed.name}: error" for bed in found))
    for n, one in enumerate(made):
        came = [each[n] for each in executed]
        cells = ["not executed" if each.error is None else f"{each.error:.2g}" for each in came]
        table.add_row(one.name, one.arithmetic, f"{one.tolerance:.2g}", *cells)
    Console(width=max(_WIDTH, Console().width)).print(table)
    for one in made:
        print(f"{one.name}: {one.why}")
    _explain(found, executed, [one.name for one in made])
    return int(any(one.wrong for came in executed for one in came))


def _explain(found: Sequence[Bed], executed: Sequence[Sequence[Executed]], names: Sequence[str]) -> None:
    """Print the reasons of files that were not executed, and the errors of wrong ones."""
    for bed, came in zip(found, executed, strict=True):
        for why, times in Counter(one.failed for one in came if one.failed).items():
            print(f"{bed.name}, {times} not executed: {why}")
        for name, one in zip(names, came, strict=True):
            if one.wrong:
                print(f"{bed.name}, wrong: {name}: {one.wrong}")


def _executed(bed: Bed, count: int, seconds: float) -> list[Executed]:
    return work_off(Executed, [*bed.command, bed.spec], count, _SECONDS, each_seconds=seconds)


if __name__ == "__main__":
    raise SystemExit(main())
