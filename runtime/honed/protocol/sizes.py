"""Sizes that depend on the data, of parts of models that may be compiled for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetSizes:
    """Sizes of the part of that number that it was met in: what its inputs' shapes leave open, in their order."""

    part: int
    sizes: tuple[int, ...]
