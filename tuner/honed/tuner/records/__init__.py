"""Keeps what tuning has learned in SQLite: candidates and their verdicts, tasks and versions.

with Records.open(path) as records:
    for candidate in records.abandoned():
        ...  # it was running when the tuner or the machine stopped; it is in quarantine now
    number = records.begin(NewCandidate(workload=key, setup=setup, trace=trace))
    verdict = measure(...)
    records.finish(number, verdict)
"""

from __future__ import annotations

from .exchange import Choose, ImportCounts, export_jsonl, import_jsonl, own, spread
from .rows import (
    DefaultScheduleTime,
    MeasurementSetup,
    NewCandidate,
    ProgressRecord,
    RecordState,
    TaskRecord,
    TuningRecord,
    VersionRecord,
)
from .store import HINTS_PER_TASK, InQuarantine, Records

__all__ = [
    "Choose",
    "HINTS_PER_TASK",
    "DefaultScheduleTime",
    "ImportCounts",
    "InQuarantine",
    "NewCandidate",
    "ProgressRecord",
    "Records",
    "MeasurementSetup",
    "RecordState",
    "TaskRecord",
    "TuningRecord",
    "VersionRecord",
    "export_jsonl",
    "import_jsonl",
    "own",
    "spread",
]
