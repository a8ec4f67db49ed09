"""ONNX Runtime itself, where it is installed and an app allows it to serve what honed cannot."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from honed import standin

_NAME = "onnxruntime"
_kept: list[ModuleType | None] = []


def session(given: Any, kwargs: Mapping[str, Any]) -> Any:
    """A session of ONNX Runtime's own; None where it is not installed."""
    found = _module()
    if found is None:
        return None
    return found.InferenceSession(given, providers=["CPUExecutionProvider"], **kwargs)


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
