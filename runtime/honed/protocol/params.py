"""The parameters of each method, as in docs/protocol.md.

A field that has a default may be missing or nil. A field that equals its default is not sent, so that a
service older than the field accepts the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from .errors import InvalidArgument
from .values import Data, engine_word


def _take_name(options: LoadOptions | UploadOptions | PinParams) -> None:
    if options.engine is not None:
        object.__setattr__(options, "engine", engine_word(options.engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """The parameters of methods that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """The name of a model; None or "": all, if the method allows that."""

    name: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlace:
    """The place of a tensor in shared memory, in bytes; None if it is not there."""

    shared_memory_region: str | None = None
    shared_memory_offset: int | None = None
    shared_memory_byte_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTensor:
    """An input of a request: its type, its shape, and its place in shared memory unless it is sent."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: RegionPlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """A requested output, and its place in shared memory, if any."""

    name: str
    parameters: RegionPlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferOptions:
    """The options of a request: `timeout` in microseconds, and its sequence if `sequence_id` is not 0 or "".

    The shared memory, in bytes, is room for outputs that have no place of their own; the service may put
    those that fit there. Requests in a sequence do not use it, except those with `last_token`, for which a
    decoder returns the logits of the last token alone. With `greedy_tokens` a decoder continues with the
    likeliest token by itself, until there are as many, or one of `stop_tokens`; its only output is `tokens`.
    With `compiled`, only a verified compiled model may answer; if there is none for these shapes, the service
    answers NotCompiled at once.
    """

    timeout: int | None = None
    priority: int | None = None
    finite: bool | None = None
    sequence_id: int | str | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None
    last_token: bool | None = None
    greedy_tokens: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    compiled: bool | None = None
    shared_memory_region: str | None = None
    shared_memory_offset: int | None = None
    shared_memory_byte_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareParams:
    """Parameters of ModelPrepare: a request without its data and `id`."""

    model_name: str
    model_version: str | None = None
    parameters: InferOptions | None = None
    inputs: tuple[InputTensor, ...]
    outputs: tuple[OutputTensor, ...] | None = None


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class RunParams:
    """Parameters of ModelRun: the number from ModelPrepare, and the fields that differ between requests.

    `timeout` in microseconds; None: as prepared.
    """

    number: int
    id: str | None = None
    timeout: int | None = None
    raw_input_contents: tuple[Data, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferParams(PrepareParams):
    """Parameters of ModelInfer: those of ModelPrepare and ModelRun together."""

    id: str | None = None
    raw_input_contents: tuple[Data, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionParams:
    """Parameters of SystemSharedMemoryRegister, in bytes."""

    name: str
    offset: int | None = None
    byte_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionName:
    """The name of a region; None or "": all of the connection's."""

    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of compiling an ONNX file. `device` "fastest" compares all devices.

    `calibration` is the number of files, the last ones, that are sets of inputs to measure errors in fp16 on.
    `engine` is "fastest", "opencl" or "onnxruntime" (or "gpu" or "cpu"); None: as configured. With `wait`
    False the answer comes as soon as an engine serves the model, while it is still being compiled. `variants`
    are more shapes to compile for. `state` maps each output to the input that it becomes in a sequence; None:
    as the file, or names and shapes, show it.
    """

    shapes: dict[str, tuple[int, ...]] | None = None
    precision: str | None = None
    replace: bool | None = None
    device: str | None = None
    calibration: int | None = None
    engine: str | None = None
    wait: bool | None = None
    variants: tuple[dict[str, tuple[int, ...]], ...] | None = None
    state: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """Convert an engine's name to its word."""
        _take_name(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParams:
    """Parameters of RepositoryModelLoad: `files` has a name for each descriptor, the model's first."""

    model_name: str
    files: tuple[str, ...]
    parameters: LoadOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOptions:
    """Options of serving an uploaded file; None: the default of LoadOptions.

    With engine "opencl" the app runs the model itself: it is first compiled for these `shapes`, and the CPU
    engine loads it only for requests that name it.
    """

    shapes: dict[str, tuple[int, ...]] | None = None
    precision: str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        """Convert an engine's name to its word."""
        _take_name(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadParams:
    """Parameters of ModelBring: the ONNX file, then its external data, and the SHA-256 of each as hex."""

    files: tuple[str, ...]
    sha256: tuple[str, ...]
    parameters: UploadOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportParams:
    """Parameters of ModelExport: a model or variant."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A report of an app that runs a model by itself, for runs in the shapes that it asks about.

    Medians of a run, in microseconds, in the app (own) and in the service (routed), 0 if there were none;
    runs since the previous report; the state of the route (own, trying, routed, checking), and `why` no more
    runs are routed.
    """

    app: str
    own_us: int
    routed_us: int
    own_runs: int
    routed_runs: int
    state: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormParams:
    """Parameters of ModelForm, which asks whether a verified compiled model serves inputs of these shapes."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    report: RunReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishParams:
    """Parameters of ModelPublish.

    `expected` is the SHA-256 of the file served when the new one was compiled.
    """

    name: str
    expected: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryParams:
    """Parameters of ModelHistory: a model or variant."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackParams:
    """Parameters of ModelRollback. `version` None: the previous one."""

    name: str
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SetParams:
    """Parameters of ModelSet, as in ModelSettings; None leaves a setting as it is."""

    name: str
    max_batch: int | None = None
    batch_delay_us: int | None = None
    warm_up: int | None = None
    warm_up_shapes: dict[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinParams:
    """Parameters of ModelPin. `version` None: the one served; 0: unpin.

    `engine` "opencl" or "onnxruntime" (or "gpu" or "cpu") pins that engine and no version; "" unpins the
    engine.
    """

    name: str
    version: int | None
    engine: str | None = None

    def __post_init__(self) -> None:
        """Convert an engine's name to its word."""
        _take_name(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadParams:
    """Parameters of RepositoryModelUnload: the model to remove."""

    model_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Options of a profile: the number of runs, and whether to include the timeline of the first run."""

    runs: int | None = None
    timeline: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileParams:
    """Parameters of ModelProfile: a model or variant."""

    name: str
    parameters: ProfileOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsParams:
    """Parameters of Metrics: "openmetrics" for text, None or "" for plain data."""

    format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAskParams:
    """Parameters of LeaseAsk: the seconds within which the tuner leaves the device after a revocation."""

    candidate_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleaseParams:
    """Parameters of LeaseRelease: the lease's number, None if no lease was granted yet."""

    lease: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerReportParams:
    """Parameters of TunerReport: a sentence on what the tuner does, and figures of tuning so far."""

    text: str = ""
    tuning: TuningFigures | None = None


MEASURING: Final = ("tasks", "tune")  # TunerRun commands that measure on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerRunParams:
    """Parameters of TunerRun; docs/protocol.md says which command uses which."""

    command: str
    model: str | None = None
    trials: int | None = None
    seconds: float | None = None
    best: bool | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsExportParams:
    """Parameters of HintsExport: with `spread` for records to learn a prior from, else for usable ones."""

    spread: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsImportParams:
    """Parameters of HintsImport: the spec of the device that the hints are for; None: the service's."""

    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerStopParams:
    """Parameters of TunerStop: the model or variant whose tuning stops."""

    model: str


PREFIX: Final = "hub: "
# Name of a key, followed by its id if another key has the same name (honed.hub.layout.trusted_keys).
_SOURCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}( [0-9A-F]{16})?")


@dataclass(frozen=True, slots=True)
class HintMarks:
    """The marks of hints from one source: `measured_by`, the end of `compiler`, and quarantine `reason`."""

    measured_by: str
    compiler: str
    reason: str


def marks(source: str) -> HintMarks:
    """Return the marks of hints that the key of this name has signed."""
    return HintMarks(f"{PREFIX}{source}", f", by {source}", f"in quarantine at {source}")


def source_of(measured_by: str) -> str:
    """Return the name of the key that signed a record; "" for a record that is no hint."""
    return measured_by.removeprefix(PREFIX) if measured_by.startswith(PREFIX) else ""


def marks_of(measured_by: str) -> HintMarks:
    """Return the marks required of a hint by the key it names; raise InvalidArgument for no key's name."""
    source = source_of(measured_by)
    if not _SOURCE.fullmatch(source):
        raise InvalidArgument(
            f"it is no hint: it was measured by {measured_by[:80]!r}, which is no key's name"
        )
    return marks(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Estimated seconds of one inference of a model: when its tuning began, and now."""

    before_seconds: float
    now_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HintFigures:
    """A hub's records by one key: `taken` were imported; `tried` and `failed` here in recent weeks.

    A hint fails if it is wrong here, or far slower than its record says. `aside`: no more of them are tried.
    """

    taken: int
    tried: int
    failed: int
    aside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFigures:
    """Figures of the tuning records.

    `trials` are by outcome, `faults` counts candidates in quarantine, `gains` are by model, and `hints` are
    by the name of the key that signed a hub's records. `reason` says why the records cannot be read; then
    there are no figures.
    """

    trials: dict[str, int]
    faults: int
    gains: dict[str, Gain]
    hints: dict[str, HintFigures] = field(default_factory=dict)
    reason: str = ""
