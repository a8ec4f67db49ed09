"""Every error honed raises on purpose: one sentence saying what is wrong and what to do.

The `code` of an error is what travels over the socket; the names are gRPC's status codes, which the
Open Inference Protocol uses.
"""

from __future__ import annotations

from typing import ClassVar


class HonedError(Exception):
    """Base of all errors raised on purpose; `str(error)` is one sentence fit for a user."""

    code: ClassVar[str] = "INTERNAL"


class InvalidArgument(HonedError):
    """The caller passed something malformed; the same call cannot succeed."""

    code = "INVALID_ARGUMENT"


class ModelFileError(InvalidArgument):
    """A `.honed` file is truncated, altered, of another version, or says something impossible."""


class ProfileError(InvalidArgument):
    """A device profile file is malformed."""


class ModelRefused(HonedError):
    """A model cannot be compiled or did not give right answers; `reasons` holds every reason found."""

    code = "FAILED_PRECONDITION"

    def __init__(self, message: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reasons = reasons


class NotFound(HonedError):
    """No model, region or device of that name."""

    code = "NOT_FOUND"


class AlreadyExists(HonedError):
    """A model or region of that name is there already."""

    code = "ALREADY_EXISTS"


class PermissionDenied(HonedError):
    """The peer is not in the group that may do this."""

    code = "PERMISSION_DENIED"


class DeadlineExceeded(HonedError):
    """The request's own deadline passed before it was answered."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(HonedError):
    """The request was cancelled by its client."""

    code = "CANCELLED"


class ResourceExhausted(HonedError):
    """A stated limit (queue, memory, disk, frame size) was reached."""

    code = "RESOURCE_EXHAUSTED"


class Unimplemented(HonedError):
    """The method does not exist."""

    code = "UNIMPLEMENTED"


class Unavailable(HonedError):
    """The service or its worker cannot answer now; the same call may succeed later."""

    code = "UNAVAILABLE"


class Internal(HonedError):
    """Something of honed's own broke; the sentence says what to report."""


class DeviceError(HonedError):
    """No usable OpenCL device, or the device failed while running."""

    code = "UNAVAILABLE"
