"""Generates inputs of a model, seeded and of several distributions, in the ranges that its nodes allow.

Contrasting ones change outputs that ordinary ones leave as they are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from honed.protocol.errors import ModelRefused
from honed.runtime.compiled.model import Precondition

from . import graphs
from .graphs import SourceGraph, TypedValue
from .ranges import Range, of_inputs

_WHOLE = 8  # Bound of integers without another bound, so that sums and products do not overflow
_AWAY = 0.125  # Least distance from zero where zero is not allowed
_MET = 0.25  # The share of integers that equal a value they are compared with
_AT_ENDS = 0.75  # The share of lengths that are the least or the next, in sets that have these
_LEAST = 2  # `shrink` of the smallest ranges


class Inputs:
    """The inputs of a model with static shapes: their ranges, and sets of inputs drawn in them.

    `whole` is the model that `model` is a part of; its nodes count as well, and the `preconditions` of a
    compiled form. Raises InvalidArgument where a shape is not static and ModelRefused where an input can have
    no range.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        whole: onnx.ModelProto | None = None,
        preconditions: Sequence[Precondition] = (),
    ) -> None:
        self.values = graphs.inputs(model)
        self.own = of_inputs(SourceGraph(model))  # Ranges by the model's nodes alone
        more = of_inputs(SourceGraph(whole), shaping=True) if whole is not None else {}
        self.ranges = {name: more.get(name, each).meet(each) for name, each in self.own.items()}
        for bound in preconditions:
            one = self.ranges[bound.input]
            self.ranges[bound.input] = Range(low=bound.low, high=bound.high).meet(one) if one.plain else one

    def draw(
        self, count: int, seed: int = 0, *, shrink: int = 0, first: int = 0
    ) -> list[dict[str, np.ndarray]]:
        """Return `count` sets of inputs from set `first` on, each a dict of arrays by input name.

        Set 0 is normally distributed, set 1 uniform and not negative, set 2 normal with half the elements
        zero, and so on in turn. Integers are drawn within the range their consumers allow, with negative
        indices in every third set only; booleans and masks are mixed. Equal models, counts and seeds give
        equal arrays. With `shrink` 1 ranges that no node bounds are a quarter as large, with 2 they are 0..1,
        for models that refuse or saturate at more, and a single integer that nodes compare has the value it
        is compared with: it is a setting, and the model may accept no other value. Raises ModelRefused where
        no input can be made.
        """
        sets = range(first, first + count)
        return [{v.name: _draw(v, self.ranges[v.name], i, seed, shrink) for v in self.values} for i in sets]


def _draw(value: TypedValue, allowed: Range, index: int, seed: int, shrink: int) -> np.ndarray:
    rng = np.random.default_rng([seed, index, zlib.crc32(value.name.encode())])
    kind = np.dtype(value.dtype).kind
    if kind == "b":
        drawn = _booleans(rng, value.shape)
        return _with_hidden(rng, drawn, False, index % 3) if allowed.hides else drawn
    if not allowed.plain:
        return _indices(rng, value, allowed).astype(value.dtype)
    if allowed.mark:
        drawn = _marks(rng, value.shape, index % 3, allowed.leading)
    elif kind == "f":
        drawn = _floats(rng, value.shape, allowed, index % 3, shrink)
    else:
        drawn = _integers(rng, value, allowed, index % 3, shrink)
    if allowed.hides and kind == "f":
        drawn = _with_hidden(rng, drawn, -math.inf, index % 3)
    return np.asarray(drawn).astype(value.dtype).reshape(value.shape)


def _with_hidden(rng: np.random.Generator, mask: np.ndarray, hidden: float, style: int) -> np.ndarray:
    """Return a mask of attention that hides a quarter of the keys, and all of them in one row.

    Return `mask` unchanged in every third set (`style` 1), and where it has one row in another (0).
    """
    rows = math.prod(mask.shape[:-1])
    if style == 1 or not mask.size or not mask.ndim or (rows == 1 and style == 0):
        return mask
    made = np.where(rng.random(mask.shape) < _MET, hidden, mask).reshape(rows, -1)
    made[rng.integers(rows)] = hidden
    return made.reshape(mask.shape).astype(mask.dtype)


