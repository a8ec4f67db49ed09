"""The results of the methods that tell of the service itself, as docs/protocol.md has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .params import HintFigures, TuningFigures
from .results import DeviceIdentity, DevicePeaks, ModelPublished
from .strict import ABSENT, Map


@dataclass(slots=True, kw_only=True, eq=False)
class ServicePlaces:
    """Where the service keeps its things."""

    socket: str
    state_dir: str
    cache_dir: str


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerStatus:
    """The process that serves a device."""

    state: str
    pid: int
    restarts: int
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class QueueStatus:
    """Requests that wait and run."""

    waiting: int
    running: int


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceStatus:
    """A device of the service, and what it serves."""

    name: str
    engine: str
    default: bool
    stand_in: bool
    spec: str
    device: DeviceIdentity | None
    peaks: DevicePeaks | None
    worker: WorkerStatus
    queue: QueueStatus
    models: tuple[str, ...]
    away: tuple[str, ...]
    engine_name: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class JobStatus:
    """A model being added."""

    model_name: str
    stage: str
    fraction: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReading:
    """A signal that idleness depends on; `verdict` is quiet, busy or absent, `text` for people."""

    signal: str
    value: float | None
    unit: str
    verdict: str
    text: str


@dataclass(slots=True, kw_only=True, eq=False)
class IdleStatus:
    """Whether the machine is idle; `models` maps to seconds since the last request."""

    idle: bool
    why: str
    readings: tuple[SignalReading, ...]
    models: dict[str, float]


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseHeld:
    """Who has the idle lease."""

    pid: int
    uid: int
    lease: int
    candidate_seconds: float
    since_seconds: float
    revoked_seconds: float | None
    why: str


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """How many times were at most so long; None: any."""

    le_seconds: float | None
    count: int


@dataclass(slots=True, kw_only=True, eq=False)
class Releases:
    """How long tuners took to leave the device."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    sum_seconds: float
    buckets: tuple[Bucket, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseStatus:
    """The idle lease."""

    state: str
    holder: LeaseHeld | None
    waiting: int
    granted: int
    revoked: int
    overdue: int
    seconds: float
    release: Releases


@dataclass(slots=True, kw_only=True, eq=False)
class TunerStatus:
    """What the tuner does."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesStatus:
    """Sequences whose state is kept, and the bytes of that."""

    count: int
    bytes: int


NO_SEQUENCES = SequencesStatus(count=0, bytes=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Status:
    """The result of ServerStatus; `models` counts them by state, `hints` are a hub's records by their key."""

    name: str
    version: str
    pid: int
    uptime_seconds: float
    places: ServicePlaces
    device: DeviceIdentity | None
    device_spec: str
    peaks: DevicePeaks | None
    worker: WorkerStatus
    devices: tuple[DeviceStatus, ...]
    models: dict[str, int]
    queue: QueueStatus
    connections: int
    jobs: tuple[JobStatus, ...]
    damaged: tuple[str, ...]
    idle: IdleStatus
    lease: LeaseStatus
    tuner: TunerStatus
    sequences: SequencesStatus = NO_SEQUENCES
    hints: dict[str, HintFigures] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseAsked:
    """The result of LeaseAsk."""

    granted: bool
    lease: int
    why: str


@dataclass(slots=True, kw_only=True, eq=False)
class TunerRan:
    """The result of TunerRun; `event` is what the tuner says (`honed.jobs.events`)."""

    event: Map
    published: ModelPublished | None = field(default=None, metadata=ABSENT)
    kernel_log: KernelLog | None = field(default=None, metadata=ABSENT)


@dataclass(slots=True, kw_only=True, eq=False)
class TunerMeasured(TunerRan):
    """The result of the commands that measure; `published` is None where nothing better was found."""

    published: ModelPublished | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsExported:
    """The result of HintsExport: how many records are in the file whose descriptor comes with it."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsImported:
    """The result of HintsImport: `count` hints are new, `merged` were here; `refused` says why not others."""

    count: int
    merged: int
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans of time in seconds; None without any."""

    count: int
    sum: float
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentFigures:
    """Requests of the last minute."""

    seconds: float
    per_second: float
    latency: Spans


@dataclass(slots=True, kw_only=True, eq=False)
class Figures:
    """Requests so far; `failures` by the error's code, `engines` that answered: cpu, gpu, gpu+cpu.

    `batched` are those that were run as one with others, in so many `batches`.
    """

    requests: int
    served: int
    failures: dict[str, int]
    retries: int
    engines: dict[str, int]
    kernel_executions: int
    device_seconds: float
    latency: Spans
    queue_time: Spans
    recent: RecentFigures
    batches: int = 0
    batched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """The time a model took lately; `tasks` are seconds of each tuning task, of the file `profiled`."""

    seconds: float
    tasks: dict[str, float]
    profiled: str


@dataclass(slots=True, kw_only=True, eq=False)
class ModelFigures(Figures):
    """Requests for one model."""

    name: str
    version: int
    quarantined_versions: int
    sha256: str
    state: str
    ready: bool
    away: str
    engine: str
    device: str
    waiting: int
    spent: TimeSpent
    engine_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker ended; `time` in seconds since 1970."""

    time: float
    pid: int
    kind: str
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerFigures:
    """A device's workers; `ends` by kind."""

    state: str
    reason: str
    starts: int
    ends: dict[str, int]
    last_ends: tuple[WorkerEnd, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class QueueFigures:
    """Requests that wait and run, and the most that ever waited."""

    waiting: int
    running: int
    longest: int


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceFigures:
    """A device at work."""

    name: str
    shown: str
    worker: WorkerFigures
    queue: QueueFigures


@dataclass(slots=True, kw_only=True, eq=False)
class ReleaseFigures:
    """How long tuners took to leave the device."""

    count: int
    sum_seconds: float
    buckets: tuple[Bucket, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseFigures:
    """The idle lease since the service started."""

    held: bool
    seconds: float
    grants: int
    revoked: int
    overdue: int
    release: ReleaseFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFigures:
    """Faults of GPUs in the kernel log, by whose they were."""

    watched: bool
    reason: str
    counts: dict[str, int]


@dataclass(slots=True, kw_only=True, eq=False)
class MetricsText:
    """The result of Metrics in the format openmetrics."""

    content_type: str
    text: str


@dataclass(slots=True, kw_only=True, eq=False)
class Metrics:
    """The result of Metrics, but for the format openmetrics."""

    version: str
    pid: int
    time: float
    uptime_seconds: float
    device: DeviceIdentity | None
    device_time: str
    worker: WorkerFigures
    devices: tuple[DeviceFigures, ...]
    queue: QueueFigures
    connections: int
    whole: Figures
    models: tuple[ModelFigures, ...]
    variants: tuple[ModelFigures, ...] = ()
    tuning: TuningFigures | None
    temperatures: dict[str, float]
    lease: LeaseFigures
    gpu_faults: FaultFigures


@dataclass(slots=True, kw_only=True, eq=False)
class ShownSetting:
    """A setting in force."""

    name: str
    value: Any
    unit: str
    origin: str
    effect: str


@dataclass(slots=True, kw_only=True, eq=False)
class SettingChange:
    """A setting whose value the files say otherwise."""

    name: str
    value: Any
    configured: Any
    effect: str


@dataclass(slots=True, kw_only=True, eq=False)
class ConfigShown:
    """The result of ConfigShow.

    `memory_mib` is what the settings in force let honed take at most of the machine's `machine_mib`.
    """

    settings: tuple[ShownSetting, ...]
    files: tuple[str, ...]
    pending: tuple[SettingChange, ...]
    problem: str
    memory_mib: int = 0  # 0: of a service that does not say
    machine_mib: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ConfigReloaded:
    """The result of ConfigReload."""

    applied: tuple[SettingChange, ...]
    restart: tuple[SettingChange, ...]
    files: tuple[str, ...]


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
