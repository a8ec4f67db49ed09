"""Which file is a family's prior: an administrator's own, or the one that ships."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from honed.jobs import priorfile
from honed.jobs.priorfile import SUFFIX, PriorFile

FOLDER = Path(__file__).with_name("priors")


@cache
def shipped(family: str) -> PriorFile | None:
    """The one that ships; None where there is none."""
    path = FOLDER / f"{family}{SUFFIX}"
    return priorfile.usable(path) if path.exists() else None


def chosen(family: str) -> PriorFile | None:
    """The one that is used: an own one first; None where there is none."""
    return priorfile.own(family) or shipped(family)
