"""Convolutions in the model's layout and in blocks of channels: `python -m benchmarks.layouts`.

For each layer, what takes least of so many schedules in each layout, the tables' first. "Alone" is the
convolution's own launch, as if nothing had to be padded before it or cropped behind it. By the bench of a
Mali (nothing runs: docs/measurements.md says what its times are worth), or with --device on a device.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tvm import tirx

from honed.machine.profile import DeviceProfile
from honed.tuner.lower.opencl import Lowered, LoweringFailed, lower_function
from honed.tuner.lower.schedule import narrow_indices
from honed.tuner.lower.target import target_for
from honed.tuner.schedules import first_kernels
from honed.tuner.search.draw import Drawing
from honed.tuner.valhall.compiler import ROOT

from .layers import LAYERS, Layer, blocked, plain
from .timing import Bench, Board, Timer

_SEED = 1
_SKETCHES = {"mali": 2}
_WEIGHTS = 1  # the parameter that is constant


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description=__doc__)
    parser.add_argument("--device", help="to run on; without, the bench of a Mali-G610")
    parser.add_argument("--root", type=Path, default=ROOT, help=f"of the bench's compiler ({ROOT})")
    parser.add_argument("--draws", type=int, default=8, help="schedules in each layout (8)")
    parser.add_argument("--only", default="", help="layers whose names contain this")
    parser.add_argument("--dtype", choices=("float16", "float32"), default="float16")
    options = parser.parse_args()
    with Board(options.device) if options.device else Bench(options.root) as timer:
        widest = timer.profile.rules.max_vector_bytes // (2 if options.dtype == "float16" else 4)
        lanes = sorted({widest, 4})
        rows = [
            _row(layer, timer, options.dtype, lanes, options.draws)
            for layer in LAYERS
            if options.only in str(layer)
        ]
    table = Table("layer", "the model's, us", *_heads(lanes), "model's / blocks", "alone")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)
    return 0


def _heads(lanes: list[int]) -> Iterator[str]:
    for n in lanes:
        yield f"blocks of {n}, us"
        yield "alone"


def _row(layer: Layer, timer: Timer, dtype: str, lanes: list[int], count: int) -> list[str]:
    ways = [plain(layer, dtype), *(blocked(layer, dtype, n) for n in lanes)]
    kernels = [list(_kernels(func, timer.profile, count)) for func in ways]
    mine, *others = timer.least(ways, kernels, _WEIGHTS)
    best, alone = (min(getattr(one, name) for one in others) for name in ("all", "alone"))
    cells = [text for one in others for text in (f"{one.all * 1e6:.1f}", f"{one.alone * 1e6:.1f}")]
    row = [str(layer), f"{mine.all * 1e6:.1f}", *cells, f"{mine.all / best:.2f}", f"{mine.all / alone:.2f}"]
    print(" | ".join(row), flush=True)
    return row


def _kernels(func: tirx.PrimFunc, profile: DeviceProfile, count: int) -> Iterator[Lowered]:
    """So many schedules at most: what is first served, then draws from the first sketches by turns.

    Those of a Mali that come first are made for such a function; all of a GPU's share their operands.
    """
    target = target_for(profile)
    yield first_kernels(func, "main", target, profile)[1]
    found = 1
    drawing = Drawing(narrow_indices(func), profile, _SEED)
    sketches = min(drawing.sketches, _SKETCHES.get(profile.rules.family, drawing.sketches))
    while found < count:
        before = found
        for one in (one for n in range(sketches) for one in islice(drawing.of(n), 1)):
            if found == count:
                return
            try:
                yield lower_function(one.scheduled, "main", target, profile)
            except LoweringFailed:
                continue
            found += 1
        if found == before:
            return


if __name__ == "__main__":
    raise SystemExit(main())