def _booleans(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return half true, half false, so that both occur wherever there are two elements."""
    size = math.prod(shape)
    return rng.permutation(np.arange(size) % 2 == rng.integers(2)).reshape(shape)


def _marks(rng: np.random.Generator, shape: tuple[int, ...], style: int, leading: int) -> np.ndarray:
    """Return a mask: all ones in every third set (`style` 1), else zeros among ones, a one in each row.

    With `leading` ones at least, the zeros follow the ones.
    """
    if style == 1 or not shape:
        return np.ones(shape)
    if leading:
        ends = rng.integers(min(leading, shape[-1]), shape[-1], (*shape[:-1], 1), endpoint=True)
        return (np.arange(shape[-1]) < ends).astype(np.float64)
    drawn = (rng.random(shape) < 0.625).astype(np.float64)
    drawn[..., :1] = 1
    return drawn


def _floats(
    rng: np.random.Generator, shape: tuple[int, ...], allowed: Range, style: int, shrink: int
) -> np.ndarray:
    drawn = rng.uniform(0, 1, shape) if style == 1 or shrink == _LEAST else rng.standard_normal(shape)
    if shrink == 1:
        drawn = drawn / 4
    if style == 2:
        drawn = np.where(rng.random(shape) < 0.5, 0.0, drawn)
    if math.isfinite(allowed.low) and math.isfinite(allowed.high):
        drawn = np.clip(drawn / 3, -1, 1)  # Three deviations fill the range
        middle, half = (allowed.low + allowed.high) / 2, (allowed.high - allowed.low) / 2
        drawn = middle + half * drawn
    elif math.isfinite(allowed.low):
        drawn = allowed.low + np.abs(drawn)
    elif math.isfinite(allowed.high):
        drawn = allowed.high - np.abs(drawn)
    if allowed.nonzero:
        drawn = np.where(np.abs(drawn) < _AWAY, np.where(drawn < 0, -_AWAY, _AWAY), drawn)
    return drawn


def _integers(
    rng: np.random.Generator, value: TypedValue, allowed: Range, style: int, shrink: int
) -> np.ndarray:
    info = np.iinfo(value.dtype)
    ends = max(info.min, allowed.low), min(info.max, allowed.high)
    compared = [each for each in allowed.compared if ends[0] <= each <= ends[1] and each == round(each)]
    if compared and shrink == _LEAST and math.prod(value.shape) == 1:
        return rng.choice(compared, value.shape)
    whole = 255 if info.bits == 8 else _WHOLE  # Bytes are images and quantised values and use the full range
    if shrink:
        whole = 1 if shrink == _LEAST else whole // 4
        allowed = allowed.meet(Range(low=0 if shrink == _LEAST else -whole, high=whole))
    low = math.ceil(max(info.min, -whole if math.isinf(allowed.low) else allowed.low))
    high = math.floor(min(info.max, whole if math.isinf(allowed.high) else allowed.high))
    if style != 2 and high >= 0:
        low = max(low, 0) if math.isfinite(allowed.low) or style == 1 else low  # Indices count from the front
    if high < low:
        if math.prod(value.shape) == 0:
            return np.zeros(value.shape, np.int64)
        raise ModelRefused(f"input {value.name!r} indexes an axis of size 0; no value of it is allowed")
    drawn = rng.integers(low, high, value.shape, endpoint=True)
    if allowed.ends:
        drawn = _lengths(rng, drawn, low, high, style)
    if compared and style != 1:
        drawn = np.where(rng.random(value.shape) < _MET, rng.choice(compared, value.shape), drawn)
    if allowed.nonzero:
        drawn = np.where(drawn == 0, 1 if high >= 1 else -1, drawn)
    return drawn


def _lengths(rng: np.random.Generator, drawn: np.ndarray, low: int, high: int, style: int) -> np.ndarray:
    """Return lengths: the greatest in every third set (`style` 1), the least and others in another (2)."""
    if style == 1:
        return np.full_like(drawn, high)
    few = rng.choice([low, min(low + 1, high)], drawn.shape)
    made = np.where(rng.random(drawn.shape) < _AT_ENDS, few, drawn) if style else drawn
    made.reshape(-1)[:1] = low if style else rng.choice([min(low + 1, high), int(drawn.reshape(-1)[0])])
    return made


def _indices(rng: np.random.Generator, value: TypedValue, allowed: Range) -> np.ndarray:
    """Return indices without duplicates, for scatters without a reduction."""
    if allowed.rows is not None:
        total, count = math.prod(allowed.rows), math.prod(value.shape[:-1])
        _room(value, count, total)
        picked = rng.permutation(total)[:count]
        columns = np.unravel_index(picked, allowed.rows) if allowed.rows else ()
        return np.stack(columns, -1).reshape(value.shape) if columns else np.zeros(value.shape, np.int64)
    axis = allowed.distinct_axis or 0
    size = int(allowed.high) + 1
    if not value.shape:
        return np.zeros((), np.int64)
    _room(value, value.shape[axis], size)
    keys = rng.random((*value.shape[:axis], size, *value.shape[axis + 1 :]))
    return np.take(np.argsort(keys, axis=axis), np.arange(value.shape[axis]), axis=axis)


def _room(value: TypedValue, count: int, total: int) -> None:
    if count > total:
        raise ModelRefused(
            f"input {value.name!r} holds {count} indices of {total} places, so some would be written twice; "
            "the result is not defined, give the scatter a reduction"
        )


# Contrasting inputs

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


def contrasting(inputs: Inputs, seed: int) -> list[dict[str, np.ndarray]]:
    """Return sets of inputs in their ranges, each of another style; raise as `Inputs.draw` does.

    Inputs whose values belong together, such as distinct indices, are as they are drawn.
    """
    return [
        {
            name: _at_ends(value, inputs.ranges[name], style, [seed, 3, style, zlib.crc32(name.encode())])
            for name, value in drawn.items()
        }
        for style, drawn in enumerate(inputs.draw(len(_STYLES), seed, first=_FIRST))
    ]


def _at_ends(drawn: np.ndarray, allowed: Range, style: int, seeds: Sequence[int]) -> np.ndarray:
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
    ordinary = np.random.default_rng(seeds).standard_normal(drawn.shape)
    full = np.where(drawn == 0, ordinary, drawn.astype(np.float64))
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
