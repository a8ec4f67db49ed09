"""What a search took, by its records: trials and seconds of who searched, and of a board that is told."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

_PAUSE_S = 60.0  # between two records, after which the search had ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Of all tasks. `hinted_s` is what a trial of each task's best takes, by the median trial."""

    tasks: int
    trials: int
    seconds: float
    hinted_s: float

    @classmethod
    def of(cls, records: Path) -> Search:
        """From lines of `hone records export`."""
        lines = [json.loads(line) for line in records.read_text().splitlines()]
        tasks = {line["workload"] for line in lines}
        ends = sorted(line["finished_s"] for line in lines)
        gaps = [later - end for end, later in pairwise(ends) if later - end < _PAUSE_S]
        lasts = defaultdict[str, list[float]](list)
        for line in lines:
            lasts[line["workload"]].append(line["finished_s"] - line["created_s"])
        return cls(
            tasks=len(tasks),
            trials=len(lines),
            seconds=sum(gaps),
            hinted_s=sum(median(each) for each in lasts.values()),
        )
