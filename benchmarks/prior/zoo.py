"""Made-up models with common layers of networks, at varying sizes, for training a prior.

`python -m benchmarks.prior.zoo FOLDER` writes them for `hone hub learn`: equal number, seed and kinds give
the models that records were made of.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

Draw = Callable[[random.Random], str]
_CHANNELS = (8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 512)
_SIDES = (7, 10, 13, 14, 20, 26, 28, 32, 40, 52, 56, 64, 80, 104, 112)
_ODD_SIDES = (9, 13, 15, 19, 23, 27, 33, 38, 55, 57, 75, 95, 111)
_PICTURE_SIDES = (64, 96, 112, 128, 160, 192, 223, 224, 256)
_WIDTHS = (32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 2048)
_LENGTHS = (1, 16, 49, 50, 64, 77, 100, 128, 196, 197, 256, 384, 400)
_ACTIVATIONS = ("Relu(c)", "Clip(c, low, high)", "Sigmoid(c)", "Tanh(c)", "LeakyRelu(c)", "Identity(c)")
_BOUNDS = "<float low = {0.0}, float high = {6.0}>"
_WEIGHTS = ("w", "s", "b")  # Inputs that are constants in networks
_MOST_OPERATIONS = 1.5e9  # Limit for one layer: a candidate must be quick to measure


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prior.zoo", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    add_kinds(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write(options.folder, options.layers, options.seed, options.kinds)
    return 0


def add_kinds(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects kinds of layers."""
    parser.add_argument(
        "--kinds", nargs="+", choices=_KINDS, default=_USUAL, help="of layers, in turns (the first eight)"
    )


def write(folder: Path, count: int, seed: int, kinds: Sequence[str]) -> list[Path]:
    """Write `count` models of one layer each."""
    rng = random.Random(seed)
    made: list[Path] = []
    while len(made) < count:
        kind = kinds[len(made) % len(kinds)]
        text = _KINDS[kind](rng)
        if not text:
            continue
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
        _settle(model, len(made))
        path = folder / f"{len(made):03d}-{kind}.onnx"
        onnx.save(model, path)
        made.append(path)
    return made


def _settle(model: onnx.ModelProto, seed: int) -> None:
    """Turn inputs named in _WEIGHTS into constants, which the compiler may lay out in advance."""
    rng = np.random.default_rng(seed)
    for given in [value for value in model.graph.input if value.name in _WEIGHTS]:
        shape = [axis.dim_value for axis in given.type.tensor_type.shape.dim]
        values = rng.standard_normal(shape, np.float32) / np.sqrt(max(1, math.prod(shape[1:])))
        model.graph.initializer.append(onnx.numpy_helper.from_array(values.astype(np.float32), given.name))
        model.graph.input.remove(given)


def _convolution(
    rng: random.Random,
    channels: Sequence[int] = _CHANNELS,
    sides: Sequence[int] = _SIDES,
    *,
    padded: bool = True,
) -> str:
    given, made, side = rng.choice(channels), rng.choice(_CHANNELS), rng.choice(sides)
    k, stride = rng.choice(((3, 1), (3, 1), (3, 2), (5, 1), (7, 2), (1, 1), (1, 1), (1, 1), (1, 2)))
    pad = k // 2 if padded else 0
    out = (side + 2 * pad - k) // stride + 1
    if 2 * made * given * k * k * out * out > _MOST_OPERATIONS or out < 2:
        return ""
    act = rng.choice(_ACTIVATIONS)
    return (
        f"g (float[1,{given},{side},{side}] x, float[{made},{given},{k},{k}] w, float[{made}] b)"
        f" => (float[1,{made},{out},{out}] y) {_BOUNDS} {{"
        f" c = Conv <pads=[{pad},{pad},{pad},{pad}], strides=[{stride},{stride}]> (x, w, b)"
        f" y = {act} }}"
    )


