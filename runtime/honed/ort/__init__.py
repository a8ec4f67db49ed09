"""ONNX Runtime's Python interface, served by honed: apps that know the one run on the other, unchanged.

    python -m honed.ort APP.py ...         runs an app with honed in the place of onnxruntime
    HONED_ORT=1                            does so for every Python program that is started
    import honed.ort as onnxruntime        in an app's own source

docs/onnxruntime.md says what is there and what is not.
"""

from __future__ import annotations

from honed.runtime.version import own_version as _own_version

from .modelproto import ModelMetadata, NodeArg
from .options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from .session import PROVIDERS as _PROVIDERS
from .session import InferenceSession
from .values import IOBinding, OrtValue

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_version_string",
    "preload_dlls",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_seed",
]
__version__ = "1.23.0"  # whose interface this is; apps compare it
Session = InferenceSession


def get_available_providers() -> list[str]:
    """Honed, and the processor, which it may choose."""
    return list(_PROVIDERS)


def get_all_providers() -> list[str]:
    """As those that are available."""
    return list(_PROVIDERS)


def get_device() -> str:
    """Where an app's tensors are."""
    return "CPU"


def get_version_string() -> str:
    """The version of the interface."""
    return __version__


def get_build_info() -> str:
    """Who it is."""
    return f"honed {_own_version()}"


def set_default_logger_severity(severity: int) -> None:
    """Honed logs by Python's logging, as `honed.ort`."""


def set_default_logger_verbosity(verbosity: int) -> None:
    """Honed logs by Python's logging, as `honed.ort`."""


def set_seed(seed: int) -> None:
    """Nothing is drawn here."""


def enable_telemetry_events() -> None:
    """There are none."""


def disable_telemetry_events() -> None:
    """There are none."""


def preload_dlls(*_: object, **__: object) -> None:
    """There are none."""
