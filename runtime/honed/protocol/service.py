"""The results of the methods for the service itself, as in docs/protocol.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .params import HintFigures, TuningFigures
from .results import ModelPublished
from .strict import ABSENT, Map
from .values import DeviceIdentity, DevicePeaks


@dataclass(slots=True, kw_only=True, eq=False)
class ServicePlaces:
    """The paths of the service's socket and folders."""

    socket: str
    state_dir: str
    cache_dir: str


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerStatus:
    """The status of the process that serves a device."""

    state: str
    pid: int
    restarts: int
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class QueueStatus:
    """Numbers of waiting and running requests."""

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
    """The progress of adding a model."""

    model_name: str
    stage: str
    fraction: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReading:
    """A signal for idleness; `verdict` is quiet, busy or absent, `text` is for users."""

    signal: str
    value: float | None
    unit: str
    verdict: str
    text: str


@dataclass(slots=True, kw_only=True, eq=False)
class IdleStatus:
    """The decision on idleness, its reason and signals; `models` has seconds since the last request."""

    idle: bool
    why: str
    readings: tuple[SignalReading, ...]
    models: dict[str, float]


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseHeld:
    """The tuner that holds the idle lease; times in seconds."""

    pid: int
    uid: int
    lease: int
    candidate_seconds: float
    since_seconds: float
    revoked_seconds: float | None
    why: str


@dataclass(slots=True, kw_only=True, eq=False)
class Bucket:
    """The number of durations up to `le_seconds`; None: all."""

    le_seconds: float | None
    count: int


@dataclass(slots=True, kw_only=True, eq=False)
class Releases:
    """Statistics of the time that tuners took to leave the device."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    sum_seconds: float
    buckets: tuple[Bucket, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseStatus:
    """The state of the idle lease, with counts and total seconds since the service started."""

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
    """The tuner's process and its last report."""

    pid: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesStatus:
    """The number of sequences whose state is stored, and the bytes of that."""

    count: int
    bytes: int


NO_SEQUENCES = SequencesStatus(count=0, bytes=0)


@dataclass(slots=True, kw_only=True, eq=False)
class Status:
    """The result of ServerStatus; `models` counts them by state, `hints` are by the key that signed them."""

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
    """The result of TunerRun; `event` is the compiler's result (`honed.jobs.events`)."""

    event: Map
    published: ModelPublished | None = field(default=None, metadata=ABSENT)
    kernel_log: KernelLog | None = field(default=None, metadata=ABSENT)


@dataclass(slots=True, kw_only=True, eq=False)
class TunerMeasured(TunerRan):
    """The result of the commands that measure; `published` is None if nothing better was found."""

    published: ModelPublished | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsExported:
    """The result of HintsExport: the number of records in the file, whose descriptor comes with it."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsImported:
    """The result of HintsImport: `count` hints are new, `merged` were present; `refused` has reasons."""

    count: int
    merged: int
    refused: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationSummary:
    """Statistics of durations in seconds; None without any."""

    count: int
    sum: float
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentFigures:
    """Figures of the requests of the last minute."""

    seconds: float
    per_second: float
    latency: DurationSummary


@dataclass(slots=True, kw_only=True, eq=False)
class Figures:
    """Figures of all requests so far; `failures` by the error's code, `engines` by cpu, gpu, gpu+cpu.

    `batched` counts requests that ran as one with others, in `batches` runs.
    """

    requests: int
    served: int
    failures: dict[str, int]
    retries: int
    engines: dict[str, int]
    kernel_executions: int
    device_seconds: float
    latency: DurationSummary
    queue_time: DurationSummary
    recent: RecentFigures
    batches: int = 0
    batched: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """The recent run time of a model; `tasks` has seconds of each tuning task, for the file `profiled`."""

    seconds: float
    tasks: dict[str, float]
    profiled: str


@dataclass(slots=True, kw_only=True, eq=False)
class ModelFigures(Figures):
    """Figures of the requests for one model."""

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
    """The end of a worker; `time` in seconds since 1970."""

    time: float
    pid: int
    kind: str
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerFigures:
    """Figures of a device's workers; `ends` by kind."""

    state: str
    reason: str
    starts: int
    ends: dict[str, int]
    last_ends: tuple[WorkerEnd, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class QueueFigures:
    """Numbers of waiting and running requests, and the longest queue so far."""

    waiting: int
    running: int
    longest: int


@dataclass(slots=True, kw_only=True, eq=False)
class DeviceFigures:
    """Figures of a device."""

    name: str
    shown: str
    worker: WorkerFigures
    queue: QueueFigures


@dataclass(slots=True, kw_only=True, eq=False)
class ReleaseFigures:
    """A histogram of the time that tuners took to leave the device."""

    count: int
    sum_seconds: float
    buckets: tuple[Bucket, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseFigures:
    """Figures of the idle lease since the service started."""

    held: bool
    seconds: float
    grants: int
    revoked: int
    overdue: int
    release: ReleaseFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFigures:
    """Numbers of GPU faults in the kernel log, by the culprit."""

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
    """The result of Metrics, unless the format is openmetrics."""

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
    """A setting in force, and where it was set."""

    name: str
    value: Any
    unit: str
    origin: str
    effect: str


@dataclass(slots=True, kw_only=True, eq=False)
class SettingChange:
    """A setting whose value in the files differs from the one in force."""

    name: str
    value: Any
    configured: Any
    effect: str


@dataclass(slots=True, kw_only=True, eq=False)
class ConfigShown:
    """The result of ConfigShow.

    `memory_mib` is the largest memory that the settings in force allow honed, of the machine's `machine_mib`.
    """

    settings: tuple[ShownSetting, ...]
    files: tuple[str, ...]
    pending: tuple[SettingChange, ...]
    problem: str
    memory_mib: int = 0  # 0 from older services
    machine_mib: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ConfigReloaded:
    """The result of ConfigReload."""

    applied: tuple[SettingChange, ...]
    restart: tuple[SettingChange, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFault:
    """A GPU fault in the kernel log; `time` in seconds since 1970, `records` are its lines."""

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
