"""Convolutions of the models at hand, as functions in the model's own layout and in blocks of channels."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import te, tirx, topi

from honed.tuner.lower.functions.blocked import BlockedConvolution, blocks_of

_WASTE = 1.1  # of pixels, for tiles of four instead of two
_TILES = range(2, 9)


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution with a bias and a ReLU, padded to the size of its image over its step."""

    model: str
    inputs: int
    outputs: int
    extent: int  # rows and columns of the image
    window: int
    step: int = 1
    depthwise: bool = False

    def __str__(self) -> str:
        kind = "depthwise " if self.depthwise else ""
        channels = f"{self.inputs}" if self.depthwise else f"{self.inputs} to {self.outputs}"
        step = f", step {self.step}" if self.step > 1 else ""
        window, extent = (f"{n}x{n}" for n in (self.window, self.extent))
        return f"{self.model}: {kind}{window}, {channels}, {extent}{step}"


LAYERS = (
    Layer("SqueezeNet", 3, 64, 111, 3, 2),
    Layer("SqueezeNet", 128, 16, 55, 1),
    Layer("SqueezeNet", 16, 64, 55, 3),
    Layer("SqueezeNet", 512, 64, 13, 1),
    Layer("SqueezeNet", 64, 256, 13, 1),
    Layer("SqueezeNet", 64, 256, 13, 3),
    Layer("YOLOX-nano", 12, 16, 208, 3),
    Layer("YOLOX-nano", 64, 64, 52, 1),
    Layer("YOLOX-nano", 64, 64, 52, 5, 1, True),
    Layer("MobileNet", 96, 24, 28, 1),
    Layer("MobileNet", 96, 96, 56, 3, 1, True),
    Layer("MobileNet", 96, 96, 28, 3, 2, True),
    Layer("super-resolution", 64, 64, 224, 3),
    Layer("ResNet", 64, 64, 56, 3),
    Layer("ResNet", 256, 256, 14, 3),
    Layer("ResNet", 64, 128, 56, 3, 2),
)


def plain(layer: Layer, dtype: str) -> tirx.PrimFunc:
    """Of image, weights and bias, in the model's layout."""
    inputs = 1 if layer.depthwise else layer.inputs
    x = te.placeholder((1, layer.inputs, layer.extent, layer.extent), dtype, "x")
    w = te.placeholder((layer.outputs, inputs, layer.window, layer.window), dtype, "w")
    b = te.placeholder((1, layer.outputs, 1, 1), dtype, "b")
    make = topi.nn.depthwise_conv2d_nchw if layer.depthwise else topi.nn.conv2d_nchw
    made = make(x, w, layer.step, layer.window // 2, 1)
    return te.create_prim_func([x, w, b, topi.nn.relu(topi.add(made, b))])


def blocked(layer: Layer, dtype: str, lanes: int) -> tirx.PrimFunc:
    """The same in blocks of so many channels; an image of fewer channels is read in the model's layout.

    Images are flat where there is no window, and have columns added that no tile would divide otherwise.
    """
    flat = layer.window == layer.step == 1
    rows, columns = (1, layer.extent**2) if flat else (layer.extent, layer.extent)
    pad = layer.window // 2
    height, width = ((n + 2 * pad - layer.window) // layer.step + 1 for n in (rows, columns))
    more = (_rounded(width) - width) * layer.step
    given = layer.inputs >= lanes
    what = BlockedConvolution(
        channels=layer.outputs,
        depthwise=layer.depthwise,
        blocked=given,
        window=(layer.window, layer.window),
        strides=(layer.step, layer.step),
        dilation=(1, 1),
        padding=(pad, pad, pad, pad + more),
        lanes=lanes,
        selects=True,
    )
    into, out = blocks_of(layer.inputs, lanes), blocks_of(layer.outputs, lanes)
    image = (1, into, rows, columns, lanes) if given else (1, layer.inputs, rows, columns)
    window = (layer.window, layer.window)
    weights = (
        (out, *window, lanes)
        if layer.depthwise
        else (out, into, *window, lanes, lanes)
        if given
        else (out, layer.inputs, *window, lanes)
    )
    x, w = te.placeholder(image, dtype, "x"), te.placeholder(weights, dtype, "w")
    b = te.placeholder((1, out, 1, 1, lanes), dtype, "b")
    made = what.compute(x, w)
    if more:
        whole = made
        made = te.compute((1, out, height, width, lanes), lambda *at: whole(*at), "cropped")
    return te.create_prim_func([x, w, b, topi.nn.relu(topi.add(made, b))])


def _rounded(columns: int) -> int:
    """Columns with as many more as a tile needs to divide them."""
    if any(columns % n == 0 for n in _TILES):
        return columns
    four = -(-columns // 4) * 4
    return four if four <= _WASTE * columns else -(-columns // 2) * 2
