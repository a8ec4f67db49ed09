"""How a hint says whom it is of: a record that another machine measured (docs/protocol.md, "HintsImport")."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .errors import InvalidArgument

PREFIX: Final = "hub: "
# A key's name, and its id where another has that name, too (honed.hub.index.believed).
_SOURCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}( [0-9A-F]{16})?")


@dataclass(frozen=True, slots=True)
class HintMarks:
    """What hints of one source say: who measured, the end of the compiler's name, why one is quarantined."""

    measured_by: str
    compiler: str
    reason: str


def marks(source: str) -> HintMarks:
    """Those of hints that the key of this name has signed."""
    return HintMarks(f"{PREFIX}{source}", f", by {source}", f"in quarantine at {source}")


def source_of(measured_by: str) -> str:
    """The name of the key that signed a record; "" where it is no hint."""
    return measured_by.removeprefix(PREFIX) if measured_by.startswith(PREFIX) else ""


def marks_of(measured_by: str) -> HintMarks:
    """Those that a hint of whom it names must have; raises InvalidArgument where that is no key's name."""
    source = source_of(measured_by)
    if not _SOURCE.fullmatch(source):
        raise InvalidArgument(
            f"it is no hint: it was measured by {measured_by[:80]!r}, which is no key's name"
        )
    return marks(source)
