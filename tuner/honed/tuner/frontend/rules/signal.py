"""Fourier transforms as matrix products, patches, determinants."""

from __future__ import annotations

import math

import numpy as np

from honed.tuner.frontend.builder import Builder
from honed.tuner.frontend.rules import rule
from honed.tuner.frontend.values import Array, NodeCall, NodeRefused, Value, normal_axis

from .convolution import Geometry, convolve_transposed, explicit_pads
from .layout import cut, pad_axis, pick, reshape, transpose, with_axis
from .linear import matmul

MAX_MATRIX = 1 << 24  # Elements of a transform's matrix
MAX_DETERMINANT = 4  # Larger ones need pivoting


def fourier(b: Builder, x: Value, axis: int, length: int, *, inverse: bool, onesided: bool) -> Value:
    """Discrete Fourier transform of `x` [..., 1 or 2] along an axis, zero-padded or cut to `length`."""
    count = length // 2 + 1 if onesided else length
    if length * count > MAX_MATRIX:
        raise NodeRefused(f"its transform of {length} elements is too long")
    extent = x.shape[axis]
    if extent > length:
        x = cut(b, x, axis, 0, length)
    elif extent < length:
        x = pad_axis(b, x, axis, 0, length - extent)
    order = [i for i in range(x.rank - 1) if i != axis] + [axis, x.rank - 1]
    moved = transpose(b, x, order)
    real = pick(b, moved, x.rank - 1, 0)
    cosine, sine = _matrices(length, count, inverse=inverse)
    cosines, sines = (b.constant(m.astype(x.dtype)) for m in (cosine, sine))
    parts = [matmul(b, real, cosines), matmul(b, real, sines)]
    if x.shape[-1] == 2:
        imaginary = pick(b, moved, x.rank - 1, 1)
        parts = [
            b("Sub", parts[0], matmul(b, imaginary, sines)),
            b("Add", parts[1], matmul(b, imaginary, cosines)),
        ]
    joined = b("Concat", *(with_axis(b, p, p.rank) for p in parts), axis=x.rank - 1)
    return transpose(b, joined, list(np.argsort(order)))


def _matrices(length: int, count: int, *, inverse: bool) -> tuple[Array, Array]:
    """Real and imaginary part of exp(-2 pi i n k / length), [n, k]; conjugate over length where inverse."""
    angles: Array = 2 * np.pi * (np.outer(np.arange(length), np.arange(count)) % length) / length
    if inverse:
        return np.cos(angles) / length, np.sin(angles) / length
    return np.cos(angles), -np.sin(angles)


@rule("DFT")
def dft(b: Builder, c: NodeCall) -> Value:
    """Along one axis; the axis is an attribute at opset 17, an input from 20."""
    x = c.x()
    given = c.opt_numbers(2, "axis") or [-2] if c.opset >= 20 else [c.integer("axis", 1)]
    axis = normal_axis(given[0], x.rank)
    (length, *_) = c.opt_numbers(1, "dft_length") or [x.shape[axis]]
    if axis == x.rank - 1 or x.shape[-1] not in (1, 2) or length < 1:
        raise NodeRefused("its axis or length does not fit its input")
    return fourier(
        b, x, axis, length, inverse=bool(c.integer("inverse")), onesided=bool(c.integer("onesided"))
    )


@rule("STFT")
def stft(b: Builder, c: NodeCall) -> Value:
    """A DFT of overlapping frames, each weighted by a window."""
    x, window = c.x(), c.opt(2)
    step, signal = c.numbers(1, "frame_step")[0], x.shape[1]
    (length, *_) = c.opt_numbers(3, "frame_length") or [signal if window is None else window.size]
    if x.rank == 2:
        x = with_axis(b, x, 2)
    if step < 1 or not 1 <= length <= signal or x.shape[-1] not in (1, 2):
        raise NodeRefused("its frames do not fit its signal")
    frames = 1 + (signal - length) // step
    places = np.arange(frames)[:, None] * step + np.arange(length)[None, :]
    framed = b(
        "Gather", x, b.constant(places.astype(np.int64)), axis=1
    )  # Shape [batch, frames, length, 1 or 2]
    if window is not None:
        framed = b("Mul", framed, reshape(b, window, [window.size, 1]))
    return fourier(b, framed, 2, length, inverse=False, onesided=bool(c.integer("onesided", 1)))


@rule("Col2Im")
def col2im(b: Builder, c: NodeCall) -> Value:
    """A transposed convolution whose kernels each have a single 1."""
    x = c.x()
    image, block = c.numbers(1, "shape"), c.numbers(2, "shape")
    spatial, taps = len(image), math.prod(block)
    strides, dilations = c.ints("strides") or [1] * spatial, c.ints("dilations") or [1] * spatial
    pads = explicit_pads(c, spatial)
    reach = [(k - 1) * d for k, d in zip(block, dilations, strict=True)]
    counts = [(n + pads[i] + pads[i + spatial] - reach[i] - 1) // strides[i] + 1 for i, n in enumerate(image)]
    if spatial > 3 or x.shape[1] % taps or math.prod(counts) != x.shape[2]:
        raise NodeRefused(f"its blocks {block} do not fit an image of {image} and columns of {list(x.shape)}")
    channels = x.shape[1] // taps
    columns = reshape(b, x, [x.shape[0], x.shape[1], *counts])
    kernels = np.tile(np.eye(taps, dtype=x.dtype), (channels, 1)).reshape(channels * taps, 1, *block)
    before = pads[:spatial]
    full = [(n - 1) * s + r + 1 for n, s, r in zip(counts, strides, reach, strict=True)]
    after = [f - p - n for f, p, n in zip(full, before, image, strict=True)]
    g = Geometry(strides=strides, dilations=dilations, before=before, after=after, group=channels)
    return convolve_transposed(b, columns, b.constant(kernels), g)


@rule("Det")
def determinant(b: Builder, c: NodeCall) -> Value:
    """Laplace's expansion of small matrices."""
    x = c.x()
    size = x.shape[-1]
    if x.rank < 2 or x.shape[-2] != size or not 1 <= size <= MAX_DETERMINANT:
        raise NodeRefused(
            f"its matrices of {list(x.shape[-2:])} are not square or larger than {MAX_DETERMINANT}"
        )
    flat = reshape(b, x, [math.prod(x.shape[:-2]), size, size])

    def minor(rows: tuple[int, ...], columns: tuple[int, ...]) -> Value:
        total: Value | None = None
        for index, column in enumerate(columns):
            rest = minor(rows[1:], columns[:index] + columns[index + 1 :]) if len(rows) > 1 else None
            row = cut(b, flat, 1, rows[0], rows[0] + 1)
            part = reshape(b, cut(b, row, 2, column, column + 1), [flat.shape[0]])
            part = part if rest is None else b("Mul", part, rest)
            total = part if total is None else b("Sub" if index % 2 else "Add", total, part)
        assert total is not None
        return total

    every = tuple(range(size))
    return reshape(b, minor(every, every), x.shape[:-2])
