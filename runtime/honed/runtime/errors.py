"""The exceptions that apps meet; each has a `code`, and its text is one sentence that says what to do."""

from honed.protocol.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    DeviceError,
    HonedError,
    Internal,
    InvalidArgument,
    MissingFiles,
    ModelFileError,
    ModelRefused,
    NotFound,
    PermissionDenied,
    ProfileError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)

__all__ = [
    "AlreadyExists",
    "Cancelled",
    "DeadlineExceeded",
    "DeviceError",
    "HonedError",
    "Internal",
    "InvalidArgument",
    "MissingFiles",
    "ModelFileError",
    "ModelRefused",
    "NotFound",
    "PermissionDenied",
    "ProfileError",
    "ResourceExhausted",
    "Unavailable",
    "Unimplemented",
]
