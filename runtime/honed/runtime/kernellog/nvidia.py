"""Records of NVIDIA's driver: Xid events. Numbers and meanings: NVIDIA's "XID Errors" documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .fault import Driver, Pattern, Severity, starts

# The program's own doing unless listed in LOST.
XIDS: Mapping[int, str] = {
    8: "GPU stopped processing",
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup",
    48: "double-bit ECC error",
    64: "ECC page retirement failed",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    109: "context switch timeout",
    119: "GSP remote call timeout",
    120: "GSP error",
}
LOST = frozenset({48, 64, 79, 95, 119, 120})
CLEANUP = 45  # of a channel whose process has ended or faulted before
HANGS = frozenset({8, 109})

_DEVICE = r"NVRM: Xid \(PCI:(?P<device>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.[0-7])?)\): "
_PROCESS = r"(?:, pid='?(?:(?P<tgid>\d{1,10})|[^,\n]{0,40}?)'?(?=,|$))?(?:, name=(?P<comm>[^,\n]*))?"
_ADDRESS = r"(?:[^\n]* faulted @ 0x(?P<address>[0-9A-Fa-f]{1,8}_?[0-9A-Fa-f]{1,8})\b)?"

PATTERNS: Final = tuple(
    Pattern(
        start=starts(rf"{_DEVICE}(?P<xid>{numbers})\b{_PROCESS}{_ADDRESS}"),
        severity=severity,
        kind="xid",
        driver=Driver.NVIDIA,
        hang=hang,
        consequence=consequence,
    )
    for numbers, severity, hang, consequence in (
        ("|".join(map(str, sorted(LOST))), Severity.DEVICE_LOST, False, False),
        ("|".join(map(str, sorted(HANGS))), Severity.QUEUE, True, False),
        (str(CLEANUP), Severity.QUEUE, False, True),
        (r"\d{1,5}", Severity.QUEUE, False, False),
    )
)
