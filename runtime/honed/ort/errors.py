"""ONNX Runtime's exceptions by their names, and the service's errors as them.

Apps catch them as `onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument` and the like.
"""

from __future__ import annotations

from honed.protocol import errors


class Fail(Exception):
    """Something that no other of them says."""


class InvalidArgument(Exception):
    """An input is not what the model takes."""


class NoSuchFile(Exception):
    """There is no model file at that path."""


class NoModel(Exception):
    """No model is loaded."""


class EngineError(Exception):
    """An engine failed."""


class RuntimeException(Exception):
    """A run failed."""


class InvalidProtobuf(Exception):
    """The file is no ONNX file."""


class ModelLoaded(Exception):
    """A model is loaded already."""


class NotImplemented(Exception):  # noqa: A001
    """What honed does not do."""


class InvalidGraph(Exception):
    """The model breaks ONNX's rules."""


class EPFail(Exception):
    """An execution provider failed."""


class ModelLoadCanceled(Exception):
    """Loading a model was given up; honed never does."""


class ModelRequiresCompilation(Exception):
    """A model is not compiled; honed compiles by itself."""


class NotFound(Exception):
    """Something is not there; honed says it otherwise."""


class DeviceReset(Exception):
    """A device was reset; honed runs the model again."""


# In the order of their numbers, from 1 (include/onnxruntime/core/common/status.h), with the names of some.
ALL = {
    Fail: "FAIL",
    InvalidArgument: "INVALID_ARGUMENT",
    NoSuchFile: "NO_SUCHFILE",
    NoModel: "FAIL",
    EngineError: "FAIL",
    RuntimeException: "RUNTIME_EXCEPTION",
    InvalidProtobuf: "INVALID_PROTOBUF",
    ModelLoaded: "FAIL",
    NotImplemented: "NOT_IMPLEMENTED",
    InvalidGraph: "INVALID_GRAPH",
    EPFail: "FAIL",
    ModelLoadCanceled: "FAIL",
    ModelRequiresCompilation: "FAIL",
    NotFound: "FAIL",
    DeviceReset: "FAIL",
}
_KINDS: tuple[tuple[type[errors.HonedError], type[Exception]], ...] = (
    (errors.InvalidArgument, InvalidArgument),
    (errors.ModelRefused, Fail),
    (errors.MissingFiles, Fail),
)


def said(kind: type[Exception], text: str) -> Exception:
    """Return an exception of ONNX Runtime's `kind`, with the prefix that ONNX Runtime puts before `text`."""
    number = list(ALL).index(kind) + 1
    return kind(f"[ONNXRuntimeError] : {number} : {ALL[kind]} : {text}")


def unsaid(error: Exception) -> str:
    """Return the text of an exception without its prefix, as ONNX Runtime gives it to callbacks."""
    text = str(error)
    return text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text


def translated(error: errors.HonedError) -> Exception:
    """Return the exception of ONNX Runtime's that an app expects for an error of the service."""
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), RuntimeException)
    reasons = "; ".join(getattr(error, "reasons", ()) or ())
    return said(kind, f"{error}{f' ({reasons})' if reasons else ''}")
