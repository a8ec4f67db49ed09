"""Records of Arm's kbase, the vendor's driver of Mali GPUs: command-stream ones and what all share."""

from __future__ import annotations

from typing import Final

from .fault import FIRMWARE_INTERNAL_ERROR, UNRECOVERABLE, Driver, Pattern, Severity, starts
from .mmu import ADDRESS, GPU_FAULT, HEX, PAGE_FAULT, SPACE

PREFIX: Final = "mali"

_CONTEXT = r"(?P<tgid>\d{1,10})_(?P<context>\d{1,10})"
_OWNER = (
    rf"Ctx {_CONTEXT} Group (?P<group>-?\d{{1,10}}) CSG (?P<slot>-?\d{{1,10}}) CSI: (?P<stream>\d{{1,10}})"
)
_OLD_OWNER = r"(?:CSG: (?P<group>-?\d{1,10}), )?CSI: (?P<stream>\d{1,10})"
_FATAL_CODES = {UNRECOVERABLE: Severity.RESET, FIRMWARE_INTERNAL_ERROR: Severity.RESET}
_QUEUE, _CTX, _RESET, _LOST = Severity.QUEUE, Severity.CONTEXT, Severity.RESET, Severity.DEVICE_LOST

_STREAMS = tuple(
    Pattern(start=starts(rf"{owner}\nCS_{word}\b"), severity=_QUEUE, kind=kind, by_code=by_code)
    for owner in (_OWNER, _OLD_OWNER)
    for word, kind, by_code in (("FAULT", "cs-fault", {}), ("FATAL", "cs-fatal", _FATAL_CODES))
)

_MEMORY = (
    Pattern(
        start=starts(rf"Unhandled Page fault in {SPACE} at VA {ADDRESS}\nReason: Page allocation failure"),
        severity=Severity.OUT_OF_MEMORY,
        kind="page-fault",
    ),
    PAGE_FAULT,
    GPU_FAULT,
    Pattern(  # old drivers print a VA; kernels may hide a PA as (ptrval)
        start=starts(rf"GPU bus fault in {SPACE}(?: at (?:VA 0x|PA (?:0x)?)(?P<address>{HEX})\b)?"),
        severity=_CTX,
        kind="bus-fault",
    ),
    Pattern(
        start=starts(rf"Unexpected Page fault in firmware address space(?: at VA {ADDRESS})?"),
        severity=_RESET,
        kind="firmware-page-fault",
    ),
    Pattern(
        start=starts(r"Failed to allocate -?\d{1,20} pages"),
        severity=Severity.OUT_OF_MEMORY,
        kind="allocation",
    ),
)

_HANGS = (
    Pattern(
        start=starts(r"Notify the event notification thread, forward progress timeout"),
        severity=_QUEUE,
        kind="progress-timeout",
        hang=True,
    ),
    Pattern(
        start=starts(
            r"\[\d{1,20}\] Iterator PROGRESS_TIMER timeout notification received for group "
            rf"(?P<group>\d{{1,10}}) of ctx {_CONTEXT} on slot (?P<slot>-?\d{{1,10}})"
        ),
        severity=_QUEUE,
        kind="progress-timeout",
        hang=True,
    ),
    Pattern(
        start=starts(
            r"\[\d{1,20}\] term request timeout \(\d{1,10} ms\) for group (?P<group>\d{1,10})"
            rf" of context {_CONTEXT} on slot (?P<slot>-?\d{{1,10}})"
        ),
        severity=_QUEUE,
        kind="termination-timeout",
        hang=True,
    ),
    Pattern(
        start=starts(
            rf"Group (?P<group>\d{{1,10}}) of context {_CONTEXT} on slot (?P<slot>-?\d{{1,10}}) "
            "failed to suspend"
        ),
        severity=_QUEUE,
        kind="suspension-timeout",
        hang=True,
    ),
)

_RESETS = tuple(
    Pattern(start=starts(text), severity=severity, kind=kind, driver=driver)
    for text, severity, kind, driver in (
        (r"AS_ACTIVE bit stuck for as (?P<address_space>\d{1,3})", _RESET, "mmu-stuck", None),
        (r"[^\n]{0,40}L2_PWRTRANS[^\n]{0,40} set for too long", _RESET, "power-stuck", None),
        (r"Flush for GPU page table update did not complete", _RESET, "flush-stuck", None),
        (r"Sending reset to GPU - all running jobs will be lost", _RESET, "reset", None),
        (r"Preparing to soft-reset GPU: Waiting \(up to", _RESET, "reset", Driver.KBASE_JM),
        (r"Preparing to soft-reset GPU", _RESET, "reset", None),
        (r"Resetting GPU \(allowing up to", _RESET, "reset", None),
        (r"Reset complete", _RESET, "reset", None),
        (r"Soft-reset failed", _LOST, "reset-failed", None),
        (r"MCU re-init failed", _LOST, "reset-failed", None),
        (r"Reset failed to complete", _LOST, "reset-failed", None),
        (r"Failed to hard-reset the GPU", _LOST, "reset-failed", None),
    )
)

PATTERNS: Final = (*_STREAMS, *_MEMORY, *_HANGS, *_RESETS)
