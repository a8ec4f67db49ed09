"""`python -m honed.tuner records export | import | history | faults`: what is recorded, as JSON lines."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from honed.runtime.errors import InvalidArgument, NotFound, PermissionDenied
from honed.runtime.files import replacing

from .records import Candidate, Imported, ModelVersion, Progress, Records, Setup, export_jsonl, import_jsonl

Emit = Callable[[dict[str, Any]], None]


def add_commands(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    """Add `records` and what is beneath it to the parser of the compiling child."""
    records = commands.add_parser("records", help="what tuning has recorded")
    actions = records.add_subparsers(required=True, metavar="ACTION")
    export = actions.add_parser("export", parents=parents, help="write records as JSON lines")
    export.set_defaults(run=_export)
    export.add_argument("-o", "--output", type=Path, required=True)
    export.add_argument("--best", action="store_true", help="only the best of each task")
    import_ = actions.add_parser("import", parents=parents, help="take in what another board exported")
    import_.set_defaults(run=_import)
    import_.add_argument("file", type=Path)
    import_.add_argument("--device", help="the OpenCL device that the records must be of")
    history = actions.add_parser("history", parents=parents, help="a model's latency over its trials")
    history.set_defaults(run=_history)
    history.add_argument("--name", required=True, help="the model")
    faults = actions.add_parser("faults", parents=parents, help="the candidates in quarantine")
    faults.set_defaults(run=_faults)
    for parser in (export, import_, history, faults):
        parser.add_argument("--records", type=Path, required=True)


def _export(arguments: argparse.Namespace, emit: Emit) -> None:
    with _opened(arguments.records, emit) as records, replacing(arguments.output) as file:
        count = sum(
            export_jsonl(records, file, setup, best_only=arguments.best) for setup in records.setups()
        )
    emit({"event": "done", "count": count, "output": str(arguments.output)})


def _import(arguments: argparse.Namespace, emit: Emit) -> None:
    from honed.runtime import devices

    from .setup import setup_for

    setup = setup_for(devices.select(arguments.device).profile.identity)
    try:
        file = arguments.file.open("rb")
    except FileNotFoundError as error:
        raise NotFound(f"{arguments.file} does not exist; check the path") from error
    except PermissionError as error:
        raise PermissionDenied(f"{arguments.file} may not be read; check who owns it") from error
    except OSError as error:
        raise InvalidArgument(f"{arguments.file} cannot be read ({error.strerror}); check it") from error
    with file, Records.open(arguments.records) as records:
        _note(records, emit)
        done = import_jsonl(records, file, setup)
    _check(done, arguments.file)
    emit({
        "event": "done",
        "count": done.added,
        "merged": done.merged,
        "refused": list(done.refused),
    })  # fmt: skip


def _check(done: Imported, file: Path) -> None:
    if done.refused and not done.added and not done.merged:
        raise InvalidArgument(
            f"none of the {len(done.refused)} records in {file} can be used, the first because: "
            f"{done.refused[0]}; import what 'hone records export' wrote on a board of the same kind"
        )


def _history(arguments: argparse.Namespace, emit: Emit) -> None:
    with _opened(arguments.records, emit) as records:
        progress, versions = records.progress(arguments.name), records.versions(arguments.name)
        if not progress and not versions:
            tuned = records.models()
            others = f"; there are records of {', '.join(tuned)}" if tuned else ""
            raise NotFound(
                f"{arguments.name} was not tuned yet, so it has no history; run 'hone tune {arguments.name}'"
                + others
            )
    points = _points(progress)
    emit({
        "event": "history",
        "points": points,
        "versions": [_version(version, points) for version in versions],
    })  # fmt: skip


def _points(progress: Sequence[Progress]) -> list[dict[str, Any]]:
    """The estimates in their order, with the trials made until then in all runs."""
    points, trials = [], 0
    for moment in progress:
        trials += moment.trials
        points.append({
            "time": moment.created_s,
            "us": moment.latency_s * 1e6,
            "trials": trials,
            "what": "estimate",
        })  # fmt: skip
    return points


def _version(version: ModelVersion, points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    before = [point["trials"] for point in points if point["time"] <= version.created_s]
    return {
        "version": version.version,
        "why": version.why,
        "us": None if version.latency_s is None else version.latency_s * 1e6,
        "time": version.created_s,
        "trials": before[-1] if before else 0,
    }


def _faults(arguments: argparse.Namespace, emit: Emit) -> None:
    """Every candidate in quarantine, oldest first; a device has one quarantine for all its drivers."""
    with _opened(arguments.records, emit) as records:
        setups = {setup.device_key: setup for setup in records.setups()}
        found = [(candidate, setup) for setup in setups.values() for candidate in records.quarantined(setup)]
        found.sort(key=lambda pair: (pair[0].finished_s or pair[0].created_s, pair[0].id))
        rows = [_fault(records, candidate, setup) for candidate, setup in found]
    emit({"event": "faults", "faults": rows})


def _fault(records: Records, candidate: Candidate, setup: Setup) -> dict[str, Any]:
    task = records.task(candidate.workload)
    return {
        "candidate": candidate.trace_sha256[:16],
        "task": candidate.workload,
        "name": task.name if task else "",
        "outcome": None if candidate.outcome is None else str(candidate.outcome),
        "reason": candidate.reason,
        "story": candidate.story,
        "time": candidate.finished_s or candidate.created_s,
        "device": setup.device.name,
        "driver_version": candidate.driver,
        "measured_by": candidate.measured_by,
    }


def _opened(path: Path, emit: Emit) -> Records:
    """The records that are there; raises NotFound where there are none."""
    if not path.exists():
        raise NotFound(f"there are no records at {path} yet; tune a model with 'hone tune' first")
    records = Records.open(path)
    _note(records, emit)
    return records


def _note(records: Records, emit: Emit) -> None:
    for note in records.notes:
        emit({"event": "note", "text": note})
