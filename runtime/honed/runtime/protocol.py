"""What is said over the socket: parameters of each method, errors as maps, who may call what.

docs/protocol.md is the specification; both the service and the clients use these types. No I/O.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from . import errors, strict
from .errors import HonedError, InvalidArgument, ModelRefused

P = TypeVar("P")

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
VERSION: Final = "1"  # of every model
DEFAULT_TIMEOUT_US: Final = 60_000_000
MAX_DESCRIPTORS: Final = 32  # with one message


Data = bytes | memoryview  # of a tensor, row-major


class MissingFiles(ModelRefused):
    """The model keeps data in files beside it that were not sent; `files` are their relative names."""

    def __init__(self, message: str, reasons: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> None:
        super().__init__(message, reasons)
        self.files = files


class Right(enum.Enum):
    """Who may call a method."""

    ANYONE = enum.auto()
    INFER = enum.auto()
    CHANGE = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """Parameters of methods that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParams:
    """Names a model; None or "": all, where the method allows that."""

    name: str | None
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlace:
    """Where in shared memory a tensor lies, if it does."""

    shared_memory_region: str | None
    shared_memory_offset: int | None
    shared_memory_byte_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputTensor:
    """One input of ModelInfer."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: RegionPlace | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One output asked for."""

    name: str
    parameters: RegionPlace | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferOptions:
    """`timeout` in microseconds."""

    timeout: int | None
    priority: int | None
    finite: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InferParams:
    """Parameters of ModelInfer."""

    model_name: str
    model_version: str | None
    id: str | None
    parameters: InferOptions | None
    inputs: tuple[InputTensor, ...]
    outputs: tuple[OutputTensor, ...] | None
    raw_input_contents: tuple[Data, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionParams:
    """Parameters of SystemSharedMemoryRegister, in bytes."""

    name: str
    offset: int | None
    byte_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionName:
    """Names a region; None or "": all of the connection's."""

    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How an ONNX file is to be compiled, and for which device; "fastest" compares all there are.

    `calibration` is how many of the files, the last, are sets of inputs that errors in fp16 are measured on.
    """

    shapes: dict[str, tuple[int, ...]] | None
    precision: str | None
    replace: bool | None
    device: str | None
    calibration: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParams:
    """Parameters of RepositoryModelLoad."""

    model_name: str
    files: tuple[str, ...]
    parameters: LoadOptions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportParams:
    """Parameters of ModelExport."""

    name: str


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
class PinParams:
    """Parameters of ModelPin. `version` None: the one served; 0: no longer pinned."""

    name: str
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadParams:
    """Parameters of RepositoryModelUnload."""

    model_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How often to run for a profile, and whether to tell when the commands of the first run ran."""

    runs: int | None
    timeline: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileParams:
    """Parameters of ModelProfile."""

    name: str
    parameters: ProfileOptions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsParams:
    """Parameters of Metrics: "openmetrics" for its text, None or "" for plain data."""

    format: str | None


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
    """Parameters of TunerReport: what the tuner does, in a sentence."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerRunParams:
    """Parameters of TunerRun; docs/protocol.md says which command takes which."""

    command: str
    model: str | None
    trials: int | None
    seconds: float | None
    best: bool | None
    device: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerStopParams:
    """Parameters of TunerStop."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelParams:
    """Parameters of the Cancel notification."""

    msgid: int


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the service."""

    params: type[Any]
    right: Right


METHODS: Final[Mapping[str, Method]] = {
    "ServerLive": Method(Nothing, Right.ANYONE),
    "ServerReady": Method(Nothing, Right.ANYONE),
    "ServerMetadata": Method(Nothing, Right.ANYONE),
    "ServerStatus": Method(Nothing, Right.INFER),
    "Metrics": Method(MetricsParams, Right.INFER),
    "ConfigShow": Method(Nothing, Right.INFER),
    "ConfigReload": Method(Nothing, Right.CHANGE),
    "ModelReady": Method(ModelParams, Right.INFER),
    "ModelMetadata": Method(ModelParams, Right.INFER),
    "ModelStatistics": Method(ModelParams, Right.INFER),
    "ModelShow": Method(ModelParams, Right.INFER),
    "ModelProfile": Method(ProfileParams, Right.INFER),
    "ModelExport": Method(ExportParams, Right.CHANGE),
    "ModelPublish": Method(PublishParams, Right.CHANGE),
    "ModelHistory": Method(HistoryParams, Right.INFER),
    "ModelRollback": Method(RollbackParams, Right.CHANGE),
    "ModelPin": Method(PinParams, Right.CHANGE),
    "ModelInfer": Method(InferParams, Right.INFER),
    "LeaseAsk": Method(LeaseAskParams, Right.CHANGE),
    "TunerReport": Method(TunerReportParams, Right.CHANGE),
    "LeaseRelease": Method(LeaseReleaseParams, Right.CHANGE),
    "TunerRun": Method(TunerRunParams, Right.CHANGE),
    "TunerStop": Method(TunerStopParams, Right.CHANGE),
    "SystemSharedMemoryRegister": Method(RegionParams, Right.INFER),
    "SystemSharedMemoryStatus": Method(RegionName, Right.INFER),
    "SystemSharedMemoryUnregister": Method(RegionName, Right.INFER),
    "RepositoryIndex": Method(Nothing, Right.INFER),
    "RepositoryModelLoad": Method(LoadParams, Right.CHANGE),
    "RepositoryModelUnload": Method(UnloadParams, Right.CHANGE),
}
EXTENSIONS: Final = ("model_repository", "statistics", "system_shared_memory", "honed")


def parse(kind: type[P], params: Mapping[str, Any]) -> P:
    """The parameters of a message as their dataclass; raises InvalidArgument for anything else."""
    try:
        return strict.from_plain(kind, params, where="params", none_omitted=True)
    except strict.Mismatch as error:
        raise InvalidArgument(f"{error}; see docs/protocol.md for what this method takes") from error


def check_name(name: str, what: str = "model") -> str:
    """`name` itself where it may name a model or region; raises InvalidArgument where not."""
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name[:80]!r} cannot name a {what}; use 1 to 64 letters, digits, '.', '_' and '-', "
            "a letter or digit first"
        )
    return name


def check_version(version: str | None) -> None:
    """Raise NotFound for versions that no model has."""
    if version not in (None, "", VERSION):
        raise errors.NotFound(
            f"models have the one version {VERSION!r} and not {version[:80]!r}; leave it out"
        )


def error_to_map(error: HonedError) -> dict[str, Any]:
    """The error as it travels."""
    plain: dict[str, Any] = {"code": error.code, "message": str(error), "type": type(error).__name__}
    if isinstance(error, ModelRefused) and error.reasons:
        plain["reasons"] = list(error.reasons)
    if isinstance(error, MissingFiles):
        plain["external_data"] = list(error.files)
    return plain


def error_from_map(plain: Mapping[str, Any]) -> HonedError:
    """The exception an error map stands for; never raises, whatever the map holds."""
    message = str(plain.get("message", "the service gave an error without a message; see its log"))
    kind = _ERROR_TYPES.get(str(plain.get("type")))
    if kind is None or kind.code != plain.get("code"):
        kind = _ERROR_CODES.get(str(plain.get("code")), errors.Internal)
    reasons = _strings(plain.get("reasons"))
    if kind is MissingFiles:
        return MissingFiles(message, reasons, _strings(plain.get("external_data")))
    if kind is ModelRefused:
        return ModelRefused(message, reasons)
    return kind(message)


def _strings(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


# The first of each code is what a client gets that knows no finer type.
_ERROR_ORDER: tuple[type[HonedError], ...] = (
    errors.InvalidArgument,
    errors.ModelRefused,
    errors.NotFound,
    errors.AlreadyExists,
    errors.PermissionDenied,
    errors.DeadlineExceeded,
    errors.Cancelled,
    errors.ResourceExhausted,
    errors.Unimplemented,
    errors.Unavailable,
    errors.Internal,
    errors.ModelFileError,
    errors.ProfileError,
    errors.DeviceError,
    MissingFiles,
)
_ERROR_TYPES = {kind.__name__: kind for kind in _ERROR_ORDER}
_ERROR_CODES = {kind.code: kind for kind in reversed(_ERROR_ORDER)}
