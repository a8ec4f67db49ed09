"""Is this record of the kernel log a fault, and what does it say? Pure: text in, Fault out."""

from __future__ import annotations

import re
from typing import Final

from . import kbase, kbase_jm, nvidia, oom, panfrost, panthor
from .fault import CONSEQUENCES, EXCEPTIONS, Driver, Fault, Pattern, starts

# dev_printk writes "<driver> <device>: ", to which DRM's helpers add "[drm] " or
# "[drm:<function> [<module>]] *ERROR* ".
_PREFIX: Final = starts(
    rf"(?P<word>{kbase.PREFIX}|{panthor.PREFIX}|{panfrost.PREFIX}) (?P<device>\S{{1,100}}): "
    r"(?:\[drm(?::[\w.]{1,100}(?: \[\w{1,100}\])?)?\] )?(?:\*ERROR\* )?"
)
_DRIVERS: Final[dict[str, tuple[Driver, tuple[Pattern, ...]]]] = {
    kbase.PREFIX: (Driver.KBASE, (*kbase_jm.PATTERNS, *kbase.PATTERNS)),
    panthor.PREFIX: (Driver.PANTHOR, panthor.PATTERNS),
    panfrost.PREFIX: (Driver.PANFROST, panfrost.PATTERNS),
}
_UNPREFIXED: Final = (*nvidia.PATTERNS, *oom.PATTERNS)

# Lines inside a record, the same in all of Arm's drivers.
_EXCEPTION: Final = starts(r"^CS_FA(?:ULT|TAL)\.EXCEPTION_TYPE: 0x([0-9A-Fa-f]{1,8})(?: \(([^)\n]*)\))?")
_MEMORY_EXCEPTION: Final = starts(r"^exception type 0x([0-9A-Fa-f]{1,8})(?:: ([^\n]*))?")
_ACCESS: Final = starts(r"^access type 0x[0-9A-Fa-f]{1,8}: (\w{1,40})")
_THREAD: Final = starts(r"^pid: (\d{1,10})$")
_RECORD_BYTES: Final = 8192  # longest text /dev/kmsg gives; what is beyond is not looked at


def parse(message: str, *, device: str | None = None) -> Fault | None:
    """The fault that the record `message` (all its lines, unescaped) tells of; None for any other record.

    `device` is the name in the record's own device field, "fb000000.gpu", where it has one: a message that
    begins with another device's name only quotes it and is None. Never raises, whatever the text.
    """
    message = message[:_RECORD_BYTES]
    prefix = _PREFIX.match(message)
    if prefix is None:
        return _first_match(message, 0, None, None, _UNPREFIXED)
    if device is not None and device != prefix["device"]:
        return None
    driver, patterns = _DRIVERS[prefix["word"]]
    return _first_match(message, prefix.end(), driver, prefix["device"], patterns)


def _first_match(
    message: str, begin: int, driver: Driver | None, device: str | None, patterns: tuple[Pattern, ...]
) -> Fault | None:
    for pattern in patterns:
        match = pattern.start.match(message, begin)
        if match is not None:
            return _fault(message, match, pattern, pattern.driver or driver or Driver.KERNEL, device)
    return None


def _fault(message: str, match: re.Match[str], pattern: Pattern, driver: Driver, device: str | None) -> Fault:
    groups = match.groupdict()
    code, name, meaning = _exception(message, groups)
    access, thread = _ACCESS.search(message), _THREAD.search(message)
    return Fault(
        driver=driver,
        device=groups.get("device") or device,
        severity=pattern.severity if code is None else pattern.by_code.get(code, pattern.severity),
        kind=pattern.kind,
        code=code,
        name=name,
        meaning=meaning,
        tgid=_decimal(groups.get("tgid")),
        tid=_decimal(thread[1]) if thread else None,
        comm=groups.get("comm"),
        context=_decimal(groups.get("context")),
        group=_decimal(groups.get("group")),
        slot=_decimal(groups.get("slot")),
        stream=_decimal(groups.get("stream")),
        address_space=_decimal(groups.get("address_space")),
        address=_hexadecimal(groups.get("address")),
        access=access[1] if access else None,
        hang=pattern.hang,
        consequence=pattern.consequence or (code in CONSEQUENCES and driver is not Driver.NVIDIA),
        announces=pattern.announces,
        text=message.rstrip("\n"),
    )


def _exception(message: str, groups: dict[str, str | None]) -> tuple[int | None, str | None, str | None]:
    """Code, the driver's name for it, and our meaning of it."""
    if groups.get("xid") is not None:
        number = _decimal(groups["xid"])
        return number, None, None if number is None else nvidia.XIDS.get(number)
    code, name = _hexadecimal(groups.get("code")), groups.get("name")
    status = _hexadecimal(groups.get("status"))
    if status is not None:
        code = status & 0xFF  # the exception type of a GPU_FAULTSTATUS
    line = _EXCEPTION.search(message) or _MEMORY_EXCEPTION.search(message)
    if code is None and line is not None:
        code, name = _hexadecimal(line[1]), line[2]
    return code, name, None if code is None else EXCEPTIONS.get(code)


def _decimal(text: str | None) -> int | None:
    return None if text is None else int(text)


def _hexadecimal(text: str | None) -> int | None:
    return None if text is None else int(text.replace("_", ""), 16)
