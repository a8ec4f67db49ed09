"""Where a kernel's schedule comes from, as its name in a compiled model says: `measured:kin:0123456789ab`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ScheduleSource(StrEnum):
    """What speaks for a schedule. The first three are taken without a trial."""

    RULE = "rule"
    PRIOR = "prior"
    TABLES = "tables"
    PREDICTED = "predicted"  # judged by its machine code, for a device that was not there
    RECORD = "record"  # measured on such a device elsewhere, or by a honed that did not say where
    MEASURED = "measured"  # on the machine that compiled the model


class Way(StrEnum):
    """How the search came to a schedule."""

    KIN = "kin"  # the best of another task, moved to this one's extents
    TABLES = "tables"
    EVOLUTION = "evolution"
    DESCENT = "descent"
    AGAIN = "again"  # known from another driver or compiler


@dataclass(frozen=True, slots=True)
class Origin:
    """A schedule's source, its name among others of that source, and where it is known how it was found."""

    source: ScheduleSource
    name: str
    way: Way | None = None

    @classmethod
    def parse(cls, text: str) -> Origin:
        """What `str` of an origin gave; any other text is a rule's name."""
        source, colon, rest = text.partition(":")
        if not colon or source not in set(ScheduleSource):
            return cls(ScheduleSource.RULE, text)
        way, colon, name = rest.partition(":")
        if colon and way in set(Way):
            return cls(ScheduleSource(source), name, Way(way))
        return cls(ScheduleSource(source), rest)

    def __str__(self) -> str:
        """The name in a compiled model; of a rule the rule's own."""
        if self.source is ScheduleSource.RULE:
            return self.name
        return ":".join((self.source, *([self.way] if self.way else []), self.name))

    @property
    def tried(self) -> bool:
        """Whether its time was measured, here or elsewhere."""
        return self.source in (ScheduleSource.RECORD, ScheduleSource.MEASURED)
