"""What adding products up in fp16 costs: measured on a sample of the elements that an operator makes.

The terms are added one by one, each sum rounded to fp16, as a work-item does with one accumulator. A schedule
that adds up in parts errs less.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from honed.tuner.halves import Array

SAMPLE = 251  # elements of one product; a prime, so that errors taken in turn fall on no row alike


def errors(node: NodeProto, operands: tuple[Array, Array], rng: np.random.Generator) -> Array:
    """SAMPLE errors of the elements of a MatMul or a Conv whose terms are added up in fp16, as float32."""
    left, right = (_conv if node.op_type == "Conv" else _matmul)(node, operands, rng)
    with np.errstate(over="ignore", invalid="ignore"):
        # The product of two halves is exact in float32.
        terms = np.ascontiguousarray((_halved(left) * _halved(right)).T)
        total = np.zeros(SAMPLE, np.float16)
        for term in terms:
            total = (total + term).astype(np.float16)
        return np.asarray(total - terms.sum(axis=0, dtype=np.float64), np.float32)


def _halved(array: Array) -> Array:
    return array.astype(np.float16).astype(np.float32)


def multiply_adds(node: NodeProto, shapes: dict[str, tuple[int, ...]]) -> int:
    """Of a MatMul or a Conv."""
    given = shapes[node.input[1 if node.op_type == "Conv" else 0]]
    terms = math.prod(given[1:]) if node.op_type == "Conv" else given[-1]
    return terms * math.prod(shapes[node.output[0]])


def _matmul(_: NodeProto, operands: tuple[Array, Array], rng: np.random.Generator) -> tuple[Array, Array]:
    """Rows and columns whose products are elements of the result, both of shape (SAMPLE, terms)."""
    left = np.atleast_2d(operands[0])
    right = operands[1] if operands[1].ndim > 1 else operands[1][:, None]
    batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    at = tuple(rng.integers(0, size, SAMPLE) for size in batch)
    rows = np.broadcast_to(left, (*batch, *left.shape[-2:]))
    columns = np.broadcast_to(right, (*batch, *right.shape[-2:])).swapaxes(-1, -2)
    return (
        rows[(*at, rng.integers(0, rows.shape[-2], SAMPLE))],
        columns[(*at, rng.integers(0, columns.shape[-2], SAMPLE))],
    )


def _conv(node: NodeProto, operands: tuple[Array, Array], rng: np.random.Generator) -> tuple[Array, Array]:
    """Windows of the input and the filters they meet, both of shape (SAMPLE, terms)."""
    attrs: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    data, weights = operands
    rank = data.ndim - 2
    pads = [(attrs["pads"][i], attrs["pads"][i + rank]) for i in range(rank)]
    padded = np.pad(data, [(0, 0), (0, 0), *pads])
    filters, channels = weights.shape[:2]
    reach = [d * (k - 1) + 1 for d, k in zip(attrs["dilations"], weights.shape[2:], strict=True)]
    windows = []
    chosen = rng.integers(0, filters, SAMPLE)
    for chosen_filter in chosen:
        first = int(chosen_filter) // (filters // attrs["group"]) * channels
        corner = [
            int(rng.integers(0, (size - long) // stride + 1)) * stride
            for size, long, stride in zip(padded.shape[2:], reach, attrs["strides"], strict=True)
        ]
        spans = [
            slice(start, start + long, step)
            for start, long, step in zip(corner, reach, attrs["dilations"], strict=True)
        ]
        of_one = padded[int(rng.integers(0, data.shape[0])), first : first + channels]
        windows.append(of_one[(slice(None), *spans)].reshape(-1))
    return np.stack(windows), weights.reshape(filters, -1)[chosen]
