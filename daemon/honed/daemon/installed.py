"""Whether the compiler, honed-tuner, and the CPU engine, honed-cpu, are on this machine. Imports neither."""

from __future__ import annotations

import importlib.util

from honed.machine import bundle


def compiler() -> bool:
    """It is looked for and not imported."""
    return importlib.util.find_spec("honed.tuner") is not None


def cpu_engine() -> bool:
    """Its package is looked for, and the ONNX Runtime that it runs with; neither is imported."""
    package = importlib.util.find_spec("honed.cpu")
    if package is None or package.origin is None:
        return False
    bundled = bundle.folder(package.origin)
    return (bundled is not None and (bundled / "onnxruntime").is_dir()) or importlib.util.find_spec(
        "onnxruntime"
    ) is not None
