"""Which driver wrote a record, and for which device: what stands before the message itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .pattern import starts
from .tables import TABLES, RecordTable


@dataclass(frozen=True, slots=True)
class RecordOrigin:
    """The table of the driver that wrote a record, the device it names, and where its message begins."""

    table: RecordTable
    device: str | None
    end: int


def _choice(words: list[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_DRM: Final = r"\[drm(?::(?P<function>[\w.]{1,100})(?: \[(?P<module>\w{1,100})\])?)?\] "
_OF_WORD: Final = {word: table for table in TABLES for word in table.words}
_OF_FUNCTION: Final = {stem: table for table in TABLES for stem in table.functions}
_OF_OPENING: Final = {opening: table for table in TABLES for opening in table.openings}

# dev_printk writes "<driver> <device>: ", to which DRM's helpers add "[drm] " or
# "[drm:<function> [<module>]] *ERROR* ". A device without a driver has "platform" before it: msm's GMU.
_WITH_DEVICE: Final = starts(
    rf"(?P<word>{_choice(list(_OF_WORD))}|platform(?= \S{{1,100}}\.gmu: )) (?P<device>\S{{1,100}}): "
    rf"(?:{_DRM})?(?:\*ERROR\* )?"
)
_GMU: Final = "msm"
# DRM_ERROR knows no device, only the function, and the module where the driver is one.
_WITHOUT_DEVICE: Final = starts(rf"{_DRM}\*ERROR\* ")
_OPENING: Final = starts(_choice(list(_OF_OPENING)))


def origin_of(message: str) -> RecordOrigin | None:
    """Who wrote `message`; None where no driver of TABLES did."""
    return _with_device(message) or _without_device(message)


def _with_device(message: str) -> RecordOrigin | None:
    found = _WITH_DEVICE.match(message)
    if found is None:
        return None
    table = _OF_WORD[_GMU if found["word"] == "platform" else found["word"]]
    return RecordOrigin(table, found["device"], _past(table.inner, message, found.end()))


def _without_device(message: str) -> RecordOrigin | None:
    if (found := _WITHOUT_DEVICE.match(message)) is not None:
        stem = found["module"] or (found["function"] or "").partition("_")[0]
        table = _OF_FUNCTION.get(stem)
        return None if table is None else RecordOrigin(table, None, _past(table.inner, message, found.end()))
    if (found := _OPENING.match(message)) is not None:
        table = _OF_OPENING[found[0]]
        return RecordOrigin(table, None, _past(table.inner, message, 0))
    return None


def _past(inner: str, message: str, begin: int) -> int:
    """Where the message begins after what this driver puts before each."""
    found = starts(inner).match(message, begin) if inner else None
    return begin if found is None else found.end()
