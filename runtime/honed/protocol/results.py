"""The results of the methods for models; docs/protocol.md says what the fields mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .strict import ABSENT
from .values import (
    ComparedOutput,
    Data,
    DeviceIdentity,
    ModelProof,
    OptimisationCheck,
    PartitionInfo,
    SessionSettings,
    ShownKernel,
    TensorMetadata,
)


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
    (`values.ENGINE_NAMES`).
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
