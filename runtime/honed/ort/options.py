"""What apps set on sessions and runs, and where they say tensors are.

Honed runs a model its own way, with tensors always on the host: most of it changes nothing.
"""

from __future__ import annotations

import copy
import enum
import operator
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from . import errors
from .errors import said

_PROCESSOR = "CPUExecutionProvider"
PROVIDERS = ["HonedExecutionProvider", _PROCESSOR]
FALLBACK = "honed.fallback"  # entry of a session's configuration: "1" lets ONNX Runtime take its place
_FALLBACK_VARIABLE = "HONED_ORT_FALLBACK"


class Named(enum.IntEnum):
    """A number that prints by its name, as apps log it."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class GraphOptimizationLevel(Named):
    """Which of ONNX Runtime's passes run; honed has its own."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(Named):
    """Whether nodes run at the same time; honed decides."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(Named):
    """In which order nodes run; honed decides."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class _Configured:
    """Attributes that ONNX Runtime has, each of its type, and entries by name.

    Setting another raises AttributeError, and a value of another type TypeError, as there: an app's slip of
    the pen is told.
    """

    def __init__(self, kind: type[_Configured]) -> None:
        """Start with the attributes and default values that `kind` declares."""
        self._attributes: dict[str, object] = {name: vars(kind)[name] for name in kind.__annotations__}
        vars(self).update(self._attributes)
        self._entries: dict[str, str] = {}

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            if name not in self._attributes:
                raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
            value = _as(type(self._attributes[name]), value, name)
        super().__setattr__(name, value)

    def given(self) -> dict[str, object]:
        """Return the attributes whose values differ from the defaults."""
        return {
            name: vars(self)[name] for name, usual in self._attributes.items() if vars(self)[name] != usual
        }

    def entries(self) -> dict[str, str]:
        """Return all configuration entries that were set."""
        return dict(self._entries)

    def _add_entry(self, config_key: str, config_value: str) -> None:
        """Set a configuration entry."""
        self._entries[str(config_key)] = str(config_value)

    def _entry(self, config_key: str) -> str:
        """Return a configuration entry; raise RuntimeError where it was not set."""
        if config_key not in self._entries:
            raise RuntimeError(f"there is no configuration entry {config_key!r}; add it first")
        return self._entries[config_key]


class SessionOptions(_Configured):
    """Attributes and methods of ONNX Runtime's; raises NotImplemented for what would change answers."""

    enable_cpu_mem_arena: bool = True
    enable_mem_pattern: bool = True
    enable_mem_reuse: bool = True
    enable_profiling: bool = False
    execution_mode: ExecutionMode = ExecutionMode.ORT_SEQUENTIAL
    execution_order: ExecutionOrder = ExecutionOrder.DEFAULT
    graph_optimization_level: GraphOptimizationLevel = GraphOptimizationLevel.ORT_ENABLE_ALL
    inter_op_num_threads: int = 0
    intra_op_num_threads: int = 0
    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    optimized_model_filepath: str = ""
    profile_file_prefix: str = "onnxruntime_profile_"
    use_deterministic_compute: bool = False
    use_per_session_threads: bool = True

    def __init__(self) -> None:
        super().__init__(SessionOptions)
        self._providers = False
        self._sizes: dict[str, int] = {}

    add_session_config_entry, get_session_config_entry = _Configured._add_entry, _Configured._entry

    def add_provider(self, provider_name: str, provider_options: Mapping[str, str] | None = None) -> None:
        """Accept a known provider without effect, as the service chooses; raise InvalidArgument otherwise."""
        if provider_name not in PROVIDERS:
            text = f"there is no provider {provider_name!r}; use one of {', '.join(PROVIDERS)}"
            raise said(errors.InvalidArgument, text)
        self._providers = True

    def has_providers(self) -> bool:
        """Return whether a provider was added."""
        return self._providers

    def add_free_dimension_override_by_name(self, name: str, value: int) -> None:
        """Set a size that the file leaves open, by its name, to `value` in what the session reports."""
        self._sizes[name] = int(value)

    def add_free_dimension_override_by_denotation(self, denotation: str, value: int) -> None:
        """Do nothing: sizes are open in honed, so that any size is accepted."""

    def add_initializer(self, *_: object, **__: object) -> None:
        """Raise NotImplemented: honed takes no initialisers beside the file."""
        raise _not_done("takes no initialisers beside the file; write them into the model")

    add_external_initializers = add_external_initializers_from_files_in_memory = add_initializer

    def set_load_cancellation_flag(self, cancel: bool) -> None:
        """Do nothing: the service loads models."""

    def register_custom_ops_library(self, path: str) -> None:
        """Raise NotImplemented: no code of an app runs in the service."""
        raise _not_done("loads no libraries of operators")

    def sizes(self) -> dict[str, int]:
        """Return the sizes that the app set for dimensions that files leave open, by their names."""
        return dict(self._sizes)

    def allows_fallback(self, *, limit: bool) -> bool:
        """Return whether ONNX Runtime itself may serve a session that honed cannot.

        `limit`: the service could, but for one of its limits; then it may unless that is forbidden ("0").
        """
        text = self._entries.get(FALLBACK, os.environ.get(_FALLBACK_VARIABLE, ""))
        return limit if text == "" else text != "0"

    def copied(self) -> SessionOptions:
        """Return a copy of the options as they are now, for a session to keep."""
        made = copy.copy(self)
        made._entries, made._sizes = dict(self._entries), dict(self._sizes)
        return made

    def check(self) -> None:
        """Raise NotImplemented where something is asked for that honed does not do."""
        if self.optimized_model_filepath:
            raise _not_done("writes no optimised model; leave optimized_model_filepath empty")
        if self.enable_profiling:
            raise _not_done("writes no profile of a session; `hone profile` shows where a model's time goes")


