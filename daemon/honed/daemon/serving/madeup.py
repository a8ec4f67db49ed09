"""Inputs that nobody gave: what a model is run on before it serves, or to look at it. No I/O."""

from __future__ import annotations

from honed.daemon.store.interface import Interface, OpenTensor
from honed.daemon.store.store import Manifest
from honed.daemon.worker.calls import GivenInput


def warm_up_inputs(manifest: Manifest, interface: Interface | None) -> tuple[GivenInput, ...]:
    """What a model is run on before it serves; `interface` is of the form that is loaded."""
    if interface is None:
        return ()
    return made_up(interface.inputs, manifest.shapes | manifest.settings.warm_up_shapes)


def made_up(tensors: tuple[OpenTensor, ...], shapes: dict[str, tuple[int, ...]]) -> tuple[GivenInput, ...]:
    """Inputs in the shapes that are given for open ones, else with 1 for each open size."""
    return tuple(
        GivenInput(name=tensor.name, dtype=tensor.dtype, shape=_closed(tensor, shapes), place=None)
        for tensor in tensors
    )


def _closed(tensor: OpenTensor, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    wanted = shapes.get(tensor.name)
    if wanted is not None and tensor.takes(wanted):
        return wanted
    return tuple(1 if size < 0 else size for size in tensor.shape or ())
