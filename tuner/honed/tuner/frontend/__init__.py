"""Reads ONNX: checks untrusted files, normalises them to few operators of static shapes, imports to Relax."""

from __future__ import annotations

from .importing import ImportedModule, import_named, import_relax
from .load import load
from .normalise import Normalised, Precision, in_half, normalise
from .signature import StaticTensorSpec

__all__ = [
    "ImportedModule",
    "Normalised",
    "Precision",
    "StaticTensorSpec",
    "import_named",
    "import_relax",
    "in_half",
    "load",
    "normalise",
]
