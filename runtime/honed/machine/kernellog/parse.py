"""Recognises records of the kernel log that report a fault, and parses them, without I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .drivers import TABLES
from .fault import (
    CONSEQUENCES,
    EXCEPTIONS,
    Driver,
    Fault,
    Pattern,
    RecordTable,
    starts,
)

# Lines inside a record, the same in all of Arm's drivers.
_EXCEPTION: Final = starts(r"^CS_FA(?:ULT|TAL)\.EXCEPTION_TYPE: 0x([0-9A-Fa-f]{1,8})(?: \(([^)\n]*)\))?")
_MEMORY_EXCEPTION: Final = starts(r"^exception type 0x([0-9A-Fa-f]{1,8})(?:: ([^\n]*))?")
_THREAD: Final = starts(r"^pid: (\d{1,10})$")
_RECORD_BYTES: Final = 8192  # Longest text of /dev/kmsg; the rest is ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedRow:
    """A record's match with a row of a table."""

    pattern: Pattern
    match: re.Match[str]
    driver: Driver
    device: str | None


def parse(message: str, *, device: str | None = None) -> Fault | None:
    """Return the fault that the record `message` reports; None for any other record.

    `message` is all lines of the record, unescaped. `device` is the name in the record's own device field,
    "fb000000.gpu", if it has one: a message that begins with another device's name only quotes it and is
    None. Never raises, whatever the text.
    """
    message = message[:_RECORD_BYTES]
    found = find(message, device=device)
    return None if found is None else _fault(message, found)


def find(message: str, *, device: str | None = None) -> MatchedRow | None:
    """Return the first row that matches `message`, or None; the arguments are those of `parse`."""
    origin = _origin(message)
    if origin is None:
        return None
    table, named, begin = origin
    if None not in (device, named) and device != named:
        return None
    for pattern in table.patterns:
        match = pattern.start.match(message, begin)
        if match is not None:
            driver = pattern.driver or table.driver
            return MatchedRow(pattern=pattern, match=match, driver=driver, device=named)
    return None


def _fault(message: str, match: MatchedRow) -> Fault:
    pattern, driver, groups = match.pattern, match.driver, match.match.groupdict()
    code, name, meaning = _exception(message, groups)
    by_code = pattern.by_code or {}
    thread = _THREAD.search(message)
    return Fault(
        driver=driver,
        device=groups.get("device") or match.device,
        severity=pattern.severity if code is None else by_code.get(code, pattern.severity),
        kind=pattern.kind,
        code=code,
        name=name,
        meaning=meaning,
        tgid=_decimal(groups.get("tgid")),
        tid=_decimal(thread[1] if thread else groups.get("tid")),
        comm=groups.get("comm"),
        context=_decimal(groups.get("context")),
        group=_decimal(groups.get("group")),
        address_space=_decimal(groups.get("address_space")),
        consequence=pattern.consequence or (code in CONSEQUENCES and driver is not Driver.NVIDIA),
        announces=pattern.announces,
        text=message.rstrip("\n"),
    )


def _exception(message: str, groups: dict[str, str | None]) -> tuple[int | None, str | None, str | None]:
    """Return the code of an exception, the driver's name for it, and honed's meaning of it."""
    if groups.get("xid") is not None:
        return _decimal(groups["xid"]), None, None
    code, name = _hexadecimal(groups.get("code")), groups.get("name")
    status = _hexadecimal(groups.get("status"))
    if status is not None:
        code = status & 0xFF  # The exception type of a GPU_FAULTSTATUS
    line = _EXCEPTION.search(message) or _MEMORY_EXCEPTION.search(message)
    if code is None and line is not None:
        code, name = _hexadecimal(line[1]), line[2]
    return code, name, None if code is None else EXCEPTIONS.get(code)


def _decimal(text: str | None) -> int | None:
    return None if text is None else int(text)


def _hexadecimal(text: str | None) -> int | None:
    return None if text is None else int(text, 16)


def _choice(words: list[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_DRM: Final = r"\[drm(?::(?P<function>[\w.]{1,100})(?: \[(?P<module>\w{1,100})\])?)?\] "
_OF_WORD: Final = {word: table for table in TABLES for word in table.words}
_OF_FUNCTION: Final = {stem: table for table in TABLES for stem in table.functions}
_OF_OPENING: Final = {opening: table for table in TABLES for opening in table.openings}

# The kernel's dev_printk writes "<driver> <device>: ", to which DRM's helpers add "[drm] " or
# "[drm:<function> [<module>]] *ERROR* ". A device without a driver has "platform" before it: msm's GMU.
_WITH_DEVICE: Final = starts(
    rf"(?P<word>{_choice(list(_OF_WORD))}|platform(?= \S{{1,100}}\.gmu: )) (?P<device>\S{{1,100}}): "
    rf"(?:{_DRM})?(?:\*ERROR\* )?"
)
_GMU: Final = "msm"
# DRM_ERROR writes no device, only the function, and the module if the driver is one.
_WITHOUT_DEVICE: Final = starts(rf"{_DRM}\*ERROR\* ")
_OPENING: Final = starts(_choice(list(_OF_OPENING)))


def _origin(message: str) -> tuple[RecordTable, str | None, int] | None:
    """Return the table of the driver that wrote a record, the device it names, and where its message begins.

    Returns None for a record of an unknown driver.
    """
    device, begin = None, 0
    table: RecordTable | None
    if (found := _WITH_DEVICE.match(message)) is not None:
        table = _OF_WORD[_GMU if found["word"] == "platform" else found["word"]]
        device, begin = found["device"], found.end()
    elif (found := _WITHOUT_DEVICE.match(message)) is not None:
        table = _OF_FUNCTION.get(found["module"] or (found["function"] or "").partition("_")[0])
        begin = found.end()
    elif (found := _OPENING.match(message)) is not None:
        table = _OF_OPENING[found[0]]
    else:
        return None
    if table is None:
        return None
    inner = starts(table.inner).match(message, begin) if table.inner else None
    return table, device, begin if inner is None else inner.end()
