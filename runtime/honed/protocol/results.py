"""The results of the methods for models, as docs/protocol.md has it, which says what the fields mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .device import DeviceIdentity, DevicePeaks
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
    """Microseconds that a request waited, and that the worker took; what answered: cpu, gpu, or gpu+cpu."""

    queue_us: int
    compute_us: int
    engine: str


@dataclass(slots=True, kw_only=True, eq=False)
class InferredOutput:
    """One output; `parameters` say where in shared memory it lies, if it does."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, str | int]


@dataclass(slots=True, kw_only=True, eq=False)
class Inferred:
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


@dataclass(slots=True, kw_only=True, eq=False)
class IndexedModel:
    """A model as RepositoryIndex lists it; `owner` is the user who brought it, "" for an administrator's."""

    name: str
    version: str
    state: str
    reason: str
    engine: str = "gpu"
    engine_why: str = ""
    variants: int = 0
    pinned_engine: str = ""
    owner: str = ""


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
class ModelBrought:
    """The result of ModelBring: what the user calls the model, and whether an engine serves it now.

    `sha256` is that of the ONNX file.
    """

    model_name: str
    sha256: str
    ready: bool
    engine: str
    engine_why: str
    outputs: tuple[InferredTensor, ...] = ()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimisationCheck:
    """How far ONNX Runtime may optimise a model in the CPU engine, and how that was found.

    `level` (`honed.runtime.engines`) is the highest at which its answers are those that it gives without
    optimisation; "all" where that was not `checked`. `error` is how far off the level "all" is at most, over
    the largest value of an output. `why` says what differs and which node is to blame, or why nothing was
    checked. It took `seconds`, once. `runtime` is the ONNX Runtime that it was found with.
    """

    level: str
    checked: bool
    error: float | None
    why: str
    seconds: float
    runtime: str = ""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownForm:
    """Sizes of a part that depend on the data, for which it was compiled, and times of both engines.

    It is served so unless `why` says why not; where `least` is not 0, for so many rows and more, up to it.
    """

    sizes: tuple[int, ...]
    least: int = 0
    compiled_us: float | None = None
    cpu_us: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownPart:
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
    forms: tuple[ShownForm, ...] = ()


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
    parts: tuple[ShownPart, ...] = ()
    sequence_state: dict[str, str] = field(default_factory=dict)
    settings: ModelSettings = field(default_factory=ModelSettings)
    optimisation: OptimisationCheck | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class ModelExported:
    """The result of ModelExport, whose descriptors are those of `files`."""

    files: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    precision: str
    sha256: str


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
    timeline: tuple[tuple[str, float, float, float | None, float | None], ...] | None = field(
        default=None, metadata=ABSENT
    )
