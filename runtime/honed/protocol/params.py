"""The parameters of each method, as docs/protocol.md has them.

A field that has a default may be left out, or be nil; one that equals it is not sent, so that a service older
than the field takes the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from .errors import InvalidArgument

Data = bytes | memoryview  # Of a tensor, row-major

PRECISIONS: Final = ("auto", "fp32", "fp16")  # In which a model may be compiled
# What an engine is called, by the word that requests, results and stored files have for it.
ENGINE_NAMES: Final = {"gpu": "opencl", "cpu": "onnxruntime", "gpu+cpu": "opencl+onnxruntime"}
_WORDS: Final = {name: word for word, name in ENGINE_NAMES.items()}


def engine_name(word: str) -> str:
    """Return what an engine is called; a word that is none of an engine stays as it is."""
    return ENGINE_NAMES.get(word, word)


def engine_word(engine: str) -> str:
    """Return the word for an engine that is given by word or by name; any other text stays as it is."""
    return _WORDS.get(engine, engine)


def _take_name(given: LoadOptions | UploadOptions | PinParams) -> None:
    if given.engine is not None:
        object.__setattr__(given, "engine", engine_word(given.engine))


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Parameters of methods that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """Names a model; None or "": all, where the method allows that."""

    name: str | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlace:
    """Where in shared memory a tensor lies, if it does."""

    shared_memory_region: str | None = None
    shared_memory_offset: int | None = None
    shared_memory_byte_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTensor:
    """One input of ModelInfer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: RegionPlace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One output asked for."""

    name: str
    parameters: RegionPlace | None = None


ROOM_ALIGN = 64  # Bytes; the room for outputs, and each of them in it, starts at a multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class InferOptions:
    """`timeout` in microseconds. A request with a `sequence_id` other than 0 and "" is of a sequence.

    The shared memory, in bytes, is room for outputs that have no place of their own: those that fit may be
    answered there. A request in a sequence is answered without, but for one with `last_token`, which a
    decoder answers for the last token alone. Only a verified compiled form answers a request that says
    `compiled`; where there is none for its shapes, the error is NotCompiled, at once.
    """

    timeout: int | None = None
    priority: int | None = None
    finite: bool | None = None
    sequence_id: int | str | None = None
    sequence_start: bool | None = None
    sequence_end: bool | None = None
    last_token: bool | None = None
    compiled: bool | None = None
    shared_memory_region: str | None = None
    shared_memory_offset: int | None = None
    shared_memory_byte_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareParams:
    """Parameters of ModelPrepare: a request but for its data and `id`."""

    model_name: str
    model_version: str | None = None
    parameters: InferOptions | None = None
    inputs: tuple[InputTensor, ...]
    outputs: tuple[OutputTensor, ...] | None = None


@dataclass(slots=True, kw_only=True)  # Frozen takes four times as long to make
class RunParams:
    """Parameters of ModelRun: the number that ModelPrepare gave, and what is each request's own.

    `timeout` in microseconds; None: as prepared.
    """

    number: int
    id: str | None = None
    timeout: int | None = None
    raw_input_contents: tuple[Data, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferParams(PrepareParams):
    """Parameters of ModelInfer: ModelPrepare and ModelRun in one."""

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
    """Names a region; None or "": all of the connection's."""

    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How an ONNX file is to be compiled, and for which device; "fastest" compares all there are.

    `calibration` is how many of the files, the last, are sets of inputs that errors in fp16 are measured on.
    `engine` is "fastest", "opencl" or "onnxruntime" (or "gpu" or "cpu"); None: as configured. Without `wait`
    the answer comes as soon as the model is served, though it be compiled further; None: with. `variants` are
    more shapes that it is compiled for. `state` are inputs by the output that each is given next in a
    sequence; None: what the file says, or names and shapes do.
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
        """Take an engine by its name, too."""
        _take_name(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParams:
    """Parameters of RepositoryModelLoad."""

    model_name: str
    files: tuple[str, ...]
    parameters: LoadOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOptions:
    """How a brought file is to be served; None: as LoadOptions has it by default.

    A file for "opencl" is one that the app runs by itself: it is compiled first for these `shapes`, and
    loaded into the CPU engine only where it is asked for by name.
    """

    shapes: dict[str, tuple[int, ...]] | None = None
    precision: str | None = None
    engine: str | None = None

    def __post_init__(self) -> None:
        """Take an engine by its name, too."""
        _take_name(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadParams:
    """Parameters of ModelBring: the ONNX file, then its external data, and the SHA-256 of each as hex."""

    files: tuple[str, ...]
    sha256: tuple[str, ...]
    parameters: UploadOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportParams:
    """Parameters of ModelExport."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What an app does with a model that it runs by itself, for runs in the shapes that it asks about.

    Medians of a run, in microseconds, in the app and `routed` to the service, 0 where there were none; runs
    since the report before; the state of the route (own, trying, routed, checking), and `why` no more runs
    are routed.
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
    """Parameters of ModelForm: which compiled form there is for inputs of these shapes."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    report: RunReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishParams:
    """Parameters of ModelPublish. `expected` is the SHA-256 of the compiled file served when it was made."""

    name: str
    expected: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryParams:
    """Parameters of ModelHistory."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackParams:
    """Parameters of ModelRollback. `version` None: the one before."""

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
    """Parameters of ModelPin. `version` None: the one served; 0: no longer pinned.

    `engine` is "opencl" or "onnxruntime" (or "gpu" or "cpu"), which is pinned in a version's place, or "",
    which lets it go.
    """

    name: str
    version: int | None
    engine: str | None = None

    def __post_init__(self) -> None:
        """Take an engine by its name, too."""
        _take_name(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadParams:
    """Parameters of RepositoryModelUnload."""

    model_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How often to run for a profile, and whether to tell when the commands of the first run ran."""

    runs: int | None = None
    timeline: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileParams:
    """Parameters of ModelProfile."""

    name: str
    parameters: ProfileOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsParams:
    """Parameters of Metrics: "openmetrics" for its text, None or "" for plain data."""

    format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAskParams:
    """Parameters of LeaseAsk: a tuner leaves the device within so many seconds of being told."""

    candidate_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseReleaseParams:
    """Parameters of LeaseRelease; None where no lease was granted yet."""

    lease: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerReportParams:
    """Parameters of TunerReport: what the tuner does, in a sentence, and what tuning has done so far."""

    text: str = ""
    tuning: TuningFigures | None = None


MEASURING: Final = ("tasks", "tune")  # Commands of TunerRun that measure


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerRunParams:
    """Parameters of TunerRun; docs/protocol.md says which command takes which."""

    command: str
    model: str | None = None
    trials: int | None = None
    seconds: float | None = None
    best: bool | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsExportParams:
    """Parameters of HintsExport: with `spread` what a prior can be learned from, else what can be used."""

    spread: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HintsImportParams:
    """Parameters of HintsImport: the device that the hints are of, by its spec; None for the service's."""

    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerStopParams:
    """Parameters of TunerStop."""

    model: str


PREFIX: Final = "hub: "
# A key's name, and its id where another has that name, too (honed.hub.index.trusted_keys).
_SOURCE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}( [0-9A-F]{16})?")


@dataclass(frozen=True, slots=True)
class HintMarks:
    """What hints of one source say: who measured, the end of the compiler's name, why one is quarantined."""

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
    """Return the marks that a hint must have by the key it names; raise InvalidArgument for no key's name."""
    source = source_of(measured_by)
    if not _SOURCE.fullmatch(source):
        raise InvalidArgument(
            f"it is no hint: it was measured by {measured_by[:80]!r}, which is no key's name"
        )
    return marks(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Estimated seconds of one inference of a model when its tuning began, and now."""

    before_seconds: float
    now_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HintFigures:
    """Records of a hub by one key: how many were `taken`, and of the last weeks `tried` here and `failed`.

    One fails that is not right here, or far slower than it claims. `aside`: no more of them are tried.
    """

    taken: int
    tried: int
    failed: int
    aside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFigures:
    """Figures about the records of tuning.

    `trials` are by outcome, `faults` counts candidates in quarantine, `gains` are by model, and `hints` count
    those of a hub by the name of the key that signed them. `reason` is why the records cannot be read; there
    are no figures then.
    """

    trials: dict[str, int]
    faults: int
    gains: dict[str, Gain]
    hints: dict[str, HintFigures] = field(default_factory=dict)
    reason: str = ""
