"""Chooses inputs that change outputs which ordinary inputs leave as they are."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .inputs import Inputs
from .ranges import Range

_SMALL, _LARGE = 1e-3, 1e3  # Times the ordinary magnitude; squares of the large fit float32 by far
_FIRST = 1000  # The first generated set in use; those before are ordinary probes
_COUNT = 8  # The end of unbounded integers, as for generated ones
# Kinds of elements, by the style of the set and the row or column: low, high, or as drawn.
_LOW, _HIGH, _DRAWN = range(3)


def _along(axis: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    def kinds(shape: tuple[int, ...]) -> np.ndarray:
        if not shape:
            return np.full((), _HIGH if axis else _LOW)
        places = np.arange(shape[axis]) % 3
        return places.reshape([-1 if n == axis % len(shape) else 1 for n in range(len(shape))])

    return kinds


def _all(kind: int) -> Callable[[tuple[int, ...]], np.ndarray]:
    return lambda shape: np.full((), kind)


# Styles: the kind of each element, and the factors of each kind for floats without a range.
_STYLES: tuple[tuple[Callable[[tuple[int, ...]], np.ndarray], tuple[float, float, float]], ...] = (
    (_along(0), (_SMALL, _LARGE, 1.0)),
    (_along(-1), (-_LARGE, _SMALL, 1.0)),
    (_all(_LOW), (_SMALL, 1.0, 1.0)),
    (_all(_HIGH), (1.0, _LARGE, 1.0)),
    (_all(_DRAWN), (1.0, 1.0, -1.0)),
)


def contrasting(inputs: Inputs, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return sets of inputs in their ranges, each of another style; raise as `Inputs.draw` does.

    Inputs whose values belong together, such as distinct indices, are as they are drawn.
    """
    return [
        {
            name: _at_ends(value, inputs.ranges[name], style, _rng(seed, style, name))
            for name, value in drawn.items()
        }
        for style, drawn in enumerate(inputs.draw(len(_STYLES), seed, first=_FIRST))
    ]


def _rng(seed: int, style: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, 3, style, zlib.crc32(name.encode())])


def _at_ends(drawn: np.ndarray, allowed: Range, style: int, rng: np.random.Generator) -> np.ndarray:
    """Return an array of one style, from one that was drawn."""
    place, factors = _STYLES[style]
    if not allowed.plain or allowed.leading or not drawn.size:
        return drawn
    kinds = np.broadcast_to(place(drawn.shape), drawn.shape)
    ends = _ends(drawn.dtype, allowed)
    if ends is not None:
        low, high = (np.asarray(end).astype(drawn.dtype) for end in ends)
        return np.asarray(np.where(kinds == _LOW, low, np.where(kinds == _HIGH, high, drawn)))
    # Signs stay within a range of one end; magnitudes are those of numbers that are not 0.
    one_sided = math.isfinite(allowed.low) or math.isfinite(allowed.high)
    full = np.where(drawn == 0, rng.standard_normal(drawn.shape), drawn.astype(np.float64))
    made = full * np.take(np.abs(factors) if one_sided else factors, kinds)
    if one_sided:
        made = np.clip(np.where(drawn == 0, drawn, made), allowed.low, allowed.high)
    return np.asarray(made, drawn.dtype)


def _ends(kind: np.dtype[Any], allowed: Range) -> tuple[float, float] | None:
    """Return the ends of a range, or None where floats have no two; indices count from the front."""
    if kind.kind == "b" or allowed.mark:
        return 0, 1
    if kind.kind == "f":
        both = math.isfinite(allowed.low) and math.isfinite(allowed.high)
        return (allowed.low, allowed.high) if both and not allowed.nonzero else None
    info = np.iinfo(kind)
    low, high = (info.min, info.max) if info.bits == 8 else (0, _COUNT)
    if math.isfinite(allowed.low) and (allowed.low >= 0 or info.bits == 8):
        low = math.ceil(allowed.low)
    if math.isfinite(allowed.high):
        high = min(info.max, math.floor(allowed.high))
    if allowed.nonzero and low == 0:
        low = 1
    return min(low, high), high
