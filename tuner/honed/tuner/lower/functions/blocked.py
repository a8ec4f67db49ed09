"""Tensors whose channels lie in blocks: a vector of them innermost, [N, C, H, W] as [N, C/c, H, W, c].

What is computed channel by channel has whole vectors then, whatever the extents of an image. The last block
is filled up with zeros, which what is elementwise keeps finite, and which weights of zero keep out of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tvm import ir, te, tirx

Array = npt.NDArray[np.float32]
Shape = tuple[int, ...]


def blocks_of(channels: int, lanes: int) -> int:
    """How many blocks channels fill, the last perhaps in part."""
    return -(-channels // lanes)


def blocked_shape(shape: Shape, lanes: int) -> Shape:
    """Of a blocked tensor with axes [N, C, ...]."""
    return (shape[0], blocks_of(shape[1], lanes), *shape[2:], lanes)


def block(array: Array, lanes: int, fill: float = 0.0) -> Array:
    """An array [N, C, ...] blocked, filled up."""
    images, channels, *rest = array.shape
    filled = np.full((images, blocks_of(channels, lanes) * lanes, *rest), fill, array.dtype)
    filled[:, :channels] = array
    parts = filled.reshape(images, -1, lanes, *rest)
    return np.ascontiguousarray(np.moveaxis(parts, 2, -1))


def blocking(plain: te.Tensor, lanes: int) -> te.Tensor:
    """A tensor [N, C, ...] blocked, filled up with zeros."""
    channels = int(plain.shape[1])

    def value(n: tirx.Var, outer: tirx.Var, *rest: tirx.Var) -> ir.Expr:
        channel = outer * lanes + rest[-1]
        if channels % lanes == 0:
            return plain(n, channel, *rest[:-1])
        inside = plain(n, tirx.min(channel, channels - 1), *rest[:-1])
        return tirx.Select(channel < channels, inside, tirx.const(0, plain.dtype))

    return te.compute(blocked_shape(tuple(map(int, plain.shape)), lanes), value, "block")


def unblocking(blocked: te.Tensor, channels: int) -> te.Tensor:
    """The tensor [N, C, ...] that was blocked."""
    images, _, *rest, lanes = (int(extent) for extent in blocked.shape)

    def value(n: tirx.Var, channel: tirx.Var, *at: tirx.Var) -> ir.Expr:
        return blocked(n, channel // lanes, *at, channel % lanes)

    return te.compute((images, channels, *rest), value, "unblock")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedConvolution:
    """A convolution of images by one constant, its result blocked.

    With `selects` zeros beside the image are selected, and an element within it is read in their place: Malis
    keep the vectors that branches choose in a register for each element.
    """

    channels: int  # of the result
    depthwise: bool  # each channel by itself; else all with all
    blocked: bool  # how the image is given
    window: tuple[int, int]
    strides: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int, int, int]  # above, left, below, right
    lanes: int
    selects: bool = False

    def weights(self, plain: Array) -> Array:
        """Weights [O, I, H, W] as `compute` reads them: output channels in blocks, and input channels."""
        by_output = _outputs(plain, self.lanes)
        if self.depthwise:
            return np.ascontiguousarray(by_output[:, 0])
        return _inputs(by_output, self.lanes) if self.blocked else by_output

    def compute(self, image: te.Tensor, weights: te.Tensor) -> te.Tensor:
        """The result [N, O/c, H, W, c] of an image [N, I/c, H, W, c], or [N, I, H, W] where that is plain."""
        padded = self._padded(image)
        rows, columns = (self._extent(int(image.shape[n + 2]), n) for n in range(2))
        window = [te.reduce_axis((0, extent), name) for extent, name in zip(self.window, "yx", strict=True)]
        over: list[tirx.IterVar] = []
        if not self.depthwise:
            over.append(te.reduce_axis((0, int(image.shape[1])), "i"))
        over += window
        if self.blocked and not self.depthwise:
            over.append(te.reduce_axis((0, self.lanes), "k"))
        outputs = blocks_of(self.channels, self.lanes)

        def value(n: tirx.Var, o: tirx.Var, y: tirx.Var, x: tirx.Var, lane: tirx.Var) -> ir.Expr:
            at = [
                place * stride + step.var * apart
                for place, stride, step, apart in zip(
                    (y, x), self.strides, window, self.dilation, strict=True
                )
            ]
            if self.depthwise:
                return te.sum(padded(n, o, *at, lane) * weights(o, *(w.var for w in window), lane), axis=over)
            inner = over[len(window) + 1 :]
            pixel = padded(n, over[0].var, *at, *(one.var for one in inner))
            return te.sum(pixel * weights(o, *(one.var for one in over), lane), axis=over)

        return te.compute((image.shape[0], outputs, rows, columns, self.lanes), value, "conv2d")

    def _extent(self, given: int, axis: int) -> int:
        covered = (self.window[axis] - 1) * self.dilation[axis] + 1
        return (given + self.padding[axis] + self.padding[axis + 2] - covered) // self.strides[axis] + 1

    def _padded(self, image: te.Tensor) -> te.Tensor:
        """The image with zeros around it."""
        if not any(self.padding):
            return image
        above, left, below, right = self.padding
        rows, columns = (int(extent) for extent in image.shape[2:4])

        def value(n: tirx.Var, i: tirx.Var, y: tirx.Var, x: tirx.Var, *lane: tirx.Var) -> ir.Expr:
            inside = tirx.all(y >= above, y < rows + above, x >= left, x < columns + left)
            if self.selects:
                row = tirx.min(tirx.max(y - above, 0), rows - 1)
                column = tirx.min(tirx.max(x - left, 0), columns - 1)
                zero = tirx.const(0, image.dtype)
                return tirx.Select(tirx.likely(inside), image(n, i, row, column, *lane), zero)
            return tirx.if_then_else(
                inside, image(n, i, y - above, x - left, *lane), tirx.const(0, image.dtype)
            )

        shape = (*image.shape[:2], rows + above + below, columns + left + right, *image.shape[4:])
        return te.compute(shape, value, "padded")


def _outputs(weights: Array, lanes: int) -> Array:
    """Weights [O, I, ...] as [O/c, I, ..., c]."""
    found: Array = block(weights[np.newaxis], lanes)[0]
    return found


def _inputs(weights: Array, lanes: int) -> Array:
    """Weights [O/c, I, ..., c] as [O/c, I/c, ..., c of I, c of O]."""
    found = [block(np.moveaxis(one, -1, 0), lanes) for one in weights]  # [c of O, I/c, ..., c of I]
    return np.ascontiguousarray(np.stack([np.moveaxis(one, 0, -1) for one in found]))


def concatenated(channels: Sequence[int], lanes: int) -> bool:
    """Whether blocked tensors of so many channels are one behind the other when these are concatenated."""
    return all(count % lanes == 0 for count in channels[:-1])
