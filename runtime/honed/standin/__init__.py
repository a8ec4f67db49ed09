"""Has `import onnxruntime` give an app honed's modules in its place.

Python loads this when it starts where HONED_ORT is set (honed-ort.pth): it imports nothing that is large.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_NAME = "onnxruntime"
_CAPI = f"{_NAME}.capi"
# What apps import, and where it is: ONNX Runtime's modules in C have classes, functions and exceptions.
_MODULES = {
    _NAME: ("honed.ort",),
    _CAPI: ("honed.ort",),
    f"{_CAPI}._pybind_state": ("honed.ort", "honed.ort.errors"),
    f"{_CAPI}.onnxruntime_pybind11_state": ("honed.ort", "honed.ort.errors"),
    f"{_CAPI}.onnxruntime_inference_collection": ("honed.ort",),
}


class _Finder(MetaPathFinder, Loader):
    """Finds those modules; nothing is loaded before an app asks for it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module where it is one of honed's stand-ins; None otherwise."""
        if fullname not in _MODULES:
            return None
        spec = ModuleSpec(fullname, self, is_package=fullname in (_NAME, _CAPI))
        installed = PathFinder.find_spec(fullname, path)
        if spec.submodule_search_locations is not None and installed is not None:
            # Its modules in Python that honed does not stand for, as for quantising: they use the others.
            spec.submodule_search_locations.extend(installed.submodule_search_locations or ())
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module with what it stands for."""
        own = {"__name__", "__spec__", "__loader__", "__path__", "__package__"}
        for source in map(importlib.import_module, _MODULES[module.__name__]):
            module.__dict__.update({key: value for key, value in vars(source).items() if key not in own})
        if module.__name__ == _NAME:
            # Apps that import no more than the package use the modules in it.
            for name in _MODULES:
                importlib.import_module(name)


_finder = _Finder()
_kept: list[ModuleType | None] = []


def install() -> None:
    """Make `import onnxruntime` import honed's stand-in from now on, unless it was imported before."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Make `import onnxruntime` import ONNX Runtime itself for the length of the block."""
    known = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _NAME}
    for name in known:
        del sys.modules[name]
    there = _finder in sys.meta_path
    if there:
        sys.meta_path.remove(_finder)
    try:
        yield
    finally:
        if there:
            install()
        sys.modules.update(known)


def genuine() -> ModuleType | None:
    """Return ONNX Runtime itself, whatever the app imports by its name; None where it is not installed."""
    if not _kept:
        try:
            _kept.append(_imported())
        except ImportError:
            _kept.append(None)
    return _kept[0]


def _imported() -> ModuleType:
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # as in all children (honed.process.launch)
    if _finder not in sys.meta_path:
        return importlib.import_module(_NAME)
    with apart():
        try:
            return importlib.import_module(_NAME)
        finally:
            for name in [each for each in sys.modules if each.partition(".")[0] == _NAME]:
                del sys.modules[name]


def installed() -> bool:
    """Return whether ONNX Runtime itself can be found; it is not imported."""
    return PathFinder.find_spec(_NAME) is not None


def loaded() -> bool:
    """Return whether `genuine` has imported ONNX Runtime."""
    return any(_kept)
