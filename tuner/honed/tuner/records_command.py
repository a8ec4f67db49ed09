"""The jobs on the records of tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from honed.jobs import commands, events
from honed.machine.files import replacing
from honed.protocol.errors import InvalidArgument, NotFound, PermissionDenied

from .records.exchange import Choose, export_jsonl, import_jsonl, own, spread
from .records.rows import MeasurementSetup, ProgressRecord, TuningRecord, VersionRecord
from .records.store import Records

Emit = Callable[[events.News], None]


def export(job: commands.Export, emit: Emit) -> events.Exported:
    """Write the records of every setup."""
    with _open(job.records, emit) as records, replacing(job.output) as file:
        count = sum(export_jsonl(records, file, setup, _choice(job)) for setup in records.setups())
    return events.Exported(count=count, output=str(job.output))


def _choice(job: commands.Export) -> Choose:
    if job.best:
        return Records.distil
    if job.own:
        return own
    return spread if job.spread else Records.iterate_finished


def import_(job: commands.Import, emit: Emit) -> events.Imported:
    """Import the records that fit the device."""
    from honed.machine import devices

    from .setup import setup_for

    setup = setup_for(devices.select(job.device).profile.identity)
    try:
        file = job.file.open("rb")
    except FileNotFoundError as error:
        raise NotFound(f"{job.file} does not exist; check the path") from error
    except PermissionError as error:
        raise PermissionDenied(f"{job.file} may not be read; check who owns it") from error
    except OSError as error:
        raise InvalidArgument(f"{job.file} cannot be read ({error.strerror}); check it") from error
    with file, Records.open(job.records) as records:
        _note(records, emit)
        done = import_jsonl(records, file, setup, hints_only=job.hints)
    if done.refused and not done.added and not done.merged:
        raise InvalidArgument(
            f"none of the {len(done.refused)} records in {job.file} can be used, the first because: "
            f"{done.refused[0]}; import what 'hone records export' wrote on a board of the same kind"
        )
    return events.Imported(count=done.added, merged=done.merged, refused=done.refused)


def history(job: commands.ShowHistory, emit: Emit) -> events.History:
    """Return a model's estimates and versions; raises NotFound where it has none."""
    with _open(job.records, emit) as records:
        progress, versions = records.progress(job.name), records.versions(job.name)
        if not progress and not versions:
            tuned = records.models()
            others = f"; there are records of {', '.join(tuned)}" if tuned else ""
            raise NotFound(
                f"{job.name} was not tuned yet, so it has no curve; run 'hone tune {job.name}'" + others
            )
    points = _points(progress)
    return events.History(
        points=tuple(points), versions=tuple(_version(version, points) for version in versions)
    )


def _points(progress: Sequence[ProgressRecord]) -> list[events.Point]:
    """Return the estimates in their order, each with the number of trials made until then in all runs."""
    points, trials = list[events.Point](), 0
    for moment in progress:
        trials += moment.trials
        points.append(events.Point(time=moment.created_s, us=moment.latency_s * 1e6, trials=trials))
    return points


def _version(version: VersionRecord, points: Sequence[events.Point]) -> events.TunedVersion:
    before = [point.trials for point in points if point.time <= version.created_s]
    return events.TunedVersion(
        version=version.version,
        why=version.why,
        us=None if version.latency_s is None else version.latency_s * 1e6,
        time=version.created_s,
        trials=before[-1] if before else 0,
    )


def faults(job: commands.ListFaults, emit: Emit) -> events.Faults:
    """Return every candidate in quarantine, oldest first; a device has one quarantine for all its drivers."""
    with _open(job.records, emit) as records:
        setups = {setup.device_key: setup for setup in records.setups()}
        found = [
            (candidate, setup) for setup in setups.values() for candidate in records.list_quarantined(setup)
        ]
        found.sort(key=lambda pair: (pair[0].finished_s or pair[0].created_s, pair[0].id))
        return events.Faults(faults=tuple(_fault(records, candidate, setup) for candidate, setup in found))


def _fault(records: Records, candidate: TuningRecord, setup: MeasurementSetup) -> events.Quarantined:
    task = records.task(candidate.workload)
    return events.Quarantined(
        candidate=candidate.trace_sha256[:16],
        task=candidate.workload,
        name=task.name if task else "",
        outcome=None if candidate.outcome is None else str(candidate.outcome),
        reason=candidate.reason,
        story=candidate.story,
        time=candidate.finished_s or candidate.created_s,
        device=setup.device.name,
        driver_version=candidate.driver,
        measured_by=candidate.measured_by,
    )


def _open(path: Path, emit: Emit) -> Records:
    """Open the records at a path; raises NotFound where there are none."""
    if not path.exists():
        raise NotFound(f"there are no records at {path} yet; tune a model with 'hone tune' first")
    records = Records.open(path)
    _note(records, emit)
    return records


def _note(records: Records, emit: Emit) -> None:
    for note in records.notes:
        emit(events.Note(text=note))
