"""Compiles ONNX models and searches for better schedules: the only package that imports TVM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from honed.machine import bundle

if TYPE_CHECKING:
    from .tune.function import TunedFunction, tune_function

__all__ = ["TunedFunction", "tune_function"]

bundle.use(__file__)


def __getattr__(name: str) -> Any:
    """Import TVM, which takes seconds, for those who use the library only."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .tune import function

    return getattr(function, name)
