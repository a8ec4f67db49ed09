"""ONNX models in PyTorch's operators, captured as a CUDA graph: what honed is set beside on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch  # type: ignore[import-not-found, unused-ignore]
from onnx import helper, numpy_helper
from torch.nn import functional  # type: ignore[import-not-found, unused-ignore]

Arrays = Mapping[str, np.ndarray]
Tensor = Any
_WARM_UPS = 3


class CudaGraph:
    """A model in float32 without TF32: `run` copies inputs to the GPU, replays, and copies outputs back."""

    def __init__(self, path: Path, given: Arrays) -> None:
        """Capture the model; `given` are inputs of the shapes of all runs. Raise NotImplementedError."""
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = True  # cuDNN's fastest, found while warming up
        model = onnx.load(path)
        self._nodes, self._outputs = model.graph.node, [each.name for each in model.graph.output]
        self._softmax_axis = 1 if model.opset_import[0].version < 13 else -1  # Default of the attribute
        self._constants = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        self._kept = {name: _tensor(array) for name, array in self._constants.items()}
        self._inputs = {name: _tensor(array) for name, array in given.items()}
        self._graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            self._warm_up()
            with torch.cuda.graph(self._graph):
                self._results = self._infer()

    def _warm_up(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._infer()
        torch.cuda.current_stream().wait_stream(stream)

    def run(self, given: Arrays) -> dict[str, np.ndarray]:
        """Run an inference, and return the outputs by name."""
        for name, array in given.items():
            self._inputs[name].copy_(torch.from_numpy(array))
        self._graph.replay()
        return {name: value.cpu().numpy() for name, value in self._results.items()}

    def device_us(self, times: int = 50) -> float:
        """Return microseconds of a replay by the device's clock, without transfers."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(times):
            self._graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e3 / times

    def _infer(self) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {"": None, **self._kept, **self._inputs}
        for node in self._nodes:
            if node.op_type not in _OPERATORS:
                raise NotImplementedError(f"{node.op_type} is not among the operators of this benchmark")
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            if node.op_type in ("Softmax", "LogSoftmax"):
                attributes.setdefault("axis", self._softmax_axis)
            operands = [values[name] for name in node.input]
            known = [self._constants.get(name) for name in node.input]
            values[node.output[0]] = _OPERATORS[node.op_type](operands, known, attributes)
        return {name: values[name] for name in self._outputs}


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype in (np.float16, np.float64):
        array = array.astype(np.float32)
    return torch.from_numpy(array.copy()).cuda()


# Operators take operands on the GPU, the same as arrays if they are constants, and attributes.
_Operator = Callable[[list[Tensor], list[Any], dict[str, Any]], Tensor]


def _axes(known: list[Any], attributes: dict[str, Any]) -> list[int]:
    return list(attributes["axes"]) if "axes" in attributes else [int(i) for i in known[1]]


