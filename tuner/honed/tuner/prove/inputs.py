"""Fresh inputs for a model: seeded, of several distributions, within what its nodes allow."""

from __future__ import annotations

import math
import zlib

import numpy as np
import onnx

from honed.protocol.errors import ModelRefused

from . import graphs, ranges
from .ranges import Range

_WHOLE = 8  # bound of integers that nothing else bounds, so that sums and products do not overflow
_AWAY = 0.125  # least distance from zero where zero is not allowed
_MET = 0.25  # the share of integers that equal what they are compared with
_LEAST = 2  # `shrink` of the smallest ranges


def generate(
    model: onnx.ModelProto,
    count: int = 3,
    seed: int = 0,
    *,
    shrink: int = 0,
    whole: onnx.ModelProto | None = None,
) -> list[dict[str, np.ndarray]]:
    """`count` sets of inputs for a model with static shapes, each a dict of arrays by input name.

    Set 0 is normally distributed, set 1 uniform and not negative, set 2 normal with half the elements
    zero, and so on in turn. Integers are drawn within the range their consumers allow, with negative
    indices in every third set only; booleans and masks are mixed. The same model, count and seed give the
    same arrays. With `shrink` 1 what no node bounds is a quarter as large, with 2 it lies in 0..1, for models
    that refuse or saturate at more. `whole` is the model that `model` is a part of; its nodes count as well.
    Raises InvalidArgument where a shape is not static and ModelRefused where no input can be made.
    """
    allowed = ranges.of_inputs(model)
    if whole is not None:
        more = ranges.of_inputs(whole, shaping=True)
        allowed = {name: more.get(name, each).meet(each) for name, each in allowed.items()}
    wanted = graphs.inputs(model)
    return [{v.name: _draw(v, allowed[v.name], i, seed, shrink) for v in wanted} for i in range(count)]


def _draw(value: graphs.TypedValue, allowed: Range, index: int, seed: int, shrink: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, index, zlib.crc32(value.name.encode())])
    kind = np.dtype(value.dtype).kind
    if kind == "b":
        return _booleans(rng, value.shape)
    if not allowed.plain:
        return _indices(rng, value, allowed).astype(value.dtype)
    if allowed.mark:
        drawn = _marks(rng, value.shape, index % 3)
    elif kind == "f":
        drawn = _floats(rng, value.shape, allowed, index % 3, shrink)
    else:
        drawn = _integers(rng, value, allowed, index % 3, shrink)
    return np.asarray(drawn).astype(value.dtype).reshape(value.shape)


def _booleans(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Half true, half false, so that both occur wherever there are two elements."""
    size = math.prod(shape)
    return rng.permutation(np.arange(size) % 2 == rng.integers(2)).reshape(shape)


def _marks(rng: np.random.Generator, shape: tuple[int, ...], style: int) -> np.ndarray:
    """A mask: all ones in every third set, else zeros among ones, of which each row has at least one."""
    if style == 1 or not shape:
        return np.ones(shape)
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
        drawn = np.clip(drawn / 3, -1, 1)  # three deviations fill the range
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
    rng: np.random.Generator, value: graphs.TypedValue, allowed: Range, style: int, shrink: int
) -> np.ndarray:
    info = np.iinfo(value.dtype)
    whole = 255 if info.bits == 8 else _WHOLE  # bytes are images and quantised values: all of them
    if shrink:
        whole = 1 if shrink == _LEAST else whole // 4
        allowed = allowed.meet(Range(low=0 if shrink == _LEAST else -whole, high=whole))
    low = math.ceil(max(info.min, -whole if math.isinf(allowed.low) else allowed.low))
    high = math.floor(min(info.max, whole if math.isinf(allowed.high) else allowed.high))
    if style != 2 and high >= 0:
        low = max(low, 0) if math.isfinite(allowed.low) or style == 1 else low  # indices from the front
    if high < low:
        if math.prod(value.shape) == 0:
            return np.zeros(value.shape, np.int64)
        raise ModelRefused(f"input {value.name!r} indexes an axis of size 0; no value of it is allowed")
    drawn = rng.integers(low, high, value.shape, endpoint=True)
    ends = max(info.min, allowed.low), min(info.max, allowed.high)
    met = [each for each in allowed.met if ends[0] <= each <= ends[1] and each == round(each)]
    if met and style != 1:
        drawn = np.where(rng.random(value.shape) < _MET, rng.choice(met, value.shape), drawn)
    if allowed.nonzero:
        drawn = np.where(drawn == 0, 1 if high >= 1 else -1, drawn)
    return drawn


def _indices(rng: np.random.Generator, value: graphs.TypedValue, allowed: Range) -> np.ndarray:
    """Indices of which none comes twice, for scatters without a reduction."""
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


def _room(value: graphs.TypedValue, count: int, total: int) -> None:
    if count > total:
        raise ModelRefused(
            f"input {value.name!r} holds {count} indices of {total} places, so some would be written twice; "
            "the result is not defined, give the scatter a reduction"
        )
