"""What tuning has done so far, read from its records: trials, faults, gains. The daemon only reads them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

_BUSY_SECONDS = 1.0
_FRESH_SECONDS = 5.0
_OUTCOMES = "SELECT outcome, COUNT(*) FROM candidates WHERE outcome IS NOT NULL GROUP BY outcome"
_FAULTS = "SELECT COUNT(*) FROM candidates WHERE state = 'quarantined'"
_GAINS = """SELECT model,
        (SELECT latency_s FROM progress f WHERE f.model = p.model ORDER BY id LIMIT 1),
        (SELECT latency_s FROM progress l WHERE l.model = p.model ORDER BY id DESC LIMIT 1)
    FROM (SELECT DISTINCT model FROM progress) p ORDER BY model"""


def read(path: Path) -> dict[str, Any] | None:
    """`trials` by outcome, `faults` (candidates in quarantine) and `gains` by model; None without records.

    A gain is the estimated time of one inference, in seconds, when tuning began and now. Records that
    cannot be read (made by another version, or locked) give `reason` and no figures.
    """
    if not path.exists():
        return None
    told: dict[str, Any] = {"trials": {}, "faults": 0, "gains": {}, "reason": ""}
    try:
        with closing(
            sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=_BUSY_SECONDS)
        ) as db:
            told["trials"] = dict(sorted(db.execute(_OUTCOMES)))
            told["faults"] = db.execute(_FAULTS).fetchone()[0]
            told["gains"] = {
                model: {"before_seconds": before, "now_seconds": now}
                for model, before, now in db.execute(_GAINS)
            }
    except sqlite3.Error as error:
        return {"trials": {}, "faults": 0, "gains": {}, "reason": f"the records cannot be read: {error}"}
    return told


class Gains:
    """The same, read at most every few seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._read: tuple[float, dict[str, Any] | None] | None = None

    def now(self) -> dict[str, Any] | None:
        """As `read` gives it; blocks for the disk."""
        if self._read is None or self._clock() - self._read[0] > _FRESH_SECONDS:
            self._read = (self._clock(), read(self._path))
        return self._read[1]
