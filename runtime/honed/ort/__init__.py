"""ONNX Runtime's Python interface, served by honed: apps that know the one run on the other, unchanged.

    python -m honed.ort APP.py ...         runs an app with honed in the place of onnxruntime
    HONED_ORT=1                            does so for every Python program that is started
    import honed.ort as onnxruntime        in an app's own source

docs/onnxruntime.md says what is there and what is not.
"""

from __future__ import annotations

from typing import Any

from honed.runtime import HONED_VERSION as _VERSION

from .modelproto import ModelMetadata, NodeArg
from .options import PROVIDERS as _PROVIDERS
from .options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    OrtAllocatorType,
    OrtArenaCfg,
    OrtDevice,
    OrtMemoryInfo,
    OrtMemType,
    RunOptions,
    SessionOptions,
)
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
    "OrtAllocatorType",
    "OrtArenaCfg",
    "OrtDevice",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "create_and_register_allocator",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_ep_devices",
    "get_version_string",
    "preload_dlls",
    "print_debug_info",
    "set_default_logger_callback",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
    "set_seed",
]
__version__ = "1.23.0"  # whose interface this is; apps compare it
Session = InferenceSession

_FATAL = 4


def get_available_providers() -> list[str]:
    """Return the providers of honed and of the CPU, which honed may choose."""
    return list(_PROVIDERS)


def get_all_providers() -> list[str]:
    """Return the available providers, which are all there are."""
    return list(_PROVIDERS)


def get_device() -> str:
    """Return the device that holds an app's tensors."""
    return "CPU"


def get_version_string() -> str:
    """Return the version of the interface."""
    return __version__


def get_build_info() -> str:
    """Return honed's name and version."""
    return f"honed {_VERSION}"


def set_default_logger_severity(severity: int) -> None:
    """Raise RuntimeError for an invalid severity, else do nothing: honed logs by Python's logging.

    Its logger is `honed.ort`.
    """
    if not 0 <= severity <= _FATAL:
        raise RuntimeError(f"severity is {severity}; give 0 (verbose) to {_FATAL} (fatal)")


def set_default_logger_verbosity(verbosity: int) -> None:
    """Do nothing: honed logs by Python's logging, as `honed.ort`."""


def set_seed(seed: int) -> None:
    """Do nothing: honed draws no random numbers here."""


def enable_telemetry_events() -> None:
    """Do nothing: there are no telemetry events."""


def disable_telemetry_events() -> None:
    """Do nothing: there are no telemetry events."""


def preload_dlls(*_: object, **__: object) -> None:
    """Do nothing: there are no DLLs."""


def get_ep_devices() -> list[Any]:
    """Return an empty list: the service chooses where models run."""
    return []


def set_default_logger_callback(callback: object) -> None:
    """Do nothing: honed logs by Python's logging, as `honed.ort`."""


def set_global_thread_pool_sizes(intra_op_num_threads: int, inter_op_num_threads: int) -> None:
    """Do nothing: no thread of the app's computes."""


def create_and_register_allocator(memory_info: OrtMemoryInfo, arena_cfg: OrtArenaCfg | None = None) -> None:
    """Do nothing: the service owns the memory."""


def print_debug_info() -> None:
    """Print honed's name and version."""
    print(get_build_info())
