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

    from honed.jobs.commands import Tune
    from honed.jobs.events import Tuned

    from .tuneview import TuningRun

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


def job(arguments: argparse.Namespace, **budget: Any) -> Tune:
    """For the tuning child."""
    from honed.daemon.places import places
    from honed.jobs.commands import Tune

    found = places(os.environ, os.geteuid())
    return Tune(
        file=Path(arguments.model),
        shapes=unique("--shape", arguments.shape),
        precision=arguments.precision,
        calibration=arguments.calibration,
        output=arguments.output,
        bench=arguments.bench,
        bench_root=arguments.bench_root,
        records=found.state_dir / _RECORDS,
        cache_dir=found.cache_dir,
        **budget,
    )


def document(done: Tuned, run: TuningRun) -> dict[str, Any]:
    """What --json says of a run."""
    from honed.daemon.places import places

    from .tuneview import told

    return {
        "model": run.model,
        "predicted": True,
        "output": done.output,
        **told(done, run),
        "records": str(places(os.environ, os.geteuid()).state_dir / _RECORDS),
    }


def print_result(console: Console, found: Mapping[str, Any]) -> None:
    """What came of it, in a sentence or two."""
    sentence = str(found["sentence"])
    line(console, f"{sentence[:1].upper()}{sentence[1:]}.")
    if found["output"]:
        line(console, f"{found['output']} is written; its answers are checked where it is added.")
