"""Computes Winograd's convolutions F(2x2, 3x3): products of transformed weights and transformed image tiles.

Tiles of 4 x 4 pixels, which overlap by two, become 16 points each; for every point, weights [outputs,
channels] are multiplied with points [channels, tiles]; 16 sums make 2 x 2 pixels (Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks", 2015). That is 4/9 of the multiplications, and more memory:
it pays on Malis for many channels of small images. Halves err by at most twice as much as they do added up
directly; larger tiles, F(4x4, 3x3), by 20 times as much (docs/dev/measurements.md), and are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import ir, relax, te, tirx

POINTS = 16  # Points of a tile
IMAGE = "winograd_image"  # The block that transforms an image
_TILE, STEP = 4, 2  # Pixels of a tile of the image, and of the result
_WINDOW = 3
_OPAQUE = 8  # TVM's pattern of an operator that is fused with none
_ALIGNED = 4  # Tiles: products with a multiple have a table
# Limits below which transforms or reading the weights cost what multiplications save, by the bench for Malis.
_LEAST_CHANNELS, _LEAST_TILES = 256, 40
# Matrices with points as rows and pixels of a tile as columns; points and steps of the window; pixels and
# points.
_INTO = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_WEIGHTS = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
_BACK = ((1, 1, 1, 0), (0, 1, -1, -1))


@dataclass(frozen=True, slots=True)
class WinogradConvolution:
    """The extents of a convolution, with `tiles` along rows and columns of each image."""

    images: int
    channels: int
    rows: int
    columns: int

    @property
    def tiles(self) -> tuple[int, int]:
        """Numbers of tiles along rows and columns."""
        return math.ceil(self.rows / STEP), math.ceil(self.columns / STEP)

    @property
    def count(self) -> int:
        """Number of all tiles, with empty ones to make it a multiple of a vector."""
        return -(-self.images * math.prod(self.tiles) // _ALIGNED) * _ALIGNED


def convolve(builder: relax.BlockBuilder, call: relax.Call, what: WinogradConvolution) -> relax.Expr:
    """Return the result of a convolution that `match_winograd` accepts."""
    image, weights = call.args
    transformed = relax.const(_weights(weights.value.numpy()))
    points = builder.emit(
        builder.call_te(
            lambda x: _image(x, what), image, primfunc_name_hint=IMAGE, primfunc_attrs={"op_pattern": _OPAQUE}
        )
    )
    sums = builder.emit(builder.call_te(_product, transformed, points, primfunc_name_hint="winograd_matmul"))
    return builder.call_te(lambda m: _result(m, what), sums, primfunc_name_hint="winograd_result")


def match_winograd(call: relax.Call) -> WinogradConvolution | None:
    """Return the extents of a convolution where Winograd can compute it and pays; else None."""
    image, weights = call.args
    attrs = call.attrs
    plain = (
        attrs.groups == 1
        and attrs.data_layout == attrs.out_layout == "NCHW"
        and attrs.kernel_layout == "OIHW"
        and all(int(n) == 1 for n in (*attrs.strides, *attrs.dilation, *attrs.padding))
    )
    if not plain or call.ty.dtype != image.ty.dtype or not isinstance(weights, ir.GenericConst):
        return None
    outputs, channels, *window = (int(extent) for extent in weights.ty.shape)
    images, _, rows, columns = (int(extent) for extent in image.ty.shape)
    what = WinogradConvolution(images, channels, rows, columns)
    pays = min(outputs, channels) >= _LEAST_CHANNELS and what.count >= _LEAST_TILES
    return what if window == [_WINDOW, _WINDOW] and pays else None


def _weights(weights: np.ndarray) -> np.ndarray:
    """Return the weights of each point, [16, outputs, channels], in the type of the given weights."""
    points = np.einsum("ia,kcab,jb->ijkc", _WEIGHTS, weights.astype(np.float64), _WEIGHTS)
    return np.ascontiguousarray(points.reshape(POINTS, *weights.shape[:2]).astype(weights.dtype))


def _image(image: te.Tensor, what: WinogradConvolution) -> te.Tensor:
    """Return the points of all tiles, [16, channels, tiles]."""
    down, across = what.tiles

    def value(point: tirx.Var, channel: tirx.Var, tile: tirx.Var) -> ir.Expr:
        n, row, column = tile // (down * across), tile // across % down, tile % across

        def pixel(i: int, j: int) -> ir.Expr:
            y, x = row * STEP + i - 1, column * STEP + j - 1
            inside = tirx.all(n < what.images, y >= 0, y < what.rows, x >= 0, x < what.columns)
            near = (
                tirx.min(n, what.images - 1),
                channel,
                tirx.max(tirx.min(y, what.rows - 1), 0),
                tirx.max(tirx.min(x, what.columns - 1), 0),
            )
            return tirx.Select(inside, image[near], tirx.const(0, image.dtype))

        return _select(point, [_sum(pixel, _INTO[i], _INTO[j]) for i in range(_TILE) for j in range(_TILE)])

    return te.compute((POINTS, what.channels, what.count), value, IMAGE)


def _product(weights: te.Tensor, points: te.Tensor) -> te.Tensor:
    """Return the products of all points, [16, outputs, tiles]."""
    _, outputs, channels = weights.shape
    c = te.reduce_axis((0, channels), "c")
    return te.compute(
        (POINTS, outputs, points.shape[2]),
        lambda p, k, t: te.sum(weights[p, k, c] * points[p, c, t], axis=c),
        "winograd_matmul",
    )


def _result(sums: te.Tensor, what: WinogradConvolution) -> te.Tensor:
    """Return the pixels of the sums of all points, [images, outputs, rows, columns]."""
    down, across = what.tiles

    def value(n: tirx.Var, k: tirx.Var, y: tirx.Var, x: tirx.Var) -> ir.Expr:
        tile = (n * down + y // STEP) * across + x // STEP

        def point(i: int, j: int) -> ir.Expr:
            return sums[i * _TILE + j, k, tile]

        pixels = [_sum(point, _BACK[i], _BACK[j]) for i in range(STEP) for j in range(STEP)]
        return _select(y % STEP * STEP + x % STEP, pixels)

    return te.compute((what.images, sums.shape[1], what.rows, what.columns), value, "winograd_result")


def _sum(of: Callable[[int, int], ir.Expr], rows: tuple[int, ...], columns: tuple[int, ...]) -> ir.Expr:
    """Return the elements added and subtracted by the products of two rows of signs."""
    signs = [(s * t, of(i, j)) for i, s in enumerate(rows) for j, t in enumerate(columns) if s * t != 0]
    signs.sort(key=lambda one: -one[0])  # The first one must be added
    total = signs[0][1]
    for sign, element in signs[1:]:
        total = total + element if sign > 0 else total - element
    return total


def _select(index: ir.Expr, values: list[ir.Expr]) -> ir.Expr:
    """Return an expression that selects the value number `index` (a run-time number)."""
    found = values[-1]
    for n, value in reversed(list(enumerate(values[:-1]))):
        found = tirx.if_then_else(index == n, value, found)
    return found