def _depthwise(rng: random.Random) -> str:
    channels, side = rng.choice(_CHANNELS), rng.choice(_SIDES)
    k, stride = rng.choice(((3, 1), (3, 2), (5, 1), (5, 2)))
    out = (side + 2 * (k // 2) - k) // stride + 1
    if out < 2:
        return ""
    return (
        f"g (float[1,{channels},{side},{side}] x, float[{channels},1,{k},{k}] w, float[{channels}] b)"
        f" => (float[1,{channels},{out},{out}] y) {_BOUNDS} {{"
        f" c = Conv <group={channels}, pads=[{','.join([str(k // 2)] * 4)}], strides=[{stride},{stride}]>"
        f" (x, w, b) y = {rng.choice(_ACTIVATIONS)} }}"
    )


def _dense(rng: random.Random) -> str:
    m, k, n = rng.choice(_LENGTHS), rng.choice(_WIDTHS), rng.choice(_WIDTHS)
    if 2 * m * k * n > _MOST_OPERATIONS:
        return ""
    return (
        f"g (float[{m},{k}] x, float[{k},{n}] w, float[{n}] b) => (float[{m},{n}] y) {_BOUNDS} {{"
        f" p = MatMul(x, w) c = Add(p, b) y = {rng.choice(_ACTIVATIONS)} }}"
    )


def _batched(rng: random.Random) -> str:
    heads, k = rng.choice((4, 6, 8, 12)), rng.choice((32, 64))
    m, n = rng.choice(_LENGTHS), rng.choice(_LENGTHS)
    if rng.random() < 0.5:
        k, n = n, k
    if 2 * heads * m * k * n > _MOST_OPERATIONS or m * k < 64:
        return ""
    if rng.random() < 0.5:
        return (
            f"g (float[1,{heads},{m},{k}] x, float[1,{heads},{k},{n}] z) => (float[1,{heads},{m},{n}] y)"
            " { y = MatMul(x, z) }"
        )
    return (
        f"g (float[1,{heads},{m},{k}] x, float[1,{heads},{n},{k}] z) => (float[1,{heads},{m},{n}] y)"
        " <float s = {0.125}> { t = Transpose <perm=[0,1,3,2]> (z) p = MatMul(x, t) y = Mul(p, s) }"
    )


def _rows(rng: random.Random) -> str:
    rows, width = rng.choice(_LENGTHS), rng.choice(_WIDTHS)
    if rng.random() < 0.5:
        heads = rng.choice((1, 4, 8))
        return (
            f"g (float[{heads},{rows},{width}] x) => (float[{heads},{rows},{width}] y)"
            " { y = Softmax <axis=-1> (x) }"
        )
    return (
        f"g (float[1,{rows},{width}] x, float[{width}] s, float[{width}] b) => (float[1,{rows},{width}] y)"
        " { y = LayerNormalization <axis=-1> (x, s, b) }"
    )


def _pool(rng: random.Random) -> str:
    channels, side = rng.choice(_CHANNELS), rng.choice(_SIDES)
    kind = rng.choice(("MaxPool", "AveragePool", "GlobalAveragePool"))
    if kind == "GlobalAveragePool":
        return f"g (float[1,{channels},{side},{side}] x) => (float[1,{channels},1,1] y) {{ y = {kind}(x) }}"
    k, stride = rng.choice(((2, 2), (3, 2), (3, 1)))
    out = (side - k) // stride + 1
    return (
        f"g (float[1,{channels},{side},{side}] x) => (float[1,{channels},{out},{out}] y)"
        f" {{ y = {kind} <kernel_shape=[{k},{k}], strides=[{stride},{stride}]> (x) }}"
    )


def _move(rng: random.Random) -> str:
    channels, side = rng.choice(_CHANNELS), rng.choice(_SIDES)
    perm = rng.choice(((0, 2, 3, 1), (0, 1, 3, 2), (0, 3, 1, 2), (0, 2, 1, 3)))
    shape = (1, channels, side, side)
    out = ",".join(str(shape[p]) for p in perm)
    return (
        f"g (float[1,{channels},{side},{side}] x, float[1,{channels},{side},{side}] z) => (float[{out}] y)"
        f" {{ a = Add(x, z) y = Transpose <perm=[{','.join(map(str, perm))}]> (a) }}"
    )


def _join(rng: random.Random) -> str:
    """Return images of two scales beside each other, as in detectors, or channels of one."""
    first, second, side = rng.choice(_CHANNELS), rng.choice(_CHANNELS), rng.choice((*_SIDES, *_ODD_SIDES))
    half = (side + 1) // 2
    match rng.randrange(3):
        case 0:
            return (
                f"g (float[1,{first},{side},{side}] x, float[1,{second},{side},{side}] z)"
                f" => (float[1,{first + second},{side},{side}] y) {{ y = Concat <axis=1> (x, z) }}"
            )
        case 1:
            pixels, moved = f"{first},{side * side + half * half}", "y = Identity(p)"
        case _:
            pixels, moved = f"{side * side + half * half},{first}", "y = Transpose <perm=[0,2,1]> (p)"
    return (
        f"g (float[1,{first},{side},{side}] x, float[1,{first},{half},{half}] z) => (float[1,{pixels}] y)"
        f" <int64[3] flat = {{1,{first},-1}}>"
        f" {{ a = Reshape(x, flat) b = Reshape(z, flat) p = Concat <axis=2> (a, b) {moved} }}"
    )


def _tail(rng: random.Random) -> str:
    """Return operators that follow products: a norm with GELU, pixels out of channels, or heads."""
    match rng.randrange(3):
        case 0:
            width = rng.choice(_WIDTHS)
            shape = f"1,{rng.choice(_LENGTHS)},{width}"
            return (
                f"g (float[{shape}] x, float[{width}] s, float[{width}] b) => (float[{shape}] y)"
                " <float root = {1.4142135}, float one = {1.0}, float half = {0.5}>"
                " { n = LayerNormalization <axis=-1> (x, s, b) d = Div(n, root) e = Erf(d)"
                " a = Add(e, one) m = Mul(n, a) y = Mul(m, half) }"
            )
        case 1:
            made, side, block = rng.choice((1, 3, 8, 16)), rng.choice(_SIDES), rng.choice((2, 3, 4))
            given = made * block * block
            return (
                f"g (float[1,{given},{side},{side}] x, float[1,{given},1,1] z)"
                f" => (float[1,{made},{side * block},{side * block}] y)"
                f' {{ a = Add(x, z) y = DepthToSpace <blocksize={block}, mode="CRD"> (a) }}'
            )
        case _:
            rows, heads, k = rng.choice(_LENGTHS), rng.choice((4, 6, 8, 12)), rng.choice((32, 64))
            return (
                f"g (float[1,{rows},{heads * k}] x, float[{heads * k}] z) => (float[1,{heads},{rows},{k}] y)"
                f" <int64[4] split = {{1,{rows},{heads},{k}}}>"
                " { a = Add(x, z) r = Reshape(a, split) y = Transpose <perm=[0,2,1,3]> (r) }"
            )


_KINDS: dict[str, Draw] = {
    "convolution": _convolution,
    "dense": _dense,
    "pointwise": lambda rng: _convolution(rng),
    "depthwise": _depthwise,
    "batched": _batched,
    "rows": _rows,
    "pool": _pool,
    "move": _move,
    # Networks' first layers.
    "picture": lambda rng: _convolution(rng, (1, 3, 4), _PICTURE_SIDES, padded=rng.random() < 0.7),
    "join": _join,
    "tail": _tail,
    "odd": lambda rng: _convolution(rng, sides=_ODD_SIDES),
}
_USUAL = tuple(_KINDS)[:8]


if __name__ == "__main__":
    raise SystemExit(main())
