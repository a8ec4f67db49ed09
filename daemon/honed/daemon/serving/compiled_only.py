"""Checks requests that only a compiled file may answer: apps whose own ONNX Runtime runs the others."""

from __future__ import annotations

import dataclasses
import math

from honed.daemon.core.model import ServedModel, State
from honed.daemon.store.compiled import Interface
from honed.daemon.store.names import Shapes
from honed.protocol.errors import NotCompiled
from honed.protocol.params import PrepareParams


def wants_compiled(params: PrepareParams) -> bool:
    """Return whether only a verified compiled file may answer a request."""
    return params.parameters is not None and bool(params.parameters.compiled)


def answers(model: ServedModel, shapes: Shapes) -> bool:
    """Return whether a model's compiled file answers inputs of these shapes now, on its preferred engine."""
    if model.compiled is None or not (
        model.on_device and model.on_preferred_engine and model.state is State.READY
    ):
        return False
    return all(shapes.get(tensor.name) == tensor.shape for tensor in model.compiled.inputs)


def check(model: ServedModel, params: PrepareParams) -> None:
    """Raise NotCompiled if a request requires a compiled file and none answers it."""
    if wants_compiled(params) and not answers(model, {each.name: each.shape for each in params.inputs}):
        raise NotCompiled(
            f"no compiled form of {params.model_name!r} answers these shapes now; ModelForm says why"
        )


def scalars(shapes: Shapes, interface: Interface | None) -> Shapes:
    """Return `shapes` with () for inputs of one element that are scalars in the file.

    Apps also send [1] for a scalar, because ONNX Runtime ignores the shape of scalars.
    """
    single = {each.name for each in interface.inputs if each.shape == ()} if interface is not None else set()
    if not single:
        return shapes
    return {name: () if name in single and math.prod(shape) == 1 else shape for name, shape in shapes.items()}


def with_scalars(params: PrepareParams, interface: Interface | None) -> PrepareParams:
    """Return a request whose inputs have the shapes that `scalars` returns."""
    given = {each.name: each.shape for each in params.inputs}
    shapes = scalars(given, interface)
    if shapes == given:
        return params
    inputs = tuple(dataclasses.replace(each, shape=shapes[each.name]) for each in params.inputs)
    return dataclasses.replace(params, inputs=inputs)
