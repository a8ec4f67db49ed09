"""One thing the doctor has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`what` is a sentence without its full stop; `remedy` says what to do, "" if there is nothing to do."""

    topic: str
    level: Level
    what: str
    remedy: str = ""


def failed(findings: list[Finding]) -> bool:
    """Whether anything must be mended before honed can serve."""
    return any(finding.level == "fail" for finding in findings)
