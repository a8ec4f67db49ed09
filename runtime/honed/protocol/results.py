"""The results of the methods for models; docs/protocol.md says what the fields mean."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from .params import Data
from .strict import ABSENT


@dataclass(slots=True, kw_only=True, eq=False)
class Empty:
    """The result of methods that have none."""


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """The result of ServerLive."""

    live: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Ready:
    """The result of ServerReady and ModelReady."""

    ready: bool


@dataclass(slots=True, kw_only=True, eq=False)
class ServerMetadata:
    """The result of ServerMetadata: the service's version, extensions, and limits by name."""

    name: str
    version: str
    extensions: tuple[str, ...]
    limits: dict[str, int | float]


@dataclass(slots=True, kw_only=True, eq=False)
class TensorMetadata:
    """An input or output of a model."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class ModelMetadata:
    """The result of ModelMetadata: a model's inputs and outputs."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class InferTimes:
    """The microseconds that a request waited and ran, and the engine and device that answered it.

    Here as in all results `engine` is "gpu", "cpu" or "gpu+cpu", and `engine_name` its name
    (`params.ENGINE_NAMES`).
    """

    queue_us: int
    compute_us: int
    engine: str
    engine_name: str = ""
    device: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class InferredOutput:
    """An output of a request; `parameters` are its place in shared memory, if it is there."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, str | int]


@dataclass(slots=True, kw_only=True, eq=False)
class PrepareResult:
    """The result of ModelPrepare: the request's number, for ModelRun on this connection."""

    number: int


