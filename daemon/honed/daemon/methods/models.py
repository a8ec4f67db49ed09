"""A model as ModelShow and RepositoryIndex have it. No I/O but for users' names."""

from __future__ import annotations

from honed.daemon.core.states import ServedModel
from honed.daemon.serving.inference import describe
from honed.daemon.serving.sequencing import state_of
from honed.daemon.store.interface import Interface
from honed.daemon.transport.peers import user_name
from honed.protocol import strict
from honed.protocol.device import DeviceIdentity
from honed.protocol.errors import Unavailable
from honed.protocol.methods import VERSION
from honed.protocol.results import IndexedModel, ModelPlacement, ModelShown, ModelSource, ShownVariant


def show(
    entry: ServedModel,
    identity: DeviceIdentity | None,
    placement: ModelPlacement,
    variants: tuple[ShownVariant, ...],
) -> ModelShown:
    """The result of ModelShow; `identity` is of the engine that serves it, once known.

    Raises Unavailable where the file is not readable.
    """
    model, manifest = entry.compiled, entry.manifest
    if model is None and entry.on_cpu and manifest.interface is not None and identity is not None:
        return _as_given(entry, manifest.interface, identity, placement, variants)
    if model is None or manifest.compiled is None:
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
        variants=variants,
        parts=model.parts,
        sequence_state=_sequence_state(entry),
        settings=manifest.settings,
    )


def indexed(entry: ServedModel, variants: int) -> IndexedModel:
    """A row of RepositoryIndex."""
    owner = entry.manifest.owner
    return IndexedModel(
        name=entry.name,
        version=VERSION,
        state=entry.state.value,
        reason=entry.remark,
        engine=entry.kind,
        engine_why=entry.manifest.why,
        variants=variants,
        pinned_engine=entry.manifest.pinned_engine,
        owner=user_name(owner) if owner is not None else "",
    )


def _sequence_state(entry: ServedModel) -> dict[str, str]:
    """What is given to the next request of a sequence: inputs by output."""
    return {pair.output.name: pair.input.name for pair in state_of(entry)}


def _as_given(
    entry: ServedModel,
    interface: Interface,
    identity: DeviceIdentity,
    placement: ModelPlacement,
    variants: tuple[ShownVariant, ...],
) -> ModelShown:
    """A model without a compiled form."""
    manifest = entry.manifest
    source = manifest.sources[0]
    return ModelShown(
        name=entry.name,
        state=entry.state.value,
        reason=entry.remark,
        sha256=source.sha256,
        bytes=sum(file.nbytes for file in manifest.sources),
        added=manifest.added,
        source=ModelSource(
            sha256=source.sha256,
            filename=source.name,
            producer=interface.producer,
            opset=interface.opset,
            precision="as given",
            choice=None,
        ),
        shapes=manifest.shapes,
        precision=manifest.precision,
        device=identity,
        inputs=tuple(map(describe, interface.inputs)),
        outputs=tuple(map(describe, interface.outputs)),
        placement=placement,
        variants=variants,
        sequence_state=_sequence_state(entry),
        settings=manifest.settings,
    )
