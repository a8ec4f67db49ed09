"""ONNX Runtime's exceptions by their names, and the service's errors as them.

Apps catch them as `onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument` and the like.
"""

from __future__ import annotations

from honed.protocol import errors


class Fail(Exception):  # noqa: N818 - the names are ONNX Runtime's
    """Something that no other of them says."""


class InvalidArgument(Exception):  # noqa: N818
    """An input is not what the model takes."""


class NoSuchFile(Exception):  # noqa: N818
    """There is no model file at that path."""


class NoModel(Exception):  # noqa: N818
    """No model is loaded."""


class EngineError(Exception):
    """An engine failed."""


class RuntimeException(Exception):  # noqa: N818
    """A run failed."""


class InvalidProtobuf(Exception):  # noqa: N818
    """The file is no ONNX file."""


class ModelLoaded(Exception):  # noqa: N818
    """A model is loaded already."""


class NotImplemented(Exception):  # noqa: N818, A001
    """What honed does not do."""


class InvalidGraph(Exception):  # noqa: N818
    """The model breaks ONNX's rules."""


class EPFail(Exception):  # noqa: N818
    """An execution provider failed."""


ALL = (
    Fail,
    InvalidArgument,
    NoSuchFile,
    NoModel,
    EngineError,
    RuntimeException,
    InvalidProtobuf,
    ModelLoaded,
    NotImplemented,
    InvalidGraph,
    EPFail,
)
_NUMBERS = {each: number for number, each in enumerate(ALL, 1)}  # include/onnxruntime/core/common/status.h
_NAMES = {
    Fail: "FAIL",
    InvalidArgument: "INVALID_ARGUMENT",
    NoSuchFile: "NO_SUCHFILE",
    InvalidProtobuf: "INVALID_PROTOBUF",
    NotImplemented: "NOT_IMPLEMENTED",
    InvalidGraph: "INVALID_GRAPH",
    RuntimeException: "RUNTIME_EXCEPTION",
}
_KINDS: tuple[tuple[type[errors.HonedError], type[Exception]], ...] = (
    (errors.InvalidArgument, InvalidArgument),
    (errors.ModelRefused, Fail),
    (errors.MissingFiles, Fail),
)


def said(kind: type[Exception], text: str) -> Exception:
    """An exception that says what ONNX Runtime's would in front."""
    return kind(f"[ONNXRuntimeError] : {_NUMBERS[kind]} : {_NAMES.get(kind, 'FAIL')} : {text}")


def translated(error: errors.HonedError) -> Exception:
    """The exception that an app expects for an error of the service."""
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), RuntimeException)
    reasons = "; ".join(getattr(error, "reasons", ()) or ())
    return said(kind, f"{error}{f' ({reasons})' if reasons else ''}")
