"""A model as ModelShow has it. No I/O."""

from __future__ import annotations

from honed.protocol import strict
from honed.protocol.errors import Unavailable
from honed.protocol.results import ModelPlacement, ModelShown, ModelSource

from .inference import describe
from .serving.states import ServedModel


def show(entry: ServedModel, placement: ModelPlacement) -> ModelShown:
    """The result of ModelShow; raises Unavailable where the file is not readable."""
    model, manifest = entry.compiled, entry.manifest
    if model is None:
        raise Unavailable(f"model {entry.name!r} cannot be used: {entry.reason}")
    return strict.like(
        ModelShown,
        model,
        name=entry.name,
        state=entry.state.value,
        reason=entry.remark,
        sha256=manifest.compiled.sha256,
        bytes=manifest.compiled.nbytes,
        added=manifest.added,
        source=strict.like(ModelSource, model.source),
        shapes=manifest.shapes,
        precision=manifest.precision,
        notes=model.source.notes,
        inputs=tuple(map(describe, model.inputs)),
        outputs=tuple(map(describe, model.outputs)),
        placement=placement,
        checked=entry.checked,
    )
