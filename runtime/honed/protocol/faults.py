"""Faults of GPUs, as the kernel log tells of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFault:
    """A fault of a GPU in the kernel log; `time` in seconds since 1970, `records` as they stand there."""

    time: float
    driver: str
    device: str | None
    severity: str
    code: int | None
    meaning: str
    process: int | None
    command: str | None
    records: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """The faults in the kernel log since the machine started, or why it cannot be read."""

    readable: bool
    reason: str
    faults: tuple[KernelFault, ...]
