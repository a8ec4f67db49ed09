"""Extends ONNX's reference evaluator with operators that it computes slowly or not as specified.

BatchNormalization of opsets 7 to 13 trains there instead of testing. The specification of these opsets
(onnx/docs/Changelog.md) has a node with one output normalise by the mean and variance it is given; the
evaluator (1.20.1, BatchNormalization_6 and _9) mixes those of the input in.

Convolutions loop over groups and windows in Python there: a quantised MobileNet takes 240 s. Here they are
products of matrices in float64, in which sums of products of bytes are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from honed.onnxfile.reading import nodes, subgraphs

from . import graphs
from .confined import LoadedEvaluator

Array = np.ndarray[Any, Any]

_BLOCK = 1 << 23  # Elements of windows that are laid out at once


class BatchNormalization(OpRun):  # type: ignore[misc]
    """(x - mean) / sqrt(var + epsilon) * scale + bias for every channel, axis 1 of `x`."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, bias: Array, mean: Array, var: Array, epsilon: float, **_: Any
    ) -> tuple[Array]:
        if sum(bool(name) for name in self.onnx_node.output) > 1:
            raise NotImplementedError("BatchNormalization with several outputs is for training")
        if scale.ndim > 1:
            raise NotImplementedError("BatchNormalization with spatial=0")
        channels = (-1,) + (1,) * (x.ndim - 2)
        scale, bias, mean, var = (each.reshape(channels) for each in (scale, bias, mean, var))
        return ((scale * (x - mean) / np.sqrt(var + epsilon) + bias).astype(x.dtype),)


class Conv(OpRun):  # type: ignore[misc]
    """A convolution of floats."""

    op_domain = ""

    def _run(self, x: Array, w: Array, b: Array | None = None, **attributes: Any) -> tuple[Array]:
        made = convolve(x, w, **attributes)
        if b is not None:
            made += _by_channel(b, made.ndim)
        return (made.astype(x.dtype),)


class ConvInteger(OpRun):  # type: ignore[misc]
    """A convolution of bytes, whose sums are int32."""

    op_domain = ""

    def _run(
        self, x: Array, w: Array, zero_x: Array | None = None, zero_w: Array | None = None, **attributes: Any
    ) -> tuple[Array]:
        return (
            convolve(_subtract_zero_point(x, zero_x), _filters(w, zero_w), **attributes).astype(np.int32),
        )


