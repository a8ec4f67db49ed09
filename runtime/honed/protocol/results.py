"""The results of the methods for models, as docs/protocol.md has it, which says what the fields mean."""

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
    """What the service is; `limits` by name."""

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
    """What a model takes and gives."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class InferTimes:
    """Microseconds that a request waited, and that the worker took; what answered, on which device.

    Here as in all results `engine` is "gpu", "cpu" or "gpu+cpu", and `engine_name` is what that is called
    (`params.ENGINE_NAMES`).
    """

    queue_us: int
    compute_us: int
    engine: str
    engine_name: str = ""
    device: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class InferredOutput:
    """One output; `parameters` say where in shared memory it lies, if it does."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, str | int]


@dataclass(slots=True, kw_only=True, eq=False)
class PrepareResult:
    """The result of ModelPrepare: the number of the request for ModelRun on this connection."""

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
    """Runs in equal shapes by an app that runs a model by itself: its process, and its last report of them.

    Medians of a run in microseconds: in the app, routed to the service (0: there were none), and of the
    compiled form where it serves, None where there is none. `routed` is the share of the latest runs that
    were routed, and `why` says why not more.
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
    """A model as RepositoryIndex lists it; `owner` is the user who brought it, "" for an administrator's.

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

    `symbols` names the dimensions that have a name; "" where there is none.
    """

    name: str
    datatype: str
    shape: tuple[int, ...] | None
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """The result of ModelBring: what the user calls the model, and whether an engine serves it now.

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
    """How often, and nanoseconds in all."""

    count: int
    ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class InferenceStatistics:
    """Where the time of a model's requests went."""

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
    """How a model is served, as its user set it; also the result of ModelSet.

    Up to `max_batch` rows of several requests are run together, 0: no requests are; each waits for others
    for `batch_delay_us` at most. `warm_up` runs on zeros are made when the CPU engine loads it, before it
    serves; in `warm_up_shapes` where its file leaves sizes open, else in the shapes it was added for, or 1.
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
    """The file a model was made from; `choice` as in format.md."""

    sha256: str
    filename: str
    producer: str
    opset: int | None
    precision: str
    choice: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOutput:
    """The error allowed for an output, and the largest found.

    `covered` is the share of the output that the comparison says something about, None where it is not known.
    """

    name: str
    tolerance: float
    error: float | None
    covered: float | None = None


class OrtSessionConfig(NamedTuple):
    """How ONNX Runtime is asked to run a file: how far it is optimised, and the SHA-256 of its fp16 form."""

    level: str = "none"
    half: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """How ONNX Runtime runs a model, as comparing its fp16 form with it in idle time chose it.

    `half` is the SHA-256 of that form if it serves. A run takes `us` microseconds, and `first_us` in fp32, on
    the threads that `first` describes; both are 0 where the form is not right. Where other programs were busy
    meanwhile, with `others_percent` of the processors, both are compared again. Other values than their
    defaults in `threads`, `spinning` and `arena` are of honed 0.1, which chose them as well.
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
        """Return it for people."""
        if not self.first_us:
            return f"{self.first}; its answers in fp16 are not right"
        in_fp32 = f"{self.first_us / 1e3:.3g} ms in fp32 on {self.first}"
        if self.others_percent is not None:
            in_fp32 += f", measured while other programs took {self.others_percent:.0f} % of the processors"
        return f"{self.us / 1e3:.3g} ms in fp16; {in_fp32}" if self.half else f"{in_fp32}; fp16 is no faster"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimisationCheck:
    """How far ONNX Runtime may optimise a model in the CPU engine, and how that was found.

    `level` (`honed.runtime.engines`) is the highest at which its answers are those that it gives without
    optimisation; "none" where that was not `checked`. `error` is how far off the level "all" is at most, over
    the largest value of an output. `why` says what differs and which node is to blame, or why nothing was
    checked. It took `seconds`, once. `runtime` is the ONNX Runtime that it was found with, as is `session`,
    None before that was looked for.
    """

    level: str
    checked: bool
    error: float | None
    why: str
    seconds: float
    runtime: str = ""
    session: SessionSettings | None = field(default=None, metadata=ABSENT)

    @property
    def asked(self) -> OrtSessionConfig:
        """How the CPU engine is asked to run the model."""
        if not self.checked:  # Whatever `level` is: in stores of earlier versions it is "all"
            return OrtSessionConfig()
        return OrtSessionConfig(self.level, (self.session and self.session.half) or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProof:
    """What the compiled form was compared with."""

    reference: str
    probes: int
    device: str | None
    outputs: tuple[ComparedOutput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChecked:
    """The same comparison as the worker made it."""

    device: str
    outputs: tuple[ComparedOutput, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class ModelPlacement:
    """The device a model belongs to, the one that serves it, and why; the engine pinned by hand, or ""."""

    device: str
    served_by: str
    engine: str
    why: str
    away: str
    pinned_engine: str = ""
    engine_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKernel:
    """A kernel of a model; `launches` in one inference."""

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
    """A compiled form of a model for other shapes than its own.

    `state` is READY, LOADING, UNAVAILABLE, RESTING, or FAILED where it could not be compiled. `requests` came
    in its shapes and count less with time; `answered` it answered since the service started. `engine` is
    the one that serves these shapes, `why` says why, or why it could not be compiled.
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
    """Sizes of a part that depend on the data, for which it was compiled, and times of both engines.

    It is served so unless `why` says why not; where `least` is not 0, for so many rows and more, up to it.
    """

    sizes: tuple[int, ...]
    least: int = 0
    compiled_us: float | None = None
    cpu_us: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInfo:
    """A part of a model that two engines run: "gpu" what is compiled, "cpu" what the CPU engine runs of it.

    `nodes` of the model's file and an estimate of their operations, `why` the CPU engine runs them, what is
    handed to it and back. `last` parts run behind what is compiled, others in between. One that is `sized` is
    compiled for the sizes that it meets often: `forms`, which may run on fewer rows where it is `by_rows`.
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
    """The result of ModelExport, whose descriptors are those of `files`."""

    files: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    precision: str
    sha256: str


@dataclass(slots=True, kw_only=True, eq=False)
class ModelForm:
    """The result of ModelForm: whether a verified compiled form answers requests of these shapes now.

    A run of it takes `time_us` microseconds where it serves, and computes in `precision`, "fp32" standing for
    the model's own types. Where none is `verified`, `why` says why.
    """

    verified: bool
    time_us: int = 0
    precision: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRow:
    """All launches of a kernel in one inference; all copies, and each host function, have a row of their own.

    `kind` is kernel, copy or host, or node: of a model that the CPU engine runs, whose operator is
    `schedule`. `share` is of the profile's `sum_us`. `peak_share` is the least time the device's measured
    peaks allow (the larger of operations over peak arithmetic and bytes over peak bandwidth) over the time
    taken; it and the rates are None where the work or the peaks are not known.
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
    """The result of ModelPublish; times in microseconds of one inference."""

    published: bool
    version: int
    sentence: str
    old_us: float | None
    new_us: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """One compiled file of a model.

    `schedules` tells its kernels apart from those of other versions. `old_us` and `new_us` are lower
    quartiles in microseconds of the version before and of this one, side by side in the serving worker when
    this one came; None where they were not compared. `quarantine` says why it is not served again, or "".
    `brought` are the measured schedules that the version before did not have, each as its task and the first
    12 digits of its trace's SHA-256, with a space between.
    """

    number: int
    sha256: str
    nbytes: int
    schedules: str
    made: float
    why: str
    old_us: float | None
    new_us: float | None
    settled: bool  # It served cleanly, or was put there by hand
    kept: bool  # Its file is still there
    quarantine: str
    brought: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentSpan:
    """When a version was served; `until` is None for the one that is, and `end` says why it went."""

    number: int
    since: float
    until: float | None
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPoint:
    """The median of `count` inferences of one span of time, in microseconds.

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
    """The result of ModelPin; `engine` is the one pinned, or ""."""

    version: int
    pinned: bool
    engine: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedSizes:
    """Sizes that a part was met in: what the shapes of its inputs leave open, in their order."""

    part: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceIdentity:
    """Who the device is; compiled models and tuning records are kept per identity."""

    platform: str
    vendor: str
    name: str
    driver_version: str
    kernel_driver: str  # "kbase", "panthor", "panfrost", "nvidia", or "" where there is none

    @property
    def key(self) -> str:
        """SHA-256 of the identity as canonical JSON, without the driver's version."""
        identity = asdict(self)
        del identity["driver_version"]
        canonical = json.dumps(identity, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


Figure = Literal["fp32_gflops", "fp16_gflops", "bandwidth_gbs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """The highest rates that kernels reach on the device, which `bounds` computes with.

    They are the best of several microbenchmarks, and of the kernels that were proven faster than those
    (docs/devices.md).
    """

    fp32_gflops: float
    fp16_gflops: float | None  # None without cl_khr_fp16
    bandwidth_gbs: float  # GB/s beyond all caches, reading and writing counted together
    launch_us: float  # From one empty kernel to the next in a long queue, which the host may be what limits
    # What moves faster because caches hold it: bytes of a working set, rising, and the GB/s it moves at.
    # Empty where it was not measured.
    caches_gbs: tuple[tuple[int, float], ...] = ()
    # Figures that kernels have passed: what stands for them is a bound from below only. "bandwidth_gbs"
    # speaks for the caches too.
    raised: tuple[Figure, ...] = ()
    empty_us: float | None = None  # END - START of an empty kernel, at the least; None: not measured
    busy: float | None = None  # Share of the CPUs' time that others took meanwhile; None: not known
