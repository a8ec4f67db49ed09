"""The errors that honed raises on purpose: each is one sentence that says what is wrong and what to do.

The `code` of an error is sent over the socket. Codes are gRPC's status codes, which the Open Inference
Protocol uses, and NOT_PREPARED, which only clients see.
"""

from __future__ import annotations

from typing import ClassVar, Final

from .strict import Map


class HonedError(Exception):
    """The base of all errors that honed raises on purpose; `str(error)` is one sentence for the user."""

    code: ClassVar[str] = "INTERNAL"


class InvalidArgument(HonedError):
    """Raised when the caller passed something malformed; the same call cannot succeed."""

    code = "INVALID_ARGUMENT"


class PreconditionBroken(InvalidArgument):
    """Raised when an input holds a value that a compiled model does not serve; ONNX Runtime may."""


class ModelFileError(InvalidArgument):
    """Raised when a `.honed` file is truncated, altered, of another version, or impossible."""


class OtherFormat(ModelFileError):
    """Raised when a `.honed` file was written by another version of honed."""


class ProfileError(InvalidArgument):
    """Raised when a device profile file is malformed."""


class ModelRefused(HonedError):
    """Raised when no engine can serve a model correctly; `reasons` has every reason."""

    code = "FAILED_PRECONDITION"

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class MissingFiles(ModelRefused):
    """Raised when external data of a model was not sent; `files` are the relative names."""

    def __init__(self, message: str, reasons: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> None:
        super().__init__(message, reasons)
        self.files = files


class NotFound(HonedError):
    """Raised when there is no model, region or device of that name."""

    code = "NOT_FOUND"


class SequenceLost(NotFound):
    """Raised when the service does not know a sequence, or no longer: its state is gone."""


class AlreadyExists(HonedError):
    """Raised when a model or region of that name exists."""

    code = "ALREADY_EXISTS"


class PermissionDenied(HonedError):
    """Raised when the caller's user is not in the group that may do this."""

    code = "PERMISSION_DENIED"


class DeadlineExceeded(HonedError):
    """Raised when the request's own deadline passed before it was answered."""

    code = "DEADLINE_EXCEEDED"


class NotPrepared(HonedError):
    """Raised when the service does not know the number of a prepared request; prepare it again."""

    code = "NOT_PREPARED"


class Cancelled(HonedError):
    """Raised when the client cancelled the request."""

    code = "CANCELLED"


class ResourceExhausted(HonedError):
    """Raised when a limit is reached: queue, memory, disk, size of a message."""

    code = "RESOURCE_EXHAUSTED"


class Busy(ResourceExhausted):
    """Raised when others are served first; the same call may succeed later."""


class AnswerTooLarge(ResourceExhausted):
    """Raised when outputs do not fit a message; `nbytes` of shared memory hold them, 0 if unknown."""

    def __init__(self, message: str, nbytes: int = 0) -> None:
        super().__init__(message)
        self.nbytes = nbytes


class Unimplemented(HonedError):
    """Raised when the service has no such method."""

    code = "UNIMPLEMENTED"


class Unavailable(HonedError):
    """Raised when the service or its worker cannot answer now; the same call may succeed later."""

    code = "UNAVAILABLE"


class NotCompiled(Unavailable):
    """Raised when no compiled model is served for the shapes of a request that asked for one."""


class Internal(HonedError):
    """Raised when honed itself failed; the sentence says what to report."""


class DeviceError(HonedError):
    """Raised when there is no usable OpenCL device, or the device failed while running."""

    code = "UNAVAILABLE"


class OutOfMemory(DeviceError):
    """Raised when a process may take no more memory to hold or run a model."""


class NotLoaded(NotFound):
    """Raised when a worker does not hold the model; the service loads it and runs the request again."""


def error_to_map(error: HonedError) -> Map:
    """Return an error as a map for the wire, with the nearest type that every reader knows."""
    name = next((_TYPE_NAMES[kind] for kind in type(error).__mro__ if kind in _TYPE_NAMES), "HonedError")
    plain: Map = {"code": error.code, "message": str(error), "type": name}
    if isinstance(error, ModelRefused) and error.reasons:
        plain["reasons"] = list(error.reasons)
    if isinstance(error, MissingFiles):
        plain["external_data"] = list(error.files)
    if isinstance(error, AnswerTooLarge):
        plain["byte_size"] = error.nbytes
    return plain


def error_from_map(plain: Map) -> HonedError:
    """Return the exception that an error map describes; never raise, whatever the map holds."""
    message = str(plain.get("message", "the service gave an error without a message; see its log"))
    kind = _ERROR_TYPES.get(str(plain.get("type")))
    if kind is None or kind.code != plain.get("code"):
        kind = _ERROR_CODES.get(str(plain.get("code")), Internal)
    reasons = _strings(plain.get("reasons"))
    if kind is MissingFiles:
        return MissingFiles(message, reasons, _strings(plain.get("external_data")))
    if kind is ModelRefused:
        return ModelRefused(message, reasons)
    if kind is AnswerTooLarge:
        nbytes = plain.get("byte_size")
        return AnswerTooLarge(message, nbytes if isinstance(nbytes, int) and nbytes > 0 else 0)
    return kind(message)


def _strings(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


# Errors by their types on the wire. A client that does not know a type raises the first error of its code.
_ERROR_TYPES: Final[dict[str, type[HonedError]]] = {
    "InvalidArgument": InvalidArgument,
    "PreconditionBroken": PreconditionBroken,
    "ModelFileError": ModelFileError,
    "OtherFormat": OtherFormat,
    "ProfileError": ProfileError,
    "ModelRefused": ModelRefused,
    "MissingFiles": MissingFiles,
    "NotFound": NotFound,
    "NotLoaded": NotLoaded,
    "NotPrepared": NotPrepared,
    "SequenceLost": SequenceLost,
    "AlreadyExists": AlreadyExists,
    "PermissionDenied": PermissionDenied,
    "DeadlineExceeded": DeadlineExceeded,
    "Cancelled": Cancelled,
    "ResourceExhausted": ResourceExhausted,
    "Busy": Busy,
    "AnswerTooLarge": AnswerTooLarge,
    "Unimplemented": Unimplemented,
    "Unavailable": Unavailable,
    "NotCompiled": NotCompiled,
    "Internal": Internal,
    "DeviceError": DeviceError,
    "OutOfMemory": OutOfMemory,
}
_TYPE_NAMES: Final = {kind: name for name, kind in _ERROR_TYPES.items()}
_ERROR_CODES: Final = {kind.code: kind for kind in reversed(_ERROR_TYPES.values())}