def _unsqueeze(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    axes = _axes(known, a)
    rank, value = x[0].dim() + len(axes), x[0]
    for axis in sorted(i % rank for i in axes):
        value = value.unsqueeze(axis)
    return value


def _reshape(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    return x[0].reshape([x[0].shape[i] if size == 0 else int(size) for i, size in enumerate(known[1])])


def _gather(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    axis = a.get("axis", 0)
    if known[1] is not None and known[1].ndim == 0:
        return x[0].select(axis, int(known[1]))
    return x[0].index_select(axis, x[1])


def _slice(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    starts, ends, axes = (list(map(int, array)) for array in known[1:4])
    steps = list(map(int, known[4])) if len(known) > 4 else [1] * len(starts)
    index: list[slice] = [slice(None)] * x[0].dim()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        index[axis] = slice(start, min(end, x[0].shape[axis]), step)
    return x[0][tuple(index)]


def _padded(value: Tensor, pads: list[int], fill: float) -> Tensor:
    """Pad by ONNX's `pads`: all sizes before axes, then all after; PyTorch starts with the last axis."""
    half = len(pads) // 2
    pairs = [size for i in reversed(range(half)) for size in (pads[i], pads[i + half])]
    return functional.pad(value, pairs, value=fill) if any(pairs) else value


def _conv(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    value, pads = x[0], a.get("pads", [0, 0, 0, 0])
    if pads[:2] != pads[2:]:
        value, pads = _padded(value, [0, 0, *pads[:2], 0, 0, *pads[2:]], 0.0), [0, 0]
    bias = x[2] if len(x) > 2 else None
    strides, dilations = a.get("strides", 1), a.get("dilations", 1)
    return functional.conv2d(value, x[1], bias, strides, list(pads[:2]), dilations, a.get("group", 1))


def _max_pool(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    pads = a.get("pads", [0, 0, 0, 0])
    value = _padded(x[0], [0, 0, *pads[:2], 0, 0, *pads[2:]], float("-inf"))
    return functional.max_pool2d(value, a["kernel_shape"], a.get("strides", 1))


def _depth_to_space(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    if a.get("mode", b"DCR") == b"CRD":
        return functional.pixel_shuffle(x[0], a["blocksize"])
    n, c, h, w = x[0].shape
    size = a["blocksize"]
    apart = x[0].reshape(n, size, size, c // size**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return apart.reshape(n, c // size**2, h * size, w * size)


def _resize(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    assert a.get("mode", b"nearest") == b"nearest"
    return functional.interpolate(x[0], scale_factor=[float(s) for s in known[2][2:]], mode="nearest")


def _clip(x: list[Tensor], known: list[Any], a: dict[str, Any]) -> Tensor:
    low, high = (a.get("min"), a.get("max")) if len(x) == 1 else (float(known[1]), float(known[2]))
    return x[0].clamp(low, high)


_OPERATORS: dict[str, _Operator] = {
    "Add": lambda x, k, a: x[0] + x[1],
    "Sub": lambda x, k, a: x[0] - x[1],
    "Mul": lambda x, k, a: x[0] * x[1],
    "Div": lambda x, k, a: x[0] / x[1],
    "Neg": lambda x, k, a: -x[0],
    "Cos": lambda x, k, a: x[0].cos(),
    "Sin": lambda x, k, a: x[0].sin(),
    "Erf": lambda x, k, a: x[0].erf(),
    "Log": lambda x, k, a: x[0].log(),
    "Relu": lambda x, k, a: functional.relu(x[0]),
    "Sigmoid": lambda x, k, a: x[0].sigmoid(),
    "Dropout": lambda x, k, a: x[0],
    "Identity": lambda x, k, a: x[0],
    "Clip": _clip,
    "MatMul": lambda x, k, a: x[0] @ x[1],
    "Conv": _conv,
    "MaxPool": _max_pool,
    "GlobalAveragePool": lambda x, k, a: x[0].mean(dim=(2, 3), keepdim=True),
    "BatchNormalization": lambda x, k, a: functional.batch_norm(
        x[0], x[3], x[4], x[1], x[2], eps=a.get("epsilon", 1e-5)
    ),
    "LayerNormalization": lambda x, k, a: functional.layer_norm(
        x[0], x[1].shape, x[1], x[2], a.get("epsilon", 1e-5)
    ),
    "Softmax": lambda x, k, a: x[0].softmax(a["axis"]),
    "LogSoftmax": lambda x, k, a: x[0].log_softmax(a["axis"]),
    "Pad": lambda x, k, a: _padded(x[0], [int(i) for i in (a["pads"] if "pads" in a else k[1])], 0.0),
    "DepthToSpace": _depth_to_space,
    "Resize": _resize,
    "Concat": lambda x, k, a: torch.cat(x, a["axis"]),
    "Transpose": lambda x, k, a: x[0].permute(a["perm"]),
    "Reshape": _reshape,
    "Squeeze": lambda x, k, a: x[0].squeeze(tuple(_axes(k, a))),
    "Unsqueeze": _unsqueeze,
    "Gather": _gather,
    "Slice": _slice,
}
