"""A model as it is compiled: whole, or what is left of it beside parts for the CPU engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx

from honed.machine.bundle import has_cpu_engine
from honed.machine.profile import DeviceProfile
from honed.protocol.errors import ModelRefused
from honed.runtime.compiled import modelfile
from honed.runtime.compiled.model import CompiledModel

from . import frontend
from .cut import Cut, cut
from .frontend import Normalised, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`given` is what `normalised` is of, as the file has it: the `whole` model where `cut` is None."""

    whole: onnx.ModelProto
    given: onnx.ModelProto
    normalised: Normalised
    cut: Cut | None


def prepare(
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
    profile: DeviceProfile,
) -> Prepared:
    """Normalise a checked model for a device, cut in parts where it cannot be compiled whole.

    That takes the CPU engine. Raises as `frontend.normalise`, with why it was not cut among the reasons.
    """
    limits = profile.limits
    normalised = partial(
        frontend.normalise, shapes=shapes, precision=precision, fp16=limits.fp16, fp64=limits.fp64
    )
    try:
        whole = normalised(model)
    except ModelRefused as refused:
        if not has_cpu_engine():
            raise
        made = cut(model, shapes)
        if isinstance(made, str):
            raise ModelRefused(str(refused), (*refused.reasons, made)) if made else refused from None
        try:
            rest = normalised(made.program, parts=made.between)
        except ModelRefused as again:
            why = f"it is not cut in parts: {again}"
            raise ModelRefused(str(refused), (*refused.reasons, why)) from again
        if not made.parts:
            return Prepared(whole=model, given=model, normalised=rest, cut=None)
        noted = replace(rest, notes=(*rest.notes, _told(made)))
        return Prepared(whole=model, given=made.given, normalised=noted, cut=made)
    return Prepared(whole=model, given=model, normalised=whole, cut=None)


def compiled_before(like: Path | None, prepared: Prepared, precision: Precision) -> CompiledModel | None:
    """What a compiled form of the same model says of itself, where there is one and it matters."""
    if like is None or (precision != "auto" and prepared.cut is None):
        return None
    with modelfile.read(like, verify=False) as file:
        return file.model


def _told(made: Cut) -> str:
    nodes = made.nodes + sum(part.nodes for part in made.parts)
    parts = "one part" if len(made.parts) == 1 else f"{len(made.parts)} parts"
    return (
        f"{made.nodes} of {nodes} nodes and {made.share:.1%} of the operations are compiled; "
        f"the CPU engine runs the rest, {parts}"
    )
