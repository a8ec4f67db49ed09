"""Every error honed raises on purpose: one sentence saying what is wrong and what to do.

The `code` of an error is what travels over the socket; the names are gRPC's status codes, which the
Open Inference Protocol uses, and NOT_PREPARED, of which clients alone learn.
"""

from __future__ import annotations

from typing import ClassVar

from .strict import Map


class HonedError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one sentence fit for a user."""

    code: ClassVar[str] = "INTERNAL"


class InvalidArgument(HonedError):
    """The caller passed something malformed; the same call cannot succeed."""

    code = "INVALID_ARGUMENT"


class PreconditionBroken(InvalidArgument):
    """An input holds a value that a compiled form does not serve; ONNX Runtime may."""


class ModelFileError(InvalidArgument):
    """A `.honed` file is truncated, altered, of another version, or says something impossible."""


class OtherFormat(ModelFileError):
    """A `.honed` file was written by another version of honed."""


class ProfileError(InvalidArgument):
    """A device profile file is malformed."""


class ModelRefused(HonedError):
    """A model cannot be compiled or did not give right answers; `reasons` holds every reason found."""

    code = "FAILED_PRECONDITION"

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class MissingFiles(ModelRefused):
    """The model keeps data in files beside it that were not sent; `files` are their relative names."""

    def __init__(self, message: str, reasons: tuple[str, ...] = (), files: tuple[str, ...] = ()) -> None:
        super().__init__(message, reasons)
        self.files = files


class NotFound(HonedError):
    """No model, region or device of that name."""

    code = "NOT_FOUND"


class SequenceLost(NotFound):
    """A request of a sequence that is not known, or not any more: its state is gone."""


class AlreadyExists(HonedError):
    """A model or region of that name is there already."""

    code = "ALREADY_EXISTS"


class PermissionDenied(HonedError):
    """The peer is not in the group that may do this."""

    code = "PERMISSION_DENIED"


class DeadlineExceeded(HonedError):
    """The request's own deadline passed before it was answered."""

    code = "DEADLINE_EXCEEDED"


class NotPrepared(HonedError):
    """The number of a prepared request is not known, or not any more: it is to be prepared again."""

    code = "NOT_PREPARED"


class Cancelled(HonedError):
    """The request was cancelled by its client."""

    code = "CANCELLED"


class ResourceExhausted(HonedError):
    """A stated limit (queue, memory, disk, frame size) was reached."""

    code = "RESOURCE_EXHAUSTED"


class Busy(ResourceExhausted):
    """Others are served first; the same call may succeed once they are done."""


class AnswerTooLarge(ResourceExhausted):
    """An answer cannot hold the outputs; `nbytes` of shared memory can, 0 where that is not known."""

    def __init__(self, message: str, nbytes: int = 0) -> None:
        super().__init__(message)
        self.nbytes = nbytes


class Unimplemented(HonedError):
    """The method does not exist."""

    code = "UNIMPLEMENTED"


class Unavailable(HonedError):
    """The service or its worker cannot answer now; the same call may succeed later."""

    code = "UNAVAILABLE"


class NotCompiled(Unavailable):
    """Only a compiled form was to answer, and none is served for these shapes now."""


class Internal(HonedError):
    """Something of honed's own broke; the sentence says what to report."""


class DeviceError(HonedError):
    """No usable OpenCL device, or the device failed while running."""

    code = "UNAVAILABLE"


class OutOfMemory(DeviceError):
    """A process may take no more memory: the model cannot be held, or run, beside what is there."""


def error_to_map(error: HonedError) -> Map:
    """Return the map by which an error travels, as the nearest type that every reader knows."""
    names = [kind.__name__ for kind in type(error).__mro__]
    name = next((name for name in names if name in _ERROR_TYPES), names[0])
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


_ERROR_TYPES: dict[str, type[HonedError]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, HonedError) and kind is not HonedError
}
# The first of each code is what a client gets that knows no finer type.
_ERROR_CODES = {kind.code: kind for kind in reversed(_ERROR_TYPES.values())}