@dataclass(slots=True, kw_only=True, eq=False)
class InferResult:
    """The result of ModelInfer."""

    model_name: str
    model_version: str
    id: str
    parameters: InferTimes
    outputs: tuple[InferredOutput, ...]
    raw_output_contents: tuple[Data, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class RegionSpan:
    """A registered region, in bytes."""

    name: str
    offset: int
    byte_size: int


@dataclass(slots=True, kw_only=True, eq=False)
class Regions:
    """The result of SystemSharedMemoryStatus."""

    regions: tuple[RegionSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppUse:
    """The last report of an app's process that runs a model by itself, for runs in equal shapes.

    Medians of a run in microseconds: in the app, routed to the service (0: there were none), and of the
    compiled model where it serves, None if there is none. `routed` is the share of recent runs that were
    routed, and `why` says why there are no more.
    """

    app: str
    pid: int
    shapes: dict[str, tuple[int, ...]]
    own_us: int
    routed_us: int
    compiled_us: int | None
    routed: float
    why: str


@dataclass(slots=True, kw_only=True, eq=False)
class IndexedModel:
    """A model in RepositoryIndex; `owner` is the user who uploaded it, "" for an administrator's.

    `apps` are those that run it by themselves.
    """

    name: str
    version: str
    state: str
    reason: str
    engine: str = "gpu"
    engine_why: str = ""
    variants: int = 0
    pinned_engine: str = ""
    owner: str = ""
    engine_name: str = ""
    device: str = ""
    apps: tuple[AppUse, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class ModelIndex:
    """The result of RepositoryIndex."""

    models: tuple[IndexedModel, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class ModelAdded:
    """The result of RepositoryModelLoad."""

    model_name: str
    sha256: str
    seconds: float
    notes: tuple[str, ...]
    kernels: int
    launches: int
    engine: str = "gpu"
    engine_why: str = ""
    engine_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredTensor:
    """An output as ONNX Runtime infers it: -1 is an open size, `shape` None an unknown number of dimensions.

    `symbols` are the names of the dimensions; "" for one without a name.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """The result of ModelBring: the user's name of the model, and whether an engine serves it now.

    `sha256` is that of the ONNX file.
    """

    model_name: str
    sha256: str
    ready: bool
    engine: str
    engine_why: str
    outputs: tuple[InferredTensor, ...] = ()
    engine_name: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class Tallied:
    """A count of events and their total duration in nanoseconds."""

    count: int
    ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class InferenceStatistics:
    """Counts and durations of a model's requests, in total and by stage."""

    success: Tallied
    fail: Tallied
    queue: Tallied
    compute_input: Tallied
    compute_infer: Tallied
    compute_output: Tallied


@dataclass(slots=True, kw_only=True, eq=False)
class ServedRequests:
    """Requests for one model; `last_inference` in milliseconds since 1970."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    engine_name: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of a model by its user; also the result of ModelSet.

    Up to `max_batch` rows of several requests run as one, 0: no batching; each request waits for others for
    at most `batch_delay_us`. The CPU engine makes `warm_up` runs on zeros when it loads the model, before it
    serves: in `warm_up_shapes` for sizes that the file leaves open, else in the shapes of adding it, or 1.
    """

    max_batch: int = 0
    batch_delay_us: int = 0
    warm_up: int = 0
    warm_up_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class ModelStatistics:
    """The result of ModelStatistics."""

    model_stats: tuple[ServedRequests, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The file that a model was compiled from; `choice` as in format.md."""

    sha256: str
    filename: str
    producer: str
    opset: int | None
    precision: str
    choice: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOutput:
    """The error allowed for an output, and the largest error.

    `covered` is the share of the output that the comparison verifies, None if unknown.
    """

    name: str
    tolerance: float
    error: float | None
    covered: float | None = None


class OrtSessionConfig(NamedTuple):
    """The settings of an ONNX Runtime session: optimisation level, and SHA-256 of the fp16 model or ""."""

    level: str = "none"
    half: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """The fp16 choice of a model's ONNX Runtime session, from comparing fp16 with fp32 in idle time.

    `half` is the SHA-256 of the fp16 model if it serves. A run takes `us` microseconds in fp16, and
    `first_us` in fp32 on the threads that `first` describes; both are 0 if the fp16 model's outputs are
    wrong. If other programs were busy meanwhile, using `others_percent` of the processors, both are compared
    again. Only honed 0.1 wrote `threads`, `spinning` and `arena` other than their defaults.
    """

    threads: int = 0
    spinning: bool = True
    us: float
    first_us: float
    first: str
    others_percent: float | None = field(default=None, metadata=ABSENT)
    arena: bool | None = field(default=None, metadata=ABSENT)
    half: str | None = field(default=None, metadata=ABSENT)

    def __str__(self) -> str:
        """Return the settings as text for users."""
        if not self.first_us:
            return f"{self.first}; its answers in fp16 are not right"
        in_fp32 = f"{self.first_us / 1e3:.3g} ms in fp32 on {self.first}"
        if self.others_percent is not None:
            in_fp32 += f", measured while other programs took {self.others_percent:.0f} % of the processors"
        return f"{self.us / 1e3:.3g} ms in fp16; {in_fp32}" if self.half else f"{in_fp32}; fp16 is no faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimisationCheck:
    """The optimisation level of ONNX Runtime for a model on the CPU engine, and the check that found it.

    `level` (`honed.runtime.engines`) is the highest whose outputs equal those without optimisation; "none" if
    not `checked`. `error` is the largest difference at level "all", over the largest value of an output.
    `why` says what differs and which node causes it, or why nothing was checked. The check took `seconds`,
    once. `runtime` identifies the ONNX Runtime that was checked and for which `session` was found. `session`
    is None before fp16 was compared.
    """

    level: str
    checked: bool
    error: float | None
    why: str
    seconds: float
    runtime: str = ""
    session: SessionSettings | None = field(default=None, metadata=ABSENT)

    @property
    def session_config(self) -> OrtSessionConfig:
        """The settings of the session in which the CPU engine runs the model."""
        if not self.checked:  # Stores of earlier versions may have "all" here
            return OrtSessionConfig()
        return OrtSessionConfig(self.level, (self.session and self.session.half) or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProof:
    """The verification of a compiled model by the compiler: reference, device, and errors by output."""

    reference: str
    probes: int
    device: str | None
    outputs: tuple[ComparedOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChecked:
    """The verification of a compiled model by the worker that loaded it: device, and errors by output."""

    device: str
    outputs: tuple[ComparedOutput, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class ModelPlacement:
    """The device a model belongs to, the one that serves it, and why; the user's pinned engine, or ""."""

    device: str
    served_by: str
    engine: str
    why: str
    away: str
    pinned_engine: str = ""
    engine_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKernel:
    """A kernel of a model; `launches` in one inference, `prepared` at loading."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    flops: int
    bytes: int
    task: str
    schedule: str
    launches: int
    prepared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVariant:
    """A shape variant of a model.

    `state` is READY, LOADING, UNAVAILABLE, RESTING, or FAILED if it could not be compiled. `requests` counts
    requests in its shapes, and decays with time; `answered` counts those it answered since the service
    started. `engine` serves these shapes; `why` is the reason, or why the variant could not be compiled.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    requests: float
    answered: int
    state: str
    engine: str
    version: int
    why: str
    by_hand: bool
    bytes: int
    loaded_bytes: int
    engine_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialisationInfo:
    """Sizes of a partition that depend on the data, for which it was compiled, and times of both engines.

    It serves these sizes unless `why` gives a reason against it; if `least` is not 0, any number of rows from
    `least` to its own.
    """

    sizes: tuple[int, ...]
    least: int = 0
    compiled_us: float | None = None
    cpu_us: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """The compiled partitions of a model ("gpu"), or one that the CPU engine runs ("cpu").

    `nodes` counts nodes of the model's file, `flops` estimates their operations, and `why` lists reasons that
    the CPU engine runs them. `last` partitions run after the compiled steps, others between. If `sized`, the
    partition is compiled for frequently observed sizes: `forms`, which may run on fewer rows if it is
    `by_rows`.
    """

    engine: str
    nodes: int
    flops: int
    why: tuple[str, ...] = ()
    inputs: tuple[TensorMetadata, ...] = ()
    outputs: tuple[TensorMetadata, ...] = ()
    last: bool = False
    sized: bool = False
    by_rows: bool = False
    forms: tuple[SpecialisationInfo, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class ModelShown:
    """The result of ModelShow."""

    name: str
    state: str
    reason: str
    sha256: str
    bytes: int
    added: float
    source: ModelSource
    shapes: dict[str, tuple[int, ...]]
    precision: str
    notes: tuple[str, ...] = ()
    compiler: dict[str, str] = field(default_factory=dict)
    device: DeviceIdentity
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    proof: ModelProof | None = None
    placement: ModelPlacement
    checked: ModelChecked | None = None
    kernels: tuple[ShownKernel, ...] = ()
    launches: int = 0
    copies: int = 0
    host_calls: int = 0
    constant_bytes: int = 0
    arena_bytes: int = 0
    prepared_bytes: int = 0
    variants: tuple[ShownVariant, ...] = ()
    parts: tuple[PartitionInfo, ...] = ()
    sequence_state: dict[str, str] = field(default_factory=dict)
    forms: str = ""
    settings: ModelSettings = field(default_factory=ModelSettings)
    optimisation: OptimisationCheck | None = None
    apps: tuple[AppUse, ...] = ()
    preconditions: tuple[str, ...] = ()
    broke_preconditions: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ModelExported:
    """The result of ModelExport, with a descriptor for each of `files`."""

    files: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    precision: str
    sha256: str


@dataclass(slots=True, kw_only=True, eq=False)
class ModelForm:
    """The result of ModelForm: whether a verified compiled model answers requests of these shapes now.

    Its run takes `time_us` microseconds in the service, and computes in `precision`; "fp32" stands for the
    model's own types. If none is `verified`, `why` says why.
    """

    verified: bool
    time_us: int = 0
    precision: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRow:
    """The launches of one kernel in an inference; all copies share a row, as do calls of one host function.

    `kind` is kernel, copy or host, or node for a model on the CPU engine, with the operator in `schedule`.
    `share` is of the profile's `sum_us`. `peak_share` is the least time that the device's measured peaks
    allow (the larger of operations over peak arithmetic and bytes over peak bandwidth) over the measured
    time; it and the rates are None if work or peaks are unknown.
    """

    name: str
    kind: str
    task: str
    schedule: str
    count: int
    us: float
    share: float
    gflops: float | None
    gbs: float | None
    peak_share: float | None


@dataclass(slots=True, kw_only=True, eq=False)
class ModelProfile:
    """The result of ModelProfile.

    A span of the timeline is name, host_us, host_end_us, device_us, device_end_us.
    """

    name: str
    runs: int
    launches: int
    whole_us: float
    sum_us: float
    device: DeviceIdentity
    peaks: DevicePeaks | None
    rows: tuple[ProfiledRow, ...]
    engine: str = "gpu"
    engine_name: str = "opencl"
    timeline: tuple[tuple[str, float, float, float | None, float | None], ...] | None = field(
        default=None, metadata=ABSENT
    )


@dataclass(slots=True, kw_only=True, eq=False)
class ModelPublished:
    """The result of ModelPublish; times of one inference in microseconds."""

    published: bool
    version: int
    sentence: str
    old_us: float | None
    new_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A compiled file of a model.

    `schedules` is equal for equal kernels. `old_us` and `new_us` are lower quartiles in microseconds of the
    previous version and of this one, run in turns by the serving worker before this one was published; None
    if they were not compared. `quarantine` says why it is not served again, or "". `brought` are the measured
    schedules that the previous version did not have, each as its task and the first 12 digits of its trace's
    SHA-256, separated by a space.
    """

    number: int
    sha256: str
    nbytes: int
    schedules: str
    made: float
    why: str
    old_us: float | None
    new_us: float | None
    settled: bool  # Passed its canary, or was added or selected by an administrator
    kept: bool  # Still has its file
    quarantine: str
    brought: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpan:
    """The time that a version served; `until` is None for the present one, and `end` says why it ended."""

    number: int
    since: float
    until: float | None
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPoint:
    """The median time in microseconds of `count` inferences in one span of time.

    `time` is that of the first of them, in seconds since 1970.
    """

    time: float
    version: int
    count: int
    us: float


@dataclass(slots=True, kw_only=True, eq=False)
class ModelHistory:
    """The result of ModelHistory."""

    name: str
    version: int
    pinned: bool
    on_trial: bool
    versions: tuple[ModelVersion, ...]
    deployments: tuple[DeploymentSpan, ...] = field(metadata={"wire": "stints"})
    latency: tuple[LatencyPoint, ...]
    engine_name: str = ""
    device: str = ""
    session: SessionSettings | None = field(default=None, metadata=ABSENT)


@dataclass(slots=True, kw_only=True, eq=False)
class RolledBack:
    """The result of ModelRollback."""

    version: int


@dataclass(slots=True, kw_only=True, eq=False)
class VersionPinned:
    """The result of ModelPin; `engine` is the pinned engine, or ""."""

    version: int
    pinned: bool
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSizes:
    """Sizes observed in the inputs of a partition, in the place of each -1 of their shapes, in order."""

    part: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """The identity of a device, which compiled models and tuning records belong to."""

    platform: str
    vendor: str
    name: str
    driver_version: str
    kernel_driver: str  # Such as "kbase", "panthor" or "nvidia"; "" if there is none

    @property
    def key(self) -> str:
        """The SHA-256 of the identity as canonical JSON, without the driver's version."""
        identity = asdict(self)
        del identity["driver_version"]
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


Figure = Literal["fp32_gflops", "fp16_gflops", "bandwidth_gbs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """The highest rates that kernels reach on the device, which `roofline` computes with.

    They are the best of several microbenchmarks, and of kernels that were measured to be faster
    (docs/devices.md).
    """

    fp32_gflops: float
    fp16_gflops: float | None  # GFLOPS; None without cl_khr_fp16
    bandwidth_gbs: float  # GB/s beyond all caches, reading and writing counted together
    launch_us: float  # Time from one empty kernel to the next in a long queue, which the host may limit
    # Rates of data that caches hold: bytes of a working set, rising, and GB/s. Empty if not measured.
    caches_gbs: tuple[tuple[int, float], ...] = ()
    # Figures that kernels have exceeded, so that each is only a lower bound. "bandwidth_gbs" includes the
    # caches.
    raised: tuple[Figure, ...] = ()
    empty_us: float | None = None  # Least END - START of an empty kernel; None: not measured
    busy: float | None = None  # Share of CPU time of other programs meanwhile; None: unknown
