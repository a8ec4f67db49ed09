"""Defines faults, the records of the kernel log that report them, and the rows of a driver's table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import cached_property

RESOURCE_TERMINATED = 0x0F
UNRECOVERABLE = 0x41
CS_BUS_FAULT = 0x48
INHERIT_FAULT = 0x4B
FIRMWARE_INTERNAL_ERROR = 0x68

# Exceptions of Arm's GPUs, command-stream and job-manager. Keyed on the number, as names differ between
# drivers.
EXCEPTIONS: Mapping[int, str] = {
    0x04: "terminated",
    RESOURCE_TERMINATED: "resource terminated",
    0x40: "configuration fault",
    UNRECOVERABLE: "unrecoverable",
    0x44: "endpoint fault",
    CS_BUS_FAULT: "bus fault",
    0x49: "invalid instruction",
    0x4A: "call-stack overflow",
    INHERIT_FAULT: "fault inherited from another queue",
    0x50: "invalid program counter",
    0x51: "invalid instruction encoding",
    0x55: "invalid barrier",
    0x58: "invalid data",
    0x59: "tile out of range",
    0x5A: "address out of range",
    0x5B: "imprecise fault",
    0x60: "out of memory",
    FIRMWARE_INTERNAL_ERROR: "firmware internal error",
    0x69: "resource eviction timeout",
    0x80: "GPU bus fault",
    0x88: "GPU shareability fault",
    0x89: "system shareability fault",
    0x8A: "GPU cacheability fault",
    **{0xC0 + level: f"translation fault, level {level}" for level in range(5)},
    **{0xC8 + level: f"permission fault, level {level}" for level in range(4)},
    **{0xD8 + level: f"access flag fault, level {level}" for level in range(1, 4)},
    0xE0: "address size fault, input",
    **{0xE4 + level: f"address size fault, output, level {level}" for level in range(4)},
    **{0xE8 + level: f"memory attribute fault, level {level}" for level in range(4)},
}

# Consequences: these two only say that another fault has ended the queue.
CONSEQUENCES = frozenset({RESOURCE_TERMINATED, INHERIT_FAULT})


class Driver(StrEnum):
    """The part of the kernel that wrote the record; ROCKET and RKNPU drive Rockchip's NPU.

    KBASE_JM marks records that only kbase for job-manager GPUs (Midgard, Bifrost) writes; records that the
    kbase for command-stream GPUs writes, too, such as page faults, are KBASE.
    """

    KBASE = "kbase"
    KBASE_JM = "kbase-jm"
    PANTHOR = "panthor"
    PANFROST = "panfrost"
    LIMA = "lima"
    ROCKET = "rocket"
    RKNPU = "rknpu"
    AMDGPU = "amdgpu"
    I915 = "i915"
    XE = "xe"
    MSM = "msm"
    NVIDIA = "nvidia"
    KERNEL = "kernel"  # The kernel's out-of-memory killer, which is no GPU driver


class Severity(StrEnum):
    """The reach of a fault; `rank` orders them, worst highest."""

    OUT_OF_MEMORY = "out-of-memory"  # An allocation of GPU memory failed
    QUEUE = "queue"  # G: one queue group or job is lost
    CONTEXT = "context"  # C: every queue group of that GPU context is lost
    PROCESS_KILLED = "process-killed"  # P: the kernel killed the process
    RESET = "reset"  # R: the GPU is reset, and the running work of every process with it
    DEVICE_LOST = "device-lost"  # D: the GPU is unusable until its driver or the machine starts again

    @property
    def rank(self) -> int:
        """The rank in order of severity, from 0."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A record of the kernel log that reports a fault. Fields that it does not mention are None."""

    driver: Driver
    device: str | None  # Such as "fb000000.gpu"; NVIDIA's PCI address, "0000:c1:00"
    severity: Severity
    kind: str  # Kind of record: "page-fault", "cs-fatal", "xid", ...
    code: int | None  # Exception code, NVIDIA's Xid, or the status the driver printed
    name: str | None  # Name of the exception, as the driver printed it
    meaning: str | None  # Meaning of the code in EXCEPTIONS
    tgid: int | None  # Process that made the GPU context, in the initial pid namespace
    tid: int | None  # Thread that made it, in the initial pid namespace
    comm: str | None  # Command name of the process
    context: int | None  # Counter of kbase for contexts of the device
    group: int | None  # Handle of the queue group
    address_space: int | None
    consequence: bool  # Consequence of another fault, not a cause
    announces: bool  # Names the owner of the record that follows it
    text: str  # The whole record


