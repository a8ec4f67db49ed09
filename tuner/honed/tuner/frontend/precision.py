"""Choosing the floating point type of the arithmetic and converting a normalised graph to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from honed.protocol.errors import InvalidArgument
from honed.tuner.halves import Exemptions, put_casts, saturated, usually

from .signature import TensorSpec

Precision = Literal["auto", "fp32", "fp16"]
_HALF, _SINGLE, _DOUBLE = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE
_NUMPY: dict[int, type[np.floating[Any]]] = {_HALF: np.float16, _SINGLE: np.float32, _DOUBLE: np.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A graph in its compute types, and what the user should know of it."""

    graph: onnx.GraphProto
    precision: str
    notes: tuple[str, ...]


def convert(
    graph: onnx.GraphProto, inputs: Sequence[TensorSpec], precision: Precision, *, fp16: bool, fp64: bool
) -> Converted:
    """Convert a normalised graph (in place) to the precision asked for, as far as the device has it.

    Raises InvalidArgument for fp16 on a device without it.
    """
    if precision not in ("auto", "fp32", "fp16"):
        raise InvalidArgument(f"precision {precision!r} does not exist; use auto, fp32 or fp16")
    if precision == "fp16" and not fp16:
        raise InvalidArgument("the device has no fp16 arithmetic (cl_khr_fp16); use --precision auto or fp32")
    types, notes = _mapping(_float_types(graph), precision, fp16=fp16, fp64=fp64)
    kept = put_casts(graph, usually(graph)) if types.get(_SINGLE) == _HALF else frozenset()
    if types:
        _retype(graph, types, kept)
    return Converted(graph=graph, precision=_label(_float_types(graph)), notes=notes)


def halve(graph: onnx.GraphProto, keep: Exemptions) -> str:
    """Convert a normalised graph whose floats are all float32 (in place) to fp16, but for what is to be kept.

    Gives the precision of the arithmetic, "fp32" where all of it was kept.
    """
    _retype(graph, {_SINGLE: _HALF}, put_casts(graph, keep))
    return _label(_float_types(graph))


def all_single(graph: onnx.GraphProto) -> bool:
    """Whether a graph has floats and all are of float32."""
    return _float_types(graph) == {_SINGLE}


def _label(present: set[int]) -> str:
    """The precision of the arithmetic; "mixed" where some of it is in fp16, else the coarser."""
    if _HALF in present:
        return "fp16" if present == {_HALF} else "mixed"
    return "fp64" if present == {_DOUBLE} else "fp32"


def _mapping(
    present: set[int], precision: Precision, *, fp16: bool, fp64: bool
) -> tuple[dict[int, int], tuple[str, ...]]:
    """Which element type becomes which, and what to tell the user about it."""
    if precision == "fp32":
        return {t: _SINGLE for t in present if t != _SINGLE}, ()
    types: dict[int, int] = {}
    notes: list[str] = []
    if _HALF in present and not fp16:
        types[_HALF] = _SINGLE
        notes.append("the model's float16 arithmetic is computed in float32: the device has no cl_khr_fp16")
    if precision == "fp16":
        types.update({t: _HALF for t in present if t != _HALF})
    elif _DOUBLE in present and not fp64:
        types[_DOUBLE] = _SINGLE
        notes.append("the model's float64 arithmetic is computed in float32: the device has no cl_khr_fp64")
    return types, tuple(notes)


def _float_types(graph: onnx.GraphProto) -> set[int]:
    found = {i.type.tensor_type.elem_type for i in (*graph.input, *graph.output, *graph.value_info)}
    return found & set(_NUMPY)


def _retype(graph: onnx.GraphProto, types: dict[int, int], kept: frozenset[str]) -> None:
    """Change element types, but for the values named in `kept`."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.name not in kept:
            tensor_type = info.type.tensor_type
            tensor_type.elem_type = types.get(tensor_type.elem_type, tensor_type.elem_type)
    for index, tensor in enumerate(graph.initializer):
        if tensor.data_type in types and tensor.name not in kept:
            array = saturated(numpy_helper.to_array(tensor), _NUMPY[types[tensor.data_type]])
            graph.initializer[index].CopyFrom(numpy_helper.from_array(array, tensor.name))
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and node.output[0] not in kept:
                attribute.i = types.get(attribute.i, attribute.i)
