"""Requests that a verified compiled form alone may answer: apps have an ONNX Runtime of their own."""

from __future__ import annotations

import dataclasses
import math

from honed.daemon.core.model import ServedModel, State
from honed.daemon.store.compiled import Interface
from honed.daemon.store.names import Shapes
from honed.protocol.errors import NotCompiled
from honed.protocol.params import PrepareParams


def wants_compiled(params: PrepareParams) -> bool:
    """Return whether only a verified compiled form may answer a request."""
    return params.parameters is not None and bool(params.parameters.compiled)


def answers(model: ServedModel, shapes: Shapes) -> bool:
    """Return whether a model's compiled form answers inputs of these shapes now, on its own device."""
    if model.compiled is None or not (
        model.on_device and model.on_preferred_engine and model.state is State.READY
    ):
        return False
    return all(shapes.get(tensor.name) == tensor.shape for tensor in model.compiled.inputs)


def check(model: ServedModel, params: PrepareParams) -> None:
    """Raise NotCompiled for a request that wants a compiled form which this model does not have."""
    if wants_compiled(params) and not answers(model, {each.name: each.shape for each in params.inputs}):
        raise NotCompiled(
            f"no compiled form of {params.model_name!r} answers these shapes now; ModelForm says why"
        )


def scalars(shapes: Shapes, interface: Interface | None) -> Shapes:
    """Return shapes in which an input that the file has as a scalar is one; apps give [1], too.

    ONNX Runtime does not look at the shape that is given for a scalar. More elements than one are left.
    """
    single = {each.name for each in interface.inputs if each.shape == ()} if interface is not None else set()
    if not single:
        return shapes
    return {name: () if name in single and math.prod(shape) == 1 else shape for name, shape in shapes.items()}


def with_scalars(params: PrepareParams, interface: Interface | None) -> PrepareParams:
    """Return a request whose inputs have the shapes that `scalars` gives."""
    given = {each.name: each.shape for each in params.inputs}
    shapes = scalars(given, interface)
    if shapes == given:
        return params
    inputs = tuple(dataclasses.replace(each, shape=shapes[each.name]) for each in params.inputs)
    return dataclasses.replace(params, inputs=inputs)
