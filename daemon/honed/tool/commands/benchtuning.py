"""`hone tune FILE --bench DEVICE` and `--farm URL`: a file tuned elsewhere than on this machine's device."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

from honed.daemon.settings.places import places
from honed.jobs.commands import Tune
from honed.runtime.calling.files import ExportedFiles
from honed.tool.parser import UsageError, add_compile_options, unique

BENCHES = ("mali-g610",)  # as the compiler has them
_RECORDS = "predicted.sqlite"  # apart from what was measured
_CERTIFICATES = "farm"  # their folder, beside honed.toml
_FARM_RECORDS = Path("farm", "records.sqlite")  # `hone records export --state-dir` finds them


def add_options(tune: argparse.ArgumentParser) -> None:
    """What `tune` takes besides with --bench."""
    group = tune.add_argument_group("options of tuning a file for a device that is not here")
    group.add_argument(
        "--bench",
        metavar="DEVICE",
        choices=BENCHES,
        help=f"predict times for this device from machine code ({', '.join(BENCHES)}); M is an ONNX file",
    )
    add_bench_root(group)
    group.add_argument(
        "--farm",
        metavar="URL",
        help="have the machines of this farm measure, or with --bench predict; M may be an ONNX file",
    )
    add_certificates(group)
    group.add_argument(
        "--device", metavar="NAME", help="part of the device's name, where a farm has boards of several"
    )
    group.add_argument("-o", "--output", metavar="OUT", type=Path, help="the .honed file to write")
    add_compile_options(group)


def add_bench_root(parser: argparse._ActionsContainer) -> None:
    """--bench-root."""
    parser.add_argument(
        "--bench-root",
        metavar="DIR",
        type=Path,
        help="where benchmarks/valhall/build has made the offline compiler",
    )


def add_certificates(parser: argparse._ActionsContainer) -> None:
    """--certificates."""
    parser.add_argument(
        "--certificates",
        metavar="DIR",
        type=Path,
        help="folder with ca.pem, cert.pem and key.pem for TLS (default: farm beside honed.toml)",
    )


def certificates(arguments: argparse.Namespace) -> Path:
    """Their folder."""
    given: Path | None = arguments.certificates
    return given or places(os.environ, os.geteuid()).config.parent / _CERTIFICATES


def check(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options of bench and farm where there is none, and for these without a file."""
    given = {
        "--bench-root": arguments.bench_root is not None,
        "--certificates": arguments.certificates is not None,
        "--device": arguments.device is not None,
        "--output": arguments.output is not None,
        "--shape": bool(arguments.shape),
        "--precision": arguments.precision != "auto",
        "--calibration": arguments.calibration is not None,
    }
    if not elsewhere(arguments):
        of_farm = () if arguments.farm is None else ("--certificates", "--device")
        for name, is_given in given.items():
            if is_given and name not in of_farm:
                raise UsageError(f"{name} goes with a file and --bench or --farm; see 'hone tune --help'")
        return
    if not Path(arguments.model).is_file():
        option = "--bench" if arguments.farm is None else "--farm"
        raise UsageError(f"{option} takes an ONNX file, and there is no file {arguments.model}")
    if arguments.farm is None:
        for name in ("--certificates", "--device"):
            if given[name]:
                raise UsageError(f"{name} goes with --farm; see 'hone tune --help'")


def elsewhere(arguments: argparse.Namespace) -> bool:
    """Whether a file is tuned, without the service: on a bench, or by a farm, which tunes models, too."""
    path = Path(arguments.model)
    is_file = path.suffix == ".onnx" or path.is_file()
    return arguments.bench is not None or (arguments.farm is not None and is_file)


def farm_job(arguments: argparse.Namespace, given: ExportedFiles, folder: Path) -> Tune:
    """For the tuning child: a model of the service, whose files go to `folder`, by a farm."""
    return replace(
        _job(arguments, given.save_sources(folder / "source")),
        name=arguments.model,
        shapes=given.shapes,
        precision=given.precision,
        current=given.save_compiled(folder / "given.honed"),
        output=folder / "tuned.honed",
    )


def job(arguments: argparse.Namespace) -> Tune:
    """For the tuning child."""
    return replace(
        _job(arguments, Path(arguments.model)),
        shapes=unique("--shape", arguments.shape),
        precision=arguments.precision,
        calibration=arguments.calibration,
        output=arguments.output,
        bench=arguments.bench,
        bench_root=arguments.bench_root,
    )


def _job(arguments: argparse.Namespace, file: Path) -> Tune:
    """Of this file: who measures and for how long, and where what is found is kept."""
    return Tune(
        file=file,
        farm=arguments.farm,
        certificates=certificates(arguments) if arguments.farm is not None else None,
        device=arguments.device,
        records=records(arguments),
        cache_dir=places(os.environ, os.geteuid()).cache_dir,
        trials=arguments.trials,
        seconds=seconds(arguments),
    )


def seconds(arguments: argparse.Namespace) -> float | None:
    """How long it may take."""
    return None if arguments.minutes is None else float(arguments.minutes * 60)


def records(arguments: argparse.Namespace) -> Path:
    """Where what a bench or a farm found is kept."""
    name = _FARM_RECORDS if arguments.bench is None else _RECORDS
    return places(os.environ, os.geteuid()).state_dir / name