class QLinearConv(OpRun):  # type: ignore[misc]
    """A convolution of bytes, whose sums are scaled and rounded to bytes."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        scale_x: Array,
        zero_x: Array,
        w: Array,
        scale_w: Array,
        zero_w: Array,
        scale_y: Array,
        zero_y: Array,
        b: Array | None = None,
        **attributes: Any,
    ) -> tuple[Array]:
        sums = convolve(_subtract_zero_point(x, zero_x), _filters(w, zero_w), **attributes)
        if b is not None:
            sums += _by_channel(b, sums.ndim)
        scale = scale_x * _by_channel(np.asarray(scale_w), sums.ndim) / scale_y
        made = np.rint(sums.astype(np.float32) * scale) + np.asarray(zero_y, np.float32)
        ends = np.iinfo(np.asarray(zero_y).dtype)
        return (np.clip(made, ends.min, ends.max).astype(ends.dtype),)


OPERATORS = (Conv, ConvInteger, QLinearConv)


def convolve(
    x: Array,
    w: Array,
    *,
    auto_pad: str | None = None,
    dilations: Sequence[int] | None = None,
    group: int | None = None,
    kernel_shape: Sequence[int] | None = None,  # The shape of the filters if None
    pads: Sequence[int] | None = None,
    strides: Sequence[int] | None = None,
) -> Array:
    """Return the convolution of `x` (N, C, ...) with `w` (M, C / group, ...) as float64, as ONNX's Conv."""
    spatial, groups = x.ndim - 2, group or 1
    if spatial < 1 or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise ValueError(f"{list(x.shape)} cannot be convolved with {list(w.shape)} in {groups} groups")
    steps, apart = list(strides or [1] * spatial), list(dilations or [1] * spatial)
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], apart, strict=True)]
    around = _padding(auto_pad or "NOTSET", x.shape[2:], spans, steps, pads)
    padded = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *around])
    windows = np.lib.stride_tricks.sliding_window_view(padded, spans, tuple(range(2, x.ndim)))
    every = [slice(None, None, s) for s in steps] + [slice(None, None, d) for d in apart]
    windows = windows[(slice(None), slice(None), *every)]
    size, channels = windows.shape[2 : 2 + spatial], w.shape[1]
    filters = w.astype(np.float64).reshape(groups, w.shape[0] // groups, -1)
    made = np.empty((x.shape[0], w.shape[0], *size))
    rows = max(1, _BLOCK // max(1, x.shape[0] * x.shape[1] * math.prod(size[1:]) * math.prod(w.shape[2:])))
    for begin in range(0, size[0], rows):
        block = windows[:, :, begin : begin + rows]
        places = block.shape[2 : 2 + spatial]
        block = block.reshape(x.shape[0], groups, channels, math.prod(places), -1)
        columns = np.moveaxis(block, 3, 4).reshape(x.shape[0], groups, -1, math.prod(places))
        made[:, :, begin : begin + rows] = (filters @ columns).reshape(x.shape[0], w.shape[0], *places)
    return made


def _padding(
    auto_pad: str,
    sizes: Sequence[int],
    spans: Sequence[int],
    steps: Sequence[int],
    pads: Sequence[int] | None,
) -> list[tuple[int, int]]:
    """Return how much is added before and after each axis."""
    if auto_pad == "NOTSET":
        given = list(pads or [0] * 2 * len(sizes))
        return list(zip(given[: len(sizes)], given[len(sizes) :], strict=True))
    if auto_pad == "VALID":
        return [(0, 0)] * len(sizes)
    around = []
    for size, span, step in zip(sizes, spans, steps, strict=True):
        whole = max(0, (math.ceil(size / step) - 1) * step + span - size)
        less, more = whole // 2, whole - whole // 2
        around.append((less, more) if auto_pad == "SAME_UPPER" else (more, less))
    return around


def _by_channel(values: Array, rank: int) -> Array:
    """Return one value for each channel, or one for all."""
    return values.reshape(-1, *(1,) * (rank - 2)) if values.size > 1 else values.reshape(())


def _subtract_zero_point(values: Array, zero: Array | None) -> Array:
    return values.astype(np.float64) - (0 if zero is None else zero.astype(np.float64))


def _filters(values: Array, zero: Array | None) -> Array:
    """Return filters less their zero point, of which there may be one for each filter."""
    if zero is None or zero.size == 1:
        return _subtract_zero_point(values, None if zero is None else zero.reshape(()))
    return _subtract_zero_point(values, zero.reshape(-1, *(1,) * (values.ndim - 1)))


def reference(path: Path) -> LoadedEvaluator:
    """Return the model of a file in ONNX's evaluator: NumPy, slow, and by the letter of the specification.

    The evaluator keeps every value that it computes; here each is freed once nothing reads it any more.
    """
    model = onnx.load(path)
    opset = next((i.version for i in model.opset_import if i.domain in ("", "ai.onnx")), 0)
    others = [*OPERATORS, *((BatchNormalization,) if 7 <= opset <= 13 else ())]
    evaluator = ReferenceEvaluator(model, new_ops=others)
    declared = {v.name: graphs.numpy_name(v.type.tensor_type.elem_type) for v in model.graph.output}
    read_last = _read_last(model)

    def run(feeds: dict[str, np.ndarray]) -> list[object]:
        values: dict[str, Any] = {"": None, **evaluator.rt_inits_, **feeds}
        with np.errstate(all="ignore"):
            for node, last in zip(evaluator.rt_nodes_, read_last, strict=True):
                context = {"context": values} if node.need_context() else {}
                made = node.run(*(values[name] for name in node.input), **context)
                values.update(zip(node.output, made, strict=False))
                for name in last:
                    values.pop(name, None)
        return [values[name] for name in declared]

    return LoadedEvaluator(f"onnx.reference {onnx.__version__}", graphs.input_names(model), declared, run)


def _read_last(model: onnx.ModelProto) -> list[set[str]]:
    """Return for each node the values that no later node reads and that are no outputs."""
    there, found = {"", *graphs.outputs(model)}, []
    for node in reversed(model.graph.node):
        inner = [value.name for graph in subgraphs(node) for value in graph.output]
        touched = {name for each in nodes([node]) for name in (*each.input, *each.output)}
        found.append(touched.union(inner) - there)
        there |= touched.union(inner)
    return found[::-1]
