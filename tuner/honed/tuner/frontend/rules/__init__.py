"""Rewriting rules, one file for each family of operators.

Every ONNX operator that is compiled has a rule here, or a function body in ONNX itself. A rule gets a call
with resolved inputs and emits nodes of the core set (`importing.CORE`) at TARGET_OPSET, which are the only
ones the importer knows. It is registered by `@rule`, in whatever file of this folder.

ONNX Runtime must run what a rule emits, because tests compare it with the original. It refuses, for instance,
a MaxPool whose padding is not smaller than its kernel, whatever the dilation.
"""

from __future__ import annotations

import importlib
import pkgutil

FAMILIES = tuple(found.name for found in pkgutil.iter_modules(__path__))
for _name in FAMILIES:
    importlib.import_module(f"{__name__}.{_name}")
