"""Executes compiled files, in a process that may be lost.

`python -m benchmarks.devices.running FILES SPEC FIRST`: FILES is a folder. From file number FIRST on, in the
order of their names, prints two lines for each on standard output: its number before it is built, then the
results of its probes.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from honed.machine import devices
from honed.machine.devices import Device
from honed.protocol import strict
from honed.protocol.errors import DeviceError
from honed.runtime.compiled import modelfile
from honed.runtime.execution import verification
from honed.runtime.execution.executor import Executor


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """The result of one file: the largest error over probes and outputs, over an output's range.

    `wrong` describes the worst difference, if it is above the allowed one.
    """

    error: float | None = None
    wrong: str = ""
    failed: str = ""


def main(files: str, spec: str, first: str) -> int:
    """Execute the files from number `first` on, and print two lines for each."""
    with os.fdopen(os.dup(1), "w", buffering=1) as out:
        os.dup2(2, 1)  # Drivers print
        _execute_all(Path(files), spec, int(first), out)
    return 0


def _execute_all(files: Path, spec: str, first: int, out: TextIO) -> None:
    device = devices.select(spec)
    for number, path in enumerate(sorted(files.glob("*.honed"))):
        if number < first:
            continue
        out.write(f"{number}\n")
        out.write(json.dumps(strict.to_plain(_executed(path, device))) + "\n")


def _executed(path: Path, device: Device) -> Executed:
    try:
        with modelfile.read(path) as file, Executor(file, device) as executor:
            found = verification.check_probes(executor)
    except DeviceError as error:
        return Executed(failed=str(error))
    worst = max(found, key=lambda one: one.error / (one.tolerance or 1.0))
    return Executed(error=max(one.error for one in found), wrong="" if worst.right else str(worst))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
