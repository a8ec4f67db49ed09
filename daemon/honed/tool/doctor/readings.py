"""What was read from the machine, as plain values; nothing here judges."""

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

    path: str  # "" where it does not load
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IcdFile:
    """An ICD file, the library it names, and how a child that loaded that library fared."""

    path: str
    library: str
    stack: Stack
    ended: Ended
    loaded: str  # The path that it was loaded from
    error: str  # Why the library did not load or the child ended


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCLDevice:
    """An OpenCL device as its driver describes it."""

    name: str
    kind: str  # "GPU", "accelerator", "CPU" or "other"
    driver_version: str
    fp16: bool
    compute_units: int
    memory_bytes: int
    usable: bool  # Available, with a compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """An OpenCL platform and its devices."""

    name: str
    version: str
    devices: tuple[OpenCLDevice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCL:
    """What a child saw that asked OpenCL the way honed does, through pyopencl."""

    ended: Ended = "ok"
    error: str = ""  # A sentence; with "crashed" and "hung" what the driver printed last
    loader: str = ""  # The libOpenCL that pyopencl uses
    platforms: tuple[Platform, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHardware:
    """A GPU the kernel knows of."""

    name: str  # fb000000.gpu, or a PCI address
    driver: str  # "mali" is kbase; "" where no driver is bound
    compatible: str  # The device tree's name for it, "" for PCI
    nodes: tuple[str, ...]  # Device nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode:
    """A device node and who may open it."""

    path: str
    owner: str
    uid: int
    group: str
    gid: int
    mode: int
    openable: bool  # For reading and writing by this user, access lists included


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """devfreq's view of a GPU, in Hz; 0 where not readable."""

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
    kbase: str  # Release of Arm's kernel driver, "g24p0-00eac0 (...)"; "" where it does not tell
    panthor_firmware: bool  # arm/mali/arch10.8/mali_csffw.bin, without which panthor does not start


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder honed writes to. Where it is missing, the figures are those of the nearest folder above."""

    path: str
    purpose: str
    exists: bool
    writable: bool  # By this user
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """The service as its socket shows it."""

    socket: str
    state: Literal["answers", "absent", "refused", "forbidden", "silent"]
    error: str = ""
    version: str = ""
    may_infer: bool = False  # This user may call more than the public methods
    worker: str = ""  # State of its worker, "" where not told
    worker_reason: str = ""
    device: str = ""
    lost: tuple[str, ...] = ()  # Other devices of its without a worker, each with the reason
    cpu_engine: bool = True  # It has one
    unit: str = ""  # What systemd says of a service that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A Python package; version None where it is not installed."""

    name: str
    part: Part
    version: str | None
    wanted: str  # The only version that is known to work, "" where others do


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPrior:
    """A prior that was put in the place of one that ships."""

    path: str
    digest: str
    error: str  # Why it is not used


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """All of it. `environment` holds the variables that change what OpenCL does."""

    user: Account
    service_user: Account | None  # "honed", where there is one
    groups: tuple[str, ...]  # Of video, render, honed and honed-admin those the machine has
    environment: dict[str, str]
    loader: OpenCLLoader
    icds: tuple[IcdFile, ...]
    opencl: OpenCL
    mesa: str  # Version of Debian's package of rusticl, "" where it is not installed
    machine: Hardware
    folders: tuple[Folder, ...]
    daemon: Daemon
    python: str
    venv: bool  # Python runs in a virtual environment, which sees no package of the system's
    packages: tuple[Package, ...]
    priors: tuple[OwnPrior, ...] = ()
