"""Provides the values read from the machine, without judging them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from honed.machine.vendors import Stack

Ended = Literal["ok", "failed", "crashed", "hung"]
Part = Literal["runtime", "daemon", "tuner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user and the groups it is in."""

    name: str
    uid: int
    gids: tuple[int, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCLLoader:
    """The system's OpenCL loader, libOpenCL.so.1."""

    path: str  # Empty if it does not load
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IcdFile:
    """An ICD file, the library it names, and how loading that library in a child ended."""

    path: str
    library: str
    stack: Stack
    ended: Ended
    loaded: str  # Path that the library was loaded from
    error: str  # Reason that the library did not load or the child ended


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCLDevice:
    """An OpenCL device as its driver describes it."""

    name: str
    kind: str  # One of "GPU", "accelerator", "CPU" and "other"
    driver_version: str
    fp16: bool
    compute_units: int
    memory_bytes: int
    usable: bool  # True if it is available and has a compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """An OpenCL platform and its devices."""

    name: str
    version: str
    devices: tuple[OpenCLDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCL:
    """The OpenCL platforms that a child saw through pyopencl, which honed uses too."""

    ended: Ended = "ok"
    error: str = ""  # A sentence; with "crashed" and "hung" the driver's last output
    loader: str = ""  # The libOpenCL that pyopencl uses
    platforms: tuple[Platform, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHardware:
    """A GPU that the kernel lists."""

    name: str  # Such as fb000000.gpu, or a PCI address
    driver: str  # Name "mali" is kbase; "" if no driver is bound
    compatible: str  # The device tree's name for it, "" for PCI
    nodes: tuple[str, ...]  # Paths of its device nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode:
    """A device node and who may open it."""

    path: str
    owner: str
    uid: int
    group: str
    gid: int
    mode: int
    openable: bool  # True if this user may read and write it, access lists included


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The clock of a GPU as devfreq shows it, in Hz; 0 if not readable."""

    name: str
    current: int
    minimum: int
    maximum: int
    governor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware and its kernel."""

    model: str
    kernel: str
    cpus: int
    memory_bytes: int
    available_bytes: int
    gpus: tuple[GpuHardware, ...]
    nodes: tuple[DeviceNode, ...]
    clocks: tuple[Clock, ...]
    gpu_celsius: float | None
    kbase: str  # Release of Arm's kernel driver, "g24p0-00eac0 (...)"; "" if not shown
    panthor_firmware: bool  # True if arm/mali/arch10.8/mali_csffw.bin exists, which panthor needs to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder honed writes to. If it is missing, the figures are those of the nearest folder above."""

    path: str
    purpose: str
    exists: bool
    writable: bool  # True if this user may write to it
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """The service as its socket shows it."""

    socket: str
    state: Literal["answers", "absent", "refused", "forbidden", "silent"]
    error: str = ""
    version: str = ""
    may_infer: bool = False  # True if this user may call more than the public methods
    worker: str = ""  # State of the service's worker, "" if not reported
    worker_reason: str = ""
    device: str = ""
    lost: tuple[str, ...] = ()  # Other devices of the service without a worker, each with the reason
    cpu_engine: bool = True  # True if the service has a CPU engine
    unit: str = ""  # A sentence about the systemd unit if it failed, else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A Python package; version None if it is not installed."""

    name: str
    part: Part
    version: str | None
    wanted: str  # The only version known to work, "" if others work


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPrior:
    """A local prior that replaces the shipped one."""

    path: str
    digest: str
    error: str  # Reason that it is not used, "" if it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """The readings of one machine. `environment` has the variables that change what OpenCL does."""

    user: Account
    service_user: Account | None  # The user "honed", if it exists and is not `user`
    groups: tuple[str, ...]  # Existing groups among video, render, honed and honed-admin
    environment: dict[str, str]
    loader: OpenCLLoader
    icds: tuple[IcdFile, ...]
    opencl: OpenCL
    mesa: str  # Version of Debian's package of rusticl, "" if it is not installed
    machine: Hardware
    folders: tuple[Folder, ...]
    daemon: Daemon
    python: str
    venv: bool  # True if Python runs in a virtual environment, which sees no package of the system
    packages: tuple[Package, ...]
    priors: tuple[OwnPrior, ...] = ()