class RunOptions(_Configured):
    """Attributes and methods of ONNX Runtime's."""

    log_severity_level: int = -1
    log_verbosity_level: int = 0
    logid: str = ""
    only_execute_path_to_fetches: bool = False
    terminate: bool = False
    training_mode: bool = False

    def __init__(self) -> None:
        super().__init__(RunOptions)

    add_run_config_entry, get_run_config_entry = _Configured._add_entry, _Configured._entry


def requested(
    providers: Sequence[str | tuple[str, Mapping[Any, Any]]] | None,
    provider_options: Sequence[Mapping[Any, Any]] | None,
) -> dict[str, dict[str, str]]:
    """Return the options of each provider that a session has, by name and in order.

    They are as ONNX Runtime reports them. The providers are those both requested and available, followed by
    the CPU provider. Unknown ones warn; raises ValueError for what ONNX Runtime does not accept.
    """
    if not isinstance(providers, Sequence | None):
        raise ValueError("'providers' should be a sequence.")
    asked = list(providers or ())
    if provider_options is not None and providers is not None:
        if not isinstance(provider_options, Sequence):
            raise ValueError("'provider_options' should be a sequence.")
        if len(asked) != len(provider_options):
            raise ValueError(
                "'providers' and 'provider_options' should be the same length if both are given."
            )
        if not all(isinstance(each, str) for each in asked):
            raise ValueError(
                "Only string values for 'providers' are supported if 'provider_options' is given."
            )
        if not all(isinstance(each, dict) for each in provider_options):
            raise ValueError("'provider_options' values must be dicts.")
        asked = list(zip(asked, provider_options, strict=True))  # type: ignore[arg-type]
    found: dict[str, dict[str, str]] = {}
    for each in asked:
        name, options = (each, {}) if isinstance(each, str) else _pair(each)
        if name not in PROVIDERS:
            text = f"Specified provider '{name}' is not in available provider names.Available providers: "
            warnings.warn(f"{text}'{', '.join(PROVIDERS)}'", UserWarning, stacklevel=4)
        elif name in found:
            warnings.warn(f"Duplicate provider '{name}' encountered, ignoring.", UserWarning, stacklevel=4)
        else:
            found[name] = {str(key): str(value) for key, value in options.items()}
    found.setdefault(_PROCESSOR, {})
    return {name: {} if name == _PROCESSOR else options for name, options in found.items()}


def _pair(given: Any) -> tuple[str, Mapping[Any, Any]]:
    match given:
        case (str(name), dict(options)) if isinstance(given, tuple):
            return name, options
    raise ValueError("'providers' values must be either strings or (string, dict) tuples.")


def _not_done(what: str) -> Exception:
    return said(errors.NotImplemented, f"honed {what}")


def _as(kind: type, value: object, name: str) -> object:
    """Return a value as ONNX Runtime's binding takes it; raise TypeError for a value of another type."""
    if kind is bool and (value is None or hasattr(type(value), "__bool__")):  # no text, no list
        return bool(value)
    if kind is int and not isinstance(value, str | bytes | float):
        return operator.index(value)  # type: ignore[arg-type]  # which says so where it is none
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; give {kind.__name__}")
    return value


ON_HOST = ("cpu", "honed")


class OrtAllocatorType(Named):
    """How memory is taken; the service's to say."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtMemType(Named):
    """Whose memory it is."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    CPU = -1
    DEFAULT = 0


class OrtDevice:
    """The host. Numbers are those of ONNX Runtime."""

    def __init__(self, device_type: int = 0, memory_type: int = 0, device_id: int = 0) -> None:
        if device_type:
            raise said(
                errors.NotImplemented, "an app's tensors are on the host in honed; give OrtDevice.cpu()"
            )
        self._memory_type, self._device_id = memory_type, device_id

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """Return a device by its name; raise NotImplemented for another than "cpu"."""
        check_on_host(ort_device_name)
        return OrtDevice(0, 0, device_id)

    @staticmethod
    def cpu() -> int:
        """Return the number of the device type of the host."""
        return 0

    @staticmethod
    def default_memory() -> int:
        """Return the number of ordinary memory."""
        return 0

    def device_type(self) -> int:
        """Return the number of this device's type, always the host's."""
        return 0

    def device_id(self) -> int:
        """Return the device's number among those of its type."""
        return self._device_id

    def device_vendor_id(self) -> int:
        """Return 0, as the host has no vendor."""
        return 0

    def device_mem_type(self) -> int:
        """Return the number of this device's type of memory."""
        return self._memory_type


class OrtMemoryInfo:
    """Memory by its name; all of it is the host's."""

    def __init__(
        self, name: str, allocator_type: OrtAllocatorType, device_id: int, memory_type: OrtMemType
    ) -> None:
        self.name, self.allocator_type = name, allocator_type
        self.device_id, self.mem_type = device_id, memory_type


class OrtArenaCfg:
    """How an arena grows; the service's to say."""

    def __init__(self, *numbers: object, **by_name: object) -> None:
        """Accept any of the argument lists that ONNX Runtime accepts."""


def check_on_host(device_type: str) -> None:
    """Raise NotImplemented for tensors elsewhere."""
    if device_type.lower() not in ON_HOST:
        text = f"an app's tensors are on the host in honed; give 'cpu' in place of {device_type!r}"
        raise said(errors.NotImplemented, text)
