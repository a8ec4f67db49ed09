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


@dataclass(frozen=True, slots=True)
class Topic:
    """What findings are about."""

    name: str

    def ok(self, what: str) -> Finding:
        """Nothing is wrong."""
        return Finding(self.name, "ok", what)

    def warn(self, what: str, remedy: str) -> Finding:
        """Something is to be looked at."""
        return Finding(self.name, "warn", what, remedy)

    def fail(self, what: str, remedy: str) -> Finding:
        """Something must be mended."""
        return Finding(self.name, "fail", what, remedy)


def failed(findings: list[Finding]) -> bool:
    """Whether anything must be mended before honed can serve."""
    return any(finding.level == "fail" for finding in findings)
