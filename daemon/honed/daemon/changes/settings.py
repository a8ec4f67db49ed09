"""Changes the settings of models: checks values, verifies that batching is possible, and stores them."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any

from honed.daemon.changes.change import Change, Changes
from honed.daemon.core.messages import ManifestChanged
from honed.daemon.core.model import ServedModel
from honed.daemon.serving.loader import zero_inputs
from honed.daemon.store.compiled import Interface
from honed.daemon.worker.calls import CompareRows
from honed.protocol import strict
from honed.protocol.errors import InvalidArgument
from honed.protocol.params import SetParams
from honed.protocol.results import ModelSettings

MAX_BATCH = 1024
MAX_DELAY_US = 10_000_000
MAX_WARM_UP = 100
_MOST_ELEMENTS = 1 << 28  # Maximum elements of a synthetic input
_log = logging.getLogger(__name__)


async def change_settings(changes: Changes, entry: ServedModel, params: SetParams) -> ModelSettings:
    """Change the settings of a model that are given, and return all; raise InvalidArgument for bad values."""
    given = {f.name: getattr(params, f.name) for f in dataclasses.fields(ModelSettings)}
    present: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    settings = dataclasses.replace(entry.manifest.settings, **present)
    _check(settings, entry)
    async with changes.begin(entry.name) as change:
        if settings.max_batch and not entry.manifest.settings.max_batch:
            await _verify_rows(change, entry)
        manifest = dataclasses.replace(entry.manifest, settings=settings)
        await change.alter(entry, ManifestChanged(entry.number, manifest))
    _log.info("model %s: settings %s", entry.name, strict.to_plain(settings, omit_defaults=True))
    return settings


async def _verify_rows(change: Change, entry: ServedModel) -> None:
    """Raise InvalidArgument if requests cannot be batched, or would change each other's outputs."""
    name, manifest, changes = entry.name, entry.manifest, change.changes
    if wrong := _objection(manifest.interface):
        raise InvalidArgument(f"requests for {name!r} cannot be run together: {wrong}")
    cpu = changes.pool.require_cpu(manifest.owner)
    assert manifest.interface is not None
    key = manifest.source_key
    await change.load_stored(cpu, manifest, key)
    call = CompareRows(key=key, inputs=zero_inputs(manifest.interface.inputs, manifest.shapes))
    answer = await cpu.supervisor.call(call, seconds=changes.limits.load_seconds)
    if answer.objection:
        raise InvalidArgument(f"requests for {name!r} cannot be run together: {answer.objection}")


def _check(settings: ModelSettings, entry: ServedModel) -> None:
    most = {"max_batch": MAX_BATCH, "batch_delay_us": MAX_DELAY_US, "warm_up": MAX_WARM_UP}
    for name, limit in most.items():
        if not 0 <= getattr(settings, name) <= limit:
            raise InvalidArgument(f"{name} is {getattr(settings, name)}; give 0 to {limit}")
    if settings.max_batch == 1:
        raise InvalidArgument("max_batch is 1, which is no batch; give 2 or more, or 0 for none")
    interface = entry.manifest.interface or (entry.compiled.interface if entry.compiled else None)
    known = {tensor.name: tensor for tensor in interface.inputs} if interface else {}
    for name, shape in settings.warm_up_shapes.items():
        if name not in known:
            raise InvalidArgument(f"the model has no input {name[:80]!r}; it has {', '.join(known)}")
        if min(shape, default=1) < 1 or not known[name].takes(shape) or math.prod(shape) > _MOST_ELEMENTS:
            raise InvalidArgument(f"input {name!r} cannot have shape {list(shape)} to warm up in")


def _objection(interface: Interface | None) -> str:
    """Return why a model's interface prevents batching; "" if it does not."""
    if interface is None:
        return "the CPU engine, which takes any number of rows, does not run it"
    for what, tensors in (("input", interface.inputs), ("output", interface.outputs)):
        for tensor in tensors:
            if not tensor.shape or tensor.shape[0] != -1:
                return f"the first dimension of {what} {tensor.name!r} is not open"
    return ""
