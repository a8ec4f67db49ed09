"""ONNX Runtime itself, where it is installed and an app allows it to serve what honed cannot."""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from honed import standin

from .options import FALLBACK, RunOptions, SessionOptions

_NAME = "onnxruntime"
_kept: list[ModuleType | None] = []


def session(given: Any, options: SessionOptions, kwargs: Mapping[str, Any]) -> Any:
    """A session of ONNX Runtime's own, with the same options; None where it is not installed."""
    found = _module()
    if found is None:
        return None
    return found.InferenceSession(
        given, sess_options=_translated(options, found), providers=["CPUExecutionProvider"], **kwargs
    )


def run_options(options: RunOptions | None) -> Any:
    """What an app has set for a run of such a session, as ONNX Runtime's own."""
    found = _module()
    if options is None or found is None:
        return None
    made = found.RunOptions()
    for name, value in options.given().items():
        setattr(made, name, value)
    for key, value in options.entries().items():
        made.add_run_config_entry(key, value)
    return made


def _translated(options: SessionOptions, found: ModuleType) -> Any:
    """What an app has set, as ONNX Runtime's own options."""
    made = found.SessionOptions()
    for name, value in options.given().items():
        if isinstance(value, enum.IntEnum):
            value = getattr(found, type(value).__name__)(int(value))
        setattr(made, name, value)
    for name, size in options.sizes().items():
        made.add_free_dimension_override_by_name(name, size)
    for key, value in options.entries().items():
        if key != FALLBACK:
            made.add_session_config_entry(key, value)
    return made


def _module() -> ModuleType | None:
    if not _kept:
        with standin.apart():
            try:
                _kept.append(importlib.import_module(_NAME))
            except ImportError:
                _kept.append(None)
            for name in [each for each in sys.modules if each.partition(".")[0] == _NAME]:
                del sys.modules[name]
    return _kept[0]