@dataclass(frozen=True)
class Pattern:
    """A record that begins as printf would write `format`, the driver's own.

    `format` may omit the end. `source` says where the driver writes it ("FILE FUNCTION VERSIONS; ...", the
    first and the last version examined). `fields` names the fields of Fault that the conversions become, in
    order, "-" for those that become none; the status (whose low byte is the code) and the code are
    hexadecimal. `expression` replaces format and fields if they are not precise enough; its named groups are
    the fields.
    """

    kind: str
    severity: Severity
    format: str
    source: str
    fields: str = ""
    _: KW_ONLY
    expression: str | None = None
    driver: Driver | None = None  # Driver, if not the table's
    by_code: Mapping[int, Severity] | None = None  # Severity by code, replacing `severity`
    announces: bool = False  # Names the owner of the record that the driver writes next
    consequence: bool = False

    @cached_property  # Compiled at first use: of hundreds of rows a machine needs those of its own driver
    def start(self) -> re.Pattern[str]:
        """The expression for the start of the record, after what the driver writes before every message."""
        return starts(_expression(self.format, self.fields) if self.expression is None else self.expression)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordTable:
    """The records of one driver's faults, in the order of matching."""

    driver: Driver
    patterns: tuple[Pattern, ...]
    words: tuple[str, ...] = ()  # Names of the driver before its device
    functions: tuple[str, ...] = ()  # Module, or the start of its functions' names, in DRM_ERROR
    openings: tuple[str, ...] = ()  # Starts of records that name no device
    inner: str = ""  # Expression for the text before every message


def starts(expression: str) -> re.Pattern[str]:
    """Compile an expression for the start of a record: ASCII digits, `^` and `$` at every line."""
    return re.compile(expression, re.ASCII | re.MULTILINE)


_CONVERSION = re.compile(r"%(%|[-+ #0]*[\d*]*(?:\.\d+)?(?:hh|h|ll|l|z)?(?:[diuxXsc]|p[A-Za-z]*))")
_PADDED = re.compile(r"[-+ #]*[1-9]\d*[^\d.]")  # Has a width, padded with blanks
_HEX = r"[0-9A-Fa-f]{1,16}"
_TEXT_CHARACTERS = 100  # Length of a %s or %p; bounded, so that hostile text costs no more than its length
_DECIMAL = r"-?\d{1,20}"


def _expression(written: str, fields: str) -> str:
    """Return the regular expression for what printf writes with the format `written`."""
    parts, end, names = [], 0, iter(fields.split())
    for found in _CONVERSION.finditer(written):
        parts.append(re.escape(written[end : found.start()]))
        end = found.end()
        parts.append("%" if found[1] == "%" else _conversion(found[1], next(names, "-"), end == len(written)))
    if (left := next(names, None)) is not None:
        raise ValueError(f"{written!r} has no conversion for {left}")
    parts.append(re.escape(written[end:]))
    return "".join(parts) + (r"(?!\w)" if re.search(r"\w\Z", written) else "")


def _conversion(conversion: str, name: str, last: bool) -> str:
    """Return the regular expression for one printf conversion, as a group unless its name is "-"."""
    before, inner = "", _DECIMAL
    if "p" in conversion or conversion[-1] in "sc":
        inner = rf"[^\n]{{0,{_TEXT_CHARACTERS}}}" + ("" if last else "?")
    elif conversion[-1] in "xX":
        before, inner = (r" {0,20}" if _PADDED.match(conversion) else "") + "(?:0x)?", _HEX
    return before + (inner if name == "-" else f"(?P<{name}>{inner})")
