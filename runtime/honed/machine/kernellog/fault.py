"""What one record of the kernel log says went wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

RESOURCE_TERMINATED = 0x0F
UNRECOVERABLE = 0x41
CS_BUS_FAULT = 0x48
INHERIT_FAULT = 0x4B
FIRMWARE_INTERNAL_ERROR = 0x68

# Of Arm's GPUs, command-stream and job-manager. Keyed on the number: the names differ from driver to driver.
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

# These two only tell that something else has ended the queue.
CONSEQUENCES = frozenset({RESOURCE_TERMINATED, INHERIT_FAULT})


class Driver(StrEnum):
    """The part of the kernel that wrote the record; ROCKET and RKNPU drive Rockchip's NPU.

    KBASE_JM marks records that only kbase for job-manager GPUs (Midgard, Bifrost) writes; those that it
    shares with the one for command-stream GPUs, page faults among them, are KBASE.
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
    KERNEL = "kernel"  # not a GPU driver: the kernel's out-of-memory killer


class Severity(StrEnum):
    """How far a fault reaches; `rank` orders them, worst highest."""

    OUT_OF_MEMORY = "out-of-memory"  # an allocation of GPU memory failed
    QUEUE = "queue"  # G: one queue group or job is lost
    CONTEXT = "context"  # C: every queue group of that GPU context is lost
    PROCESS_KILLED = "process-killed"  # P: the kernel killed the process
    RESET = "reset"  # R: the GPU is reset, and the running work of every process with it
    DEVICE_LOST = "device-lost"  # D: the GPU is unusable until its driver or the machine starts again

    @property
    def rank(self) -> int:
        """Its place among all, from 0."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One record of the kernel log that tells of a fault. What it does not say is None."""

    driver: Driver
    device: str | None  # "fb000000.gpu"; of NVIDIA the PCI address, "0000:c1:00"
    severity: Severity
    kind: str  # of record: "page-fault", "cs-fatal", "xid", ...
    code: int | None  # exception code, NVIDIA's Xid, or the status the driver printed
    name: str | None  # of the exception, as the driver printed it
    meaning: str | None  # of the code, as EXCEPTIONS or nvidia.XIDS have it
    tgid: int | None  # process that made the GPU context, in the initial pid namespace
    tid: int | None  # thread that made it, in the initial pid namespace
    comm: str | None  # command name of the process
    context: int | None  # kbase's counter of contexts of the device
    group: int | None  # handle of the queue group
    slot: int | None  # hardware slot of the group or job; -1: on none any more
    stream: int | None  # command stream in the group
    address_space: int | None
    address: int | None  # GPU address that faulted, bytes
    access: str | None  # "READ", "WRITE", ... of a memory fault
    hang: bool  # no progress in time, rather than something invalid
    consequence: bool  # of another fault, not a cause
    announces: bool  # names the owner of the record that follows it
    text: str  # the whole record
