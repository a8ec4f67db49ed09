"""A chain as the methods for models tell of it. No I/O."""

from __future__ import annotations

import json

from honed.daemon.core.registry import Registry
from honed.daemon.serving import inference
from honed.daemon.store.interface import Interface
from honed.protocol import strict
from honed.protocol.device import DeviceIdentity
from honed.protocol.errors import Unavailable
from honed.protocol.methods import VERSION
from honed.protocol.results import IndexedModel, ModelMetadata, ModelPlacement, ModelShown, ModelSource

from .served import ServedChain
from .stored import checksum

PLATFORM = "ensemble"  # what Triton calls it
_NO_DEVICE = DeviceIdentity(platform="", vendor="", name="", driver_version="", kernel_driver="")


def indexed(served: ServedChain, registry: Registry) -> IndexedModel:
    """A row of RepositoryIndex."""
    state, reason = served.state(registry)
    return IndexedModel(
        name=served.chain.name,
        version=VERSION,
        state=state.value,
        reason=reason,
        engine=served.engine(registry),
        steps=tuple(step.model for step in served.chain.steps),
    )


def metadata(served: ServedChain, registry: Registry) -> ModelMetadata:
    """The result of ModelMetadata; raises Unavailable where its models are not what they were."""
    try:
        found = served.interface(registry)
    except Unavailable as error:
        raise Unavailable(f"chain {served.chain.name!r} cannot be used: {error}") from error
    return ModelMetadata(
        name=served.chain.name,
        versions=(VERSION,),
        platform=PLATFORM,
        inputs=tuple(map(inference.describe, found.inputs)),
        outputs=tuple(map(inference.describe, found.outputs)),
    )


def shown(served: ServedChain, registry: Registry) -> ModelShown:
    """The result of ModelShow, whose figures of files and devices are nothing.

    While its models are not what they were it has steps and no tensors.
    """
    chain = served.chain
    state, reason = served.state(registry)
    try:
        found = served.interface(registry)
    except Unavailable:  # which `reason` tells
        found = Interface(inputs=(), outputs=(), opset=0, producer="")
    engine = served.engine(registry)
    sha256 = checksum(chain)
    return ModelShown(
        name=chain.name,
        state=state.value,
        reason=reason,
        sha256=sha256,
        bytes=len(json.dumps(strict.to_plain(chain))),
        added=chain.added,
        source=ModelSource(
            sha256=sha256, filename="", producer="", opset=None, precision="as its models", choice=None
        ),
        shapes={},
        precision="as its models",
        device=_NO_DEVICE,
        inputs=tuple(map(inference.describe, found.inputs)),
        outputs=tuple(map(inference.describe, found.outputs)),
        placement=ModelPlacement(device="", served_by="", engine=engine, why="", away=""),
        steps=chain.steps,
        step_outputs=dict(chain.outputs),
    )
