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
    source = model.source
    return ModelShown(
        name=entry.name,
        state=entry.state.value,
        reason=entry.remark,
        sha256=manifest.compiled.sha256,
        bytes=manifest.compiled.nbytes,
        added=manifest.added,
        source=ModelSource(
            sha256=source.sha256,
            filename=source.filename,
            producer=source.producer,
            opset=source.opset,
            precision=source.precision,
            choice=strict.to_plain(source.choice),
        ),
        shapes=manifest.shapes,
        precision=manifest.precision,
        notes=source.notes,
        compiler=model.compiler,
        device=model.device,
        inputs=tuple(map(describe, model.inputs)),
        outputs=tuple(map(describe, model.outputs)),
        proof=model.proof,
        placement=placement,
        checked=entry.checked,
        kernels=model.kernels,
        launches=model.launches,
        copies=model.copies,
        host_calls=model.host_calls,
        constant_bytes=model.constant_bytes,
        arena_bytes=model.arena_bytes,
        prepared_bytes=model.prepared_bytes,
    )
