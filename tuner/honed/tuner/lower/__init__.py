"""Lowering: a Relax module to a compiled model."""

from __future__ import annotations

from .module import LoweredModel, Progress, lower_module

__all__ = ["LoweredModel", "Progress", "lower_module"]
