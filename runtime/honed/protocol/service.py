"""The results of the methods that tell of the service itself, as docs/protocol.md has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .results import Device, Peaks
from .versions import ModelPublished


@dataclass(slots=True, kw_only=True, eq=False)
class Places:
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
    device: Device | None
    peaks: Peaks | None
    worker: WorkerStatus
    queue: QueueStatus
    models: tuple[str, ...]
    away: tuple[str, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class JobStatus:
    """A model being added."""

    model_name: str
    stage: str
    fraction: float
    text: str


@dataclass(slots=True, kw_only=True, eq=False)
class SignalReading:
    """A signal that idleness depends on; `verdict` is quiet, busy or absent."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class Status:
    """Of ServerStatus; `models` counts them by state."""

    name: str
    version: str
    pid: int
    uptime_seconds: float
    places: Places
    device: Device | None
    device_spec: str
    peaks: Peaks | None
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


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseAsked:
    """Of LeaseAsk."""

    granted: bool
    lease: int
    why: str


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
    """Of ConfigShow."""

    settings: tuple[ShownSetting, ...]
    files: tuple[str, ...]
    pending: tuple[SettingChange, ...]
    problem: str


@dataclass(slots=True, kw_only=True, eq=False)
class ConfigReloaded:
    """Of ConfigReload."""

    applied: tuple[SettingChange, ...]
    restart: tuple[SettingChange, ...]
    files: tuple[str, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class TunerRan:
    """Of TunerRun; `event` and `kernel_log` are what the tuner says."""

    event: dict[str, Any]
    published: ModelPublished | None = None
    kernel_log: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Spans:
    """Spans of time in seconds; None without any."""

    count: int
    sum: float
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None


@dataclass(slots=True, kw_only=True, eq=False)
class RecentFigures:
    """Of the last minute."""

    seconds: float
    per_second: float
    latency: Spans


@dataclass(slots=True, kw_only=True, eq=False)
class Figures:
    """Of requests; `failures` by the error's code, `engines` that answered: cpu, gpu."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class TimeSpent:
    """By a model lately; `tasks` are the seconds of each tuning task, `profiled` the file they are of."""

    seconds: float
    tasks: dict[str, float]
    profiled: str


@dataclass(slots=True, kw_only=True, eq=False)
class ModelFigures(Figures):
    """Of requests for one model."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerEnd:
    """How a worker ended; `time` in seconds since 1970."""

    time: float
    pid: int
    kind: str
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerFigures:
    """Of a device's workers; `ends` by kind."""

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
    """Of a device."""

    name: str
    shown: str
    worker: WorkerFigures
    queue: QueueFigures


@dataclass(slots=True, kw_only=True, eq=False)
class Gain:
    """Seconds of one inference before tuning and now."""

    before_seconds: float
    now_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class TuningFigures:
    """Of the records; `trials` by outcome, `gains` by model, `reason` why they cannot be read."""

    trials: dict[str, int]
    faults: int
    gains: dict[str, Gain]
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class ReleaseFigures:
    """How long tuners took to leave the device."""

    count: int
    sum_seconds: float
    buckets: tuple[Bucket, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseFigures:
    """Of the idle lease."""

    held: bool
    seconds: float
    grants: int
    revoked: int
    overdue: int
    release: ReleaseFigures


@dataclass(slots=True, kw_only=True, eq=False)
class FaultFigures:
    """Faults of GPUs in the kernel log, by whose they were."""

    watched: bool
    reason: str
    counts: dict[str, int]


@dataclass(slots=True, kw_only=True, eq=False)
class Metrics:
    """Of Metrics, but for the format openmetrics."""

    version: str
    pid: int
    time: float
    uptime_seconds: float
    device: Device | None
    device_time: str
    worker: WorkerFigures
    devices: tuple[DeviceFigures, ...]
    queue: QueueFigures
    connections: int
    whole: Figures
    models: tuple[ModelFigures, ...]
    tuning: TuningFigures | None
    temperatures: dict[str, float]
    lease: LeaseFigures
    gpu_faults: FaultFigures
