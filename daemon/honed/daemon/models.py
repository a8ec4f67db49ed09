"""A model as ModelShow has it. No I/O."""

from __future__ import annotations

from typing import Any

from honed.protocol import strict
from honed.protocol.errors import Unavailable

from .inference import describe
from .serving.states import ServedModel


def show(entry: ServedModel) -> dict[str, Any]:
    """The result of ModelShow but `placement`; raises Unavailable where the file is not readable."""
    model, manifest = entry.compiled, entry.manifest
    if model is None:
        raise Unavailable(f"model {entry.name!r} cannot be used: {entry.reason}")
    plain = strict.to_plain(model)
    source = plain["source"]
    notes = source.pop("notes")
    return {
        "name": entry.name,
        "state": entry.state.value,
        "reason": entry.remark,
        "sha256": manifest.compiled.sha256,
        "bytes": manifest.compiled.nbytes,
        "added": manifest.added,
        "source": source,
        "shapes": {name: list(shape) for name, shape in manifest.shapes.items()},
        "precision": manifest.precision,
        "notes": notes,
        "inputs": [strict.to_plain(describe(tensor)) for tensor in model.inputs],
        "outputs": [strict.to_plain(describe(tensor)) for tensor in model.outputs],
        "checked": entry.checked,
        **{key: plain[key] for key in _SHOWN},
    }


_SHOWN = (
    "compiler",
    "device",
    "proof",
    "kernels",
    "launches",
    "copies",
    "host_calls",
    "constant_bytes",
    "arena_bytes",
    "prepared_bytes",
)
