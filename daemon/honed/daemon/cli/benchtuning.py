"""`hone tune FILE --bench DEVICE`: a file tuned for a device that is not here, without the service."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .output import line
from .parser import UsageError, add_compile_options, check_calibration, unique

if TYPE_CHECKING:
    from rich.console import Console

    from .tuneview import Run

BENCHES = ("mali-g610",)  # as the compiler has them
_RECORDS = "predicted.sqlite"  # apart from what was measured


def add_options(tune: argparse.ArgumentParser) -> None:
    """What `tune` takes besides with --bench."""
    group = tune.add_argument_group("options of tuning for a device that is not here")
    group.add_argument(
        "--bench",
        metavar="DEVICE",
        choices=BENCHES,
        help=f"predict times for this device from machine code ({', '.join(BENCHES)}); M is an ONNX file",
    )
    group.add_argument(
        "--bench-root",
        metavar="DIR",
        type=Path,
        help="where benchmarks/valhall/build has made the offline compiler",
    )
    group.add_argument("-o", "--output", metavar="OUT", type=Path, help="the .honed file to write")
    add_compile_options(group)


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options of the bench where there is none, and for one without a file."""
    given = {
        "--bench-root": arguments.bench_root is not None,
        "--output": arguments.output is not None,
        "--shape": bool(arguments.shape),
        "--precision": arguments.precision != "auto",
        "--calibration": arguments.calibration is not None,
    }
    check_calibration(arguments)
    if arguments.bench is None:
        for name, is_given in given.items():
            if is_given:
                raise UsageError(f"{name} goes with --bench; see 'hone tune --help'")
    elif not Path(arguments.model).is_file():
        raise UsageError(f"--bench takes an ONNX file, and there is no file {arguments.model}")


def command(arguments: argparse.Namespace) -> list[str]:
    """What the tuning child is told."""
    from honed.daemon.places import places

    found = places(os.environ, os.geteuid())
    options = [f"--bench={arguments.bench}", f"--precision={arguments.precision}"]
    if arguments.calibration is not None:
        options.append(f"--calibration={arguments.calibration}")
    if arguments.bench_root is not None:
        options.append(f"--bench-root={arguments.bench_root}")
    if arguments.output is not None:
        options.append(f"--output={arguments.output}")
    for name, sizes in unique("--shape", arguments.shape).items():
        options.append(f"--shape={name}={','.join(map(str, sizes))}")
    options += [f"--records={found.state_dir / _RECORDS}", f"--cache-dir={found.cache_dir}"]
    return [*options, "--", arguments.model]


def document(done: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """What --json says of a run."""
    from honed.daemon.places import places

    return {
        "model": run.model,
        "predicted": True,
        "output": done["output"],
        "stopped": run.stopping,
        **{key: value for key, value in done.items() if key not in ("event", "output", "tasks", "model")},
        "estimate": run.estimate,
        "ranking": run.ranking,
        "notes": run.notes,
        "records": str(places(os.environ, os.geteuid()).state_dir / _RECORDS),
        "tasks": list(run.rows.values()),
    }


def print_result(console: Console, found: Mapping[str, Any]) -> None:
    """What came of it, in a sentence or two."""
    sentence = str(found["sentence"])
    line(console, f"{sentence[:1].upper()}{sentence[1:]}.")
    if found["output"]:
        line(console, f"{found['output']} is written; its answers are checked where it is added.")
