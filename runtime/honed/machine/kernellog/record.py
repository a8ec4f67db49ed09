"""One record of the kernel log, from whichever reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .parse import parse
from .story import DatedFault

CLOCK_SPAN_S: Final = 600.0  # after which the clocks' offset is taken anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record with all its lines, unescaped."""

    message: str
    monotonic_s: float  # when the kernel wrote it, CLOCK_MONOTONIC of the boot it was written in
    realtime_s: float  # the same as seconds since 1970
    priority: int  # 0 emergency .. 7 debug
    facility: int  # 0: the kernel itself
    device: str | None  # name of the device in the record's own field, "fb000000.gpu"
    boot_id: str  # 32 hexadecimal digits; CLOCK_MONOTONIC is only comparable within one boot

    @property
    def genuine(self) -> bool:
        """Written by the kernel. A program that writes to /dev/kmsg cannot have facility 0."""
        return self.facility == 0


def seen(record: Record, *, forged: bool = False) -> DatedFault | None:
    """The fault in `record` with its time; None for other records.

    Records that a program wrote are passed over unless `forged` lets them in.
    """
    if not (record.genuine or forged):
        return None
    fault = parse(record.message, device=record.device)
    return None if fault is None else DatedFault(fault=fault, monotonic_s=record.monotonic_s)


def device_name(field: str | None) -> str | None:
    """Device name in a DEVICE field: of `+platform:fb000000.gpu` the part after the subsystem.

    None for the other forms (`b8:0`, `c10:58`, `n3`: device numbers), which are no names.
    """
    if field is None or not field.startswith("+"):
        return None
    return field.partition(":")[2] or None


class LogClock:
    """Turns the kernel log's own stamps into CLOCK_MONOTONIC.

    The two tick apart: the log's is not corrected by NTP, and differs by minutes after a virtual machine was
    stopped. A record is received a moment after it is stamped, so the smallest difference seen lately is
    the offset.
    """

    def __init__(self) -> None:
        self._offset_s = float("inf")
        self._since_s = 0.0

    def note(self, stamp_s: float, received_s: float) -> None:
        """A record stamped `stamp_s` by the log's clock was received at `received_s`, CLOCK_MONOTONIC."""
        offset = received_s - stamp_s
        if offset <= self._offset_s or received_s - self._since_s > CLOCK_SPAN_S:
            self._offset_s, self._since_s = offset, received_s

    def monotonic(self, stamp_s: float) -> float:
        """CLOCK_MONOTONIC of a record stamped `stamp_s`; some record must have been noted before."""
        return stamp_s + self._offset_s
