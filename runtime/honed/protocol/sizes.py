"""Sizes that depend on the data, of parts of models that may be compiled for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetSizes:
    """Sizes that a part was met in: what the shapes of its inputs leave open, in their order."""

    part: int
    sizes: tuple[int, ...]
