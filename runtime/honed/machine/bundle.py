"""Finds modules that Debian packages ship for honed's own children, hidden from other programs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "bundled"  # Folder beside the package that needs it


def folder(package: str) -> Path | None:
    """Return the folder bundled with a package, or None; `package` is the file of its `__init__`."""
    found = Path(package).with_name(_NAME)
    return found if found.is_dir() else None


def use(package: str) -> None:
    """Let this process import from the bundle, if there is one, before other modules of the same name."""
    found = folder(package)
    if found is not None and str(found) not in sys.path:
        sys.path.insert(0, str(found))


def has_cpu_engine() -> bool:
    """Return whether honed-cpu is installed with the ONNX Runtime that it runs; import neither."""
    package = importlib.util.find_spec("honed.cpu")
    if package is None or package.origin is None:
        return False
    bundled = folder(package.origin)
    return (bundled is not None and (bundled / "onnxruntime").is_dir()) or importlib.util.find_spec(
        "onnxruntime"
    ) is not None
