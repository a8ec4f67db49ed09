"""Models beside tinygrad on OpenCL: `python -m benchmarks.tinygrad --python PYTHON MODEL.onnx...`.

tinygrad has an interpreter of its own (`python3 -m venv V; V/bin/pip install tinygrad numpy`), and wants
clang (`CC=clang`) where a model has constants to compute. It runs the model's operators as its own scheduler
fuses them, captured by its JIT, on the OpenCL device that it chooses, with `--beam N` after a search over its
kernels. Ours are first served. Both take turns; printed are medians of whole inferences, from arrays of the
host to arrays of the host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.running import Arrays, apart, first_served, in_turns, made_up, normalised, ready
from honed.machine import devices
from honed.machine.devices import Device

_CHILD = Path(__file__).parent / "child.py"
_WARM = 3  # runs of each before turns begin, as in `in_turns`


class Theirs:
    """tinygrad in a process of its own, with the outputs that it gave first."""

    def __init__(self, child: subprocess.Popen[str], outputs: Path) -> None:
        self._child = child
        self.device = self._told()
        with np.load(outputs) as found:
            self.outputs: Arrays = dict(found)
        self.seconds: list[float] = []

    def run(self) -> None:
        """Run once; what it says that took goes to `seconds`."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        self.seconds.append(float(self._told()))

    def _told(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit("tinygrad's process ended; what it wrote above says why")
        return line.strip()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinygrad", description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--python", required=True, metavar="FILE", help="an interpreter that has tinygrad")
    parser.add_argument("--beam", type=int, default=0, help="how wide tinygrad searches (0: not)")
    parser.add_argument("--device", help="an OpenCL device's spec (the best there is)")
    parser.add_argument("--turns", type=int, default=30, help="of each (30)")
    options = parser.parse_args()
    device = devices.select(options.device)
    print("| model | honed, ms | tinygrad, ms | its device | its speed is ours / | apart |")
    print("|" + "---|" * 6, flush=True)
    for path in options.models:
        _report(path, options.python, options.beam, device, options.turns)
    return 0


def _report(path: Path, python: str, beam: int, device: Device, turns: int) -> None:
    model = normalised(path, device.profile)
    given = made_up(model)
    with _started(path, given, python, beam) as theirs:
        ours = ready(model, first_served(model, device.profile), device)
        found = ours.run(given)
        differs = max(apart(theirs.outputs[name], found[name]) for name in found)
        mine = in_turns({"honed": partial(ours.run, given), "tinygrad": theirs.run}, turns)["honed"]
        other = median(theirs.seconds[_WARM:])
        print(
            f"| {path.stem} | {1e3 * mine:.2f} | {1e3 * other:.2f} | {theirs.device} | {other / mine:.2f} | "
            f"{differs:.1e} |",
            flush=True,
        )
        ours.close()


@contextmanager
def _started(path: Path, given: Arrays, python: str, beam: int) -> Iterator[Theirs]:
    """Tinygrad with a model, ready to run it."""
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(inputs, allow_pickle=False, **given)
        command = [python, str(_CHILD), str(path), str(inputs), str(outputs)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"DEV": "CL", "BEAM": str(beam)}
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child:
            try:
                yield Theirs(child, outputs)
            finally:
                child.kill()


if __name__ == "__main__":
    raise SystemExit(main())
