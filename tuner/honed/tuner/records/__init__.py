"""What tuning has learned, kept in SQLite: candidates and their verdicts, tasks and versions.

with Records.open(path) as records:
    for candidate in records.abandoned():
        ...  # it was running when the tuner or the machine stopped; it is in quarantine now
    number = records.begin(NewCandidate(workload=key, setup=setup, trace=trace))
    verdict = measure(...)
    records.finish(number, verdict)
"""

from __future__ import annotations

from .exchange import Imported, export_jsonl, import_jsonl
from .rows import (
    Default,
    ModelVersion,
    NewCandidate,
    Progress,
    Setup,
    State,
    Task,
    TuningRecord,
    WeightedTask,
)
from .store import Quarantined, Records

__all__ = [
    "Default",
    "Imported",
    "ModelVersion",
    "NewCandidate",
    "Progress",
    "Quarantined",
    "Records",
    "Setup",
    "State",
    "Task",
    "TuningRecord",
    "WeightedTask",
    "export_jsonl",
    "import_jsonl",
]
