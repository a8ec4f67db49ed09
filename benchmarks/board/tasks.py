"""The tasks whose schedules are measured on a board, by family: sizes of the networks that boards run."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp16", "fp32"]


def _convolution(channels: int, size: int, filters: int, kernel: int, stride: int = 1, group: int = 1) -> str:
    out, pad = -(-size // stride), kernel // 2
    return (
        f"(float[1,{channels},{size},{size}] x, float[{filters},{channels // group},{kernel},{kernel}] w, "
        f"float[{filters}] b) => (float[1,{filters},{out},{out}] y) "
        f"{{ c = Conv <group={group}, strides=[{stride},{stride}], pads=[{pad},{pad},{pad},{pad}]> (x, w, b) "
        f"y = Relu(c) }}"
    )


def _depthwise(channels: int, size: int, kernel: int, stride: int = 1) -> str:
    return _convolution(channels, size, channels, kernel, stride, channels)


def _product(m: int, k: int, n: int) -> str:
    return (
        f"(float[{m},{k}] x, float[{k},{n}] w, float[{n}] b) => (float[{m},{n}] y) "
        "{ p = MatMul(x, w) y = Add(p, b) }"
    )


def _batched(heads: int, m: int, k: int, n: int) -> str:
    return (
        f"(float[{heads},{m},{k}] x, float[{heads},{k},{n}] w) => (float[{heads},{m},{n}] y) "
        "{ y = MatMul(x, w) }"
    )


def _rows(shape: str, operator: str) -> str:
    return f"(float[{shape}] x) => (float[{shape}] y) {{ y = {operator} (x) }}"


def _norm(rows: int, columns: int) -> str:
    return (
        f"(float[{rows},{columns}] x, float[{columns}] s, float[{columns}] b) => (float[{rows},{columns}] y) "
        "{ y = LayerNormalization <axis=-1> (x, s, b) }"
    )


# Family, name, precision, and the graph as onnx.parser reads it.
TASKS: tuple[tuple[str, str, Precision, str], ...] = (
    ("products", "192x512x512", "fp16", _product(192, 512, 512)),
    ("products", "4 heads 192x64x192", "fp16", _batched(4, 192, 64, 192)),
    ("products", "64x1024x256", "fp16", _product(64, 1024, 256)),
    ("products", "196x256x64", "fp32", _product(196, 256, 64)),
    ("products", "8x1280x1000", "fp32", _product(8, 1280, 1000)),
    ("convolutions", "3x3 64-64 at 56", "fp16", _convolution(64, 56, 64, 3)),
    ("convolutions", "1x1 96-24 at 28", "fp16", _convolution(96, 28, 24, 1)),
    ("convolutions", "1x1 64-128 at 28", "fp32", _convolution(64, 28, 128, 1)),
    ("convolutions", "3x3 3-32 at 112, stride 2", "fp32", _convolution(3, 112, 32, 3, 2)),
    ("convolutions", "3x3 32-32 at 40", "fp32", _convolution(32, 40, 32, 3)),
    ("depthwise", "3x3 96 at 56", "fp16", _depthwise(96, 56, 3)),
    ("depthwise", "3x3 384 at 14", "fp16", _depthwise(384, 14, 3)),
    ("depthwise", "3x3 192 at 28, stride 2", "fp16", _depthwise(192, 28, 3, 2)),
    ("depthwise", "3x3 144 at 28", "fp32", _depthwise(144, 28, 3)),
    ("depthwise", "5x5 64 at 26", "fp32", _depthwise(64, 26, 5)),
    ("rows", "softmax 768x192", "fp16", _rows("4,192,192", "Softmax <axis=-1>")),
    ("rows", "layer norm 192x512", "fp16", _norm(192, 512)),
    ("rows", "softmax 64x1000", "fp32", _rows("64,1000", "Softmax <axis=-1>")),
    ("rows", "layer norm 384x256", "fp32", _norm(384, 256)),
    ("rows", "mean 64x784", "fp32", "(float[64,784] x) => (float[64,1] y) { y = ReduceMean <axes=[1]> (x) }"),
    ("moves", "transpose 192x4x64", "fp16", "(float[192,4,64] x) => (float[4,192,64] y) "
     "{ y = Transpose <perm=[1,0,2]> (x) }"),
    ("moves", "add and relu 64x56x56", "fp16", "(float[64,56,56] x, float[64,56,56] z) => "
     "(float[64,56,56] y) { s = Add(x, z) y = Relu(s) }"),
    ("moves", "to channels last 64x56x56", "fp32", "(float[1,64,56,56] x) => (float[1,56,56,64] y) "
     "{ y = Transpose <perm=[0,2,3,1]> (x) }"),
    ("moves", "concatenate 192x256 twice", "fp32", "(float[192,256] x, float[192,256] z) => "
     "(float[192,512] y) { y = Concat <axis=1> (x, z) }"),
    ("moves", "sigmoid gate 128x40x40", "fp32", "(float[128,40,40] x) => (float[128,40,40] y) "
     "{ s = Sigmoid(x) y = Mul(x, s) }"),
)  # fmt: skip
