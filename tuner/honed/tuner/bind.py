"""Gives a model's inputs their static shapes, changing nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import onnx


def bind_shapes(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """A copy of `model` whose inputs have `shapes`, for those who evaluate it as it was given.

    Shapes that the file states for anything else are dropped: they may name the dimensions bound here.
    """
    bound = onnx.ModelProto()
    bound.CopyFrom(model)
    for value in bound.graph.input:
        shape = shapes.get(value.name)
        if shape is None:
            continue
        del value.type.tensor_type.shape.dim[:]
        for extent in shape:
            value.type.tensor_type.shape.dim.add().dim_value = extent
    for value in bound.graph.output:
        value.type.tensor_type.ClearField("shape")
    del bound.graph.value_info[:]
    return bound
