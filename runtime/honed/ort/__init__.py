"""Routes runs of an app's own ONNX Runtime sessions to honed's compiled models if these are faster.

    python -m honed.ort APP.py ...         for one app
    HONED_ORT=1                            for every Python program that is started

The sessions stay ONNX Runtime's (docs/onnxruntime.md). If HONED_ORT is set, Python loads this module at its
start (honed-ort.pth), so it imports nothing large.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_NAME = "onnxruntime"
_SESSIONS = f"{_NAME}.capi.onnxruntime_inference_collection"  # Has InferenceSession
MISSING = (
    "honed: onnxruntime is not installed for this Python; run 'pip install onnxruntime', or for Debian's "
    "Python 'apt install honed-cpu'"
)


class _Finder(MetaPathFinder):
    """An import hook that finds ONNX Runtime where Python does, else in honed-cpu."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of ONNX Runtime's module, or None for any other."""
        if fullname not in (_NAME, _SESSIONS):
            return None
        others = (each.find_spec(fullname, path, target) for each in sys.meta_path if each is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None and fullname == _NAME:
            spec = PathFinder.find_spec(fullname, _find_bundled())
            if spec is None:
                print(MISSING, file=sys.stderr)
        elif spec is not None and spec.loader is not None and fullname == _SESSIONS:
            spec.loader = _Routing(spec.loader)
        return spec


class _Routing(Loader):
    """A loader that loads the module with its own loader, and then routes runs."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module of its own loader."""
        module: ModuleType | None = self._own.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Load the module, and route its sessions' runs."""
        self._own.exec_module(module)
        _route(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _find_bundled() -> list[str]:
    """Return the folder of the ONNX Runtime in honed-cpu for Debian's Python, if it is installed."""
    engine = importlib.util.find_spec("honed.cpu")
    return [str(os.path.join(os.path.dirname(engine.origin), "bundled"))] if engine and engine.origin else []


def _route(module: ModuleType) -> None:
    try:
        importlib.import_module(f"{__name__}.routing").route(module)
    except Exception as error:  # noqa: BLE001 - an ONNX Runtime, or a NumPy, that is unlike those of today
        print(f"honed: runs stay the app's own: {error}", file=sys.stderr)


_finder = _Finder()


def install() -> None:
    """Route the runs of this process's sessions from now on."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if (loaded := sys.modules.get(_SESSIONS)) is not None:
        _route(loaded)


def __getattr__(name: str) -> Any:
    """Return ONNX Runtime's attribute of a name, as apps may `import honed.ort as onnxruntime`."""
    if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}") is not None:
        raise AttributeError(name)
    install()
    return getattr(importlib.import_module(_NAME), name)
