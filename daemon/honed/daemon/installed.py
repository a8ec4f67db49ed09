"""Whether the compiler, honed-tuner, and the CPU engine, honed-cpu, are on this machine. Imports neither."""

from __future__ import annotations

import importlib.util

from honed.machine import bundle


def compiler() -> bool:
    """It is looked for and not imported."""
    return importlib.util.find_spec("honed.tuner") is not None


def cpu_engine() -> bool:
    """Its package is looked for, and the ONNX Runtime that it runs with; neither is imported."""
    return bundle.has_cpu_engine()
