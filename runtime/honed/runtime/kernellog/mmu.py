"""Records of memory faults that Arm's and the open drivers write in the same words."""

from __future__ import annotations

from typing import Final

from .fault import Pattern, Severity, starts

HEX: Final = r"[0-9A-Fa-f]{1,16}"
SPACE: Final = r"AS(?P<address_space>\d{1,3})"
ADDRESS: Final = rf"0x(?P<address>{HEX})"

PAGE_FAULT: Final = Pattern(
    start=starts(rf"Unhandled Page fault in {SPACE}(?: at VA {ADDRESS})?"),
    severity=Severity.CONTEXT,
    kind="page-fault",
)
GPU_FAULT: Final = Pattern(  # `0x` twice: kbase puts one before a %pK
    start=starts(
        rf"GPU Fault 0x(?P<status>[0-9A-Fa-f]{{1,8}}) \((?P<name>[^)\n]*)\)(?: in {SPACE})?"
        rf"(?: at (?:PA )?(?:0x)?{ADDRESS}\b)?"
    ),
    severity=Severity.CONTEXT,
    kind="gpu-fault",
)
