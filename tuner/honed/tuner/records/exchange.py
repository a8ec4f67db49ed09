"""Writes records as JSON lines, chooses which to export, and imports them on boards of the same kind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import BinaryIO, Final, Literal, NoReturn

from honed.machine.profile import DeviceIdentity
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument, Unavailable
from honed.protocol.params import marks_of, source_of

from .rows import (
    MeasurementSetup,
    RecordState,
    StoredOutcome,
    TaskRecord,
    Timing,
    TuningRecord,
    check_figures,
    check_timing,
    check_trace,
    sha256,
    timing_values,
)
from .store import Records

Choose = Callable[[Records, MeasurementSetup], Iterable[TuningRecord]]
FORMAT = 1
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the file: a candidate with a verdict, complete in itself."""

    honed_records: int  # FORMAT
    device: DeviceIdentity
    compiler: str
    workload: str
    name: str | None  # Name of the task
    flops: float | None
    bytes: float | None
    trace: str
    state: Literal["done", "quarantined"]
    outcome: Literal["not-built", "not-run", "impossible", "faulted", "wrong", "right", "abandoned"]
    reason: str
    story: str | None
    timing: Timing | None
    source_sha256: str | None
    created_s: float
    finished_s: float
    measured_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportCounts:
    """Counts of the lines of an import by outcome."""

    added: int
    merged: int  # Lines of candidates that were there already
    refused: tuple[str, ...]  # A sentence for each, with the line's number


def export_jsonl(
    records: Records, file: BinaryIO, setup: MeasurementSetup, choose: Choose = Records.iterate_finished
) -> int:
    """Write the candidates with a verdict that `choose` selects, by default all; return their number."""
    count = 0
    for candidate in choose(records, setup):
        file.write(encode(_line(records, candidate, setup)))
        count += 1
    return count


def import_jsonl(
    records: Records, file: BinaryIO, setup: MeasurementSetup, *, hints_only: bool = False
) -> ImportCounts:
    """Import records of a device of the same identity: all valid ones, or none on an error.

    Records of another driver or compiler version are imported as stale ones. A candidate that is here already
    keeps its figures, but is put in quarantine where the line has it there. Lines that are malformed, of
    another device or impossible are refused, each with its number and reason. With `hints_only` lines other
    than hints (store.py) are refused, too, because they could count as measured here.
    """
    added = merged = 0
    refused: list[str] = []
    with records.importing() as put:
        for number, data in enumerate(lines(file), 1):
            if not data.strip():
                continue
            try:
                line = parse(data)
                _check_device(line, setup)
                if hints_only:
                    _check_hint(line)
            except (strict.SchemaError, InvalidArgument) as error:
                refused.append(f"line {number}: {error}")
                continue
            values = {**asdict(line), "trace_sha256": sha256(line.trace), **timing_values(line.timing)}
            if put(line_setup(line), _task(line), values):
                added += 1
            else:
                merged += 1
    return ImportCounts(added=added, merged=merged, refused=tuple(refused))


def encode(line: Line) -> bytes:
    """Return a line as the bytes of a file."""
    return json.dumps(strict.to_plain(line), allow_nan=False, sort_keys=True).encode() + b"\n"


def line_setup(line: Line) -> MeasurementSetup:
    """Return the setup that a line was measured with."""
    return MeasurementSetup(device=line.device, compiler=line.compiler)


def _line(records: Records, candidate: TuningRecord, setup: MeasurementSetup) -> Line:
    task = records.task(candidate.workload)
    assert candidate.outcome is not None  # Candidates without a verdict are not written
    assert candidate.state is not RecordState.IN_FLIGHT or candidate.outcome is StoredOutcome.RIGHT
    return strict.copy_fields(
        Line,
        candidate,
        honed_records=FORMAT,
        device=setup.device,
        name=task.name if task else None,
        flops=task.flops if task else None,
        bytes=task.bytes if task else None,
        state="quarantined" if candidate.state is RecordState.QUARANTINED else "done",
        outcome=candidate.outcome.value,
        finished_s=candidate.finished_s if candidate.finished_s is not None else candidate.created_s,
    )


def lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines of at most MAX_LINE_BYTES; of a longer line only its beginning, which is no JSON."""
    while line := _read(file):
        yield line
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = _read(file)


def _read(file: BinaryIO) -> bytes:
    try:
        return file.readline(MAX_LINE_BYTES)
    except OSError as error:
        raise Unavailable(f"the records to import cannot be read ({error.strerror}); try again") from error


def parse(data: bytes) -> Line:
    """Parse a record; raise Mismatch or InvalidArgument for anything else, or for an impossible record."""
    try:
        plain = json.loads(data, parse_constant=_no_constant)
        json.dumps(plain, ensure_ascii=False).encode()  # Half a surrogate pair cannot be encoded
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"it is not JSON text ({error})") from error
    line = strict.from_plain(Line, plain, where="the record")
    _check(line)
    return line


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _check_device(line: Line, setup: MeasurementSetup) -> None:
    """Raise InvalidArgument for a record of another device."""
    if line_setup(line).device_key != setup.device_key:
        raise InvalidArgument(
            f"it was measured on {line.device.name} ({line.device.platform}), "
            f"and this device is {setup.device.name} ({setup.device.platform})"
        )


def _check_hint(line: Line) -> None:
    """Raise InvalidArgument for a line that is no hint, or holds more than a hint may."""
    marks = marks_of(line.measured_by)
    if not line.compiler.endswith(marks.compiler):
        raise InvalidArgument(f"it is no hint: the name of its compiler does not end with {marks.compiler!r}")
    if (line.name, line.story) != (None, None) or line.reason not in ("", marks.reason):
        raise InvalidArgument("it is no hint: those have no name, reason or story of their own")


def _check(line: Line) -> None:
    """Raise InvalidArgument for an impossible record."""
    if line.honed_records != FORMAT:
        raise InvalidArgument(f"it is of format {line.honed_records} and this honed knows {FORMAT}")
    check_trace(line.trace)
    if line.timing is not None:
        check_timing(line.timing)
    if line.outcome == "right" and (line.timing is None or line.state != "done"):
        raise InvalidArgument("a right candidate must be done and have a timing")
    check_figures(flops=line.flops, bytes=line.bytes, created_s=line.created_s, finished_s=line.finished_s)


def _task(line: Line) -> TaskRecord | None:
    if line.name is None or line.flops is None or line.bytes is None:
        return None
    return TaskRecord(workload=line.workload, name=line.name, flops=line.flops, bytes=line.bytes)


SPREAD: Final = 24  # Candidates of a workload
LEAST_SPREAD: Final = 8  # Candidates of a workload, where there are many workloads
MOST_SPREAD: Final = 20_000  # Approximate total


def own(records: Records, setup: MeasurementSetup) -> Iterator[TuningRecord]:
    """Yield the best record of each workload, and those in quarantine, without records from a hub.

    Quarantined records are included because other boards should not try them either.
    """
    banned = (found for found in records.iterate_finished(setup) if found.state is RecordState.QUARANTINED)
    return (found for found in chain(records.distil(setup), banned) if not source_of(found.measured_by))


def spread(records: Records, setup: MeasurementSetup) -> Iterator[TuningRecord]:
    """Yield candidates of each workload, from the fastest to the slowest and the refused, for a prior.

    Equal records give equal results. Candidates from a hub, and trials that were cut off, are not included.
    """
    ranked: dict[str, list[tuple[float, str]]] = {}
    for found in _records_with_verdict(records, setup):
        seconds = found.timing.fair_s if found.outcome is StoredOutcome.RIGHT and found.timing else math.inf
        ranked.setdefault(found.workload, []).append((seconds, found.trace_sha256))
    each = min(SPREAD, max(LEAST_SPREAD, MOST_SPREAD // max(1, len(ranked))))
    kept = {
        (workload, trace) for workload, all_ in ranked.items() for _, trace in _evenly(sorted(all_), each)
    }
    return (
        found
        for found in _records_with_verdict(records, setup)
        if (found.workload, found.trace_sha256) in kept
    )


def _records_with_verdict(records: Records, setup: MeasurementSetup) -> Iterator[TuningRecord]:
    return (
        found
        for found in records.iterate_finished(setup)
        if found.outcome is not StoredOutcome.ABANDONED and not source_of(found.measured_by)
    )


def _evenly(ranked: list[tuple[float, str]], most: int) -> list[tuple[float, str]]:
    """Return `most` entries at even distances, including the first and the last."""
    if len(ranked) <= most:
        return ranked
    return [ranked[round(n * (len(ranked) - 1) / (most - 1))] for n in range(most)]
